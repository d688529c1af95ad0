"""A machine's copy of a vbucket as the holder of a stream: a stand-in for the node's own consumer."""

from tests.simulation.node import Machine
from tests.simulation.truth import Version
from upriver.engine import Vbucket
from upriver.model import Change, FailoverLog, VbucketState


class Copy:
    """Moves a replica by what a stream brings."""

    failed = False

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.number = number

    @property
    def vbucket(self) -> Vbucket:
        return self.machine.vbucket(self.number)

    @property
    def ready(self) -> bool:
        return self.machine.up and self.vbucket.state is not VbucketState.ACTIVE

    @property
    def log(self) -> FailoverLog:
        return self.vbucket.failover_log

    @log.setter
    def log(self, _: None) -> None:
        """The next answer brings another one."""

    @property
    def seqno(self) -> int:
        return self.vbucket.position.seqno

    @property
    def start(self) -> int:
        return self.vbucket.position.snapshot.start

    @property
    def end(self) -> int:
        return self.vbucket.position.snapshot.end

    @property
    def whole(self) -> int:
        return self.vbucket.whole_seqno

    #: The world looks at all copies itself.
    certain = False

    def accept(self, log: FailoverLog) -> bool:
        self.vbucket.replace_failover_log(log)
        return True

    def marker(self, start: int | None, end: int | None) -> None:
        assert start is not None
        assert end is not None
        self.vbucket.begin_snapshot(start, end)

    def change(self, found: Version, *, every_version: bool = False) -> None:
        self.vbucket.apply(
            Change(
                vbucket=self.number,
                event=found.event,
                seqno=found.seqno,
                rev_seqno=found.rev_seqno,
                cas=found.cas,
                flags=found.flags,
                expiry=found.expiry,
                key=found.key,
                value=found.value,
            )
        )

    def advanced(self, seqno: int) -> None:
        self.vbucket.advance(seqno)

    def ended_ok(self, end: int) -> None:
        """Only `upr` needs it."""

    def clear(self) -> None:
        self.vbucket.clear()

    def roll_back(self, seqno: int) -> bool:
        self.vbucket.roll_back(seqno)
        return True
