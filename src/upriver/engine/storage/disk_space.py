"""How much of the data file is in use, and how fast writers may fill it.

Theory of operation. The file holds what is *needed* (live items and retained history) and a *backlog*: groups that no
checkpoint has moved yet, and garbage that compaction has not removed yet. Checkpoints and compaction work with every
commit, at least as fast as writers write, but they begin late and a burst of writes is faster than the disk. So the
queue of changes that wait for the disk is shortened as the backlog grows: beyond its limit each commit takes only a few
megabytes of new changes, and more than that of the backlog. Writers get temporary failures meanwhile.

The limit leaves room for LMDB's free pages: it reuses pages two commits after they were freed, and a block or a group
needs pages side by side.
"""

from collections import Counter
from typing import Final

from upriver.engine.storage.interface import Storage
from upriver.engine.table import Ledger

#: The backlog may have this size plus this share of what is needed.
BACKLOG_BYTES: Final = 64 * 2**20
BACKLOG_SHARE: Final = 0.5
#: A queue takes this share of what is left of that: it becomes one group, which needs pages side by side.
QUEUE_SHARE: Final = 0.125
#: The shortest and the longest queue, unless a shorter one was asked for. A group of the longest is gathered in some
#: milliseconds, in which nothing else runs.
QUEUE_BYTES_LEAST: Final = 2 * 2**20
QUEUE_BYTES_MOST: Final = 16 * 2**20


class DiskSpace:
    """The space of one bucket's data file."""

    def __init__(self, storage: Storage, ledger: Ledger) -> None:
        self._storage = storage
        self._ledger = ledger
        #: The longest queue; 0 for no limit at all.
        self._queue_bytes_max = ledger.queue_bytes_max
        #: What the blocks took after the last commit.
        self._blocks_bytes = storage.blocks_bytes()
        #: Bytes of records in blocks that memory has dropped, by number of the vbucket.
        self._garbage: Counter[int] = Counter()

    @property
    def garbage_bytes(self) -> int:
        """What compaction can remove."""
        return self._garbage.total()

    @property
    def needed_bytes(self) -> int:
        """What the blocks would hold without garbage."""
        return max(0, self._blocks_bytes - self.garbage_bytes)

    def dropped(self, vbucket: int, size: int) -> None:
        """Memory has dropped records that are in blocks."""
        self._garbage[vbucket] += size

    def garbage_of(self, vbucket: int) -> int:
        """The garbage in the blocks of a vbucket."""
        return self._garbage[vbucket]

    def reclaimed(self, vbucket: int, size: int) -> None:
        """Compaction has removed records; counts are estimates, and never below 0."""
        self._garbage[vbucket] = max(0, self._garbage[vbucket] - size)

    def cleared(self, vbucket: int) -> None:
        """A vbucket has no blocks any more."""
        self._garbage.pop(vbucket, None)

    def pace(self, group_bytes: int) -> None:
        """After a commit: set how much may wait for the disk, now that the groups have this size."""
        self._blocks_bytes = self._storage.blocks_bytes()
        if not self._queue_bytes_max or not self._storage.keeps_records:
            return
        limit = BACKLOG_BYTES + int(BACKLOG_SHARE * self.needed_bytes)
        room = limit - self.garbage_bytes - group_bytes
        queue = min(QUEUE_BYTES_MOST, max(QUEUE_BYTES_LEAST, int(QUEUE_SHARE * room)))
        self._ledger.queue_bytes_max = min(self._queue_bytes_max, queue)
