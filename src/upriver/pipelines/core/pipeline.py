"""The interface of a pipeline: a job that a runner starts, watches, restarts and ends.

A *job* has a name, options and counts for its summary. A *pipeline* is a job on a change stream: the runner reads the
stream with ``reader_options``, passes it to ``start`` and watches the query. Batches arrive at least once and in order.
After a crash the last one arrives again, perhaps with fewer rows, because keys that changed meanwhile belong to the
next batch. So applying a batch must be idempotent, and must order its data by (branch, seqno).

A batch has two halves: each Spark task works, and then one process gets the results of all tasks. The runner here can
run the two halves, and so can a Spark sink (``upriver.pipelines.sinks.sink``). There are two kinds: the tasks of a
``RangePipeline`` read from the nodes and write to the target; those of a ``RowPipeline`` get the changes as rows.
"""

import abc
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import pyarrow as pa

from upriver.pipelines.core.options import JobOptions, PipelineOptions, as_typed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from upriver.pipelines.core.directory import RunDirectory


#: The name under which Spark knows pipelines as sinks.
SINK_FORMAT: Final = "upriver_pipeline"


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
        #: The options as ``of`` got them; empty if it did not make the job.
        self.given: Mapping[str, Any] = {}

    @classmethod
    def of(cls, given: Mapping[str, Any] | None = None, **options: Any) -> Self:
        """The job with these options, as texts or values: ``Mirror.of(source="a:1", to="/tmp/t")``."""
        job = cls(cls.options_type.read({**(given or {}), **options}))
        job.given = {**(given or {}), **options}
        return job

    @property
    def target(self) -> str:
        """The target without secrets. A checkpoint belongs to one source and one target."""
        return str(getattr(self.options, "to", ""))

    def counts(self) -> dict[str, int]:
        """Counts since the start, for the progress and the summary."""
        return {}

    def warnings(self) -> list[str]:
        """What the user should know about the results, each thing once."""
        return []

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


class Pipeline(Job):
    """A job on a change stream."""

    options: PipelineOptions

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        #: The pipeline's own directory, which belongs to its checkpoint.
        self.directory: RunDirectory | None = None
        #: Why the last batch failed: the runner gets the exception of ``apply``, not Spark's text about it.
        self.failure: BaseException | None = None
        self._working = threading.Lock()

    def legs(self) -> "list[Pipeline]":
        """The streams of the pipeline: usually one, itself."""
        return [self]

    def reader_options(self) -> dict[str, str]:
        """Options for ``spark.readStream.format("upriver")``."""
        return {**self.options.reader_options(), "onRollback": "emit"}

    def open(self, directory: "RunDirectory") -> None:
        """Prepare each start of the query: read the files in the directory. Errors are those of ``apply``."""
        self.directory = directory

    def start(self, changes: "DataFrame", checkpoint: str, *, once: bool = False) -> "StreamingQuery":
        """Start the query: with ``once`` it stops at the changes that exist now."""
        return self._started(changes.writeStream.foreachBatch(self._applied), checkpoint, once)

    def start_on_server(self, changes: "DataFrame", checkpoint: str, *, once: bool = False) -> "StreamingQuery":
        """Start the query on a server of Spark Connect, where the pipeline runs as a sink.

        There a function for ``foreachBatch`` would run in a process of its own, whose state this process cannot see.
        """
        texts = {name: as_typed(value) for name, value in self.given.items() if value is not None}
        sink = changes.writeStream.format(SINK_FORMAT).options(pipeline=self.name, **texts)
        return self._started(sink, checkpoint, once)

    def _started(self, writer: "DataStreamWriter", checkpoint: str, once: bool) -> "StreamingQuery":
        writer = writer.queryName(f"upriver-{self.name}-{id(self):x}").option("checkpointLocation", checkpoint)
        return (writer.trigger(availableNow=True) if once else writer).start()

    @abc.abstractmethod
    def _apply_frame(self, frame: "DataFrame", batch_number: int) -> None:
        """Apply a batch. When it returns, the batch is complete."""

    def rows_of(self, progress: Mapping[str, Any]) -> int:
        """The number of changes in the batch of a progress event of Spark."""
        return int(progress.get("numInputRows") or 0)

    def unreported(self) -> list[int]:
        """The number of changes of each complete batch that no progress event of the ended query reports."""
        return []

    # As a Spark sink

    @property
    @abc.abstractmethod
    def columns(self) -> Sequence[str]:
        """The columns of the rows that a task of a sink gets."""

    @abc.abstractmethod
    def in_sink_task(self, rows: Iterable[pa.RecordBatch]) -> bytes:
        """What a task of a sink does with its rows; returns the message for ``apply_messages``."""

    @abc.abstractmethod
    def apply_messages(self, messages: Sequence[bytes], batch_number: int) -> None:
        """Apply a batch whose tasks have sent these messages."""

    def idle(self) -> None:
        """Called about every second, in a thread of its own, for work that does not depend on new changes."""

    def settle(self) -> None:
        """Wait until no batch is running."""
        with self._working:
            pass

    def _applied(self, frame: "DataFrame", batch_number: int) -> None:
        with self._working:
            self.failure = None
            try:
                self._apply_frame(frame, batch_number)
            except BaseException as error:
                self.failure = error
                raise
