"""Runs of consumers against nodes of a test."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from tests.support.consumer_mirror import Mirror
from upriver.client import Consumer, KvClient, SyncKvClient
from upriver.client.consumer.start_positions import high_seqnos
from upriver.node import EmbeddedNode
from upriver.wire.dialects.memcached import SeqnoPersistence

DIALECTS: Final = ("dcp", "upr", "upr_draft2", "upr_draft3", "tap")
#: The options of a listener that is pinned to the first draft: its first bytes look like the second's.
DRAFT1: Final = "127.0.0.1:0,dialect=upr_draft1,anonymous"
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; fail when it takes too long."""

    async def bounded() -> T:
        async with asyncio.timeout(100):
            return await work

    return asyncio.run(bounded())


def fill(node: EmbeddedNode, turn: int, count: int = 500) -> None:
    """Write, overwrite and delete."""
    with SyncKvClient(node.address) as kv:
        kv.set_many({b"key%d" % n: b"%d of turn %d" % (n, turn) for n in range(turn * 100, turn * 100 + count)})
        for n in range(turn * 100, turn * 100 + count, 7):
            kv.delete(b"key%d" % n)


async def read(address: str, **settings: Any) -> tuple[Mirror, Consumer]:
    """Read everything up to now."""
    mirror = Mirror()
    async with Consumer(address, end="latest", **settings) as consumer:
        async for batch in consumer:
            await mirror.apply(batch)
    return mirror, consumer


async def first_batch(address: str, **settings: Any) -> Any:
    """The first batch of a new consumer."""
    async with Consumer(address, **settings) as consumer:
        return await anext(consumer)


async def wait_until_persisted(kv: KvClient, vbuckets: int = 4) -> None:
    """Wait until the node has everything on disk."""
    high = await high_seqnos(kv.cluster, range(vbuckets))
    connection = await kv.cluster.connection(kv.cluster.map.endpoints[0])
    for vbucket, seqno in high.items():
        await connection.ask(SeqnoPersistence(vbucket=vbucket, seqno=seqno))
