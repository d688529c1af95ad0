"""The part of a batch that one task writes: data files, their key indexes, and the list of changed keys.

Theory of operation. Changes arrive in record batches, in order, and are collected to *chunks* of about 32 MB. Of each
key, only the last change in a chunk counts. The documents of the chunk's mutations become a row group of the current
data file; a file that is large enough is published and another one begins.

A chunk leaves one entry per key: its hash, and as position a number that counts all entries of the task. ``_Chunk``
knows which row, or which deletion, such a number means. ``finish`` sorts all entries, on disk if there are many. Now
all changes of a key are next to each other: the last one wins, and rows of earlier ones are dead. In the same pass the
live rows go into the indexes of their files, and the hashes of deleted keys into the key list.

A row that cannot be written costs the file that it was written to: ``UnwritableRows`` names such rows, and the caller
writes the part again with ``on_refused``. Then each chunk is written to memory first, so the part need not be written a
third time, and the rows at fault only hide the earlier versions of their keys.

Memory is bounded by the chunk, whatever the number and the size of the documents. Nothing refers to the files before
the driver commits them, so ``abandon``, or a crash at any moment, leaves at most files that vacuum removes.
"""

import contextlib
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap

from upriver.tables.compaction import rewrite
from upriver.tables.data_files.change_rows import (
    chosen,
    is_mutation,
    own_columns,
    split,
    vbuckets_in,
    without_foreign_columns,
)
from upriver.tables.data_files.data_file import DataFileWriter, NewFile, bitmap_of, parquet_writer
from upriver.tables.data_files.part_result import PartResult
from upriver.tables.data_files.unwritable_rows import UnwritableRows, change_ids, find_unwritable
from upriver.tables.documents import FieldReport, Parsed, parse
from upriver.tables.key_index import HashKeys, hash_keys, index_writer, new_sidecar, sidecar_path
from upriver.tables.keys.entries import (
    Entries,
    is_last_of_key,
    is_next_other,
    positions_of,
    sort_entries,
    vbuckets_of,
    with_positions,
)
from upriver.tables.keys.entry_file import EntryWriter
from upriver.tables.keys.key_list import KeyListWriter, key_list_path
from upriver.tables.keys.sorted_runs import SortedRuns
from upriver.tables.schema import TableSchema
from upriver.tables.storage import TableStorage

#: Collect rows up to this size before they are parsed and written.
CHUNK_BYTES: Final = 32 << 20
ROWS_PER_FILE: Final = 500_000
BYTES_PER_FILE: Final = 128 << 20
#: Entries of a task are counted in 32 bits.
ENTRIES_MAX: Final = 2**32


class _Pending(NamedTuple):
    """Changes of the next chunk."""

    rows: pa.RecordBatch
    mutations: NDArray[np.bool_]

    def without(self, vbucket: int) -> "_Pending":
        mask = vbuckets_in(self.rows) != vbucket
        return _Pending(chosen(self.rows, mask), self.mutations[mask])


class _Chunk(NamedTuple):
    """What the entries of a chunk mean: first the rows, in the order of the file, then the deletions."""

    #: The number of the first entry.
    start: int
    rows: int
    file: int
    #: The position of the first row in the file.
    position: int


