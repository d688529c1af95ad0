"""Under which name a TAP consumer comes back, and when it must start over."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.consumer_mirror import Mirror, contents_of, follow
from tests.support.consumer_runs import fill, read, run
from upriver.client import Consumer, FileCheckpoint, KvClient, Progress
from upriver.client.consumer.tap_supervisor import tap_progress
from upriver.errors import InvalidArguments, StreamRolledBack
from upriver.model import FailoverLog, StreamPosition
from upriver.node import EmbeddedNode, start

LOG = FailoverLog.fresh(7)


def test_where_a_vbucket_begins() -> None:
    held = Progress.unplaced(LOG)
    assert tap_progress([1, 2], "earliest", {2: held}) == {1: Progress.beginning(), 2: held}
    assert tap_progress([1], {1: held}, {}) == {1: held}
    with pytest.raises(InvalidArguments, match="the progress of vbucket 3 is not from tap"):
        tap_progress([3], {3: Progress.at(StreamPosition.at(7, 5))}, {})


def test_progress_of_tap_is_no_position(upriver_node: EmbeddedNode) -> None:
    with pytest.raises(InvalidArguments, match="the progress was saved with tap"):
        run(read(upriver_node.address, start={0: Progress.unplaced(LOG)}))


def test_what_was_not_acknowledged_comes_again_in_another_process(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    fill(upriver_node, 0)

    async def take(done: bool) -> Mirror:
        mirror = Mirror()
        settings: dict[str, Any] = {"dialect": "tap", "name": "me", "end": "latest", "auto_acknowledge": False}
        checkpoint = FileCheckpoint(tmp_path / "progress", "test")
        async with Consumer(upriver_node.address, checkpoint=checkpoint, **settings) as consumer:
            if not done:  # the end of a dump comes when everything is acknowledged
                await follow(consumer, mirror, lambda: mirror.contents == contents_of(upriver_node))
                return mirror
            async for batch in consumer:
                await mirror.apply(batch)
                consumer.acknowledge(batch)
            while any(each.is_open for each in consumer.connections):
                await asyncio.sleep(0.01)  # until the source has heard it
        return mirror

    assert run(take(done=False)).contents == contents_of(upriver_node)
    assert run(take(done=True)).contents == contents_of(upriver_node)
    assert run(take(done=True)).contents == contents_of(upriver_node)  # a dump is everything that there is, each time


def test_from_now_on_across_a_reconnect(upriver_node: EmbeddedNode) -> None:
    async def from_now() -> None:
        mirror = Mirror()
        async with KvClient(upriver_node.address) as kv:
            await kv.set_many({b"old%d" % n: b"1" for n in range(100)})
            async with Consumer(upriver_node.address, dialect="tap", start="latest") as consumer:
                seen = False
                for turn in range(1000):  # whatever was written before the stream stood does not come
                    await kv.set("first", str(turn))
                    try:
                        async with asyncio.timeout(0.2):
                            await mirror.apply(await anext(consumer))
                    except TimeoutError:
                        continue
                    seen = True
                    break
                assert seen
                for turn in range(5):
                    for connection in consumer.connections:
                        connection.abort()
                    await kv.set_many({b"new%d" % n: b"%d" % turn for n in range(100)})
                    await follow(
                        consumer,
                        mirror,
                        lambda turn=turn: sum(v == b"%d" % turn for v in mirror.contents.values()) >= 100,  # type: ignore[misc]
                    )
        assert not any(key.startswith(b"old") for key in mirror.contents)
        assert mirror.events == []

    run(from_now())


@pytest.mark.parametrize("policy", ["fail", "rewind", "emit"])
def test_a_name_that_the_node_has_forgotten(tmp_path: Path, policy: str) -> None:
    """A node that was stopped and started is on the same branch, and knows no names: everything comes again."""
    mirror = Mirror()

    async def some(node: EmbeddedNode, progress: Any) -> dict[int, Progress]:
        settings: dict[str, Any] = {"dialect": "tap", "name": "me", "on_rollback": policy, "start": progress}
        async with Consumer(node.address, **settings) as consumer:
            source = await asyncio.to_thread(contents_of, node)
            await follow(consumer, mirror, lambda: mirror.contents == source)
            return consumer.progress

    with start(vbuckets=4, data=str(tmp_path / "data")) as node:
        fill(node, 0)
        progress = run(some(node, "earliest"))
    with start(vbuckets=4, data=str(tmp_path / "data")) as node:
        fill(node, 3)
        run(some(node, progress))
    assert set(mirror.events) <= {"Reset"}


def test_another_branch_is_told(upriver_node: EmbeddedNode) -> None:
    fill(upriver_node, 0)
    settings: dict[str, Any] = {"dialect": "tap", "name": "me"}
    _, consumer = run(read(upriver_node.address, **settings))
    elsewhere = dict(consumer.progress)
    number = next(iter(elsewhere))
    elsewhere[number] = Progress.unplaced(LOG)
    with pytest.raises(StreamRolledBack, match=rf"vbucket {number}: the source rolled back"):
        run(read(upriver_node.address, start=elsewhere, **settings))
    mirror, _ = run(read(upriver_node.address, start=elsewhere, on_rollback="rewind", **settings))
    assert mirror.contents == contents_of(upriver_node)
    assert "Reset" in mirror.events
