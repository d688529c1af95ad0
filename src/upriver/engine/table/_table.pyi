"""The types of the compiled item table."""

from collections.abc import Callable
from typing import final

import pyarrow as pa

Data = bytes | bytearray | memoryview

class Ledger:
    """The state that the vbuckets of a bucket share: clock, CAS, limits and counts."""

    clock: Callable[[], float]
    #: The monotonic clock of locks: the wall clock may be set back.
    ticks: Callable[[], float]
    #: Locks and unlocks are changes of their own.
    replicates_locks: bool
    #: 0 means without limit.
    quota_bytes: int
    queue_bytes_max: int
    #: Why nothing can be written now, or empty.
    refusal: str
    last_cas: int
    pending_bytes: int
    memory_bytes: int
    history_bytes: int
    gets: int
    get_misses: int
    sets: int
    deletes: int
    expirations: int
    #: Before this time no item of an active table expires and no lock ends.
    due_s: float
    #: Called when the quota is reached, to make room; returns whether there will be more room soon.
    relief: Callable[[], bool] | None
    #: Called when the first change after a flush waits for the disk.
    wake: Callable[[], object] | None
    def __init__(
        self,
        clock: Callable[[], float],
        quota_bytes: int = 0,
        queue_bytes_max: int = 0,
        ticks: Callable[[], float] | None = None,
    ) -> None: ...
    def next_cas(self, now: float) -> int:
        """A CAS above all before it: the clock's nanoseconds; the low 16 bits count while the clock stands still."""
    def follow_cas(self, cas: int) -> None:
        """Stay above a CAS that came from elsewhere."""
    def expect(self, when: float) -> None:
        """Something becomes due at this time, or earlier."""
    def may_expire(self) -> bool:
        """Whether there is room for an expiration: it is a write, and waits for the disk like the others."""
    def take_dirty(self) -> list[Table]:
        """The tables with changes that wait for the disk, each once."""

@final
class StoredItem:
    """The newest version of a key, tombstones included."""

    event: int
    value: bytes
    flags: int
    expiry: int
    datatype: int
    cas: int
    seqno: int
    rev_seqno: int
    time: int

