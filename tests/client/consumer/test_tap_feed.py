"""What comes over a TAP connection."""

import asyncio
from typing import Any

import pytest

from tests.support.consumer_mirror import Mirror, contents_of, follow
from tests.support.consumer_runs import fill, first_batch, read, run
from upriver.client import Consumer, KvClient, SyncKvClient
from upriver.errors import AuthenticationFailed, InvalidArguments
from upriver.model import StreamPosition
from upriver.node import EmbeddedNode


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"start": {0: StreamPosition.at(1, 1)}}, "positions to start from"),
        ({"end": {0: 5}}, "ranges that end at a seqno"),
        ({"history": True}, "history"),
        ({"key_filter": "a", "persisted_only": True}, "filters"),
        ({"start": "latest", "end": "latest"}, "ranges that start at the end"),
    ],
)
def test_what_tap_cannot_promise_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArguments, match=f"tap has no seqnos and cannot do: .*{why}.*; use dcp"):
        Consumer("127.0.0.1:1", dialect="tap", **settings)


def test_keys_only_and_few_columns(upriver_node: EmbeddedNode) -> None:
    fill(upriver_node, 0)
    keys, _ = run(read(upriver_node.address, dialect="tap", keys_only=True))
    assert set(keys.contents) == set(contents_of(upriver_node))
    assert set(keys.contents.values()) == {None}
    narrow = run(first_batch(upriver_node.address, dialect="tap", columns=("key", "flags")))
    assert narrow.records.schema.names == ["key", "flags"]
    assert sum(run_.rows for run_ in narrow.runs) == len(narrow)


def test_flags_expiry_and_revision_come_along(upriver_node: EmbeddedNode) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set("a", "1")
        written = kv.set("a", "2", flags=0x01020304, expiry=4_000_000_000)
    batch = run(first_batch(upriver_node.address, dialect="tap"))
    (change,) = batch.changes()
    assert (change.flags, change.expiry, change.cas, change.rev_seqno) == (0x01020304, 4_000_000_000, written.cas, 2)


@pytest.mark.upriver(vbuckets=1)
def test_a_slow_consumer_holds_no_more_than_the_window(upriver_node: EmbeddedNode) -> None:
    """What is not done is not acknowledged, and the source sends no more than may be unacknowledged."""

    async def slowly() -> None:
        async with KvClient(upriver_node.address) as kv:
            for turn in range(30):
                await kv.set_many({b"%d-%d" % (turn, n): bytes(1000) for n in range(1000)})
        async with Consumer(upriver_node.address, dialect="tap", end="latest") as consumer:
            rows = 0
            async for batch in consumer:
                rows += len(batch)
                await asyncio.sleep(0.001)
                assert consumer.queued_bytes <= 9 * 1024 * 1024
            assert rows == 30_000

    run(slowly())


def test_a_source_that_falls_silent_is_left(upriver_node: EmbeddedNode) -> None:
    async def silent() -> None:
        mirror = Mirror()
        async with (
            KvClient(upriver_node.address) as kv,
            Consumer(upriver_node.address, dialect="tap", noop_interval_s=0.2) as consumer,
        ):
            await kv.set("a", "1")
            await follow(consumer, mirror, lambda: mirror.contents == {b"a": b"1"})
            for connection in consumer.connections:
                connection.pause()  # as if nothing came through any more
            await kv.set("a", "2")
            await follow(consumer, mirror, lambda: mirror.contents == {b"a": b"2"})
            assert consumer.reconnects == 1

    run(silent())


def test_a_login_is_needed(guarded_node: EmbeddedNode) -> None:
    with pytest.raises(AuthenticationFailed, match="requires a login"):
        run(first_batch(guarded_node.address, dialect="tap"))
    fill_address = f"upriver://me:secret@{guarded_node.address}"
    with SyncKvClient(fill_address) as kv:
        kv.set("a", "b")
    assert run(read(fill_address, dialect="tap"))[0].contents == {b"a": b"b"}
