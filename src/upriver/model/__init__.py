"""The vocabulary of change streams, without bytes or I/O.

The engine yields what stands here, the wire encodes and decodes it, Spark reads it: six dialects and the
storage meet in these words and nowhere else.
"""

from upriver.model.batch import CHANGES, change_batch, changes_in
from upriver.model.change import Change, Event
from upriver.model.failover import FailoverEntry, FailoverLog
from upriver.model.position import Snapshot, StreamPosition
from upriver.model.vbucket import VbucketState, vbucket_of

__all__ = [
    "CHANGES",
    "Change",
    "Event",
    "FailoverEntry",
    "FailoverLog",
    "Snapshot",
    "StreamPosition",
    "VbucketState",
    "change_batch",
    "changes_in",
    "vbucket_of",
]
