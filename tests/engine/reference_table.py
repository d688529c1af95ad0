"""The item table in plain Python: the reference that parity tests compare the compiled one with.

It has the same names, gives the same answers and writes the same bytes.

Theory of operation. Records are in the order of their seqnos, in one append-only list; a dictionary leads from each
key to its newest record, tombstones included. A change never alters an older record except for one field:
``superseded_by`` names the seqno that replaced it. A record is visible at snapshot S when its seqno is at most S and it
is not superseded at or below S, so every past state that is still retained can be read at any time without a copy or a
lock. Sweeping drops versions that no retained state can see.

One writer at a time drives the table; the flusher's thread only calls ``collect`` and ``records``.
"""

import dataclasses
import functools
import heapq
import math
import operator
import random
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import pyarrow as pa

from upriver.engine.table.group_format import GROUP_BOUNDS, GROUP_ENTRY, GROUP_HEADER, WROTE_ITSELF
from upriver.engine.table.limits import KEY_BYTES_MAX, LOCKED_CAS, VALUE_BYTES_MAX, absolute
from upriver.errors import (
    CorruptData,
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    Locked,
    NotMyVbucket,
    OutOfMemory,
    OutOfOrder,
    TemporaryFailure,
    TooBig,
    UpriverError,
    WireError,
)
from upriver.model import (
    CHANGES,
    DELETION_EXTRAS,
    EVENTS,
    HEADER,
    MAGIC,
    MUTATION_EXTRAS,
    OPAQUE_OFFSET,
    OPCODES,
    PREFIX,
    SEQNO_MAX,
    TTL_MAX,
    Change,
    Event,
    Record,
    aligned,
    change_batch,
    pack,
    size_at,
    unpack,
)

#: How many locks a step looks at: some ten milliseconds' work.
LOCKS_A_STEP: Final = 50_000
REV_SEQNO_MAX: Final = 2**64 - 1
#: A CAS from outside moves our clock only below this, so that no client can push it to the end of its range.
FOLLOWED_CAS_MAX: Final = 2**63

#: How long the extras of a received change may be: the deletion's second form and the expiration's first tell its time.
EXTRAS_SIZES: Final = {Event.MUTATION: (31,), Event.DELETION: (18, 21), Event.EXPIRATION: (20, 18)}

#: Deletions may exceed the quota by this part of it.
DELETIONS_PART: Final = 16

#: How many records a sweep looks at in one call.
SWEEP_RECORDS: Final = 1024
#: What a record and its place in the index cost beyond the record's own bytes.
INDEX_BYTES: Final = 16


def with_reserve(quota_bytes: int) -> int:
    """What memory may hold with the deletions, which make room in the end."""
    return quota_bytes + quota_bytes // DELETIONS_PART


class Ledger:
    """What the vbuckets of a bucket share: the clock, the CAS, the budgets and the counts."""

    def __init__(
        self,
        clock: Callable[[], float],
        quota_bytes: int = 0,
        queue_bytes_max: int = 0,
        ticks: Callable[[], float] | None = None,
    ) -> None:
        self.clock = clock
        self.ticks = clock if ticks is None else ticks
        self.replicates_locks = False
        #: 0 means without limit.
        self.quota_bytes = quota_bytes
        self.queue_bytes_max = queue_bytes_max
        #: Why nothing can be written now, or empty.
        self.refusal = ""
        self.last_cas = 0
        self.pending_bytes = 0
        self.memory_bytes = 0
        self.history_bytes = 0
        self.gets = 0
        self.get_misses = 0
        self.sets = 0
        self.deletes = 0
        self.expirations = 0
        #: How many changes all of them were; each knows which one it is.
        self.changes = 0
        #: Before this time no item of an active table expires and no lock ends.
        self.due_s = math.inf
        #: Called when the quota is reached, to make room; tells whether there is more soon.
        self.relief: Callable[[], bool] | None = None
        #: Called when the first change after a flush waits for the disk.
        self.wake: Callable[[], object] | None = None
        self._dirty: deque[Table] = deque()

    def next_cas(self, now: float) -> int:
        """A CAS above all before it: the clock's nanoseconds, whose low 16 bits count where it stands."""
        self.last_cas = max(self.last_cas + 1, int(now * 1e9) & ~0xFFFF)
        return self.last_cas

    def follow_cas(self, cas: int) -> None:
        """Stay above a CAS that came from elsewhere."""
        if self.last_cas < cas < FOLLOWED_CAS_MAX:
            self.last_cas = cas

    def expect(self, when: float) -> None:
        """An expiry, or the end of a lock, is due at this time; an earlier one stays the next."""
        self.due_s = min(self.due_s, when)

    def may_expire(self) -> bool:
        """Whether there is room for an expiration: it is a write, and waits for the disk as the others do.

        Who meets an item that is past its time cannot be refused for that, so it is left for later then.
        """
        queue_full = 0 < self.queue_bytes_max <= self.pending_bytes
        return not (self.refusal or queue_full or 0 < with_reserve(self.quota_bytes) <= self.memory_bytes)

    def take_dirty(self) -> "list[Table]":
        """The tables with changes that wait for the disk, each once."""
        tables = []
        while self._dirty:
            table = self._dirty.popleft()
            table.queued = False
            tables.append(table)
        return tables


@dataclass(slots=True, eq=False)
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


