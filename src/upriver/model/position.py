"""Where a consumer stands in a stream, in a form that cannot be wrong."""

from dataclasses import dataclass

from upriver.errors import PositionError

#: "No end": stream until told otherwise.
NO_END = 2**64 - 1
#: No history gets there; whoever tells of such a seqno would leave no room for what follows it.
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

    @classmethod
    def beginning(cls) -> "StreamPosition":
        """Nothing received yet, from any branch."""
        return cls(0, 0, Snapshot(0, 0))

    @classmethod
    def at(cls, vbucket_uuid: int, seqno: int) -> "StreamPosition":
        """Everything up to ``seqno`` is held whole."""
        return cls(vbucket_uuid, seqno, Snapshot(seqno, seqno))

    @property
    def consistent_seqno(self) -> int:
        """The last seqno at which the receiver's state is a state that the sender once had.

        In the middle of a snapshot the receiver holds a mixture: some keys are new already, while older
        versions of others were left out because they change again further on.
        """
        return self.seqno if self.seqno == self.snapshot.end else self.snapshot.start

    def announced(self, marker: Snapshot) -> "StreamPosition":
        """After a snapshot marker: what a receiver keeps as bounds (docs/semantics.md).

        The start is not later than what was held whole, and an unfinished snapshot must still be finished:
        the state is whole again only at the larger of both ends.
        """
        whole = self.consistent_seqno
        end = marker.end if whole == self.seqno else max(marker.end, self.snapshot.end)
        start = min(marker.start, whole)
        if end < self.seqno:
            raise PositionError(f"a snapshot that ends at {end} comes after change {self.seqno}")
        return StreamPosition(self.vbucket_uuid, self.seqno, Snapshot(start, end))

    def advanced(self, seqno: int) -> "StreamPosition":
        """After the change ``seqno``, which must follow and lie in the announced snapshot."""
        if not self.seqno < seqno <= self.snapshot.end:
            raise PositionError(
                f"change {seqno} does not follow {self.seqno} inside a snapshot that ends at {self.snapshot.end}"
            )
        return StreamPosition(self.vbucket_uuid, seqno, self.snapshot)
