"""Planned ranges as rows: one row per task, for pipelines whose tasks read from the nodes themselves.

Offsets, limits, lag, rollbacks and replays are those of the stream of changes. Only the rows differ: a task's row has
the ranges that it would have read, so no document passes through the JVM. A batch that Spark repeats has the same
ranges, because they follow from its two offsets alone.

Ranges are dealt to tasks by size. A small batch gets one task, because a task costs more than reading a few changes.
A task gets at most ``rowsPerTask`` changes and about ``bytesPerTask`` bytes, but always complete ranges. With
``shards`` vbucket v belongs to task v mod N in every batch, for targets that keep one part per shard.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructType

from upriver.spark.batch_planner import Range, RangeRollback
from upriver.spark.cluster_view import ClusterView
from upriver.spark.offsets import VbucketOffset
from upriver.spark.readers import ROWS_WORTH_A_TASK, RangesPartition, StreamReader, balanced, changes_in

#: The rows: number of the task, its ranges, and how many vbuckets and changes they have.
RANGE_ROWS: Final = pa.schema(
    [("task", pa.int32()), ("ranges", pa.binary()), ("vbuckets", pa.int32()), ("changes", pa.int64())]
)
_OFFSET_FIELDS: Final = len(VbucketOffset._fields)
_ROLLBACK_FIELDS: Final = len(RangeRollback._fields)


def range_schema() -> StructType:
    """The schema of the rows for Spark."""
    return (
        StructType()
        .add("task", IntegerType())
        .add("ranges", BinaryType())
        .add("vbuckets", IntegerType())
        .add("changes", LongType())
    )


class NumberedPartition(RangesPartition):
    """The ranges of one task, with the number of the task."""

    def __init__(self, number: int, ranges: list[Range]) -> None:
        super().__init__(ranges)
        self.number = number


class RangeRowsReader(StreamReader):
    """A stream read that yields the ranges of each task as one row."""

    def _partitions(self, view: ClusterView, todo: Sequence[Range]) -> list[InputPartition]:
        options = self.options
        if options.shards is not None:
            by_shard: dict[int, list[Range]] = {}
            for asked in todo:
                by_shard.setdefault(asked.start.vbucket % options.shards, []).append(asked)
            return [NumberedPartition(number, ranges) for number, ranges in sorted(by_shard.items())]
        size = max(1, view.bytes_per_change()) if todo else 1
        # The task reads a vbucket that was rolled back from the beginning: see ``upriver.pipelines.apply``.
        items = view.item_counts() if any(asked.rollback is not None for asked in todo) else {}

        def changes(asked: Range) -> int:
            if asked.rollback is None:
                return changes_in(asked)
            return min(asked.end_seqno, items.get(asked.start.vbucket, asked.end_seqno))

        count = tasks_for(
            list(map(changes, todo)),
            wanted=options.min_partitions or self._cores,
            rows_max=min(options.rows_per_task, max(1, options.bytes_per_task // size)),
        )
        tasks = balanced(list(todo), count, changes)
        return [NumberedPartition(number, ranges) for number, ranges in enumerate(tasks) if ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The row of one task."""
        assert isinstance(partition, NumberedPartition)
        yield range_row(partition.number, partition.ranges)


def tasks_for(sizes: Sequence[int], *, wanted: int, rows_max: int) -> int:
    """The number of tasks for ranges with these numbers of changes."""
    total = sum(sizes)
    worth = -(-total // ROWS_WORTH_A_TASK)
    return min(len(sizes), max(1, min(wanted, worth), -(-total // rows_max))) if sizes else 0


def range_row(number: int, ranges: Sequence[Range]) -> pa.RecordBatch:
    """The row of a task."""
    changes = sum(map(changes_in, ranges))
    row = {"task": number, "ranges": packed_ranges(ranges), "vbuckets": len(ranges), "changes": changes}
    return pa.RecordBatch.from_pylist([row], schema=RANGE_ROWS)


def packed_ranges(ranges: Sequence[Range]) -> bytes:
    """Ranges as bytes: a row of 64-bit numbers for each."""
    rows = [
        (*asked.start, asked.end_seqno, asked.rollback is not None, *(asked.rollback or (0,) * _ROLLBACK_FIELDS))
        for asked in ranges
    ]
    return np.array(rows, "<u8").tobytes()


def unpacked_ranges(data: bytes) -> list[Range]:
    """Read what ``packed_ranges`` returned."""
    rows = np.frombuffer(data, "<u8").reshape(-1, _OFFSET_FIELDS + 2 + _ROLLBACK_FIELDS).tolist()
    return [_range(row) for row in rows]


def _range(row: Sequence[int]) -> Range:
    end_seqno, has_rollback, *rollback = row[_OFFSET_FIELDS:]
    return Range(VbucketOffset(*row[:_OFFSET_FIELDS]), end_seqno, RangeRollback(*rollback) if has_rollback else None)
