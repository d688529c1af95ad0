"""A sink that only records its calls: it keeps positions and logs, as a client does, and no data."""

from collections.abc import Callable

from upriver.errors import NotMyVbucket, TemporaryFailure
from upriver.model import FailoverLog, Snapshot, StreamPosition, VbucketState
from upriver.wire import Dialect, Framer
from upriver.wire.framing import MEMCACHED
from upriver.wire.layout import Buffer


class RecordingCopy:
    """One vbucket that keeps only its position and log."""

    def __init__(self, number: int = 0, position: StreamPosition | None = None, log: FailoverLog | None = None) -> None:
        self.number = number
        self.state = VbucketState.REPLICA
        self.position = position or StreamPosition.beginning()
        self.failover_log = log or FailoverLog.fresh(1)
        self.told: list[str] = []
        self.closed = False
        #: Raised by the next change.
        self.failure: Exception | None = None
        #: How many more changes there is room for.
        self.room: int | None = None

    def begin_snapshot(self, snapshot: Snapshot, flags: int) -> None:
        self.position = self.position.announced(snapshot)
        self.told.append(f"({snapshot.start},{snapshot.end}] 0x{flags:x}")

    def complete_snapshot(self) -> None:
        self.position = StreamPosition.at(self.position.vbucket_uuid, self.position.seqno)
        self.told.append(f"whole at {self.position.seqno}")

    def apply(self, frames: Buffer, dialect: Dialect, last_seqno: int, changes: int) -> None:
        """Keys are named for their seqnos."""
        if self.failure is not None:
            raise self.failure
        framer = Framer(MEMCACHED)
        framer.feed(bytes(frames))
        keys = []
        while packet := framer.next_packet():
            keys.append(dialect.decode(packet).key.decode())  # type: ignore[attr-defined]
        assert len(keys) == changes
        full = self.room is not None and len(keys) > self.room
        if self.room is not None:
            keys, self.room = keys[: self.room], max(0, self.room - len(keys))
        if keys:
            last_seqno = int(keys[-1].removeprefix("k"))
            self.position = StreamPosition(self.position.vbucket_uuid, last_seqno, self.position.snapshot)
            self.told.append(" ".join(keys))
        if full:
            raise TemporaryFailure("no room")

    def advance(self, seqno: int) -> None:
        self.position = self.position.advanced(seqno)
        self.told.append(f"advanced to {seqno}")

    def roll_back(self, seqno: int) -> int:
        self.position = StreamPosition.at(self.position.vbucket_uuid, seqno)
        self.told.append(f"rolled back to {seqno}")
        return seqno

    def check_failover_log(self, log: FailoverLog) -> None:
        pass

    def replace_failover_log(self, log: FailoverLog) -> None:
        self.failover_log = log
        self.position = StreamPosition(log.newest.vbucket_uuid, self.position.seqno, self.position.snapshot)

    def clear(self) -> None:
        self.position = StreamPosition.at(self.position.vbucket_uuid, 0)
        self.told.append("cleared")

    def close(self) -> None:
        self.closed = True


class RecordingSink:
    """Copies that only record, and role changes that reach the disk when a test says so."""

    def __init__(self, *copies: RecordingCopy) -> None:
        self.copies = {copy.number: copy for copy in copies}
        self.waiting: list[Callable[[], object]] = []

    def open(self, number: int) -> RecordingCopy:
        if number not in self.copies:
            raise NotMyVbucket(vbucket=number)
        self.copies[number].closed = False
        return self.copies[number]

    def set_state(self, number: int, state: VbucketState, done: Callable[[], object]) -> None:
        self.copies[number].state = state
        self.waiting.append(done)

    def reach_disk(self) -> None:
        waiting, self.waiting = self.waiting, []
        for done in waiting:
            done()
