"""One node by itself."""

import asyncio

from tests.support.node_clusters import push_map, two_nodes
from upriver.client import Consumer
from upriver.client.cluster.single_node import SingleNode


def test_the_map_does_not_count() -> None:
    async def read() -> list[bytes]:
        consumer = Consumer(first.address, vbuckets=[0], end={0: 1})
        consumer.cluster = SingleNode(first.address, [0])
        async with consumer:
            return [change.key async for batch in consumer for change in batch.changes()]

    with two_nodes() as (first, second):
        first.call(first.bucket.vbucket(0).set, b"fruit", b"apple")
        push_map([first, second], [1] * 8, rev=2)  # the map says that the other has it
        assert asyncio.run(read()) == [b"fruit"]


def test_nothing_changes_it() -> None:
    async def look() -> None:
        alone = SingleNode("127.0.0.1:1", [3])
        before = alone.map
        assert await alone.refresh() is before
        assert not alone.learned(b"{}", before.endpoints[0])
        assert before.owner(3) == before.endpoints[0]
        assert before.owner(4) is None

    asyncio.run(look())
