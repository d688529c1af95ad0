"""Compaction: small files become one, and files with many dead rows are written again.

Theory of operation. Files have *size classes*, each eight times the one below; eight files of a class become one of the
next, so a row is written again once per class. Files with many dead rows are written again without them.

A merge copies the live rows in the order of the input files and of their positions. So the position of a row in the
output follows from the vectors that the merge saw: the rows of earlier files, plus the live rows before it in its own.
If a vector changes while the merge runs, ``carried`` translates the rows that it hides now into positions of the
output, and the merge need not be repeated. The key index is made from those of the inputs in the same way, without
hashing keys.
"""

import contextlib
import json
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyroaring import BitMap

from upriver.tables.actions import Add
from upriver.tables.data_files.data_file import DataFileWriter, NewFile, bitmap_of, positions_in, serialised
from upriver.tables.data_files.live_rows import foreign_columns, live_rows, stored_rows
from upriver.tables.deletion_vectors import read_vector
from upriver.tables.key_index import HashKeys, KeyIndex, hash_keys, write_index
from upriver.tables.keys.entries import Entries, positions_of, with_positions
from upriver.tables.keys.sorted_runs import SortedRuns
from upriver.tables.schema import TableSchema
from upriver.tables.storage import TableStorage

#: This many files of a size class become one.
FACTOR: Final = 8
#: While changes wait, a merge waits for this many times as many files: it would take the time of a batch.
PATIENCE: Final = 4
#: Larger files are not merged because of their size.
FULL_BYTES: Final = 16 << 20
#: Size of a merged file, about.
MERGED_BYTES: Final = FULL_BYTES * FACTOR
#: Files with a larger share of dead rows are written again, once that frees ``DEAD_BYTES`` in all.
DEAD_SHARE: Final = 0.3
DEAD_BYTES: Final = 1 << 20
#: Files below this size have one class.
_SMALL_BYTES: Final = 32 << 10
_MERGED_FILES: Final = 512
#: Rows are written in row groups of about this size.
_GROUP_BYTES: Final = 32 << 20
_ENTRIES: Final = 1 << 19
_LENGTH: Final = struct.Struct("<I")


# Which files


def choose(files: Iterable[Add], *, everything: bool = False, patience: int = 1) -> list[tuple[Add, ...]]:
    """Groups of files to merge, each into one file. ``everything``: purge all dead rows, merge all small files.

    With ``patience`` there must be this many times as much to do.
    """
    left = sorted(files, key=lambda file: (_live_bytes(file), file.path))
    if everything:
        chosen = [file for file in left if file.dead or _live_bytes(file) < FULL_BYTES]
        return [group for group in _packed(chosen) if len(group) > 1 or group[0].dead]
    empty = [file for file in left if _dead_share(file) >= 1]
    sparse = [file for file in left if DEAD_SHARE < _dead_share(file) < 1]
    if sum(file.size - _live_bytes(file) for file in sparse) < DEAD_BYTES * patience:
        sparse = []
    taken = {file.path for file in (*empty, *sparse)}
    groups = [*([tuple(empty)] if empty else []), *_packed(sparse)]
    crowded = _crowded([file for file in left if file.path not in taken], FACTOR * patience)
    return groups + [group for group in _packed(crowded) if len(group) > 1]


def _crowded(files: Sequence[Add], crowd: int) -> list[Add]:
    """The files of the highest class that has enough of them, and all smaller ones: they come along for little."""
    classes = [_size_class(_live_bytes(file)) for file in files]
    full = _size_class(FULL_BYTES)
    crowded = [each for each in set(classes) if each < full and classes.count(each) >= crowd]
    if not crowded:
        return []
    return [file for file, each in zip(files, classes, strict=True) if each <= max(crowded)]


def _packed(files: Iterable[Add]) -> list[tuple[Add, ...]]:
    groups: list[list[Add]] = []
    size = 0
    for file in files:
        live = _live_bytes(file)
        if not groups or len(groups[-1]) >= _MERGED_FILES or size + live > MERGED_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += live
    return [tuple(group) for group in groups]


