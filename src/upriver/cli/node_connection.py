"""A connection to the node that a command names."""

import contextlib
from collections.abc import AsyncIterator

from upriver.client import Address
from upriver.client.cluster import Cluster
from upriver.client.transport import Connection


@contextlib.asynccontextmanager
async def connected(address: Address) -> AsyncIterator[Connection]:
    """Connect to the first node of the address, and disconnect at the end."""
    cluster = Cluster(address)
    try:
        yield await cluster.connection(address.endpoints[0])
    finally:
        await cluster.close()