class _Entry:
    """A record in memory; ``value`` is None where it was evicted."""

    __slots__ = (
        "cas",
        "datatype",
        "event",
        "expiry",
        "flags",
        "key",
        "number",
        "referenced",
        "rev_seqno",
        "seqno",
        "size",
        "superseded_by",
        "time",
        "ttl",
        "value",
    )

    def __init__(self, record: Record) -> None:
        change = record.change
        self.superseded_by = 0
        self.time = record.time
        self.ttl = record.ttl
        self.event = change.event
        self.seqno = change.seqno
        self.rev_seqno = change.rev_seqno
        self.cas = change.cas
        self.flags = change.flags
        self.expiry = change.expiry
        self.datatype = change.datatype
        self.key = change.key
        self.value: bytes | None = change.value
        self.referenced = False
        #: Which change of its ledger it was; 0 came from disk.
        self.number = 0
        extras = {Event.MUTATION: 31, Event.DELETION: 18, Event.EXPIRATION: 20}[change.event]
        self.size = aligned(PREFIX.size + HEADER.size + extras + len(change.key) + len(change.value))

    def pack(self, vbucket: int, value: bytes, datatype: int, lock_time: int = 0) -> bytes:
        change = Change(
            vbucket=vbucket,
            event=self.event,
            seqno=self.seqno,
            rev_seqno=self.rev_seqno,
            cas=self.cas,
            flags=self.flags,
            expiry=self.expiry,
            lock_time=lock_time,
            datatype=datatype,
            key=self.key,
            value=value,
        )
        return pack(Record(change=change, time=self.time, ttl=self.ttl))

    def stored(self, vbucket: int) -> bytes:
        """The bytes for the disk: never superseded there, a reader finds out while it loads."""
        assert self.value is not None
        return self.pack(vbucket, self.value, self.datatype).ljust(self.size, b"\0")


