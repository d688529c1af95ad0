"""Checkpoint ids: the numbers that TAP-era tools use for places in a vbucket's history.

Streams use checkpoints too: a snapshot does not reach beyond the end of a checkpoint, so a version that was superseded
only in a later checkpoint is still sent. A checkpoint is closed on request, and when it has become large or old.

A vbucket always has one open checkpoint. Closing it opens the next. A closed checkpoint counts as persisted when all
changes that it covers are on disk.

A TAP client that names the newest checkpoint that it has continues where that one begins. So an id must never mean
another place in the history, on this copy or on another: each copy numbers its checkpoints from an id that no other
copy uses, because it is made of the time and a random number. After a flush or a rollback the ids go on, and those from
before are forgotten: a client that names one may hold changes that no longer exist. Nothing is stored: a restarted node
does not know which ids it has given out, and starts from a new id.
"""

import secrets
from bisect import bisect_left, bisect_right
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from upriver.engine.table import Table

#: The low bits of a first id are random, for copies that are created in the same millisecond.
_RANDOM_BITS: Final = 20
#: A checkpoint with this many changes is closed, and so is one that has been open for this long.
CHANGES_MAX: Final = 10_000
AGE_S_MAX: Final = 600.0
#: This many ends are remembered; a stream that is further behind gets larger snapshots.
_ENDS_MAX: Final = 1000


def first_id(now: float) -> int:
    """An id that no copy has used before and that no other will reach by closing checkpoints; never 0."""
    return (int(now * 1000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)) + 1


class Checkpoints:
    """The checkpoints of one vbucket."""

    __slots__ = (
        "_closed",
        "_end_seqno",
        "_ended_ids",
        "_ends",
        "_first_id",
        "_first_seqno",
        "_last_closed_id",
        "_open_id",
        "_opened_at",
        "_persisted_id",
        "_table",
    )

    def __init__(self, table: "Table") -> None:
        self._table = table
        self.begin()

    def begin(self) -> None:
        """Number the checkpoints from an unused id on; the first begins at the end of the history."""
        self._last_closed_id = self._persisted_id = 0
        self._open_first(first_id(self._table.ledger.clock()))

    def cut(self) -> None:
        """The history was cut: changes of earlier checkpoints may no longer exist."""
        self._last_closed_id = self._open_id
        self._open_first(self._open_id + 1)

    def _open_first(self, open_id: int) -> None:
        """Open a checkpoint at the end of the history, and forget all others."""
        self._open_id = self._first_id = open_id
        #: Where the first known checkpoint begins.
        self._first_seqno = self._table.high_seqno
        #: The end of the newest closed checkpoint; then the ends and ids of the checkpoints that hold changes.
        self._end_seqno = self._table.high_seqno
        self._ends: deque[int] = deque(maxlen=_ENDS_MAX)
        self._ended_ids: deque[int] = deque(maxlen=_ENDS_MAX)
        self._opened_at: float | None = None
        #: Ids and last seqnos of the closed checkpoints that were not yet seen on disk.
        self._closed: deque[tuple[int, int]] = deque()

    @property
    def open_id(self) -> int:
        """The id of the open checkpoint."""
        self._refresh()
        return self._open_id

    @property
    def last_closed_id(self) -> int:
        """The id of the newest closed checkpoint; 0 if none was closed since they are numbered."""
        return self._last_closed_id

    @property
    def persisted_id(self) -> int:
        """The id of the newest closed checkpoint that is completely on disk; 0 for none."""
        self._refresh()
        return self._persisted_id

    def create(self) -> int:
        """Close the open checkpoint and open the next; return its id."""
        self._refresh()
        self._end_seqno = self._table.high_seqno
        self._closed.append((self._open_id, self._end_seqno))
        if self._end_seqno > (self._ends[-1] if self._ends else self._first_seqno):
            if len(self._ends) == _ENDS_MAX:
                self._first_id, self._first_seqno = self._ended_ids[0] + 1, self._ends[0]
            self._ends.append(self._end_seqno)
            self._ended_ids.append(self._open_id)
        self._last_closed_id = self._open_id
        self._open_id += 1
        self._opened_at = None
        return self._open_id

    def close_if_due(self, now: float) -> None:
        """Close a checkpoint that has become too large or too old."""
        self._refresh()
        changes = self._table.high_seqno - self._end_seqno
        if not changes:
            self._opened_at = None
        elif self._opened_at is None:
            self._opened_at = now
        if changes >= CHANGES_MAX or (self._opened_at is not None and now - self._opened_at >= AGE_S_MAX):
            self.create()

    def end_after(self, seqno: int) -> int | None:
        """Where the checkpoint ends that holds the change after ``seqno``; None if it is the open one."""
        self._refresh()
        at = bisect_right(self._ends, seqno)
        return self._ends[at] if at < len(self._ends) else None

    def id_after(self, seqno: int) -> int:
        """The id of the checkpoint that holds the change after ``seqno``."""
        self._refresh()
        if seqno < self._first_seqno:
            return self._first_id - 1
        at = bisect_right(self._ends, seqno)
        return self._ended_ids[at] if at < len(self._ends) else self._open_id

    def start_of(self, checkpoint: int) -> int | None:
        """The seqno after which this checkpoint begins; None if it is not known."""
        if not self._first_id <= checkpoint <= self._open_id:
            return None
        at = bisect_left(self._ended_ids, checkpoint)
        if at == len(self._ends):
            return self._end_seqno
        return self._ends[at - 1] if at else self._first_seqno

    def around(self, seqno: int) -> tuple[bool, int | None]:
        """Whether a checkpoint begins after this seqno, and where the checkpoint ends that holds the next change.

        The first checkpoint begins with the history; the open one has no end.
        """
        if not self._ends:  # true for most vbuckets, and asked for each live change
            return seqno == 0, None
        self._refresh()
        ends = self._ends
        at = bisect_right(ends, seqno)
        return seqno == 0 or (at > 0 and ends[at - 1] == seqno), ends[at] if at < len(ends) else None

    def _refresh(self) -> None:
        """Note which closed checkpoints are on disk."""
        while self._closed and self._closed[0][1] <= self._table.persisted_seqno:
            self._persisted_id = self._closed.popleft()[0]
