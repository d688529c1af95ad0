"""Reads of ranges: batches between two offsets, and micro-batches one after the other.

Spark pickles readers and unpickles them in every task, so they hold nothing but what the options say; connections live
in the processes that use them. ``stop`` is never called and ``commit`` comes late: nothing relies on either.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from upriver.errors import OptionError
from upriver.spark.batch_planner import Range, SourceState, backlog_rows, end_seqno, next_offset, ranges
from upriver.spark.cluster_view import ClusterView
from upriver.spark.offsets import Offset, VbucketOffset
from upriver.spark.options import ReadOptions
from upriver.spark.range_reader import RangeReader, Reading, reader_for
from upriver.spark.rows import RowMaker


class RangesPartition(InputPartition):
    """The ranges that one task reads."""

    def __init__(self, ranges: list[Range]) -> None:
        super().__init__(None)
        self.ranges = ranges


class ReaderOfRows:
    """What all reads share: the options, and the columns that are asked for."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        self.options = options
        self.columns = tuple(columns)
        try:
            self._rows()
        except ValueError as error:
            raise OptionError("schema", ", ".join(columns), str(error)) from None

    def _rows(self) -> RowMaker:
        options = self.options
        text, placed = options.value_format != "binary", options.dialect != "tap"
        return RowMaker(self.columns, keys_only=options.keys_only, value_as_text=text, placed=placed)


class _Ranges(ReaderOfRows):
    """What reads of ranges share: cutting work into tasks, and doing it."""

    def _partitions(self, view: ClusterView, todo: Sequence[Range]) -> list[InputPartition]:
        """One or two tasks for each node, so that each has many vbuckets and one connection."""
        by_vbucket = {asked.place.vbucket: asked for asked in todo}
        by_owner = list(view.owners(by_vbucket).values())
        unowned = by_vbucket.keys() - {number for numbers in by_owner for number in numbers}
        groups = [*by_owner, *([sorted(unowned)] if unowned else [])]
        wanted = min(self.options.min_partitions or 2, len(by_vbucket))
        tasks: list[list[Range]] = []
        for numbers, share in zip(groups, _shares([len(numbers) for numbers in groups], wanted), strict=True):
            tasks += _balanced([by_vbucket[number] for number in numbers], share)
        return [RangesPartition(task) for task in tasks if task]

    def _read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangesPartition)
        # Where a query begins and ends is nothing to its connections.
        options = dataclasses.replace(self.options, starting_offsets="earliest", ending_offsets="latest")
        reader = reader_for((options, self.columns), self._new_reader)
        yield from reader.read(partition.ranges)

    def _new_reader(self) -> RangeReader:
        rows = self._rows()
        return RangeReader(
            Reading(
                self.options.cluster,
                self.options.consumer_settings(rows.to_decode),
                self.options.rules,
                rows,
                self.options.rows_per_batch,
            )
        )


class BatchReader(_Ranges, DataSourceReader):
    """A batch read: everything between two offsets."""

    def partitions(self) -> Sequence[InputPartition]:
        """The work, cut into tasks."""
        view = ClusterView(self.options.cluster, self.options.vbuckets)
        try:
            numbers = view.vbuckets()
            start = starting_offset(self.options.starting_offsets, numbers, view)
            states = view.states(start)
            end = next_offset(start, states, self.options.rules, target=self._target(view, states))
            return self._partitions(view, list(ranges(start, end))) or [RangesPartition([])]
        finally:
            view.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return self._read(partition)

    def _target(self, view: ClusterView, states: dict[int, SourceState]) -> dict[int, int] | None:
        given = self.options.ending_offsets
        if given == "latest":
            return None
        places = existing("endingOffsets", given, view)
        ends = Offset(place for n, place in places.items() if n in states and isinstance(place, VbucketOffset))
        seen = states | view.states(ends)  # with the logs of the ends, which may be of other branches than the start
        highest = {number: state.high_seqno for number, state in states.items()}
        return highest | {end.vbucket: end_seqno(end, seen[end.vbucket], self.options.rules) for end in ends}


