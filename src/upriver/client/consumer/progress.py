"""The progress of a consumer in a vbucket: everything needed to resume, in this process or another.

Beside the position this is the failover log of the consumer's branch, because `upr` and the drafts must name an entry
of it, and the first consistent point since the start at 0. A consumer that is rolled back below that point has never
held a consistent state there, and starts over.
"""

from dataclasses import dataclass
from typing import Any, Final

from upriver.errors import PositionError
from upriver.model import NO_END, FailoverEntry, FailoverLog, Snapshot, StreamPosition


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a consumer in one vbucket."""

    position: StreamPosition
    failover_log: FailoverLog
    #: The first consistent point since the start at 0; None before there is one.
    consistent_from: int | None = None

    @classmethod
    def beginning(cls) -> "Progress":
        """Nothing received yet."""
        return _BEGINNING

    @classmethod
    def at(cls, position: StreamPosition, consistent_from: int | None = None) -> "Progress":
        """At a position whose earlier history is unknown."""
        if position.seqno == 0:
            return _BEGINNING
        log = FailoverLog((FailoverEntry(position.vbucket_uuid, 0),))
        return cls(position, log, position.consistent_seqno if consistent_from is None else consistent_from)

    @classmethod
    def unplaced(cls, log: FailoverLog) -> "Progress":
        """Somewhere on this branch: `tap` has no seqnos, and only the source knows what was acknowledged."""
        return cls(StreamPosition.at(log.newest.vbucket_uuid, 0), log, NO_END)

    @property
    def is_unplaced(self) -> bool:
        """Whether changes were received at an unknown position."""
        return self.consistent_from == NO_END

    def moved(self, position: StreamPosition) -> "Progress":
        """The progress at a later position of the same branch."""
        consistent_from = self.consistent_from
        if consistent_from is None and position.seqno and position.consistent_seqno == position.seqno:
            consistent_from = position.seqno
        return Progress(position, self.failover_log, consistent_from)

    def as_json(self) -> list[Any]:
        """The progress as JSON values."""
        position, snapshot = self.position, self.position.snapshot
        entries = [[entry.vbucket_uuid, entry.seqno] for entry in self.failover_log]
        consistent_from = -1 if self.consistent_from is None else self.consistent_from
        return [position.vbucket_uuid, position.seqno, snapshot.start, snapshot.end, consistent_from, entries]

    @classmethod
    def from_json(cls, value: Any) -> "Progress":
        """Read what ``as_json`` returned; raises PositionError if it is invalid."""
        try:
            uuid, seqno, start, end, consistent_from, entries = value
            if not all(type(number) is int and -1 <= number <= NO_END for number in value[:5]):
                raise PositionError(f"invalid numbers in the position {value!r}")
            log = FailoverLog(tuple(FailoverEntry(int(entry[0]), int(entry[1])) for entry in entries))
            return cls(
                StreamPosition(uuid, seqno, Snapshot(start, end)), log, None if consistent_from < 0 else consistent_from
            )
        except (TypeError, ValueError, IndexError) as error:
            raise PositionError(f"invalid position {value!r}: {error}") from None


_BEGINNING: Final = Progress(StreamPosition.beginning(), FailoverLog.fresh(0))
