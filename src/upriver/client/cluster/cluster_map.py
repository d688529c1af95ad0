"""Which node holds which vbucket: the terse map that nodes hand out, as far as a client needs it.

A map is newer than another if its (epoch, revision) is larger, and if it says at all who has something. Nodes name
themselves ``$HOST`` where they do not know under which name they are reached; the client fills in the one that it used.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from upriver.client.transport.address import Endpoint
from upriver.errors import ClusterMapError, NoSuchVbucket
from upriver.model import VBUCKETS_MAX, vbucket_of

HOST: Final = "$HOST"
#: A map that lists more nodes than this is not believed.
NODES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """The owner of every vbucket, at one revision."""

    #: Epoch and revision; larger is newer.
    revision: tuple[int, int]
    endpoints: tuple[Endpoint, ...]
    #: For each vbucket the place of its owner in ``endpoints``; -1 for none.
    owners: tuple[int, ...]
    bucket: str = ""

    @classmethod
    def parse(cls, encoded: bytes, host: str, *, tls: bool = False) -> "ClusterMap":
        """The map in a node's answer; ``host`` is how that node was reached."""
        try:
            config = json.loads(encoded)
        except (ValueError, RecursionError) as error:
            raise ClusterMapError(f"the cluster map is not JSON: {error}") from None
        try:
            return cls._from(config, host, tls)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise ClusterMapError(f"the cluster map makes no sense: {error!r}") from None

    @classmethod
    def _from(cls, config: dict[str, Any], host: str, tls: bool) -> "ClusterMap":
        servers = config["vBucketServerMap"]
        endpoints = tuple(_endpoint(text, host) for text in servers["serverList"])
        if tls:
            endpoints = _with_tls_ports(endpoints, config.get("nodesExt", []), host)
        owners = tuple(int(chain[0]) for chain in servers["vBucketMap"])
        if len(endpoints) > NODES_MAX or not 0 < len(owners) <= VBUCKETS_MAX:
            raise ValueError(f"{len(endpoints)} nodes and {len(owners)} vbuckets")
        if any(not -1 <= owner < len(endpoints) for owner in owners):
            raise ValueError("a vbucket is on a node that is not listed")
        revision = int(config.get("revEpoch", 0)), int(config["rev"])
        return cls(revision, endpoints, owners, str(config.get("name", "")))

    @property
    def vbuckets(self) -> int:
        """How many there are."""
        return len(self.owners)

    def vbucket_of(self, key: bytes) -> int:
        """The vbucket of a key."""
        return vbucket_of(key, len(self.owners))

    def owner(self, vbucket: int) -> Endpoint | None:
        """Who has the vbucket; None if nobody has it now."""
        if not 0 <= vbucket < len(self.owners):
            raise NoSuchVbucket(f"there is no vbucket {vbucket}: the bucket has {len(self.owners)}, from 0")
        place = self.owners[vbucket]
        return None if place < 0 else self.endpoints[place]

    def owned(self) -> dict[Endpoint, list[int]]:
        """The vbuckets of each node that has any."""
        out: dict[Endpoint, list[int]] = {}
        for vbucket, place in enumerate(self.owners):
            if place >= 0:
                out.setdefault(self.endpoints[place], []).append(vbucket)
        return out

    @property
    def is_empty(self) -> bool:
        """Whether nobody has anything: what a node says that stands alone and was given no vbuckets yet."""
        return not any(place >= 0 for place in self.owners)

    def newer_than(self, other: "ClusterMap | None") -> bool:
        """Whether this map takes the place of the other. One in which nobody has anything never does: nodes that stand
        alone count their revisions from their start, so that of the one that waits for vbuckets may be the newest."""
        if other is None:
            return True
        return (not self.is_empty, self.revision) > (not other.is_empty, other.revision)


def _endpoint(text: str, host: str) -> Endpoint:
    name, _, port = text.rpartition(":")
    return Endpoint(host if name == HOST else name.strip("[]"), int(port))


def _with_tls_ports(endpoints: tuple[Endpoint, ...], nodes: list[Any], host: str) -> tuple[Endpoint, ...]:
    """The same nodes at the ports where they speak TLS, if the map tells them; a single node of ours has one port."""
    ports: dict[tuple[str, int], int] = {}
    for node in nodes:
        services = node.get("services", {})
        if "kv" in services and "kvSSL" in services:
            ports[node.get("hostname", host), int(services["kv"])] = int(services["kvSSL"])
    return tuple(Endpoint(each.host, ports.get((each.host, each.port), each.port)) for each in endpoints)
