"""Finds a stream for every vbucket of a consumer, again and again, wherever the vbucket is.

A vbucket without a stream is *wanted*: a supervising task looks up in the newest cluster map who has it and asks there,
after a pause that grows with each attempt. Streams end because a connection is lost, a vbucket moves or the source
falls back; in every case the vbucket is wanted again, from exactly where its copy stands, and the protocol finds out
whether it may go on from there. One that gets no stream for too long is given up, and everything with it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Final

import pyarrow as pa

from upriver.client.cluster.cluster import Cluster
from upriver.client.consumer.batches import Batch
from upriver.client.consumer.delivery_queue import DeliveryQueue
from upriver.client.consumer.end_positions import Ranges
from upriver.client.consumer.feed import RECEIVE_BYTES, Feed
from upriver.client.consumer.feed_factory import active_on, open_feed
from upriver.client.consumer.settings import ConsumerSettings
from upriver.client.consumer.tap_feed import TapFeed
from upriver.client.consumer.tap_supervisor import TapSupervisor
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.address import Endpoint
from upriver.client.transport.backoff import Backoff
from upriver.client.transport.connection import Connection
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
from upriver.model import inflated_batch
from upriver.protocol.consumer import ConsumerStream, Run
from upriver.wire import dcp

LOG: Final = logging.getLogger("upriver.client")
#: Refusals of a stream that may be different next time.
_PASSING: Final = (NotMyVbucket, TemporaryFailure, Busy, KeyExists, KeyNotFound)
#: TAP does not tell that a vbucket has gone elsewhere, so a consumer asks that often.
_TAP_LOOK_S: Final = 1.0


class StreamSupervisor:
    """The feeds of a consumer, one for each node that has something for it."""

    def __init__(
        self,
        cluster: Cluster,
        settings: ConsumerSettings,
        copies: TrackedVbuckets,
        ranges: Ranges,
        handing_out: DeliveryQueue,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._copies = copies
        self._ranges = ranges
        self._handing_out = handing_out
        self.changes_received = 0
        self.reconnects = 0
        self._feeds: dict[Endpoint, Feed] = {}
        self._tap = TapSupervisor(cluster, settings, copies, self) if settings.dialect == "tap" else None
        self._tap_feeds: dict[Endpoint, TapFeed] = {}
        self._wanted: set[int] = set()
        self._wants = asyncio.Event()
        self._backoffs: dict[object, Backoff] = {}
        #: Since when attempts to get a stream fail, for each vbucket that has none.
        self._without_since: dict[int, float] = {}
        #: The map may be out of date.
        self._suspect = False
        self._tasks: set[asyncio.Task[None]] = set()
        #: Nothing is sought any more.
        self._closed = False

    def start(self) -> None:
        """Ask for everything, and go on asking for what is lost."""
        self._want(self._ranges.unfinished)
        self._spawn(self._supervise())
        if self._tap is not None:
            self._spawn(self._look_for_gone(self._tap))

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        feeds: list[Feed | TapFeed] = [*self._feeds.values(), *self._tap_feeds.values()]
        for feed in feeds:
            await feed.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def connections(self) -> list[Connection]:
        """Those over which streams come."""
        return [feed.connection for feeds in (self._feeds, self._tap_feeds) for feed in feeds.values()]

    def ask_anew(self, vbucket: int) -> None:
        """Its stream is silent although the source is ahead: perhaps it is no longer the source."""
        for feed in list(self._feeds.values()):
            if feed.has_stream(vbucket):
                if feed.is_draft:  # which cannot close a stream
                    feed.connection.abort()
                    return
                feed.close_stream(vbucket)
        self._suspect = True
        self._want([vbucket])

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
        records = inflated_batch(records, feed.connection.inflate)
        progress = {run.vbucket: self._copies[run.vbucket].progress for run in runs}
        if (
            self._ranges.has_ends
            and isinstance(feed, Feed)
            and (self._ranges.may_overshoot or not feed.connection.is_upriver_node)
        ):
            records, runs, beyond = self._ranges.cut(records, runs, progress)
            for number in beyond:
                asyncio.get_running_loop().call_soon(feed.close_stream, number)
            if not runs:  # all of it lay beyond
                feed.processed(wire_bytes)
                self._handing_out.note(progress)
                return
        if len(records.schema) > len(self._settings.columns):
            records = records.select(list(self._settings.columns))
        self.changes_received += records.num_rows
        self._handing_out.put(Batch(records, runs, None, progress, wire_bytes), feed, on_done)

    def passed(self, on_done: Callable[[], object]) -> None:
        """Something of TAP came that is no change and wants an answer in its order."""
        self._handing_out.note({}, on_done)

    def stream_ended(self, feed: Feed, stream: ConsumerStream) -> None:
        """A stream is over: done, or wanted again."""
        vbucket = stream.vbucket
        if vbucket not in self._ranges.unfinished or stream.end_reason == "closed":
            return
        if stream.end_reason == "ok" and self._ranges.has_end(vbucket):
            self._ranges.finish(vbucket)
            return
        if stream.end_reason != "disconnected":
            LOG.info("vbucket %d: the stream from %s ended: %s", vbucket, feed.endpoint, stream.end_reason)
            self._suspect = True
            self._want_later([vbucket], vbucket, f"the stream from {feed.endpoint} ended: {stream.end_reason}")

    def dumped(self, feed: TapFeed, vbuckets: Iterable[int]) -> None:  # noqa: ARG002
        """TAP has sent everything; what is not whole is wanted again when the connection is closed."""
        for number in vbuckets:
            self._ranges.finish(number)

    def branched(self, feed: TapFeed) -> None:
        """The source of a TAP feed told that it lives on other branches now."""

        async def follow() -> None:
            assert self._tap is not None
            with contextlib.suppress(UpriverError):  # then it is compared with what it was, and read again
                await self._tap.follow(feed)

        self._spawn(follow())

    def feed_lost(self, feed: Feed | TapFeed, error: UpriverError) -> None:
        """A connection is gone: everything that it brought is wanted again."""
        for feeds in (self._feeds, self._tap_feeds):
            for endpoint, each in list(feeds.items()):
                if each is feed:
                    del feeds[endpoint]
        self._handing_out.forget(feed)
        if self._closed:
            return
        self.reconnects += 1
        self._suspect = True
        LOG.warning("%s", error)
        self._want_later([number for number in feed.carried if number in self._ranges.unfinished], feed.endpoint, error)

    def failed(self, error: BaseException) -> None:
        """Something went wrong that no other attempt would change: nothing that still comes counts."""
        self._closed = True
        self._handing_out.fail(error)

    # Finding streams

    def _want(self, vbuckets: Iterable[int]) -> None:
        self._wanted.update(number for number in vbuckets if number in self._ranges.unfinished)
        self._wants.set()

    def _want_later(self, vbuckets: list[int], what: object, why: object) -> None:
        """Ask again after a pause that grows with each attempt for the same; or give up, and say why."""
        if not vbuckets or self._closed:
            return
        loop, patience_s = asyncio.get_running_loop(), self._settings.gives_up_after_s
        now = loop.time()
        longest = min(vbuckets, key=lambda number: self._without_since.setdefault(number, now))
        if now - self._without_since[longest] >= patience_s:
            self.failed(StreamRefused(longest, f"no stream for {patience_s:g} s: {why}"))
            return
        pause_s = self._backoffs.setdefault(what, Backoff()).pause_s()
        loop.call_later(pause_s, self._want, vbuckets)

    def _worked(self, vbuckets: Collection[int], *what: object) -> None:
        """These have a stream; the next attempt for the same, and for whatever else failed, is the first again."""
        for number in vbuckets:
            self._without_since.pop(number, None)
        for each in (*vbuckets, *what, "unowned", None):
            self._backoffs.pop(each, None)

    async def _supervise(self) -> None:
        while True:
            await self._wants.wait()
            self._wants.clear()
            wanted, self._wanted = sorted(self._wanted), set()
            try:
                await self._place(wanted)
            except NodeUnavailable as error:
                self._unavailable(error, wanted, None)
            except Exception as error:
                self.failed(error)
                return

    def _unavailable(self, error: NodeUnavailable, wanted: list[int], what: object) -> None:
        LOG.warning("%s", error)
        self._suspect = True
        self._want_later(wanted, what, error)

    async def _place(self, wanted: list[int]) -> None:
        """Ask whoever has the vbuckets now."""
        if self._suspect:
            self._suspect = False
            await self._cluster.refresh(self._cluster.map)
        by_node: dict[Endpoint, list[int]] = {}
        unowned: list[int] = []
        for number in wanted:
            owner = self._cluster.map.owner(number)
            (unowned if owner is None else by_node.setdefault(owner, [])).append(number)
        if unowned:
            self._suspect = True
            self._want_later(unowned, "unowned", "no node of the cluster has it")
        for endpoint, numbers in by_node.items():
            try:
                if self._tap is not None:
                    await self._place_tap(self._tap, endpoint, numbers)
                    continue
                feed = await self._feed(endpoint)
                here = await self._active_among(numbers, endpoint) if self._must_ask_first(feed) else numbers
            except NodeUnavailable as error:
                self._unavailable(error, numbers, endpoint)
                continue
            if not feed.connection.is_open:  # lost meanwhile: what is not asked for yet would never be wanted again
                self._suspect = True
                self._want_later(numbers, endpoint, f"the connection to {endpoint} is lost")
                continue
            for number in here:
                self._ask(feed, number)
            feed.flush()

    def _must_ask_first(self, feed: Feed) -> bool:
        """Whether the dialect has no way to ask for an active copy."""
        return self._settings.active_only and not feed.speaks_dcp

    async def _active_among(self, numbers: list[int], endpoint: Endpoint) -> list[int]:
        """Those that a node has active: our map may be old, and a dead copy would be streamed and never move on."""
        try:
            active = await active_on(await self._cluster.connection(endpoint))
        except StatusError:  # it does not know the question
            return numbers
        missing = [number for number in numbers if number not in active]
        if missing:
            self._suspect = True
            self._want_later(missing, "unowned", f"{endpoint} does not have it active")
        return [number for number in numbers if number in active]

    async def _feed(self, endpoint: Endpoint) -> Feed:
        known = self._feeds.get(endpoint)
        if known is None or not known.connection.is_open:
            known = await open_feed(self._cluster, endpoint, self._settings, self._copies, self, RECEIVE_BYTES)
            self._feeds[endpoint] = known
        return known

    def _ask(self, feed: Feed, vbucket: int) -> None:
        def answered(stream: ConsumerStream, error: StatusError | None) -> None:  # noqa: ARG001
            if error is None:
                if end_seqno > self._end_of(vbucket):
                    self._shorten(feed, vbucket)
                self._worked([vbucket], feed.endpoint)
            elif not feed.connection.is_open:
                return  # ``feed_lost`` wants it again
            elif isinstance(error, NotMyVbucket) and self._cluster.map.owner(vbucket) not in (None, asked):
                self._want([vbucket])  # the refusal came with the map that says where it is
            elif isinstance(error, _PASSING):
                LOG.info("%s: %s", feed.endpoint, error)
                self._suspect = True
                self._want_later([vbucket], vbucket, f"{feed.endpoint}: {error}")
            else:
                self.failed(StreamRefused(vbucket, f"{feed.endpoint} gives no stream: {error}"))

        asked = self._cluster.map.owner(vbucket)
        end_seqno = self._end_of(vbucket)
        with contextlib.suppress(KeyExists):  # it has one already
            # Deployed servers refuse what they do not have active without being told.
            asks = self._settings.active_only and feed.connection.is_upriver_node and feed.speaks_dcp
            flags = int(dcp.StreamFlag.ACTIVE_ONLY) if asks else 0
            feed.add_stream(vbucket, answered, end_seqno=end_seqno, flags=flags)

    def _end_of(self, vbucket: int) -> int:
        return self._ranges.end_to_ask_for(vbucket, self._copies[vbucket].position.seqno)

    def _shorten(self, feed: Feed, vbucket: int) -> None:
        """The source went back behind the end that we had to name: now the right one can be named.

        A draft cannot close a stream, so we stop listening where it should have ended.
        """
        if feed.is_draft:
            self._ranges.stop_listening_at_end(vbucket)
        else:
            feed.close_stream(vbucket)
            self._want([vbucket])

    # TAP

    async def _place_tap(self, places: TapSupervisor, endpoint: Endpoint, numbers: list[int]) -> None:
        """A TAP connection cannot be asked for more: another takes its place, which brings everything."""
        old = self._tap_feeds.pop(endpoint, None)
        if old is not None:
            await old.close()
            numbers = sorted(old.carried.union(numbers) & self._ranges.unfinished)
        try:
            feed, missing = await places.open(endpoint, numbers)
        except NodeUnavailable as error:
            self._unavailable(error, numbers, endpoint)
            return
        if feed is not None:
            self._tap_feeds[endpoint] = feed
            self._worked(feed.carried, endpoint)
        if missing:
            self._suspect = True
            self._want_later(sorted(missing), "unowned", f"{endpoint} does not have it active")

    async def _look_for_gone(self, places: TapSupervisor) -> None:
        while True:
            await asyncio.sleep(_TAP_LOOK_S)
            for endpoint, feed in list(self._tap_feeds.items()):
                with contextlib.suppress(UpriverError):
                    if await places.gone(feed, endpoint):
                        feed.connection.abort()
