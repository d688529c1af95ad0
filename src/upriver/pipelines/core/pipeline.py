"""The interface of a pipeline: a job that a runner starts, watches, restarts and ends.

A *job* has a name, options and counts for its summary. A *pipeline* is a job on a change stream: the runner reads the
stream with ``reader_options``, passes it to ``start`` and watches the query. Batches arrive at least once and in order.
After a crash the last one arrives again, perhaps with fewer rows, because keys that changed meanwhile belong to the
next batch. So ``apply`` must be idempotent, and must order its data by (branch, seqno).

A batch has two halves: each Spark task processes its rows (``in_task``; often not needed), and then ``apply`` gets the
results of all tasks. The runner here can run the two halves, and so can a Spark sink (``upriver.pipelines.core.sink``).
"""

import abc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from upriver.pipelines.core.options import JobOptions, PipelineOptions
from upriver.spark import ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


class Job(abc.ABC):
    """Work that the runner can run."""

    #: The name on the command line.
    name: str
    #: Whether the job writes to standard output, so that progress goes to standard error.
    owns_output: bool = False
    #: The class of its options.
    options_type: ClassVar[type[JobOptions]]

    def __init__(self, options: JobOptions) -> None:
        self.options = options

    @classmethod
    def of(cls, given: Mapping[str, Any] | None = None, **options: Any) -> Self:
        """The job with these options, as texts or values: ``Mirror.of(source="a:1", to="/tmp/t")``."""
        return cls(cls.options_type.read({**(given or {}), **options}))

    @property
    def target(self) -> str:
        """The target without secrets. A checkpoint belongs to one source and one target."""
        return str(getattr(self.options, "to", ""))

    def counts(self) -> dict[str, int]:
        """Counts since the start, for the progress and the summary."""
        return {}

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]] | None:
        """A table for a terminal: names of columns, and rows; or None."""
        return None

    def conclude(self) -> None:  # noqa: B027
        """Report pending results: the run has ended."""

    def close(self) -> None:  # noqa: B027
        """Release all resources; called once at the end."""


class Task(Job):
    """A job that needs no Spark and ends by itself."""

    @abc.abstractmethod
    def carry_out(self, directory: Path, tell: Callable[[], object], stop: threading.Event) -> None:
        """Run or resume the job until it is done or ``stop`` is set; call ``tell`` when the counts change."""


class InTask(abc.ABC):
    """The work of a Spark task. It runs in other processes, so it must be serializable."""

    #: The columns that it needs, as SQL expressions of Spark.
    columns: ClassVar[Sequence[str]]
    #: The schema of its results.
    schema: ClassVar[pa.Schema]

    @abc.abstractmethod
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Turn the rows into the results for ``apply``."""


class Pipeline(Job):
    """A job on a change stream."""

    options: PipelineOptions

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        #: The pipeline's own directory, which belongs to its checkpoint.
        self.directory: Path | None = None
        #: Why the last batch failed: the runner gets the exception of ``apply``, not Spark's text about it.
        self.failure: BaseException | None = None
        self._working = threading.Lock()

    def legs(self) -> "list[Pipeline]":
        """The streams of the pipeline: usually one, itself."""
        return [self]

    def reader_options(self) -> dict[str, str]:
        """Options for ``spark.readStream.format("upriver")``."""
        return {**self.options.reader_options(), "onRollback": "emit"}

    def open(self, directory: Path) -> None:
        """Prepare each start of the query: read the files in the directory. Errors are those of ``apply``."""
        self.directory = directory

    def start(self, changes: "DataFrame", checkpoint: Path, *, once: bool = False) -> "StreamingQuery":
        """Start the query: with ``once`` it stops at the changes that exist now."""
        writer = changes.writeStream.queryName(f"upriver-{self.name}-{id(self):x}").foreachBatch(self._applied)
        if once:
            writer = writer.trigger(availableNow=True)
        return writer.option("checkpointLocation", str(checkpoint)).start()

    def in_task(self) -> InTask | None:
        """The work of the tasks; None if ``apply`` gets the rows as they are."""
        return None

    @abc.abstractmethod
    def apply(self, found: pa.Table, batch_number: int) -> None:
        """Apply the results of the tasks to the target. When it returns, the batch is complete."""

    def idle(self) -> None:
        """Called about every second between batches, for work that does not depend on new changes."""

    def settle(self) -> None:
        """Wait until no batch is running."""
        with self._working:
            pass

    def _applied(self, frame: "DataFrame", batch_number: int) -> None:
        with self._working:
            self.failure = None
            try:
                self.apply(handed_over(frame, self.in_task()), batch_number)
            except BaseException as error:
                self.failure = error
                raise


def handed_over(frame: "DataFrame", work: InTask | None) -> pa.Table:
    """The results of the tasks for a batch. The frame is read once: keys may change before a second read."""
    if work is None:
        return frame.select(*ROWS.names).toArrow().cast(ROWS)
    from pyspark.sql.pandas.types import from_arrow_schema

    found = frame.selectExpr(*work.columns).mapInArrow(work, from_arrow_schema(work.schema))
    return found.toArrow().cast(work.schema)
