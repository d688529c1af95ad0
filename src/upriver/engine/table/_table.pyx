# cython: language_level=3, binding=False, boundscheck=False, wraparound=False
# cython: initializedcheck=False, cdivision=True
"""The items of one vbucket and their history.

Theory of operation. Records are stored in chunks of 16 to 256 KiB, in the order of their seqnos. Only a sweep moves
records: it rewrites one chunk and fills up the chunk before it. An open-addressing index of 8-byte slots leads from a
key to its newest record. Reading history walks the chunks and looks at `superseded_by` only, never at the index.

Everything runs under the interpreter's lock, and no Python code runs while a pointer into a chunk is held: the clock is
asked and buffers are acquired before records are picked, and objects that the collector tracks are made afterwards. So a
call is atomic for the flusher's thread, unless it asks the disk or makes room, which happens before or after its work.

The methods of Table that do more than a few lines of work call functions of the included files. All files become one C
unit, so the compiler can inline across them.
"""

import os
import random
from itertools import islice

import pyarrow as pa

cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, int32_t, int64_t, uintptr_t
from libc.math cimport INFINITY, ceil, floor
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from upriver.errors import (
    CorruptData, InvalidArguments, KeyExists, KeyNotFound, Locked, NotMyVbucket, OutOfMemory, OutOfOrder,
    TemporaryFailure, TooBig, UpriverError, WireError,
)
from upriver.model import CHANGES

import_batch = pa.RecordBatch._import_from_c

cdef extern from "Python.h":
    PyObject *new_bytes "PyBytes_FromStringAndSize"(const char *, Py_ssize_t) except NULL
    int resize_bytes "_PyBytes_Resize"(PyObject **, Py_ssize_t) except -1
    uint64_t number_of "PyLong_AsUnsignedLongLong"(object) except? 0xFFFFFFFFFFFFFFFF
    uint64_t quick_number_of "PyLong_AsUnsignedLongLong"(object) noexcept
    void PyErr_Clear()
    object index_of "PyNumber_Index"(object)
    bint PyLong_Check(object)

cdef extern from "_record.h" nogil:
    uint16_t load_be16(const char *)
    uint32_t load_be32(const char *)
    uint64_t load_be64(const char *)
    uint64_t count_bits(const uint64_t *, uint64_t, uint64_t)
    void store_be16(char *, uint16_t)
    void store_be32(char *, uint32_t)
    void store_be64(char *, uint64_t)
    uint64_t load64(const char *)
    uint32_t load32(const char *)
    void store64(char *, uint64_t)
    void store32(char *, uint32_t)
    uint32_t align8(uint32_t)
    const char *record_key(const char *)
    uint32_t full_size(const char *)
    uint32_t record_size(const char *)
    uint64_t hash_key(const char *, size_t, uint64_t)
    void clean_registers()
    void prefetch(const void *)
    void prefetch_write(const void *)
    void fetch_ahead(const char *, const char *, const char *)
    void fetch_first(const char *, const char *)
    enum:
        R_SUPERSEDED_BY, R_TIME, R_TTL, R_MARKS, R_FRAME, R_OPCODE, R_KEY_LENGTH, R_EXTRAS_LENGTH, R_DATATYPE
        R_VBUCKET, R_BODY_LENGTH, R_OPAQUE, R_CAS, R_SEQNO, R_REV_SEQNO, R_FLAGS, R_EXPIRY, R_LOCK_TIME
        R_DELETE_TIME, R_EXTRAS, MARK_EVICTED, MARK_REFERENCED, OPCODE_MUTATION, OPCODE_DELETION, OPCODE_EXPIRATION

cdef extern from "_arena.h" nogil:
    uint32_t arena_size(uint32_t)
    char *arena_take(uint32_t, uint32_t *)
    void arena_give(char *, uint32_t)
    char *zeroed_take(size_t)
    void zeroed_give(char *, size_t)
    enum:
        PIECE_MIN, PIECE_MAX

