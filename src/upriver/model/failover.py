"""The failover log: the branches of history of a copy of a vbucket.

Each entry says "from this seqno on, history was written under this uuid". The newest comes first. A
consumer that knows the uuid of an older entry shares its history with the producer up to the smallest
seqno at which a newer branch began, and not a change further.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from upriver.errors import PositionError
from upriver.model.position import SEQNO_MAX

#: Beyond this many, older entries are forgotten; their consumers start again from 0.
ENTRIES_MAX = 25
#: Vbucket uuids are random numbers of this many bits and never 0.
UUID_BITS = 48


@dataclass(frozen=True, slots=True)
class FailoverEntry:
    """History after ``seqno`` was written under ``vbucket_uuid``."""

    vbucket_uuid: int
    seqno: int


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """Entries, newest first; never empty."""

    entries: tuple[FailoverEntry, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise PositionError("a failover log has at least one entry")

    @classmethod
    def fresh(cls, vbucket_uuid: int) -> "FailoverLog":
        """The log of a vbucket that starts at seqno 0 under this uuid."""
        return cls((FailoverEntry(vbucket_uuid, 0),))

    @classmethod
    def received(cls, entries: Iterable[FailoverEntry]) -> "FailoverLog":
        """The log of a peer, shortened to our maximum; raises if an entry is invalid."""
        log = cls(tuple(islice(entries, ENTRIES_MAX)))
        for entry in log:
            if not entry.vbucket_uuid or entry.seqno > SEQNO_MAX:
                raise PositionError(f"invalid failover log entry: uuid {entry.vbucket_uuid} at seqno {entry.seqno}")
        return log

    def __iter__(self) -> Iterator[FailoverEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def newest(self) -> FailoverEntry:
        return self.entries[0]

    def branch(self, vbucket_uuid: int, seqno: int) -> "FailoverLog":
        """The log after a new branch begins at ``seqno``."""
        entries = (FailoverEntry(vbucket_uuid, seqno), *self.entries)
        return FailoverLog(entries[:ENTRIES_MAX])

    def index(self, vbucket_uuid: int) -> int | None:
        """The index of a uuid, 0 for the newest; None if it is unknown."""
        for place, entry in enumerate(self.entries):
            if entry.vbucket_uuid == vbucket_uuid:
                return place
        return None

    def upper(self, place: int, high_seqno: int) -> int:
        """The last seqno that a holder of the entry at ``place`` shares with us (docs/semantics.md).

        Not simply the next newer entry's seqno: a promotion inside a snapshot branches below an older
        entry, so the smallest of all newer ones counts, and never more than what we hold ourselves.
        """
        return min([high_seqno, *(entry.seqno for entry in self.entries[:place])])
