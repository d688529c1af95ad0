"""Two clusters that differ are made equal again: forced one way, merged both ways."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.node_contents import copies, put
from upriver.client import Address, KvClient
from upriver.model import VbucketState, vbucket_of
from upriver.node import EmbeddedNode, start
from upriver.pipelines.apply.repair import Repair
from upriver.pipelines.jobs.replicate import ReplicateOptions, selection
from upriver.pipelines.targets.target import ReadBasis

Nodes = tuple[EmbeddedNode, EmbeddedNode]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """A source and a copy."""
    with start(vbuckets=4) as source, start(vbuckets=4) as target:
        yield source, target


def repair(nodes: Nodes, *, merge: bool = False, **options: str) -> Repair:
    told = ReplicateOptions.read({"from": nodes[0].address, "to": nodes[1].address, **options})
    filters = {} if not told.prefix else {"key_filter": f"^{told.prefix}"}
    return Repair(told.source, Address.parse(nodes[1].address), selection(told), filters, merge=merge)


async def contents(node: EmbeddedNode, keys: list[str]) -> dict[str, bytes]:
    async with KvClient(node.address) as kv:
        return {key.decode(): item.value for key, item in (await kv.get_many(keys)).items()}


KEYS = ["same", "older", "newer", "deleted", "extra", "gone"]


async def differ(nodes: Nodes) -> None:
    """Every way in which a copy can differ from a source that has lost something."""
    async with KvClient(nodes[0].address) as a, KvClient(nodes[1].address) as b:
        await a.set_with_meta("same", b"same", rev_seqno=3, cas=30)
        await b.set_with_meta("same", b"same", rev_seqno=3, cas=30)
        await a.set_with_meta("older", b"right", rev_seqno=2, cas=20)
        await b.set_with_meta("older", b"lost", rev_seqno=5, cas=50)
        await a.set_with_meta("newer", b"right", rev_seqno=6, cas=60)
        await b.set_with_meta("newer", b"stale", rev_seqno=5, cas=50)
        await a.set_with_meta("deleted", b"", rev_seqno=1, cas=10)
        await a.delete_with_meta("deleted", rev_seqno=2, cas=20)
        await b.set_with_meta("deleted", b"lost", rev_seqno=9, cas=90)
        await b.set_with_meta("extra", b"lost", rev_seqno=7, cas=70)
        await b.delete_with_meta("gone", rev_seqno=8, cas=80)


def test_a_copy_is_forced_to_hold_what_its_source_holds(nodes: Nodes) -> None:
    async def check() -> None:
        await differ(nodes)
        work = repair(nodes)
        marks = await work.run(range(4))
        expected = {"same": b"same", "older": b"right", "newer": b"right"}
        assert await contents(nodes[1], KEYS) == await contents(nodes[0], KEYS) == expected
        assert work.keys == 5
        assert sorted(marks) == [0, 1, 2, 3]
        assert await work.grounds(marks) == {number: mark.ground for number, mark in marks.items()}
        nodes[0].call(setattr, nodes[0].bucket.vbucket(3).table, "purge_seqno", 1)  # a deletion was forgotten
        nodes[0].call(nodes[0].bucket.vbucket(2).set_state, VbucketState.DEAD)
        assert await work.grounds(marks) == {
            0: marks[0].ground,
            1: marks[1].ground,
            3: ReadBasis(marks[3].vbucket_uuid, 1),
        }
        nodes[0].call(nodes[0].bucket.vbucket(2).set_state, VbucketState.ACTIVE)
        again = repair(nodes)
        await again.run(range(4))
        assert again.keys == 0
        # Whatever the source makes again wins against what was put right.
        async with KvClient(nodes[1].address) as b:
            for key in ("deleted", "extra", "gone"):
                meta = await b.meta(key)
                assert meta is not None
                assert meta.deleted
                await b.set_with_meta(key, b"again", rev_seqno=max(2, meta.rev_seqno), cas=1000)

    asyncio.run(check())


def test_only_these_vbuckets_are_touched(nodes: Nodes) -> None:
    async def check() -> None:
        await differ(nodes)
        async with KvClient(nodes[0].address) as a:
            number = a.cluster_map.vbucket_of(b"older")
        await repair(nodes).run([number])
        assert (await contents(nodes[1], ["older"]))["older"] == b"right"
        others = [number for number in range(4) if number != a.cluster_map.vbucket_of(b"older")]
        work = repair(nodes)
        await work.run(others)
        assert work.keys > 0

    asyncio.run(check())


def test_both_ways_the_newer_one_wins_and_nothing_is_lost(nodes: Nodes) -> None:
    async def check() -> None:
        await differ(nodes)
        await repair(nodes, merge=True).run(range(4))
        expected = {"same": b"same", "older": b"lost", "newer": b"right", "deleted": b"lost", "extra": b"lost"}
        assert await contents(nodes[0], KEYS) == await contents(nodes[1], KEYS) == expected

    asyncio.run(check())


def test_keys_with_other_names_there_are_found(nodes: Nodes) -> None:
    async def check() -> None:
        async with KvClient(nodes[0].address) as a, KvClient(nodes[1].address) as b:
            await a.set_many({f"user:{n}": b"right" for n in range(20)} | {"other": b"x"})
            await b.set_many({f"customer:{n}": b"lost" for n in range(10, 30)} | {"mine": b"y", "user:1": b"z"})
        await repair(nodes, rename="user:=customer:").run(range(4))
        keys = [f"customer:{n}" for n in range(40)]
        assert await contents(nodes[1], keys) == {f"customer:{n}": b"right" for n in range(20)}
        assert await contents(nodes[1], ["mine", "user:1", "other"]) == {"mine": b"y", "user:1": b"z"}

    asyncio.run(check())


def test_a_key_in_several_vbuckets(nodes: Nodes) -> None:
    """Each copy is compared with the one in the same vbucket."""
    right = {number: b"right %d" % number for number in range(3)}
    put(nodes[0], b"twin", right)
    put(nodes[1], b"twin", dict.fromkeys(range(1, 4), b"lost"))
    for merge in (False, True):
        asyncio.run(repair(nodes, merge=merge).run(range(4)))
        assert copies(nodes[0], b"twin") == copies(nodes[1], b"twin") == right


def test_a_document_outside_of_its_vbucket_has_no_counterpart_in_a_cluster_of_another_size() -> None:
    with start(vbuckets=4) as source, start(vbuckets=8) as target:
        own, there = vbucket_of(b"k", 4), vbucket_of(b"k", 8)
        put(source, b"k", {own: b"right", own ^ 1: b"elsewhere"})
        put(target, b"k", {there: b"lost", there ^ 1: b"elsewhere too"})
        asyncio.run(repair((source, target)).run(range(4)))
        assert copies(target, b"k") == {there: b"right", there ^ 1: b"elsewhere too"}
