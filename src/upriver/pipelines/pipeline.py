"""What a pipeline is: a job that a runner starts, watches, starts again and ends.

A *job* has a name, a table of options and counts for its summary. A *pipeline* is a job on a stream of changes: the
runner reads the stream with ``reader_options``, hands it to ``start`` and looks after the query. Batches come at least
once and in their order: after a crash the last one comes again, perhaps with fewer rows, because a key that changed
meanwhile has moved on to the next batch. So ``apply`` must be idempotent, and order what it holds by (branch, seqno).
"""

import abc
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from upriver.pipelines.options import JobOptions, PipelineOptions

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

    def close(self) -> None:  # noqa: B027
        """Let go of everything; the runner calls it once, whatever has happened."""


class Task(Job):
    """A job that needs no Spark and comes to an end by itself."""

    @abc.abstractmethod
    def carry_out(self, directory: Path, tell: Callable[[], object], stop: threading.Event) -> None:
        """Do it, or go on with it, until it is done or ``stop`` is set; ``tell`` when the counts are new."""


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

    @abc.abstractmethod
    def apply(self, frame: "DataFrame", batch_number: int) -> None:
        """Bring one batch to the target. When it returns the batch is done for good.

        Every action on the frame reads the batch from the source again, and a key may have moved on in between: act
        once, or ``persist`` it.
        """

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
                self.apply(frame, batch_number)
            except BaseException as error:
                self.failure = error
                raise