class Table:
    """One vbucket's items and history."""

    def __init__(self, vbucket: int, ledger: Ledger) -> None:
        self.vbucket = vbucket
        self.ledger = ledger
        #: Clients may read and write; the vbucket's state decides.
        self.active = False
        #: Of the newest branch in the vbucket's failover log: with a seqno, the token of a mutation.
        self.vbucket_uuid = 0
        self.high_seqno = 0
        #: Everything up to here is on disk.
        self.persisted_seqno = 0
        #: What ``collect`` has taken and the disk has not confirmed yet.
        self.flushing_seqno = 0
        #: Everything up to here is stored in blocks, from which single values can be read back.
        self.checkpointed_seqno = 0
        self.snapshot_start = 0
        self.snapshot_end = 0
        #: Ends of the snapshots that were received completely since the last ``collect``.
        self.consistent_seqnos: list[int] = []
        self.purge_seqno = 0
        #: The highest revision of all keys that are gone. A new key may be one of them, and must win over its old
        #: versions elsewhere.
        self.deleted_rev_seqno = 0
        #: What any key has or had; when all are dropped at once it becomes the one above.
        self.highest_rev_seqno = 0
        self.items = 0
        self.tombstones = 0
        #: Live items whose value is on disk only, and how many versions in all are.
        self.evicted_items = 0
        self.evicted = 0
        self.memory_bytes = 0
        self.history_bytes = 0
        self.pending_bytes = 0
        self.queued = False
        #: Replay of groups starts at these numbers.
        self.records_from_group = 0
        self.state_from_group = 0
        #: key -> (CAS that the lock's owner holds, when it ends)
        self.locks: dict[bytes, tuple[int, float]] = {}
        #: Called once at the next change, then forgotten.
        self.on_change: Callable[[], object] | None = None
        #: Reads a value back from disk.
        self.fetch: Callable[[int], bytes] | None = None
        self._records: list[_Entry] = []
        self._index: dict[bytes, _Entry] = {}
        self._flushing_bytes = 0
        self._flushing_points = 0

    @property
    def consistent_seqno(self) -> int:
        """The last seqno at which this copy was consistent."""
        return self.high_seqno if self.active or self.high_seqno == self.snapshot_end else self.snapshot_start

    # What clients do most.

    def get(self, key: bytes, /) -> StoredItem:
        """The item; an expired one turns into an expiration here, if there is room."""
        self._check_active()
        self.ledger.gets += 1
        entry = self._alive(key)
        if entry is None:
            self.ledger.get_misses += 1
            raise KeyNotFound(vbucket=self.vbucket)
        entry.referenced = True
        item = self._item(entry)
        if self.locks and self._lock_of(key) is not None:
            item.cas = LOCKED_CAS
        return item

    def set(
        self, key: bytes, value: bytes, flags: int = 0, expiry: int = 0, cas: int = 0, datatype: int = 0
    ) -> tuple[int, int]:
        """Store the value whatever was there, or with a CAS only over that very version: (CAS, seqno)."""
        self._check_numbers(flags, expiry, datatype, cas)
        self._check_active()
        self.ledger.sets += 1
        self._check_room(key, value)
        entry = self._alive(key)
        self._check_cas(key, entry, cas)
        return self._write(Event.MUTATION, key, value, flags, self._absolute(expiry), datatype)

    def delete(self, key: bytes, cas: int = 0) -> tuple[int, int]:
        """Leave a tombstone: (CAS, seqno)."""
        self._check_numbers(cas=cas)
        self._check_active()
        self.ledger.deletes += 1
        self._check_room(key, b"", Event.DELETION)
        entry = self._alive(key)
        if entry is None:
            raise KeyNotFound(vbucket=self.vbucket)
        self._check_cas(key, entry, cas)
        return self._write(Event.DELETION, key, b"", 0, 0, 0)

    # What the other operations are made of.

    def find(self, key: bytes, value: bool = True) -> StoredItem | None:
        """The newest version of the key, tombstone or not, expired or not.

        Where only the rest of it is wanted nothing is read from disk: the ``value`` is left empty.
        """
        entry = self._index.get(key)
        return None if entry is None else self._item(entry, value)

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
        ttl: int = TTL_MAX,
    ) -> tuple[int, int]:
        """Append a change; what is 0 (CAS, revision, seqno) gets the next one. No checks but those of room.

        ``expiry`` is absolute, and of a deletion the second at which it happened.
        """
        self._check_numbers(flags, expiry, datatype, cas, rev_seqno, ttl)
        self._check_room(key, value, event)
        return self._write(event, key, value, flags, expiry, datatype, cas, rev_seqno, seqno, ttl)

    def next_rev_seqno(self, key: bytes) -> int:
        """The revision that the next change of the key gets.

        What comes from elsewhere may have the highest that there is; then the CAS alone decides.
        """
        old = self._index.get(key)
        return min(REV_SEQNO_MAX, 1 + (old.rev_seqno if old is not None else self.deleted_rev_seqno))

    def expire(self, key: bytes) -> bool:
        """Whether an item is past its time; it is turned into an expiration, once, if there is room."""
        entry = self._index.get(key)
        if not self.active or entry is None or not self._is_expired(entry):
            return False
        self._expire(entry)
        return True

    def expired(self, after: int) -> tuple[list[bytes], int]:
        """Keys past their time among the records that follow ``after``, and where to go on; 0 at the end.

        From the beginning, it drops the locks that have ended too.
        """
        if not after:
            self.end_locks()
        first = self._place(after)
        window = self._records[first : first + SWEEP_RECORDS]
        keys = [e.key for e in window if not e.superseded_by and self._is_expired(e)]
        return keys, window[-1].seqno if first + SWEEP_RECORDS < len(self._records) else 0

    def lock(self, key: bytes, cas: int, until: float) -> None:
        """Until then only a client that knows the CAS may change the key."""
        self.locks[key] = (cas, until)
        self.ledger.expect(until)

    def due(self) -> float:
        """Before this time nothing expires here and no lock ends."""
        times = [until for _, until in self.locks.values()]
        if self.active:
            times += [e.expiry for e in self._index.values() if e.event == Event.MUTATION and e.expiry]
        return min(times, default=math.inf)

    def end_locks(self) -> None:
        """Forget the locks that have ended, as far as it looks at once; those that have not wait behind the others."""
        now = self.ledger.clock()
        for key in list(islice(self.locks, LOCKS_A_STEP)):
            held = self.locks.pop(key)
            if held[1] > now:
                self.locks[key] = held

    def live_keys(self) -> list[bytes]:
        """The keys of all live items, in no particular order."""
        return [e.key for e in self._index.values() if e.event == Event.MUTATION and not self._is_expired(e)]

    def smallest_keys(self, start: bytes, limit: int) -> list[bytes]:
        """The first ``limit`` keys of live items from ``start`` on, in order."""
        return heapq.nsmallest(limit, (key for key in self.live_keys() if key >= start))

    def holds(self, key: bytes) -> bool:
        """Whether there is a live item of that key."""
        entry = self._index.get(key)
        return entry is not None and entry.event == Event.MUTATION and not self._is_expired(entry)

    def random_key(self) -> bytes | None:
        """The key of some live item, of each with the same chance."""
        keys = self.live_keys()
        return random.choice(keys) if keys else None

    # What other nodes send.

    def apply_frames(self, frames: bytes | bytearray | memoryview, ttl: int = TTL_MAX) -> int:
        """Append a run of `dcp` change frames of this vbucket, each inside the announced snapshot: how many.

        Everything that they came with is kept, but for extended metadata. At a bad one it stops: all before it are
        in, and the error says which one it is and, in a note, how many those are. Waiters for changes are called
        once.
        """
        return self._apply(_changes_in_frames(memoryview(frames), self.vbucket), ttl)

    def apply_batch(self, batch: pa.RecordBatch, ttl: int = TTL_MAX) -> int:
        """The same for the rows of a batch in the columns of ``model.CHANGES``."""
        if not batch.schema.equals(CHANGES):
            raise InvalidArguments("the batch does not have the columns of a batch of changes")
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise InvalidArguments(f"the batch is invalid: {error}") from None
        for column, name in zip(batch.columns, CHANGES.names, strict=True):
            if column.null_count:
                raise InvalidArguments(f"column {name} holds nulls")
        return self._apply(self._changes_in_batch(batch), ttl)

    def _changes_in_batch(self, batch: pa.RecordBatch) -> Iterator[Change]:
        for row, change in enumerate(batch.to_pylist()):
            if change["vbucket"] != self.vbucket or change["event"] not in OPCODES:
                raise InvalidArguments(
                    f"row {row} is event {change['event']} of vbucket {change['vbucket']},"
                    f" not a change of a key of vbucket {self.vbucket}",
                    vbucket=self.vbucket,
                )
            yield Change(**{**change, "event": Event(change["event"])})

    def _apply(self, changes: Iterable[Change], ttl: int) -> int:
        self._check_numbers(ttl=ttl)
        count, before = 0, self.high_seqno
        now = -1.0
        try:
            for change in changes:
                if change.seqno <= self.high_seqno:
                    raise OutOfOrder(self.vbucket, change.seqno, f"it does not follow {self.high_seqno}")
                if change.seqno > self.snapshot_end:
                    raise OutOfOrder(self.vbucket, change.seqno, f"the snapshot ends at {self.snapshot_end}")
                if change.seqno > SEQNO_MAX:
                    raise OutOfOrder(self.vbucket, change.seqno, f"seqnos end at {SEQNO_MAX}")
                self._check_room(change.key, change.value, change.event)
                now = self.ledger.clock() if now < 0 else now
                self._take(change, ttl, now)
                count += 1
        except UpriverError as error:
            error.add_note(f"{count} changes before it were applied")
            raise
        finally:
            if self.high_seqno != before:
                self.touch()
        return count

    def _take(self, change: Change, ttl: int, now: float) -> None:
        time = int(now)
        if change.event != Event.MUTATION:
            time = change.expiry or time
            change = dataclasses.replace(change, expiry=time, flags=0)
        self.ledger.follow_cas(change.cas)
        self._append_pending(_Entry(Record(change=change, time=time, ttl=ttl)))
        self.locks.pop(change.key, None)
        if change.lock_time and change.event == Event.MUTATION:
            self.lock(change.key, change.cas, now + change.lock_time)

    # History.

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
        block: bytes | memoryview | None = None,
    ) -> tuple[bytes, int, int, int, int]:
        """Frames of the changes in (after, upto] that are visible at snapshot ``at``, or of every version.

        Returns the frames, how many they are, the seqno up to which the range is done, that of the last change, and
        how many are expirations. Evicted values are taken from ``block``, the stored records around them. At least one
        record is returned if there is one, however large.
        """
        chosen, done = self._select(after, upto, at, max_bytes, every, prefix)
        frames = []
        for record in self._restored(chosen, block, keys_only):
            frame = bytearray(record[PREFIX.size :])
            struct.pack_into(">I", frame, OPAQUE_OFFSET, opaque)
            frames.append(bytes(frame))
        last = chosen[-1].seqno if chosen else after
        expirations = sum(frame[1] == OPCODES[Event.EXPIRATION] for frame in frames)
        return b"".join(frames), len(frames), done, last, expirations

    def read_records(
        self,
        after: int,
        upto: int,
        at: int,
        max_bytes: int,
        keys_only: bool = False,
        block: bytes | memoryview | None = None,
    ) -> tuple[bytes, int, int]:
        """The same as ``read`` as records, one behind the other: what a frame has no room for is there too."""
        chosen, done = self._select(after, upto, at, max_bytes, False, b"")
        records = list(self._restored(chosen, block, keys_only))
        return b"".join(records), len(records), done

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
        block: bytes | memoryview | None = None,
    ) -> tuple[int, int, int, int, int]:
        """The same as ``read`` into a buffer: how many bytes of it, then as there. A buffer that is too small for
        even one record stays empty."""
        frames, *counts = self.read(after, upto, at, len(buffer), opaque, every, keys_only, prefix, block)
        if len(frames) > len(buffer):
            return 0, 0, after, after, 0
        buffer[: len(frames)] = frames
        count, done, last, expirations = counts
        return len(frames), count, done, last, expirations

    def read_columns(
        self,
        after: int,
        upto: int,
        at: int,
        max_bytes: int,
        every: bool = False,
        keys_only: bool = False,
        prefix: bytes = b"",
        block: bytes | memoryview | None = None,
    ) -> tuple[pa.RecordBatch, int]:
        """The same as ``read`` as an Arrow batch, with the seqno up to which the range is done."""
        chosen, done = self._select(after, upto, at, max_bytes, every, prefix)
        records = self._restored(chosen, block, keys_only)
        return change_batch(unpack(record).change for record in records), done

    def first_evicted(self, after: int, upto: int) -> int:
        """The first seqno in (after, upto] whose value is on disk only, or 0."""
        if not self.evicted:
            return 0
        for entry in self._records[self._place(after) : self._place(upto)]:
            if entry.value is None:
                return entry.seqno
        return 0

    # Storage.

    def records(self, after: int, upto: int, max_bytes: int) -> tuple[bytes, int]:
        """Whole records in (after, upto] for the disk, and the last seqno among them (``after`` if none)."""
        out: list[bytes] = []
        size, last = 0, after
        stored = self._records  # one look: the flusher's thread reads while a sweep may replace the list
        for entry in stored[bisect_right(stored, after, key=_seqno) :]:
            if entry.seqno > upto or (out and size + entry.size > max_bytes):
                break
            out.append(entry.stored(self.vbucket))
            size += entry.size
            last = entry.seqno
        return b"".join(out), last

    def high_seqno_at(self, number: int) -> int:
        """The high seqno before the ledger's changes that follow this one."""
        high = self.high_seqno
        for entry in reversed(self._records):
            if entry.number <= number:
                break
            high = min(high, entry.seqno - 1)
        return high

    def load(self, data: bytes | memoryview) -> int:
        """Take in stored records, in order; those at or below the high seqno are known already."""
        offset = loaded = 0
        while offset < len(data):
            try:
                size = aligned(size_at(data, offset))
                record = unpack(data, offset)
                entry = _Entry(record)
            except (struct.error, KeyError):
                raise CorruptData("", f"a record of vbucket {self.vbucket} cannot be read") from None
            if record.change.vbucket != self.vbucket or entry.size != size or offset + size > len(data):
                raise CorruptData("", f"a record of vbucket {self.vbucket} is damaged")
            offset += entry.size
            if entry.seqno > self.high_seqno:
                self._append(entry)
                self.ledger.follow_cas(entry.cas)
                loaded += 1
        return loaded

    def retain(self, data: bytes | memoryview, tombstones_to: int) -> bytes:
        """Of a stored block, the records that memory still holds: compaction on disk.

        A tombstone above ``tombstones_to`` stays even if memory has purged it meanwhile: older versions of
        its key may still be in blocks that this pass has left behind, and would become current again.
        """
        out: list[bytes] = []
        offset = 0
        while offset < len(data):
            record, size = stored_record(data, offset)
            seqno = record.change.seqno
            place = self._place(seqno) - 1
            held = place >= 0 and self._records[place].seqno == seqno
            if held or (record.change.event != Event.MUTATION and seqno > tombstones_to):
                out.append(bytes(data[offset : offset + size]))
            offset += size
        return b"".join(out)

    def committed(self) -> None:
        """What ``collect`` took is on disk."""
        self.persisted_seqno = max(self.persisted_seqno, self.flushing_seqno)
        self._settle_pending(self._flushing_bytes)
        del self.consistent_seqnos[: self._flushing_points]
        self._flushing_bytes = self._flushing_points = 0

    # Undoing and dropping.

    def truncate(self, seqno: int) -> None:
        """Go back to the state at ``seqno``: drop what came after it, revive what that had superseded."""
        keep = self._place(seqno)
        records = self._records[:keep]
        self._reset()
        self._records = records
        for entry in records:
            if entry.superseded_by > seqno:
                entry.superseded_by = 0
            self._account(entry)
            if not entry.superseded_by:
                self._index[entry.key] = entry
        self.high_seqno = self.snapshot_start = self.snapshot_end = seqno
        self.persisted_seqno = min(self.persisted_seqno, seqno)
        self.flushing_seqno = self.persisted_seqno  # a group on its way to disk no longer counts
        self.checkpointed_seqno = min(self.checkpointed_seqno, seqno)
        self.consistent_seqnos = [s for s in self.consistent_seqnos if s <= seqno]
        self._settle_pending(self.pending_bytes)
        pending = sum(e.size for e in records[self._place(self.persisted_seqno) :])
        self.pending_bytes += pending
        self.ledger.pending_bytes += pending
        self._flushing_bytes = self._flushing_points = 0
        self.locks.clear()

    def clear(self) -> None:
        """Forget everything but the revisions, which must go on growing."""
        self.truncate(0)
        self.purge_seqno = 0
        self.deleted_rev_seqno = max(self.deleted_rev_seqno, self.highest_rev_seqno)

    def discard(self) -> None:
        """The vbucket is no more: forget everything and give back all memory, the index too."""
        self.clear()

    def sweep(self, after: int, floor: int, purge_to: int, purge_before: int, evict_to: int) -> tuple[int, int]:
        """One step over the records that follow ``after``: drop, purge and evict.

        Drops versions superseded at or below ``floor``; tombstones up to ``purge_to`` that are older than
        the second ``purge_before``; values up to ``evict_to`` that were not read since the last time. Returns
        where to go on (0 at the end) and the bytes of memory freed.
        """
        first = self._place(after)
        window = self._records[first : first + SWEEP_RECORDS]
        following = window[-1].seqno if first + SWEEP_RECORDS < len(self._records) else 0
        before, kept = self.memory_bytes, []
        for entry in window:
            superseded = 0 < entry.superseded_by <= floor
            purged = (
                not entry.superseded_by
                and entry.event != Event.MUTATION
                and entry.seqno <= purge_to
                and entry.seqno != self.high_seqno
                and entry.time < purge_before
            )
            if superseded or purged:
                self._account(entry, -1)
                if purged:
                    self.purge_seqno = max(self.purge_seqno, entry.seqno)
                    del self._index[entry.key]
                continue
            if entry.seqno <= evict_to and entry.value and entry.event == Event.MUTATION:
                if entry.referenced:
                    entry.referenced = False
                else:
                    self._account(entry, -1)
                    entry.value = None
                    self._account(entry)
            kept.append(entry)
        if len(kept) < len(window):
            self._records = self._records[:first] + kept + self._records[first + len(window) :]
        return following, before - self.memory_bytes

    def purgeable(self, after: int, purge_to: int, purge_before: int) -> tuple[int, int]:
        """The highest tombstone that a sweep step would purge (0 if none), and where to go on."""
        first = self._place(after)
        window = self._records[first : first + SWEEP_RECORDS]
        found = [
            e.seqno
            for e in window
            if not e.superseded_by
            and e.event != Event.MUTATION
            and e.seqno <= purge_to
            and e.seqno != self.high_seqno
            and e.time < purge_before
        ]
        return max(found, default=0), window[-1].seqno if first + SWEEP_RECORDS < len(self._records) else 0

    def seqno_before(self, time: int, upto: int) -> int:
        """The last seqno older than ``time``, at most ``upto``, before the first record that is not.

        A record from the future tells nothing of its age and is passed over: the clock went back, or a
        deletion came with such a time.
        """
        last, now = 0, self.ledger.clock()
        for entry in self._records:
            if entry.seqno > upto or time <= entry.time <= now:
                break
            if entry.time < time:
                last = entry.seqno
        return last

    def visible_end(self, after: int, upto: int, most: int, records_max: int) -> tuple[int, int]:
        """The last end at which at most ``most`` changes of (after, end] are visible, and how many of them are."""
        entries = [entry for entry in self._records if after < entry.seqno <= upto]
        end, visible = max(after, upto), 0
        for number, entry in enumerate(entries):
            count = sum(not other.superseded_by or other.superseded_by > entry.seqno for other in entries[: number + 1])
            if count > most:
                return entry.seqno - 1, visible
            if number == records_max:
                return entries[number - 1].seqno if number else after, visible
            visible = count
        return end, visible

    # Inside.

    def _check_active(self) -> None:
        if not self.active:
            raise NotMyVbucket(vbucket=self.vbucket)

    def _check_cas(self, key: bytes, entry: _Entry | None, cas: int) -> None:
        if self.locks:
            held = self._lock_of(key)
            if held is not None:
                if cas != held[0]:
                    raise Locked(vbucket=self.vbucket)
                del self.locks[key]
                return
        if cas:
            if entry is None:
                raise KeyNotFound(vbucket=self.vbucket)
            if entry.cas != cas:
                raise KeyExists(vbucket=self.vbucket)

    def _lock_of(self, key: bytes) -> tuple[int, float] | None:
        held = self.locks.get(key)
        if held is not None and held[1] <= self.ledger.clock():
            del self.locks[key]
            return None
        return held

    def _alive(self, key: bytes) -> _Entry | None:
        entry = self._index.get(key)
        if entry is None or entry.event != Event.MUTATION:
            return None
        if self._is_expired(entry):
            self._expire(entry)
            return None
        return entry

    def _is_expired(self, entry: _Entry) -> bool:
        return entry.event == Event.MUTATION and 0 < entry.expiry <= self.ledger.clock()

    def _expire(self, entry: _Entry) -> None:
        if self.ledger.may_expire():
            self.ledger.expirations += 1
            self.locks.pop(entry.key, None)
            self._write(Event.EXPIRATION, entry.key, b"", 0, 0, 0)

    def _absolute(self, expiry: int) -> int:
        return absolute(expiry, self.ledger.clock())

    def _check_numbers(
        self, flags: int = 0, expiry: int = 0, datatype: int = 0, cas: int = 0, rev_seqno: int = 0, ttl: int = TTL_MAX
    ) -> None:
        for number, bits in ((flags, 32), (expiry, 32), (datatype, 8), (cas, 64), (rev_seqno, 64), (ttl, 8)):
            if not 0 <= operator.index(number) < 1 << bits:
                raise InvalidArguments(f"{number} is not a number from 0 to {(1 << bits) - 1}", vbucket=self.vbucket)

    def _check_room(self, key: bytes, value: bytes, event: int = Event.MUTATION) -> None:
        ledger = self.ledger
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise InvalidArguments(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}", vbucket=self.vbucket)
        if len(value) > VALUE_BYTES_MAX:
            raise TooBig(vbucket=self.vbucket)
        if ledger.refusal:
            raise TemporaryFailure(ledger.refusal, vbucket=self.vbucket)
        if 0 < ledger.queue_bytes_max <= ledger.pending_bytes:
            raise TemporaryFailure("the queue to disk is full", vbucket=self.vbucket)
        if 0 < ledger.quota_bytes <= ledger.memory_bytes:
            soon = ledger.relief is not None and ledger.relief()
            # Where nothing can be evicted only deletions make room, once compaction has dropped what they ended.
            limit = ledger.quota_bytes if event == Event.MUTATION else with_reserve(ledger.quota_bytes)
            if limit <= ledger.memory_bytes:
                if soon:
                    raise TemporaryFailure("memory is full until more is on disk", vbucket=self.vbucket)
                raise OutOfMemory(vbucket=self.vbucket)

    def _write(
        self,
        event: int,
        key: bytes,
        value: bytes,
        flags: int,
        expiry: int,
        datatype: int,
        cas: int = 0,
        rev_seqno: int = 0,
        seqno: int = 0,
        ttl: int = TTL_MAX,
    ) -> tuple[int, int]:
        ledger, now = self.ledger, self.ledger.clock()
        given = seqno != 0  # a change received from elsewhere keeps all that it came with
        if event == Event.MUTATION and not given:
            self._alive(key)
        if cas or given:
            ledger.follow_cas(cas)
        else:
            cas = ledger.next_cas(now)
        if not rev_seqno and not given:
            rev_seqno = self.next_rev_seqno(key)
        seqno = seqno or self.high_seqno + 1
        time = int(now)
        if event != Event.MUTATION:
            expiry = time = expiry or time
        change = Change(
            vbucket=self.vbucket,
            event=Event(event),
            seqno=seqno,
            rev_seqno=rev_seqno,
            cas=cas,
            flags=flags,
            expiry=expiry,
            datatype=datatype,
            key=key,
            value=value,
        )
        self._append_pending(_Entry(Record(change=change, time=time, ttl=ttl)))
        self.touch()
        return cas, seqno

    def _append_pending(self, entry: _Entry) -> None:
        self.ledger.changes += 1
        entry.number = self.ledger.changes
        self._append(entry)
        self.pending_bytes += entry.size
        self.ledger.pending_bytes += entry.size

    def touch(self) -> None:
        """Something is to be flushed and seen."""
        if not self.queued:
            self.queued = True
            first = not self.ledger._dirty
            self.ledger._dirty.append(self)
            if first and self.ledger.wake is not None:
                self.ledger.wake()
        if self.on_change is not None:
            called, self.on_change = self.on_change, None
            called()

    def _append(self, entry: _Entry) -> None:
        old = self._index.get(entry.key)
        if old is not None:
            self._account(old, -1)
            old.superseded_by = entry.seqno
            self._account(old)
        if entry.event == Event.MUTATION and entry.expiry:
            self.ledger.expect(entry.expiry)
        self.highest_rev_seqno = max(self.highest_rev_seqno, entry.rev_seqno)
        if entry.event != Event.MUTATION:
            self.deleted_rev_seqno = max(self.deleted_rev_seqno, entry.rev_seqno)
        self._index[entry.key] = entry
        self._records.append(entry)
        self._account(entry)
        self.high_seqno = entry.seqno

    def _account(self, entry: _Entry, sign: int = 1) -> None:
        """Count an entry in, or with -1 out, as what it is now."""
        memory = entry.size - (len_of_evicted(entry) if entry.value is None else 0) + INDEX_BYTES
        self.memory_bytes += sign * memory
        self.ledger.memory_bytes += sign * memory
        if entry.value is None:
            self.evicted += sign
        if entry.superseded_by:
            self.history_bytes += sign * entry.size
            self.ledger.history_bytes += sign * entry.size
        elif entry.event == Event.MUTATION:
            self.items += sign
            if entry.value is None:
                self.evicted_items += sign
        else:
            self.tombstones += sign

    def _reset(self) -> None:
        for entry in self._records:
            self._account(entry, -1)
        self._records, self._index = [], {}

    def _settle_pending(self, size: int) -> None:
        self.pending_bytes -= size
        self.ledger.pending_bytes -= size

    def _item(self, entry: _Entry, value: bool = True) -> StoredItem:
        return StoredItem(
            entry.event,
            self._value(entry) if value else b"",
            entry.flags,
            entry.expiry,
            entry.datatype,
            entry.cas,
            entry.seqno,
            entry.rev_seqno,
            entry.time,
        )

    def _value(self, entry: _Entry) -> bytes:
        if entry.value is not None:
            return entry.value
        if self.fetch is None:
            raise TemporaryFailure("the value is on disk, but the bucket has no disk", vbucket=self.vbucket)
        return self.fetch(entry.seqno)

    def _place(self, after: int) -> int:
        return bisect_right(self._records, after, key=_seqno)

    def _select(
        self, after: int, upto: int, at: int, max_bytes: int, every: bool, prefix: bytes
    ) -> tuple[list[_Entry], int]:
        chosen: list[_Entry] = []
        size, last = 0, after
        for entry in self._records[self._place(after) :]:
            if entry.seqno > upto:
                break
            if not entry.key.startswith(prefix):
                pass
            elif every or not entry.superseded_by or entry.superseded_by > at:
                if chosen and size + entry.size > max_bytes:
                    return chosen, last
                chosen.append(entry)
                size += entry.size
            last = entry.seqno
        return chosen, upto

    def _restored(self, chosen: Sequence[_Entry], block: bytes | memoryview | None, keys_only: bool) -> Iterable[bytes]:
        values = stored_values(bytes(block)) if block is not None else {}
        for entry in chosen:
            value = b"" if keys_only else entry.value
            if value is None:
                if entry.seqno not in values:
                    raise CorruptData("", f"the value of change {entry.seqno} is not on disk")
                value = values[entry.seqno]
            datatype = 0 if keys_only else entry.datatype
            yield entry.pack(self.vbucket, value, datatype, self._lock_time(entry))

    def _lock_time(self, entry: _Entry) -> int:
        if not self.locks or entry.superseded_by or entry.event != Event.MUTATION:
            return 0
        held = self._lock_of(entry.key)
        return 0 if held is None else math.ceil(held[1] - self.ledger.clock())


