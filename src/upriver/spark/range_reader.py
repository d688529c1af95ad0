"""Reads ranges of many vbuckets into rows of Spark, in a task.

Theory of operation. A worker process lives on between micro-batches. So do its event loop and its connections: one feed
to each node serves task after task. A task requests the ranges of its vbuckets from all nodes at once and yields rows
as they arrive. While Spark processes a batch the event loop stands still; the window bounds the received bytes.

The client's ``StreamSupervisor`` requests the streams and replaces lost ones; ``RangePolicy`` tells it how. Changes
beyond the end of a range are removed, because deployed servers send a snapshot to its end.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from upriver.client.cluster import Cluster
from upriver.client.consumer import (
    Batch,
    ConsumerSettings,
    DeliveryQueue,
    Feed,
    FeedFactory,
    Flush,
    Run,
    StreamSupervisor,
)
from upriver.client.transport import Address
from upriver.spark.batch_planner import Range, Rules
from upriver.spark.range_policy import RangePolicy
from upriver.spark.rows import RowMaker, rollback_value

T = TypeVar("T")
#: The number of bytes to receive at once, and about the size of a batch for Spark.
RECEIVE_BYTES: Final = 2 * 1024 * 1024
LOG: Final = logging.getLogger("upriver.spark")
#: A node that sends nothing for this long, though a range is unfinished, is asked again over another connection. With a
#: filter a node may be silent for longer.
STALL_S: Final = 120.0


class Reading(NamedTuple):
    """The settings that all ranges of a query share."""

    address: Address
    settings: ConsumerSettings
    rules: Rules
    rows: RowMaker
    rows_per_batch: int


class RangeReader:
    """The connections of one worker process to one cluster; reads the ranges of one task at a time."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._loop = asyncio.new_event_loop()
        self._cluster = Cluster(reading.address)
        self._policy = RangePolicy(
            reading.settings,
            reading.rules,
            on_rollback=lambda event, progress: self._queue.put_event(event, progress),
            on_finished=lambda: self._queue.wake(),
        )
        self._queue = DeliveryQueue(reading.settings, self._policy.tracked, self._policy.ends)
        factory = FeedFactory(self._cluster, self._policy.tracked, self, RECEIVE_BYTES)
        self._supervisor = StreamSupervisor(
            self._cluster, self._policy, factory, on_failure=self._queue.fail, on_feed_lost=self._queue.forget
        )
        self._is_started = False

    def read(self, ranges: Iterable[Range]) -> Iterator[pa.RecordBatch]:
        """The rows of these ranges, each vbucket in its order."""
        try:
            self._run(self._start(ranges))
            while batches := self._run(self._next()):
                rows, limit = self._rows(batches), self._reading.rows_per_batch
                for at in range(0, rows.num_rows, limit):
                    yield rows.slice(at, limit)
                self._queue.done(len(batches))
        except BaseException:
            # The next task must not receive the rest of these streams.
            self.close()
            raise

    def close(self) -> None:
        """Close all connections."""

        async def close() -> None:
            await self._supervisor.close()
            await self._cluster.close()

        if not self._loop.is_closed():
            self._run(close())
            self._loop.close()

    @property
    def is_open(self) -> bool:
        """Whether it can read another task's ranges."""
        return not self._loop.is_closed()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def _start(self, ranges: Iterable[Range]) -> None:
        self._policy.start(ranges)
        self._supervisor.reset_patience()
        if self._is_started:
            self._supervisor.want(self._policy.ends.unfinished)
        else:
            self._is_started = True
            self._supervisor.start()

    async def _next(self) -> list[Batch]:
        """The next batches; empty at the end."""
        while (first := self._queue.take()) is None:
            if self._queue.failure is not None:
                raise self._queue.failure
            if not self._policy.ends.unfinished:
                return []
            await self._arrival()
        batches, size = [first], first.wire_bytes
        # Join small batches, because each vbucket has its own and a batch costs Spark a millisecond.
        while first.event is None and (batch := self._queue.take_changes(RECEIVE_BYTES - size)) is not None:
            batches.append(batch)
            size += batch.wire_bytes
        return batches

    async def _arrival(self) -> None:
        """Wait for an event. Connections that stay silent are aborted, so that no task waits for ever."""
        settings = self._reading.settings
        filtered = settings.key_filter is not None or settings.value_filter is not None
        try:
            async with asyncio.timeout(None if filtered else STALL_S):
                await self._queue.wait()
        except TimeoutError:
            for feed in self._supervisor.feeds_of(self._policy.ends.unfinished):
                LOG.warning("%s has sent nothing for %g s: asking again", feed.endpoint, STALL_S)
                feed.connection.abort()

    def _rows(self, batches: list[Batch]) -> pa.RecordBatch:
        first, event, rows = batches[0], batches[0].event, self._reading.rows
        if event is not None:
            assert not isinstance(event, Flush)  # which the policy does not report
            value = rollback_value(event.old_uuid, event.new_uuid)
            return rows.row(event.event, event.vbucket, event.seqno, self._policy.bounds(first.runs[0]), value)
        records = first.records if len(batches) == 1 else pa.concat_batches([batch.records for batch in batches])
        return rows.rows(records, [(run.rows, self._policy.bounds(run)) for batch in batches for run in batch.runs])

    def received(self, feed: Feed, records: pa.RecordBatch, runs: tuple[Run, ...], wire_bytes: int) -> None:
        """Queue the changes that belong to a range."""
        self._supervisor.reset_patience()
        self._policy.received(runs)
        self._queue.received(feed, records, runs, wire_bytes)


#: The readers that this worker process keeps, the most recently used last.
_READERS: dict[object, RangeReader] = {}
#: The number of queries that may keep connections here; the least recently used reader is closed.
READERS_MAX: Final = 4


def reader_for(key: object, make: Callable[[], RangeReader]) -> RangeReader:
    """The reader that this worker process keeps for a query, made on first use."""
    reader = _READERS.pop(key, None)
    if reader is None or not reader.is_open:
        reader = make()
    _READERS[key] = reader
    while len(_READERS) > READERS_MAX:
        _READERS.pop(next(iter(_READERS))).close()
    return reader


def close_readers() -> None:
    """Close the connections that this process keeps for later tasks; the end of a worker closes them too."""
    while _READERS:
        _READERS.popitem()[1].close()
