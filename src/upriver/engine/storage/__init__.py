"""What a bucket keeps on disk: the interface of a storage, LMDB and memory behind it, and copies of a running one."""

from upriver.engine.storage.online_backup import hot_copy

__all__ = [
    "hot_copy",
]
