"""Tables of the latest state in Parquet files: which files a batch changes, and how.

Theory of operation. Rows are in *parts*, one for sixteen vbuckets. Only the keys of a part's files are read to find the
files that a batch changes. These are rewritten without the changed rows, and the new rows go into a separate file. So a
batch of new keys rewrites nothing. A part with too many files is merged into one. The storage then replaces the old
files, together with the progress, atomically.
"""

import uuid
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from upriver.files import sync
from upriver.pipelines.targets.tables.columns import OWN, Columns, keys_of
from upriver.pipelines.targets.target import Target, TargetProgress, Work

#: Number of vbuckets that share files.
PART_VBUCKETS: Final = 16
#: A part with more files than this is merged.
FILES_MAX: Final = 8
#: Number of files to sync in parallel.
SYNCS_MAX: Final = 16
_NAMES: Final = ("_key", "_raw_key", "_vbucket")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of a part."""

    part: int
    path: Path
    rows: int = 0


class TableTarget(Target):
    """A table of the latest state; a subclass stores its files."""

    def __init__(self) -> None:
        self._columns = Columns(self._schema())
        self._progress = self._stored_progress()
        self._files = list(self._stored_files())

    def progress(self) -> TargetProgress:
        """The progress of the table."""
        return self._progress

    def commit(self, work: Work) -> None:
        """Replace the files that the work changes."""
        try:
            self._commit(work)
        except BaseException:
            self._discard()
            raise

    def _commit(self, work: Work) -> None:
        stored = self._columns.table(work.rows.filter(pc.equal(work.rows.column("event"), "mutation")))
        removed, added = list[DataFile](), list[DataFile]()
        if work.clear_all:
            removed = list(self._files)
        for part in self._touched(work):
            files = [] if work.clear_all else [file for file in self._files if file.part == part]
            gone, written = self._exchange(part, files, work, _of_part(stored, part))
            removed += gone
            added += written
        sync_all(file.path for file in added)
        progress = self._progress.after(work)
        self._exchange_files(added, removed, self._columns.schema, progress)
        self._progress = progress
        self._files = [file for file in self._files if file not in removed] + added

    def read(self, vbuckets: Collection[int] | None = None) -> pa.Table:
        """All rows, or the rows of these vbuckets."""
        parts = None if vbuckets is None else {number // PART_VBUCKETS for number in vbuckets}
        tables = [self._load(file) for file in self._files if parts is None or file.part in parts]
        rows = pa.concat_tables([self._columns.schema.empty_table(), *tables])
        if vbuckets is None:
            return rows
        return rows.filter(pc.is_in(rows.column("_vbucket"), pa.array(sorted(vbuckets), pa.int32())))

    def documents(self, rows: pa.Table) -> pa.Table:
        """These Spark rows as rows of the table; fields without a column are only in ``_raw``."""
        return self._columns.table(rows, grow=False)

    def _touched(self, work: Work) -> list[int]:
        vbuckets = pc.unique(work.rows.column("vbucket")).to_pylist()
        return sorted({vbucket // PART_VBUCKETS for vbucket in (*vbuckets, *work.cleared)})

    def _exchange(
        self, part: int, files: Sequence[DataFile], work: Work, new: pa.Table
    ) -> tuple[list[DataFile], list[DataFile]]:
        """The old and the new files of a part."""
        names = _of_part(work.rows, part, "vbucket")
        kept: dict[DataFile, Any] = {file: self._kept(file, names, work.cleared) for file in files}
        whole = len(files) - sum(mask is not None for mask in kept.values()) + 2 > FILES_MAX
        gone = list(files) if whole else [file for file, mask in kept.items() if mask is not None]
        pieces = [new]
        for file in gone:
            table = self._load(file)
            mask = kept[file]
            pieces.append(table if mask is None else table.filter(mask))
        left = pa.concat_tables(pieces)
        return gone, [self._write(part, left)] if left.num_rows else []

    def _kept(self, file: DataFile, names: pa.Table, cleared: Iterable[int]) -> Any:
        """The mask of rows to keep; None if all stay."""
        held = pq.read_table(file.path, columns=list(_NAMES), partitioning=None)
        hit = pc.is_in(held.column("_vbucket"), pa.array(list(cleared), pa.int32())).to_numpy(zero_copy_only=False)
        same = pc.is_in(keys_of(held), names.column("key")).to_numpy(zero_copy_only=False)
        if same.any():
            # Clients choose vbuckets, so the same key may be in several: compare the vbuckets of equal keys too.
            places = np.flatnonzero(same)
            wanted = set(zip(names.column("vbucket").to_pylist(), names.column("key").to_pylist(), strict=True))
            few = held.take(pa.array(places))
            pairs = zip(few.column("_vbucket").to_pylist(), keys_of(few).to_pylist(), strict=True)
            hit = hit.copy()
            hit[places] |= np.fromiter((pair in wanted for pair in pairs), bool, len(places))
        return pa.array(~hit) if hit.any() else None

    def _load(self, file: DataFile) -> pa.Table:
        """The rows of a file with the current columns."""
        table = pq.read_table(file.path, partitioning=None)
        columns = [
            table.column(field.name).cast(field.type)
            if field.name in table.column_names
            else pa.nulls(table.num_rows, field.type)
            for field in self._columns.schema
        ]
        return pa.table(columns, schema=self._columns.schema)

    def _write(self, part: int, table: pa.Table) -> DataFile:
        path = self._new_path(part, f"{uuid.uuid4().hex}.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        used = [name for name in table.column_names if name in OWN.names or table.column(name).null_count < len(table)]
        pq.write_table(table.select(used), path, compression="zstd", compression_level=1, use_dictionary=False)
        return DataFile(part, path, table.num_rows)

    def _discard(self) -> None:
        """Discard the files of an unfinished replacement."""

    # For subclasses

    @abstractmethod
    def _schema(self) -> pa.Schema | None:
        """The schema; None if the table is new."""

    @abstractmethod
    def _stored_progress(self) -> TargetProgress:
        """The progress of the last replacement."""

    @abstractmethod
    def _stored_files(self) -> Iterable[DataFile]:
        """The current files."""

    @abstractmethod
    def _new_path(self, part: int, name: str) -> Path:
        """The path of a new file."""

    @abstractmethod
    def _exchange_files(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], schema: pa.Schema, progress: TargetProgress
    ) -> None:
        """Replace files of the table and store the progress, atomically."""


def sync_all(paths: Iterable[Path]) -> None:
    """Wait until files are on disk. They are synced in parallel, because one flush of the disk then serves several."""
    with ThreadPoolExecutor(SYNCS_MAX) as pool:
        for done in [pool.submit(sync, path) for path in paths]:
            done.result()


def _of_part(table: pa.Table, part: int, column: str = "_vbucket") -> pa.Table:
    vbuckets = table.column(column).to_numpy()
    return table.filter(pa.array(vbuckets // PART_VBUCKETS == part))
