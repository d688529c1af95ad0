"""Opens connections that are ready for streams."""

from upriver.client.cluster.cluster import Cluster
from upriver.client.consumer.feed import RECEIVE_BYTES, Feed, FeedOwner, FeedReceiver
from upriver.client.consumer.settings import DRAFTS, ConsumerSettings
from upriver.client.consumer.tracked_vbuckets import TrackedVbuckets
from upriver.client.transport.address import Endpoint
from upriver.client.transport.connection import Connection
from upriver.client.transport.draft_handshake import require_draft
from upriver.client.transport.handshake import login_needed
from upriver.errors import (
    AccessDenied,
    AuthenticationFailed,
    InvalidArguments,
    NodeUnavailable,
    StatusError,
    UnknownCommand,
)
from upriver.protocol.consumer import ConsumerOptions
from upriver.wire import DIALECTS, MEMCACHED, dcp


class FeedFactory:
    """Opens the feeds of one consumer."""

    def __init__(
        self, cluster: Cluster, tracked: TrackedVbuckets, receiver: FeedReceiver, receive_bytes: int = RECEIVE_BYTES
    ) -> None:
        """``receiver`` gets the changes; a feed reads at most ``receive_bytes`` at once."""
        self._cluster = cluster
        self._tracked = tracked
        self._receiver = receiver
        self._receive_bytes = receive_bytes

    async def open(self, endpoint: Endpoint, settings: ConsumerSettings, owner: FeedOwner) -> Feed:
        """Connect to a node and open the connection for streams."""
        if settings.stream_port is not None:
            endpoint = Endpoint(endpoint.host, settings.stream_port)
        if settings.dialect in DRAFTS:
            return await self._open_draft(endpoint, settings, owner)
        connection = await self._cluster.fresh_connection(endpoint, receive_bytes=self._receive_bytes)
        try:
            await self._negotiate(connection, settings)
        except BaseException:
            await connection.close()
            raise
        options = ConsumerOptions(
            window_bytes=settings.window_bytes,
            noop_interval_s=settings.noop_interval_s,
            dialects=("dcp", "upr") if settings.dialect == "dcp" else ("upr",),
            starts_inclusive=not connection.is_upriver_node,
            acks_late=True,
        )
        return Feed(connection, self._tracked, self._receiver, owner, options, columns=settings.decoded)

    async def _open_draft(self, endpoint: Endpoint, settings: ConsumerSettings, owner: FeedOwner) -> Feed:
        """Drafts have no open command and no settings, and with the 12-byte header a handshake of their own."""
        draft = DIALECTS[settings.dialect]
        has_login = draft.framing is MEMCACHED
        connection = await self._cluster.fresh_connection(
            endpoint, receive_bytes=self._receive_bytes, handshake=has_login
        )
        if not has_login:
            try:
                await require_draft(connection, settings.dialect)
            except BaseException:
                await connection.close()
                raise
        options = ConsumerOptions(
            window_bytes=0, noop_interval_s=0, expirations=False, dialects=("upr",), acks_late=True
        )
        return Feed(connection, self._tracked, self._receiver, owner, options, columns=settings.decoded, draft=draft)

    async def _negotiate(self, connection: Connection, settings: ConsumerSettings) -> None:
        node = str(connection.endpoint)
        controls = settings.upriver_controls(is_upriver_node=connection.is_upriver_node, node=node)
        flags = dcp.OpenFlag.PRODUCER
        if settings.keys_only and not connection.is_upriver_node:
            flags |= dcp.OpenFlag.NO_VALUE
        try:
            await connection.ask(dcp.Open(name=settings.name.encode()[:200], flags=flags))
            for name, value in controls.items():
                await _set(connection, name, value)
        except (AccessDenied, AuthenticationFailed) as error:
            raise login_needed(connection.endpoint, self._cluster.address, error) from None
        except UnknownCommand:
            raise NodeUnavailable(node, "it has no change streams: it does not know the open command") from None


async def _set(connection: Connection, name: str, value: str) -> None:
    try:
        await connection.ask(dcp.Control(key=name.encode(), value=value.encode()))
    except StatusError as error:
        raise InvalidArguments(f"{name} = {value!r}: {error.detail or error.text}") from None