def _changes_in_frames(frames: memoryview, vbucket: int) -> Iterator[Change]:
    offset = 0
    while offset < len(frames):
        wrong = _malformed(frames[offset:], vbucket)
        if wrong is not None:
            raise WireError(offset + wrong[0], wrong[1], bytes(frames[offset : offset + HEADER.size]).hex(" "))
        _, opcode, key_length, extras, datatype, _, body, _, cas = HEADER.unpack_from(frames, offset)
        fields = offset + HEADER.size
        flags = expiry = lock_time = 0
        seqno, rev_seqno = struct.unpack_from(">QQ", frames, fields)
        if extras == MUTATION_EXTRAS.size:
            _, _, flags, expiry, lock_time, _, _ = MUTATION_EXTRAS.unpack_from(frames, fields)
        elif extras != DELETION_EXTRAS.size:
            (expiry,) = struct.unpack_from(">I", frames, fields + 16)
        key = fields + extras
        value, end = key + key_length, fields + body
        yield Change(
            vbucket=vbucket,
            event=EVENTS[opcode],
            seqno=seqno,
            rev_seqno=rev_seqno,
            cas=cas,
            flags=flags,
            expiry=expiry,
            lock_time=lock_time,
            datatype=datatype,
            key=bytes(frames[key:value]),
            value=bytes(frames[value : end - _meta_length(frames[offset:], opcode, extras)]),
        )
        offset = end


