"""The nodes behind an address."""

import asyncio
import socket

import pytest

from tests.support.node_clusters import push_map, two_nodes
from tests.support.node_process import Client
from upriver.client import Cluster, KvClient
from upriver.client.transport.address import Endpoint
from upriver.errors import NodeUnavailable, Unreachable
from upriver.model import vbucket_of
from upriver.node import EmbeddedNode, start
from upriver.wire.dialects.memcached import SetVbucket, VbucketState


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_the_first_that_answers_tells_where_everything_is() -> None:
    async def run(first: EmbeddedNode, second: EmbeddedNode) -> None:
        cluster = Cluster(f"127.0.0.1:{free_port()},{second.address}")
        known = await cluster.open()
        assert known.endpoints == (Endpoint("127.0.0.1", first.port), Endpoint("127.0.0.1", second.port))
        assert await cluster.open() is known
        assert await cluster.refresh(known) is known  # no node has a newer one
        push_map([first], [1] * 8, rev=2, ports=[first.port, second.port])  # the node that was not asked first
        assert (await cluster.refresh(known)).revision == (2, 2)
        one = await cluster.connection(known.endpoints[0])
        assert await cluster.connection(known.endpoints[0]) is one
        assert await cluster.connection(known.endpoints[0], bulk=True) is not one
        one.abort()
        assert await cluster.connection(known.endpoints[0]) is not one
        await cluster.close()
        with pytest.raises(NodeUnavailable, match="the client is closed"):
            await cluster.connection(known.endpoints[0])

    with two_nodes() as (first, second):
        asyncio.run(run(first, second))


@pytest.mark.parametrize("first_named", [0, 1])
def test_a_node_that_waits_for_vbuckets_hides_no_owner(first_named: int) -> None:
    """Each node makes its own map, and the map of the empty node is the newer one."""

    async def run(nodes: list[EmbeddedNode]) -> None:
        cluster = Cluster(",".join(node.address for node in nodes))
        known = await cluster.open()
        assert len(known.owned()) == 1
        assert await cluster.refresh(known) is known
        await cluster.close()

    with start(vbuckets=8) as owner, start(vbuckets=8, initial_vbuckets="none") as waiting:
        assert waiting.node.state.cluster.revision > owner.node.state.cluster.revision
        asyncio.run(run([owner, waiting] if not first_named else [waiting, owner]))


def test_an_unreachable_cluster_is_one_clear_error() -> None:
    async def run() -> None:
        port = free_port()
        cluster = Cluster(f"127.0.0.1:{port}")
        with pytest.raises(Unreachable, match=rf"^127\.0\.0\.1:{port}: cannot connect: Connection refused"):
            await cluster.open()
        await cluster.close()

    asyncio.run(run())


def test_a_map_that_came_along_is_taken_if_it_is_newer(upriver_node: EmbeddedNode) -> None:
    async def run() -> None:
        cluster = Cluster(upriver_node.address)
        known = await cluster.open()
        older = b'{"rev":0,"vBucketServerMap":{"serverList":["a:1"],"vBucketMap":[[0]]}}'
        newer = older.replace(b'"rev":0', b'"rev":0,"revEpoch":9')
        assert not cluster.learned(b"nonsense", known.endpoints[0])
        assert not cluster.learned(older, known.endpoints[0])
        assert cluster.map is known
        assert cluster.learned(newer, known.endpoints[0])
        assert cluster.map.endpoints == (Endpoint("a", 1),)
        await cluster.close()

    asyncio.run(run())


def test_a_refusal_says_where_to_go_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key and many keys follow a vbucket by the map that came with the refusal, without another request."""

    async def run(first: EmbeddedNode, second: EmbeddedNode) -> None:
        keys = [b"key%d" % n for n in range(200) if vbucket_of(b"key%d" % n, 8) == 0]
        async with KvClient(first.address) as kv, KvClient(first.address) as other:
            await asyncio.to_thread(first.call, first.bucket.delete_vbucket, 0)
            with Client(second.port) as client:
                assert client.ask(SetVbucket(vbucket=0, state=VbucketState.ACTIVE)).status == 0
            push_map([first, second], [1, 0, 0, 0, 1, 1, 1, 1], rev=2)

            async def refuse(*_: object) -> None:
                raise AssertionError("the map was asked for")

            monkeypatch.setattr(Cluster, "refresh", refuse)
            await kv.set(keys[0], "1")
            assert await other.set_many(dict.fromkeys(keys[1:], b"2")) == {}

    with two_nodes() as (first, second):
        asyncio.run(run(first, second))
