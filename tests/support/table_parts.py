"""Changes as tasks receive them, and a table that takes them part by part."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyroaring import BitMap

from upriver.tables import Column, Edit, Table, TableSchema, TableStorage, read
from upriver.tables.compaction import Merged, carried, merge, rewrite
from upriver.tables.data_files.part_result import PartResult
from upriver.tables.deletion_vectors import read_vector
from upriver.tables.documents import documents_of
from upriver.tables.locating import locate
from upriver.tables.part_writer import PartWriter

SEED = bytes(range(16))
SCHEMA = TableSchema([Column("n", "int")])
#: Vbucket, key, and the document; None deletes it.
Change = tuple[int, bytes, bytes | None]
CHANGES = pa.schema(
    {
        "vbucket": pa.int32(),
        "seqno": pa.int64(),
        "rev_seqno": pa.int64(),
        "cas": pa.int64(),
        "event": pa.string(),
        "key": pa.binary(),
        "value": pa.binary(),
        "flags": pa.int64(),
        "expiry": pa.int64(),
        "datatype": pa.int32(),
    }
)


def number(n: int) -> bytes:
    """A document that the column ``n`` represents."""
    return b'{"n":%d}' % n


def rows_of(changes: Sequence[Change], first_seqno: int = 1) -> pa.RecordBatch:
    """Changes as rows."""
    count = len(changes)
    columns: dict[str, Iterable[Any]] = {
        "vbucket": [vbucket for vbucket, _, _ in changes],
        "seqno": range(first_seqno, first_seqno + count),
        "rev_seqno": [1] * count,
        "cas": range(10**15, 10**15 + count),
        "event": ["deletion" if value is None else "mutation" for _, _, value in changes],
        "key": [key for _, key, _ in changes],
        "value": [value for _, _, value in changes],
        "flags": [0] * count,
        "expiry": [0] * count,
        "datatype": [1] * count,
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[field.name], field.type) for field in CHANGES], schema=CHANGES)


def after(model: Mapping[tuple[int, bytes], bytes], changes: Iterable[Change]) -> dict[tuple[int, bytes], bytes]:
    """What a dict holds after these changes."""
    found = dict(model)
    for vbucket, key, value in changes:
        if value is None:
            found.pop((vbucket, key), None)
        else:
            found[vbucket, key] = value
    return found


def contents(rows: pa.Table, schema: TableSchema = SCHEMA) -> dict[tuple[int, bytes], bytes]:
    """The documents of a table's rows. A key that comes twice is an error."""
    keys = [
        raw if text is None else text.encode()
        for text, raw in zip(rows["_key"].to_pylist(), rows["_raw_key"].to_pylist(), strict=True)
    ]
    names = list(zip(rows["_vbucket"].to_pylist(), keys, strict=True))
    assert len(set(names)) == len(names), "a key has two rows"
    return dict(zip(names, documents_of(rows, schema).to_pylist(), strict=True))


class PartTable:
    """A table, changed as a pipeline does it. It is in this directory, or elsewhere with its cache there."""

    def __init__(
        self,
        path: Path,
        *,
        storage: TableStorage | None = None,
        vectors: bool = True,
        schema: TableSchema = SCHEMA,
        **options: Any,
    ) -> None:
        self.storage = storage or TableStorage.of(path / "table")
        self.table = Table.create(self.storage, schema, {}, vectors=vectors)
        self.cache = path / "cache"
        self._options: dict[str, Any] = {"vectors": vectors, **options}
        self._numbers = itertools.count()

    def writer(self) -> PartWriter:
        """A task's writer."""
        return PartWriter(self.storage, self.table.schema, SEED, attempt=f"part{next(self._numbers)}", **self._options)

    def add(self, *batches: Sequence[Change], replaced: Collection[int] = ()) -> PartResult:
        """Write and commit one part."""
        with self.writer() as writer:
            for changes in batches:
                writer.add(rows_of(changes))
            result = writer.finish(replaced)
        self.commit(result)
        return result

    def commit(self, *results: PartResult) -> None:
        """Commit parts, after a trip through bytes."""
        parts = [PartResult.of_bytes(result.to_bytes()) for result in results]
        files = [file for part in parts for file in part.files]
        dead = {file.path: file.dead_rows for file in files if file.dead}
        for part in parts:
            found = locate(self.storage, list(self.table.snapshot.files.values()), part.keys, (), self.cache)
            for path, positions in found.items():
                dead[path] = dead.get(path, BitMap()) | BitMap.deserialize(positions)
        if self.table.vectors:
            self.table.commit(Edit("BATCH", [file.add(1) for file in files], dead))
        else:
            self._copy_on_write([file.add(1) for file in files], dead)

    def _copy_on_write(self, added: Sequence[Any], dead: Mapping[str, BitMap]) -> None:
        new = [
            rewrite(self.storage, path, positions, self.table.schema, SEED, path=self.new_path(), cache=self.cache)
            for path, positions in dead.items()
        ]
        edit = Edit("BATCH", [*added, *(file.add(1) for file in new if file)], removed=list(dead))
        self.table.commit(edit)

    def new_path(self) -> str:
        """A name for a data file."""
        return f"merged{next(self._numbers)}.parquet"

    def merge(self, paths: Collection[str] | None = None) -> Merged:
        """Merge files, or all of them, without a commit."""
        files = [file for file in self.table.snapshot.files.values() if paths is None or file.path in paths]
        merged = merge(self.storage, files, self.table.schema, SEED, path=self.new_path(), cache=self.cache)
        return Merged.of_bytes(merged.to_bytes())

    def commit_merged(self, merged: Merged) -> None:
        """Commit a merge; vectors may have changed, and files may have lost their last row since it ran."""
        files = self.table.snapshot.files
        inputs = {path: rows for path, rows, _ in merged.inputs}
        now = {
            path: read_vector(self.storage, files[path].deletion_vector) if path in files else BitMap(range(rows))
            for path, rows in inputs.items()
        }
        dead = carried(merged, now)
        added = [merged.file.add(1, data_change=False)] if merged.file else []
        hidden = {merged.file.path: dead} if merged.file and dead else {}
        removed = [path for path in inputs if path in files]
        self.table.commit(Edit("OPTIMIZE", added, hidden, removed, data_change=False))

    def contents(self) -> dict[tuple[int, bytes], bytes]:
        """All documents."""
        return contents(read(self.storage.url, options=self.storage.options), self.table.schema)

    def files(self) -> set[str]:
        """All files outside of the log."""
        return {file.path for file in self.storage.list() if not file.path.startswith("_delta_log/")}
