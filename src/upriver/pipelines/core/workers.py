"""Where work in pieces runs: in Spark's tasks, in processes of this machine, or in this process.

A piece of work is a function of bytes that returns bytes. The function and its data travel with the job, so it must be
picklable, and its results should be small: the driver holds all of them.
"""

import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from upriver.pipelines.core.session import task_cores

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Work = Callable[[bytes], bytes]
#: Is called with the number of each item when it is done.
Done = Callable[[int], object]
#: The rows that tasks return.
RESULTS: Final = pa.schema([("result", pa.binary())])
_DDL: Final = "result binary"


def ignored(_: int) -> None:
    """Nothing is shown."""


class Workers(ABC):
    """Runs the same work on several items."""

    @property
    def count(self) -> int:
        """Number of items that are worked on at the same time."""
        return 1

    @abstractmethod
    def map(self, work: Work, items: Sequence[bytes], done: Done = ignored) -> list[bytes]:
        """The results in the order of the items."""


class LocalWorkers(Workers):
    """This process, one item after the other."""

    def map(self, work: Work, items: Sequence[bytes], done: Done = ignored) -> list[bytes]:
        """Work on the items here."""
        results = []
        for number, item in enumerate(items):
            results.append(work(item))
            done(number)
        return results


class ProcessWorkers(Workers):
    """Processes of this machine, one per core. A single item is worked on here: a process takes a second to start."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count

    @property
    def count(self) -> int:
        """One process per core."""
        return self._count or os.cpu_count() or 1

    def map(self, work: Work, items: Sequence[bytes], done: Done = ignored) -> list[bytes]:
        """Work on the items in processes; ``BrokenProcessPool`` if one of them is killed."""
        if len(items) < 2:
            return LocalWorkers().map(work, items, done)
        # A fork of this process would copy its threads' locks. The server imports the work's module once for all.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([type(getattr(work, "__self__", work)).__module__])
        pool = ProcessPoolExecutor(min(self.count, len(items)), context, _ignore_interrupts)
        try:
            futures = {pool.submit(work, item): number for number, item in enumerate(items)}
            for future in as_completed(futures):
                future.result()
                done(futures[future])
        finally:
            _end(pool)
        return [future.result() for future in futures]


def _ignore_interrupts() -> None:
    """Ctrl-C reaches all processes of a terminal; the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(pool: ProcessPoolExecutor) -> None:
    """End the processes at once. They only wait for more items, unless the work was interrupted or has failed."""
    for process in list(pool._processes.values()):  # there is no public way before Python 3.14
        process.terminate()
    pool.shutdown(cancel_futures=True)


class SparkWorkers(Workers):
    """Spark's tasks, one for each item."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark

    @property
    def count(self) -> int:
        """The cores that Spark has."""
        return task_cores(self._spark)

    def map(self, work: Work, items: Sequence[bytes], done: Done = ignored) -> list[bytes]:
        """Work on the items in tasks."""
        if not items:
            return []
        numbers = self._spark.range(0, len(items), 1, len(items))
        found = numbers.mapInArrow(_Numbered(work, list(items)), f"number long, {_DDL}").toArrow()
        by_number = dict(zip(found.column("number").to_pylist(), found.column("result").to_pylist(), strict=True))
        for number in by_number:
            done(number)
        return [by_number[number] for number in range(len(items))]


class _Numbered:
    """Works on the item whose number a row has."""

    def __init__(self, work: Work, items: list[bytes]) -> None:
        self._work = work
        self._items = items

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                result = self._work(self._items[number])
                yield pa.record_batch(
                    {"number": pa.array([number], pa.int64()), "result": pa.array([result], pa.binary())}
                )


class InRows:
    """Works on one column of the rows of a task."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One result for each row."""
        for batch in batches:
            for item in batch.column(0).to_pylist():
                yield pa.record_batch([pa.array([self._work(item)], pa.binary())], schema=RESULTS)


def in_tasks(frame: "DataFrame", column: str, work: Work) -> list[bytes]:
    """Work on one column of a DataFrame in the tasks that make its rows."""
    found = frame.select(column).mapInArrow(InRows(work), _DDL).toArrow()
    results: list[bytes] = found.column("result").to_pylist()
    return results
