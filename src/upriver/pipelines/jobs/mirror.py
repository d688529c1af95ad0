"""The pipeline mirror: a Delta table with the latest state of every key, and optionally the history."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from upriver.errors import OptionError
from upriver.options import as_flag, as_jvm_size, as_text, number, one_of, option
from upriver.pipelines.apply.task_source import NodeTaskSource
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.options import PipelineOptions
from upriver.pipelines.core.range_pipeline import RangePipeline, RangeTask, RunTasks
from upriver.pipelines.targets.tables.compactor import Compactor
from upriver.pipelines.targets.tables.table_keeper import KeeperSettings, TableKeeper, opened, table_task
from upriver.pipelines.targets.tables.table_task import COLUMNS
from upriver.spark import ReadOptions
from upriver.tables import PATIENCE, TableSchema, TableStorage, storage_options

#: The file beside the checkpoint that names the last committed batch, as the table does.
_COMMITTED: Final = "committed-batch.json"
#: The dialects that can ask a node for superseded versions.
_WITH_HISTORY: Final = ("dcp", "upr")


def as_schema(value: Any) -> str:
    """Columns of a table, as in ``name string, age long``."""
    try:
        TableSchema.parse(str(value))
    except OptionError as error:
        raise ValueError(f"columns such as 'name string, age long, tags json' ({error})") from None
    return str(value)


def as_storage_options(value: Any) -> str:
    """Options of an object store: ``name=value,name=value``."""
    storage_options(str(value))
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions(PipelineOptions):
    """The options of mirror."""

    to: str = option("mirror", as_text, "directory or URL of the table (s3://, gs://, az://)", "PATH")
    history: str | None = option(
        None, as_text, "directory or URL of a second table, which gets every retained version", "PATH"
    )
    schema: str | None = option(
        None, as_schema, "columns of the table; by default the fields that enough documents have", "'NAME TYPE, …'"
    )
    column_share: float = option(
        0.01, number(0, 1, values="SHARE"), "share of the documents that must have a field before it becomes a column"
    )
    deletion_vectors: str | None = option(
        None,
        one_of("on", "off"),
        "hide old versions by deletion vectors, or write their files again; default: as the table is, on for a new one",
    )
    adopt: bool = option(False, as_flag, "take over the table of a lost checkpoint, and replace what it holds")
    errors_to: str | None = option(
        None, as_text, "directory or URL for documents that cannot be written, as Parquet with the reason", "PATH"
    )
    max_bytes: int | None = option(None, as_jvm_size, "estimated maximum size of a batch", "SIZE")
    storage_options: str | None = option(
        None, as_storage_options, "options of the object store; by default from the environment", "NAME=VALUE,…"
    )

    def __post_init__(self) -> None:
        if self.start != "earliest":
            raise OptionError("start", self.start, "the table holds the state of every key: it must be earliest")
        if self.history is not None and self.table(self.history).url == self.table(self.to).url:
            raise OptionError("history", self.history, "this is the table of the latest state: choose another one")
        for table in filter(None, (self.to, self.history)):
            if self.errors_to and f"{self.table(self.errors_to).url}/".startswith(f"{self.table(table).url}/"):
                raise OptionError("errors-to", self.errors_to, "this is inside of a table: choose another place")

    def table(self, where: str) -> TableStorage:
        """The storage of a table."""
        return TableStorage.of(where, storage_options(self.storage_options or ""))

    def reader_options(self) -> dict[str, str]:
        """These options for the source. The identity of the bucket is checked, so a flush is not taken for a loss."""
        said = {**super(MirrorOptions, self).reader_options(), "flushResets": "true"}
        if self.history is not None and self.dialect in _WITH_HISTORY:
            said["history"] = "true"
        return said if self.max_bytes is None else {**said, "maxBytesPerTrigger": str(self.max_bytes)}


class Mirror(RangePipeline):
    """Keeps a Delta table of all documents current: one row per key, with a column for each common field."""

    name = "mirror"
    options_type = MirrorOptions
    options: MirrorOptions

    def __init__(self, options: MirrorOptions) -> None:
        super().__init__(options)
        self._source = ReadOptions.read(self.reader_options())
        self._keeper: TableKeeper | None = None
        #: Of the table, and of the history.
        self._compactors: list[Compactor] = []
        self._nodes: NodeTaskSource | None = None
        self._counted: dict[str, int] = {}
        self._decimals: frozenset[str] = frozenset()

    @property
    def target(self) -> str:
        """The location of the table."""
        return self.options.table(self.options.to).url

    def open(self, directory: RunDirectory) -> None:
        """Open the table, and create it if necessary."""
        super().open(directory)
        options = self.options
        with self._working:
            self._let_go()
            self._nodes = NodeTaskSource(self._source, COLUMNS)
            self._keeper = keeper = TableKeeper(
                options.table(options.to),
                partial(NodeTaskSource, self._source),
                self._nodes,
                self._settings,
                query=directory.query,
                bucket=self._nodes.bucket,
                reached=directory.reached,
                logged=directory.logged,
                end_of=directory.end_of,
                history=self._history,
            )
            self._compactors = [Compactor(keeper.table, keeper.lock, keeper.record)]
            if keeper.history is not None:
                self._compactors.append(Compactor(keeper.history.table, keeper.lock))
            if keeper.starts_over:
                directory.write(_COMMITTED, None)
            committed = directory.read(_COMMITTED)
            if committed is not None and not keeper.has_batch(*committed):
                keeper.rebuild()

    def plan(self, batch_number: int | None) -> RangeTask | None:
        """The work of the tasks, with the table as it is now."""
        if batch_number is None:
            table = opened(self.options.table(self.options.to), self._settings)
            return table_task(table, partial(NodeTaskSource, self._source), self._settings, self._history)
        assert self._keeper is not None, "the pipeline is not open"
        return self._keeper.plan(batch_number, self.workers)

    def commit(self, results: Sequence[bytes], batch_number: int, run: RunTasks) -> int:
        """Commit a batch to the table."""
        assert self._keeper is not None, "the pipeline is not open"
        assert self.directory is not None
        changes = self._keeper.commit(results, batch_number, run, self.workers)
        if self._keeper.batch_number == batch_number:
            self.directory.write(_COMMITTED, [self._keeper.application, batch_number])
        is_behind = 2 * changes > self.options.max_rows
        for compactor in self._compactors:
            compactor.start(self.workers, PATIENCE if is_behind else 1)
        return changes

    def idle(self) -> None:
        """Repair what other programs or a failover have changed, and merge small files."""
        if self._keeper is None or not self._working.acquire(blocking=False):
            return
        try:
            self._keeper.look(self.workers)
            for compactor in self._compactors:
                compactor.start(self.workers)
        finally:
            self._working.release()

    def counts(self) -> dict[str, int]:
        """Counts since the start: rollbacks, repeated reads, conflicts, merged files."""
        found = dict(self._counted)
        counts: list[object] = [each.counts for each in self._compactors]
        for each in counts if self._keeper is None else [self._keeper.counts, *counts]:
            for name, value in vars(each).items():
                found[name] = found.get(name, 0) + value
        return found

    def warnings(self) -> list[str]:
        """The declared columns that do not have all numbers of the documents."""
        found = self._decimals if self._keeper is None else self._decimals | self._keeper.decimals
        return [
            f"column {name}: some documents have decimals, but --schema declares whole numbers. There the column is "
            f"null, and _raw has the value. To store them in the column, start the mirror again with '{name} double'"
            for name in sorted(found)
        ]

    def close(self) -> None:
        """Wait for a running compaction, and close the connections."""
        with self._working:
            self._let_go()

    def _let_go(self) -> None:
        for compactor in self._compactors:
            compactor.stop()
        self._counted = self.counts()
        if self._keeper is not None:
            self._decimals |= self._keeper.decimals
        if self._nodes is not None:
            self._nodes.close()
        self._keeper = self._nodes = None
        self._compactors = []

    @property
    def _settings(self) -> KeeperSettings:
        options = self.options
        return KeeperSettings(
            schema=None if options.schema is None else TableSchema.parse(options.schema),
            share=options.column_share,
            vectors=None if options.deletion_vectors is None else options.deletion_vectors == "on",
            adopt=options.adopt,
            errors=None if options.errors_to is None else options.table(options.errors_to),
        )

    @property
    def _history(self) -> TableStorage | None:
        return None if self.options.history is None else self.options.table(self.options.history)
