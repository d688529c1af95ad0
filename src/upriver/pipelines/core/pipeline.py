"""What a pipeline is: a job that a runner starts, watches, starts again and ends.

A *job* has a name, a table of options and counts for its summary. A *pipeline* is a job on a stream of changes: the
runner reads the stream with ``reader_options``, hands it to ``start`` and looks after the query. Batches come at least
once and in their order: after a crash the last one comes again, perhaps with fewer rows, because a key that changed
meanwhile has moved on to the next batch. So ``apply`` must be idempotent, and order what it holds by (branch, seqno).

A batch has two halves: what each task of Spark does with its rows (``in_task``; mostly nothing) and what is done once
with all that the tasks have handed over (``apply``). That is all a pipeline is, so whoever can run the two halves can
run the pipeline: the runner here, or a sink of Spark (``upriver.pipelines.core.sink``).
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
    """Something that the runner can carry out."""

    #: What it is called on the command line.
    name: str
    #: Whether standard output is the job's own, so that progress is told on standard error.
    owns_output: bool = False
    #: The table of its options.
    options_type: ClassVar[type[JobOptions]]

    def __init__(self, options: JobOptions) -> None:
        self.options = options

    @classmethod
    def of(cls, given: Mapping[str, Any] | None = None, **options: Any) -> Self:
        """The job with these options, as text or as what the text means: ``Mirror.of(source="a:1", to="/tmp/t")``."""
        return cls(cls.options_type.read({**(given or {}), **options}))

    @property
    def target(self) -> str:
        """What it writes to, without secrets: a checkpoint belongs to one source and one target."""
        return str(getattr(self.options, "to", ""))

    def counts(self) -> dict[str, int]:
        """What was done since the start, for the progress and the summary."""
        return {}

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]] | None:
        """What is shown live on a terminal, if there is something: names of columns, and rows."""
        return None

    def conclude(self) -> None:  # noqa: B027
        """Tell what would have been told later: the run is over, for whatever reason, and nothing more comes."""

    def close(self) -> None:  # noqa: B027
        """Let go of everything; it is called once, whatever has happened."""


class Task(Job):
    """A job that needs no Spark and comes to an end by itself."""

    @abc.abstractmethod
    def carry_out(self, directory: Path, tell: Callable[[], object], stop: threading.Event) -> None:
        """Do it, or go on with it, until it is done or ``stop`` is set; ``tell`` when the counts are new."""


class InTask(abc.ABC):
    """What a task of Spark does with its rows. It goes to other processes, so it must be able to travel."""

    #: What it wants to know of each row, as Spark's SQL says it.
    columns: ClassVar[Sequence[str]]
    #: What it hands over.
    schema: ClassVar[pa.Schema]

    @abc.abstractmethod
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows, as they come, and what of them ``apply`` gets."""


class Pipeline(Job):
    """A job on a stream of changes."""

    options: PipelineOptions

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        #: The directory that is this pipeline's own: what it keeps there lives and dies with its checkpoint.
        self.directory: Path | None = None
        #: Why the last batch failed: an error in ``apply`` reaches the runner as it is, not as Spark's text about it.
        self.failure: BaseException | None = None
        self._working = threading.Lock()

    def legs(self) -> "list[Pipeline]":
        """The streams of which the pipeline consists: mostly itself."""
        return [self]

    def reader_options(self) -> dict[str, str]:
        """Options for ``spark.readStream.format("upriver")``."""
        return {**self.options.reader_options(), "onRollback": "emit"}

    def open(self, directory: Path) -> None:
        """Get ready, each time the query is started: what is kept in the directory is there, temporary trouble is told
        by the errors of ``apply`` alike."""
        self.directory = directory

    def start(self, changes: "DataFrame", checkpoint: Path, *, once: bool = False) -> "StreamingQuery":
        """Start the query: with ``once`` it ends with what is there now, otherwise it goes on."""
        writer = changes.writeStream.queryName(f"upriver-{self.name}-{id(self):x}").foreachBatch(self._applied)
        if once:
            writer = writer.trigger(availableNow=True)
        return writer.option("checkpointLocation", str(checkpoint)).start()

    def in_task(self) -> InTask | None:
        """What the tasks do; None if they hand over the rows as they are."""
        return None

    @abc.abstractmethod
    def apply(self, found: pa.Table, batch_number: int) -> None:
        """Bring to the target what the tasks have handed over. When it returns the batch is done for good."""

    def idle(self) -> None:
        """The runner calls it every second or so, between batches: for what has to be done though nothing comes."""

    def settle(self) -> None:
        """Wait until no batch is at work."""
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
    """What the tasks hand over of a batch. The batch is read once: a second look at the frame would read it again, and
    a key may have moved on in between."""
    if work is None:
        return frame.select(*ROWS.names).toArrow().cast(ROWS)
    from pyspark.sql.pandas.types import from_arrow_schema

    found = frame.selectExpr(*work.columns).mapInArrow(work, from_arrow_schema(work.schema))
    return found.toArrow().cast(work.schema)
