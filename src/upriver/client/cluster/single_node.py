"""A single node, whatever its cluster map says: used to compare copies."""

from collections.abc import Iterable

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.cluster_map import ClusterMap
from upriver.client.transport.address import Address, Endpoint
from upriver.model import VBUCKETS_MAX


class SingleNode(Cluster):
    """A cluster in which one node owns all these vbuckets, whatever role its copies have."""

    def __init__(self, address: str | Address, vbuckets: Iterable[int]) -> None:
        super().__init__(address)
        held = frozenset(vbuckets)
        owners = tuple(0 if number in held else -1 for number in range(VBUCKETS_MAX))
        self._map = ClusterMap((0, 0), self.address.endpoints[:1], owners)

    async def refresh(self, beyond: ClusterMap | None = None) -> ClusterMap:  # noqa: ARG002
        """Return the map, which never changes."""
        return self.map

    def learned(self, encoded: bytes, endpoint: Endpoint) -> bool:  # noqa: ARG002
        """Ignore the maps of other nodes."""
        return False
