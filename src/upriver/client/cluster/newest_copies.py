"""A cluster in which a vbucket without an active copy belongs to the node with its newest replica: used to read what is
left after a node was lost."""

import asyncio
import dataclasses

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.cluster_map import ClusterMap
from upriver.client.cluster.node_queries import VbucketStatus, vbuckets_of
from upriver.client.transport.address import Endpoint
from upriver.errors import NodeUnavailable
from upriver.model import VbucketState

#: The roles of copies that may be read. A dead copy was given up, or handed over.
_READABLE = (VbucketState.ACTIVE, VbucketState.REPLICA, VbucketState.PENDING)


class NewestCopies(Cluster):
    """The nodes of an address, and a map that names a readable copy of every vbucket that has one."""

    async def refresh(self, beyond: ClusterMap | None = None) -> ClusterMap:
        """Return the newest map, with the replicas that stand in for missing active copies."""
        known = await super().refresh(beyond)
        if any(place < 0 for place in known.owners):
            known = self._map = await self._completed(known)
        return known

    async def _completed(self, known: ClusterMap) -> ClusterMap:
        endpoints = list(dict.fromkeys((*known.endpoints, *self.address.endpoints)))
        copies = await asyncio.gather(*map(self._copies, endpoints))
        owners = list(known.owners)
        for number, owner in enumerate(owners):
            if owner < 0:
                found = [(each[number].high_seqno, -place) for place, each in enumerate(copies) if number in each]
                owners[number] = -max(found)[1] if found else -1
        return dataclasses.replace(known, endpoints=tuple(endpoints), owners=tuple(owners))

    async def _copies(self, endpoint: Endpoint) -> dict[int, VbucketStatus]:
        """The readable copies of a node; none if it cannot be reached."""
        try:
            copies = await vbuckets_of(await self.connection(endpoint))
        except NodeUnavailable:
            return {}
        return {number: each for number, each in copies.items() if each.state in _READABLE}
