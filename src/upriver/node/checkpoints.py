"""Checkpoint ids: the numbers that TAP-era tools use to talk about places in a vbucket's history.

Streams know them too: a snapshot does not reach beyond the end of a checkpoint, so that what was superseded only in a
later one is sent. A checkpoint is closed on request, and when it has become large or old.

A vbucket always has one open checkpoint; the first has the id 1. Closing it opens the next. A closed one counts as
persisted when all changes that it covers are on disk. The ids live as long as the node and the vbucket's history do:
after a restart, a flush or a rollback below what was closed they begin anew.
"""

from bisect import bisect_right
from collections import deque
from weakref import ReferenceType, ref

from upriver.engine import Vbucket

FIRST_ID = 1
#: A checkpoint of so many changes is closed, and so is one that was opened so long ago.
CHANGES_MAX = 10_000
AGE_S_MAX = 600.0
#: So many ends are remembered; a stream that is further behind gets larger snapshots.
_ENDS_MAX = 1000


class _Ids:
    """The checkpoints of one vbucket."""

    __slots__ = ("closed", "end_seqno", "ended_ids", "ends", "open_id", "opened_at", "persisted_id", "vbucket")

    def __init__(self, vbucket: Vbucket) -> None:
        #: Another vbucket may have taken its number since.
        self.vbucket: ReferenceType[Vbucket] = ref(vbucket)
        self.open_id = FIRST_ID
        self.persisted_id = FIRST_ID - 1
        #: Where the newest closed checkpoint ends, and those before it.
        self.end_seqno = 0
        self.ends: deque[int] = deque(maxlen=_ENDS_MAX)
        self.ended_ids: deque[int] = deque(maxlen=_ENDS_MAX)
        self.opened_at: float | None = None
        #: Ids and last seqnos of the closed checkpoints that were not yet seen on disk.
        self.closed: deque[tuple[int, int]] = deque()


class Checkpoints:
    """The checkpoints of all vbuckets."""

    def __init__(self) -> None:
        self._by_number: dict[int, _Ids] = {}

    def open_id(self, vbucket: Vbucket) -> int:
        """The id of the open checkpoint."""
        return self._current(vbucket).open_id

    def last_closed_id(self, vbucket: Vbucket) -> int:
        """The id of the newest closed checkpoint; 0 if none was ever closed."""
        return self._current(vbucket).open_id - 1

    def persisted_id(self, vbucket: Vbucket) -> int:
        """The id of the newest closed checkpoint that is on disk as a whole; 0 for none."""
        return self._current(vbucket).persisted_id

    def create(self, vbucket: Vbucket) -> int:
        """Close the open checkpoint and open the next; its id."""
        ids = self._current(vbucket)
        ids.end_seqno = vbucket.high_seqno
        ids.closed.append((ids.open_id, ids.end_seqno))
        if not ids.ends or ids.end_seqno > ids.ends[-1]:
            ids.ends.append(ids.end_seqno)
            ids.ended_ids.append(ids.open_id)
        ids.open_id += 1
        ids.opened_at = None
        return ids.open_id

    def close_if_due(self, vbucket: Vbucket, now: float) -> None:
        """Close a checkpoint that has become too large or too old."""
        ids = self._current(vbucket)
        changes = vbucket.high_seqno - ids.end_seqno
        if not changes:
            ids.opened_at = None
        elif ids.opened_at is None:
            ids.opened_at = now
        if changes >= CHANGES_MAX or (ids.opened_at is not None and now - ids.opened_at >= AGE_S_MAX):
            self.create(vbucket)

    def end_after(self, vbucket: Vbucket, seqno: int) -> int | None:
        """Where the checkpoint ends that holds the change after ``seqno``; None if it is the open one."""
        ends = self._current(vbucket).ends
        at = bisect_right(ends, seqno)
        return ends[at] if at < len(ends) else None

    def id_after(self, vbucket: Vbucket, seqno: int) -> int:
        """The id of the checkpoint that holds the change after ``seqno``."""
        ids = self._current(vbucket)
        at = bisect_right(ids.ends, seqno)
        return ids.ended_ids[at] if at < len(ids.ends) else ids.open_id

    def around(self, vbucket: Vbucket, seqno: int) -> tuple[bool, int | None]:
        """Does a checkpoint begin after this seqno, and where does the one end that holds the next change?

        The first one begins with the history; the open one has no end.
        """
        ids = self._by_number.get(vbucket.number)
        if (
            ids is not None and not ids.ends and ids.vbucket() is vbucket
        ):  # as it is for most, and asked for each change
            return seqno == 0, None
        ends = self._current(vbucket).ends
        at = bisect_right(ends, seqno)
        return seqno == 0 or (at > 0 and ends[at - 1] == seqno), ends[at] if at < len(ends) else None

    def _current(self, vbucket: Vbucket) -> _Ids:
        ids = self._by_number.get(vbucket.number)
        if ids is None or ids.end_seqno > vbucket.high_seqno or ids.vbucket() is not vbucket:
            ids = self._by_number[vbucket.number] = _Ids(vbucket)
        while ids.closed and ids.closed[0][1] <= vbucket.persisted_seqno:
            ids.persisted_id = ids.closed.popleft()[0]
        return ids
