"""The storage engine: buckets of vbuckets, their history, branches, persistence and rollback."""

from upriver.engine.bucket import Bucket
from upriver.engine.cursor import Cursor, CursorEnd, CursorEnded, Options, SnapshotReader
from upriver.engine.durability_waiters import not_on_disk
from upriver.engine.filters import KeyPattern, ValueFilter, read_json
from upriver.engine.keyvalue import LOCK_TIME_S
from upriver.engine.maintenance import Retention
from upriver.engine.malloc_tuning import MallocTuning, keep_for_next_use
from upriver.engine.table import StoredItem
from upriver.engine.vbucket import Vbucket, new_uuid

__all__ = [
    "LOCK_TIME_S",
    "Bucket",
    "Cursor",
    "CursorEnd",
    "CursorEnded",
    "KeyPattern",
    "MallocTuning",
    "Options",
    "Retention",
    "SnapshotReader",
    "StoredItem",
    "ValueFilter",
    "Vbucket",
    "keep_for_next_use",
    "new_uuid",
    "not_on_disk",
    "read_json",
]