class StreamReader(_Ranges, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream read: plans one micro-batch after the other."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._opened: ClusterView | None = None
        self._target: dict[int, int] | None = None
        self._waiting_since: float | None = None
        #: Where the source stood when the last micro-batch was planned.
        self._seen: dict[int, SourceState] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs: sockets stay with the driver."""
        return {"options": self.options, "columns": self.columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"], state["columns"])  # type: ignore[misc]

    @property
    def _view(self) -> ClusterView:
        if self._opened is None:
            self._opened = ClusterView(self.options.cluster, self.options.vbuckets)
        return self._opened

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a query without a checkpoint begins."""
        return starting_offset(self.options.starting_offsets, self._view.vbuckets(), self._view).packed()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What Spark passes to ``latestOffset``; the other limits are applied there."""
        rows = self.options.max_rows_per_trigger
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read what is there now, and no more."""
        self._target = {number: state.high_seqno for number, state in self._view.states().items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the next micro-batch ends."""
        logged = Offset.unpacked(start)
        before = self._chosen(logged)
        states = self._seen = self._view.states(before)
        if self._shall_wait(before, states):
            return start
        if self._target is not None:  # nor does a fixed goal lie where deletions are forgotten by now
            self._target |= {n: max(self._target.get(n, 0), state.purge_seqno) for n, state in states.items()}
        rows_max = self._rows_max(limit)
        after = next_offset(before, states, self.options.rules, rows_max=rows_max, target=self._target)
        return start if after == before else Offset((logged.places | after.places).values()).packed()

    def _chosen(self, logged: Offset) -> Offset:
        """The places of the vbuckets that are read now, which may be others than when the query was begun.

        One that is new begins at its beginning; one that is not read any more keeps its place in the log.
        """
        numbers = self._view.vbuckets()
        if logged.places.keys() == set(numbers):
            return logged
        return Offset(logged.places.get(number, VbucketOffset(number)) for number in numbers)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """How far the source is, so that the lag can be told; Spark asks right after ``latestOffset``, which saw it."""
        states = self._view.states() if self._seen is None else self._seen
        return Offset(
            VbucketOffset.consistent_at(n, state.vbucket_uuid, state.high_seqno) for n, state in states.items()
        ).packed()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The work of a micro-batch, cut into tasks; also of one that Spark has planned in another life."""
        return self._partitions(self._view, list(ranges(Offset.unpacked(start), Offset.unpacked(end))))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return self._read(partition)

    def stop(self) -> None:
        """The query is over: let go of the driver's connections."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _rows_max(self, limit: ReadLimit) -> int | None:
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = self.options.max_bytes_per_trigger
        if size is None:
            return rows
        by_size = max(1, size // self._view.bytes_per_change())
        return by_size if rows is None else min(rows, by_size)

    def _shall_wait(self, before: Offset, states: dict[int, SourceState]) -> bool:
        """Are there too few changes yet, and was the wait not too long? A query with a fixed goal does not wait."""
        least = self.options.min_rows_per_trigger
        backlog = backlog_rows(before, states)
        if least is None or self._target is not None or not backlog or backlog >= least:
            self._waiting_since = None
            return False
        now = time.monotonic()
        self._waiting_since = since = now if self._waiting_since is None else self._waiting_since
        if now - since < self.options.max_trigger_delay:
            return True
        self._waiting_since = None
        return False


def existing(
    name: str, given: Offset | Mapping[int, VbucketOffset | str], view: ClusterView
) -> Mapping[int, VbucketOffset] | Mapping[int, VbucketOffset | str]:
    """The offsets that an option gives by vbucket, all of which the cluster has; it may be that not all are read."""
    places = given.places if isinstance(given, Offset) else given
    count = view.count()
    for number in places:
        if number >= count:
            raise OptionError(name, str(number), f"there is no such vbucket; the cluster has {count}, from 0 on")
    return places


def starting_offset(given: Any, numbers: Sequence[int], view: ClusterView) -> Offset:
    """The offset that the option means; vbuckets that it does not name begin at the beginning."""
    words = dict.fromkeys(numbers, given) if isinstance(given, str) else existing("startingOffsets", given, view)
    latest = view.states() if "latest" in words.values() else {}

    def place(number: int) -> VbucketOffset:
        word = words.get(number, "earliest")
        if isinstance(word, VbucketOffset):
            return word
        state = latest.get(number) if word == "latest" else None
        return (
            VbucketOffset(number)
            if state is None
            else VbucketOffset.consistent_at(number, state.vbucket_uuid, state.high_seqno)
        )

    return Offset(place(number) for number in numbers)


def _shares(sizes: Sequence[int], wanted: int) -> list[int]:
    """How many tasks each group gets: one, and of what is wanted beyond that the largest ones more."""
    shares = [1] * len(sizes)
    while sum(shares) < wanted:
        shares[max(range(len(sizes)), key=lambda group: sizes[group] / shares[group])] += 1
    return shares


def _balanced(todo: list[Range], tasks: int) -> list[list[Range]]:
    """The ranges in so many heaps of about the same number of changes: the largest first, onto the smallest heap."""
    heaps: list[list[Range]] = [[] for _ in range(tasks)]
    sizes = [0] * tasks
    for asked in sorted(todo, key=lambda asked: asked.place.seqno - asked.end_seqno):
        smallest = sizes.index(min(sizes))
        heaps[smallest].append(asked)
        sizes[smallest] += asked.end_seqno - asked.place.seqno + 1
    return heaps
