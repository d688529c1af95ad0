"""Reading ranges of many vbuckets into rows of Spark, in a task.

Theory of operation. A worker process lives on between micro-batches, and so do its event loop and its connections: one
*feed* to each node serves task after task. A task asks every node for the ranges of its vbuckets at once and hands out
rows as they come; while Spark is busy with a batch nothing is read, and the window bounds what waits.

A range that loses its stream (the vbucket moved, a connection was cut) is asked for again from where it stands, a few
times, wherever the vbucket is then; only what nobody can give makes the task fail. What comes beyond the end of a range
is cut off: deployed servers send a snapshot to its end.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from upriver.client.address import Address, Endpoint
from upriver.client.backoff import Backoff
from upriver.client.batches import Flush, Run, VbucketEvent
from upriver.client.cluster import Cluster
from upriver.client.copies import Copies, Policy
from upriver.client.feed import Feed
from upriver.client.placing import open_feed
from upriver.client.progress import Progress
from upriver.client.settings import ConsumerSettings
from upriver.errors import (
    ClusterMapError,
    DataLoss,
    NodeUnavailable,
    OutOfRange,
    StatusError,
    StreamRefused,
    UpriverError,
)
from upriver.model import Event, FailoverEntry, FailoverLog
from upriver.protocol.receiving import ReceivingStream
from upriver.spark.plan import GoBack, Range, Rules, answered_with_rollback
from upriver.spark.rows import Bounds, RowMaker, rollback_value

T = TypeVar("T")
#: How much is received at once: about what Spark likes to get as one batch.
RECEIVE_BYTES: Final = 2 * 1024 * 1024
#: A range that nobody gives is asked for again for so long, then its task fails.
RETRY_S: Final = 60.0
#: What waits for Spark is at most this; more is not acknowledged.
WINDOW_BYTES: Final = 16 * 1024 * 1024


class Reading(NamedTuple):
    """What the ranges of a query have in common."""

    address: Address
    settings: ConsumerSettings
    policy: Policy
    rows: RowMaker
    rows_per_batch: int


class _Arrived(NamedTuple):
    """Rows that wait for Spark, and what they took on the wire."""

    rows: pa.RecordBatch
    feed: Feed | None = None
    wire_bytes: int = 0


class RangeReader:
    """The connections of one worker process to one cluster; reads one task's ranges at a time."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._loop = asyncio.new_event_loop()
        self._cluster = Cluster(reading.address)
        self._copies = Copies({}, reading.policy, on_event=self._happened, on_move=lambda *_: None)
        self._feeds: dict[tuple[Endpoint, bool], Feed] = {}
        self._open: dict[int, Range] = {}
        self._asked_of: dict[int, Feed] = {}
        self._inexact: set[int] = set()
        self._lost: set[int] = set()
        self._backoff = Backoff()
        #: When nothing has come since.
        self._trying_since: float | None = None
        self._queue: deque[_Arrived] = deque()
        self._arrived = asyncio.Event()
        self._failure: BaseException | None = None

    def read(self, ranges: Iterable[Range]) -> Iterator[pa.RecordBatch]:
        """The rows of these ranges, each vbucket in its order."""
        self._start(ranges)
        try:
            self._run(self._ask())
            while (arrived := self._run(self._next())) is not None:
                limit = self._reading.rows_per_batch
                for at in range(0, arrived.rows.num_rows, limit):
                    yield arrived.rows.slice(at, limit)
                if arrived.feed is not None:
                    arrived.feed.processed(arrived.wire_bytes)
        except BaseException:
            # Whatever is still on its way would come into the next task's hands.
            self.close()
            raise

    def close(self) -> None:
        """Let go of all connections."""
        feeds, self._feeds = self._feeds, {}
        self._open.clear()

        async def close() -> None:
            for feed in feeds.values():
                await feed.close()
            await self._cluster.close()

        if not self._loop.is_closed():
            self._run(close())
            self._loop.close()

    @property
    def is_open(self) -> bool:
        """It can read another task's ranges."""
        return not self._loop.is_closed()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    # Asking

    def _start(self, ranges: Iterable[Range]) -> None:
        self._queue.clear()
        self._inexact.clear()
        self._failure = None
        for asked in ranges:
            if asked.go_back is not None:
                self._tell(asked.place.vbucket, asked.go_back, asked.place.branch)
            if asked.end_seqno > asked.place.seqno:
                self._open[asked.place.vbucket] = asked
                self._copies.put(asked.place.vbucket, _progress(asked))
        self._lost = set(self._open)

    async def _ask(self) -> None:
        """Ask for everything that has no stream, wherever it is now."""
        wanted, self._lost = sorted(self._lost), set()
        await self._cluster.open()
        by_owner: dict[tuple[Endpoint, bool], list[int]] = {}
        for number in wanted:
            endpoint = self._cluster.map.owner(number)
            if endpoint is None:
                self._retry(number, DataLoss(number, "no node of the cluster has it"))
            else:
                by_owner.setdefault((endpoint, number not in self._inexact), []).append(number)
        for (endpoint, exact), numbers in by_owner.items():
            try:
                feed = await self._feed(endpoint, exact=exact)
            except NodeUnavailable as error:
                for number in numbers:
                    self._retry(number, error)
                continue
            for number in numbers:
                self._asked_of[number] = feed
                feed.add_stream(number, self._answered, end_seqno=self._open[number].end_seqno)
            feed.flush()

    async def _feed(self, endpoint: Endpoint, *, exact: bool) -> Feed:
        feed = self._feeds.get((endpoint, exact))
        if feed is None or not feed.connection.is_open:
            settings = self._reading.settings if exact else dataclasses.replace(self._reading.settings, exact_end=False)
            feed = await open_feed(self._cluster, endpoint, settings, self._copies, self, RECEIVE_BYTES)
            self._feeds[endpoint, exact] = feed
        return feed

    def _answered(self, stream: ReceivingStream, error: StatusError | None) -> None:
        if error is None:
            if stream.vbucket not in self._open:  # accepted on another branch: the next plan begins there
                self._asked_of[stream.vbucket].close_stream(stream.vbucket)
            return
        if isinstance(error, OutOfRange) and stream.vbucket not in self._inexact:
            self._inexact.add(stream.vbucket)  # the state at the end is not kept any more
            self._lost.add(stream.vbucket)
            self._arrived.set()
        else:
            self._retry(stream.vbucket, error)

    def _retry(self, number: int, error: UpriverError) -> None:
        now = self._loop.time()
        if self._trying_since is None:
            self._trying_since = now
        if now - self._trying_since < RETRY_S:
            self._lost.add(number)
        else:
            asked = self._open[number]
            why = f"{error} (changes {asked.place.seqno} to {asked.end_seqno}, asked for {RETRY_S:g} s)"
            self.failed(StreamRefused(number, why))
        self._arrived.set()

    # Waiting

    async def _next(self) -> _Arrived | None:
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            if self._lost:
                await self._ask_again()
                continue
            if not self._open:
                return None
            self._arrived.clear()
            if not self._queue and not self._lost and self._failure is None:
                await self._arrived.wait()
        return self._queue.popleft()

    async def _ask_again(self) -> None:
        await asyncio.sleep(self._backoff.pause_s())
        try:
            await self._cluster.refresh(self._cluster.map)
        except (NodeUnavailable, ClusterMapError) as error:
            for number in tuple(self._lost):
                self._retry(number, error)
        else:
            await self._ask()

    # What feeds tell

    def received(self, feed: Feed, records: pa.RecordBatch, runs: tuple[Run, ...], wire_bytes: int) -> None:
        """Changes came."""
        self._backoff.reset()
        self._trying_since = None
        beyond = [run for run in runs if run.vbucket in self._open and run.position.seqno > self._end(run.vbucket)]
        stray = any(run.vbucket not in self._open for run in runs)
        rows = self._reading.rows.rows(records, [(run.rows, self._bounds(run)) for run in runs])
        if beyond or stray:
            rows = rows.filter(self._within(records, runs))
            for run in beyond:
                self._finish(run.vbucket)
                feed.close_stream(run.vbucket)
        self._queue.append(_Arrived(rows, feed, wire_bytes))
        self._arrived.set()

    def _within(self, records: pa.RecordBatch, runs: tuple[Run, ...]) -> pa.Array:
        ends = np.repeat([self._end(run.vbucket) for run in runs], [run.rows for run in runs])
        return pa.array(records.column("seqno").to_numpy() <= ends.astype(np.uint64))

    def _end(self, number: int) -> int:
        asked = self._open.get(number)
        return 0 if asked is None else asked.end_seqno

    def _bounds(self, run: Run) -> Bounds:
        position, asked = run.position, self._open.get(run.vbucket)
        branch = 0 if asked is None else asked.place.branch
        return Bounds(position.vbucket_uuid, branch, position.snapshot.start, position.snapshot.end)

    def _happened(self, event: VbucketEvent, progress: Progress) -> None:  # noqa: ARG002
        """The source went back after the range was planned; or it was flushed, which the next plan will see."""
        asked = self._open.get(event.vbucket)
        if asked is None or isinstance(event, Flush):
            return
        instead = answered_with_rollback(asked, event.seqno, event.new_uuid, Rules(self._reading.policy))
        assert instead.go_back is not None
        self._tell(event.vbucket, instead.go_back, asked.place.branch)
        if instead.end_seqno == instead.place.seqno:
            self._finish(event.vbucket)

    def stream_ended(self, feed: Feed, stream: ReceivingStream) -> None:  # noqa: ARG002
        """A stream is over: because everything came, or because something happened."""
        number = stream.vbucket
        if number not in self._open:
            return
        if stream.end_reason == "ok" or stream.position.seqno >= self._end(number):
            self._finish(number)
        else:
            self._retry(number, StreamRefused(number, f"its stream ended: {stream.end_reason}"))

    def feed_lost(self, feed: Feed, error: UpriverError) -> None:
        """A connection is gone, and the streams that it had with it; each is told as ended, too."""

    def failed(self, error: BaseException) -> None:
        """Something went wrong that no other attempt would change."""
        self._failure = self._failure or error
        self._arrived.set()

    def _finish(self, number: int) -> None:
        self._open.pop(number, None)
        self._arrived.set()

    def _tell(self, number: int, back: GoBack, branch: int) -> None:
        event = Event.ROLLBACK if back.seqno else Event.RESET
        bounds = Bounds(back.new_uuid, branch, back.seqno, back.seqno)
        value = rollback_value(back.old_uuid, back.new_uuid)
        self._queue.append(_Arrived(self._reading.rows.row(event, number, back.seqno, bounds, value)))


def _progress(asked: Range) -> Progress:
    """Where the range begins, as a consumer says it."""
    place = asked.place
    if not place.seqno:
        return Progress.beginning()
    log = FailoverLog((FailoverEntry(place.vbucket_uuid, 0),))
    return Progress(place.position, log, place.first_whole or None)


_READERS: dict[object, RangeReader] = {}


def reader_for(key: object, make: Callable[[], RangeReader]) -> RangeReader:
    """The reader that this worker process keeps for a query, made when it is first needed."""
    reader = _READERS.get(key)
    if reader is None or not reader.is_open:
        reader = _READERS[key] = make()
    return reader
