"""The synchronous consumer."""

from pathlib import Path

from upriver.client import Consumer, FileCheckpoint, SyncConsumer, SyncKvClient
from upriver.node import EmbeddedNode


def test_settings_and_properties_are_the_consumers(upriver_node: EmbeddedNode) -> None:
    with SyncConsumer(upriver_node.address, end="latest", keys_only=True) as consumer:
        assert consumer.settings.keys_only
        assert consumer.cluster_map.vbuckets == 64
        assert (consumer.queued_bytes, consumer.changes_received, consumer.reconnects) == (0, 0, 0)
        assert consumer.stalled == {}


def test_sync_is_another_way_to_write_it(upriver_node: EmbeddedNode) -> None:
    with Consumer.sync(upriver_node.address, end="latest") as consumer:
        assert type(consumer) is SyncConsumer
        assert list(consumer) == []


def test_batches_are_acknowledged_and_saved(upriver_node: EmbeddedNode, tmp_path: Path) -> None:
    with SyncKvClient(upriver_node.address) as kv:
        written = kv.set("a", "1")
    checkpoint = FileCheckpoint(tmp_path / "progress", "test")
    with SyncConsumer(upriver_node.address, end="latest", checkpoint=checkpoint, auto_acknowledge=False) as consumer:
        (batch,) = (batch for batch in consumer if len(batch))
        assert written.vbucket not in consumer.progress
        consumer.acknowledge(batch)
        assert consumer.progress[written.vbucket].position.seqno == 1
        consumer.save()
    with SyncConsumer(upriver_node.address, end="latest", checkpoint=checkpoint) as consumer:
        assert list(consumer) == []
