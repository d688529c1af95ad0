"""The history: an append-only table with every change that the stream has brought.

The tasks that write the table of the latest state write the history too, from the same rows. Rows about whole vbuckets
(rollback, reset, flush) are in it, so a reader can tell which changes the source has lost. A batch is in the history
once: its number is in the same commit.
"""

import json
import time
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from upriver.errors import FilesLost, ForeignData, TableConflict
from upriver.spark import ROWS
from upriver.tables import DataFileWriter, Edit, NewFile, Table, TableStorage

#: The property that tells a history from a table of the latest state.
PROPERTY: Final = "upriver.history"
_QUERY: Final = "upriver.query"
_DELTA_TYPES: Final = {pa.int32(): "integer", pa.int64(): "long", pa.string(): "string", pa.binary(): "binary"}
#: Collect rows up to this size before they are written.
_CHUNK_BYTES: Final = 32 << 20


class HistoryWriter:
    """Writes the changes of one task into one file."""

    def __init__(self, storage: TableStorage, attempt: str) -> None:
        self._storage = storage
        self._path = f"{attempt}.parquet"
        self._writer: DataFileWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def add(self, rows: pa.RecordBatch) -> None:
        """Append changes."""
        self._waiting.append(rows)
        self._waiting_bytes += rows.nbytes
        if self._waiting_bytes >= _CHUNK_BYTES:
            self._write()

    def finish(self) -> NewFile | None:
        """Complete the file; None if there were no changes."""
        self._write()
        return None if self._writer is None else self._writer.finish()

    def abandon(self) -> None:
        """Remove what was written."""
        if self._writer is not None:
            self._writer.discard()
        self._storage.delete([self._path])

    def _write(self) -> None:
        if self._waiting:
            if self._writer is None:
                self._writer = DataFileWriter(self._storage, self._path, ROWS)
            self._writer.write(pa.Table.from_batches(self._waiting).select(ROWS.names).cast(ROWS))
            self._waiting, self._waiting_bytes = [], 0


class HistorySchema:
    """The columns of a change, as Delta describes them."""

    def delta(self) -> str:
        """The schema of the table."""
        fields = [
            {"name": field.name, "type": _DELTA_TYPES[field.type], "nullable": True, "metadata": {}} for field in ROWS
        ]
        return json.dumps({"type": "struct", "fields": fields})


class History:
    """The driver's side of a history."""

    def __init__(self, storage: TableStorage, query: str, application: str, *, adopt: bool = False) -> None:
        """Batches are recorded under the name ``application``. ``adopt``: continue the history of another query."""
        found = Table.find(storage)
        if found is None:
            found = Table.create(storage, HistorySchema(), {PROPERTY: "true", _QUERY: query}, vectors=False)
        elif PROPERTY not in found.properties:
            raise ForeignData(storage.url, "a table of the latest state, not a history; choose another directory")
        elif found.properties.get(_QUERY) != query:
            if not adopt:
                raise ForeignData(
                    storage.url,
                    "the history belongs to another mirror, or its checkpoint is lost. Choose another place, or use "
                    "--adopt to continue it",
                )
            found.commit(Edit("SET OWNER", properties={_QUERY: query}, data_change=False))
        self.table = found
        #: Changes when the mirror starts over.
        self.application = application

    def append(self, parts: Sequence[NewFile], number: int) -> None:
        """Add the files of a batch, unless the history has it already."""
        while True:
            self.table.refresh()
            if self.table.snapshot.txns.get(self.application, -1) >= number:
                self.table.storage.delete({part.path for part in parts} - self.table.snapshot.files.keys())
                return
            try:
                now_ms = time.time_ns() // 1_000_000
                self.table.commit(Edit("WRITE", [part.add(now_ms) for part in parts], txn=(self.application, number)))
            except FilesLost:
                raise
            except TableConflict:
                continue  # other writers may append too
            return