@final
class Table:
    """One vbucket's items and history."""

    #: Whether clients may read and write; the vbucket's role decides.
    active: bool
    #: The uuid of the newest branch: with a seqno, it is the token of a mutation.
    vbucket_uuid: int
    high_seqno: int
    #: Everything up to here is on disk.
    persisted_seqno: int
    #: ``collect`` has taken everything up to here; the disk has not confirmed it yet.
    flushing_seqno: int
    #: Everything up to here is stored in blocks, from which single values can be read back.
    checkpointed_seqno: int
    snapshot_start: int
    snapshot_end: int
    #: Ends of the snapshots that were received completely since the last ``collect``.
    consistent_seqnos: list[int]
    purge_seqno: int
    #: The highest revision of any deleted key. A new key may be the return of one and must win over older versions.
    deleted_rev_seqno: int
    #: Whether it waits in the ledger's list of dirty tables.
    queued: bool
    #: Replay of groups starts at these numbers.
    records_from_group: int
    state_from_group: int
    #: key -> (CAS that the lock's owner holds, time at which the lock ends)
    locks: dict[bytes, tuple[int, float]]
    #: Called once at the next change, then forgotten.
    on_change: Callable[[], object] | None
    #: Reads the value of a seqno back from disk.
    fetch: Callable[[int], bytes] | None
    def __init__(self, vbucket: int, ledger: Ledger) -> None: ...
    @property
    def vbucket(self) -> int: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def highest_rev_seqno(self) -> int:
        """The highest revision of any key; when all keys are dropped it becomes ``deleted_rev_seqno``."""
    @property
    def items(self) -> int: ...
    @property
    def tombstones(self) -> int: ...
    @property
    def evicted_items(self) -> int:
        """Live items whose value is only on disk."""
    @property
    def evicted(self) -> int:
        """Versions whose value is only on disk."""
    @property
    def memory_bytes(self) -> int: ...
    @property
    def history_bytes(self) -> int:
        """Bytes of the superseded versions."""
    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for the disk."""
    @property
    def consistent_seqno(self) -> int:
        """The last seqno at which this copy was consistent."""
    def get(self, key: bytes, /) -> StoredItem:
        """The item. An expired item becomes an expiration here, if there is room."""
    def set(
        self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, cas: int = 0, datatype: int = 0
    ) -> tuple[int, int]:
        """Store a value; with a CAS, only over that version. Returns CAS and seqno."""
    def delete(self, key: bytes, cas: int = 0) -> tuple[int, int]:
        """Leave a tombstone. Returns CAS and seqno."""
    def find(self, key: bytes, value: bool = True) -> StoredItem | None:
        """The newest version of the key, tombstone or not, expired or not.

        Without ``value`` nothing is read from disk, and the item's value is empty.
        """
    def store(
        self,
        event: int,
        key: bytes,
        value: bytes,
        flags: int = 0,
        expiry: int = 0,
        datatype: int = 0,
        cas: int = 0,
        rev_seqno: int = 0,
        seqno: int = 0,
        ttl: int = 255,
    ) -> tuple[int, int]:
        """Append a change without checks other than those of room. A CAS, revision or seqno of 0 means the next one.

        ``expiry`` is absolute; for a deletion it is the second at which it happened. Returns CAS and seqno.
        """
    def next_rev_seqno(self, key: bytes) -> int:
        """The revision that the next change of the key gets."""
    def expire(self, key: bytes) -> bool:
        """Whether the item has expired. It becomes an expiration, once, if there is room."""
    def expired(self, after: int) -> tuple[list[bytes], int]:
        """Expired keys among the records that follow ``after``, and where to continue; 0 at the end.

        A call with 0 also drops the locks that have ended.
        """
    def lock(self, key: bytes, cas: int, until: float) -> None:
        """Until this time, only a client that knows the CAS may change the key."""
    def due(self) -> float:
        """Before this time nothing expires here and no lock ends."""
    def end_locks(self) -> None:
        """Forget locks that have ended; one call looks at a limited number."""
    def live_keys(self) -> list[bytes]:
        """The keys of all live items, in no particular order."""
    def smallest_keys(self, start: bytes, limit: int) -> list[bytes]:
        """The first ``limit`` keys of live items from ``start`` on, in order."""
    def holds(self, key: bytes) -> bool:
        """Whether there is a live item with that key."""
    def random_key(self) -> bytes | None:
        """The key of a live item; all have the same chance."""
    def apply_frames(self, frames: Data, ttl: int = 255) -> int:
        """Append a run of `dcp` change frames of this vbucket, inside the announced snapshot; returns their number.

        Everything in the frames is kept except extended metadata. At a bad frame it stops: the changes before it are
        applied, and a note of the error says how many. ``on_change`` is called once.
        """
    def apply_batch(self, batch: pa.RecordBatch, ttl: int = 255) -> int:
        """The same for the rows of a batch in the columns of ``model.CHANGES``."""
    def read(
        self,
        after: int,
        upto: int,
        at: int,
        max_bytes: int,
        opaque: int = 0,
        every: bool = False,
        keys_only: bool = False,
        prefix: bytes = b"",
        block: Data | None = None,
    ) -> tuple[bytes, int, int, int, int]:
        """Frames of the changes in (after, upto] that are visible at snapshot ``at``, or of every version.

        Returns the frames, their number, the seqno up to which the range is done, the seqno of the last change, and the
        number of expirations. Evicted values come from ``block``, the stored records around them. At least one
        record is returned if there is one, however large.
        """
    def read_records(
        self, after: int, upto: int, at: int, max_bytes: int, keys_only: bool = False, block: Data | None = None
    ) -> tuple[bytes, int, int]:
        """The same as records, which also hold the time of the change and its TTL."""
    def read_into(
        self,
        buffer: bytearray | memoryview,
        after: int,
        upto: int,
        at: int,
        opaque: int = 0,
        every: bool = False,
        keys_only: bool = False,
        prefix: bytes = b"",
        block: Data | None = None,
    ) -> tuple[int, int, int, int, int]:
        """Like ``read``, but into a buffer. The first number is the bytes used; 0 if the next record does not fit."""
    def read_columns(
        self,
        after: int,
        upto: int,
        at: int,
        max_bytes: int,
        every: bool = False,
        keys_only: bool = False,
        prefix: bytes = b"",
        block: Data | None = None,
    ) -> tuple[pa.RecordBatch, int]:
        """The same as ``read`` as an Arrow batch, with the seqno up to which the range is done."""
    def first_evicted(self, after: int, upto: int) -> int:
        """The first seqno in (after, upto] whose value is only on disk, or 0."""
    def records(self, after: int, upto: int, max_bytes: int) -> tuple[bytes, int]:
        """Complete records in (after, upto] for the disk, and the last seqno among them (``after`` if none)."""
    def load(self, data: Data) -> int:
        """Load stored records, in order, and return their number; those up to the high seqno are skipped."""
    def retain(self, data: Data, tombstones_to: int) -> bytes:
        """The records of a stored block that memory still holds: compaction on disk.

        A tombstone above ``tombstones_to`` stays even if memory has purged it: older versions of its key may still
        be in blocks that this pass has left behind, and would become current again.
        """
    def committed(self) -> None:
        """The disk confirms the last ``collect``."""
    def truncate(self, seqno: int) -> None:
        """Return to the state at ``seqno``: drop the later changes; the versions that they superseded are current."""
    def clear(self) -> None:
        """Forget everything except the revisions, which must go on growing."""
    def discard(self) -> None:
        """Forget everything and release all memory, including the index."""
    def sweep(self, after: int, floor: int, purge_to: int, purge_before: int, evict_to: int) -> tuple[int, int]:
        """One step over the records that follow ``after``: drop, purge and evict.

        Drops versions superseded at or below ``floor``, tombstones up to ``purge_to`` that are older than the second
        ``purge_before``, and values up to ``evict_to`` that were not read since the last sweep. Returns where to
        continue (0 at the end) and the bytes of memory freed.
        """
    def purgeable(self, after: int, purge_to: int, purge_before: int) -> tuple[int, int]:
        """The highest tombstone that a sweep step would purge (0 if none), and where to continue."""
    def seqno_before(self, time: int, upto: int) -> int:
        """The last seqno older than ``time``, at most ``upto``, before the first record that is not older.

        Records with a time in the future are skipped.
        """
    def visible_end(self, after: int, upto: int, most: int, records_max: int) -> tuple[int, int]:
        """The last end at which at most ``most`` changes of (after, end] are visible, and how many of them are.

        It looks at ``records_max`` records at most and may end earlier for that; then fewer than ``most`` are visible.
        """
    def touch(self) -> None:
        """Note that there is something to flush, and call ``on_change``."""

def stored_value(block: Data, seqno: int) -> bytes | None:
    """The value of one change in a stored block."""

def collect(tables: list[Table], with_records: bool = True, room: bytearray | None = None) -> memoryview:
    """One group for the disk: a directory, then the records of each table that no group has held yet.

    The group is written into ``room`` if that is large enough, else into a new buffer. ``flushing_seqno`` says what
    was taken until ``committed`` confirms it; a group that never reached the disk is collected again. A group is one
    moment of all tables; later writes are left for the next group.
    """

def replay(number: int, group: Data, tables: list[Table | None]) -> None:
    """Load a stored group into the tables that are not newer than it."""
