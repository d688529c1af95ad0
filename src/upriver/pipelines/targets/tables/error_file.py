"""The documents that a task could not write to a table: a Parquet file with each document and the reason.

The files take effect with the commit of their batch. A commit that has such files increases a number in the table, and
the names of the files contain it. So files with a higher number than the table's are of attempts that have not been
committed: the next attempt replaces or deletes them. The name also tells the work of the task, so two attempts of one
task write the same file.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from upriver.tables import DataFileWriter, TableStorage

ERRORS: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("vbucket", pa.int32()),
        ("seqno", pa.int64()),
        ("reason", pa.string()),
        ("value", pa.binary()),
    ]
)


@dataclass(frozen=True)
class ErrorPlace:
    """Where the tasks of the next commit put documents that cannot be written."""

    storage: TableStorage
    #: The name under which the table records the number.
    application: str
    #: The number of the next commit that has such documents.
    number: int

    def path(self, item: bytes) -> str:
        """The file for the task that works on this item."""
        task = hashlib.sha256(item).hexdigest()[:16]
        return f"{self.application}.{self.number}.{task}.parquet"

    def discard(self, but: Collection[str] = ()) -> None:
        """Delete the files of attempts that were not committed, except for these."""
        found = [file.path for file in self.storage.list()]
        self.storage.delete(path for path in found if path not in but and self._is_pending(path))

    def _is_pending(self, path: str) -> bool:
        match path.split("."):
            case [self.application, number, _, "parquet"] if number.isdecimal():
                return int(number) >= self.number
        return False


class ErrorFile:
    """Collects refused changes. A task without any leaves no file."""

    def __init__(self, storage: TableStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._writer: DataFileWriter | None = None
        #: A vbucket that is read again after a rollback brings the same changes again.
        self._known: set[tuple[int, bytes, int, int]] = set()

    @property
    def rows(self) -> int:
        """Number of changes."""
        return len(self._known)

    def add(self, rows: pa.RecordBatch, reasons: Sequence[str]) -> None:
        """Take changes, with a reason for each."""
        if self._writer is None:
            self._writer = DataFileWriter(self._storage, self._path, ERRORS)
        told = rows.append_column("reason", pa.array(reasons, pa.string()))
        ids = list(zip(*(rows.column(name).to_pylist() for name in ("vbucket", "key", "seqno", "cas")), strict=True))
        told = told.filter(pa.array([each not in self._known for each in ids], pa.bool_()))
        self._known.update(ids)
        self._writer.write(pa.Table.from_batches([told]).select(ERRORS.names).cast(ERRORS))

    def finish(self) -> str:
        """Complete the file, or replace that of an earlier attempt; returns its name, or nothing."""
        return "" if self._writer is None else self._writer.finish().path

    def abandon(self) -> None:
        """Forget what was written. The finished file of another attempt stays."""
        if self._writer is not None:
            self._writer.discard()
