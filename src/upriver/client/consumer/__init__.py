"""The consumer of change streams: feeds, positions, batches, checkpoints, and who keeps the streams going."""

from upriver.client.consumer.batches import Flush, VbucketEvent
from upriver.client.consumer.checkpoint import FileCheckpoint
from upriver.client.consumer.consumer import Consumer
from upriver.client.consumer.feed import Feed
from upriver.client.consumer.feed_factory import active_on, open_feed
from upriver.client.consumer.progress import Progress
from upriver.client.consumer.settings import DIALECTS, DRAFTS, ConsumerSettings, default_name
from upriver.client.consumer.tracked_vbuckets import POLICIES, Policy, TrackedVbuckets
from upriver.protocol.consumer import Run

__all__ = [
    "DIALECTS",
    "DRAFTS",
    "POLICIES",
    "Consumer",
    "ConsumerSettings",
    "Feed",
    "FileCheckpoint",
    "Flush",
    "Policy",
    "Progress",
    "Run",
    "TrackedVbuckets",
    "VbucketEvent",
    "active_on",
    "default_name",
    "open_feed",
]