class PartWriter:
    """Writes the changes of one task. Either ``finish`` or ``abandon`` it; as a context, it is abandoned if neither."""

    def __init__(
        self,
        storage: TableStorage,
        schema: TableSchema,
        seed: bytes,
        *,
        attempt: str,
        rows_per_file: int = ROWS_PER_FILE,
        bytes_per_file: int = BYTES_PER_FILE,
        chunk_bytes: int = CHUNK_BYTES,
        vectors: bool = True,
        cache: Path | None = None,
        hashing: HashKeys = hash_keys,
        on_refused: Callable[[pa.RecordBatch, list[str]], object] | None = None,
    ) -> None:
        """``attempt`` names the files and must be unique. Without ``vectors``, no file has dead rows. What is searched
        next, indexes and the list of keys, stays in the ``cache``.

        ``on_refused`` gets the changes that cannot be written, with the reasons; without it they are an error.
        """
        self._storage, self._seed, self._attempt = storage, seed, attempt
        #: May be replaced before rows are added.
        self.schema = schema
        self._rows_per_file, self._bytes_per_file, self._chunk_bytes = rows_per_file, bytes_per_file, chunk_bytes
        self._vectors, self._cache, self._hashing = vectors, cache, hashing
        self._on_refused = on_refused
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._runs = SortedRuns()
        self._entries = 0
        self._chunks: list[_Chunk] = []
        self._writer: DataFileWriter | None = None
        self._files: list[NewFile] = []
        self._report = FieldReport()
        #: Vbucket -> entries before this number are forgotten.
        self._discarded: dict[int, int] = {}
        #: Files that exist.
        self._published: list[str] = []
        self._is_finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_finished:
            self.abandon()

    def add(self, rows: pa.RecordBatch) -> None:
        """Take changes, the latest last. Deletions and expirations hide earlier changes of their keys."""
        for piece in split(without_foreign_columns(rows), self._chunk_bytes):
            self._pending.append(_Pending(piece, is_mutation(piece)))
            self._pending_bytes += piece.nbytes
            if self._pending_bytes >= self._chunk_bytes:
                self._write_chunk()

    def discard(self, vbucket: int) -> None:
        """Forget all changes of a vbucket so far, for example because of a rollback during the read."""
        self._pending = [kept for each in self._pending if (kept := each.without(vbucket)).rows.num_rows]
        self._pending_bytes = sum(each.rows.nbytes for each in self._pending)
        self._discarded[vbucket] = self._entries

    def finish(self, replaced: Collection[int] = ()) -> PartResult:
        """Write everything that is left. ``replaced``: vbuckets whose old rows are all dead, whatever their keys."""
        self._write_chunk()
        self._close_file()
        part = _Part(len(self._files))
        keys = self._new(key_list_path(self._attempt)) if len(self._runs) or replaced else ""
        with contextlib.ExitStack() as stack:
            if keys:
                target = stack.enter_context(self._storage.new_file(keys, durable=False, cache=self._cache))
                part.keys = KeyListWriter(target, self._seed)
                stack.callback(part.keys.close)
            self._write_indexes(part)
            files = tuple(done for number in range(len(self._files)) if (done := self._finished(part, number)))
            if part.keys is not None:
                part.keys.finish(files, replaced)
        self._runs.close()
        self._is_finished = True
        vbuckets = tuple(sorted(part.vbuckets | set(replaced)))
        return PartResult(
            files, keys, vbuckets, tuple(sorted(replaced)), self._report, part.live_rows, part.deleted_keys
        )

    def abandon(self) -> None:
        """Remove all files of this part."""
        self._pending = []
        if self._writer is not None:
            self._writer.discard()
            self._writer = None
        self._runs.close()
        self._storage.delete(self._published)
        self._published = []
        self._is_finished = True

    def _new(self, path: str) -> str:
        self._published.append(path)
        return path

    # Chunks

    def _write_chunk(self) -> None:
        if not self._pending:
            return
        batches = [each.rows for each in self._pending]
        mutations = np.concatenate([each.mutations for each in self._pending])
        self._pending, self._pending_bytes = [], 0
        keys = pa.concat_arrays([rows.column("key") for rows in batches])
        vbuckets = np.concatenate([vbuckets_in(rows) for rows in batches])
        entries = sort_entries(self._hashing(self._seed, vbuckets, keys, 0))
        last = is_last_of_key(entries, keys)
        if not last.all():
            entries = entries[last]
        rows_of_entries = positions_of(entries)
        wins = np.zeros(len(keys), np.bool_)
        wins[rows_of_entries] = True
        live = wins & mutations
        if self._on_refused is not None:
            live &= ~self._refused(batches, live, self._on_refused)
        file, position = self._write_rows(batches, live)
        self._number(entries, rows_of_entries, live, wins & ~live)
        self._chunks.append(_Chunk(self._entries, int(live.sum()), file, position))
        self._entries += len(entries)
        if self._entries >= ENTRIES_MAX:
            raise OverflowError("a task takes at most 2^32 changes")
        writer = self._writer
        if writer is not None and (writer.rows >= self._rows_per_file or writer.size >= self._bytes_per_file):
            self._close_file()

    def _number(
        self, entries: Entries, rows: NDArray[np.uint32], live: NDArray[np.bool_], deleted: NDArray[np.bool_]
    ) -> None:
        """Count the entries of a chunk as ``_Chunk`` says, and keep them."""
        numbers = np.empty(len(live), np.uint32)
        count = int(live.sum())
        numbers[live] = np.arange(self._entries, self._entries + count, dtype=np.uint32)
        start = self._entries + count
        numbers[deleted] = np.arange(start, start + int(deleted.sum()), dtype=np.uint32)
        self._runs.add(with_positions(entries, numbers[rows]))

    def _write_rows(self, batches: list[pa.RecordBatch], live: NDArray[np.bool_]) -> tuple[int, int]:
        """Append the live rows to the current file; returns its number, and the position of the first row."""
        if not live.any():
            return 0, 0
        mutations = _live_rows(batches, live)
        if self._writer is None:
            path = self._new(f"{self._attempt}-{len(self._files):05}.parquet")
            self._writer = DataFileWriter(self._storage, path, self.schema.arrow)
        position = self._writer.rows
        try:
            self._writer.write(pa.Table.from_batches([self._counted(rows) for rows in mutations]))
        except (MemoryError, OSError):
            raise
        except Exception as error:
            if reasons := find_unwritable(mutations, self._write_to_memory):
                raise UnwritableRows(reasons) from error
            raise
        return len(self._files), position

    def _counted(self, mutations: pa.RecordBatch) -> pa.RecordBatch:
        """Mutations as rows of the table; their fields are in the report then."""
        parsed = parse(mutations.column("value"), self.schema.columns)
        self._report += parsed.report
        return self._row_batch(mutations, parsed)

    def _row_batch(self, mutations: pa.RecordBatch, parsed: Parsed) -> pa.RecordBatch:
        arrays = [*own_columns(mutations, parsed.raw), *parsed.columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema.arrow)

    def _write_to_memory(self, mutations: pa.RecordBatch) -> None:
        rows = self._row_batch(mutations, parse(mutations.column("value"), self.schema.columns))
        with parquet_writer(pa.BufferOutputStream(), self.schema.arrow) as writer:
            writer.write_table(pa.Table.from_batches([rows]))

    def _refused(
        self,
        batches: list[pa.RecordBatch],
        live: NDArray[np.bool_],
        on_refused: Callable[[pa.RecordBatch, list[str]], object],
    ) -> NDArray[np.bool_]:
        """Which live rows cannot be written; ``on_refused`` gets them."""
        found = np.zeros(len(live), np.bool_)
        reasons = find_unwritable(_live_rows(batches, live), self._write_to_memory)
        start = 0
        for rows in batches if reasons else ():
            part = slice(start, start + rows.num_rows)
            ids = change_ids(rows)
            found[part] = [each in reasons for each in ids]
            found[part] &= live[part]
            if found[part].any():
                on_refused(chosen(rows, found[part]), [reasons[ids[number]] for number in np.flatnonzero(found[part])])
            start = part.stop
        return found

    def _close_file(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            self._files.append(writer.finish())

    # The end

    def _resolved(self, block: Entries) -> "tuple[Entries, _Places]":
        """Sorted entries without the forgotten ones, and what they mean."""
        places = _places(self._chunks, positions_of(block))
        if not self._discarded:
            return block, places
        limits = np.zeros(2**16, np.uint64)
        for vbucket, number in self._discarded.items():
            limits[vbucket] = number
        places = places._replace(is_kept=positions_of(block) >= limits[block[:, 0] >> np.uint64(48)])
        return block, places

    def _write_indexes(self, part: "_Part") -> None:
        """One pass over all entries, in order: indexes, dead rows and deleted keys."""
        with contextlib.ExitStack() as stack:
            for file in self._files:
                self._new(sidecar_path(file.path))
                target = stack.enter_context(new_sidecar(self._storage, file.path, self._cache))
                part.indexes.append(index_writer(target, self._seed))
                stack.callback(part.indexes[-1].close)
            for block in self._runs.blocks():
                part.take(*self._resolved(block))
            for index in part.indexes:
                index.finish()

    def _finished(self, part: "_Part", number: int) -> NewFile | None:
        """The file with its dead rows; None if all are dead, and the file was removed."""
        file = self._files[number].with_dead(part.dead[number])
        if len(part.dead[number]) < file.rows and (self._vectors or not file.dead):
            return file
        found = None
        if len(part.dead[number]) < file.rows:
            path = self._new(file.path.replace(".parquet", "-live.parquet"))
            self._new(sidecar_path(path))
            with tempfile.TemporaryDirectory(prefix="upriver-part-") as folder:
                cache = self._cache or Path(folder)
                found = rewrite(
                    self._storage, file.path, part.dead[number], self.schema, self._seed, path=path, cache=cache
                )
        self._storage.delete([file.path, sidecar_path(file.path)])
        return found


def _live_rows(batches: list[pa.RecordBatch], live: NDArray[np.bool_]) -> list[pa.RecordBatch]:
    """The rows of a chunk that are live."""
    found = []
    start = 0
    for rows in batches:
        found.append(chosen(rows, live[start : start + rows.num_rows]))
        start += rows.num_rows
    return [rows for rows in found if rows.num_rows]


class _Places(NamedTuple):
    """What entries mean: the row of a file, or a deletion."""

    chunks: NDArray[np.int64]
    is_row: NDArray[np.bool_]
    files: NDArray[np.int64]
    positions: NDArray[np.uint32]
    #: None: all are kept.
    is_kept: NDArray[np.bool_] | None = None

    def chosen(self, mask: NDArray[np.bool_]) -> "_Places":
        return _Places(self.chunks[mask], self.is_row[mask], self.files[mask], self.positions[mask])


def _places(chunks: list[_Chunk], numbers: NDArray[np.uint32]) -> _Places:
    starts, rows, files, positions = (np.array(column, np.int64) for column in zip(*chunks, strict=True))
    found = np.searchsorted(starts, numbers, "right") - 1
    offsets = numbers - starts[found]
    return _Places(found, offsets < rows[found], files[found], (positions[found] + offsets).astype(np.uint32))


class _Part:
    """Collects, from sorted entries, what ``finish`` writes."""

    def __init__(self, files: int) -> None:
        self.keys: KeyListWriter | None = None
        self.indexes: list[EntryWriter] = []
        self.dead = [BitMap() for _ in range(files)]
        self.vbuckets: set[int] = set()
        self.live_rows = 0
        self.deleted_keys = 0

    def take(self, entries: Entries, places: _Places) -> None:
        """Take entries that sort after all earlier ones; those of one hash come together."""
        assert self.keys is not None
        if places.is_kept is not None:
            self._bury(places, ~places.is_kept)
            entries, places = entries[places.is_kept], places.chosen(places.is_kept)
        self.vbuckets.update(vbuckets_of(entries))
        survives = _of_same_chunk(is_next_other(entries), places.chunks)
        self._bury(places, ~survives)
        deleted = entries[survives & ~places.is_row]
        self.keys.append(with_positions(deleted, np.zeros(len(deleted), np.uint32)))
        self.deleted_keys += len(deleted)
        live = survives & places.is_row
        self.live_rows += int(live.sum())
        for number in np.unique(places.files[live]).tolist():
            mask = live & (places.files == number)
            self.indexes[number].append(with_positions(entries[mask], places.positions[mask]))

    def _bury(self, places: _Places, mask: NDArray[np.bool_]) -> None:
        """Rows of these entries are dead."""
        rows = mask & places.is_row
        for number in np.unique(places.files[rows]).tolist():
            self.dead[number] |= bitmap_of(places.positions[rows & (places.files == number)])


def _of_same_chunk(last: NDArray[np.bool_], chunks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each entry survives: it is the last of its hash, or from the same chunk as the last.

    Entries of one hash in one chunk are of different keys, because a chunk has each key once. That is possible in
    theory only, as hashes have 80 bits.
    """
    if last.all() or not (~last[:-1] & (chunks[:-1] == chunks[1:])).any():
        return last
    ends = np.flatnonzero(last)
    runs = np.searchsorted(ends, np.arange(len(last)))
    found: NDArray[np.bool_] = chunks == chunks[ends[runs]]
    return found
