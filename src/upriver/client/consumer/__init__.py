"""The consumer of change streams: feeds, their supervisor, positions, batches and checkpoints."""

from upriver.client.consumer.batches import Batch, Flush, Reset, Rollback, VbucketEvent
from upriver.client.consumer.checkpoint import FileCheckpoint
from upriver.client.consumer.consumer import Consumer
from upriver.client.consumer.delivery_queue import DeliveryQueue
from upriver.client.consumer.end_positions import EndPositions
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.feed_factory import FeedFactory
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import DIALECTS, DRAFTS, ColumnName, ConsumerSettings, DialectName, default_name
from upriver.client.consumer.stream_supervisor import StreamPolicy, StreamSupervisor
from upriver.client.consumer.tracked_vbuckets import POLICIES, Policy, TrackedVbuckets
from upriver.protocol.consumer import Run

__all__ = [
    "DIALECTS",
    "DRAFTS",
    "POLICIES",
    "Batch",
    "ColumnName",
    "Consumer",
    "ConsumerSettings",
    "DeliveryQueue",
    "DialectName",
    "EndPositions",
    "Feed",
    "FeedFactory",
    "FileCheckpoint",
    "Flush",
    "Policy",
    "Progress",
    "Reset",
    "Rollback",
    "Run",
    "StreamPolicy",
    "StreamSupervisor",
    "TrackedVbuckets",
    "VbucketEvent",
    "default_name",
]
