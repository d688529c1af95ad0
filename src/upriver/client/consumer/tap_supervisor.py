"""How a TAP consumer gets its connections, and how it finds out that it must start over.

TAP has no uuids. So before each connect the failover logs of all vbuckets are compared with those under which the
consumer's copies were read: where one has changed the copy is cleared and read again. The source must then not go on
where it thinks that we stand, so it is made to forget our name.
"""

import contextlib
from collections.abc import Iterable, Mapping

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.node_queries import failover_logs
from upriver.client.consumer.batches import Reset
from upriver.client.consumer.feed_factory import active_on
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import ConsumerSettings, Start
from upriver.client.consumer.tap_feed import TapFeed, TapOwner
from upriver.client.consumer.tracked_vbuckets import TrackedVbucket, TrackedVbuckets
from upriver.client.transport.address import Endpoint
from upriver.client.transport.connection import Connection
from upriver.client.transport.handshake import login_needed
from upriver.errors import AccessDenied, AuthenticationFailed, InvalidArguments, KeyNotFound, StreamRolledBack
from upriver.model import FailoverLog
from upriver.wire import memcached, tap
from upriver.wire.dialects.tap import ConnectFlag


def tap_progress(vbuckets: Iterable[int], start: Start, saved: Mapping[int, Progress]) -> dict[int, Progress]:
    """Where each vbucket begins: with what was saved, else with nothing."""
    given = start if isinstance(start, Mapping) else {}
    out: dict[int, Progress] = {}
    for number in vbuckets:
        each = saved.get(number) or given.get(number) or Progress.beginning()
        if not isinstance(each, Progress) or (each.position.seqno and not each.is_unplaced):
            raise InvalidArguments(f"the progress of vbucket {number} is not of tap; start over, or go on with dcp")
        out[number] = each
    return out


