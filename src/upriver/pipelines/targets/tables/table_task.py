"""What a Spark task does for a table: read its ranges, write its part, and find the rows that are dead now.

The driver gives a task the state of the table that it planned with. The task writes files that nothing references yet,
and returns their names with the positions of the old versions, as bitmaps.

If the first documents have fields that should become columns, the task writes with these columns. The driver adds them
if all tasks have chosen the same. Otherwise, and if a column must change, it decides, and the tasks run again.

A document that cannot be written goes to the file of errors, if the user wants one. It costs the file that it was
written to, so the task starts over, once, and tries each chunk in memory before it writes it. The table then has no row
of its key: an earlier version would be wrong.
"""

import pickle
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from upriver.errors import TargetRefused
from upriver.pipelines.apply.task_apply import Connect, TaskOutcome, TaskSource, apply_ranges, replace
from upriver.pipelines.targets.tables.error_file import ErrorFile, ErrorPlace
from upriver.pipelines.targets.tables.history import HistoryWriter
from upriver.pipelines.targets.target import ReadAhead
from upriver.spark import FIELDS, unpacked_ranges
from upriver.tables import (
    Add,
    FieldReport,
    NewFile,
    PartResult,
    PartWriter,
    TableSchema,
    TableStorage,
    UnwritableRows,
    files_expected,
    locate,
    parse,
)

#: The columns that a table needs of a change.
COLUMNS: Final = (
    "vbucket", "seqno", "rev_seqno", "cas", "event", "key", "value", "flags", "expiry", "datatype", "vbucket_uuid",
)  # fmt: skip
#: Number of documents to look at before a task writes anything.
SAMPLE: Final = 1000
#: Number of refused documents that an error names.
SAMPLES: Final = 3


