"""The key index of a data file: where each key's row is, and which rows a vbucket has.

An index has one 16-byte entry per row (``keys.entries``), sorted, in a *sidecar* in the hidden folder. It is mapped
into memory from the local disk; from an object store it is fetched into a cache directory first. The index is only a
cache: if the sidecar is missing, damaged, or made with another seed or version, it is built again from the key columns
of the data file. So deleting sidecars is harmless, and so is an OPTIMIZE by another program, whose files have none.

A sidecar written with its data file lists live rows only; one that was built again lists all rows. Rows that a deletion
vector hides later stay listed. A position that an index returns may therefore be dead already.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from upriver.tables.data_files.arrays import integers, is_valid
from upriver.tables.deletion_vectors import HIDDEN
from upriver.tables.keys.entries import (
    NO_VBUCKET,
    Entries,
    find_entries,
    hash_keys,
    positions_of,
    slice_of,
)
from upriver.tables.keys.entry_file import EntryWriter, open_entries
from upriver.tables.keys.sorted_runs import SortedRuns
from upriver.tables.storage import TableStorage

__all__ = ["NO_VBUCKET", "HashKeys", "KeyIndex", "hash_keys", "sidecar_path", "write_index"]

HashKeys = Callable[[bytes, NDArray[np.uint16], pa.Array, int], Entries]
#: The columns that an index is built from.
KEY_COLUMNS: Final = ("_key", "_raw_key", "_vbucket")
_PLAIN: Final = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
_KIND: Final = b"UPRINDEX"
#: Number of rows to hash at a time.
_ROWS: Final = 1 << 16


def sidecar_path(path: str) -> str:
    """The name of a data file's sidecar."""
    return f"{HIDDEN}/{path.rpartition('/')[2]}.idx"


class KeyIndex:
    """The rows of a data file by key and by vbucket."""

    def __init__(self, entries: Entries) -> None:
        #: Sorted.
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    @classmethod
    def open(
        cls, storage: TableStorage, path: str, seed: bytes, cache: Path, *, hashing: HashKeys = hash_keys
    ) -> "KeyIndex":
        """The index of a data file, from its sidecar or built again."""
        sidecar = sidecar_path(path)
        for _ in range(2):
            copy = _fetched(storage, sidecar, cache)
            found = open_entries(copy, _KIND, seed) if copy else None
            if found is not None:
                return cls(found.entries)
            if copy is None or storage.local() is not None:
                break
            copy.unlink(missing_ok=True)  # the copy may be damaged and the sidecar intact
        with SortedRuns() as runs:
            for entries in _hashed(storage, path, seed, hashing):
                runs.add(entries)
            write_index(storage, path, seed, runs.blocks(), cache)
        copy = storage.fetched(sidecar, cache)
        found = open_entries(copy, _KIND, seed)
        if found is None:
            raise AssertionError(f"{sidecar} cannot be read back")
        return cls(found.entries)

    def find(self, hashes: Entries) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """The rows of these keys: numbers of hashes, and the position that belongs to each. Hashes must be sorted."""
        first, last = find_entries(self.entries, hashes)
        counts = last - first
        numbers = np.flatnonzero(counts)
        if not len(numbers):
            return numbers, np.empty(0, np.uint32)
        places, repeats = first[numbers], counts[numbers]
        if repeats.max() > 1:
            numbers, places = np.repeat(numbers, repeats), np.repeat(places, repeats)
            starts = np.cumsum(repeats) - repeats
            places = places + (np.arange(len(places), dtype=np.uint32) - np.repeat(starts, repeats).astype(np.uint32))
        return numbers, positions_of(self.entries[places])

    def slice(self, vbucket: int) -> NDArray[np.uint32]:
        """The rows of a vbucket."""
        return positions_of(slice_of(self.entries, vbucket))


def write_index(
    storage: TableStorage, path: str, seed: bytes, blocks: Iterable[Entries], cache: Path | None = None
) -> None:
    """Write the sidecar of a data file from sorted entries."""
    with new_sidecar(storage, path, cache) as target, contextlib.closing(index_writer(target, seed)) as writer:
        for block in blocks:
            writer.append(block)
        writer.finish()


def new_sidecar(storage: TableStorage, path: str, cache: Path | None = None) -> contextlib.AbstractContextManager[Path]:
    """A local path for the sidecar of a data file. It is not synced: a damaged one is built again."""
    return storage.new_file(sidecar_path(path), durable=False, cache=cache)


def index_writer(path: Path, seed: bytes) -> EntryWriter:
    """Writes a sidecar in pieces."""
    return EntryWriter(path, _KIND, seed)


def _fetched(storage: TableStorage, path: str, cache: Path) -> Path | None:
    try:
        return storage.fetched(path, cache)
    except FileNotFoundError:
        return None


def _hashed(storage: TableStorage, path: str, seed: bytes, hashing: HashKeys) -> Iterator[Entries]:
    """The entries of all rows of a data file, unsorted."""
    source: IO[bytes] = storage.open(path)
    with source, pq.ParquetFile(source, pre_buffer=False) as file:
        names = [name for name in KEY_COLUMNS if name in file.schema_arrow.names]
        first = 0
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=names, use_threads=False):
                yield hashing(seed, _vbuckets(batch), _keys(batch), first)
                first += batch.num_rows


def _vbuckets(batch: pa.RecordBatch) -> NDArray[np.uint16]:
    """The vbuckets of rows; a row of a foreign writer may have none, or an impossible one."""
    if "_vbucket" not in batch.schema.names:
        return np.full(batch.num_rows, NO_VBUCKET, np.uint16)
    column = batch.column("_vbucket")
    numbers = integers(column)  # those of nulls are arbitrary
    valid = (numbers >= 0) & (numbers < NO_VBUCKET) & is_valid(column)
    return np.where(valid, numbers, NO_VBUCKET).astype(np.uint16)


def _keys(batch: pa.RecordBatch) -> pa.Array:
    """The keys of rows; a row of a foreign writer may have none."""
    texts, others = (_key_column(batch, name) for name in KEY_COLUMNS[:2])
    if others.null_count == len(others):
        return texts
    if texts.null_count == len(texts):
        return others
    import pyarrow.compute as pc

    return pc.coalesce(texts.cast(pa.binary()), others.cast(pa.binary()))


def _key_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name not in batch.schema.names:
        return pa.nulls(batch.num_rows, pa.binary())
    column = batch.column(name)
    return column if column.type in _PLAIN else column.cast(pa.binary())  # a foreign writer may use other types
