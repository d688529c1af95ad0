"""The client's side: a key-value client, a consumer of change streams, its checkpoints."""

from upriver.client.address import Address, Endpoint
from upriver.client.batches import Batch, Flush, Reset, Rollback, Run
from upriver.client.checkpoint import Checkpoint, FileCheckpoint, NodeCheckpoint
from upriver.client.cluster import Cluster
from upriver.client.cluster_map import ClusterMap
from upriver.client.consumer import Consumer
from upriver.client.kv import Item, KvClient, Meta, SyncKvClient, Written
from upriver.client.mover import Mover, Step
from upriver.client.progress import Progress
from upriver.client.settings import ConsumerSettings

__all__ = [
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
    "SyncKvClient",
    "Written",
]
