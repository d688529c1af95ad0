"""Updates the cluster map while vbuckets move: one map with both nodes, and a new revision for each moved vbucket.

A node that never received a map has its own, with itself alone. The first move merges both maps: it takes the newer one
and adds the missing node. If neither node ever received a map, the bucket keeps the uuid that it has at the source.
"""

import asyncio
import contextlib
import copy
import json
from typing import Any, Final

from upriver.client.cluster.cluster_map import HOST, ClusterMap
from upriver.client.transport.address import Address, Endpoint
from upriver.client.transport.backoff import Backoff
from upriver.client.transport.connection import Connection
from upriver.errors import ClusterMapError, NodeUnavailable, UpriverError
from upriver.protocol.move import moved_map
from upriver.wire.dialects.memcached import GetClusterConfig, SetClusterConfig

#: How often to push a map again when another program pushes a different one.
ATTEMPTS_MAX: Final = 10
#: A map of this epoch or later was pushed to the node; an earlier one is the node's own.
PUSHED_EPOCH: Final = 2
_PATIENCE_S: Final = 5.0

Config = dict[str, Any]


class MapUpdates:
    """The cluster map of the source and the destination of a move."""

    def __init__(self, source: Address, destination: Address) -> None:
        self.source = source
        self.destination = destination
        self._config: Config = {}

    async def learn(self) -> None:
        """Fetch the maps of both nodes and merge them."""
        found = [await self._fetch(each) for each in (self.source, self.destination)]
        self._config = joined(found[0], found[1], self.source.endpoints[0], self.destination.endpoints[0])

    def moved(self, vbucket: int) -> bytes:
        """Return the next map, in which the destination owns the vbucket."""
        place = place_of(self._config, self.destination.endpoints[0])
        assert place is not None  # ``joined`` added it
        self._config = moved_map(self._config, vbucket, place)
        return json.dumps(self._config).encode()

    @property
    def has_others(self) -> bool:
        """Whether the cluster has more nodes than these two."""
        return bool(self._others())

    def _others(self) -> list[Endpoint]:
        known = ClusterMap.parse(json.dumps(self._config).encode(), self.source.endpoints[0].host)
        two = {self.source.endpoints[0], self.destination.endpoints[0]}
        return [endpoint for endpoint in known.endpoints if endpoint not in two]

    async def push_to_others(self, encoded: bytes) -> None:
        """Push a map to all other nodes; a node that cannot be reached gets it from other clients later."""
        await asyncio.gather(*(self._push(endpoint, self.source, encoded) for endpoint in self._others()))

    async def settle(self, vbucket: int, patience_s: float) -> None:
        """Push the map again until the nodes' newest map has the move, because another program may push maps too.

        Wait at most ``patience_s`` for a node that cannot be reached.
        """
        here, there = self.source.endpoints[0], self.destination.endpoints[0]
        for _ in range(ATTEMPTS_MAX):
            found = await self._fetch_both(patience_s)
            newest = max(found, key=revision)
            place = place_of(newest, there)
            if place is not None and newest["vBucketServerMap"]["vBucketMap"][vbucket][0] == place:
                return
            self._config = joined(found[0], found[1], here, there)
            encoded = self.moved(vbucket)
            await asyncio.gather(
                self._push(here, self.source, encoded),
                self._push(there, self.destination, encoded),
                self.push_to_others(encoded),
            )
        raise ClusterMapError(
            f"vbucket {vbucket} has moved, but another program keeps pushing cluster maps without the move"
        )

    async def _fetch_both(self, patience_s: float) -> list[Config]:
        backoff, loop = Backoff(), asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while True:
            try:
                return [await self._fetch(each) for each in (self.source, self.destination)]
            except NodeUnavailable:
                pause_s = backoff.pause_s()
                if loop.time() + pause_s >= deadline:
                    raise
                await asyncio.sleep(pause_s)

    async def _fetch(self, address: Address) -> Config:
        endpoint = address.endpoints[0]
        connection = await Connection.open(endpoint, address)
        try:
            encoded = (await connection.ask(GetClusterConfig())).value
        finally:
            await connection.close()
        ClusterMap.parse(encoded, endpoint.host)  # raises if it is invalid
        config: Config = json.loads(encoded.replace(HOST.encode(), _host(endpoint).encode()))
        for node in config.get("nodesExt", []):
            node.setdefault("hostname", endpoint.host)
            node.pop("thisNode", None)
        return config

    async def _push(self, endpoint: Endpoint, address: Address, encoded: bytes) -> None:
        with contextlib.suppress(UpriverError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                connection = await Connection.open(endpoint, address)
                try:
                    await connection.ask(SetClusterConfig(config=encoded))
                finally:
                    await connection.close()


def revision(config: Config) -> tuple[int, int]:
    """Epoch and revision; larger is newer."""
    return int(config.get("revEpoch", 0)), int(config["rev"])


def place_of(config: Config, endpoint: Endpoint) -> int | None:
    """The index of a node in the list of servers."""
    servers = config["vBucketServerMap"]["serverList"]
    name = f"{_host(endpoint)}:{endpoint.port}"
    return servers.index(name) if name in servers else None


def joined(first: Config, second: Config, source: Endpoint, destination: Endpoint) -> Config:
    """Return the newer of two maps, with both nodes, and with the vbuckets of nodes that had only their own map."""
    counts = [len(each["vBucketServerMap"]["vBucketMap"]) for each in (first, second)]
    if counts[0] != counts[1]:  # keys would map to other vbuckets
        raise ClusterMapError(
            f"{source} has {counts[0]} vbuckets and {destination} has {counts[1]}; both need the same number"
        )
    config = copy.deepcopy(max(first, second, key=revision))
    if revision(config)[0] < PUSHED_EPOCH and "uuid" in first:
        config["uuid"] = first["uuid"]  # the bucket is that of the source: its consumers must recognise it
    rows = config["vBucketServerMap"]["vBucketMap"]
    for endpoint, own in ((source, first), (destination, second)):
        if place_of(config, endpoint) is None:
            _add(config, endpoint)
        place, place_there = place_of(config, endpoint), place_of(own, endpoint)
        if revision(own)[0] >= PUSHED_EPOCH or place_there is None:
            continue
        for number, row in enumerate(own["vBucketServerMap"]["vBucketMap"]):
            if row[0] == place_there and rows[number][0] == -1:
                rows[number] = [place, *rows[number][1:]]
    return config


def _add(config: Config, endpoint: Endpoint) -> None:
    config["vBucketServerMap"]["serverList"].append(f"{_host(endpoint)}:{endpoint.port}")
    if "nodesExt" in config:
        config["nodesExt"].append({"hostname": endpoint.host, "services": {"kv": endpoint.port}})
    if "nodes" in config:
        config["nodes"].append({"hostname": f"{_host(endpoint)}:{endpoint.port}", "ports": {"direct": endpoint.port}})


def _host(endpoint: Endpoint) -> str:
    return f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
