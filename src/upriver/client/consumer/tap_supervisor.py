"""Supervises the TAP connections of a consumer, and finds out when a vbucket must start over.

TAP has no uuids. Before each connect the supervisor compares the failover logs of all vbuckets with those under which
the consumer read them. A vbucket whose log has changed is reset and read again. The source must not resume it from the
consumer's last acknowledgement, so the supervisor makes the source forget the consumer's name.

A TAP connection cannot be asked for further vbuckets: another connection replaces it and brings all of them.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Final

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.node_queries import active_seqnos, failover_logs
from upriver.client.consumer.batches import Reset
from upriver.client.consumer.delivery_queue import DeliveryQueue
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.feed_factory import FeedFactory
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import ConsumerSettings, Start
from upriver.client.consumer.stream_supervisor import StreamPolicy, StreamSupervisor
from upriver.client.consumer.tap_feed import TapFeed
from upriver.client.consumer.tracked_vbuckets import TrackedVbucket
from upriver.client.transport.address import Endpoint
from upriver.client.transport.connection import Connection
from upriver.client.transport.handshake import login_needed
from upriver.errors import (
    AccessDenied,
    AuthenticationFailed,
    InvalidArguments,
    KeyNotFound,
    StreamRolledBack,
    UpriverError,
)
from upriver.model import FailoverLog
from upriver.wire import memcached, tap
from upriver.wire.dialects.tap import FUTURE, ConnectFlag

#: TAP does not say that a vbucket has moved, so the supervisor asks at this interval.
_CHECK_INTERVAL_S: Final = 1.0


def tap_progress(vbuckets: Iterable[int], start: Start, saved: Mapping[int, Progress]) -> dict[int, Progress]:
    """The progress to start each vbucket from: the saved progress, else nothing."""
    given = start if isinstance(start, Mapping) else {}
    out: dict[int, Progress] = {}
    for number in vbuckets:
        each = saved.get(number) or given.get(number) or Progress.beginning()
        if not isinstance(each, Progress) or (each.position.seqno and not each.is_unplaced):
            raise InvalidArguments(
                f"the progress of vbucket {number} is not from tap; start over, or continue with dcp"
            )
        out[number] = each
    return out


class TapSupervisor(StreamSupervisor):
    """The TAP feeds of a consumer, one for each node."""

    def __init__(self, cluster: Cluster, policy: StreamPolicy, queue: DeliveryQueue) -> None:
        factory = FeedFactory(cluster, policy.tracked, queue)
        super().__init__(cluster, policy, factory, on_failure=queue.fail, on_feed_lost=queue.forget)
        self._settings = policy.settings
        self._tracked = policy.tracked
        self._queue = queue
        self._tap_feeds: dict[Endpoint, TapFeed] = {}
        self._name = self._settings.name
        self._generation = 0
        #: The node that last fed each vbucket.
        self._fed_by: dict[int, Endpoint] = {}
        #: The nodes that may remember the consumer's name and its last acknowledgement.
        self._remembered_by: set[Endpoint] = set()
        #: Vbuckets that start at the end of their history and have missed nothing since.
        self._future: set[int] = set()
        self._starts_late = self._settings.start == "latest"

    def start(self) -> None:
        """Connect, and look for vbuckets that have moved."""
        super().start()
        self._spawn(self._watch_for_moves())

    def _open_feeds(self) -> list[Feed | TapFeed]:
        return list(self._tap_feeds.values())

    def _forget(self, feed: Feed | TapFeed) -> None:
        self._tap_feeds = {endpoint: each for endpoint, each in self._tap_feeds.items() if each is not feed}

    # Reports of feeds

    def dumped(self, feed: TapFeed, vbuckets: Iterable[int]) -> None:  # noqa: ARG002
        """The source has sent everything; the other vbuckets are requested again when it closes the connection."""
        for number in vbuckets:
            self._policy.ends.finish(number)

    def branched(self, feed: TapFeed) -> None:
        """Take the logs of the source's new branches, so that the next comparison finds no difference."""

        async def follow() -> None:
            with contextlib.suppress(UpriverError):  # then the next comparison resets the vbuckets
                await self._take_logs(feed)

        self._spawn(follow())

    async def _take_logs(self, feed: TapFeed) -> None:
        endpoint = next((self._fed_by[number] for number in feed.carried), feed.endpoint)
        logs = await failover_logs(await self._cluster.connection(endpoint), feed.carried)
        for number, log in logs.items() if feed.connection.is_open else ():
            vbucket = self._tracked[number]
            held = vbucket.progress.is_unplaced
            vbucket.progress = Progress.unplaced(log) if held else Progress(Progress.unplaced(log).position, log)
            self._tracked.moved(vbucket)

    # Finding vbuckets

    async def _watch_for_moves(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            for endpoint, feed in list(self._tap_feeds.items()):
                with contextlib.suppress(UpriverError):
                    if feed.carried - set(await active_seqnos(await self._cluster.connection(endpoint))):
                        feed.connection.abort()

    async def _request_from(self, endpoint: Endpoint, settings: ConsumerSettings, numbers: list[int]) -> None:  # noqa: ARG002
        old = self._tap_feeds.pop(endpoint, None)
        if old is not None:
            await old.close()
            # In place, so that the caller retries all of them if the node is unavailable.
            numbers[:] = sorted(old.carried.union(numbers) & self._policy.ends.unfinished)
        feed = await self._open(endpoint, numbers)
        carried = set() if feed is None else feed.carried
        if feed is not None:
            self._tap_feeds[endpoint] = feed
            self._succeeded(carried, endpoint)
        self.retry(set(numbers) - carried, "unowned", f"{endpoint} does not have it active", unowned=True)

    async def _open(self, endpoint: Endpoint, wanted: Iterable[int]) -> TapFeed | None:
        """A connection that brings those of the vbuckets that are active on the node; None if none are."""
        port = self._settings.stream_port
        streams_at = endpoint if port is None else Endpoint(endpoint.host, port)
        connection = await self._cluster.fresh_connection(streams_at)
        try:
            active = await active_seqnos(connection)
            logs = await failover_logs(connection, [number for number in wanted if number in active])
            here = sorted(logs)
            if not here:
                await connection.close()
                return None
            await self._compare(connection, endpoint, logs)
            future = self._future.issuperset(here)
            self._future.difference_update(() if future else here)
            feed = TapFeed(connection, self._tracked, self._queue, self, self._settings, here)
            connection.write(self._connect(here, future=future).encode())
        except (AccessDenied, AuthenticationFailed) as error:
            await connection.close()
            raise login_needed(streams_at, self._cluster.address, error) from None
        except BaseException:
            await connection.close()
            raise
        return feed

    async def _compare(self, connection: Connection, endpoint: Endpoint, logs: Mapping[int, FailoverLog]) -> None:
        """Reset the vbuckets that are on another branch than their source, and make the source forget the consumer."""
        changed: list[TrackedVbucket] = []
        for number, log in logs.items():
            vbucket = self._tracked[number]
            known = number in self._fed_by
            if (vbucket.progress.is_unplaced or known) and vbucket.failover_log != log:
                changed.append(vbucket)
            elif not known and self._starts_late and not vbucket.progress.is_unplaced:
                self._future.add(number)
            if known and self._fed_by[number] != endpoint:
                self._future.discard(number)  # changes in between would be missed
        if changed and self._settings.on_rollback == "fail":
            held = next((vbucket for vbucket in changed if vbucket.progress.is_unplaced), None)
            if held is not None:
                raise StreamRolledBack(held.number, 0, held.position)
        # The source may know a given name from an earlier process, which held changes that this one does not hold.
        from_earlier_process = self._settings.is_named and any(
            number not in self._fed_by and not self._tracked[number].progress.is_unplaced for number in logs
        )
        # A vbucket that another node fed meanwhile has returned to a node that remembers an old acknowledgement.
        returned = any(self._fed_by.get(number, endpoint) != endpoint for number in logs)
        remembered = self._settings.is_named or endpoint in self._remembered_by
        if from_earlier_process or (remembered and (changed or returned)):
            await self._make_source_forget(connection)
            self._future.difference_update(number for number in logs if number in self._fed_by)
        self._remembered_by.add(endpoint)
        for number, log in logs.items():
            self._fed_by[number] = endpoint
            self._settle(self._tracked[number], log, changed)

    def _settle(self, vbucket: TrackedVbucket, log: FailoverLog, changed: list[TrackedVbucket]) -> None:
        """Compare the vbucket with this log from now on."""
        old_uuid = vbucket.position.vbucket_uuid
        if vbucket.progress.is_unplaced and vbucket in changed:
            vbucket.progress = Progress.unplaced(log)
            self._tracked.happened(vbucket, Reset(vbucket.number, old_uuid, log.newest.vbucket_uuid))
        if not vbucket.progress.is_unplaced or vbucket in changed:
            # Nothing of it was received yet.
            vbucket.progress = Progress(Progress.unplaced(log).position, log)

    async def _make_source_forget(self, connection: Connection) -> None:
        if self._settings.is_named:
            with contextlib.suppress(KeyNotFound):
                await connection.ask(memcached.DeregisterTapClient(name=self._name.encode()[:200]))
        else:
            self._generation += 1
            self._remembered_by.clear()
            self._name = f"{self._settings.name}:{self._generation}"

    def _connect(self, vbuckets: list[int], *, future: bool) -> tap.Connect:
        settings = self._settings
        flags = ConnectFlag.BACKFILL | ConnectFlag.SUPPORT_ACK | ConnectFlag.LIST_VBUCKETS
        flags |= ConnectFlag.FIX_FLAG_BYTEORDER
        if settings.end == "latest":
            flags |= ConnectFlag.DUMP
        if settings.keys_only:
            flags |= ConnectFlag.REQUEST_KEYS_ONLY
        if settings.is_named:
            flags |= ConnectFlag.REGISTERED_CLIENT
        date = FUTURE if future else 0
        return tap.Connect(flags=flags, name=self._name.encode()[:200], backfill_date=date, vbuckets=tuple(vbuckets))
