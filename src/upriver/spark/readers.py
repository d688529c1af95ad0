"""Reads of ranges: a batch between two offsets, or one micro-batch after the other.

Spark pickles readers and unpickles them in every task, so they hold only the options; connections belong to the
processes that use them. Spark never calls ``stop`` and calls ``commit`` late, so nothing relies on either.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from upriver.errors import OptionError
from upriver.spark.batch_planner import (
    Range,
    SourceState,
    backlog_rows,
    batch_ranges,
    end_seqno,
    next_offset,
    ranges,
)
from upriver.spark.cluster_view import ClusterView
from upriver.spark.offsets import Offset, VbucketOffset, first_end, logged_start, starting
from upriver.spark.options import ReadOptions
from upriver.spark.pushed_filters import PushDown, PushedFilters, key_pattern
from upriver.spark.range_reader import RangeReader, Reading, reader_for
from upriver.spark.rows import RowMaker
from upriver.spark.short_errors import short_errors

#: Fewer changes than this are not worth a task of their own.
ROWS_WORTH_A_TASK: Final = 10_000
#: A limit that limits nothing, but shows that Spark respects limits.
_ANY_ROWS: Final = 2**62


class RangesPartition(InputPartition):
    """The ranges that one task reads."""

    def __init__(self, ranges: list[Range], key_filter: str | None = None) -> None:
        super().__init__(None)
        self.ranges = ranges
        #: A pattern of keys in addition to the query's options, for nodes that support it.
        self.key_filter = key_filter


class SparkReader:
    """The options of a read, and the requested columns."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        self.options = options
        self.columns = tuple(columns)
        try:
            self._rows()
        except ValueError as error:
            raise OptionError("schema", ", ".join(columns), str(error)) from None

    def _rows(self) -> RowMaker:
        options = self.options
        text, has_positions = options.value_format != "binary", options.dialect != "tap"
        return RowMaker(self.columns, keys_only=options.keys_only, value_as_text=text, has_positions=has_positions)


