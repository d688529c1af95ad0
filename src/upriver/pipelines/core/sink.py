"""A pipeline as a sink of Spark: ``writeStream.format("upriver_pipeline")``, and so a part of a declarative pipeline.

Theory of operation. Spark asks a sink for the same two halves that a pipeline has: its tasks take rows and answer with
a message, and then one process gets all the messages of a micro-batch. What a task hands over travels in its message,
so the processes share no disk.

Batches are numbered by Spark's checkpoint, and targets know batches by their numbers. So what the pipeline remembers
stands inside that checkpoint: who throws it away begins anew in both.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from upriver.errors import OptionError
from upriver.pipelines.core.directory import RunDirectory
from upriver.pipelines.core.pipeline import Pipeline
from upriver.pipelines.core.registry import PIPELINES, find
from upriver.spark import ROWS

FORMAT: Final = "upriver_pipeline"
_PIPELINE, _CHECKPOINT = "pipeline", "checkpointlocation"
#: What Spark tells every sink.
_OF_SPARK: Final = (_PIPELINE, _CHECKPOINT, "path", "queryname")


class PipelineSink(DataSource):
    """The option ``pipeline`` says which one it is; the others are that pipeline's own."""

    @classmethod
    def name(cls) -> str:
        """What stands in ``format``."""
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> "PipelineWriter":  # noqa: N802, ARG002
        """A stream write."""
        options = {name.lower(): value for name, value in self.options.items()}
        missing = [name for name in ROWS.names if name not in schema.fieldNames()]
        if missing:
            raise OptionError("schema", ", ".join(schema.fieldNames()), f"there is no column {', '.join(missing)}")
        pipeline_of(options)  # what is wrong is told before anything runs
        return PipelineWriter(options, _local(options.get(_CHECKPOINT)) / "upriver")


class Part(WriterCommitMessage):
    """What one task hands over."""

    def __init__(self, found: pa.Table) -> None:
        with pa.BufferOutputStream() as sink:
            with pa.ipc.new_stream(sink, found.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
                writer.write_table(found)
            self._data = sink.getvalue().to_pybytes()

    @property
    def found(self) -> pa.Table:
        """The rows."""
        return pa.ipc.open_stream(self._data).read_all()


class PipelineWriter(DataSourceStreamArrowWriter):
    """One query's writes."""

    def __init__(self, options: Mapping[str, str], directory: Path) -> None:
        self._options = dict(options)
        self._directory = directory

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Part:
        """The rows of one task."""
        pipeline = pipeline_of(self._options)
        work = pipeline.in_task()
        rows = (batch.select(ROWS.names).cast(ROWS) for batch in iterator)
        return Part(pa.Table.from_batches(rows if work is None else work(rows), _handed_over(pipeline)))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """All tasks of a micro-batch are done: bring it to the target. If that fails, Spark runs the batch again."""
        pipeline = pipeline_of(self._options)
        parts = [message.found for message in messages if isinstance(message, Part)]
        # A batch may have no rows, and so no tasks: where a source changed its branch and lost nothing.
        found = pa.concat_tables([_handed_over(pipeline).empty_table(), *parts])
        with contextlib.closing(pipeline), RunDirectory(self._directory) as directory:
            directory.claim(pipeline)
            pipeline.open(directory.path)
            pipeline.apply(found, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """A task has failed; the micro-batch will be run again."""


def _handed_over(pipeline: Pipeline) -> pa.Schema:
    """What the tasks of the pipeline hand over."""
    work = pipeline.in_task()
    return ROWS if work is None else work.schema


def pipeline_of(options: Mapping[str, Any]) -> Pipeline:
    """The pipeline that these options of a sink mean, if it can be one."""
    name = str(options.get(_PIPELINE, ""))
    if name not in PIPELINES:
        raise OptionError(_PIPELINE, name, f"name one of {', '.join(sorted(PIPELINES))}")
    job = find(name).of({name.replace("-", "_"): value for name, value in options.items() if name not in _OF_SPARK})
    if not isinstance(job, Pipeline):
        raise OptionError(_PIPELINE, name, "it is no stream, and cannot be a sink: use upriver run")
    if len(job.legs()) > 1:
        raise OptionError("both", "true", "a sink goes one way: make two, or use upriver run")
    if job.owns_output:
        raise OptionError("to", "-", "a sink has no standard output: name a file or a directory")
    return job


def _local(checkpoint: str | None) -> Path:
    """The checkpoint's directory on the machine of Spark's driver."""
    if not checkpoint:
        raise OptionError("checkpointLocation", "", "name a directory: what the pipeline remembers stands there too")
    parts = urlsplit(checkpoint)
    if parts.scheme not in ("", "file"):
        raise OptionError("checkpointLocation", checkpoint, "it must be a directory of the driver's machine")
    return Path(unquote(parts.path) if parts.scheme else checkpoint).absolute()
