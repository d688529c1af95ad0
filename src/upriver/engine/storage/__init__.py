"""Storage of a bucket: the interface, its implementations on LMDB and in memory, backups, and compaction of files."""

from upriver.engine.storage.offline_compaction import compact
from upriver.engine.storage.online_backup import online_backup

__all__ = [
    "compact",
    "online_backup",
]
