"""What tests look at from outside: what nodes hold, and in which state."""

import asyncio
import contextlib

from tests.support.node_process import Client
from upriver.client import Address, Cluster, SyncKvClient
from upriver.client.cluster.node_queries import VbucketStatus, vbuckets_of
from upriver.errors import KeyNotFound
from upriver.model import VbucketState
from upriver.node import EmbeddedNode


def held(address: str, keys: list[str]) -> dict[str, bytes]:
    """The values of those of the keys that are there."""
    with SyncKvClient(address, timeout_s=60) as kv:
        return {key.decode(): item.value for key, item in kv.get_many(keys).items()}


def vbuckets(address: str) -> dict[int, VbucketStatus]:
    """What a node says of its vbuckets."""

    async def ask() -> dict[int, VbucketStatus]:
        cluster = Cluster(address)
        try:
            return await vbuckets_of(await cluster.connection(Address.parse(address).endpoints[0]))
        finally:
            await cluster.close()

    return asyncio.run(ask())


def active(address: str) -> list[int]:
    """The vbuckets that a node has active."""
    return sorted(number for number, status in vbuckets(address).items() if status.state is VbucketState.ACTIVE)


def changes(address: str) -> int:
    """How many changes a node has seen."""
    return sum(status.high_seqno for status in vbuckets(address).values())


def copies(node: EmbeddedNode, key: bytes) -> dict[int, bytes]:
    """The values of a key, by the vbucket in which it is."""

    def look() -> dict[int, bytes]:
        found = {}
        for vbucket in node.bucket:
            with contextlib.suppress(KeyNotFound):
                found[vbucket.number] = vbucket.get(key).value
        return found

    return node.call(look)


def put(node: EmbeddedNode, key: bytes, values: dict[int, bytes]) -> None:
    """Store values of one key in these vbuckets."""
    with Client(node.port) as client:
        for vbucket, value in values.items():
            client.set(key, value, vbucket)
