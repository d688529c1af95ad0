"""Vbuckets that have stopped advancing are reported, and requested again."""

import asyncio

import pytest

from tests.support.consumer_mirror import Mirror, follow
from tests.support.consumer_runs import run
from upriver.client import Consumer, KvClient
from upriver.client.consumer import DialectName
from upriver.model import VbucketState, vbucket_of
from upriver.node import EmbeddedNode


def test_a_vbucket_that_no_node_has_any_more(upriver_node: EmbeddedNode, caplog: pytest.LogCaptureFixture) -> None:
    async def stand_still() -> str:
        async with Consumer(upriver_node.address, stall_s=0.2, vbuckets=[0, 1]) as consumer:
            await asyncio.to_thread(upriver_node.call, upriver_node.bucket.delete_vbucket, 1)
            mirror = Mirror()
            await follow(consumer, mirror, lambda: 1 in consumer.stalled)
            assert 0 not in consumer.stalled
            return consumer.stalled[1]

    assert run(stand_still()) == "no node has it active"
    assert "vbucket 1 does not advance" in caplog.text


@pytest.mark.upriver(vbuckets=8)
@pytest.mark.parametrize("dialect", ["dcp", "upr", "upr_draft2", "tap"])
def test_a_dead_copy_is_told_until_it_is_active_again(upriver_node: EmbeddedNode, dialect: DialectName) -> None:
    """A dead copy could be streamed and would never move on; it must not look like a vbucket without changes."""
    number = vbucket_of(b"key", 8)
    vbucket = upriver_node.bucket.vbucket(number)

    async def stand_still() -> None:
        mirror = Mirror()
        async with (
            KvClient(upriver_node.address) as kv,
            Consumer(upriver_node.address, dialect=dialect, stall_s=0.2, on_rollback="rewind") as consumer,
        ):
            await kv.set("key", "before")
            await follow(consumer, mirror, lambda: mirror.contents == {b"key": b"before"})
            upriver_node.call(vbucket.set_state, VbucketState.DEAD)
            await follow(consumer, mirror, lambda: set(consumer.stalled) == {number})
            upriver_node.call(vbucket.set_state, VbucketState.ACTIVE)
            await kv.set("key", "after")
            await follow(consumer, mirror, lambda: mirror.contents == {b"key": b"after"} and not consumer.stalled)

    run(stand_still())