cdef extern from "_arrow.h" nogil:
    struct ArrowArray:
        void (*release)(ArrowArray *)
    struct ChangeColumns:
        pass
    ChangeColumns *allocate_columns(size_t, char **)
    void give_block(ChangeColumns *)
    void describe_column(ChangeColumns *, int, int64_t, const char *, const char *)
    void describe_columns(ChangeColumns *, ArrowArray *, int64_t)

cdef enum:
    KEY_BYTES_MAX = 250
    VALUE_BYTES_MAX = 20 * 1024 * 1024
    LOCKS_A_STEP = 50000  # how many locks a step looks at: some ten milliseconds
    RELATIVE_EXPIRY_S_MAX = 30 * 24 * 3600
    MUTATION = 1
    DELETION = 2
    EXPIRATION = 3
    HEADER_BYTES = 24
    MUTATION_EXTRAS = 31
    DELETION_EXTRAS = 18
    TIMED_DELETION_EXTRAS = 21
    EXPIRATION_EXTRAS = 20
    TTL_MAX = 255
    EVENT_OF_OPCODE = 0x56  # the opcodes of the three events are consecutive
    SLOTS_MIN = 16
    RANDOM_TRIES = 256  # after this many, all slots are looked at
    MOVED = 1  # a slot of the old index whose key is in the new one
    BYTE_MAX = 0xFF
    PLACE_END = 1 << 23  # a slot has 20 bits for a place, in steps of 8 bytes: no record begins here or beyond
    NEVER = 0xFFFFFFFF
    WROTE_ITSELF = 1
    GROUP_HEADER = 8
    GROUP_ENTRY = 16
    GROUP_BOUNDS = 20
    RECORD_BYTES_MIN = 64
    DELETIONS_PART = 16
    INDEXED_AT_ONCE = 16
    ROWS_FIRST = 64  # the first rows tell how large the others are likely to be
    PICKED_MAX = 1 << 30
    FEW = 64  # up to this many changes are measured before they are copied; for more, room is taken unmeasured
    ROOM_MAX = 4 * 1024 * 1024

cdef uint64_t LOCKED_CAS = 0xFFFFFFFFFFFFFFFF
cdef uint64_t NUMBER_MAX = 0xFFFFFFFFFFFFFFFF
cdef uint64_t REV_SEQNO_MAX = NUMBER_MAX
cdef uint64_t SEQNO_MAX = ((<uint64_t>1) << 63) - 1
cdef uint64_t FOLLOWED_CAS_MAX = <uint64_t>1 << 63
cdef uint64_t TAG_MASK = <uint64_t>0xFFFF << 48

# The records that a read has picked, in order. All tables share it: nothing else runs between picking and copying.
cdef const char **picked = NULL
cdef size_t picked_room = 0
cdef size_t picked_bytes = 0, picked_key_bytes = 0, picked_value_bytes = 0  # the first counts complete records


cdef class Ledger:
    """The state that the vbuckets of a bucket share: clock, CAS, limits and counts."""

    def __init__(self, clock, int64_t quota_bytes=0, int64_t queue_bytes_max=0, ticks=None):
        self.clock = clock
        self.ticks = clock if ticks is None else ticks
        self.quota_bytes = quota_bytes
        self.queue_bytes_max = queue_bytes_max
        self.refusal = ""
        self.due_s = INFINITY
        self.dirty = []
        self.seed = int.from_bytes(os.urandom(8), "little")

    cdef uint64_t take_cas(self, double now):
        cdef uint64_t cas = <uint64_t>(now * 1e9) & ~<uint64_t>0xFFFF
        self.last_cas = cas if cas > self.last_cas else self.last_cas + 1
        return self.last_cas

    def next_cas(self, double now):
        """A CAS above all before it: the clock's nanoseconds; the low 16 bits count while the clock stands still."""
        return self.take_cas(now)

    def follow_cas(self, uint64_t cas):
        """Stay above a CAS that came from elsewhere."""
        if self.last_cas < cas < FOLLOWED_CAS_MAX:
            self.last_cas = cas

    def expect(self, double when):
        """Something becomes due at this time, or earlier."""
        if when < self.due_s:
            self.due_s = when

    cpdef bint may_expire(self):
        """Whether there is room for an expiration."""
        return (
            not self.refusal and not 0 < self.queue_bytes_max <= self.pending_bytes
            and not 0 < with_reserve(self.quota_bytes) <= self.memory_bytes
        )

    def take_dirty(self):
        """The tables with changes that wait for the disk, each once."""
        cdef list tables = self.dirty
        cdef Table table
        self.dirty = []
        for table in tables:
            table.queued = False
        return tables


