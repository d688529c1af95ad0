"""Gets a stream for every unfinished vbucket, and another one whenever a stream is lost.

A vbucket without a stream is *wanted*. A task looks up its owner in the newest cluster map and requests the stream
there, after a pause that grows with each attempt. Streams end because a connection is lost, a vbucket moves or the
source is rolled back. In each case the vbucket is wanted again from its tracked position, and the protocol finds out
whether the source accepts that position. A ``StreamPolicy`` decides what is requested and when to give up.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, ClassVar, Final

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.node_queries import active_seqnos
from upriver.client.consumer.end_positions import EndPositions
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.feed_factory import FeedFactory
from upriver.client.consumer.settings import ConsumerSettings
from upriver.client.consumer.tap_feed import TapFeed
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.address import Endpoint
from upriver.client.transport.backoff import LONGEST_S, Backoff
from upriver.client.transport.connection import Connection
from upriver.errors import (
    Busy,
    ClusterMapError,
    KeyExists,
    KeyNotFound,
    NodeUnavailable,
    NotMyVbucket,
    StatusError,
    StreamRefused,
    TemporaryFailure,
    UpriverError,
)
from upriver.protocol.consumer import ConsumerStream
from upriver.wire import dcp

LOG: Final = logging.getLogger("upriver.client")

#: Refusals of a stream that a later attempt may not meet.
_PASSING: Final = (NotMyVbucket, TemporaryFailure, Busy, KeyExists, KeyNotFound)


class StreamPolicy:
    """What a supervisor requests, when a vbucket is finished, and when the supervisor gives up.

    This is the policy of a ``Consumer``: it follows vbuckets for ever, or up to their ends. Spark's tasks read finite
    ranges and override it (``upriver.spark.range_policy``).
    """

    #: Whether all vbuckets share one patience, which starts over when changes arrive. Otherwise each vbucket has its
    #: own, which starts over when a node accepts its stream.
    shares_patience: ClassVar[bool] = False
    #: Whether to check a second time, after the request, that the copy is active.
    checks_active_again: ClassVar[bool] = False
    #: The longest pause between two attempts.
    longest_pause_s: ClassVar[float] = LONGEST_S

    def __init__(self, settings: ConsumerSettings, tracked: TrackedVbuckets, ends: EndPositions) -> None:
        self.settings = settings
        self.tracked = tracked
        self.ends = ends

    def settings_for(self, vbucket: int) -> ConsumerSettings:  # noqa: ARG002
        """The settings of the connection for this vbucket's stream; connections differ by their names."""
        return self.settings

    def end_seqno(self, vbucket: int) -> int:
        """The end to request."""
        return self.ends.end_to_request(vbucket, self.tracked[vbucket].position.seqno)

    def flags(self, feed: Feed) -> int:
        """The flags to request. Deployed servers refuse copies that are not active without a flag."""
        asks = self.settings.active_only and feed.connection.is_upriver_node and feed.speaks_dcp
        return int(dcp.StreamFlag.ACTIVE_ONLY) if asks else 0

    def must_check_active(self, feed: Feed) -> bool:
        """Whether to ask the node which vbuckets are active, because its dialect cannot request an active copy."""
        return self.settings.active_only and not feed.speaks_dcp

    async def prepare(self, feed: Feed, connection: Connection, vbuckets: Sequence[int]) -> None:
        """Called before streams are requested from a node that was asked for its active vbuckets; may finish some."""

    def accepted(self, feed: Feed, stream: ConsumerStream, end_seqno: int) -> str:
        """A stream was accepted up to ``end_seqno``. A reason makes the supervisor request it again.

        After a rollback the position may lie below an end that had to be raised to it; then the wanted end can be
        requested. A draft cannot close a stream, so its stream is ignored beyond the wanted end.
        """
        if end_seqno <= self.end_seqno(stream.vbucket):
            return ""
        if feed.is_draft:
            self.ends.stop_listening_at_end(stream.vbucket)
            return ""
        feed.close_stream(stream.vbucket)
        return "the source was rolled back below the requested end"

    def changes_request(self, vbucket: int, error: UpriverError) -> bool:  # noqa: ARG002
        """Whether this refusal is answered with another request at once."""
        return False

    def retries(self, error: UpriverError) -> bool:
        """Whether a later attempt may succeed."""
        return isinstance(error, _PASSING)

    def is_complete(self, stream: ConsumerStream) -> bool:
        """Whether everything was received when this stream ended."""
        return stream.end_reason == "ok" and self.ends.has_end(stream.vbucket)

    def give_up(self, vbucket: int, why: str, *, unowned: bool) -> UpriverError | None:  # noqa: ARG002
        """The error to fail with when the patience ends; None if the vbucket was left out instead."""
        return StreamRefused(vbucket, f"no stream for {self.settings.gives_up_after_s:g} s: {why}")


