"""A connection to the node that a command names."""

import asyncio

import pytest

from upriver.cli.node_connection import connected
from upriver.client import Address
from upriver.client.cluster import statistics
from upriver.errors import NodeUnavailable, Unreachable
from upriver.node import EmbeddedNode


def test_it_is_closed_at_the_end(upriver_node: EmbeddedNode) -> None:
    async def run() -> None:
        async with connected(Address.parse(upriver_node.address)) as connection:
            assert await statistics(connection)
        with pytest.raises(NodeUnavailable):
            await statistics(connection)

    asyncio.run(run())


def test_an_address_without_a_node() -> None:
    async def run() -> None:
        async with connected(Address.parse("127.0.0.1:1")):
            pass

    with pytest.raises(Unreachable):
        asyncio.run(run())
