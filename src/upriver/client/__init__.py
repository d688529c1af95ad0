"""The client's side: a key-value client, a consumer of change streams, its checkpoints."""

from upriver.client.address import Address, Endpoint
from upriver.client.cluster import Cluster
from upriver.client.cluster_map import ClusterMap
from upriver.client.kv import Item, KvClient, Meta, SyncKvClient, Written

__all__ = ["Address", "Cluster", "ClusterMap", "Endpoint", "Item", "KvClient", "Meta", "SyncKvClient", "Written"]
