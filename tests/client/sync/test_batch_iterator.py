"""A synchronous consumer takes several batches from the event loop at once, and skips none."""

from pathlib import Path

import pytest

from upriver.client import FileCheckpoint, Flush, SyncConsumer, SyncKvClient
from upriver.model import Change
from upriver.node import EmbeddedNode

KEYS = [b"key%d" % number for number in range(500)]


@pytest.fixture
def filled(upriver_node: EmbeddedNode) -> EmbeddedNode:
    with SyncKvClient(upriver_node.address) as kv:
        kv.set_many([(key, b"value") for key in KEYS])
    return upriver_node


def test_every_change_comes_once(filled: EmbeddedNode) -> None:
    with SyncConsumer(filled.address, end="latest") as consumer:
        assert sum(len(batch) for batch in consumer) == 500
    with SyncConsumer(filled.address, end="latest") as consumer:
        assert sorted(change.key for change in consumer.changes() if isinstance(change, Change)) == sorted(KEYS)


def test_a_consumer_that_stops_halfway_goes_on_there_or_repeats(filled: EmbeddedNode, tmp_path: Path) -> None:
    def opened() -> SyncConsumer:
        checkpoint = FileCheckpoint(tmp_path / "progress", "test")
        return SyncConsumer(filled.address, end="latest", checkpoint=checkpoint)

    seen: list[list[bytes]] = []
    with opened() as consumer:
        for _ in range(3):
            for batch in consumer:
                seen.append(batch.records.column("key").to_pylist())
                break
    with opened() as consumer:
        rest = [change.key for change in consumer.changes() if isinstance(change, Change)]
    assert {key for keys in seen for key in keys} | set(rest) == set(KEYS)
    # The third batch was not finished and comes again; the two before it were.
    assert set(seen[2]) <= set(rest)
    assert not set(seen[0] + seen[1]) & set(rest)
    with opened() as consumer:
        assert list(consumer) == []


def test_events_of_vbuckets_come_between_the_changes(filled: EmbeddedNode) -> None:
    with SyncConsumer(filled.address) as consumer:
        changes = consumer.changes()
        for _ in KEYS:
            assert isinstance(next(changes), Change)
        filled.call(filled.bucket.flush)
        assert isinstance(next(changes), Flush)
