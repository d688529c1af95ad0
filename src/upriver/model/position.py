"""The position of a consumer in a stream; impossible positions cannot be constructed."""

from dataclasses import dataclass

from upriver.errors import PositionError

#: "No end": stream until told otherwise.
NO_END = 2**64 - 1
#: The highest seqno that we accept, so that there is always room for later changes.
SEQNO_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A range of history in which each key appears once.

    ``start`` is exclusive: the last seqno before the snapshot. (With an inclusive start a consumer that is
    cut off in mid-snapshot and resumes after a failover can lose a key.)
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end <= NO_END:
            raise PositionError(f"a snapshot cannot reach from {self.start} to {self.end}")

    def __contains__(self, seqno: int) -> bool:
        return self.start < seqno <= self.end


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The last change received, the snapshot it lies in, and the branch that it was received on."""

    vbucket_uuid: int
    seqno: int
    snapshot: Snapshot

    def __post_init__(self) -> None:
        if not self.snapshot.start <= self.seqno <= self.snapshot.end:
            raise PositionError(
                f"seqno {self.seqno} lies outside its snapshot ({self.snapshot.start}, {self.snapshot.end}]"
            )

    def __str__(self) -> str:
        if not self.seqno:
            return "the beginning"
        consistent = "" if self.consistent_seqno == self.seqno else f" (consistent at {self.consistent_seqno})"
        return f"seqno {self.seqno} of uuid {self.vbucket_uuid:#x}{consistent}"

    @classmethod
    def beginning(cls) -> "StreamPosition":
        """Nothing received yet, from any branch."""
        return cls(0, 0, Snapshot(0, 0))

    @classmethod
    def at(cls, vbucket_uuid: int, seqno: int) -> "StreamPosition":
        """Consistent at ``seqno``."""
        return cls(vbucket_uuid, seqno, Snapshot(seqno, seqno))

    @property
    def consistent_seqno(self) -> int:
        """The last consistent seqno: the receiver's state there is a state that the sender once had.

        Inside a snapshot the receiver holds a mixture: some keys are new already, while older versions of other keys
        were left out because they change again further on.
        """
        return self.seqno if self.seqno == self.snapshot.end else self.snapshot.start

    def announced(self, marker: Snapshot) -> "StreamPosition":
        """The position after a snapshot marker (docs/semantics.md).

        The start is not later than the last consistent seqno, and an unfinished snapshot must still be finished: the
        state is consistent again only at the larger of both ends.
        """
        consistent = self.consistent_seqno
        end = marker.end if consistent == self.seqno else max(marker.end, self.snapshot.end)
        start = min(marker.start, consistent)
        if end < self.seqno:
            raise PositionError(f"the snapshot ends at {end}, before the last change {self.seqno}")
        return StreamPosition(self.vbucket_uuid, self.seqno, Snapshot(start, end))

    def advanced(self, seqno: int) -> "StreamPosition":
        """The position after the change ``seqno``, which must follow and lie in the announced snapshot."""
        if not self.seqno < seqno <= self.snapshot.end:
            raise PositionError(
                f"change {seqno} does not follow {self.seqno} inside a snapshot that ends at {self.snapshot.end}"
            )
        return StreamPosition(self.vbucket_uuid, seqno, self.snapshot)
