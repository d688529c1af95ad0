"""Questions to nodes, over real sockets."""

import asyncio
import itertools

import pytest

from tests.support.deployed_server import DeployedServer
from tests.support.node_clusters import two_nodes
from upriver.client import KvClient
from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.node_queries import (
    VbucketStatus,
    _from_statistics,
    _seqnos_in,
    active_vbuckets,
    failover_logs,
    item_counts,
    owners,
    statistics,
    vbuckets_of,
    visible_ends,
)
from upriver.client.transport.address import Address, Endpoint
from upriver.errors import KeyNotFound
from upriver.model import VbucketState, vbucket_of
from upriver.node import EmbeddedNode
from upriver.node.commands.statistics import GROUPS


def test_statistics_and_a_group_that_is_not_there(upriver_node: EmbeddedNode) -> None:
    async def run() -> None:
        cluster = Cluster(upriver_node.address)
        connection = await cluster.connection(Endpoint(upriver_node.host, upriver_node.port))
        assert (await statistics(connection))["curr_items"] == "0"
        with pytest.raises(KeyNotFound, match="unknown group of statistics 'colours'"):
            await statistics(connection, "colours")
        states = await statistics(connection, "vbucket")
        assert states["vb_3"] == "active"
        # What other servers tell in a thousand pairs, ours tells in one.
        assert (await vbuckets_of(connection)).keys() == _from_statistics(
            states, await statistics(connection, "vbucket-seqno")
        ).keys()
        await cluster.close()

    asyncio.run(run())


def test_where_vbuckets_stand(upriver_node: EmbeddedNode) -> None:
    async def run() -> None:
        async with KvClient(upriver_node.address) as kv:
            for _ in range(3):
                written = await kv.set("a", "1")
            connection = await kv.cluster.connection(Endpoint(upriver_node.host, upriver_node.port))
            number = vbucket_of(b"a", 64)
            status = (await active_vbuckets(kv.cluster))[number]
            assert status[:4] == (number, VbucketState.ACTIVE, written.vbucket_uuid, 3)
            assert status.exact_from == 0
            logs = await failover_logs(connection, [number, 1000])
            assert list(logs) == [number]
            assert logs[number].newest.vbucket_uuid == written.vbucket_uuid

    asyncio.run(run())


def test_each_node_is_asked_for_its_own() -> None:
    with two_nodes() as (one, other):

        async def run() -> None:
            cluster = Cluster(one.address)
            by_owner = await owners(cluster)
            assert sorted(map(str, by_owner)) == sorted((one.address, other.address))
            assert sorted(await active_vbuckets(cluster)) == sorted(itertools.chain(*by_owner.values()))
            assert list(await active_vbuckets(cluster, [5])) == [5]
            await cluster.close()

        asyncio.run(run())


def test_what_deployed_servers_tell() -> None:
    seqnos = {"vb_7:high_seqno": "9", "vb_7:uuid": "5", "vb_7:purge_seqno": "2", "vb_7:abs_high_seqno": "9", "x": "y"}
    assert _from_statistics({"vb_7": "replica"}, seqnos) == {
        7: VbucketStatus(7, VbucketState.REPLICA, 5, 9, 0, 2, None)
    }


def test_seqnos_are_read_from_complete_entries_only() -> None:
    entry = (7).to_bytes(2, "big") + (1234).to_bytes(8, "big")
    assert _seqnos_in(entry * 1) == {7: 1234}
    assert _seqnos_in(entry + entry[:5]) == {7: 1234}
    assert _seqnos_in(b"") == {}


def test_how_many_changes_ranges_deliver(upriver_node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """For more vbuckets than one request has room for; a node of an earlier version does not know the request."""

    def write() -> None:
        for vbucket in upriver_node.bucket:
            for key in (b"a", b"b", b"b", b"b", b"c"):
                vbucket.set(key, b"v")
            vbucket.delete(b"a")

    async def run() -> None:
        cluster = Cluster(upriver_node.address)
        connection = await cluster.connection(Endpoint(upriver_node.host, upriver_node.port))
        assert await item_counts(connection) == dict.fromkeys(range(64), 3)
        found = await visible_ends(connection, dict.fromkeys(range(64), (0, 2)))
        assert found == dict.fromkeys(range(64), (4, 2))
        assert await visible_ends(connection, {}) == {}
        for name in ("vbucket-items", "vbucket-ends"):
            monkeypatch.delitem(GROUPS, name)
        assert (await item_counts(connection), await visible_ends(connection, {0: (0, 2)})) == ({}, {})
        await cluster.close()
        async with DeployedServer() as server:
            cluster = Cluster(Address.parse(server.address))
            connection = await cluster.connection(Endpoint("127.0.0.1", server.port))
            assert (await item_counts(connection), await visible_ends(connection, {0: (0, 2)})) == ({}, {})
            await cluster.close()

    upriver_node.call(write)
    asyncio.run(run())
