"""TAP in Spark: a batch is a dump, a stream is an observation.

TAP has neither seqnos nor branches, so there are no ranges, and nothing can be read twice. The offsets of a stream come
from the nodes' statistics and only show that something has changed. Each micro-batch then reads what the node has for
the query's name, until the node is silent. The node remembers what was acknowledged under the name, so no change is
skipped between micro-batches. But a micro-batch that Spark runs again does not get the changes of its first run: use
`dcp` if that matters.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from upriver.client.cluster import Cluster, failover_logs, owners
from upriver.client.consumer import Consumer, Progress
from upriver.errors import OptionError
from upriver.model import Event, FailoverLog
from upriver.spark.batch_planner import Range, ranges
from upriver.spark.cluster_view import ClusterView
from upriver.spark.offsets import Offset, logged_start
from upriver.spark.options import ReadOptions
from upriver.spark.readers import SparkReader, StreamReader
from upriver.spark.rows import Bounds, rollback_value
from upriver.spark.short_errors import short_errors

#: A micro-batch ends when the node has sent nothing for this long.
SILENCE_S: Final = 0.5
#: A micro-batch ends after this time.
OBSERVATION_S: Final = 10.0
_TASKS: Final = 2


class TapShare(InputPartition):
    """The vbuckets of one task."""

    def __init__(self, name: str, vbuckets: Sequence[int], moved: Sequence[Range] = (), *, is_first: bool = True):
        super().__init__(None)
        self.name = name
        self.vbuckets = tuple(vbuckets)
        #: Their changes since the last micro-batch, as ranges.
        self.moved = tuple(moved)
        #: Whether nothing of them was read before.
        self.is_first = is_first


@short_errors
class TapReader(SparkReader, DataSourceReader):
    """A batch read: a dump of everything."""

    def partitions(self) -> Sequence[InputPartition]:
        """Two tasks, each with half of the vbuckets."""
        view = ClusterView(self.options.cluster, self.options.vbuckets)
        try:
            return [TapShare("", numbers) for numbers in _shares(view.vbuckets(), self.options.min_partitions)]
        finally:
            view.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        assert isinstance(partition, TapShare)
        return _TapRows(self, partition, {}).rows(end="latest")


@short_errors
class TapStreamReader(StreamReader):
    """A stream read: what a node has for a name, micro-batch by micro-batch."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        if options.name is None:
            raise OptionError(
                "name", "", "a tap stream needs a name, under which the node remembers what was acknowledged"
            )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The shares with changes. The vbuckets of a share never change, because the node knows them by its name."""
        before, after = Offset.unpacked(logged_start(start, end)), Offset.unpacked(end)
        moved = {each.start.vbucket: each for each in ranges(before, after)}
        return [
            TapShare(
                share.name,
                share.vbuckets,
                [moved[number] for number in share.vbuckets if number in moved],
                is_first=not any(before.vbuckets[number].seqno for number in share.vbuckets),
            )
            for share in self._all_shares(list(after.vbuckets))
            if not moved.keys().isdisjoint(share.vbuckets)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        assert isinstance(partition, TapShare)
        rolled_back = {each.start.vbucket: each for each in partition.moved if each.rollback is not None}
        for number, each in rolled_back.items():
            assert each.rollback is not None
            bounds = Bounds(0, each.start.branch, 0, 0)
            value = rollback_value(each.rollback.old_uuid, each.rollback.new_uuid)
            yield self._rows().row(Event.RESET, number, 0, bounds, value)
        begin = set(partition.vbuckets) if partition.is_first else set(rolled_back)
        logs = asyncio.run(_logs(self.options, [n for n in partition.vbuckets if n not in begin]))
        start = {n: Progress.unplaced(logs[n]) if n in logs else Progress.beginning() for n in partition.vbuckets}
        branches = {each.start.vbucket: each.start.branch for each in partition.moved}
        yield from _TapRows(self, partition, branches).rows(
            start=start, name=partition.name, patience_s=SILENCE_S, on_rollback=self.options.on_rollback
        )

    def _chosen(self, logged: Offset) -> Offset:
        """The vbuckets of a name cannot change."""
        chosen = super()._chosen(logged)
        if chosen is not logged:
            numbers = ",".join(map(str, chosen.vbuckets))
            raise OptionError("vbuckets", numbers, "a tap stream cannot change its vbuckets: use another name")
        return chosen

    def _all_shares(self, numbers: list[int]) -> list[TapShare]:
        shares = _shares(numbers, self.options.min_partitions)
        return [TapShare(f"{self.options.name}:{number}", share) for number, share in enumerate(shares)]


def _shares(numbers: Sequence[int], wanted: int | None) -> list[Sequence[int]]:
    count = min(wanted or _TASKS, len(numbers))
    return [numbers[first::count] for first in range(count)]


class _TapRows:
    """The rows of one task."""

    def __init__(self, reader: SparkReader, share: TapShare, branches: dict[int, int]) -> None:
        self._options = reader.options
        self._rows = reader._rows()
        self._share = share
        self._branches = branches

    def rows(self, patience_s: float | None = None, **settings: Any) -> Iterator[pa.RecordBatch]:
        """Read to the end, or until nothing has arrived for ``patience_s``."""
        loop = asyncio.new_event_loop()
        consumer = Consumer(
            self._options.cluster,
            dialect="tap",
            vbuckets=self._share.vbuckets,
            keys_only=self._options.keys_only,
            stream_port=self._options.stream_port,
            columns=self._rows.to_decode,
            **settings,
        )
        deadline = loop.time() + OBSERVATION_S
        try:
            while patience_s is None or loop.time() < deadline:
                batch = loop.run_until_complete(_next(consumer, patience_s))
                if batch is None:
                    return
                if batch.event is not None:
                    number = batch.event.vbucket
                    yield self._rows.row(batch.event.event, number, 0, Bounds(0, self._branch(number), 0, 0))
                else:
                    runs = [(run.rows, Bounds(0, self._branch(run.vbucket), 0, 0)) for run in batch.runs]
                    yield self._rows.rows(batch.records, runs)
        finally:
            loop.run_until_complete(consumer.close())
            loop.close()

    def _branch(self, number: int) -> int:
        return self._branches.get(number, 0)


async def _next(consumer: Consumer, patience_s: float | None) -> Any:
    try:
        async with asyncio.timeout(patience_s):
            return await anext(consumer, None)
    except TimeoutError:
        return None


async def _logs(options: ReadOptions, numbers: Sequence[int]) -> dict[int, FailoverLog]:
    cluster = Cluster(options.cluster)
    try:
        logs: dict[int, FailoverLog] = {}
        for endpoint, here in (await owners(cluster, numbers)).items():
            logs |= await failover_logs(await cluster.connection(endpoint), here)
        return logs
    finally:
        await cluster.close()
