"""Online update: try something out on a running node, and take it back.

While it runs nothing is written to disk, once what came before is there: whoever waits for that is answered. Stopping
it writes what has come, reverting it takes back everything that was written since, by whomever, and tells consumers so,
because every vbucket that was cut back goes on under a new uuid.
It is for tests: what is written meanwhile is lost in a crash, and writers are refused once the queue to disk is full.
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
    """Where a vbucket stood."""

    seqno: int
    uuid: int


class OnlineUpdate:
    """The online update of a node, if one runs."""

    def __init__(self, node: NodeState) -> None:
        self._node = node
        self._marks: dict[int, _Mark] | None = None

    @property
    def running(self) -> bool:
        """Is nothing written to disk?"""
        return self._marks is not None

    def control(self, control: Control) -> None:
        """Start, stop or revert."""
        match control:
            case Control.START_ONLINEUPDATE:
                self.start()
            case Control.STOP_ONLINEUPDATE:
                self.stop()
            case _:
                self.revert()

    def start(self) -> None:
        """Write no more to disk than what came before. Starting twice changes nothing."""
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
        if self._marks is marks:  # it may have ended meanwhile, and another one begun
            self._node.bucket.flusher.pause()

    def stop(self) -> None:
        """Write everything that has come meanwhile."""
        self._check()
        self._end()
        self._warn("stopped: what has come meanwhile is written to disk")

    def revert(self) -> None:
        """Take back everything that was written since the start; all of it or, if that cannot be, nothing."""
        marks = self._check()
        changed = [(vbucket, self._target(vbucket, marks)) for vbucket in self._node.bucket]
        for vbucket, seqno in changed:
            _cut_back(vbucket, seqno)
        self._end()
        self._warn("reverted: everything written since its start is gone")

    def _target(self, vbucket: Vbucket, marks: dict[int, _Mark]) -> int:
        mark = marks.get(vbucket.number)
        if mark is None:  # it came into being since
            return 0
        known = vbucket.failover_log.index(mark.uuid) is not None
        if mark.seqno and not (known and vbucket.consistent_at_or_below(mark.seqno) == mark.seqno):
            raise TemporaryFailure(
                f"the state before the online update is no longer there: stop it instead (vbucket {vbucket.number})",
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
        self._node.log.warning("online update, which is meant for tests, %s", what)


def _cut_back(vbucket: Vbucket, seqno: int) -> None:
    if vbucket.high_seqno == seqno:
        return
    state = vbucket.state
    if state is VbucketState.ACTIVE:
        vbucket.set_state(VbucketState.REPLICA)
    vbucket.roll_back(seqno)
    vbucket.set_state(state)
