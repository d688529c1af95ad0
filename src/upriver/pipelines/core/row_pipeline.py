"""Pipelines that get changes as rows of Spark: tasks prepare them, and the driver applies them to the target."""

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from upriver.pipelines.core.pipeline import Pipeline
from upriver.spark import ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class InTask(abc.ABC):
    """The work of a Spark task. It runs in other processes, so it must be serializable."""

    #: The columns that it needs, as SQL expressions of Spark.
    columns: ClassVar[Sequence[str]]
    #: The schema of its results.
    schema: ClassVar[pa.Schema]

    @abc.abstractmethod
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Turn the rows into the results for ``apply``."""


class RowPipeline(Pipeline):
    """A job on the rows of a change stream."""

    def in_task(self) -> InTask | None:
        """The work of the tasks; None if ``apply`` gets the rows as they are."""
        return None

    @abc.abstractmethod
    def apply(self, found: pa.Table, batch_number: int) -> None:
        """Apply the results of the tasks to the target. When it returns, the batch is complete."""

    def _apply_frame(self, frame: "DataFrame", batch_number: int) -> None:
        self.apply(handed_over(frame, self.in_task()), batch_number)

    # As a Spark sink

    @property
    def columns(self) -> Sequence[str]:
        """The columns of a change."""
        names: list[str] = ROWS.names
        return names

    def in_sink_task(self, rows: Iterable[pa.RecordBatch]) -> bytes:
        """The results of the task, in Arrow's stream format."""
        work = self.in_task()
        typed = (batch.select(ROWS.names).cast(ROWS) for batch in rows)
        with pa.BufferOutputStream() as sink:
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with pa.ipc.new_stream(sink, self._handed_over, options=options) as writer:
                for batch in typed if work is None else work(typed):
                    writer.write_batch(batch)
            return bytes(sink.getvalue())

    def apply_messages(self, messages: Sequence[bytes], batch_number: int) -> None:
        """Apply the results of all tasks. A batch without rows, in which only a branch has changed, has no tasks."""
        parts = [pa.ipc.open_stream(message).read_all() for message in messages]
        self.apply(pa.concat_tables([self._handed_over.empty_table(), *parts]), batch_number)

    @property
    def _handed_over(self) -> pa.Schema:
        """The columns of the tasks' results."""
        work = self.in_task()
        return ROWS if work is None else work.schema


def handed_over(frame: "DataFrame", work: InTask | None) -> pa.Table:
    """The results of the tasks for a batch. The frame is read once: keys may change before a second read."""
    if work is None:
        return frame.select(*ROWS.names).toArrow().cast(ROWS)
    from pyspark.sql.pandas.types import from_arrow_schema

    found = frame.selectExpr(*work.columns).mapInArrow(work, from_arrow_schema(work.schema))
    return found.toArrow().cast(work.schema)