class TapSupervisor:
    """The TAP connections of one consumer: under which name, and who may remember what of it."""

    def __init__(self, cluster: Cluster, settings: ConsumerSettings, copies: TrackedVbuckets, owner: TapOwner) -> None:
        self._cluster = cluster
        self._settings = settings
        self._copies = copies
        self._owner = owner
        self._name = settings.name
        self._generation = 0
        #: Who has fed each vbucket last.
        self._fed_by: dict[int, Endpoint] = {}
        #: Who may remember our name, and with it where we stood when we were there last.
        self._remembered_by: set[Endpoint] = set()
        #: What still waits for what comes, and has missed nothing of it.
        self._future: set[int] = set()
        self._starts_late = settings.start == "latest"

    async def open(self, endpoint: Endpoint, wanted: Iterable[int]) -> tuple[TapFeed | None, set[int]]:
        """A connection that brings those of the vbuckets that are active there; and those that are not."""
        port = self._settings.stream_port
        place = endpoint if port is None else Endpoint(endpoint.host, port)
        connection = await self._cluster.fresh_connection(place)
        try:
            active = await active_on(connection)
            here = [number for number in wanted if number in active]
            logs = await failover_logs(connection, here)
            here = sorted(logs)
            if not here:
                await connection.close()
                return None, set(wanted)
            await self._compare(connection, endpoint, logs)
            future = self._future.issuperset(here)
            self._future.difference_update(() if future else here)
            feed = TapFeed(connection, self._copies, self._owner, self._settings, here)
            connection.write(self._connect(here, future=future).encode())
        except (AccessDenied, AuthenticationFailed) as error:
            await connection.close()
            raise login_needed(place, self._cluster.address, error) from None
        except BaseException:
            await connection.close()
            raise
        return feed, set(wanted) - set(here)

    async def _compare(self, connection: Connection, endpoint: Endpoint, logs: Mapping[int, FailoverLog]) -> None:
        """Clear what lies on another branch than its source, and have the source forget where we stood."""
        changed: list[TrackedVbucket] = []
        for number, log in logs.items():
            copy = self._copies[number]
            known = number in self._fed_by
            if (copy.progress.is_unplaced or known) and copy.failover_log != log:
                changed.append(copy)
            elif not known and self._starts_late and not copy.progress.is_unplaced:
                self._future.add(number)
            if known and self._fed_by[number] != endpoint:
                self._future.discard(number)  # what happened in between would be missed
        if changed and self._settings.on_rollback == "fail":
            held = next((copy for copy in changed if copy.progress.is_unplaced), None)
            if held is not None:
                raise StreamRolledBack(held.number, 0, held.position)
        # A name that was given may be known from an earlier life, in which we held what we do not hold now.
        strange = self._settings.is_named and any(
            number not in self._fed_by and not self._copies[number].progress.is_unplaced for number in logs
        )
        # What another node has fed meanwhile came back to one that still thinks that we stand where we left it.
        returned = any(self._fed_by.get(number, endpoint) != endpoint for number in logs)
        remembered = self._settings.is_named or endpoint in self._remembered_by
        if strange or (remembered and (changed or returned)):
            await self._be_forgotten(connection)
            self._future.difference_update(number for number in logs if number in self._fed_by)
        self._remembered_by.add(endpoint)
        for number, log in logs.items():
            self._fed_by[number] = endpoint
            self._settle(self._copies[number], log, changed)

    def _settle(self, copy: TrackedVbucket, log: FailoverLog, changed: list[TrackedVbucket]) -> None:
        """From now on the copy is compared with this log."""
        old_uuid = copy.position.vbucket_uuid
        if copy.progress.is_unplaced and copy in changed:
            copy.progress = Progress.unplaced(log)
            self._copies.happened(copy, Reset(copy.number, old_uuid, log.newest.vbucket_uuid))
        if not copy.progress.is_unplaced or copy in changed:
            # Nothing is held of it yet.
            copy.progress = Progress(Progress.unplaced(log).position, log)

    async def _be_forgotten(self, connection: Connection) -> None:
        if self._settings.is_named:
            with contextlib.suppress(KeyNotFound):
                await connection.ask(memcached.DeregisterTapClient(name=self._name.encode()[:200]))
        else:
            self._generation += 1
            self._remembered_by.clear()
            self._name = f"{self._settings.name}:{self._generation}"

    def _connect(self, vbuckets: list[int], *, future: bool) -> tap.Connect:
        settings = self._settings
        flags = ConnectFlag.SUPPORT_ACK | ConnectFlag.LIST_VBUCKETS | ConnectFlag.FIX_FLAG_BYTEORDER
        if not future:
            flags |= ConnectFlag.BACKFILL
        if settings.end == "latest":
            flags |= ConnectFlag.DUMP
        if settings.keys_only:
            flags |= ConnectFlag.REQUEST_KEYS_ONLY
        if settings.is_named:
            flags |= ConnectFlag.REGISTERED_CLIENT
        date = None if future else 0
        return tap.Connect(flags=flags, name=self._name.encode()[:200], backfill_date=date, vbuckets=tuple(vbuckets))

    async def follow(self, feed: TapFeed) -> None:
        """The source told that it lives on other branches now: take their logs, so that they are no news later."""
        endpoint = next((self._fed_by[number] for number in feed.carried), feed.endpoint)
        logs = await failover_logs(await self._cluster.connection(endpoint), feed.carried)
        for number, log in logs.items() if feed.connection.is_open else ():
            copy = self._copies[number]
            held = copy.progress.is_unplaced
            copy.progress = Progress.unplaced(log) if held else Progress(Progress.unplaced(log).position, log)
            self._copies.moved(copy)

    async def gone(self, feed: TapFeed, endpoint: Endpoint) -> set[int]:
        """Which vbuckets of a feed its node has no more: TAP does not tell."""
        return feed.carried - set(await active_on(await self._cluster.connection(endpoint)))