class _Ranges(SparkReader):
    """Divides ranges into tasks, and reads them."""

    def _partitions(self, view: ClusterView, todo: Sequence[Range]) -> list[InputPartition]:
        """One or two tasks for each node, so that a task has many vbuckets and one connection."""
        by_vbucket = {asked.start.vbucket: asked for asked in todo}
        by_owner = list(view.owners(by_vbucket).values())
        unowned = by_vbucket.keys() - {number for numbers in by_owner for number in numbers}
        groups = [*by_owner, *([sorted(unowned)] if unowned else [])]
        wanted = min(self.options.min_partitions or self._default_tasks(todo), len(by_vbucket))
        tasks: list[list[Range]] = []
        for numbers, share in zip(groups, _shares([len(numbers) for numbers in groups], wanted), strict=True):
            tasks += balanced([by_vbucket[number] for number in numbers], share)
        return [RangesPartition(task) for task in tasks if task]

    def _default_tasks(self, todo: Sequence[Range]) -> int:
        """Two tasks for a small batch, and up to one per core for a large one."""
        changes = sum(map(changes_in, todo))
        return max(2, min(self._cores, -(-changes // ROWS_WORTH_A_TASK)))

    @property
    def _cores(self) -> int:
        """The cores that tasks can use. Spark tells a Python source nothing about its cluster."""
        return self.options.cores or os.cpu_count() or 2

    def _read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, RangesPartition)
        # Readers are shared by queries that differ only in their start and end.
        options = dataclasses.replace(self.options, starting_offsets="earliest", ending_offsets="latest")
        if partition.key_filter is not None:
            options = dataclasses.replace(options, key_prefix=None, key_filter=partition.key_filter)
        reader = reader_for((options, self.columns), lambda: self._new_reader(options))
        yield from reader.read(partition.ranges)

    def _new_reader(self, options: ReadOptions) -> RangeReader:
        rows = self._rows()
        settings = options.consumer_settings(rows.to_decode)
        return RangeReader(Reading(options.cluster, settings, options.rules, rows, options.rows_per_batch))


@short_errors
class BatchReader(_Ranges, DataSourceReader):
    """A batch read: everything between two offsets."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self.pushed = PushedFilters()

    @property
    def pushFilters(self) -> PushDown:  # noqa: N802
        """Takes the filters that the source can apply."""
        return PushDown(self)

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the batch."""
        view = ClusterView(self.options.cluster, self.options.vbuckets)
        try:
            numbers = self.pushed.vbuckets(view.vbuckets())
            if self.pushed.by_vbucket:
                view.restrict(numbers)
            start = starting_offset(self.options.starting_offsets, numbers, view)
            states = view.states(start)
            todo = list(batch_ranges(start, states, self.options.rules, self._ends(view, states)))
            tasks = self._partitions(view, todo)
            key_filter = self._key_filter(view)
            for task in tasks:
                assert isinstance(task, RangesPartition)
                task.key_filter = key_filter
            return tasks or [RangesPartition([])]
        finally:
            view.close()

    def _key_filter(self, view: ClusterView) -> str | None:
        """A pattern for the pushed filters, if the nodes support it and the query has no pattern of its own."""
        prefix, options = self.pushed.key_prefix, self.options
        own = None if options.key_prefix is None else options.key_prefix.encode()
        if not prefix or options.key_filter is not None or not (own is None or prefix.startswith(own)):
            return None
        return key_pattern(prefix) if options.dialect in ("dcp", "upr") and view.has_upriver_nodes() else None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        batches = self._read(partition)
        return batches if self.pushed == PushedFilters() else (self.pushed.rows(batch) for batch in batches)

    def _ends(self, view: ClusterView, states: dict[int, SourceState]) -> dict[int, int]:
        """The ends that the query names."""
        given = self.options.ending_offsets
        if given == "latest":
            return {}
        offsets = existing("endingOffsets", given, view)
        ends = Offset(each for n, each in offsets.items() if n in states and isinstance(each, VbucketOffset))
        seen = states | view.states(ends)  # with the logs of the ends, whose branches may differ from the start's
        return {end.vbucket: end_seqno(end, seen[end.vbucket], self.options.rules) for end in ends}


@short_errors
class StreamReader(_Ranges, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream read, which plans one micro-batch after the other."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._opened: ClusterView | None = None
        self._target: dict[int, int] | None = None
        self._waiting_since: float | None = None
        #: The start, the seqnos after it and the changes that they delivered, when the backlog was last counted.
        self._counted: tuple[Offset, int, int] | None = None
        #: The state of the source when the last micro-batch was planned.
        self._seen: dict[int, SourceState] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Only what a task needs: sockets stay in the driver."""
        return {"options": self.options, "columns": self.columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"], state["columns"])  # type: ignore[misc]

    @property
    def _view(self) -> ClusterView:
        if self._opened is None:
            self._opened = ClusterView(self.options.cluster, self.options.vbuckets)
        return self._opened

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """The offset at which a query without a checkpoint starts."""
        return starting(starting_offset(self.options.starting_offsets, self._view.vbuckets(), self._view).packed())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit that Spark passes to ``latestOffset``, which applies all limits.

        For a query that runs once, Spark passes "everything" instead of this limit.
        """
        options = self.options
        limits = (options.max_rows_per_trigger, options.max_bytes_per_trigger, options.min_rows_per_trigger)
        return ReadAllAvailable() if limits == (None, None, None) else ReadMaxRows(limits[0] or _ANY_ROWS)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Read up to the current high seqnos."""
        self._target = {number: state.high_seqno for number, state in self._view.states().items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next micro-batch. One without rows stores what was proven about the last."""
        logged = Offset.unpacked(start)
        before = self._chosen(logged)
        states = self._seen = self._view.states(before)
        if self._target is not None:  # a fixed end must not lie below the purge seqno
            self._target |= {n: max(self._target.get(n, 0), state.purge_seqno) for n, state in states.items()}
        target, rows_max = self._target, None
        if not isinstance(limit, ReadAllAvailable):
            rows_max = self._rows_max()
            if self._shall_wait(before, states):
                target = {offset.vbucket: offset.seqno for offset in before}
        rules = self.options.rules
        counter = None if self.options.history else self._view  # with all versions, each seqno may be a change
        after = next_offset(before, states, rules, rows_max=rows_max, target=target, counter=counter)
        if after == before:
            return start
        return first_end(start, Offset((logged.vbuckets | after.vbuckets).values()).packed())

    def _chosen(self, logged: Offset) -> Offset:
        """The offsets of the vbuckets that are read now, which may differ from those at the start of the query.

        A new vbucket starts at its beginning. One that is not read any more keeps its offset in the log.
        """
        numbers = self._view.vbuckets()
        if logged.vbuckets.keys() == set(numbers):
            return logged
        return Offset(logged.vbuckets.get(number, VbucketOffset(number)) for number in numbers)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The high seqnos of the source, for the lag; Spark calls this right after ``latestOffset``."""
        states = self._view.states() if self._seen is None else self._seen
        return Offset(
            VbucketOffset.consistent_at(n, state.vbucket_uuid, state.high_seqno) for n, state in states.items()
        ).packed()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch, which an earlier process may have planned."""
        first = Offset.unpacked(logged_start(start, end))
        return self._partitions(self._view, list(ranges(first, Offset.unpacked(end))))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return self._read(partition)

    def stop(self) -> None:
        """Close the driver's connections."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _rows_max(self) -> int | None:
        rows, size = self.options.max_rows_per_trigger, self.options.max_bytes_per_trigger
        if size is None:
            return rows
        by_size = max(1, size // self._view.bytes_per_change())
        return by_size if rows is None else min(rows, by_size)

    def _shall_wait(self, before: Offset, states: dict[int, SourceState]) -> bool:
        """Whether to wait for more changes. A query with a fixed end does not wait."""
        least = self.options.min_rows_per_trigger
        is_idle = backlog_rows(before, states) == 0
        if least is None or self._target is not None or is_idle or self._has_rows(least, before, states):
            self._waiting_since = None
            return False
        now = time.monotonic()
        self._waiting_since = since = now if self._waiting_since is None else self._waiting_since
        if now - since < self.options.max_trigger_delay:
            return True
        self._waiting_since = None
        return False

    def _has_rows(self, least: int, before: Offset, states: dict[int, SourceState]) -> bool:
        """Whether this many changes wait. The nodes count them again only when there may be enough new ones."""
        seqnos = backlog_rows(before, states)
        if seqnos < least:
            return False
        if self._counted is not None and self._counted[0] == before:
            _, seqnos_then, changes = self._counted
            if changes + seqnos - seqnos_then < least:
                return False
        if backlog_rows(before, states, self._view.item_counts()) < least:
            return False
        high_seqnos = {number: state.high_seqno for number, state in states.items()}
        behind = {each.vbucket: each.seqno for each in before if high_seqnos.get(each.vbucket, 0) > each.seqno}
        found = self._view.visible_ends({number: (seqno, least) for number, seqno in behind.items()})
        changes = 0
        for number, seqno in behind.items():
            end_seqno, visible = found.get(number, (seqno, 0))
            # Each seqno that the node did not count may be a change.
            changes += visible if visible >= least else visible + max(0, high_seqnos[number] - end_seqno)
        self._counted = before, seqnos, changes
        return changes >= least


def existing(
    name: str, given: Offset | Mapping[int, VbucketOffset | str], view: ClusterView
) -> Mapping[int, VbucketOffset] | Mapping[int, VbucketOffset | str]:
    """The offsets that an option gives by vbucket; raises if the cluster does not have one of the vbuckets."""
    offsets = given.vbuckets if isinstance(given, Offset) else given
    count = view.count()
    for number in offsets:
        if number >= count:
            raise OptionError(name, str(number), f"the cluster has only the vbuckets 0 to {count - 1}")
    return offsets


def starting_offset(given: Any, numbers: Sequence[int], view: ClusterView) -> Offset:
    """The offset that the option describes; vbuckets that it does not name start at their beginning."""
    words = dict.fromkeys(numbers, given) if isinstance(given, str) else existing("startingOffsets", given, view)
    latest = view.states() if "latest" in words.values() else {}

    def offset_of(number: int) -> VbucketOffset:
        word = words.get(number, "earliest")
        if isinstance(word, VbucketOffset):
            return word
        state = latest.get(number) if word == "latest" else None
        return (
            VbucketOffset(number)
            if state is None
            else VbucketOffset.consistent_at(number, state.vbucket_uuid, state.high_seqno)
        )

    return Offset(offset_of(number) for number in numbers)


def _shares(sizes: Sequence[int], wanted: int) -> list[int]:
    """The number of tasks of each group: at least one, and more for the largest groups until ``wanted`` is reached."""
    shares = [1] * len(sizes)
    while sum(shares) < wanted:
        shares[max(range(len(sizes)), key=lambda group: sizes[group] / shares[group])] += 1
    return shares


def changes_in(asked: Range) -> int:
    """The number of changes in a range, at most."""
    return asked.end_seqno - asked.start.seqno


def balanced(todo: list[Range], tasks: int, size: Callable[[Range], int] = changes_in) -> list[list[Range]]:
    """Distribute ranges to tasks of about the same size: the largest first, to the smallest task."""
    by_task: list[list[Range]] = [[] for _ in range(tasks)]
    sizes = [0] * tasks
    for asked in sorted(todo, key=size, reverse=True):
        smallest = sizes.index(min(sizes))
        by_task[smallest].append(asked)
        sizes[smallest] += size(asked) + 1
    return by_task
