"""The nodes, as a task sees them: changes of ranges, and states of vbuckets."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import pyarrow as pa

from upriver.pipelines.apply.task_apply import TaskSource
from upriver.spark import (
    BucketIdentity,
    ClusterView,
    Range,
    RangeReader,
    Reading,
    ReadOptions,
    RowMaker,
    SourceState,
    reader_for,
)


class NodeTaskSource(TaskSource):
    """Reads from the nodes with the options of the query. Connections stay open for the process's next tasks."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        # Tasks of one query share their connections, whatever its start and limits are.
        self._options = dataclasses.replace(options, starting_offsets="earliest", ending_offsets="latest")
        self._columns = tuple(columns)
        self._view: ClusterView | None = None

    def rows(self, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
        """The rows of these ranges."""
        if ranges:
            yield from reader_for((self._options, self._columns), self._new_reader).read(ranges)

    def vbuckets(self) -> Collection[int]:
        """The vbuckets that the query reads."""
        return self._nodes.vbuckets()

    def states(self, vbuckets: Collection[int]) -> Mapping[int, SourceState]:
        """The current states of these vbuckets."""
        states = self._nodes.states()
        return {number: states[number] for number in vbuckets if number in states}

    def bucket(self) -> BucketIdentity:
        """Which bucket the nodes serve."""
        return self._nodes.bucket()

    @property
    def _nodes(self) -> ClusterView:
        if self._view is None:
            self._view = ClusterView(self._options.cluster, self._options.vbuckets)
        return self._view

    def close(self) -> None:
        """Close the connections that serve only this task."""
        if self._view is not None:
            self._view.close()

    def _new_reader(self) -> RangeReader:
        rows = RowMaker(self._columns, keys_only=self._options.keys_only)
        options = self._options
        if options.history and not self._nodes.has_upriver_nodes():  # other servers have only the newest versions
            options = dataclasses.replace(options, history=False)
        settings = options.consumer_settings(rows.to_decode)
        # A range that the source answers with a rollback is repaired here, whatever the policy of a query would be.
        rules = self._options.rules._replace(on_rollback="emit")
        return RangeReader(Reading(self._options.cluster, settings, rules, rows, self._options.rows_per_batch))
