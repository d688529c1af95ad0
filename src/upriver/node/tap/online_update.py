"""Online update: try changes on a running node, and revert them.

While it runs, nothing is written to disk, except for changes from before its start. Stopping it writes the changes
since then. Reverting it rolls them back, whichever client wrote them. Consumers notice that, because every vbucket that
was rolled back continues on a new branch.
It is for tests: a crash loses the changes since its start, and writers are refused once the queue to disk is full.
"""

from dataclasses import dataclass
from functools import partial

from upriver.engine import Vbucket
from upriver.errors import InvalidArguments, TemporaryFailure
from upriver.model import VbucketState
from upriver.node.state import NodeState
from upriver.wire.dialects.tap import Control


@dataclass(frozen=True, slots=True)
class _Mark:
    """The state of a vbucket at the start."""

    seqno: int
    uuid: int


class OnlineUpdate:
    """The online update of a node."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._marks: dict[int, _Mark] | None = None

    @property
    def running(self) -> bool:
        """Whether an online update runs."""
        return self._marks is not None

    def control(self, control: Control) -> None:
        """Carry out a control message: start, stop or revert."""
        match control:
            case Control.START_ONLINEUPDATE:
                self.start()
            case Control.STOP_ONLINEUPDATE:
                self.stop()
            case _:
                self.revert()

    def start(self) -> None:
        """Stop writing to disk after the changes so far. Starting twice changes nothing."""
        if self._marks is not None:
            return
        bucket, soon = self._node.bucket, self._node.scheduler.from_thread
        marks = self._marks = {
            vbucket.number: _Mark(vbucket.high_seqno, vbucket.failover_log.newest.vbucket_uuid) for vbucket in bucket
        }
        pause = partial(soon, partial(self._pause, marks))
        bucket.flusher.barrier(pause, lambda _: pause())
        self._warn("started: nothing is written to disk until it is stopped or reverted")

    def _pause(self, marks: dict[int, _Mark]) -> None:
        if self._marks is marks:  # it may have ended, and another one started
            self._node.bucket.flusher.pause()

    def stop(self) -> None:
        """Write all changes since the start."""
        self._check()
        self._end()
        self._warn("stopped: all changes since its start are written to disk")

    def revert(self) -> None:
        """Roll back all changes since the start, or none if that is impossible."""
        marks = self._check()
        changed = [(vbucket, self._target(vbucket, marks)) for vbucket in self._node.bucket]
        for vbucket, seqno in changed:
            _cut_back(vbucket, seqno)
        self._end()
        self._warn("reverted: all changes since its start are rolled back")

    def _target(self, vbucket: Vbucket, marks: dict[int, _Mark]) -> int:
        mark = marks.get(vbucket.number)
        if mark is None:  # it was created since
            return 0
        known = vbucket.failover_log.index(mark.uuid) is not None
        if mark.seqno and not (known and vbucket.consistent_at_or_below(mark.seqno) == mark.seqno):
            raise TemporaryFailure(
                f"vbucket {vbucket.number} no longer has its state from before the online update: stop it instead",
                vbucket=vbucket.number,
            )
        return mark.seqno

    def _check(self) -> dict[int, _Mark]:
        if self._marks is None:
            raise InvalidArguments("no online update runs")
        return self._marks

    def _end(self) -> None:
        self._marks = None
        self._node.bucket.flusher.resume()

    def _warn(self, what: str) -> None:
        self._node.log.warning("online update %s; use it in tests only", what)


def _cut_back(vbucket: Vbucket, seqno: int) -> None:
    if vbucket.high_seqno == seqno:
        return
    state = vbucket.state
    if state is VbucketState.ACTIVE:
        vbucket.set_state(VbucketState.REPLICA)
    vbucket.roll_back(seqno)
    vbucket.set_state(state)
