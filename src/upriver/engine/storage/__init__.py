"""Storage of a bucket: the interface, its implementations on LMDB and in memory, and backups of a running node."""

from upriver.engine.storage.online_backup import online_backup

__all__ = [
    "online_backup",
]