def _malformed(frame: memoryview, vbucket: int) -> tuple[int, str] | None:
    """The offset of an error in the frame, and what is expected there; None for a complete, valid change."""
    if len(frame) < HEADER.size:
        return 0, "a complete header"
    magic, opcode, key_length, extras, _, number, body, _, _ = HEADER.unpack_from(frame)
    if magic != MAGIC:
        return 0, f"the magic 0x{MAGIC:x}"
    if opcode not in EVENTS:
        return 1, "the opcode of a change"
    sizes = EXTRAS_SIZES[EVENTS[opcode]]
    if extras not in sizes:
        return 4, " or ".join(map(str, sizes)) + " bytes of extras"
    if number != vbucket:
        return 6, "the number of this vbucket"
    if body > len(frame) - HEADER.size:
        return 8, "a complete body"
    if body < extras + key_length:
        return 8, "a body that holds extras and key"
    if body - extras - key_length < _meta_length(frame, opcode, extras):
        return 8, "a body that holds the extended metadata"
    return None


def _meta_length(frame: memoryview, opcode: int, extras: int) -> int:
    """How many bytes of extended metadata follow the value."""
    if opcode == OPCODES[Event.MUTATION]:
        return int.from_bytes(frame[HEADER.size + 28 : HEADER.size + 30])
    return int.from_bytes(frame[HEADER.size + 16 : HEADER.size + 18]) if extras == DELETION_EXTRAS.size else 0


