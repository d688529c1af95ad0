"""The key-value client against real nodes."""

import asyncio
from pathlib import Path

import pytest

from tests.support.node_clusters import push_map, two_nodes
from tests.support.node_process import Client, NodeProcess
from upriver.client import KvClient, SyncKvClient
from upriver.errors import ConnectionLost, KeyExists, KeyNotFound, Locked, NotMyVbucket, NotStored, Unreachable
from upriver.model import vbucket_of
from upriver.node import EmbeddedNode
from upriver.wire.dialects.memcached import MetaOption, SetVbucket, VbucketState


def test_single_operations(upriver_node: EmbeddedNode) -> None:
    async def run() -> None:
        async with KvClient(upriver_node.address) as kv:
            assert await kv.get("a") is None
            written = await kv.add("a", "1", flags=7)
            assert written.vbucket == vbucket_of(b"a", 64)
            assert (written.seqno, bool(written.vbucket_uuid)) == (1, True)
            with pytest.raises(KeyExists):
                await kv.add("a", "2")
            item = await kv.get(b"a")
            assert item is not None
            assert (item.value, item.flags, item.cas) == (b"1", 7, written.cas)
            again = await kv.set("a", "3", cas=item.cas)
            with pytest.raises(KeyExists):
                await kv.set("a", "4", cas=item.cas)
            await kv.append("a", "b", cas=again.cas)
            await kv.prepend("a", "p")
            with pytest.raises(KeyNotFound):
                await kv.replace("b", "x")
            with pytest.raises(NotStored):
                await kv.append("b", "x")
            assert (await kv.gat("a", 1000) or item).value == b"p3b"
            await kv.touch("a", 2000)
            deleted = await kv.delete("a")
            assert deleted.seqno == 6 + 1
            with pytest.raises(KeyNotFound):
                await kv.delete("a")
            assert [await kv.incr("n", 5, initial=1), await kv.incr("n", 5), await kv.incr("n", -4)] == [1, 6, 2]
            with pytest.raises(KeyNotFound):
                await kv.incr("other")

    asyncio.run(run())


def test_locks(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("a", "1")
        held = kv.lock("a", 20)
        with pytest.raises(Locked):
            kv.set("a", "2")
        kv.unlock("a", held.cas)
        kv.set("a", "2")
        kv.set("a", "3", cas=kv.lock("a", 20).cas)
        item = kv.get("a")
        assert item is not None
        assert item.value == b"3"


def test_with_meta(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_with_meta("a", "1", rev_seqno=7, cas=1234, flags=5, expiry=0)
        meta = kv.meta("a")
        assert meta is not None
        assert (meta.deleted, meta.flags, meta.rev_seqno, meta.cas) == (False, 5, 7, 1234)
        with pytest.raises(KeyExists):
            kv.set_with_meta("a", "2", rev_seqno=6, cas=1)
        kv.set_with_meta("a", "2", rev_seqno=6, cas=1, options=MetaOption.SKIP_CONFLICT_RESOLUTION)
        kv.delete_with_meta("a", rev_seqno=9, cas=99)
        meta = kv.meta("a")
        assert meta is not None
        assert meta.deleted
        assert kv.meta("b") is None


def test_keys_go_to_their_nodes_and_follow_them() -> None:
    with two_nodes() as (first, second), SyncKvClient(first.address, timeout_s=20) as kv:
        for number in range(50):
            kv.set(f"key{number}", f"value{number}")
        counted = [node.call(_count, node) for node in (first, second)]
        assert sum(counted) == 50
        assert all(counted)
        # Vbucket 0 moves: its owner refuses, the client asks for the new map and goes there.
        key = next(f"key{n}" for n in range(1000) if vbucket_of(f"key{n}".encode(), 8) == 0)
        _make(first, 0, VbucketState.DEAD)
        _make(second, 0, VbucketState.ACTIVE)
        push_map([first, second], [1, 0, 0, 0, 1, 1, 1, 1], rev=2)
        kv.set(key, "moved")
        item = kv.get(key)
        assert item is not None
        assert item.value == b"moved"
        assert kv.cluster_map.revision == (2, 2)


def _count(node: EmbeddedNode) -> int:
    return sum(len(list(snapshot)) for vbucket in node.bucket for snapshot in vbucket.changes())


def _make(node: EmbeddedNode, vbucket: int, state: VbucketState) -> None:
    with Client(node.port) as client:
        assert client.ask(SetVbucket(vbucket=vbucket, state=state)).status == 0


def test_a_vbucket_without_an_owner_is_reported_in_time(upriver_node: EmbeddedNode) -> None:
    push_map([upriver_node], [-1] * 64, rev=2)
    with SyncKvClient(upriver_node.address, timeout_s=0.2) as kv, pytest.raises(NotMyVbucket, match="has no owner"):
        kv.set("a", "b")


def test_a_node_that_comes_back_is_found_again(tmp_path: Path) -> None:
    arguments = ("--data", str(tmp_path / "data"), "--vbuckets", "4", "--ack", "disk")
    with NodeProcess("--port", "0", *arguments) as served:
        port = served.port
        address = f"127.0.0.1:{port}"
        with SyncKvClient(address, timeout_s=60) as kv, SyncKvClient(address, timeout_s=0.3) as hasty:
            kv.set("a", "1")
            served.process.kill()
            served.process.wait()
            with NodeProcess("--port", str(port), *arguments):
                item = kv.get("a")
                assert item is not None
                assert item.value == b"1"
                kv.set("b", "2")
            with pytest.raises((ConnectionLost, Unreachable)):
                hasty.incr("n", initial=1)
