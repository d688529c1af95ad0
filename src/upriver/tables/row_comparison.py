"""Compares rows of a table with the changes that a node sends.

Theory of operation. The rows of some vbuckets are in memory, with their keys hashed and sorted. Changes arrive in
batches, in any number; each is looked up by its hash and compared with the row of its key. The latest change of a key
decides: a row that was equal may be *extra* again, because the document was deleted during the read. In the end, rows
that no change has confirmed are extra, and documents without a row are *missing*.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from upriver.model import Difference
from upriver.tables.actions import Add
from upriver.tables.data_files.arrays import booleans, flags, integers, is_valid, plain_columns
from upriver.tables.data_files.change_rows import is_mutation, vbuckets_in
from upriver.tables.data_files.data_file import positions_in
from upriver.tables.deletion_vectors import read_vector
from upriver.tables.documents import conform, matches
from upriver.tables.key_index import KeyIndex
from upriver.tables.keys.entries import NO_VBUCKET, hash_keys, is_last_of_key, positions_of, sort_entries
from upriver.tables.schema import TableSchema
from upriver.tables.storage import TableStorage

#: Columns that must be equal. A moved vbucket assigns its own seqnos.
COMPARED: Final = ("_rev_seqno", "_cas", "_flags", "_expiry", "_datatype")
_BATCH_ROWS: Final = 1 << 16
_UNSEEN, _EQUAL, _DIFFERENT = 0, 1, 2
#: Hashes live as long as the comparison.
_SEED: Final = bytes(16)


def rows_of_vbuckets(
    storage: TableStorage, files: Sequence[Add], schema: TableSchema, wanted: NDArray[np.bool_]
) -> pa.Table:
    """The live rows of the vbuckets with a mark in ``wanted``; its last entry is for rows without a valid vbucket."""
    assert len(wanted) == NO_VBUCKET + 1
    found = [pa.Table.from_batches([], schema.arrow)]
    for file in files:
        live = None
        with storage.open(file.path) as source, pq.ParquetFile(source) as parquet:
            if dead := read_vector(storage, file.deletion_vector):
                live = np.ones(parquet.metadata.num_rows, np.bool_)
                live[positions_in(dead)] = False
            names = [name for name in schema.arrow.names if name in parquet.schema_arrow.names]
            start = 0
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                mask = (
                    wanted[_vbuckets(batch.column("_vbucket"))]
                    if "_vbucket" in names
                    else np.full(batch.num_rows, wanted[NO_VBUCKET])
                )
                if live is not None:
                    mask &= live[start : start + batch.num_rows]
                start += batch.num_rows
                if mask.any():
                    rows = pa.Table.from_batches([plain_columns(batch).filter(booleans(mask))])
                    found.append(conform(rows, schema).select(schema.arrow.names))
    return pa.concat_tables(found)


def _vbuckets(column: pa.Array) -> NDArray[np.int64]:
    """The vbuckets of rows; those of another program may have none."""
    numbers = integers(column).astype(np.int64)  # those of nulls are arbitrary
    valid = (numbers >= 0) & (numbers < NO_VBUCKET)
    if column.null_count:
        valid &= is_valid(column)
    return np.where(valid, numbers, NO_VBUCKET)


class RowComparison:
    """Rows of a table, and how they differ from the documents of a node. Expired documents are ignored."""

    def __init__(self, rows: pa.Table, schema: TableSchema, now_s: int) -> None:
        self._schema, self._now_s = schema, now_s
        expired = self._expired(rows.column("_expiry").combine_chunks())
        # Chunks would be put together whenever rows are taken.
        self._rows = rows = (rows.filter(booleans(~expired)) if expired.any() else rows).combine_chunks()
        keys = pc.coalesce(rows.column("_key").cast(pa.binary()), rows.column("_raw_key"))
        self._keys = keys.combine_chunks()
        self._vbuckets = _vbuckets(rows.column("_vbucket").combine_chunks())
        entries = sort_entries(hash_keys(_SEED, self._vbuckets.astype(np.uint16), self._keys))
        last = is_last_of_key(entries, self._keys)
        #: Rows whose key has another row, or which have no key.
        self._surplus = positions_of(entries[~last])
        self._index = KeyIndex(entries[last])
        self._state = np.full(len(self._keys), _UNSEEN, np.uint8)
        #: Row -> the columns that differ.
        self._differing: dict[int, tuple[str, ...]] = {}
        self._missing: set[tuple[int, bytes]] = set()

    def _expired(self, expiry: pa.Array) -> NDArray[np.bool_]:
        seconds = integers(expiry)
        found: NDArray[np.bool_] = (seconds > 0) & (seconds <= self._now_s)
        return found & is_valid(expiry) if expiry.null_count else found

    def add(self, changes: pa.RecordBatch) -> None:
        """Take changes of keys, the latest last."""
        keys = changes.column("key")
        entries = sort_entries(hash_keys(_SEED, vbuckets_in(changes), keys))
        entries = entries[is_last_of_key(entries, keys)]
        order = positions_of(entries)
        exists = is_mutation(changes) & ~self._expired(changes.column("expiry"))
        found, places = self._index.find(entries)
        numbers = order[found]
        same = _mask(pc.equal(self._keys.take(_indices(places)), keys.take(_indices(numbers))))
        numbers, places = numbers[same], places[same]
        self._state[places] = _UNSEEN
        self._compare(changes, numbers[exists[numbers]], places[exists[numbers]])
        without = np.ones(len(keys), np.bool_)
        without[numbers] = False
        for number in order[without[order]].tolist():
            name = changes.column("vbucket")[number].as_py(), keys[number].as_py()
            if exists[number]:
                self._missing.add(name)
            else:
                self._missing.discard(name)

    def _compare(self, changes: pa.RecordBatch, numbers: NDArray[np.uint32], places: NDArray[np.uint32]) -> None:
        if not len(numbers):
            return
        ours, theirs = self._rows.take(_indices(places)), changes.take(_indices(numbers))
        same = {"value": matches(theirs.column("value"), ours, self._schema)}
        same |= {name: pc.equal(ours.column(name), theirs.column(name[1:])) for name in COMPARED}
        masks = {name: _mask(found) for name, found in same.items()}
        good = np.logical_and.reduce(list(masks.values()))
        self._state[places] = np.where(good, _EQUAL, _DIFFERENT)
        for number in np.flatnonzero(~good).tolist():
            self._differing[int(places[number])] = tuple(name for name, mask in masks.items() if not mask[number])

    def differences(self) -> Iterator[Difference]:
        """The differences between the rows and the documents, in the order of vbuckets."""
        found = [Difference(vbucket, "missing", key) for vbucket, key in self._missing]
        self._state[self._surplus] = _UNSEEN
        for place in np.flatnonzero(self._state != _EQUAL).tolist():
            extra = Difference(int(self._vbuckets[place]), "extra", self._keys[place].as_py())
            is_other = self._state[place] == _DIFFERENT
            found.append(extra._replace(kind="different", columns=self._differing[place]) if is_other else extra)
        yield from sorted(found, key=lambda each: (each.vbucket, each.key or b"", each.kind))


def _indices(numbers: NDArray[np.uint32]) -> pa.Array:
    return pa.Array.from_buffers(pa.uint32(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))])


def _mask(found: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    if isinstance(found, pa.ChunkedArray):
        return np.concatenate([np.empty(0, np.bool_), *map(flags, found.chunks)])
    return flags(found)