def _seqno(entry: _Entry) -> int:
    return entry.seqno


def len_of_evicted(entry: _Entry) -> int:
    """How many bytes the entry's record saves without its value."""
    return entry.size - aligned(PREFIX.size + HEADER.size + 31 + len(entry.key))


@functools.lru_cache(maxsize=8)
def stored_values(block: bytes) -> dict[int, bytes]:
    """The values in a stored block by seqno; those of the last few blocks are remembered, for they come in runs."""
    found, offset = {}, 0
    while offset < len(block):
        record, size = stored_record(block, offset)
        found[record.change.seqno] = record.change.value
        offset += size
    return found


def stored_record(block: bytes | memoryview, offset: int) -> tuple[Record, int]:
    """The record at that place of a stored block, and the room that it takes."""
    try:
        size = aligned(size_at(block, offset))
        record = unpack(block, offset)
    except (struct.error, KeyError):
        raise CorruptData("", "a stored record cannot be read") from None
    if offset + size > len(block):
        raise CorruptData("", "a stored record cannot be read")
    return record, size


def stored_value(block: bytes, seqno: int) -> bytes | None:
    """The value of one change in a stored block."""
    return stored_values(block).get(seqno)


def collect(tables: list[Table], with_records: bool = True, room: bytearray | None = None) -> memoryview:
    """One group for the disk: a directory, then the records of each table that no group has held yet.

    Where it is compiled it lies in ``room`` if that is large enough, else in a new one.

    ``flushing_seqno`` says what was taken until ``committed`` confirms it; a group that never reached
    the disk is simply collected again. A group is one moment of all tables: what is written meanwhile is left for the
    next one.
    """
    directory, bodies = [], []
    moment = tables[0].ledger.changes if tables else 0
    for table in tables:
        high = table.high_seqno_at(moment)
        body, _ = table.records(table.persisted_seqno, high, 2**63)
        flags = WROTE_ITSELF if table.active else 0
        directory.append(GROUP_ENTRY.pack(table.vbucket, flags, len(body), high))
        if not table.active:
            points = table.consistent_seqnos
            directory.append(GROUP_BOUNDS.pack(table.snapshot_start, table.snapshot_end, len(points)))
            directory.append(struct.pack(f"<{len(points)}Q", *points))
        if with_records:
            bodies.append(body)
        table.flushing_seqno = high
        table._flushing_bytes = len(body)
        table._flushing_points = 0 if table.active else len(table.consistent_seqnos)
    entries = b"".join(directory)
    return memoryview(bytearray().join((GROUP_HEADER.pack(len(tables), len(entries)), entries, *bodies)))


