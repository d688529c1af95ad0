"""Numbers about a bucket that add up: every total is the sum of its parts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upriver.engine.bucket import Bucket
    from upriver.engine.vbucket import Vbucket


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorStatistics:
    """One stream's place in a vbucket."""

    name: str
    vbucket: int
    seqno: int
    backlog: int
    changes_read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VbucketStatistics:
    """One vbucket: its state, its seqnos and what it holds."""

    number: int
    state: str
    vbucket_uuid: int
    high_seqno: int
    persisted_seqno: int
    purge_seqno: int
    floor_seqno: int
    snapshot_start: int
    snapshot_end: int
    items: int
    tombstones: int
    evicted_items: int
    memory_bytes: int
    history_bytes: int
    queue_bytes: int
    cursors: tuple[CursorStatistics, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStatistics:
    """The bucket; numbers that exist per vbucket too are the sum over the vbuckets."""

    store: str
    items: int
    #: The items in active vbuckets; the others are copies.
    active_items: int
    tombstones: int
    #: Share of the live items whose value is in memory.
    resident_ratio: float
    memory_bytes: int
    history_bytes: int
    quota_bytes: int
    disk_bytes: int
    queue_bytes: int
    queue_age_s: float
    commits: int
    bytes_written: int
    evicted_bytes: int
    #: Why writes are refused, or empty.
    refusal: str
    operations: dict[str, int]


def vbucket_statistics(vbucket: "Vbucket") -> VbucketStatistics:
    """One vbucket, as it is now."""
    table, position = vbucket.table, vbucket.position
    return VbucketStatistics(
        number=vbucket.number,
        state=vbucket.state.value,
        vbucket_uuid=vbucket.failover_log.newest.vbucket_uuid,
        high_seqno=position.seqno,
        persisted_seqno=table.persisted_seqno,
        purge_seqno=table.purge_seqno,
        floor_seqno=vbucket.floor_seqno,
        snapshot_start=position.snapshot.start,
        snapshot_end=position.snapshot.end,
        items=table.items,
        tombstones=table.tombstones,
        evicted_items=table.evicted_items,
        memory_bytes=table.memory_bytes,
        history_bytes=table.history_bytes,
        queue_bytes=table.pending_bytes,
        cursors=tuple(
            CursorStatistics(
                name=cursor.name,
                vbucket=vbucket.number,
                seqno=cursor.seqno,
                backlog=cursor.backlog,
                changes_read=cursor.changes_read,
            )
            for cursor in vbucket.cursors.values()
        ),
    )


def bucket_statistics(bucket: "Bucket") -> BucketStatistics:
    """The bucket, as it is now."""
    tables = [table for table in bucket.tables if table is not None]
    ledger = bucket.ledger
    items = sum(table.items for table in tables)
    evicted = sum(table.evicted_items for table in tables)
    return BucketStatistics(
        store=bucket.store,
        items=items,
        active_items=sum(table.items for table in tables if table.active),
        tombstones=sum(table.tombstones for table in tables),
        resident_ratio=1.0 - evicted / items if items else 1.0,
        memory_bytes=ledger.memory_bytes,
        history_bytes=ledger.history_bytes,
        quota_bytes=ledger.quota_bytes,
        disk_bytes=bucket.storage.size_bytes(),
        queue_bytes=ledger.pending_bytes,
        queue_age_s=bucket.flusher.queue_age_s,
        commits=bucket.flusher.commits,
        bytes_written=bucket.flusher.bytes_written,
        evicted_bytes=bucket.maintenance.evicted_bytes,
        refusal=ledger.refusal,
        operations={
            **bucket.operations,
            "get": ledger.gets,
            "get_miss": ledger.get_misses,
            "set": ledger.sets,
            "delete": ledger.deletes,
            "expiration": ledger.expirations,
        },
    )
