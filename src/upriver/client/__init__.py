"""The client's side: a key-value client, a consumer of change streams, its checkpoints."""

from upriver.client.cluster.cluster import Cluster
from upriver.client.cluster.cluster_map import ClusterMap
from upriver.client.consumer.batches import Batch, Flush, Reset, Rollback
from upriver.client.consumer.checkpoint import Checkpoint, FileCheckpoint, NodeCheckpoint
from upriver.client.consumer.consumer import Consumer
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import ConsumerSettings
from upriver.client.kv import Item, KvClient, Meta, Written
from upriver.client.mover import PARALLEL, Mover, Step
from upriver.client.sync import SyncConsumer, SyncKvClient, SyncMover
from upriver.client.transport.address import Address, Endpoint
from upriver.protocol.consumer import Run

__all__ = [
    "PARALLEL",
    "Address",
    "Batch",
    "Checkpoint",
    "Cluster",
    "ClusterMap",
    "Consumer",
    "ConsumerSettings",
    "Endpoint",
    "FileCheckpoint",
    "Flush",
    "Item",
    "KvClient",
    "Meta",
    "Mover",
    "NodeCheckpoint",
    "Progress",
    "Reset",
    "Rollback",
    "Run",
    "Step",
    "SyncConsumer",
    "SyncKvClient",
    "SyncMover",
    "Written",
]
