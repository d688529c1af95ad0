"""The documents that a task could not write to a table: a Parquet file with each document and the reason."""

from collections.abc import Sequence
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


class ErrorFile:
    """Collects refused changes. A task without any leaves no file."""

    def __init__(self, storage: TableStorage, attempt: str) -> None:
        self._storage = storage
        self._path = f"{attempt}.parquet"
        self._writer: DataFileWriter | None = None
        self.rows = 0

    def add(self, rows: pa.RecordBatch, reasons: Sequence[str]) -> None:
        """Take changes, with a reason for each."""
        if self._writer is None:
            self._writer = DataFileWriter(self._storage, self._path, ERRORS)
        told = rows.append_column("reason", pa.array(reasons, pa.string()))
        self._writer.write(pa.Table.from_batches([told]).select(ERRORS.names).cast(ERRORS))
        self.rows += rows.num_rows

    def finish(self) -> str:
        """Complete the file; returns its name, or nothing."""
        return "" if self._writer is None else self._writer.finish().path

    def abandon(self) -> None:
        """Remove what was written."""
        if self._writer is not None:
            self._writer.discard()
            self._storage.delete([self._path])
