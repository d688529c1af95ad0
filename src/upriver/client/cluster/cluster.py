"""A cluster as a client sees it: its map, and connections to its nodes, opened on demand and reopened when lost."""

import asyncio
from typing import Final

from upriver.client.cluster.cluster_map import ClusterMap
from upriver.client.transport.address import Address, Endpoint
from upriver.client.transport.connection import AGENT, CONNECT_TIMEOUT_S, Connection
from upriver.client.transport.handshake import login_needed
from upriver.errors import (
    AccessDenied,
    AuthenticationFailed,
    ClusterMapError,
    KeyNotFound,
    NodeUnavailable,
    NotSupported,
    StatusError,
    UnknownCommand,
)
from upriver.model import VBUCKETS_MAX
from upriver.wire.dialects.memcached import GetClusterConfig

#: At most this many nodes are asked for the map.
_ASKED_MAX: Final = 16


class Cluster:
    """The cluster map and the connections to the nodes of an address."""

    def __init__(
        self, address: str | Address, *, agent: str = AGENT, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        self.address = Address.parse(address)
        self._agent = agent
        self._connect_timeout_s = connect_timeout_s
        self._map: ClusterMap | None = None
        #: The last map that came with a refusal; thousands of refusals carry the same one.
        self._came_along = b""
        self._connections: dict[tuple[Endpoint, bool], Connection] = {}
        self._locks: dict[tuple[Endpoint, bool], asyncio.Lock] = {}
        self._refreshing = asyncio.Lock()
        self._closed = False

    @property
    def map(self) -> ClusterMap:
        """The newest known map."""
        if self._map is None:
            raise ClusterMapError("the cluster map is not known yet: call open() first")
        return self._map

    async def open(self) -> ClusterMap:
        """Fetch the map from the first node that answers."""
        return self._map or await self.refresh()

    async def connection(self, endpoint: Endpoint, *, bulk: bool = False) -> Connection:
        """Return the connection to a node. Each node has one for single operations and one for bulk operations.

        Only the first asks for the seqno of each write: a node writes faster without it.
        """
        place = endpoint, bulk
        known = self._connections.get(place)
        if known is not None and known.is_open:
            return known
        async with self._locks.setdefault(place, asyncio.Lock()):
            known = self._connections.get(place)
            if known is None or not known.is_open:
                known = await self.fresh_connection(endpoint, tokens=not bulk)
                self._connections[place] = known
            return known

    async def fresh_connection(
        self, endpoint: Endpoint, *, receive_bytes: int | None = None, handshake: bool = True, tokens: bool = False
    ) -> Connection:
        """Open a new connection to a node, which the caller closes."""
        sizes = {} if receive_bytes is None else {"receive_bytes": receive_bytes}
        if self._closed:
            raise NodeUnavailable(str(endpoint), "the client is closed")
        connection = await Connection.open(
            endpoint,
            self.address,
            agent=self._agent,
            timeout_s=self._connect_timeout_s,
            handshake=handshake,
            tokens=tokens,
            **sizes,
        )
        connection.on_map = self.learned
        return connection

    async def refresh(self, beyond: ClusterMap | None = None) -> ClusterMap:
        """Ask the nodes for a map that is newer than ``beyond``; without one, return the newest map.

        Concurrent calls share one query.
        """
        async with self._refreshing:
            if self._map is not None and beyond is not None and self._map.newer_than(beyond):
                return self._map
            failure: Exception | None = None
            for endpoint in self._candidates():
                try:
                    found = await self._ask(endpoint)
                except NodeUnavailable as error:
                    failure = failure or error
                    continue
                if found.newer_than(self._map):
                    self._map = found
                if self._map is not None and self._map.newer_than(beyond) and not self._map.is_empty:
                    return self._map
            if self._map is None:
                raise failure or ClusterMapError(f"no node of {self.address} returned a cluster map")
            return self._map

    def learned(self, encoded: bytes, endpoint: Endpoint) -> bool:
        """Take a map that came with a refusal and return whether it is newer."""
        if encoded == self._came_along:
            return False
        self._came_along = encoded
        try:
            found = ClusterMap.parse(encoded, endpoint.host, tls=self.address.tls)
        except ClusterMapError:
            return False
        if not found.newer_than(self._map):
            return False
        self._map = found
        return True

    def _candidates(self) -> list[Endpoint]:
        known = () if self._map is None else self._map.endpoints
        connected = [endpoint for (endpoint, _), each in self._connections.items() if each.is_open]
        return list(dict.fromkeys((*connected, *self.address.endpoints, *known)))[:_ASKED_MAX]

    async def _ask(self, endpoint: Endpoint) -> ClusterMap:
        connection = await self.connection(endpoint)
        try:
            reply = await connection.ask(GetClusterConfig(), timeout_s=self._connect_timeout_s)
        except (AccessDenied, AuthenticationFailed) as error:
            raise login_needed(endpoint, self.address, error) from None
        except (UnknownCommand, NotSupported, KeyNotFound):  # a server without a cluster
            return ClusterMap((0, 0), (endpoint,), (0,) * VBUCKETS_MAX)
        except StatusError as error:
            raise NodeUnavailable(str(endpoint), f"cannot get the cluster map: {error}") from None
        return ClusterMap.parse(reply.value, endpoint.host, tls=self.address.tls)

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()
