"""The cluster map: which node owns which vbucket.

A map with a larger (epoch, revision) is newer, unless it has no owners at all. A node that does not know its own name
writes ``$HOST``; the client replaces it with the host that it connected to.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from upriver.client.transport.address import Endpoint
from upriver.errors import ClusterMapError, NoSuchVbucket
from upriver.model import VBUCKETS_MAX, vbucket_of

HOST: Final = "$HOST"
#: A map with more nodes than this is invalid.
NODES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """The owner of every vbucket, at one revision."""

    #: Epoch and revision; larger is newer.
    revision: tuple[int, int]
    endpoints: tuple[Endpoint, ...]
    #: For each vbucket the index of its owner in ``endpoints``; -1 for none.
    owners: tuple[int, ...]
    bucket: str = ""
    #: Identifies the bucket; nodes that share a map share it.
    bucket_uuid: str = ""

    @classmethod
    def parse(cls, encoded: bytes, host: str, *, tls: bool = False) -> "ClusterMap":
        """Parse a node's reply; ``host`` is the name under which the node was reached."""
        try:
            config = json.loads(encoded)
        except (ValueError, RecursionError) as error:
            raise ClusterMapError(f"the cluster map is not JSON: {error}") from None
        try:
            return cls._from(config, host, tls)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise ClusterMapError(f"the cluster map is invalid: {error!r}") from None

    @classmethod
    def _from(cls, config: dict[str, Any], host: str, tls: bool) -> "ClusterMap":
        servers = config["vBucketServerMap"]
        endpoints = tuple(_endpoint(text, host) for text in servers["serverList"])
        if tls:
            endpoints = _with_tls_ports(endpoints, config.get("nodesExt", []), host)
        owners = tuple(int(chain[0]) for chain in servers["vBucketMap"])
        if len(endpoints) > NODES_MAX or not 0 < len(owners) <= VBUCKETS_MAX:
            found = f"{len(endpoints)} nodes and {len(owners)} vbuckets"
            raise ClusterMapError(
                f"the cluster map is invalid: it has {found}; up to {NODES_MAX} and 1 to {VBUCKETS_MAX} are possible"
            )
        for vbucket, owner in enumerate(owners):
            if not -1 <= owner < len(endpoints):
                raise ClusterMapError(
                    f"the cluster map is invalid: vbucket {vbucket} belongs to node {owner} of {len(endpoints)}"
                )
        revision = int(config.get("revEpoch", 0)), int(config["rev"])
        return cls(revision, endpoints, owners, str(config.get("name", "")), str(config.get("uuid", "")))

    @property
    def vbuckets(self) -> int:
        """The number of vbuckets."""
        return len(self.owners)

    def vbucket_of(self, key: bytes) -> int:
        """The vbucket of a key."""
        return vbucket_of(key, len(self.owners))

    def owner(self, vbucket: int) -> Endpoint | None:
        """The owner of a vbucket; None if it has no owner now."""
        if not 0 <= vbucket < len(self.owners):
            raise NoSuchVbucket(
                f"vbucket {vbucket} does not exist; the bucket has vbuckets 0 to {len(self.owners) - 1}"
            )
        place = self.owners[vbucket]
        return None if place < 0 else self.endpoints[place]

    def owned(self) -> dict[Endpoint, list[int]]:
        """The vbuckets of each node that owns any."""
        out: dict[Endpoint, list[int]] = {}
        for vbucket, place in enumerate(self.owners):
            if place >= 0:
                out.setdefault(self.endpoints[place], []).append(vbucket)
        return out

    @property
    def is_empty(self) -> bool:
        """Whether no vbucket has an owner, as in the map of a node that has no vbuckets yet."""
        return not any(place >= 0 for place in self.owners)

    def newer_than(self, other: "ClusterMap | None") -> bool:
        """Whether this map replaces the other.

        An empty map never does. A node without a cluster counts its own revisions, so the map of a node that still
        waits for vbuckets may have the largest.
        """
        if other is None:
            return True
        return (not self.is_empty, self.revision) > (not other.is_empty, other.revision)


def _endpoint(text: str, host: str) -> Endpoint:
    name, _, port = text.rpartition(":")
    return Endpoint(host if name == HOST else name.strip("[]"), int(port))


def _with_tls_ports(endpoints: tuple[Endpoint, ...], nodes: list[Any], host: str) -> tuple[Endpoint, ...]:
    """The same nodes with their TLS ports, where the map has them; a single Upriver node has one port."""
    ports: dict[tuple[str, int], int] = {}
    for node in nodes:
        services = node.get("services", {})
        if "kv" in services and "kvSSL" in services:
            ports[node.get("hostname", host), int(services["kv"])] = int(services["kvSSL"])
    return tuple(Endpoint(each.host, ports.get((each.host, each.port), each.port)) for each in endpoints)
