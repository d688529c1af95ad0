"""Find the old versions of changed keys in the data files of a table.

Only the key list of the part and key indexes are read, never the node, and data files only if an index must be built
again. So the same part can be located again after a conflict, in the files that the table has then.

Copies of indexes from an object store stay in the cache while the table has their files.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from upriver.tables.actions import Add
from upriver.tables.data_files.data_file import bitmap_of, serialised
from upriver.tables.key_index import HashKeys, KeyIndex, hash_keys, sidecar_path
from upriver.tables.keys.entries import NO_VBUCKET, vbuckets_of
from upriver.tables.keys.key_list import KeyList
from upriver.tables.storage import TableStorage

#: Copies that the table does not need are removed from a cache after this time: other tasks may use them still.
UNUSED_S: Final = 3600.0


def locate(
    storage: TableStorage,
    files: Sequence[Add],
    keys: str,
    replaced: Collection[int],
    cache: Path,
    *,
    hashing: HashKeys = hash_keys,
) -> dict[str, bytes]:
    """The rows that a part replaces: for each file that has some, a serialised bitmap of their positions.

    ``keys`` is the path of the part's key list, empty if the part changes nothing. All rows of the vbuckets in
    ``replaced``, and of those that the key list names as replaced, are included. Rows that the file's deletion vector
    hides already may be included too.
    """
    if not keys:
        return {}
    wanted = KeyList.open(storage, keys, cache)
    ranges = {file.path: _vbucket_range(file) for file in files}
    found: defaultdict[str, BitMap] = defaultdict(BitMap)

    def search(vbuckets: Collection[int], find: Callable[[KeyIndex], NDArray[np.uint32]]) -> None:
        """Look into all files that may have these vbuckets, one at a time, so that few indexes are in memory."""
        numbers = np.array(sorted(vbuckets), np.int64)
        for path, (low, high) in ranges.items():
            if np.searchsorted(numbers, low, "left") < np.searchsorted(numbers, high, "right"):
                positions = find(KeyIndex.open(storage, path, wanted.seed, cache, hashing=hashing))
                if len(positions):
                    found[path] |= bitmap_of(positions)

    whole = {*replaced, *wanted.replaced}
    search(whole, lambda index: np.concatenate([index.slice(vbucket) for vbucket in whole]))
    for hashes in wanted.hashes(storage, cache, hashing=hashing):
        search(vbuckets_of(hashes), lambda index, hashes=hashes: index.find(hashes)[1])  # type: ignore[misc]
    if storage.local() is None:
        _clean(storage.fetched(keys, cache).parent, {Path(sidecar_path(path)).name for path in ranges})
    return {path: serialised(positions) for path, positions in found.items()}


def _clean(folder: Path, needed: Collection[str]) -> None:
    """Remove old copies of key lists, and of indexes whose files the table has no longer."""
    before = time.time() - UNUSED_S
    for copy in folder.iterdir():
        with contextlib.suppress(OSError):  # another task may have removed it
            if copy.name not in needed and copy.stat().st_mtime < before:
                copy.unlink()


def _vbucket_range(file: Add) -> tuple[float, float]:
    """The lowest and the highest vbucket that a file may have.

    Files of foreign writers may lack statistics, and may have rows without a valid vbucket.
    """
    low, high, nulls = (
        (file.statistics.get(name) or {}).get("_vbucket") for name in ("minValues", "maxValues", "nullCount")
    )
    if low is None or high is None or nulls != 0 or not 0 <= low <= high < NO_VBUCKET:
        return -np.inf, np.inf
    return low, high
