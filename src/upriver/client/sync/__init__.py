"""The synchronous clients. ``python -m tools.sync_classes`` generates all but ``batch_iterator``."""

from upriver.client.sync.consumer import SyncConsumer
from upriver.client.sync.kv import SyncKvClient
from upriver.client.sync.mover import SyncMover

__all__ = ["SyncConsumer", "SyncKvClient", "SyncMover"]