def replay(number: int, group: bytes | memoryview, tables: list[Table | None]) -> None:
    """Take a stored group back in, for the tables that are not newer than it."""
    try:
        count, size = GROUP_HEADER.unpack_from(group, 0)
        offset, body = GROUP_HEADER.size, GROUP_HEADER.size + size
        for _ in range(count):
            vbucket, flags, length, high = GROUP_ENTRY.unpack_from(group, offset)
            offset += GROUP_ENTRY.size
            start = end = high
            points: tuple[int, ...] = ()
            if not flags & WROTE_ITSELF:
                start, end, number_of_points = GROUP_BOUNDS.unpack_from(group, offset)
                offset += GROUP_BOUNDS.size
                points = struct.unpack_from(f"<{number_of_points}Q", group, offset)
                offset += 8 * number_of_points
            if body + length > len(group):
                raise CorruptData("", f"group {number} ends too early")
            table = tables[vbucket] if vbucket < len(tables) else None
            if table is not None and number >= table.records_from_group:
                table.load(group[body : body + length])
            if table is not None and number >= table.state_from_group:
                table.high_seqno = max(table.high_seqno, high)
                table.snapshot_start, table.snapshot_end = start, end
                table.consistent_seqnos.extend(points)
            body += length
    except struct.error:
        raise CorruptData("", f"group {number} cannot be read") from None