@cython.final
@cython.freelist(256)
cdef class StoredItem:
    """The newest version of a key, tombstones included."""


@cython.final
cdef class Table:
    """One vbucket's items and history."""

    def __cinit__(self, uint16_t vbucket, Ledger ledger):
        self.vbucket = vbucket
        self.ledger = ledger
        self.consistent_seqnos = []
        self.locks = {}
        self.slots = <uint64_t *>zeroed_take(SLOTS_MIN * sizeof(uint64_t))
        if self.slots == NULL:
            raise MemoryError
        self.mask = SLOTS_MIN - 1
        self.chunk_count = 1  # number 0 stays unused: a slot is never 0
        account_memory(self, SLOTS_MIN * sizeof(uint64_t))

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self.order_count):
            arena_give(self.chunks[self.order[i]].data, self.chunks[self.order[i]].size)
        free(self.chunks)
        free(self.order)
        free(self.spare)
        if self.slots != NULL:
            zeroed_give(<char *>self.slots, (self.mask + 1) * sizeof(uint64_t))
        if self.old_slots != NULL:  # the ledger is not told: the collector may have cleared it already
            zeroed_give(<char *>self.old_slots, (self.old_mask + 1) * sizeof(uint64_t))

    @property
    def consistent_seqno(self):
        """The last seqno at which this copy was consistent."""
        return self.high_seqno if self.active or self.high_seqno == self.snapshot_end else self.snapshot_start

    # Frequent operations of clients.

    @cython.always_allow_keywords(False)  # so the interpreter calls it directly
    def get(self, bytes key not None):
        """The item. An expired item becomes an expiration here, if there is room."""
        cdef double now = -1
        cdef char *record
        cdef StoredItem item
        fetch_chunks(self)
        check_active(self)
        self.ledger.gets += 1
        record = live_record(self, key, &now)
        if record == NULL:
            self.ledger.get_misses += 1
            raise KeyNotFound(vbucket=self.vbucket)
        record[R_MARKS] |= MARK_REFERENCED
        item = make_item(self, record, True)
        if self.locks and lock_of(self, key) is not None:
            item.cas = LOCKED_CAS
        return item

    def set(self, bytes key not None, bytes value not None, flags=0, expiry=0, cas=0, datatype=0):
        """Store a value; with a CAS, only over that version. Returns CAS and seqno."""
        cdef double now
        cdef char *record
        cdef uint64_t seqno = 0, new_cas, old_cas = within(self, cas, NUMBER_MAX)
        cdef uint32_t new_flags = within(self, flags, NEVER), new_expiry = within(self, expiry, NEVER)
        cdef uint8_t new_datatype = within(self, datatype, BYTE_MAX)
        fetch_for_write(self, key)
        check_active(self)
        self.ledger.sets += 1
        check_room(self, key, value, MUTATION)
        now = self.ledger.clock()
        if old_cas or self.locks:
            record = live_record(self, key, &now)
            check_cas(self, key, record, old_cas)
        new_cas = write_change(
            self, MUTATION, key, value, new_flags, absolute(new_expiry, now), new_datatype, 0, 0, &seqno, 255, now
        )
        return new_cas, seqno

    def delete(self, bytes key not None, cas=0):
        """Leave a tombstone. Returns CAS and seqno."""
        cdef double now = -1
        cdef char *record
        cdef uint64_t seqno = 0, new_cas, old_cas = within(self, cas, NUMBER_MAX)
        check_active(self)
        self.ledger.deletes += 1
        check_room(self, key, b"", DELETION)
        record = live_record(self, key, &now)
        if record == NULL:
            raise KeyNotFound(vbucket=self.vbucket)
        check_cas(self, key, record, old_cas)
        if now < 0:
            now = self.ledger.clock()
        new_cas = write_change(self, DELETION, key, b"", 0, 0, 0, 0, 0, &seqno, 255, now)
        return new_cas, seqno

    # The parts of other operations.

    def find(self, bytes key not None, bint value=True):
        """The newest version of the key, tombstone or not, expired or not."""
        cdef char *record = lookup_bytes(self, key)
        return None if record == NULL else make_item(self, record, value)

    def store(
        self, uint8_t event, bytes key not None, bytes value not None, flags=0, expiry=0, datatype=0, cas=0,
        rev_seqno=0, uint64_t seqno=0, ttl=TTL_MAX,
    ):
        """Append a change without checks other than those of room. A CAS, revision or seqno of 0 means the next one.

        ``expiry`` is absolute; for a deletion it is the second at which it happened. Returns CAS and seqno.
        """
        cdef uint32_t new_flags = within(self, flags, NEVER), new_expiry = within(self, expiry, NEVER)
        cdef uint8_t new_datatype = within(self, datatype, BYTE_MAX), hops = within(self, ttl, TTL_MAX)
        cdef uint64_t new_cas = within(self, cas, NUMBER_MAX), revision = within(self, rev_seqno, NUMBER_MAX)
        check_room(self, key, value, event)
        if not MUTATION <= event <= EXPIRATION:
            raise ValueError(f"{event} is not a change of a key")
        new_cas = write_change(
            self, event, key, value, new_flags, new_expiry, new_datatype, new_cas, revision, &seqno, hops,
            self.ledger.clock(),
        )
        return new_cas, seqno

    def next_rev_seqno(self, bytes key not None):
        """The revision that the next change of the key gets."""
        return revision_after(self, lookup_bytes(self, key))

    def expire(self, bytes key not None):
        """Whether the item has expired. It becomes an expiration, once, if there is room."""
        return bool(self.active and expire_if_due(self, key, -1))

    def expired(self, uint64_t after):
        """Expired keys among the records that follow ``after``, and where to continue; 0 at the end."""
        return find_expired(self, after)

    def lock(self, bytes key not None, uint64_t cas, double until):
        """Until this time of the ledger's ticks, only a client that knows the CAS may change the key."""
        self.locks[key] = (cas, until)
        self.ledger.expect(until + <double>(self.ledger.clock() - self.ledger.ticks()))

    def due(self):
        """Before this time nothing expires here and no lock ends."""
        cdef double first = min((held[1] for held in self.locks.values()), default=INFINITY)
        cdef uint32_t i, expiry
        first += <double>(self.ledger.clock() - self.ledger.ticks())
        if self.active:
            for i in range(self.order_count):
                expiry = self.chunks[self.order[i]].min_expiry
                if expiry != NEVER and expiry < first:
                    first = expiry
        return first

    def end_locks(self):
        """Forget locks that have ended; one call looks at a limited number, and the live ones move to the end."""
        cdef double now = self.ledger.ticks()
        for key in list(islice(self.locks, LOCKS_A_STEP)):
            held = self.locks.pop(key)
            if held[1] > now:
                self.locks[key] = held

    def live_keys(self):
        """The keys of all live items, in no particular order."""
        return list_live_keys(self)

    def smallest_keys(self, bytes start not None, size_t limit):
        """The first ``limit`` keys of live items from ``start`` on, in order."""
        return list_smallest_keys(self, start, limit)

    def holds(self, bytes key not None):
        """Whether there is a live item with that key."""
        cdef char *record = lookup_bytes(self, key)
        return record != NULL and is_live(record, self.ledger.clock() if live_expiry(record) else 0)

    def random_key(self):
        """The key of a live item; all have the same chance."""
        return choose_key(self)

    # Receiving.

    def apply_frames(self, const uint8_t[::1] frames not None, ttl=TTL_MAX):
        """Append a run of `dcp` change frames and return their number. It stops at a bad one; those before it are applied."""
        return receive_frames(self, frames, ttl)

    def apply_batch(self, batch not None, ttl=TTL_MAX):
        """The same for the rows of a batch in the columns of ``model.CHANGES``."""
        return receive_batch(self, batch, ttl)

    # History.

    def read(
        self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, uint32_t opaque=0, bint every=False,
        bint keys_only=False, bytes prefix=b"", block=None,
    ):
        """Frames of the changes in (after, upto] that are visible at snapshot ``at``, or of every version."""
        return read_frames(self, after, upto, at, max_bytes, opaque, every, keys_only, prefix, block)

    def read_records(
        self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, bint keys_only=False, block=None,
    ):
        """The same as records, which also hold the time of the change and its TTL."""
        return read_as_records(self, after, upto, at, max_bytes, keys_only, block)

    def read_into(
        self, uint8_t[::1] buffer not None, uint64_t after, uint64_t upto, uint64_t at, uint32_t opaque=0,
        bint every=False, bint keys_only=False, bytes prefix=b"", block=None,
    ):
        """The same as ``read`` into a buffer: the bytes used, then as there; 0 if the next record does not fit."""
        return read_frames_into(self, buffer, after, upto, at, opaque, every, keys_only, prefix, block)

    def read_columns(
        self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, bint every=False, bint keys_only=False,
        bytes prefix=b"", block=None,
    ):
        """The same as ``read`` as an Arrow batch, with the seqno up to which the range is done."""
        cdef const uint8_t[::1] stored = block if block else None
        cdef uint64_t done
        cdef double now = self.ledger.ticks() if self.locks else 0
        batch = columns(
            self, after, upto, at, min(max_bytes, <size_t>PICKED_MAX), every, keys_only, prefix, stored, now, &done
        )
        return batch, done

    def first_evicted(self, uint64_t after, uint64_t upto):
        """The first seqno in (after, upto] whose value is only on disk, or 0."""
        return find_evicted(self, after, upto)

    # Storage.

    def records(self, uint64_t after, uint64_t upto, size_t max_bytes):
        """Complete records in (after, upto] for the disk, and the last seqno among them (``after`` if none)."""
        return stored_records(self, after, upto, max_bytes)

    def load(self, const uint8_t[::1] data not None):
        """Load stored records, in order, and return their number; those up to the high seqno are skipped."""
        cdef size_t size = data.shape[0]
        if not size:
            return 0
        return load_records(self, <const char *>&data[0], size)

    def retain(self, const uint8_t[::1] data not None, uint64_t tombstones_to):
        """The records of a stored block that memory still holds: compaction on disk."""
        return retained_records(self, data, tombstones_to)

    def committed(self):
        """The disk confirms the last ``collect``."""
        if self.flushing_seqno > self.persisted_seqno:
            self.persisted_seqno = self.flushing_seqno
            self.persisted_chunk = self.flushing_chunk
            self.persisted_place = self.flushing_place
        settle_pending(self, self.flushing_bytes)
        del self.consistent_seqnos[: self.flushing_points]
        self.flushing_bytes = self.flushing_points = 0

    # Rollback and sweeps.

    def truncate(self, uint64_t seqno):
        """Return to the state at ``seqno``: drop the later changes; the versions that they superseded are current again."""
        truncate_to(self, seqno)

    def clear(self):
        """Forget everything except the revisions, which must go on growing."""
        self.truncate(0)
        self.purge_seqno = 0
        self.deleted_rev_seqno = max(self.deleted_rev_seqno, self.highest_rev_seqno)

    def discard(self):
        """Forget everything and release all memory, including the index."""
        self.clear()
        account_memory(self, -self.memory_bytes)

    def sweep(self, uint64_t after, uint64_t floor, uint64_t purge_to, uint64_t purge_before, uint64_t evict_to):
        """One step over the records that follow ``after``: drop, purge and evict."""
        return sweep_next(self, after, floor, purge_to, purge_before, evict_to)

    def purgeable(self, uint64_t after, uint64_t purge_to, uint64_t purge_before):
        """The highest tombstone that a sweep step would purge (0 if none), and where to continue."""
        return find_purgeable(self, after, purge_to, purge_before)

    def seqno_before(self, uint64_t time, uint64_t upto):
        """The last seqno older than ``time``, at most ``upto``, before the first record that is not older.

        Records with a time in the future are skipped.
        """
        return find_seqno_before(self, time, upto)

    def visible_end(self, uint64_t after, uint64_t upto, uint64_t most, size_t records_max):
        """The last end at which at most ``most`` changes of (after, end] are visible, and how many of them are."""
        return find_visible_end(self, after, upto, most, records_max)

    def touch(self):
        """Note that there is something to flush, and call ``on_change``."""
        enqueue(self)

    # For compiled callers.

    cdef char *lookup(self, const char *key, size_t size, uint64_t hashed, uint64_t *where) noexcept:
        """The newest record of a key and its slot; or NULL and the free slot for it."""
        cdef uint64_t place = hashed & self.mask, slot
        cdef char *record
        while True:
            slot = self.slots[place]
            if not slot:
                where[0] = place
                return NULL if self.old_slots == NULL else fetch_old(self, key, size, hashed, place)
            if not ((slot ^ hashed) & TAG_MASK):
                record = record_at(self, slot)
                prefetch(record + 64)
                prefetch(record + 128)
                prefetch(record + 192)
                if load_be16(record + R_KEY_LENGTH) == size and not memcmp(record_key(record), key, size):
                    where[0] = place
                    return record
            place = (place + 1) & self.mask

    cdef uint64_t set_raw(
        self, const char *key, size_t key_size, const char *value, size_t value_size, uint32_t flags,
        uint32_t expiry, uint8_t datatype, double now, uint64_t *seqno
    ) except 0:
        """``set`` without a CAS and without Python objects. Returns the new CAS and sets ``seqno``.

        It makes the checks of ``set`` and raises the same errors. ``expiry`` is as the client sent it. ``now`` is the
        ledger's time; a loop over many requests asks the clock once. The bytes are copied and must not lie in a chunk.
        """
        cdef Version version
        check_active(self)
        self.ledger.sets += 1
        check_sizes(self, key_size, value_size)
        check_limits(self, MUTATION)
        if self.locks:
            name = PyBytes_FromStringAndSize(key, key_size)
            check_cas(self, name, live_record(self, name, &now), 0)
        version.event, version.datatype, version.ttl = MUTATION, datatype, TTL_MAX
        version.flags, version.expiry = flags, absolute(expiry, now)
        version.cas = version.rev_seqno = version.seqno = 0
        version.key, version.key_size = key, <uint32_t>key_size
        version.value, version.value_size = value, <uint32_t>value_size
        version.hashed = hash_key(key, key_size, self.ledger.seed)
        write_version(self, &version, now)
        seqno[0] = version.seqno
        return version.cas

    cdef int store_raw(self, Version *version, double now) except -1:
        """``store`` without Python objects: it fills in the seqno, and the CAS and the revision where they are 0.

        It makes the checks of room, and no others. The seqno is always the next one. The bytes are copied and must not
        lie in a chunk.
        """
        check_sizes(self, version.key_size, version.value_size)
        check_limits(self, version.event)
        version.seqno = 0
        version.ttl = TTL_MAX
        version.hashed = hash_key(version.key, version.key_size, self.ledger.seed)
        return write_version(self, version, now)


include "index.pxi"
include "records.pxi"
include "chunks.pxi"
include "items.pxi"
include "keys.pxi"
include "write.pxi"
include "receive.pxi"
include "rollback.pxi"
include "sweep.pxi"
include "select.pxi"
include "visible.pxi"
include "read_frames.pxi"
include "read_columns.pxi"
include "groups.pxi"