class StreamSupervisor:
    """The feeds of a consumer, one for each node and connection name."""

    def __init__(
        self,
        cluster: Cluster,
        policy: StreamPolicy,
        factory: FeedFactory,
        *,
        on_failure: Callable[[BaseException], object],
        on_feed_lost: Callable[[Feed | TapFeed], object] = lambda _: None,
    ) -> None:
        self._cluster = cluster
        self._policy = policy
        self._factory = factory
        self._on_failure = on_failure
        self._on_feed_lost = on_feed_lost
        self.reconnects = 0
        self._feeds: dict[tuple[Endpoint, str], Feed] = {}
        #: The feed that was last asked for each vbucket.
        self._feed_of: dict[int, Feed] = {}
        self._wanted: set[int] = set()
        self._wants = asyncio.Event()
        #: Vbuckets that wait for the end of a pause, by the cause of the pause.
        self._waiting: dict[object, set[int]] = {}
        self._backoffs: dict[object, Backoff] = {}
        #: Since when attempts have failed, for each vbucket, or under None for all.
        self._failing_since: dict[int | None, float] = {}
        self._map_may_be_stale = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Request streams for the unfinished vbuckets, and go on until ``close``."""
        self.want(self._policy.ends.unfinished)
        self._spawn(self._supervise())

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for feed in self._open_feeds():
            await feed.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _open_feeds(self) -> list[Feed | TapFeed]:
        return list(self._feeds.values())

    @property
    def connections(self) -> list[Connection]:
        """The connections of the feeds."""
        return [feed.connection for feed in self._open_feeds()]

    def feeds_of(self, vbuckets: Iterable[int]) -> set[Feed]:
        """The feeds that were last asked for these vbuckets."""
        return {self._feed_of[number] for number in vbuckets if number in self._feed_of}

    def request_again(self, vbucket: int) -> None:
        """Request another stream: this one is silent although the source is ahead, so the owner may have changed."""
        for feed in list(self._feeds.values()):
            if feed.has_stream(vbucket):
                if feed.is_draft:  # which cannot close a stream
                    feed.connection.abort()
                    return
                feed.close_stream(vbucket)
        self._map_may_be_stale = True
        self.want([vbucket])

    # Reports of feeds

    def stream_ended(self, feed: Feed, stream: ConsumerStream) -> None:
        """A stream ended: its vbucket is finished, or wanted again."""
        vbucket = stream.vbucket
        if vbucket not in self._policy.ends.unfinished:
            return
        if self._policy.is_complete(stream):
            self._policy.ends.finish(vbucket)
        elif stream.end_reason not in ("closed", "disconnected"):  # ``feed_lost`` handles lost connections
            LOG.info("vbucket %d: the stream from %s ended: %s", vbucket, feed.endpoint, stream.end_reason)
            self.retry([vbucket], vbucket, f"the stream from {feed.endpoint} ended: {stream.end_reason}")

    def feed_lost(self, feed: Feed | TapFeed, error: UpriverError) -> None:
        """A connection is lost: its vbuckets are wanted again."""
        self._forget(feed)
        self._on_feed_lost(feed)
        if self._closed:
            return
        self.reconnects += 1
        unfinished = self._policy.ends.unfinished
        lost = [number for number in feed.carried if number in unfinished and self._feed_of.get(number, feed) is feed]
        if lost:
            LOG.warning("%s", error)
            self.retry(lost, feed.endpoint, str(error))

    def _forget(self, feed: Feed | TapFeed) -> None:
        self._feeds = {key: each for key, each in self._feeds.items() if each is not feed}

    def failed(self, error: BaseException) -> None:
        """Stop with an error that another attempt would meet too."""
        self._closed = True
        self._on_failure(error)

    # Finding streams

    def want(self, vbuckets: Iterable[int]) -> None:
        """Request streams for these vbuckets now."""
        self._wanted.update(number for number in vbuckets if number in self._policy.ends.unfinished)
        self._wants.set()

    def retry(self, vbuckets: Collection[int], cause: object, why: str, *, unowned: bool = False) -> None:
        """Request streams with a newer map, after a pause that grows with each attempt for the same cause; or give up.

        ``unowned`` says that no node is known to own the vbuckets.
        """
        vbuckets = [number for number in vbuckets if number in self._policy.ends.unfinished]
        if not vbuckets or self._closed:
            return
        self._map_may_be_stale = True
        loop, policy = asyncio.get_running_loop(), self._policy
        now = loop.time()
        since = {
            number: self._failing_since.setdefault(None if policy.shares_patience else number, now)
            for number in vbuckets
        }
        for number in sorted(vbuckets, key=since.__getitem__):
            if now - since[number] < policy.settings.gives_up_after_s:
                break
            failure = policy.give_up(number, why, unowned=unowned)
            if failure is not None:
                self.failed(failure)
                return
        if policy.shares_patience:
            cause = None
        if cause in self._waiting:
            self._waiting[cause].update(vbuckets)
        else:
            self._waiting[cause] = set(vbuckets)
            backoff = self._backoffs.setdefault(cause, Backoff(longest_s=policy.longest_pause_s))
            loop.call_later(backoff.pause_s(), self._end_pause, cause)

    def _end_pause(self, cause: object) -> None:
        self.want(self._waiting.pop(cause))

    def reset_patience(self) -> None:
        """Start patience and pauses over for all vbuckets."""
        self._failing_since.clear()
        self._backoffs.clear()

    def _succeeded(self, vbuckets: Collection[int], endpoint: Endpoint) -> None:
        """A node accepted these streams: start their patience and pauses over."""
        if self._policy.shares_patience:
            return
        for number in vbuckets:
            self._failing_since.pop(number, None)
        for cause in (*vbuckets, endpoint, "unowned", None):
            self._backoffs.pop(cause, None)

    async def _supervise(self) -> None:
        while True:
            await self._wants.wait()
            self._wants.clear()
            wanted, self._wanted = sorted(self._wanted & self._policy.ends.unfinished), set()
            try:
                if wanted:
                    await self._request(wanted)
            except NodeUnavailable as error:
                self._unavailable(error, wanted, None)
            except Exception as error:
                self.failed(error)
                return

    def _unavailable(self, error: NodeUnavailable, wanted: list[int], cause: object) -> None:
        LOG.warning("%s", error)
        self.retry(wanted, cause, str(error))

    async def _request(self, wanted: list[int]) -> None:
        """Request streams from the current owners."""
        await self._cluster.open()
        if self._map_may_be_stale:
            self._map_may_be_stale = False
            try:
                await self._cluster.refresh(self._cluster.map)
            except ClusterMapError as error:
                if not self._policy.retries(error):
                    raise
                self.retry(wanted, None, str(error))
                return
        by_connection: dict[tuple[Endpoint, str], tuple[ConsumerSettings, list[int]]] = {}
        unowned: list[int] = []
        for number in wanted:
            owner = self._cluster.map.owner(number)
            if owner is None:
                unowned.append(number)
            else:
                settings = self._policy.settings_for(number)
                by_connection.setdefault((owner, settings.name), (settings, []))[1].append(number)
        self.retry(unowned, "unowned", "no node of the cluster has it", unowned=True)
        for (endpoint, _), (settings, numbers) in by_connection.items():
            try:
                await self._request_from(endpoint, settings, numbers)
            except NodeUnavailable as error:
                self._unavailable(error, numbers, endpoint)

    async def _request_from(self, endpoint: Endpoint, settings: ConsumerSettings, numbers: list[int]) -> None:
        """Request streams from one node.

        An old map may name a copy that is not active any more. It would be streamed and never advance, so it must not
        be read. A copy that stops being active between the check and the request shows up in the second check; one
        that stops later ends its streams.
        """
        feed = await self._feed(endpoint, settings)
        must_check = self._policy.must_check_active(feed)
        if must_check:
            numbers = await self._active_among(numbers, endpoint)
            await self._policy.prepare(feed, await self._cluster.connection(endpoint), numbers)
            numbers = [number for number in numbers if number in self._policy.ends.unfinished]
        if not feed.connection.is_open:  # ``feed_lost`` did not know of these vbuckets
            self.retry(numbers, endpoint, f"the connection to {endpoint} is lost")
            return
        for number in numbers:
            self._add_stream(feed, number)
        feed.flush()
        if must_check and self._policy.checks_active_again:
            try:
                active = await self._active_among(numbers, endpoint)
            except NodeUnavailable as error:
                active = []
                self._unavailable(error, numbers, endpoint)
            for number in set(numbers) - set(active):
                feed.close_stream(number)

    async def _active_among(self, numbers: list[int], endpoint: Endpoint) -> list[int]:
        """The vbuckets that are active on the node; the others are retried."""
        try:
            active = await active_seqnos(await self._cluster.connection(endpoint))
        except StatusError:  # the node does not know the request
            return numbers
        missing = [number for number in numbers if number not in active]
        self.retry(missing, "unowned", f"{endpoint} does not have it active", unowned=True)
        return [number for number in numbers if number in active]

    async def _feed(self, endpoint: Endpoint, settings: ConsumerSettings) -> Feed:
        known = self._feeds.get((endpoint, settings.name))
        if known is None or not known.connection.is_open:
            known = await self._factory.open(endpoint, settings, self)
            self._feeds[endpoint, settings.name] = known
        return known

    def _add_stream(self, feed: Feed, vbucket: int) -> None:
        owner, end_seqno = self._cluster.map.owner(vbucket), self._policy.end_seqno(vbucket)

        def answered(stream: ConsumerStream, error: StatusError | None) -> None:
            if error is None:
                why = self._policy.accepted(feed, stream, end_seqno)
                self._succeeded([vbucket], feed.endpoint)
                if why:
                    self.retry([vbucket], vbucket, why)
            elif not feed.connection.is_open:
                return  # ``feed_lost`` retries it
            elif self._policy.changes_request(vbucket, error):
                self.want([vbucket])
            elif isinstance(error, NotMyVbucket) and self._cluster.map.owner(vbucket) not in (None, owner):
                self.want([vbucket])  # the refusal came with a newer map
            elif self._policy.retries(error):
                LOG.info("%s: %s", feed.endpoint, error)
                unowned = isinstance(error, NotMyVbucket)
                self.retry([vbucket], vbucket, f"{feed.endpoint}: {error}", unowned=unowned)
            else:
                self.failed(StreamRefused(vbucket, f"{feed.endpoint} refuses the stream: {error}"))

        with contextlib.suppress(KeyExists):  # the feed has a stream for it already
            feed.add_stream(vbucket, answered, end_seqno=end_seqno, flags=self._policy.flags(feed))
            self._feed_of[vbucket] = feed
