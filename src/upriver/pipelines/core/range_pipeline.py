"""Pipelines whose tasks read from the nodes: a plan, a task function and a commit.

In each micro-batch Spark's source yields one row per task with the ranges of that task. The driver makes a plan of the
batch, which travels to the tasks. A task reads its ranges, writes its part of the target and returns a small result.
The driver commits the results; then the batch is complete. No document passes through the JVM or the driver.

A batch may run several times, with other rows for the same ranges, because keys change while it runs. So a target
stores the number of a batch in the commit, each attempt writes files of its own, and the commit names those of one.

The same two halves run as a Spark sink. There the tasks make their plan themselves, and the process that commits does
alone what Spark's tasks would do otherwise.
"""

import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from upriver.pipelines.core.options import PipelineOptions
from upriver.pipelines.core.pipeline import Pipeline
from upriver.pipelines.core.workers import LocalWorkers, SparkWorkers, Workers, in_tasks

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

#: The work of one task: packed ranges in, a small result out. It runs in other processes, so it must be picklable.
RangeTask = Callable[[bytes], bytes]
#: Runs the tasks of a batch with a plan.
RunTasks = Callable[[RangeTask], list[bytes]]
#: The column of the source's rows that has the ranges.
RANGES: Final = "ranges"


class RangePipeline(Pipeline):
    """A job on planned ranges."""

    def __init__(self, options: PipelineOptions) -> None:
        super().__init__(options)
        #: The number of changes of each committed batch that was not asked for yet.
        self._changes: dict[int, int] = {}

    #: Where repairs, compactions and repeated tasks run: in this process, unless there is a Spark.
    workers: Workers = LocalWorkers()

    def reader_options(self) -> dict[str, str]:
        """Options for ``spark.readStream.format("upriver")``."""
        return {**super().reader_options(), "output": "ranges"}

    @abstractmethod
    def plan(self, batch_number: int | None) -> RangeTask | None:
        """The work of the tasks of a batch; None if the target has the batch already.

        ``batch_number`` is None in a task of a Spark sink, which does not know it.
        """

    @abstractmethod
    def commit(self, results: Sequence[bytes], batch_number: int, run: RunTasks) -> int:
        """Commit the results of the tasks; returns the number of changes. ``run`` runs the tasks with another plan."""

    def rows_of(self, progress: Mapping[str, Any]) -> int:
        """The number of changes up to this batch that were not told before; Spark has counted tasks."""
        number = int(progress.get("batchId", -1))
        return sum(self._changes.pop(each) for each in sorted(self._changes) if each <= number)

    def unreported(self) -> list[int]:
        """The number of changes of each batch that was committed, but ended without a progress event."""
        return [self._changes.pop(each) for each in sorted(self._changes)]

    def _apply_frame(self, frame: "DataFrame", batch_number: int) -> None:
        self.workers = SparkWorkers(frame.sparkSession)
        self._run(lambda task: in_tasks(frame, RANGES, task), batch_number)

    def _run(self, run: RunTasks, batch_number: int) -> None:
        task = self.plan(batch_number)
        if task is not None:
            # Several batches may end between two looks at the progress, so each one's number is kept.
            self._changes[batch_number] = self.commit(run(task), batch_number, run)

    # As a Spark sink

    @property
    def columns(self) -> Sequence[str]:
        """The column with the ranges."""
        return (RANGES,)

    def in_sink_task(self, rows: Iterable["pa.RecordBatch"]) -> bytes:
        """Work on the ranges of the rows; the message has the ranges too, in case the task must be repeated."""
        task = self.plan(None)
        assert task is not None
        items = [item for batch in rows for item in batch.column(RANGES).to_pylist()]
        return pickle.dumps([(item, task(item)) for item in items])

    def apply_messages(self, messages: Sequence[bytes], batch_number: int) -> None:
        """Commit what the tasks have done."""
        done: list[tuple[bytes, bytes]] = [pair for message in messages for pair in pickle.loads(message)]
        if self.plan(batch_number) is not None:
            items = [item for item, _ in done]
            self.commit([result for _, result in done], batch_number, lambda task: self.workers.map(task, items))