@dataclass(frozen=True, kw_only=True)
class Growth:
    """When a field becomes a column: its share of the documents, and how many of them at least."""

    share: float
    at_least: int

    def grown(self, schema: TableSchema, report: FieldReport) -> TableSchema:
        """The schema with the fields that a report justifies, and with decimals where integers were."""
        return schema.grown(report, self.share, at_least=self.at_least).widened(report.decimals)


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What a task returns to the driver."""

    #: The version of the table that the task has seen, and the basis of its plan.
    version: int
    basis: str
    #: What the task has written with, and the first documents, for which it has chosen the columns.
    schema: TableSchema
    sample: FieldReport = field(default_factory=FieldReport)
    report: FieldReport = field(default_factory=FieldReport)
    #: None if the task has stopped because the schema must change first.
    part: PartResult | None = None
    history: NewFile | None = None
    #: The file with documents that could not be written, and their number.
    errors: str = ""
    refused: int = 0
    #: By file of the table: serialised bitmaps of the positions that are dead now.
    dead: Mapping[str, bytes] = field(default_factory=dict)
    outcome: TaskOutcome = field(default_factory=TaskOutcome)

    def to_bytes(self) -> bytes:
        """For the way to the driver."""
        return pickle.dumps(self)

    @staticmethod
    def of_bytes(data: bytes) -> "TaskResult":
        """Read what ``to_bytes`` returned."""
        found = pickle.loads(data)
        assert isinstance(found, TaskResult)
        return found


class OtherColumns(Exception):
    """A column must change first."""


@dataclass(frozen=True, kw_only=True)
class TableTask:
    """The work on the ranges of one task."""

    storage: TableStorage
    version: int
    #: Identifies the table and its reads ahead of the stream: results of another basis must not be committed.
    basis: str
    schema: TableSchema
    seed: bytes
    files: Sequence[Add]
    connect: Connect
    ahead: Mapping[int, ReadAhead]
    #: None if the schema is fixed.
    growth: Growth | None
    #: Whether old versions are hidden by vectors.
    vectors: bool = True
    history: TableStorage | None = None
    #: Where documents go that cannot be written; without it they fail the task.
    errors: ErrorPlace | None = None

    def __call__(self, item: bytes) -> bytes:
        """Apply packed ranges."""
        ranges = unpacked_ranges(item)
        return self._work(item, lambda source, sink: apply_ranges(source, ranges, self.ahead, sink, seen=sink.seen))

    def repair(self, item: bytes) -> bytes:
        """Replace vbuckets by what the nodes hold."""

        def work(source: TaskSource, sink: "_TableSink") -> TaskOutcome:
            vbuckets, known = set(unpacked_vbuckets(item)), set(source.vbuckets())
            # Another program may have added rows of vbuckets that the source does not have.
            outcome = TaskOutcome(cleared=vbuckets - known)
            replace(source, vbuckets & known, sink, outcome)
            return outcome

        return self._work(item, work)

    def relocate(self, item: bytes) -> bytes:
        """Find the old versions again in the table as it is now, from the saved list of keys."""
        return pickle.dumps(self._dead(item.decode()))

    def _work(self, item: bytes, work: "_Work") -> bytes:
        """Work, and start over if there are rows that cannot be written."""
        try:
            return self._attempt(work, None)
        except UnwritableRows as stop:
            if self.errors is None:
                raise self._refusal(stop) from stop
        return self._attempt(work, ErrorFile(self.errors.storage, self.errors.path(item)))

    def _refusal(self, stop: UnwritableRows) -> TargetRefused:
        """The error for rows that cannot be written and have nowhere else to go."""
        samples = [
            f"key {key!r} of vbucket {vbucket}, seqno {seqno} ({reason})"
            for (vbucket, key, seqno), reason in list(stop.reasons.items())[:SAMPLES]
        ]
        hint = "with --errors-to PATH such documents are stored there"
        return TargetRefused(self.storage.url, len(stop.reasons), [*samples, hint])

    def _attempt(self, work: "_Work", errors: ErrorFile | None) -> bytes:
        source = self.connect(COLUMNS if self.history is None else tuple(FIELDS))
        sink = _TableSink(self, errors)
        try:
            outcome = work(source, sink)
            part = sink.writer.finish(outcome.replaced.keys() | outcome.cleared)
            dead = self._dead(part.keys)
            result = TaskResult(
                version=self.version,
                basis=self.basis,
                schema=sink.writer.schema,
                sample=sink.sample,
                report=part.report,
                part=part,
                history=sink.finish_history(),
                dead=dead,
                outcome=outcome,
                refused=0 if errors is None else errors.rows,
                errors="" if errors is None else errors.finish(),  # the last file, because nothing removes it
            )
        except OtherColumns:
            sink.abandon()
            result = TaskResult(version=self.version, basis=self.basis, schema=self.schema, sample=sink.sample)
        except BaseException:
            sink.abandon()
            raise
        finally:
            source.close()
        return result.to_bytes()

    def _dead(self, keys: str) -> dict[str, bytes]:
        with files_expected(self.storage):
            return locate(self.storage, self.files, keys, (), cache_directory())


class _TableSink:
    """Where a task puts its changes."""

    def __init__(self, task: TableTask, errors: ErrorFile | None) -> None:
        self._task = task
        self._errors = errors
        attempt = uuid.uuid4().hex
        self.writer = PartWriter(
            task.storage,
            task.schema,
            task.seed,
            attempt=attempt,
            vectors=task.vectors,
            cache=cache_directory(),
            on_refused=None if errors is None else errors.add,
        )
        self._history = None if task.history is None else HistoryWriter(task.history, attempt)
        #: The fields of the first documents.
        self.sample = FieldReport()
        self._has_chosen = task.growth is None

    def add(self, rows: pa.RecordBatch) -> None:
        """Take changes of keys."""
        if not self._has_chosen:
            self._choose_columns(rows)
        self.writer.add(rows)

    def discard(self, vbucket: int) -> None:
        """Forget the changes of a vbucket."""
        self.writer.discard(vbucket)

    @property
    def seen(self) -> Callable[[pa.RecordBatch], None] | None:
        """What is called with everything that the stream brings; None without a history."""
        return None if self._history is None else self._history.add

    def finish_history(self) -> NewFile | None:
        """Finish the file of the history."""
        return None if self._history is None else self._history.finish()

    def abandon(self) -> None:
        """Remove what was written."""
        self.writer.abandon()
        if self._errors is not None:
            self._errors.abandon()
        if self._history is not None:
            self._history.abandon()

    def _choose_columns(self, rows: pa.RecordBatch) -> None:
        """Choose the columns that the first documents need, before anything is written."""
        values = rows.column("value").filter(pc.equal(rows.column("event"), "mutation")).slice(0, SAMPLE)
        if not len(values):
            return
        self._has_chosen = True
        growth, schema = self._task.growth, self.writer.schema
        assert growth is not None
        self.sample = parse(values, schema.columns).report
        needed = growth.grown(schema, self.sample)
        if needed.widens(schema):
            raise OtherColumns
        self.writer.schema = needed


#: What a task does with its connection to the nodes and its sink.
_Work = Callable[[TaskSource, _TableSink], TaskOutcome]


def cache_directory() -> Path:
    """Where a worker keeps copies of key indexes from object stores."""
    return Path(tempfile.gettempdir()) / "upriver-key-indexes"


def packed_vbuckets(vbuckets: Collection[int]) -> bytes:
    """Vbuckets as an item of work."""
    return b"".join(number.to_bytes(2, "little") for number in sorted(vbuckets))


def unpacked_vbuckets(item: bytes) -> list[int]:
    """Read what ``packed_vbuckets`` returned."""
    return [int.from_bytes(item[at : at + 2], "little") for at in range(0, len(item), 2)]
