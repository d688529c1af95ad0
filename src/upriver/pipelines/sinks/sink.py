"""A pipeline as a Spark sink: ``writeStream.format("upriver_pipeline")``, also for declarative pipelines.

Theory of operation. A Spark sink has the same two halves as a pipeline: its tasks take rows and return a message, and
then one process gets all messages of a micro-batch.

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
from upriver.pipelines.core.pipeline import SINK_FORMAT, Pipeline
from upriver.pipelines.core.registry import PIPELINES, find

FORMAT: Final = SINK_FORMAT
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
        missing = [name for name in pipeline_of(options).columns if name not in schema.fieldNames()]
        if missing:
            raise OptionError(
                "schema",
                ", ".join(schema.fieldNames()),
                f"the column {', '.join(missing)} is missing: read with the options of upriver.pipelines.declare",
            )
        return PipelineWriter(options, _local(options.get(_CHECKPOINT)) / "upriver")


class Part(WriterCommitMessage):
    """What one task has to say."""

    def __init__(self, message: bytes) -> None:
        self.message = message


class PipelineWriter(DataSourceStreamArrowWriter):
    """The writes of one query."""

    def __init__(self, options: Mapping[str, str], directory: Path) -> None:
        self._options = dict(options)
        self._directory = directory

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Part:
        """The work of one task."""
        with contextlib.closing(pipeline_of(self._options)) as pipeline:
            return Part(pipeline.in_sink_task(iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Apply a micro-batch whose tasks are done. If that fails, Spark runs the batch again."""
        told = [each.message for each in messages if isinstance(each, Part)]
        with contextlib.closing(pipeline_of(self._options)) as pipeline, self._opened() as directory:
            directory.claim(pipeline)
            pipeline.open(directory)
            pipeline.apply_messages(told, batchId)

    def _opened(self) -> RunDirectory:
        """The pipeline's files, inside Spark's checkpoint."""
        return RunDirectory(self._directory, spark="..")

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """A task failed; Spark runs the micro-batch again."""


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
