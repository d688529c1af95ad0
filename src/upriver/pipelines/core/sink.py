"""A pipeline as a Spark sink: ``writeStream.format("upriver_pipeline")``, also for declarative pipelines.

Theory of operation. A Spark sink has the same two halves as a pipeline: its tasks take rows and return a message, and
then one process gets all messages of a micro-batch. The results of a task are in its message, so the processes need no
shared disk.

Spark's checkpoint numbers the batches, and targets identify batches by their numbers. So the pipeline's files are
inside that checkpoint, and removing it resets both.
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
#: Options that Spark passes to every sink.
_OF_SPARK: Final = (_PIPELINE, _CHECKPOINT, "path", "queryname")


class PipelineSink(DataSource):
    """A sink that runs a pipeline. The option ``pipeline`` names it; the others are the pipeline's own."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format``."""
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> "PipelineWriter":  # noqa: N802, ARG002
        """A stream write."""
        options = {name.lower(): value for name, value in self.options.items()}
        missing = [name for name in ROWS.names if name not in schema.fieldNames()]
        if missing:
            raise OptionError("schema", ", ".join(schema.fieldNames()), f"the column {', '.join(missing)} is missing")
        pipeline_of(options)  # check the options before anything runs
        return PipelineWriter(options, _local(options.get(_CHECKPOINT)) / "upriver")


class Part(WriterCommitMessage):
    """The results of one task."""

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
    """The writes of one query."""

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
        """Apply a micro-batch whose tasks are done. If that fails, Spark runs the batch again."""
        pipeline = pipeline_of(self._options)
        parts = [message.found for message in messages if isinstance(message, Part)]
        # A batch without rows has no tasks: the source changed its branch and lost nothing.
        found = pa.concat_tables([_handed_over(pipeline).empty_table(), *parts])
        with contextlib.closing(pipeline), RunDirectory(self._directory) as directory:
            directory.claim(pipeline)
            pipeline.open(directory.path)
            pipeline.apply(found, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """A task failed; Spark runs the micro-batch again."""


def _handed_over(pipeline: Pipeline) -> pa.Schema:
    """The columns of the tasks' results."""
    work = pipeline.in_task()
    return ROWS if work is None else work.schema


def pipeline_of(options: Mapping[str, Any]) -> Pipeline:
    """The pipeline for the options of a sink."""
    name = str(options.get(_PIPELINE, ""))
    if name not in PIPELINES:
        raise OptionError(_PIPELINE, name, f"it must be one of {', '.join(sorted(PIPELINES))}")
    job = find(name).of({name.replace("-", "_"): value for name, value in options.items() if name not in _OF_SPARK})
    if not isinstance(job, Pipeline):
        raise OptionError(_PIPELINE, name, "it does not read a stream, so it cannot be a sink: use upriver run")
    if len(job.legs()) > 1:
        raise OptionError("both", "true", "a sink has one direction: use two sinks, or upriver run")
    if job.owns_output:
        raise OptionError("to", "-", "a sink has no standard output: give a file or a directory")
    return job


def _local(checkpoint: str | None) -> Path:
    """The directory of the checkpoint on the machine of Spark's driver."""
    if not checkpoint:
        raise OptionError("checkpointLocation", "", "give a directory: the pipeline stores its progress there too")
    parts = urlsplit(checkpoint)
    if parts.scheme not in ("", "file"):
        raise OptionError("checkpointLocation", checkpoint, "it must be a directory on the driver's machine")
    return Path(unquote(parts.path) if parts.scheme else checkpoint).absolute()
