"""A consumer of change streams: batches of changes of all vbuckets, wherever these are, for as long as wanted.

Theory of operation. One *feed* for each node brings the streams of its vbuckets. What it receives goes into one queue,
which hands it out in order. A vbucket without a stream is *wanted*: a supervising task looks up in the newest cluster
map who has it and asks there, after a pause that grows with each attempt. Streams end because a connection is lost, a
vbucket moves or the source falls back; in every case the vbucket is wanted again, from exactly where its copy stands,
and the protocol finds out whether it may go on from there.

Changes are acknowledged to the source when they are handed out and the next are asked for, so what waits here is
bounded by the window, while noops are still answered. Where a source knows no window the connection is not read
meanwhile.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from upriver.client.acknowledgements import Acknowledgements
from upriver.client.address import Address, Endpoint
from upriver.client.backoff import Backoff
from upriver.client.batches import Batch, Run, VbucketEvent
from upriver.client.checkpoint import Checkpoint
from upriver.client.cluster import Cluster
from upriver.client.copies import Copies
from upriver.client.feed import RECEIVE_BYTES, Feed
from upriver.client.inflate import inflated_batch
from upriver.client.placing import open_feed, opening_progress, range_ends, seqnos_in
from upriver.client.progress import Progress
from upriver.client.settings import ConsumerSettings
from upriver.client.sync import Synchronous
from upriver.client.tap_feed import TapFeed
from upriver.client.tap_placing import TapPlaces, tap_progress
from upriver.errors import (
    Busy,
    KeyExists,
    KeyNotFound,
    NodeUnavailable,
    NotMyVbucket,
    StatusError,
    StreamRefused,
    TemporaryFailure,
    UpriverError,
)
from upriver.model import Change, StreamPosition
from upriver.model.position import NO_END
from upriver.protocol.receiving import ReceivingStream
from upriver.wire.memcached import Feature, GetAllVbucketSeqnos

LOG: Final = logging.getLogger("upriver.client")
#: Refusals of a stream that may be different next time.
_PASSING: Final = (NotMyVbucket, TemporaryFailure, Busy, KeyExists, KeyNotFound)
#: TAP does not tell that a vbucket has gone elsewhere, so a consumer asks that often.
_TAP_LOOK_S: Final = 1.0


class _Queued(NamedTuple):
    """Something that waits to be handed out; without a batch only progress, or an answer, at its place in the order."""

    batch: Batch | None
    feed: Feed | TapFeed | None
    progress: dict[int, Progress]
    on_done: Callable[[], object] | None = None


class Consumer:
    """The changes of a cluster, batch by batch.

    ::

        async with Consumer("127.0.0.1:11210", start="earliest") as consumer:
            async for batch in consumer:
                print(len(batch), batch.records)
    """

    def __init__(self, address: str | Address, *, checkpoint: Checkpoint | None = None, **settings: Any) -> None:
        """``settings`` are those of ``ConsumerSettings``. A checkpoint that has progress wins over ``start``."""
        self.settings = ConsumerSettings(**settings)
        self.cluster = Cluster(address)
        #: Vbuckets that do not move although they should, each with the reason.
        self.stalled: dict[int, str] = {}
        self.changes_received = 0
        self.reconnects = 0
        self._checkpoint = checkpoint
        self._saved: dict[int, Progress] = {}
        self._saving = asyncio.Lock()
        self._acknowledgements = Acknowledgements()
        self._copies: Copies
        self._ends: dict[int, int] = {}
        self._unfinished: set[int] = set()
        #: Vbuckets whose stream does not end where it should.
        self._overlong: set[int] = set()
        self._feeds: dict[Endpoint, Feed] = {}
        self._tap: TapPlaces
        self._tap_feeds: dict[Endpoint, TapFeed] = {}
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._paused: set[Feed | TapFeed] = set()
        self._arrived = asyncio.Event()
        self._wanted: set[int] = set()
        self._wants = asyncio.Event()
        self._backoffs: dict[object, Backoff] = {}
        self._suspect = False
        self._number = 0
        self._last: Batch | None = None
        self._several: list[tuple[Batch, Feed | TapFeed | None]] = []
        self._last_feed: Feed | TapFeed | None = None
        self._failure: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._watched: dict[int, int] = {}
        self._started = False
        self._closed = False

    @classmethod
    def sync(cls, address: str | Address, **settings: Any) -> "SynchronousConsumer":
        """The same as an ordinary iterator, in a ``with``."""
        return SynchronousConsumer(lambda: cls(address, **settings))

    # Beginning and end

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Find the cluster and ask for all streams; iterating does so too."""
        if self._started:
            return
        self._started = True
        known = await self.cluster.open()
        vbuckets = self._chosen(known.vbuckets, known.owners)
        self._saved = {} if self._checkpoint is None else dict(await self._checkpoint.load())
        is_tap = self.settings.dialect == "tap"
        if is_tap:
            progress = tap_progress(vbuckets, self.settings.start, self._saved)
        else:
            progress = await opening_progress(self.cluster, vbuckets, self.settings.start, self._saved)
            self._ends = await range_ends(self.cluster, vbuckets, self.settings.end)
        self._copies = Copies(progress, self.settings.on_rollback, on_event=self._happened, on_move=self._moved)
        self._unfinished = set(vbuckets)
        self._want(vbuckets)
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]
        if is_tap:
            self._tap = TapPlaces(self.cluster, self.settings, self._copies, self)
            self._tasks.append(asyncio.create_task(self._look_for_gone()))

    def _chosen(self, count: int, owners: tuple[int, ...]) -> list[int]:
        chosen = self.settings.vbuckets
        if chosen is None:
            # A range of a vbucket that nobody has would never end.
            return [number for number in range(count) if self.settings.end == "never" or owners[number] >= 0]
        for number in chosen:
            if self.cluster.map.owner(number) is None:
                raise StreamRefused(number, "no node of the cluster has it; look at the cluster map")
        return list(chosen)

    async def close(self) -> None:
        """Stop, save the progress that was acknowledged, close all connections."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        feeds: list[Feed | TapFeed] = [*self._feeds.values(), *self._tap_feeds.values()]
        for feed in feeds:
            await feed.close()
        await self.cluster.close()
        try:
            await self.save()
        finally:
            self._arrived.set()

    # Handing out

    @property
    def queued_bytes(self) -> int:
        """How many received bytes wait to be handed out."""
        return self._queued_bytes

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        await self.start()
        self._done_with_last()
        return await self._next()

    async def several(self, done: int) -> list[Batch]:
        """The next batch and those that wait behind it already, for the synchronous twin; empty at the end.

        ``done`` says how many of those before are done with; the others were never looked at.
        """
        await self.start()
        await self.leave(done)
        out: list[Batch] = []
        size = 0
        with contextlib.suppress(StopAsyncIteration):
            while not out or (self._queue and size < self.settings.window_bytes // 4):
                batch = await self._next() if not out else self._take()
                if batch is not None:
                    out.append(batch)
                    self._several.append((batch, self._last_feed))
                    size += batch.wire_bytes
        self._last = self._last_feed = None
        return out

    async def leave(self, done: int) -> None:
        """Whoever took several batches goes before he was done with all of them."""
        for batch, feed in self._several[:done]:
            self._last, self._last_feed = batch, feed
            self._done_with_last()
        self._several.clear()

    async def _next(self) -> Batch:
        while True:
            while self._queue:
                batch = self._take()
                if batch is not None:
                    return batch
            if self._failure is not None:
                raise self._failure
            if self._closed or not self._unfinished:
                await self.save()
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()

    async def changes(self) -> AsyncIterator[Change | VbucketEvent]:
        """Single changes, and what happened to whole vbuckets, for comfort."""
        async for batch in self:
            if batch.event is not None:
                yield batch.event
            else:
                for change in batch.changes():
                    yield change

    def _take(self) -> Batch | None:
        """The next of the queue; None if it was only a movement."""
        batch, feed, progress, on_done = self._queue.popleft()
        self._number += 1
        self._acknowledgements.hand_out(self._number, progress, on_done)
        if batch is None:
            self._acknowledgements.done(self._number)
            return None
        object.__setattr__(batch, "number", self._number)
        self._queued_bytes -= batch.wire_bytes
        self._last, self._last_feed = batch, feed
        return batch

    def _done_with_last(self) -> None:
        batch, feed = self._last, self._last_feed
        self._last = self._last_feed = None
        if batch is None:
            return
        if feed is not None:
            feed.processed(batch.wire_bytes)
        if self.settings.auto_acknowledge:
            self.acknowledge(batch)
        if self._paused and self._queued_bytes < self.settings.window_bytes:
            for each in self._paused:
                each.connection.resume()
            self._paused.clear()

    # Progress

    @property
    def progress(self) -> dict[int, Progress]:
        """How far everything that was acknowledged without a gap leads: where another consumer may go on."""
        return {**self._saved, **self._acknowledgements.progress}

    def acknowledge(self, batch: Batch) -> None:
        """This batch is done. Progress follows when all before it are done too."""
        self._acknowledgements.done(batch.number)

    async def save(self) -> None:
        """Write the progress to the checkpoint, if there is one and it moved."""
        async with self._saving:  # one after the other, or an older state could be written last
            moved = self._acknowledgements.progress
            if self._checkpoint is None or all(self._saved.get(number) == each for number, each in moved.items()):
                return
            progress = {**self._saved, **moved}
            await self._checkpoint.save(progress)
            self._saved = progress

    # What feeds tell

    def received(
        self,
        feed: Feed | TapFeed,
        records: pa.RecordBatch,
        runs: tuple[Run, ...],
        wire_bytes: int,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        """Changes came."""
        if Feature.SNAPPY in feed.connection.features and "value" in records.schema.names:
            records = inflated_batch(records)
        progress = {run.vbucket: self._copies[run.vbucket].progress for run in runs}
        if self._ends and isinstance(feed, Feed) and (self._overlong or not feed.connection.is_ours):
            records, runs = self._cut(feed, records, runs, progress)
            if not runs:  # all of it lay beyond
                feed.processed(wire_bytes)
                self._queue.append(_Queued(None, None, progress))
                self._arrived.set()
                return
        if len(records.schema) > len(self.settings.columns):
            records = records.select(list(self.settings.columns))
        batch = Batch(records, runs, None, progress, wire_bytes)
        self.changes_received += len(batch)
        self._queue.append(_Queued(batch, feed, progress, on_done))
        self._queued_bytes += wire_bytes
        if self._queued_bytes > 2 * self.settings.window_bytes:  # somebody who does not keep to the window
            feed.connection.pause()
            self._paused.add(feed)
        self._arrived.set()

    def _cut(
        self, feed: Feed, records: pa.RecordBatch, runs: tuple[Run, ...], progress: dict[int, Progress]
    ) -> tuple[pa.RecordBatch, tuple[Run, ...]]:
        """Leave out what lies beyond the end of a range, and close a stream that has gone so far.

        Everything up to the end has come then: that is where we stand, inside the snapshot that goes beyond it.
        """
        reached = {run.vbucket: run.position for run in runs if run.position.seqno >= self._ends[run.vbucket]}
        for number, position in reached.items():
            end = max(self._ends[number], position.snapshot.start)
            if position.seqno > end:
                stands = StreamPosition(position.vbucket_uuid, end, position.snapshot)
                progress[number] = progress[number].moved(stands)
                asyncio.get_running_loop().call_soon(feed.close_stream, number)
                self._finished(number)
            elif number in self._overlong:
                self._finished(number)
            self._overlong.discard(number)
        if not any(position.seqno > self._ends[number] for number, position in reached.items()):
            return records, runs
        pieces, kept, at = [], [], 0
        for run in runs:
            rows = records.slice(at, run.rows)
            at += run.rows
            end, position = self._ends[run.vbucket], run.position
            if position.seqno > end:
                rows = rows.filter(pc.less_equal(rows.column("seqno"), pa.scalar(end, pa.uint64())))
                seqno = rows.column("seqno")[-1].as_py() if rows.num_rows else 0
                position = StreamPosition(position.vbucket_uuid, max(seqno, position.snapshot.start), position.snapshot)
            if rows.num_rows:
                pieces.append(rows)
                kept.append(Run(run.vbucket, rows.num_rows, position))
        return (pa.concat_batches(pieces) if pieces else records.slice(0, 0)), tuple(kept)

    def _happened(self, event: VbucketEvent, progress: Progress) -> None:
        LOG.warning("vbucket %d: %s", event.vbucket, event)
        self._queue.append(_Queued(Batch.of_event(event, progress), None, {event.vbucket: progress}))
        self._arrived.set()

    def _moved(self, vbucket: int, progress: Progress) -> None:
        self._queue.append(_Queued(None, None, {vbucket: progress}))
        self._arrived.set()

    def passed(self, on_done: Callable[[], object]) -> None:
        """Something of TAP came that is no change and wants an answer in its order."""
        self._queue.append(_Queued(None, None, {}, on_done))
        self._arrived.set()

    def stream_ended(self, feed: Feed, stream: ReceivingStream) -> None:
        """A stream is over: done, or wanted again."""
        vbucket = stream.vbucket
        if vbucket not in self._unfinished or stream.end_reason == "closed":
            return
        if stream.end_reason == "ok" and vbucket in self._ends:
            self._finished(vbucket)
            return
        if stream.end_reason != "disconnected":
            LOG.info("vbucket %d: the stream from %s ended: %s", vbucket, feed.endpoint, stream.end_reason)
            self._suspect = True
            self._want_later([vbucket], vbucket)

    def dumped(self, feed: TapFeed, vbuckets: Iterable[int]) -> None:  # noqa: ARG002
        """TAP has sent everything; what is not whole is wanted again when the connection is closed."""
        for number in vbuckets:
            self._finished(number)

    def branched(self, feed: TapFeed) -> None:
        """The source of a TAP feed told that it lives on other branches now."""

        async def follow() -> None:
            with contextlib.suppress(UpriverError):  # then it is compared with what it was, and read again
                await self._tap.follow(feed)

        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.create_task(follow()))

    def feed_lost(self, feed: Feed | TapFeed, error: UpriverError) -> None:
        """A connection is gone: everything that it brought is wanted again."""
        for feeds in (self._feeds, self._tap_feeds):
            for endpoint, each in list(feeds.items()):
                if each is feed:
                    del feeds[endpoint]
        self._paused.discard(feed)
        if self._closed:
            return
        self.reconnects += 1
        self._suspect = True
        LOG.warning("%s", error)
        self._want_later([number for number in feed.carried if number in self._unfinished], feed.endpoint)

    def failed(self, error: BaseException) -> None:
        """Nothing more can be done."""
        if self._failure is None:
            self._failure = error
            self._arrived.set()

    def _finished(self, vbucket: int) -> None:
        self._unfinished.discard(vbucket)
        self.stalled.pop(vbucket, None)
        if not self._unfinished:
            self._arrived.set()

    # Finding streams

    def _want(self, vbuckets: "list[int] | set[int]") -> None:
        self._wanted.update(number for number in vbuckets if number in self._unfinished)
        self._wants.set()

    def _want_later(self, vbuckets: list[int], what: object) -> None:
        """Ask again after a pause that grows with each attempt for the same."""
        if vbuckets and not self._closed:
            pause_s = self._backoffs.setdefault(what, Backoff()).pause_s()
            asyncio.get_running_loop().call_later(pause_s, self._want, vbuckets)

    async def _supervise(self) -> None:
        while True:
            await self._wants.wait()
            self._wants.clear()
            wanted, self._wanted = sorted(self._wanted), set()
            try:
                await self._place(wanted)
            except NodeUnavailable as error:
                LOG.warning("%s", error)
                self._suspect = True
                self._want_later(wanted, None)
            except Exception as error:
                self.failed(error)
                return

    async def _place(self, wanted: list[int]) -> None:
        """Ask whoever has the vbuckets now."""
        if self._suspect:
            self._suspect = False
            await self.cluster.refresh(self.cluster.map)
        by_node: dict[Endpoint, list[int]] = {}
        homeless: list[int] = []
        for number in wanted:
            owner = self.cluster.map.owner(number)
            (homeless if owner is None else by_node.setdefault(owner, [])).append(number)
        if homeless:
            self._suspect = True
            self._want_later(homeless, "homeless")
        for endpoint, numbers in by_node.items():
            try:
                if self.settings.dialect == "tap":
                    await self._place_tap(endpoint, numbers)
                    continue
                feed = await self._feed(endpoint)
            except NodeUnavailable as error:
                LOG.warning("%s", error)
                self._suspect = True
                self._want_later(numbers, endpoint)
                continue
            for number in numbers:
                self._ask(feed, number)
            feed.flush()

    async def _place_tap(self, endpoint: Endpoint, numbers: list[int]) -> None:
        """A TAP connection cannot be asked for more: another takes its place, which brings everything."""
        old = self._tap_feeds.pop(endpoint, None)
        if old is not None:
            await old.close()
            numbers = sorted(old.carried.union(numbers) & self._unfinished)
        try:
            feed, missing = await self._tap.open(endpoint, numbers)
        except NodeUnavailable as error:
            LOG.warning("%s", error)
            self._suspect = True
            self._want_later(numbers, endpoint)
            return
        if feed is not None:
            self._tap_feeds[endpoint] = feed
            for what in (endpoint, "homeless", None):
                self._backoffs.pop(what, None)
        if missing:
            self._suspect = True
            self._want_later(sorted(missing), "homeless")

    async def _look_for_gone(self) -> None:
        while True:
            await asyncio.sleep(_TAP_LOOK_S)
            for endpoint, feed in list(self._tap_feeds.items()):
                with contextlib.suppress(UpriverError):
                    if await self._tap.gone(feed, endpoint):
                        feed.connection.abort()

    async def _feed(self, endpoint: Endpoint) -> Feed:
        known = self._feeds.get(endpoint)
        if known is None or not known.connection.is_open:
            known = await open_feed(self.cluster, endpoint, self.settings, self._copies, self, RECEIVE_BYTES)
            self._feeds[endpoint] = known
        return known

    def _ask(self, feed: Feed, vbucket: int) -> None:
        def answered(stream: ReceivingStream, error: StatusError | None) -> None:  # noqa: ARG001
            if error is None:
                if end_seqno > self._end_of(vbucket):
                    self._shorten(feed, vbucket)
                for what in (vbucket, feed.endpoint, "homeless", None):
                    self._backoffs.pop(what, None)
                return
            if not feed.connection.is_open:
                return  # ``feed_lost`` wants it again
            if isinstance(error, NotMyVbucket) and self.cluster.map.owner(vbucket) not in (None, asked):
                self._want([vbucket])  # the refusal came with the map that says where it is
            elif isinstance(error, _PASSING):
                LOG.info("%s: %s", feed.endpoint, error)
                self._suspect = True
                self._want_later([vbucket], vbucket)
            else:
                self.failed(StreamRefused(vbucket, f"{feed.endpoint} gives no stream: {error}"))

        asked = self.cluster.map.owner(vbucket)
        end_seqno = self._end_of(vbucket)
        with contextlib.suppress(KeyExists):  # it has one already
            feed.add_stream(vbucket, answered, end_seqno=end_seqno)

    def _shorten(self, feed: Feed, vbucket: int) -> None:
        """The source went back behind the end that we had to name: now the right one can be named.

        A draft cannot close a stream, so we stop listening where it should have ended.
        """
        if not feed.is_draft:
            feed.close_stream(vbucket)
            self._want([vbucket])
        elif self._ends[vbucket] == 0:
            self._finished(vbucket)
        else:
            self._overlong.add(vbucket)

    def _end_of(self, vbucket: int) -> int:
        """Where its stream ends: not before where we stand, which no source would accept."""
        return max(self._ends.get(vbucket, NO_END), self._copies[vbucket].position.seqno)

    # Watching

    async def _watch(self) -> None:
        """Save progress, and complain about vbuckets that stand still."""
        looked_at = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(min(self.settings.checkpoint_interval_s, self.settings.stall_s))
            try:
                await asyncio.shield(self.save())  # what has begun to be written is written
            except UpriverError as error:
                self.failed(error)
            now = asyncio.get_running_loop().time()
            if now - looked_at >= self.settings.stall_s:
                looked_at = now
                with contextlib.suppress(UpriverError):
                    await self._look_for_stalled()

    async def _look_for_stalled(self) -> None:
        """A vbucket that stands where it stood last time although its source is further has stopped moving."""
        if self._queue:
            return  # we are the ones who are slow
        high = await self._high_seqnos()
        for number in sorted(self._unfinished):
            seqno = self._copies[number].position.seqno
            before, self._watched[number] = self._watched.get(number), seqno
            if number not in high:
                self._complain(number, "no node says that it has it")
            elif self.settings.dialect == "tap":
                self.stalled.pop(number, None)  # how far it is nobody tells
            elif before == seqno < min(high[number], self._ends.get(number, NO_END)):
                self._complain(number, f"it stands at {seqno}, its source at {high[number]}")
                self._ask_anew(number)
            else:
                self.stalled.pop(number, None)

    def _ask_anew(self, vbucket: int) -> None:
        """Its stream is silent although the source is ahead: perhaps it is no longer the source."""
        for feed in self._feeds.values():
            if vbucket in feed.carried and not feed.is_draft:  # a draft cannot close a stream
                feed.close_stream(vbucket)
                self._suspect = True
                self._want([vbucket])

    def _complain(self, vbucket: int, why: str) -> None:
        if vbucket not in self.stalled:
            LOG.warning("vbucket %d has stopped moving: %s", vbucket, why)
        self.stalled[vbucket] = why

    async def _high_seqnos(self) -> dict[int, int]:
        out: dict[int, int] = {}
        for endpoint in self.cluster.map.owned():
            try:
                connection = await self.cluster.connection(endpoint)
                reply = await connection.ask(GetAllVbucketSeqnos())
            except UpriverError:
                continue
            out.update(seqnos_in(reply.value))
        return out


class SynchronousConsumer(Synchronous[Consumer]):
    """A ``Consumer`` as an ordinary iterator.

    Whatever waits already is handed over in one go, and is acknowledged when the last of it is done, or on ``close``.
    """

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._waiting: deque[Batch] = deque()
        self._given = 0
        super().__init__(make)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if not self._waiting:
                given, self._given = self._given, 0
                self._waiting.extend(self._run(self._object.several(given)))
            if not self._waiting:
                return
            self._given += 1
            yield self._waiting.popleft()

    def changes(self) -> Iterator[Change | VbucketEvent]:
        """Single changes, and what happened to whole vbuckets, for comfort."""
        for batch in self:
            if batch.event is not None:
                yield batch.event
            else:
                yield from batch.changes()

    def close(self) -> None:
        """Close the consumer and its loop. The batch that was given last is not done; those before it are."""
        if self._runner.is_running and self._given > 1:
            given, self._given = self._given, 0
            self._run(self._object.leave(given - 1))
        super().close()
