"""Checkpoint ids: the numbers that TAP-era tools use to talk about places in a vbucket's history.

A vbucket always has one open checkpoint; the first has the id 1. Closing it opens the next. A closed one counts as
persisted when all changes that it covers are on disk. The ids live as long as the node and the vbucket's history do:
after a restart, a flush or a rollback below what was closed they begin anew.
"""

from collections import deque
from weakref import WeakKeyDictionary

from upriver.engine import Vbucket

FIRST_ID = 1


class _Ids:
    """The checkpoints of one vbucket."""

    __slots__ = ("closed", "end_seqno", "open_id", "persisted_id")

    def __init__(self) -> None:
        self.open_id = FIRST_ID
        self.persisted_id = FIRST_ID - 1
        #: Where the newest closed checkpoint ends.
        self.end_seqno = 0
        #: Ids and last seqnos of the closed checkpoints that were not yet seen on disk.
        self.closed: deque[tuple[int, int]] = deque()


class Checkpoints:
    """The checkpoints of all vbuckets."""

    def __init__(self) -> None:
        self._by_vbucket: WeakKeyDictionary[Vbucket, _Ids] = WeakKeyDictionary()

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
        ids.open_id += 1
        return ids.open_id

    def _current(self, vbucket: Vbucket) -> _Ids:
        ids = self._by_vbucket.get(vbucket)
        if ids is None or ids.end_seqno > vbucket.high_seqno:
            ids = self._by_vbucket[vbucket] = _Ids()
        while ids.closed and ids.closed[0][1] <= vbucket.persisted_seqno:
            ids.persisted_id = ids.closed.popleft()[0]
        return ids
