"""A cache of recently read blocks, so that reading evicted values in small steps reads each block once.

Theory of operation. A block is found by a seqno inside it, copied out of the storage and checked. That is too expensive
for a single value, and values that are read together are mostly stored together. So the last few blocks are kept, up to
a limit in bytes. The bytes of a stored block never change, but a commit may replace or drop the block, and after a
rollback other changes get the same seqnos. ``forget`` drops the blocks that a commit has touched, before any value
stored with that commit can be evicted. A block that was read while a commit ran is not kept.
"""

import struct
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from upriver.engine.storage.interface import Block, Storage
from upriver.errors import CorruptData
from upriver.model import PREFIX, SEQNO_OFFSET

#: Some 32 blocks.
CACHE_BYTES_MAX: Final = 8 * 2**20

_SEQNO: Final = struct.Struct(">Q")


class BlockCache:
    """The blocks of one storage, for one reader and one writer."""

    def __init__(self, storage: Storage, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._storage = storage
        self._bytes_max = bytes_max
        #: By vbucket and the first seqno in the block; the last one used comes last.
        self._kept: OrderedDict[tuple[int, int], Block] = OrderedDict()
        self._lock = threading.Lock()
        self._commits = 0
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def block(self, vbucket: int, seqno: int) -> Block:
        """The block that holds the change; raises ``CorruptData`` if there is none."""
        with self._lock:
            for key in reversed(self._kept):
                if key[0] == vbucket and key[1] <= seqno <= self._kept[key].upto:
                    self._kept.move_to_end(key)
                    self.hits += 1
                    return self._kept[key]
            commits = self._commits
        self.misses += 1
        found = self._storage.blocks(vbucket, seqno - 1, 1)
        if not found or not found[0].records:
            raise CorruptData(self._storage.path, f"change {seqno} of vbucket {vbucket} is not on disk")
        self._keep(found[0], commits)
        return found[0]

    def forget(self, vbuckets: Collection[int]) -> None:
        """A commit has changed blocks of these vbuckets."""
        if not vbuckets:
            return
        with self._lock:
            self._commits += 1
            for key in [key for key in self._kept if key[0] in vbuckets]:
                self.bytes -= len(self._kept.pop(key).records)

    def _keep(self, block: Block, commits: int) -> None:
        with self._lock:
            if commits != self._commits:
                return
            (first,) = _SEQNO.unpack_from(block.records, PREFIX.size + SEQNO_OFFSET)
            key = block.vbucket, first
            replaced = self._kept.pop(key, None)
            self._kept[key] = block
            self.bytes += len(block.records) - (len(replaced.records) if replaced is not None else 0)
            while self.bytes > self._bytes_max:
                self.bytes -= len(self._kept.popitem(last=False)[1].records)
