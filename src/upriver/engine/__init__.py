"""Buckets and vbuckets that remember, branch, persist and roll back."""

from upriver.engine.bucket import Bucket
from upriver.engine.cursor import Cursor, CursorEnd, CursorEnded, Options, SnapshotReader
from upriver.engine.filters import KeyPattern, ValueFilter
from upriver.engine.maintenance import Retention
from upriver.engine.vbucket import Vbucket

__all__ = [
    "Bucket",
    "Cursor",
    "CursorEnd",
    "CursorEnded",
    "KeyPattern",
    "Options",
    "Retention",
    "SnapshotReader",
    "ValueFilter",
    "Vbucket",
]
