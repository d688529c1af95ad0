"""TAP under Spark: a dump of what there is, and a look at what comes.

TAP tells neither seqnos nor branches, so there are no ranges: a batch is a dump, and nothing can be read twice. A
stream is an observation. Its offsets are those that the nodes tell beside TAP, and only say that something has
happened; each micro-batch then takes what the node has for the query's name, until it is silent. The node remembers for
the name what was acknowledged, so nothing is skipped from one micro-batch to the next; but what a micro-batch has taken
is gone for one that Spark runs again. Whoever needs that reads `dcp`.
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
from upriver.spark.offsets import Offset
from upriver.spark.options import ReadOptions
from upriver.spark.readers import ReaderOfRows, StreamReader
from upriver.spark.rows import Bounds, rollback_value

#: A node that says nothing for so long has said everything.
SILENCE_S: Final = 0.5
#: A micro-batch takes no longer than this, however much comes.
OBSERVATION_S: Final = 10.0
_TASKS: Final = 2


class TapShare(InputPartition):
    """The vbuckets of one task."""

    def __init__(self, name: str, vbuckets: Sequence[int], moved: Sequence[Range] = (), *, is_first: bool = True):
        super().__init__(None)
        self.name = name
        self.vbuckets = tuple(vbuckets)
        #: What has happened to them since the last micro-batch.
        self.moved = tuple(moved)
        #: Nothing of them was read before.
        self.is_first = is_first


class TapReader(ReaderOfRows, DataSourceReader):
    """A batch: a dump of everything."""

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
        return _Taken(self, partition, {}).rows(end="latest")


class TapStreamReader(StreamReader):
    """A stream: what a node has for a name, micro-batch by micro-batch."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        if options.name is None:
            raise OptionError("name", "", "a stream by tap needs one: the node remembers by it what was acknowledged")

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The shares in which something has happened. Which vbucket is in which never changes: names stand for them."""
        before, after = Offset.unpacked(start), Offset.unpacked(end)
        moved = {each.place.vbucket: each for each in ranges(before, after)}
        return [
            TapShare(
                share.name,
                share.vbuckets,
                [moved[number] for number in share.vbuckets if number in moved],
                is_first=not any(before.places[number].seqno for number in share.vbuckets),
            )
            for share in self._all_shares(list(after.places))
            if not moved.keys().isdisjoint(share.vbuckets)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        assert isinstance(partition, TapShare)
        went_back = {each.place.vbucket: each for each in partition.moved if each.go_back is not None}
        for number, each in went_back.items():
            assert each.go_back is not None
            bounds = Bounds(0, each.place.branch, 0, 0)
            value = rollback_value(each.go_back.old_uuid, each.go_back.new_uuid)
            yield self._rows().row(Event.RESET, number, 0, bounds, value)
        begin = set(partition.vbuckets) if partition.is_first else set(went_back)
        logs = asyncio.run(_logs(self.options, [n for n in partition.vbuckets if n not in begin]))
        start = {n: Progress.unplaced(logs[n]) if n in logs else Progress.beginning() for n in partition.vbuckets}
        branches = {each.place.vbucket: each.place.branch for each in partition.moved}
        yield from _Taken(self, partition, branches).rows(
            start=start, name=partition.name, patience_s=SILENCE_S, on_rollback=self.options.on_rollback
        )

    def _chosen(self, logged: Offset) -> Offset:
        """A name stands for the vbuckets that it was begun with."""
        chosen = super()._chosen(logged)
        if chosen is not logged:
            numbers = ",".join(map(str, chosen.places))
            raise OptionError("vbuckets", numbers, "a stream by tap keeps those that it began with: take another name")
        return chosen

    def _all_shares(self, numbers: list[int]) -> list[TapShare]:
        shares = _shares(numbers, self.options.min_partitions)
        return [TapShare(f"{self.options.name}:{place}", share) for place, share in enumerate(shares)]


def _shares(numbers: Sequence[int], wanted: int | None) -> list[Sequence[int]]:
    count = min(wanted or _TASKS, len(numbers))
    return [numbers[first::count] for first in range(count)]


class _Taken:
    """What one task takes of a consumer, as rows."""

    def __init__(self, reader: ReaderOfRows, share: TapShare, branches: dict[int, int]) -> None:
        self._options = reader.options
        self._rows = reader._rows()
        self._share = share
        self._branches = branches

    def rows(self, patience_s: float | None = None, **settings: Any) -> Iterator[pa.RecordBatch]:
        """Everything until the end, or until nothing has come for so long."""
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
