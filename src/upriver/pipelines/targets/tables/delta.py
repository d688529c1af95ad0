"""The latest state and the history as Delta tables: one transaction of delta-rs per batch.

The progress is in a small file beside the log. The transaction names the file by the version of the application
``upriver``, so both take effect together. The version of a second application, the query, is its last batch.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Transaction, write_deltalake
from deltalake import Schema as DeltaSchema
from deltalake.transaction import AddAction, RemoveAction

from upriver.errors import ForeignData
from upriver.files import write_atomically
from upriver.pipelines.targets.tables.columns import PART, Columns
from upriver.pipelines.targets.tables.table import DataFile, TableTarget
from upriver.pipelines.targets.target import TargetProgress

#: The application whose version names the progress file.
APPLICATION: Final = "upriver"
#: Number of progress files to keep.
KEPT: Final = 16
#: Vacuum after this many transactions: delete files that are too old for time travel.
VACUUM_EVERY: Final = 200


class Delta(TableTarget):
    """A Delta table in a local directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        if DeltaTable.is_deltatable(str(path)):
            self._table = DeltaTable(str(path))
            if self._table.transaction_version(APPLICATION) is None and PART not in _names(self._table):
                raise ForeignData(str(path), "not an Upriver mirror; choose another directory")
        elif any(path.iterdir()):
            raise ForeignData(str(path), "not a Delta table, and not empty; choose another directory")
        else:
            fields = pa.schema([*Columns().schema, pa.field(PART, pa.int32())])
            self._table = DeltaTable.create(str(path), fields, partition_by=[PART])
        super().__init__()

    def close(self) -> None:
        """Nothing to close."""

    @property
    def version(self) -> int:
        """The number of transactions."""
        return self._table.version()

    def _schema(self) -> pa.Schema | None:
        return pa.schema(self._table.schema().to_arrow())

    def _stored_progress(self) -> TargetProgress:
        state = self._table.transaction_version(APPLICATION)
        if state is None:
            return TargetProgress()
        try:
            return TargetProgress.of_text(self._state(state).read_text())
        except FileNotFoundError:
            raise ForeignData(
                str(self.path), f"the file {self._state(state).name} is missing; choose a new directory"
            ) from None

    def _stored_files(self) -> Iterable[DataFile]:
        actions = pa.table(self._table.get_add_actions(flatten=True))
        columns = (actions.column(name).to_pylist() for name in ("path", f"partition.{PART}", "num_records"))
        for path, part, rows in zip(*columns, strict=True):
            yield DataFile(part, self.path / path, rows or 0)

    def _new_path(self, part: int, name: str) -> Path:
        return self.path / f"{PART}={part}" / name

    def _state(self, number: int) -> Path:
        return self.path / "_upriver" / f"{number:012}.json"

    def _exchange_files(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], schema: pa.Schema, progress: TargetProgress
    ) -> None:
        known = _names(self._table)
        new = [Field.from_arrow(field) for field in schema if field.name not in known]
        if new:
            self._table.alter.add_columns(new)
        number = (self._table.transaction_version(APPLICATION) or 0) + 1
        self._write_state(number, progress)
        now = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [self._added(file, now) for file in added]
        actions += [
            RemoveAction(str(file.path.relative_to(self.path)), True, now, None, {PART: str(file.part)})
            for file in removed
        ]
        transactions = [Transaction(APPLICATION, number)]
        if progress.number >= 0:
            transactions.append(Transaction(f"{APPLICATION}:{progress.query}", progress.number))
        self._table.create_write_transaction(
            actions,
            "append",
            self._table.schema(),
            [PART],
            commit_properties=CommitProperties(app_transactions=transactions),
        )
        self._table.update_incremental()
        for old in sorted(self._state(0).parent.glob("*.json"))[:-KEPT]:
            old.unlink()
        if number % VACUUM_EVERY == 0:
            self._table.vacuum(dry_run=False)  # keeps the files of the table's retention, by default seven days

    def _added(self, file: DataFile, now: int) -> AddAction:
        stats = f'{{"numRecords":{file.rows}}}'
        path = str(file.path.relative_to(self.path))
        return AddAction(path, file.path.stat().st_size, {PART: str(file.part)}, now, True, stats)

    def _write_state(self, number: int, progress: TargetProgress) -> None:
        path = self._state(number)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, progress.as_text().encode())


class DeltaHistory:
    """Every change in a separate Delta table, one transaction per batch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, changes: pa.Table, query: str, number: int) -> bool:
        """Add a batch, unless the table has it already."""
        application = f"{APPLICATION}:{query}"
        if DeltaTable.is_deltatable(str(self._path)):
            done = DeltaTable(str(self._path)).transaction_version(application)
            if done is not None and done >= number:
                return False
        properties = CommitProperties(app_transactions=[Transaction(application, number)])
        write_deltalake(str(self._path), changes, mode="append", commit_properties=properties)
        return True


def _names(table: DeltaTable) -> set[str]:
    schema: DeltaSchema = table.schema()
    return {field.name for field in schema.fields}