def _dead_share(file: Add) -> float:
    """The share of dead rows; a foreign file without statistics counts as full of live ones."""
    return file.dead / file.rows if file.rows else 0.0


def _live_bytes(file: Add) -> int:
    return int(file.size * (1 - _dead_share(file)))


def _size_class(size: int) -> int:
    found, limit = 0, _SMALL_BYTES
    while size >= limit:
        found, limit = found + 1, limit * FACTOR
    return found


# Merging


class MergedInput(NamedTuple):
    """A file that was merged, and the rows of it that were dead."""

    path: str
    rows: int
    #: A serialised bitmap.
    dead: bytes


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge: the new file, and what ``carried`` needs."""

    #: None if no row is left.
    file: NewFile | None
    inputs: tuple[MergedInput, ...]

    def to_bytes(self) -> bytes:
        """JSON, then the bitmaps."""
        file = self.file and [self.file.path, self.file.size, self.file.rows, self.file.stats]
        inputs = [[path, rows, len(dead)] for path, rows, dead in self.inputs]
        head = json.dumps([file, inputs], separators=(",", ":")).encode()
        return b"".join([_LENGTH.pack(len(head)), head, *(each.dead for each in self.inputs)])

    @classmethod
    def of_bytes(cls, data: bytes) -> "Merged":
        """The result that ``to_bytes`` wrote."""
        (length,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + length
        file, found = json.loads(data[_LENGTH.size : at])
        inputs = []
        for path, rows, size in found:
            inputs.append(MergedInput(path, rows, bytes(data[at : at + size])))
            at += size
        return cls(file and NewFile(*file), tuple(inputs))


#: The live rows of a local copy of a data file.
_RowsOf = Callable[[Path, BitMap], Iterator[pa.Table]]


class _Source(NamedTuple):
    path: str
    rows: int
    dead: BitMap
    #: The position of the first row in the output.
    start: int


def merge(
    storage: TableStorage,
    files: Sequence[Add],
    schema: TableSchema,
    seed: bytes,
    *,
    path: str,
    cache: Path,
    hashing: HashKeys = hash_keys,
) -> Merged:
    """Copy the live rows of files into a new file at ``path``, with the columns of the schema."""
    dead = {file.path: read_vector(storage, file.deletion_vector) for file in files}
    sources = _sources(storage, dead)
    new = _write(storage, sources, schema, seed, path, cache, hashing)
    return Merged(new, tuple(MergedInput(each.path, each.rows, serialised(each.dead)) for each in sources))


def merge_plain(storage: TableStorage, files: Sequence[Add], columns: pa.Schema, *, path: str) -> Merged:
    """Copy the live rows of files of an append-only table, which has no key indexes, into a new file."""
    sources = _sources(storage, {file.path: read_vector(storage, file.deletion_vector) for file in files})
    left = [source for source in sources if len(source.dead) < source.rows]
    new = _write_rows(storage, left, columns, stored_rows, path) if left else None
    return Merged(new, tuple(MergedInput(each.path, each.rows, serialised(each.dead)) for each in sources))


def rewrite(
    storage: TableStorage,
    file: str,
    dead: BitMap,
    schema: TableSchema,
    seed: bytes,
    *,
    path: str,
    cache: Path,
    hashing: HashKeys = hash_keys,
) -> NewFile | None:
    """Copy a file without the dead rows; None if no row is left.

    Columns get the types of the schema: an integer column that the schema has as decimals is converted, and rows with
    integers that a double cannot represent keep their document in ``_raw``.
    """
    return _write(storage, _sources(storage, {file: dead}), schema, seed, path, cache, hashing)


def carried(merged: Merged, now: Mapping[str, BitMap]) -> BitMap:
    """Rows of a merge's output that are dead, because the inputs' vectors hide more rows now than during the merge."""
    found = BitMap()
    start = 0
    for path, rows, data in merged.inputs:
        before = BitMap.deserialize(data)
        newly = positions_in(now.get(path, before) - before)
        found |= bitmap_of((start + newly - np.searchsorted(positions_in(before), newly)).astype(np.uint32))
        start += rows - len(before)
    return found


def _sources(storage: TableStorage, dead: Mapping[str, BitMap]) -> list[_Source]:
    found = []
    start = 0
    for path, gone in dead.items():
        with storage.open(path) as source, pq.ParquetFile(source) as file:
            rows = file.metadata.num_rows
        found.append(_Source(path, rows, gone, start))
        start += rows - len(gone)
    return found


def _write(
    storage: TableStorage,
    sources: Sequence[_Source],
    schema: TableSchema,
    seed: bytes,
    path: str,
    cache: Path,
    hashing: HashKeys,
) -> NewFile | None:
    """Write data file and sidecar; on failure neither stays."""
    left = [source for source in sources if len(source.dead) < source.rows]
    if not left:
        return None
    try:
        columns = _columns(storage, left, schema)
        new = _write_rows(storage, left, columns, lambda copy, dead: live_rows(copy, dead, schema), path)
        with SortedRuns() as runs:
            for source in left:
                index = KeyIndex.open(storage, source.path, seed, cache, hashing=hashing)
                for entries in _moved(index.entries, source):
                    runs.add(entries)
            write_index(storage, path, seed, runs.blocks(), cache)
    except BaseException:
        with contextlib.suppress(Exception):
            storage.delete([path])
        raise
    return new


def _columns(storage: TableStorage, sources: Sequence[_Source], schema: TableSchema) -> pa.Schema:
    """The columns of the schema, and those of other programs in the files."""
    foreign: dict[str, pa.Field] = {}
    for source in sources:
        with storage.open(source.path) as file:
            for field in foreign_columns(file, schema):
                foreign.setdefault(field.name, field)
    return pa.schema([*schema.arrow, *foreign.values()])


def _write_rows(
    storage: TableStorage, sources: Sequence[_Source], columns: pa.Schema, rows_of: _RowsOf, path: str
) -> NewFile:
    with tempfile.TemporaryDirectory(prefix="upriver-merge-") as folder, contextlib.ExitStack() as stack:
        writer = DataFileWriter(storage, path, columns)
        stack.callback(writer.discard)
        for rows in _groups(_rows(storage, sources, columns, rows_of, Path(folder))):
            writer.write(rows)
        stack.pop_all()
        return writer.finish()


def _rows(
    storage: TableStorage, sources: Sequence[_Source], columns: pa.Schema, rows_of: _RowsOf, folder: Path
) -> Iterator[pa.Table]:
    for source in sources:
        copy = storage.fetched(source.path, folder)
        for rows in rows_of(copy, source.dead):
            yield _with_all(rows, columns)
        if storage.local() is None:
            copy.unlink(missing_ok=True)  # the disk holds one input at a time


def _with_all(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Rows with all columns; one that a file lacks is null."""
    if rows.schema.names == columns.names:
        return rows.cast(columns)
    arrays = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        for field in columns
    ]
    return pa.table(arrays, schema=columns)


def _groups(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Pieces collected to row groups."""
    held: list[pa.Table] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += piece.nbytes
        if size >= _GROUP_BYTES:
            yield pa.concat_tables(held)
            held, size = [], 0
    if held:
        yield pa.concat_tables(held)


def _moved(entries: Entries, source: _Source) -> Iterator[Entries]:
    """The entries of live rows at their positions in the output."""
    ranks: NDArray[np.int64] | None = None
    if source.dead:
        live = np.ones(source.rows, np.bool_)
        live[positions_in(source.dead)] = False
        ranks = np.cumsum(live) - 1
    for begin in range(0, len(entries), _ENTRIES):
        piece = np.array(entries[begin : begin + _ENTRIES])
        positions = positions_of(piece)
        if ranks is not None:
            kept = live[positions]
            piece, positions = piece[kept], ranks[positions[kept]].astype(np.uint32)
        yield with_positions(piece, positions + np.uint32(source.start))
