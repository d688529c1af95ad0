# cython: language_level=3, binding=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The items of one vbucket and their history, compiled: table.py says what everything means.

Theory of operation. Records stand in chunks of 16 to 256 KiB, in the order of their seqnos; a record never
moves but in a sweep, which rewrites one chunk and fills up the one before. An open-addressing index of 8-byte slots leads from a key to
its newest record. Reading history walks the chunks and looks at `superseded_by` only, never at the index.

Everything runs under the interpreter's lock, and no Python code runs while a pointer into a chunk is held: the clock is
asked and buffers are acquired before records are picked, and objects that the collector tracks are made afterwards. So a
call is atomic for the flusher's thread, unless it asks the disk or makes room, which happens before or after its work.
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
from libc.math cimport INFINITY, floor
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from upriver.errors import (
    CorruptData, InvalidArguments, KeyExists, KeyNotFound, Locked, NotMyVbucket, OutOfMemory, OutOfOrder,
    TemporaryFailure, TooBig, UpriverError, WireError,
)
from upriver.model.batch import CHANGES

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
    # So many locks are looked at in a step, which is some ten milliseconds.
    LOCKS_A_STEP = 50000
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
    EVENT_OF_OPCODE = 0x56  # the opcodes of the three kinds follow each other as the events do
    SLOTS_MIN = 16
    RANDOM_TRIES = 256  # beyond them all slots are looked at
    MOVED = 1  # a slot of the old index whose key stands in the new one
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
    ROWS_FIRST = 64  # so many tell how large the others will be
    PICKED_MAX = 1 << 30
    FEW = 64  # so few changes are measured before they are copied; for more, room is taken without looking
    ROOM_MAX = 4 * 1024 * 1024

cdef uint64_t LOCKED_CAS = 0xFFFFFFFFFFFFFFFF
cdef uint64_t NUMBER_MAX = 0xFFFFFFFFFFFFFFFF
cdef uint64_t REV_SEQNO_MAX = NUMBER_MAX
cdef uint64_t SEQNO_MAX = ((<uint64_t>1) << 63) - 1
cdef uint64_t FOLLOWED_CAS_MAX = <uint64_t>1 << 63
cdef uint64_t TAG_MASK = <uint64_t>0xFFFF << 48

# What a read has picked, in order. One for all tables: nothing else runs between picking and copying.
cdef const char **picked = NULL
cdef size_t picked_room = 0
cdef size_t picked_bytes = 0, picked_key_bytes = 0, picked_value_bytes = 0  # first of the whole records


cdef class Ledger:
    """What the vbuckets of a bucket share: the clock, the CAS, the budgets and the counts."""

    def __init__(self, clock, int64_t quota_bytes=0, int64_t queue_bytes_max=0):
        self.clock = clock
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
        """A CAS above all before it: the clock's nanoseconds, whose low 16 bits count where it stands."""
        return self.take_cas(now)

    def follow_cas(self, uint64_t cas):
        """Stay above a CAS that came from elsewhere."""
        if self.last_cas < cas < FOLLOWED_CAS_MAX:
            self.last_cas = cas

    def expect(self, double when):
        """Something is due then, if not before."""
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
        if self.old_slots != NULL:  # without a word to the ledger: the collector may have taken it away before
            zeroed_give(<char *>self.old_slots, (self.old_mask + 1) * sizeof(uint64_t))

    @property
    def consistent_seqno(self):
        """The last seqno at which this copy was whole."""
        return self.high_seqno if self.active or self.high_seqno == self.snapshot_end else self.snapshot_start

    # What clients do most.

    @cython.always_allow_keywords(False)  # the interpreter calls it without a detour then
    def get(self, bytes key not None):
        """The item; an expired one turns into an expiration here, if there is room."""
        cdef double now = -1
        cdef char *record
        cdef StoredItem item
        fetch_chunks(self)
        self.check_active()
        self.ledger.gets += 1
        record = self.alive(key, &now)
        if record == NULL:
            self.ledger.get_misses += 1
            raise KeyNotFound(vbucket=self.vbucket)
        record[R_MARKS] |= MARK_REFERENCED
        item = make_item(self, record, True)
        if self.locks and lock_of(self, key) is not None:
            item.cas = LOCKED_CAS
        return item

    def set(self, bytes key not None, bytes value not None, flags=0, expiry=0, cas=0, datatype=0):
        """Store the value whatever was there, or with a CAS only over that very version: (CAS, seqno)."""
        cdef double now
        cdef char *record
        cdef uint64_t seqno = 0, new_cas, old_cas = within(self, cas, NUMBER_MAX)
        cdef uint32_t new_flags = within(self, flags, NEVER), new_expiry = within(self, expiry, NEVER)
        cdef uint8_t new_datatype = within(self, datatype, BYTE_MAX)
        fetch_for_write(self, key)
        self.check_active()
        self.ledger.sets += 1
        self.check_room(key, value, MUTATION)
        now = self.ledger.clock()
        if old_cas or self.locks:
            record = self.alive(key, &now)
            self.check_cas(key, record, old_cas)
        new_cas = self.write(
            MUTATION, key, value, new_flags, absolute(new_expiry, now), new_datatype, 0, 0, &seqno, 255, now
        )
        return new_cas, seqno

    def delete(self, bytes key not None, cas=0):
        """Leave a tombstone: (CAS, seqno)."""
        cdef double now = -1
        cdef char *record
        cdef uint64_t seqno = 0, new_cas, old_cas = within(self, cas, NUMBER_MAX)
        self.check_active()
        self.ledger.deletes += 1
        self.check_room(key, b"", DELETION)
        record = self.alive(key, &now)
        if record == NULL:
            raise KeyNotFound(vbucket=self.vbucket)
        self.check_cas(key, record, old_cas)
        if now < 0:
            now = self.ledger.clock()
        new_cas = self.write(DELETION, key, b"", 0, 0, 0, 0, 0, &seqno, 255, now)
        return new_cas, seqno

    # What the other operations are made of.

    def find(self, bytes key not None, bint value=True):
        """The newest version of the key, tombstone or not, expired or not."""
        cdef char *record = lookup_bytes(self, key)
        return None if record == NULL else make_item(self, record, value)

    def store(
        self, uint8_t event, bytes key not None, bytes value not None, flags=0, expiry=0, datatype=0, cas=0,
        rev_seqno=0, uint64_t seqno=0, ttl=TTL_MAX,
    ):
        """Append a change; what is 0 (CAS, revision, seqno) gets the next one. No checks but those of room.

        ``expiry`` is absolute, and of a deletion the second at which it happened.
        """
        cdef uint32_t new_flags = within(self, flags, NEVER), new_expiry = within(self, expiry, NEVER)
        cdef uint8_t new_datatype = within(self, datatype, BYTE_MAX), hops = within(self, ttl, TTL_MAX)
        cdef uint64_t new_cas = within(self, cas, NUMBER_MAX), revision = within(self, rev_seqno, NUMBER_MAX)
        self.check_room(key, value, event)
        if not MUTATION <= event <= EXPIRATION:
            raise ValueError(f"{event} is not a change of a key")
        new_cas = self.write(
            event, key, value, new_flags, new_expiry, new_datatype, new_cas, revision, &seqno, hops, self.ledger.clock()
        )
        return new_cas, seqno

    def next_rev_seqno(self, bytes key not None):
        """The revision that the next change of the key gets."""
        return revision_after(self, lookup_bytes(self, key))

    def expire(self, bytes key not None):
        """Whether an item is past its time; it is turned into an expiration, once, if there is room."""
        return bool(self.active and expire_if_due(self, key, -1))

    def expired(self, uint64_t after):
        """Keys past their time among the records that follow ``after``, and where to go on; 0 at the end."""
        cdef double now = self.ledger.clock()
        cdef uint32_t i, place, expiry
        cdef Chunk *chunk
        cdef char *record
        cdef list keys = []
        if not after:
            self.end_locks()
        i = seek_chunk(self, after)
        while i < self.order_count:
            chunk = &self.chunks[self.order[i]]
            i += 1
            if chunk.min_expiry > now:
                continue
            chunk.min_expiry = NEVER
            place = 0
            while place < chunk.used:
                record = chunk.data + place
                place += record_size(record)
                expiry = live_expiry(record)
                if expiry and not load64(record):
                    if expiry < chunk.min_expiry:
                        chunk.min_expiry = expiry
                    if expiry <= now:
                        keys.append(key_of(record))
            return keys, chunk.last_seqno if i < self.order_count else 0
        return keys, 0

    def lock(self, bytes key not None, uint64_t cas, double until):
        """Nobody but who knows the CAS may change the key until then."""
        self.locks[key] = (cas, until)
        self.ledger.expect(until)

    def due(self):
        """Before this time nothing expires here and no lock ends."""
        cdef double first = min((held[1] for held in self.locks.values()), default=INFINITY)
        cdef uint32_t i, expiry
        if self.active:
            for i in range(self.order_count):
                expiry = self.chunks[self.order[i]].min_expiry
                if expiry != NEVER and expiry < first:
                    first = expiry
        return first

    def end_locks(self):
        """Forget the locks that have ended, as far as it looks at once; those that have not wait behind the others."""
        cdef double now = self.ledger.clock()
        for key in list(islice(self.locks, LOCKS_A_STEP)):
            held = self.locks.pop(key)
            if held[1] > now:
                self.locks[key] = held

    def live_keys(self):
        """The keys of all live items, in no particular order."""
        cdef double now = self.ledger.clock()
        cdef uint64_t i
        cdef char *record
        cdef list keys = []
        for i in range(slot_count(self)):
            record = record_in(self, i)
            if record != NULL and is_live(record, now):
                keys.append(key_of(record))
        return keys

    def smallest_keys(self, bytes start not None, size_t limit):
        """The first ``limit`` keys of live items from ``start`` on, in order."""
        cdef double now = self.ledger.clock()
        cdef size_t room = min(limit, <size_t>self.items), count
        cdef list keys = [None] * room  # the collector may run here, and others through it: before anything is picked
        count = pick_smallest(self, PyBytes_AS_STRING(start), PyBytes_GET_SIZE(start), room, now)
        room = count
        while count:
            keys[count - 1] = key_of(picked[0])
            count -= 1
            sift_down(0, count, picked[count])
        del keys[room:]
        return keys

    def holds(self, bytes key not None):
        """Whether there is a live item of that key."""
        cdef char *record = lookup_bytes(self, key)
        return record != NULL and is_live(record, self.ledger.clock() if live_expiry(record) else 0)

    def random_key(self):
        """The key of some live item, of each with the same chance."""
        cdef double now = self.ledger.clock()
        cdef uint64_t count = slot_count(self), i, live = 0
        cdef char *record
        cdef char *chosen = NULL
        if not self.items:
            return None
        # The next one behind an empty slot would be found the oftener the more of those there are before it.
        for i in range(RANDOM_TRIES):
            record = record_in(self, random.randrange(count))
            if record != NULL and is_live(record, now):
                return key_of(record)
        for i in range(count):  # few of the slots lead to a live one: look at all
            record = record_in(self, i)
            if record != NULL and is_live(record, now):
                live += 1
                if random.randrange(live) == 0:
                    chosen = record
        return None if chosen == NULL else key_of(chosen)

    # What other nodes send.

    def apply_frames(self, const uint8_t[::1] frames not None, ttl=TTL_MAX):
        """Append a run of `dcp` change frames; how many. At a bad one it stops, and all before it are in."""
        cdef size_t size = frames.shape[0], offset = 0, ahead = 0, wrong
        cdef const char *data = <const char *>&frames[0] if size else NULL
        cdef const char *expected
        cdef uint64_t before = self.high_seqno
        cdef double now = -1
        cdef Py_ssize_t count = 0
        cdef Version version
        version.ttl = within(self, ttl, TTL_MAX)
        try:
            while offset < size:
                while ahead < size and ahead < offset + 1024:
                    look_ahead(self, data, ahead, size)
                    ahead += HEADER_BYTES + <size_t>(load_be32(data + ahead + 8) if size - ahead >= HEADER_BYTES else 0)
                expected = malformed(data + offset, size - offset, self.vbucket, &wrong)
                if expected != NULL:
                    raise WireError(offset + wrong, expected.decode(), bytes(frames[offset:offset + HEADER_BYTES]).hex(" "))
                read_version(data + offset, &version)
                version.hashed = hash_key(version.key, version.key_size, self.ledger.seed)
                receive(self, &version, &now)
                offset += HEADER_BYTES + <size_t>load_be32(data + offset + 8)
                count += 1
        except UpriverError as error:
            error.add_note(f"{count} changes before it were applied")
            raise
        finally:
            if self.high_seqno != before:
                self.enqueue()
        return count

    def apply_batch(self, batch not None, ttl=TTL_MAX):
        """The same for the rows of a batch in the columns of ``model.CHANGES``."""
        cdef Columns columns
        cdef uint64_t before = self.high_seqno
        cdef double now = -1
        cdef size_t count = 0
        cdef Version version
        held = columns_of(batch, &columns)  # the memory that the pointers lead into
        version.ttl = within(self, ttl, TTL_MAX)
        try:
            while count < columns.rows:
                if columns.vbucket[count] != self.vbucket or not MUTATION <= columns.event[count] <= EXPIRATION:
                    raise InvalidArguments(
                        f"row {count} is event {columns.event[count]} of vbucket {columns.vbucket[count]},"
                        " not a change of a key here", vbucket=self.vbucket,
                    )
                read_row(&columns, count, &version)
                version.hashed = hash_key(version.key, version.key_size, self.ledger.seed)
                receive(self, &version, &now)
                count += 1
        except UpriverError as error:
            error.add_note(f"{count} changes before it were applied")
            raise
        finally:
            if self.high_seqno != before:
                self.enqueue()
            del held
        return count

    # History.

    def read(
        self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, uint32_t opaque=0, bint every=False,
        bint keys_only=False, bytes prefix=b"", block=None,
    ):
        """Frames of the changes in (after, upto] that are visible at snapshot ``at``, or of every version."""
        cdef const uint8_t[::1] stored = block if block else None
        cdef double now = self.ledger.clock() if self.locks else 0
        cdef Reading got
        cdef size_t i, total = 0
        cdef bytes out
        if not (keys_only or prefix or self.evicted or self.locks) and upto > after + FEW and max_bytes <= ROOM_MAX:
            out = streamed_frames(self, max_bytes, after, upto, at, opaque, every, &got)
            if got.count or got.done >= upto:  # else the next one is larger than the room
                return out, got.count, got.done, got.last, got.expirations
        got.count = select(self, after, upto, at, max_bytes, every, prefix, &got.done)
        if not keys_only:
            restore(self, got.count, stored)
        look_over(&got, after)
        for i in range(got.count):
            total += frame_size(picked[i], keys_only)
        out = PyBytes_FromStringAndSize(NULL, total)
        copy_frames(self, PyBytes_AS_STRING(out), got.count, opaque, keys_only, now)
        return out, got.count, got.done, got.last, got.expirations

    def read_records(
        self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, bint keys_only=False, block=None,
    ):
        """The same as ``read`` as records, one behind the other: what a frame has no room for is there too."""
        cdef const uint8_t[::1] stored = block if block else None
        cdef uint64_t done
        cdef size_t count = select(self, after, upto, at, max_bytes, False, b"", &done)
        cdef size_t i, total = 0, size
        cdef bytes out
        cdef char *to
        if not keys_only:
            restore(self, count, stored)
        for i in range(count):
            total += R_FRAME + frame_size(picked[i], keys_only)
        out = PyBytes_FromStringAndSize(NULL, total)
        to = PyBytes_AS_STRING(out)
        for i in range(count):
            size = frame_size(picked[i], keys_only)
            memcpy(to, picked[i], R_FRAME + size)
            store64(to, 0)
            to[R_MARKS] = 0
            if keys_only:
                store_be32(to + R_BODY_LENGTH, size - (R_EXTRAS - R_FRAME))
                to[R_DATATYPE] = 0
            to += R_FRAME + size
        return out, count, done

    def read_into(
        self, uint8_t[::1] buffer not None, uint64_t after, uint64_t upto, uint64_t at, uint32_t opaque=0,
        bint every=False, bint keys_only=False, bytes prefix=b"", block=None,
    ):
        """The same as ``read`` into a buffer: how many bytes of it, then as there. A buffer that is too small for
        even one record stays empty."""
        cdef const uint8_t[::1] stored = block if block else None
        cdef double now = self.ledger.clock() if self.locks else 0
        cdef Reading got
        cdef size_t size
        if not (keys_only or prefix or self.evicted or self.locks) and buffer.shape[0]:
            size = stream_frames(self, <char *>&buffer[0], buffer.shape[0], after, upto, at, opaque, every, &got)
            return size, got.count, got.done, got.last, got.expirations
        got.count = select(self, after, upto, at, buffer.shape[0], every, prefix, &got.done)
        if not keys_only:
            restore(self, got.count, stored)
        if got.count == 1 and frame_size(picked[0], keys_only) > <size_t>buffer.shape[0]:
            return 0, 0, after, after, 0
        look_over(&got, after)
        size = copy_frames(self, <char *>&buffer[0] if got.count else NULL, got.count, opaque, keys_only, now)
        return size, got.count, got.done, got.last, got.expirations

    def read_columns(
        self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, bint every=False, bint keys_only=False,
        bytes prefix=b"", block=None,
    ):
        """The same as ``read`` as an Arrow batch, with the seqno up to which the range is done."""
        cdef const uint8_t[::1] stored = block if block else None
        cdef uint64_t done
        cdef double now = self.ledger.clock() if self.locks else 0
        batch = columns(
            self, after, upto, at, min(max_bytes, <size_t>PICKED_MAX), every, keys_only, prefix, stored, now, &done
        )
        return batch, done

    def first_evicted(self, uint64_t after, uint64_t upto):
        """The first seqno in (after, upto] whose value is on disk only, or 0."""
        cdef uint32_t i, place
        cdef Chunk *chunk
        cdef char *record
        cdef uint64_t seqno
        if not self.evicted:
            return 0
        i = seek_chunk(self, after)
        while i < self.order_count:
            chunk = &self.chunks[self.order[i]]
            i += 1
            if not chunk.evicted:
                continue
            place = 0
            while place < chunk.used:
                record = chunk.data + place
                place += record_size(record)
                if record[R_MARKS] & MARK_EVICTED:
                    seqno = load_be64(record + R_SEQNO)
                    if seqno > after:
                        return seqno if seqno <= upto else 0
        return 0

    # Storage.

    def records(self, uint64_t after, uint64_t upto, size_t max_bytes):
        """Whole records in (after, upto] for the disk, and the last seqno among them (``after`` if none)."""
        cdef uint32_t i = seek_chunk(self, after), place, size
        cdef uint64_t last = after, seqno
        cdef size_t total = 0, offset = 0, start
        cdef Chunk *chunk
        cdef bytes out
        cdef char *to
        cdef bint full = False
        # First measure, then copy whole runs.
        cdef uint32_t j = i
        cdef uint32_t first = seek_place(self, i, after) if i < self.order_count else 0
        while j < self.order_count and not full:
            chunk = &self.chunks[self.order[j]]
            place = first if j == i else 0
            while place < chunk.used:
                seqno = load_be64(chunk.data + place + R_SEQNO)
                size = record_size(chunk.data + place)
                if seqno > upto or (total and total + size > max_bytes):
                    full = True
                    break
                total += size
                last = seqno
                place += size
            j += 1
        out = PyBytes_FromStringAndSize(NULL, total)
        to = PyBytes_AS_STRING(out)
        while offset < total:
            chunk = &self.chunks[self.order[i]]
            start = min(<size_t>(chunk.used - first), total - offset)
            memcpy(to + offset, chunk.data + first, start)
            offset += start
            first = 0
            i += 1
        clean(to, total)
        return out, last

    def load(self, const uint8_t[::1] data not None):
        """Take in stored records, in order; those at or below the high seqno are known already."""
        cdef size_t size = data.shape[0]
        if not size:
            return 0
        return load_records(self, <const char *>&data[0], size)

    def retain(self, const uint8_t[::1] data not None, uint64_t tombstones_to):
        """Of a stored block, the records that memory still holds: compaction on disk."""
        cdef size_t size = data.shape[0], offset = 0, kept = 0, step
        cdef const char *record
        cdef char *to
        cdef uint64_t seqno
        cdef uint32_t i, place
        cdef bytes out
        if not size:
            return b""
        if not stored_step(<const char *>&data[0], size):
            raise_corrupt(self.vbucket)
        out = PyBytes_FromStringAndSize(NULL, size)
        to = PyBytes_AS_STRING(out)
        i = seek_chunk(self, load_be64(<const char *>&data[0] + R_SEQNO) - 1)
        place = 0
        while offset < size:
            record = <const char *>&data[offset]
            step = stored_step(record, size - offset)
            if not step:
                raise_corrupt(self.vbucket)
            seqno = load_be64(record + R_SEQNO)
            # Both run in the order of seqnos.
            while i < self.order_count:
                if place >= self.chunks[self.order[i]].used:
                    i += 1
                    place = 0
                elif load_be64(self.chunks[self.order[i]].data + place + R_SEQNO) < seqno:
                    place += record_size(self.chunks[self.order[i]].data + place)
                else:
                    break
            if (
                i < self.order_count and load_be64(self.chunks[self.order[i]].data + place + R_SEQNO) == seqno
            ) or (<uint8_t>record[R_OPCODE] != OPCODE_MUTATION and seqno > tombstones_to):
                memcpy(to + kept, record, step)
                kept += step
            offset += step
        return out[:kept]

    def committed(self):
        """What ``collect`` took is on disk."""
        if self.flushing_seqno > self.persisted_seqno:
            self.persisted_seqno = self.flushing_seqno
            self.persisted_chunk = self.flushing_chunk
            self.persisted_place = self.flushing_place
        settle_pending(self, self.flushing_bytes)
        del self.consistent_seqnos[: self.flushing_points]
        self.flushing_bytes = self.flushing_points = 0

    # Undoing and dropping.

    def truncate(self, uint64_t seqno):
        """Go back to the state at ``seqno``: drop what came after it, revive what that had superseded."""
        cdef uint32_t i, first = seek_chunk(self, seqno)
        cdef uint64_t dropped = 0, kept = 0, pending = 0
        for i in range(self.order_count):
            if i < first:
                kept += self.chunks[self.order[i]].used
            else:
                dropped += self.chunks[self.order[i]].used
        # To take one key out of the index costs as much as to enter many into a new one.
        if dropped * 32 > kept:
            if first < self.order_count:
                kept += self.chunks[self.order[first]].used
            renew_index(self, min(self.slots_used, kept / RECORD_BYTES_MIN if seqno else 0))
            drop_after(self, seqno)
            index_anew(self, seqno)
        else:
            forget_after(self, first, seqno)
            drop_after(self, seqno)
            revive(self, seqno)
        self.high_seqno = self.snapshot_start = self.snapshot_end = seqno
        self.persisted_seqno = min(self.persisted_seqno, seqno)
        self.flushing_seqno = self.persisted_seqno  # a group on its way to disk no longer counts
        self.checkpointed_seqno = min(self.checkpointed_seqno, seqno)
        self.persisted_chunk = self.read_chunk = 0
        self.consistent_seqnos = [s for s in self.consistent_seqnos if s <= seqno]
        settle_pending(self, self.pending_bytes)
        for i in range(seek_chunk(self, self.persisted_seqno), self.order_count):
            pending += self.chunks[self.order[i]].used - seek_place(self, i, self.persisted_seqno)
        self.pending_bytes += pending
        self.ledger.pending_bytes += pending
        self.flushing_bytes = self.flushing_points = 0
        self.locks.clear()

    def clear(self):
        """Forget everything but the revisions, which must go on growing."""
        self.truncate(0)
        self.purge_seqno = 0
        self.deleted_rev_seqno = max(self.deleted_rev_seqno, self.highest_rev_seqno)

    def discard(self):
        """The vbucket is no more: forget everything and give back all memory, the index too."""
        self.clear()
        account_memory(self, -self.memory_bytes)

    def sweep(self, uint64_t after, uint64_t floor, uint64_t purge_to, uint64_t purge_before, uint64_t evict_to):
        """One step over the records that follow ``after``: drop, purge and evict."""
        cdef uint32_t i = seek_chunk(self, after)
        cdef uint64_t following
        cdef int64_t before = self.memory_bytes
        cdef Chunk *chunk
        while i < self.order_count:
            chunk = &self.chunks[self.order[i]]
            if (
                (floor and chunk.superseded)
                or (chunk.tombstones and chunk.first_seqno <= purge_to)
                or chunk.first_seqno <= evict_to
            ):
                following = chunk.last_seqno if i + 1 < self.order_count else 0
                sweep_chunk(self, i, floor, purge_to, purge_before, evict_to)
                return following, before - self.memory_bytes
            i += 1
        return 0, 0

    def purgeable(self, uint64_t after, uint64_t purge_to, uint64_t purge_before):
        """The highest tombstone that a sweep step would purge (0 if none), and where to go on."""
        cdef uint32_t i = seek_chunk(self, after), place
        cdef uint64_t found = 0
        cdef Chunk *chunk
        cdef char *record
        while i < self.order_count:
            chunk = &self.chunks[self.order[i]]
            i += 1
            if not chunk.tombstones or chunk.first_seqno > purge_to:
                continue
            place = 0
            while place < chunk.used:
                record = chunk.data + place
                place += record_size(record)
                if is_purgeable(self, record, purge_to, purge_before):
                    found = load_be64(record + R_SEQNO)
            return found, chunk.last_seqno if i < self.order_count else 0
        return 0, 0

    def seqno_before(self, uint64_t time, uint64_t upto):
        """The last seqno older than ``time``, at most ``upto``, before the first record that is not.

        A record from the future tells nothing of its age and is passed over.
        """
        cdef uint32_t i, place, stamp
        cdef uint64_t last = 0, seqno
        cdef double now = self.ledger.clock()
        cdef Chunk *chunk
        cdef Chunk *following
        for i in range(self.order_count):
            chunk = &self.chunks[self.order[i]]
            # Of chunks that are old as a whole only the last is walked: what it ended with may have been dropped.
            if chunk.last_time < time and chunk.last_seqno <= upto and i + 1 < self.order_count:
                following = &self.chunks[self.order[i + 1]]
                if following.last_time < time and following.last_seqno <= upto:
                    continue
            place = 0
            while place < chunk.used:
                seqno = load_be64(chunk.data + place + R_SEQNO)
                stamp = load32(chunk.data + place + R_TIME)
                if seqno > upto or time <= stamp <= now:
                    return last
                if stamp < time:
                    last = seqno
                place += record_size(chunk.data + place)
        return last

    def touch(self):
        """Something is to be flushed and seen."""
        self.enqueue()

    # Inside.

    cdef int check_active(self) except -1:
        if not self.active:
            raise NotMyVbucket(vbucket=self.vbucket)
        return 0

    cdef int check_room(self, bytes key, bytes value, uint8_t event) except -1:
        self.check_sizes(PyBytes_GET_SIZE(key), PyBytes_GET_SIZE(value))
        return self.check_limits(event)

    cdef int check_sizes(self, size_t key_size, size_t value_size) except -1:
        if not 0 < key_size <= KEY_BYTES_MAX:
            raise InvalidArguments(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {key_size}", vbucket=self.vbucket)
        if value_size > VALUE_BYTES_MAX:
            raise TooBig(vbucket=self.vbucket)
        return 0

    cdef int check_limits(self, uint8_t event) except -1:
        cdef Ledger ledger = self.ledger
        cdef int64_t limit
        if ledger.refusal:
            raise TemporaryFailure(ledger.refusal, vbucket=self.vbucket)
        if 0 < ledger.queue_bytes_max <= ledger.pending_bytes:
            raise TemporaryFailure("the queue to disk is full", vbucket=self.vbucket)
        if 0 < ledger.quota_bytes <= ledger.memory_bytes:
            soon = ledger.relief is not None and ledger.relief()
            # Where nothing can be evicted only deletions make room, once compaction has dropped what they ended.
            limit = ledger.quota_bytes if event == MUTATION else with_reserve(ledger.quota_bytes)
            if limit <= ledger.memory_bytes:
                if soon:
                    raise TemporaryFailure("memory is full until more is on disk", vbucket=self.vbucket)
                raise OutOfMemory(vbucket=self.vbucket)
        return 0

    cdef int check_cas(self, bytes key, const char *record, uint64_t cas) except -1:
        cdef uint64_t current = 0 if record == NULL else load_be64(record + R_CAS)
        if self.locks:
            held = lock_of(self, key)
            if held is not None:
                if cas != held[0]:
                    raise Locked(vbucket=self.vbucket)
                del self.locks[key]
                return 0
        if cas:
            if record == NULL:
                raise KeyNotFound(vbucket=self.vbucket)
            if current != cas:
                raise KeyExists(vbucket=self.vbucket)
        return 0

    cdef char *lookup(self, const char *key, size_t size, uint64_t hashed, uint64_t *where) noexcept:
        """The newest record of a key and its slot; or NULL and the slot where it would go."""
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

    cdef char *alive(self, bytes key, double *now) except? NULL:
        """The record of a live item, or NULL; asks the clock only if it must, and then leaves the time."""
        cdef char *record = lookup_bytes(self, key)
        cdef uint32_t expiry
        if record == NULL or <uint8_t>record[R_OPCODE] != OPCODE_MUTATION:
            return NULL
        expiry = load_be32(record + R_EXPIRY)
        if expiry:
            if now[0] < 0:
                now[0] = self.ledger.clock()
            if expiry <= now[0]:
                expire_if_due(self, key, now[0])
                return NULL
        return record

    cdef uint64_t write(
        self, uint8_t event, bytes key, bytes value, uint32_t flags, uint32_t expiry, uint8_t datatype,
        uint64_t cas, uint64_t rev_seqno, uint64_t *seqno, uint8_t ttl, double now
    ) except 0:
        """Append a record and make it the newest of its key; returns the CAS, or 1 where a given one is 0.

        ``seqno`` is 0 or the given one, and then that of the change: whoever is told of it may write at once.
        """
        cdef Version version
        version.event, version.datatype, version.ttl = event, datatype, ttl
        version.flags, version.expiry = flags, expiry
        version.cas, version.rev_seqno, version.seqno = cas, rev_seqno, seqno[0]
        version.key, version.key_size = PyBytes_AS_STRING(key), <uint32_t>PyBytes_GET_SIZE(key)
        version.value, version.value_size = PyBytes_AS_STRING(value), <uint32_t>PyBytes_GET_SIZE(value)
        version.hashed = hash_key(version.key, version.key_size, self.ledger.seed)
        write_version(self, &version, now)
        seqno[0] = version.seqno
        return version.cas if version.cas else 1

    cdef uint64_t set_raw(
        self, const char *key, size_t key_size, const char *value, size_t value_size, uint32_t flags,
        uint32_t expiry, uint8_t datatype, double now, uint64_t *seqno
    ) except 0:
        """``set`` without a CAS and without Python objects: the new CAS, and its seqno beside it.

        It makes every check that ``set`` makes and raises what that raises: the vbucket is active, the sizes, the
        disk's queue, the quota, a lock. ``expiry`` is as the client sent it. ``now`` is what the ledger's clock says;
        a loop over many requests asks once. The bytes are copied, and they must not lie in a chunk.
        """
        cdef Version version
        self.check_active()
        self.ledger.sets += 1
        self.check_sizes(key_size, value_size)
        self.check_limits(MUTATION)
        if self.locks:
            name = PyBytes_FromStringAndSize(key, key_size)
            self.check_cas(name, self.alive(name, &now), 0)
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
        """``store`` without Python objects: what is 0 (CAS, revision) and the seqno are filled in, where it was asked for.

        It makes the checks of room that ``store`` makes, and no others. The seqno is the next one, whatever stands
        there; the bytes are copied, and they must not lie in a chunk.
        """
        self.check_sizes(version.key_size, version.value_size)
        self.check_limits(version.event)
        version.seqno = 0
        version.ttl = TTL_MAX
        version.hashed = hash_key(version.key, version.key_size, self.ledger.seed)
        return write_version(self, version, now)

    cdef int enqueue(self) except -1:
        cdef bint first
        if not self.queued:
            self.queued = True
            first = not self.ledger.dirty
            self.ledger.dirty.append(self)
            if first and self.ledger.wake is not None:
                self.ledger.wake()
        if self.on_change is not None:
            called, self.on_change = self.on_change, None
            called()
        return 0


# Writing.

cdef inline uint64_t within(Table self, number, uint64_t most) except? 0xFFFFFFFFFFFFFFFF:
    """A number that a client gave, if it has so much room."""
    cdef uint64_t given
    if PyLong_Check(number):
        given = quick_number_of(number)
        if given <= most and given != NUMBER_MAX:
            return given
        PyErr_Clear()
    return checked_within(self, number, most)


cdef uint64_t checked_within(Table self, number, uint64_t most) except? 0xFFFFFFFFFFFFFFFF:
    """The same of a number that may be none, or too large."""
    cdef uint64_t given = 0
    cdef bint fits
    try:
        given = number_of(number if PyLong_Check(number) else index_of(number))
        fits = given <= most
    except OverflowError:
        fits = False
    if not fits:
        raise InvalidArguments(f"{number} is not a number from 0 to {most}", vbucket=self.vbucket)
    return given


cdef int write_version(Table self, Version *version, double now) except -1:
    """Fill in what is 0 (CAS, revision, seqno), append the record and tell those who wait."""
    cdef uint64_t where
    cdef bint given = version.seqno != 0  # a change received from elsewhere keeps all that it came with
    cdef char *old
    reserve_slot(self)
    old = self.lookup(version.key, version.key_size, version.hashed, &where)
    if old != NULL and version.event == MUTATION and not given and 0 < live_expiry(old) <= now:
        expire_if_due(self, PyBytes_FromStringAndSize(version.key, version.key_size), now)
        reserve_slot(self)
        old = self.lookup(version.key, version.key_size, version.hashed, &where)
    if not given:
        if not version.cas:
            version.cas = self.ledger.take_cas(now)
        else:
            follow(self.ledger, version.cas)
        if not version.rev_seqno:
            version.rev_seqno = revision_after(self, old)
        version.seqno = self.high_seqno + 1
    else:
        follow(self.ledger, version.cas)
    append(self, version, old, where, now)
    if not self.queued or self.on_change is not None:
        self.enqueue()
    return 0


cdef inline uint64_t revision_after(Table self, const char *old) noexcept:
    """One more than the version has, or than any deleted key of the vbucket had; but what comes from elsewhere may have
    the highest that there is, and then the CAS alone decides."""
    cdef uint64_t rev_seqno = load_be64(old + R_REV_SEQNO) if old != NULL else self.deleted_rev_seqno
    return rev_seqno if rev_seqno == REV_SEQNO_MAX else rev_seqno + 1


cdef uint32_t absolute(uint32_t expiry, double now) noexcept:
    """Memcached's rule: up to 30 days an expiry counts from now; the end of all times that can be told is the last."""
    cdef double when
    if not 0 < expiry <= RELATIVE_EXPIRY_S_MAX:
        return expiry
    when = expiry + floor(now)
    return NEVER if when >= NEVER else <uint32_t>when


cdef inline int64_t with_reserve(int64_t quota_bytes) noexcept:
    """What memory may hold with the deletions, which make room in the end."""
    return quota_bytes + quota_bytes / DELETIONS_PART


cdef inline void follow(Ledger ledger, uint64_t cas) noexcept:
    if ledger.last_cas < cas < FOLLOWED_CAS_MAX:
        ledger.last_cas = cas


cdef int append(Table self, Version *version, char *old, uint64_t where, double now) except -1:
    """Lay the record out at the end of the last chunk, in the place of ``old``; its slot is ``where``."""
    cdef uint32_t extras, size, number, end, expiry = version.expiry, time = <uint32_t>now
    cdef Chunk *chunk
    cdef char *record
    if version.event == MUTATION:
        extras = MUTATION_EXTRAS
    else:
        extras = DELETION_EXTRAS if version.event == DELETION else EXPIRATION_EXTRAS
        if expiry:
            time = expiry
        expiry = time
    end = R_EXTRAS + extras + version.key_size + version.value_size
    size = align8(end)
    number = chunk_for(self, size, version.seqno)
    chunk = &self.chunks[number]
    record = chunk.data + chunk.used
    store64(record, 0)
    store32(record + R_TIME, time)
    record[R_TTL] = version.ttl
    memset(record + R_MARKS, 0, 3)
    record[R_FRAME] = <char>0x80
    record[R_OPCODE] = EVENT_OF_OPCODE + version.event
    store_be16(record + R_KEY_LENGTH, version.key_size)
    record[R_EXTRAS_LENGTH] = extras
    record[R_DATATYPE] = version.datatype
    store_be16(record + R_VBUCKET, self.vbucket)
    store_be32(record + R_BODY_LENGTH, end - R_EXTRAS)
    store_be32(record + R_OPAQUE, 0)
    store_be64(record + R_CAS, version.cas)
    store_be64(record + R_SEQNO, version.seqno)
    store_be64(record + R_REV_SEQNO, version.rev_seqno)
    if version.event == MUTATION:
        store_be32(record + R_FLAGS, version.flags)
        store_be32(record + R_EXPIRY, expiry)
        memset(record + R_LOCK_TIME, 0, 7)
    elif version.event == DELETION:
        store_be16(record + R_FLAGS, 0)
    else:
        store_be32(record + R_DELETE_TIME, expiry)
    memcpy(record + R_EXTRAS + extras, version.key, version.key_size)
    memcpy(record + R_EXTRAS + extras + version.key_size, version.value, version.value_size)
    memset(record + end, 0, size - end)
    if old != NULL:
        supersede(self, self.slots[where], old, version.seqno)
    else:
        self.slots_used += 1
    self.slots[where] = (version.hashed & TAG_MASK) | slot_of(number, chunk.used)
    enter(self, chunk, record, size)
    self.pending_bytes += size
    self.ledger.pending_bytes += size
    return 0


# Receiving in bulk.

cdef const char *malformed(const char *frame, size_t rest, uint16_t vbucket, size_t *where) noexcept:
    """What should stand there instead, and how far into the frame; NULL if it is a whole, good change of ours."""
    cdef uint32_t fixed, meta
    cdef uint8_t opcode, extras
    where[0] = 0
    if rest < HEADER_BYTES:
        return "a whole header"
    if <uint8_t>frame[0] != 0x80:
        return "the magic 0x80"
    opcode, extras = <uint8_t>frame[1], <uint8_t>frame[4]
    where[0] = 1
    if not OPCODE_MUTATION <= opcode <= OPCODE_EXPIRATION:
        return "the opcode of a change"
    where[0] = 4
    if opcode == OPCODE_MUTATION:
        if extras != MUTATION_EXTRAS:
            return "31 bytes of extras"
    elif opcode == OPCODE_DELETION:
        if extras != DELETION_EXTRAS and extras != TIMED_DELETION_EXTRAS:
            return "18 or 21 bytes of extras"
    elif extras != EXPIRATION_EXTRAS and extras != DELETION_EXTRAS:
        return "20 or 18 bytes of extras"
    where[0] = 6
    if load_be16(frame + 6) != vbucket:
        return "the number of this vbucket"
    where[0] = 8
    fixed = load_be32(frame + 8)
    if fixed > rest - HEADER_BYTES:
        return "a whole body"
    if fixed < <uint32_t>extras + load_be16(frame + 2):
        return "a body that holds extras and key"
    meta = meta_length(frame, opcode, extras)
    if fixed - extras - load_be16(frame + 2) < meta:
        return "a body that holds the extended metadata"
    return NULL


cdef inline uint32_t meta_length(const char *frame, uint8_t opcode, uint8_t extras) noexcept:
    if opcode == OPCODE_MUTATION:
        return load_be16(frame + HEADER_BYTES + 28)
    return load_be16(frame + HEADER_BYTES + 16) if extras == DELETION_EXTRAS else 0


cdef inline void read_version(const char *frame, Version *version) noexcept:
    """The change of a frame that is well formed; extended metadata stands behind the value and is dropped."""
    cdef uint8_t opcode = frame[1], extras = frame[4]
    cdef const char *fields = frame + HEADER_BYTES
    version.event = opcode - EVENT_OF_OPCODE
    version.datatype = frame[5]
    version.cas = load_be64(frame + 16)
    version.seqno = load_be64(fields)
    version.rev_seqno = load_be64(fields + 8)
    version.flags = version.expiry = version.lock_time = 0
    if opcode == OPCODE_MUTATION:
        version.flags = load_be32(fields + 16)
        version.expiry = load_be32(fields + 20)
        version.lock_time = load_be32(fields + 24)
    elif extras != DELETION_EXTRAS:
        version.expiry = load_be32(fields + 16)
    version.key = fields + extras
    version.key_size = load_be16(frame + 2)
    version.value = version.key + version.key_size
    version.value_size = load_be32(frame + 8) - extras - version.key_size - meta_length(frame, opcode, extras)


cdef int receive(Table self, Version *version, double *now) except -1:
    """One change of a run that was received, all checks included; nobody is told yet."""
    cdef uint64_t where
    cdef char *old
    if version.seqno <= self.high_seqno:
        raise OutOfOrder(self.vbucket, version.seqno, f"it does not follow {self.high_seqno}")
    if version.seqno > self.snapshot_end:
        raise OutOfOrder(self.vbucket, version.seqno, f"the snapshot ends at {self.snapshot_end}")
    if version.seqno > SEQNO_MAX:
        raise OutOfOrder(self.vbucket, version.seqno, "no history gets there")
    self.check_sizes(version.key_size, version.value_size)
    self.check_limits(version.event)
    if now[0] < 0:
        now[0] = self.ledger.clock()
    reserve_slot(self)
    old = self.lookup(version.key, version.key_size, version.hashed, &where)
    follow(self.ledger, version.cas)
    append(self, version, old, where, now[0])
    if self.locks or version.lock_time:
        key = PyBytes_FromStringAndSize(version.key, version.key_size)
        self.locks.pop(key, None)
        if version.lock_time and version.event == MUTATION:
            self.lock(key, version.cas, now[0] + version.lock_time)
    return 0


# The contents of a batch's columns, of so many rows.
cdef struct Columns:
    size_t rows
    uint16_t *vbucket
    uint8_t *event
    uint64_t *seqno
    uint64_t *rev_seqno
    uint64_t *cas
    uint32_t *flags
    uint32_t *expiry
    uint32_t *lock_time
    uint8_t *datatype
    uint32_t *key_ends
    char *key
    uint32_t *value_ends
    char *value


cdef list columns_of(batch, Columns *columns):
    """Where the contents of the batch's columns begin, and the buffers to hold on to meanwhile."""
    cdef list held = []
    cdef size_t[11] numbers
    cdef size_t[11] contents
    cdef Py_ssize_t place
    if not batch.schema.equals(CHANGES):
        raise InvalidArguments("a batch to apply has the columns of a batch of changes")
    try:
        batch.validate(full=True)  # the ends of keys and values too: they are followed without another look
    except pa.ArrowInvalid as error:
        raise InvalidArguments(f"a batch to apply is not whole: {error}") from None
    for place in range(11):
        column = batch.column(place)
        if column.null_count:
            raise InvalidArguments(f"column {CHANGES.names[place]} holds nulls")
        parts = column.buffers()
        held.append(parts)
        width = 4 if place > 8 else column.type.bit_width // 8
        numbers[place] = address_of(parts[1], column.offset * width)
        contents[place] = address_of(parts[2], 0) if place > 8 else 0
    columns.rows = batch.num_rows
    columns.vbucket = <uint16_t *><uintptr_t>numbers[0]
    columns.event = <uint8_t *><uintptr_t>numbers[1]
    columns.seqno = <uint64_t *><uintptr_t>numbers[2]
    columns.rev_seqno = <uint64_t *><uintptr_t>numbers[3]
    columns.cas = <uint64_t *><uintptr_t>numbers[4]
    columns.flags = <uint32_t *><uintptr_t>numbers[5]
    columns.expiry = <uint32_t *><uintptr_t>numbers[6]
    columns.lock_time = <uint32_t *><uintptr_t>numbers[7]
    columns.datatype = <uint8_t *><uintptr_t>numbers[8]
    columns.key_ends = <uint32_t *><uintptr_t>numbers[9]
    columns.value_ends = <uint32_t *><uintptr_t>numbers[10]
    columns.key = <char *><uintptr_t>contents[9]
    columns.value = <char *><uintptr_t>contents[10]
    return held


cdef size_t address_of(part, size_t offset) except? 0:
    return 0 if part is None else <size_t>part.address + offset


cdef inline void read_row(const Columns *columns, size_t row, Version *version) noexcept:
    version.event = columns.event[row]
    version.datatype = columns.datatype[row]
    version.seqno = columns.seqno[row]
    version.rev_seqno = columns.rev_seqno[row]
    version.cas = columns.cas[row]
    version.flags = columns.flags[row]
    version.expiry = columns.expiry[row]
    version.lock_time = columns.lock_time[row]
    version.key = columns.key + columns.key_ends[row]
    version.key_size = columns.key_ends[row + 1] - columns.key_ends[row]
    version.value = columns.value + columns.value_ends[row]
    version.value_size = columns.value_ends[row + 1] - columns.value_ends[row]


cdef inline void look_ahead(Table self, const char *data, size_t offset, size_t size) noexcept:
    """Ask for the slot of the frame at ``offset``; what is no frame is found out when its turn comes."""
    cdef const char *frame = data + offset
    cdef uint32_t key_size
    if size - offset < HEADER_BYTES:
        return
    key_size = load_be16(frame + 2)
    if size - offset < <size_t>HEADER_BYTES + <uint8_t>frame[4] + key_size:
        return
    prefetch(&self.slots[
        hash_key(frame + HEADER_BYTES + <uint8_t>frame[4], key_size, self.ledger.seed) & self.mask
    ])


# The index.

cdef inline uint64_t slot_of(uint32_t number, uint32_t place) noexcept:
    return (<uint64_t>number << 20) | (place >> 3)


cdef inline char *lookup_bytes(Table self, bytes key) noexcept:
    cdef uint64_t where
    cdef const char *start = PyBytes_AS_STRING(key)
    cdef size_t size = PyBytes_GET_SIZE(key)
    return self.lookup(start, size, hash_key(start, size, self.ledger.seed), &where)


cdef inline void fetch_chunks(Table self) noexcept:
    """Ask for the list of chunks of a small vbucket, of which there may be many, while its slot is still on its way."""
    cdef const char *chunks = <const char *>self.chunks
    cdef size_t offset, size = min(self.chunk_count * sizeof(Chunk), <size_t>512)
    for offset in range(0, size, 64):
        prefetch(chunks + offset)


cdef inline void fetch_for_write(Table self, bytes key) noexcept:
    """Ask for the lines that a write will need, to have them by the time that the checks are done."""
    cdef uint64_t hashed = hash_key(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), self.ledger.seed)
    cdef Chunk *chunk
    cdef const char *end
    prefetch(&self.slots[hashed & self.mask])
    fetch_chunks(self)
    if self.order_count:
        chunk = &self.chunks[self.order[self.order_count - 1]]
        end = chunk.data + chunk.used
        prefetch_write(end)
        prefetch_write(end + 64)
        prefetch_write(end + 128)
        prefetch_write(end + 192)


cdef inline uint64_t hash_record(Table self, const char *record) noexcept:
    return hash_key(record_key(record), load_be16(record + R_KEY_LENGTH), self.ledger.seed)


cdef int reserve_slot(Table self) except -1:
    """Room for one more key: at most three quarters of the slots are taken.

    A larger index is filled little by little, so that no write waits for all of it: each 64 writes move 1,024 slots of
    the old one, and whoever looks for a key that still stands there moves it. It is empty long before the new one is
    full.
    """
    cdef uint64_t room = self.mask + 1
    cdef uint64_t *new
    if self.old_slots != NULL:
        self.waited += 1
        if self.waited >= 64:
            self.waited = 0
            move_slots(self, 1024)
    if self.slots_used * 4 < room * 3:
        return 0
    new = <uint64_t *>zeroed_take(room * 2 * sizeof(uint64_t))
    if new == NULL:
        raise MemoryError
    if self.old_slots != NULL:
        move_slots(self, self.old_mask + 1)
    self.old_slots, self.old_mask, self.old_place, self.waited = self.slots, self.mask, 0, 0
    self.slots, self.mask = new, room * 2 - 1
    account_memory(self, <int64_t>(room * 2 * sizeof(uint64_t)))
    if room <= 1024:
        move_slots(self, room)
    return 0


cdef void move_slots(Table self, uint64_t count) noexcept:
    """Move so many slots of the old index to the new one; what is left behind only says that something stood there."""
    cdef uint64_t i = self.old_place, end = min(self.old_place + count, self.old_mask + 1), ahead, hashed, j
    cdef uint64_t *old = self.old_slots
    while i < end:
        ahead = old[(i + 16) & self.old_mask]
        if ahead > MOVED:
            prefetch(record_at(self, ahead) + R_EXTRAS)
        if old[i] > MOVED:
            hashed = hash_record(self, record_at(self, old[i]))
            j = hashed & self.mask
            while self.slots[j]:
                j = (j + 1) & self.mask
            self.slots[j] = old[i]
            old[i] = MOVED
        i += 1
    self.old_place = i
    if i > self.old_mask:
        drop_old_slots(self)


cdef void drop_old_slots(Table self) noexcept:
    if self.old_slots != NULL:
        zeroed_give(<char *>self.old_slots, (self.old_mask + 1) * sizeof(uint64_t))
        account_memory(self, -<int64_t>((self.old_mask + 1) * sizeof(uint64_t)))
        self.old_slots = NULL


cdef char *fetch_old(Table self, const char *key, size_t size, uint64_t hashed, uint64_t to) noexcept:
    """The record of a key that the old index still leads to; its slot is moved to where it belongs now."""
    cdef uint64_t place = hashed & self.old_mask, slot
    cdef char *record
    while True:
        slot = self.old_slots[place]
        if not slot:
            return NULL
        if slot != MOVED and not ((slot ^ hashed) & TAG_MASK):
            record = record_at(self, slot)
            if load_be16(record + R_KEY_LENGTH) == size and not memcmp(record_key(record), key, size):
                self.slots[to] = slot
                self.old_slots[place] = MOVED
                return record
        place = (place + 1) & self.old_mask


cdef inline uint64_t slot_count(Table self) noexcept:
    return self.mask + 1 + (0 if self.old_slots == NULL else self.old_mask + 1)


cdef inline char *record_in(Table self, uint64_t place) noexcept:
    """The record that the slot leads to, of the index or of the old one behind it; NULL if it is empty."""
    cdef uint64_t slot = self.slots[place] if place <= self.mask else self.old_slots[place - self.mask - 1]
    return NULL if slot <= MOVED else record_at(self, slot)


cdef int remember(Table self, char *record, uint32_t number, uint32_t place) except -1:
    """The index leads to this record from now on."""
    cdef uint64_t where, hashed = hash_record(self, record)
    reserve_slot(self)
    if self.lookup(record_key(record), load_be16(record + R_KEY_LENGTH), hashed, &where) == NULL:
        self.slots_used += 1
    self.slots[where] = (hashed & TAG_MASK) | slot_of(number, place)
    return 0


cdef void forget(Table self, const char *record) noexcept:
    """Take the record's key out of the index; those behind it move up."""
    cdef uint64_t hole, next, home
    if self.lookup(record_key(record), load_be16(record + R_KEY_LENGTH), hash_record(self, record), &hole) == NULL:
        return
    next = hole
    while True:
        next = (next + 1) & self.mask
        if not self.slots[next]:
            break
        home = hash_record(self, record_at(self, self.slots[next])) & self.mask
        # It may fill the hole if its home does not lie between the hole and where it stands.
        if ((next - home) & self.mask) >= ((next - hole) & self.mask):
            self.slots[hole] = self.slots[next]
            hole = next
    self.slots[hole] = 0
    self.slots_used -= 1


# Records and counts.

cdef inline bytes key_of(const char *record):
    return PyBytes_FromStringAndSize(record_key(record), load_be16(record + R_KEY_LENGTH))


cdef inline uint32_t live_expiry(const char *record) noexcept:
    return load_be32(record + R_EXPIRY) if <uint8_t>record[R_OPCODE] == OPCODE_MUTATION else 0


cdef inline bint is_live(const char *record, double now) noexcept:
    cdef uint32_t expiry = live_expiry(record)
    return <uint8_t>record[R_OPCODE] == OPCODE_MUTATION and (not expiry or expiry > now)


cdef inline bint is_purgeable(Table self, const char *record, uint64_t purge_to, uint64_t purge_before) noexcept:
    cdef uint64_t seqno = load_be64(record + R_SEQNO)
    return (
        not load64(record) and <uint8_t>record[R_OPCODE] != OPCODE_MUTATION and seqno <= purge_to
        and seqno != self.high_seqno and load32(record + R_TIME) < purge_before
    )


cdef inline void account_memory(Table self, int64_t size) noexcept:
    self.memory_bytes += size
    self.ledger.memory_bytes += size


cdef inline void account_history(Table self, int64_t size) noexcept:
    self.history_bytes += size
    self.ledger.history_bytes += size


cdef inline void settle_pending(Table self, int64_t size) noexcept:
    self.pending_bytes -= size
    self.ledger.pending_bytes -= size


cdef inline void count_current(Table self, const char *record, int sign) noexcept:
    if <uint8_t>record[R_OPCODE] != OPCODE_MUTATION:
        self.tombstones += sign
    else:
        self.items += sign
        if record[R_MARKS] & MARK_EVICTED:
            self.evicted_items += sign


cdef inline void supersede(Table self, uint64_t slot, char *old, uint64_t seqno) noexcept:
    cdef Chunk *chunk = &self.chunks[(slot >> 20) & 0xFFFFFFF]
    count_current(self, old, -1)
    if <uint8_t>old[R_OPCODE] != OPCODE_MUTATION:
        chunk.tombstones -= 1
    chunk.superseded += 1
    store64(old, seqno)
    account_history(self, full_size(old))


cdef inline void enter(Table self, Chunk *chunk, const char *record, uint32_t size) noexcept:
    """The record that stands at the chunk's end now belongs to it."""
    cdef uint32_t expiry = live_expiry(record), time = load32(record + R_TIME)
    cdef uint64_t rev_seqno = load_be64(record + R_REV_SEQNO)
    chunk.used += size
    self.high_seqno = chunk.last_seqno = load_be64(record + R_SEQNO)
    if time > chunk.last_time:
        chunk.last_time = time
    if expiry and expiry < chunk.min_expiry:
        chunk.min_expiry = expiry
        if expiry < self.ledger.due_s:
            self.ledger.due_s = expiry
    if rev_seqno > self.highest_rev_seqno:
        self.highest_rev_seqno = rev_seqno
    if <uint8_t>record[R_OPCODE] != OPCODE_MUTATION:
        chunk.tombstones += 1
        if rev_seqno > self.deleted_rev_seqno:
            self.deleted_rev_seqno = rev_seqno
    count_current(self, record, 1)


cdef void count_chunk(Chunk *chunk) noexcept:
    cdef uint32_t place = 0, expiry, time
    cdef const char *record
    chunk.evicted = chunk.superseded = chunk.tombstones = chunk.last_time = 0
    chunk.min_expiry = NEVER
    while place < chunk.used:
        record = chunk.data + place
        place += record_size(record)
        time = load32(record + R_TIME)
        if time > chunk.last_time:
            chunk.last_time = time
        if record[R_MARKS] & MARK_EVICTED:
            chunk.evicted += 1
        if load64(record):
            chunk.superseded += 1
        elif <uint8_t>record[R_OPCODE] != OPCODE_MUTATION:
            chunk.tombstones += 1
        else:
            expiry = load_be32(record + R_EXPIRY)
            if expiry and expiry < chunk.min_expiry:
                chunk.min_expiry = expiry


# Going back.

cdef int renew_index(Table self, uint64_t keys) except -1:
    """An empty index with room for so many keys."""
    cdef uint64_t room = SLOTS_MIN
    cdef uint64_t *slots = self.slots
    while keys * 4 >= room * 3:
        room *= 2
    if room != self.mask + 1:
        slots = <uint64_t *>zeroed_take(room * sizeof(uint64_t))
        if slots == NULL:
            raise MemoryError
        account_memory(self, (<int64_t>room - <int64_t>(self.mask + 1)) * <int64_t>sizeof(uint64_t))
        zeroed_give(<char *>self.slots, (self.mask + 1) * sizeof(uint64_t))
        self.slots, self.mask = slots, room - 1
    else:
        memset(slots, 0, room * sizeof(uint64_t))
    drop_old_slots(self)
    self.slots_used = 0
    return 0


cdef void index_anew(Table self, uint64_t seqno) noexcept:
    """Count all records and enter them into the empty index, as they stood at ``seqno``; no key stands there twice."""
    cdef uint64_t[INDEXED_AT_ONCE] hashes
    cdef uint64_t[INDEXED_AT_ONCE] slots
    cdef uint32_t i, place, waiting = 0
    cdef Chunk *chunk
    cdef char *record
    self.items = self.tombstones = self.evicted = self.evicted_items = 0
    account_history(self, -self.history_bytes)
    for i in range(self.order_count):
        chunk = &self.chunks[self.order[i]]
        place = 0
        while place < chunk.used:
            record = chunk.data + place
            fetch_ahead(record, chunk.data + chunk.used, chunk.data)
            if load64(record) > seqno:
                unsupersede(chunk, record)
            if load64(record):
                account_history(self, full_size(record))
            else:
                count_current(self, record, 1)
                hashes[waiting] = hash_record(self, record)
                slots[waiting] = (hashes[waiting] & TAG_MASK) | slot_of(self.order[i], place)
                prefetch_write(&self.slots[hashes[waiting] & self.mask])
                waiting += 1
                if waiting == INDEXED_AT_ONCE:
                    enter_slots(self, hashes, slots, waiting)
                    waiting = 0
            place += record_size(record)
        self.evicted += chunk.evicted
    enter_slots(self, hashes, slots, waiting)


cdef inline void enter_slots(Table self, const uint64_t *hashes, const uint64_t *slots, uint32_t count) noexcept:
    """Slots of keys that are not there yet."""
    cdef uint64_t where
    cdef uint32_t i
    for i in range(count):
        where = hashes[i] & self.mask
        while self.slots[where]:
            where = (where + 1) & self.mask
        self.slots[where] = slots[i]
    self.slots_used += count


cdef void forget_after(Table self, uint32_t i, uint64_t seqno) noexcept:
    """Count out what follows ``seqno``, and take its keys out of the index while all records still stand."""
    cdef uint32_t place
    cdef Chunk *chunk
    cdef char *record
    while i < self.order_count:
        chunk = &self.chunks[self.order[i]]
        place = seek_place(self, i, seqno)
        while place < chunk.used:
            record = chunk.data + place
            place += record_size(record)
            if record[R_MARKS] & MARK_EVICTED:
                self.evicted -= 1
            if load64(record):
                account_history(self, -<int64_t>full_size(record))
            else:
                count_current(self, record, -1)
                forget(self, record)
        i += 1


cdef void drop_after(Table self, uint64_t seqno) noexcept:
    """Cut the chunks off behind ``seqno``."""
    cdef Chunk *chunk
    while self.order_count and self.chunks[self.order[self.order_count - 1]].first_seqno > seqno:
        drop_chunk(self, self.order_count - 1)
    if self.order_count:
        chunk = &self.chunks[self.order[self.order_count - 1]]
        if chunk.last_seqno > seqno:
            chunk.used = seek_place(self, self.order_count - 1, seqno)
            chunk.last_seqno = seqno
            count_chunk(chunk)


cdef int revive(Table self, uint64_t seqno) except -1:
    """What was superseded after ``seqno`` is the newest of its key again."""
    cdef uint32_t i, place
    cdef Chunk *chunk
    cdef char *record
    for i in range(self.order_count):
        chunk = &self.chunks[self.order[i]]
        if not chunk.superseded:
            continue
        place = 0
        while place < chunk.used:
            record = chunk.data + place
            fetch_ahead(record, chunk.data + chunk.used, chunk.data)
            if load64(record) > seqno:
                account_history(self, -<int64_t>full_size(record))
                unsupersede(chunk, record)
                count_current(self, record, 1)
                remember(self, record, self.order[i], place)
            place += record_size(record)
    return 0


cdef inline void unsupersede(Chunk *chunk, char *record) noexcept:
    """What replaced the record is gone."""
    cdef uint32_t expiry = live_expiry(record)
    store64(record, 0)
    chunk.superseded -= 1
    if <uint8_t>record[R_OPCODE] != OPCODE_MUTATION:
        chunk.tombstones += 1
    elif expiry and expiry < chunk.min_expiry:
        chunk.min_expiry = expiry


# Chunks.

cdef uint32_t chunk_for(Table self, uint32_t size, uint64_t seqno) except 0:
    """The number of a chunk at the end with room for that many bytes."""
    cdef Chunk *chunk
    cdef uint32_t wanted
    if self.order_count:
        chunk = &self.chunks[self.order[self.order_count - 1]]
        if chunk.used < PLACE_END and chunk.size - chunk.used >= size:
            if not chunk.used:
                chunk.first_seqno = seqno
            return self.order[self.order_count - 1]
    # A small part of what is there already: little is left empty, and large vbuckets get large chunks. It is not the
    # same part for all: a thousand vbuckets that grow alike would all want their next chunk at once, more than is ready.
    wanted = PIECE_MIN
    while wanted < PIECE_MAX and <int64_t>wanted * (8 + self.vbucket % 8) <= self.memory_bytes:
        wanted *= 2
    return new_chunk(self, size, wanted, seqno)


cdef int more_chunks(Table self, uint32_t room) except -1:
    """Make room for so many; it counts only when all three lists have it."""
    cdef void *moved = realloc(self.chunks, room * sizeof(Chunk))
    if moved == NULL:
        raise MemoryError
    self.chunks = <Chunk *>moved
    moved = realloc(self.order, room * sizeof(uint32_t))
    if moved == NULL:
        raise MemoryError
    self.order = <uint32_t *>moved
    moved = realloc(self.spare, room * sizeof(uint32_t))
    if moved == NULL:
        raise MemoryError
    self.spare = <uint32_t *>moved
    self.chunk_room = room
    return 0


cdef uint32_t new_chunk(Table self, uint32_t least, uint32_t size, uint64_t seqno) except 0:
    cdef uint32_t number
    cdef Chunk *chunk
    if self.spare_count:
        number = self.spare[self.spare_count - 1]
    else:
        number = self.chunk_count
        if number >= self.chunk_room:
            more_chunks(self, max(4, self.chunk_room * 2))
    chunk = &self.chunks[number]
    memset(chunk, 0, sizeof(Chunk))
    chunk.data = arena_take(least, &size)
    if chunk.data == NULL:
        raise MemoryError
    account_memory(self, size)
    if number == self.chunk_count:
        self.chunk_count += 1
    else:
        self.spare_count -= 1
    chunk.size = size
    chunk.first_seqno = seqno
    chunk.min_expiry = NEVER
    self.order[self.order_count] = number
    self.order_count += 1
    return number


cdef void drop_chunk(Table self, uint32_t i) noexcept:
    cdef uint32_t number = self.order[i]
    account_memory(self, -<int64_t>self.chunks[number].size)
    arena_give(self.chunks[number].data, self.chunks[number].size)
    self.chunks[number].data = NULL
    self.chunks[number].used = 0
    self.spare[self.spare_count] = number
    self.spare_count += 1
    self.order_count -= 1
    memmove(&self.order[i], &self.order[i + 1], (self.order_count - i) * sizeof(uint32_t))
    if self.persisted_chunk == number:
        self.persisted_chunk = 0
    if self.flushing_chunk == number:
        self.flushing_chunk = 0
    if self.read_chunk == number:
        self.read_chunk = 0


cdef uint32_t seek_chunk(Table self, uint64_t after) noexcept:
    """The place in `order` of the first chunk that reaches beyond ``after``."""
    cdef uint32_t low = 0, high = self.order_count, middle
    while low < high:
        middle = (low + high) >> 1
        if self.chunks[self.order[middle]].last_seqno > after:
            high = middle
        else:
            low = middle + 1
    return low


cdef uint32_t seek_place(Table self, uint32_t i, uint64_t after) noexcept:
    """Where in that chunk the first record beyond ``after`` stands."""
    cdef uint32_t number = self.order[i], place = 0
    cdef Chunk *chunk = &self.chunks[number]
    if chunk.first_seqno > after:
        return 0
    if self.persisted_chunk == number and after >= self.persisted_seqno:
        place = self.persisted_place
    if self.read_chunk == number and after >= self.read_seqno and place < self.read_place:
        place = self.read_place
    while place < chunk.used and load_be64(chunk.data + place + R_SEQNO) <= after:
        place += record_size(chunk.data + place)
    return place


cdef size_t held_between(Table self, uint64_t after, uint64_t upto, size_t enough) noexcept:
    """At most so many bytes these records fill; it looks no further than where they are enough."""
    cdef uint32_t i = seek_chunk(self, after)
    cdef size_t held = 0
    while i < self.order_count and held < enough and self.chunks[self.order[i]].first_seqno <= upto:
        held += self.chunks[self.order[i]].used
        i += 1
    return held


cdef inline void stop_reading(Table self, uint32_t number, const char *record, uint64_t last) noexcept:
    """There was no room for this record, the first behind ``last``: the next read begins with it."""
    self.read_chunk, self.read_place, self.read_seqno = number, <uint32_t>(record - self.chunks[number].data), last


cdef int sweep_chunk(
    Table self, uint32_t i, uint64_t floor, uint64_t purge_to, uint64_t purge_before, uint64_t evict_to
) except -1:
    """Rewrite one chunk without what must go; what stays moves up, as far as it fits into the chunk before."""
    cdef uint32_t number = self.order[i], place = 0, size, slim, home
    cdef uint64_t seqno
    cdef Chunk *chunk = &self.chunks[number]
    cdef Chunk *to = chunk
    cdef char *record
    cdef uint32_t before = chunk.used
    # Into the last chunk others write: it keeps what it has.
    if i and i + 1 < self.order_count:
        to = &self.chunks[self.order[i - 1]]
    chunk.used = 0
    while place < before:
        record = chunk.data + place
        size = record_size(record)
        place += size
        if drop_record(self, record, floor, purge_to, purge_before):
            continue
        slim = size
        if evict_value(self, record, evict_to):
            slim = record_size(record)
        if to != chunk and (to.size - to.used < slim or to.used >= PLACE_END):
            to = chunk
        home = number if to == chunk else self.order[i - 1]
        if to.data + to.used != record:
            if not load64(record):
                move_slot(self, record, slot_of(home, to.used))
            seqno = load_be64(record + R_SEQNO)
            memmove(to.data + to.used, record, slim)
            if to != chunk:
                to.last_seqno = seqno
        to.used += slim
    if chunk.used != before and i:
        count_chunk(&self.chunks[self.order[i - 1]])
    count_chunk(chunk)
    if chunk.used != before:
        self.persisted_chunk = self.flushing_chunk = self.read_chunk = 0
        if not chunk.used:
            drop_chunk(self, i)
        else:
            chunk.first_seqno = load_be64(chunk.data + R_SEQNO)
            # The last one keeps room for what is written next, but not all that a large value has left.
            if i + 1 < self.order_count or arena_size(chunk.used) <= chunk.size / 4:
                shrink_chunk(self, chunk)
    return 0


cdef void shrink_chunk(Table self, Chunk *chunk) noexcept:
    """What is left of a chunk moves to a smaller piece if that holds it."""
    cdef uint32_t size = chunk.used
    cdef char *moved
    if arena_size(chunk.used) >= chunk.size:
        return
    moved = arena_take(chunk.used, &size)
    if moved == NULL:
        return
    if size >= chunk.size:
        arena_give(moved, size)
        return
    memcpy(moved, chunk.data, chunk.used)
    arena_give(chunk.data, chunk.size)
    account_memory(self, <int64_t>size - <int64_t>chunk.size)
    chunk.data = moved
    chunk.size = size


cdef inline bint drop_record(
    Table self, const char *record, uint64_t floor, uint64_t purge_to, uint64_t purge_before
) noexcept:
    """Count out a record that no retained state can see; True if it was one."""
    cdef uint64_t superseded_by = load64(record), seqno
    if superseded_by and superseded_by <= floor:
        account_history(self, -<int64_t>full_size(record))
        if record[R_MARKS] & MARK_EVICTED:
            self.evicted -= 1
        return True
    if is_purgeable(self, record, purge_to, purge_before):
        seqno = load_be64(record + R_SEQNO)
        if seqno > self.purge_seqno:
            self.purge_seqno = seqno
        forget(self, record)
        count_current(self, record, -1)
        return True
    return False


cdef inline bint evict_value(Table self, char *record, uint64_t evict_to) noexcept:
    """Mark a value as evicted unless somebody has read it since the last time; True if it is marked now."""
    if (
        record[R_MARKS] & MARK_EVICTED or <uint8_t>record[R_OPCODE] != OPCODE_MUTATION
        or load_be64(record + R_SEQNO) > evict_to
        or load_be32(record + R_BODY_LENGTH) <= <uint32_t>MUTATION_EXTRAS + load_be16(record + R_KEY_LENGTH)
    ):
        return False
    if record[R_MARKS] & MARK_REFERENCED:
        record[R_MARKS] &= ~MARK_REFERENCED
        return False
    record[R_MARKS] |= MARK_EVICTED
    self.evicted += 1
    if not load64(record):
        self.evicted_items += 1
    return True


cdef inline void move_slot(Table self, const char *record, uint64_t slot) noexcept:
    """The record is about to move: its key leads to ``slot`` from now on."""
    cdef uint64_t where, hashed = hash_record(self, record)
    self.lookup(record_key(record), load_be16(record + R_KEY_LENGTH), hashed, &where)
    self.slots[where] = (hashed & TAG_MASK) | slot


# Items, locks and expiry.

cdef StoredItem make_item(Table self, char *record, bint value):
    cdef StoredItem item = StoredItem.__new__(StoredItem)
    cdef uint8_t opcode = record[R_OPCODE]
    cdef uint32_t key_end = <uint32_t>R_EXTRAS + <uint8_t>record[R_EXTRAS_LENGTH] + load_be16(record + R_KEY_LENGTH)
    item.event = opcode - EVENT_OF_OPCODE
    item.datatype = record[R_DATATYPE]
    item.cas = load_be64(record + R_CAS)
    item.seqno = load_be64(record + R_SEQNO)
    item.rev_seqno = load_be64(record + R_REV_SEQNO)
    item.time = load32(record + R_TIME)
    if opcode == OPCODE_MUTATION:
        item.flags = load_be32(record + R_FLAGS)
        item.expiry = load_be32(record + R_EXPIRY)
    elif opcode == OPCODE_DELETION:
        item.expiry = item.time
    else:
        item.expiry = load_be32(record + R_DELETE_TIME)
    if not value:
        item.value = b""
    elif not record[R_MARKS] & MARK_EVICTED:
        item.value = PyBytes_FromStringAndSize(
            record + key_end, load_be32(record + R_BODY_LENGTH) + R_EXTRAS - key_end
        )
    elif self.fetch is None:
        raise TemporaryFailure("the value is on disk and there is no disk", vbucket=self.vbucket)
    else:
        item.value = self.fetch(item.seqno)  # Python code, but the record is not looked at again
    return item


cdef object lock_of(Table self, bytes key):
    held = self.locks.get(key)
    if held is not None and held[1] <= self.ledger.clock():
        del self.locks[key]
        return None
    return held


cdef bint expire_if_due(Table self, bytes key, double now) except -1:
    """Write the expiration of an item that is past its time, if there is room; True if it was past it."""
    cdef char *record = lookup_bytes(self, key)
    cdef uint32_t expiry
    cdef uint64_t seqno = 0
    if record == NULL:
        return False
    expiry = live_expiry(record)
    if not expiry:
        return False
    if now < 0:
        now = self.ledger.clock()
    if expiry > now:
        return False
    if self.ledger.may_expire():
        self.ledger.expirations += 1
        self.locks.pop(key, None)
        self.write(EXPIRATION, key, b"", 0, 0, 0, 0, 0, &seqno, 255, now)
    return True


cdef uint32_t lock_time_of(Table self, const char *record, double now) except? 9999:
    """What remains of the lock of an item, in whole seconds; 0 if there is none."""
    if load64(record) or <uint8_t>record[R_OPCODE] != OPCODE_MUTATION:
        return 0
    held = self.locks.get(key_of(record))
    if held is None or held[1] <= now:
        return 0
    # A version that was read back from disk does not say that it is superseded.
    newest = lookup_bytes(self, key_of(record))
    if newest == NULL or load_be64(newest + R_SEQNO) != load_be64(record + R_SEQNO):
        return 0
    return max(1, <uint32_t>(<double>held[1] - now))


# Reading.

cdef inline uint32_t frame_size(const char *record, bint keys_only) noexcept:
    cdef uint32_t header = R_EXTRAS - R_FRAME
    if keys_only:
        return header + <uint8_t>record[R_EXTRAS_LENGTH] + load_be16(record + R_KEY_LENGTH)
    return header + load_be32(record + R_BODY_LENGTH)


cdef inline void fetch_start(Table self, uint32_t i, uint32_t place) noexcept:
    """Have ready what comes before that of which each record takes care."""
    cdef Chunk *chunk
    if i < self.order_count:
        chunk = &self.chunks[self.order[i]]
        fetch_first(chunk.data + place, chunk.data + chunk.used)


cdef struct Reading:
    # How many changes, how far their range is done, the seqno of the last, and how many are expirations.
    size_t count
    uint64_t done
    uint64_t last
    size_t expirations


cdef size_t stream_frames(
    Table self, char *to, size_t room, uint64_t after, uint64_t upto, uint64_t at, uint32_t opaque, bint every,
    Reading *got
) noexcept:
    """Select and copy in one go, for the plain case: each record is touched once."""
    cdef uint32_t i = seek_chunk(self, after), place, size
    cdef uint32_t first = seek_place(self, i, after) if i < self.order_count else 0
    cdef uint64_t superseded_by, seqno, passed = after
    cdef Chunk *chunk
    cdef const char *record
    cdef const char *following
    cdef char *start = to
    cdef uint32_t network_opaque
    store_be32(<char *>&network_opaque, opaque)
    got.count = got.expirations = 0
    got.last = after
    fetch_start(self, i, first)
    while i < self.order_count:
        chunk = &self.chunks[self.order[i]]
        place = first
        first = 0
        i += 1
        following = self.chunks[self.order[i]].data if i < self.order_count else chunk.data
        while place < chunk.used:
            record = chunk.data + place
            fetch_ahead(record, chunk.data + chunk.used, following)
            seqno = load_be64(record + R_SEQNO)
            if seqno > upto:
                got.done = upto
                return to - start
            size = load_be32(record + R_BODY_LENGTH) + (R_EXTRAS - R_FRAME)
            place += align8(size + R_FRAME)
            superseded_by = load64(record)
            if every or not superseded_by or superseded_by > at:
                if size > room:
                    stop_reading(self, self.order[i - 1], record, passed)
                    got.done = passed
                    return to - start
                memcpy(to, record + R_FRAME, size)
                memcpy(to + R_OPAQUE - R_FRAME, &network_opaque, 4)
                to += size
                room -= size
                got.count += 1
                got.last = seqno
                got.expirations += record[R_OPCODE] == OPCODE_EXPIRATION
            passed = seqno
    got.done = upto
    return to - start


cdef bytes streamed_frames(
    Table self, size_t room, uint64_t after, uint64_t upto, uint64_t at, uint32_t opaque, bint every, Reading *got
):
    """The same into memory of its own, of which the part that stayed empty is given back.

    No more is taken than all records that follow would fill: the C library maps large blocks each time anew, and the
    kernel would clear their pages for every read of a small vbucket.
    """
    cdef PyObject *taken = new_bytes(NULL, min(room, held_between(self, after, upto, room)))
    cdef char *to = PyBytes_AS_STRING(<bytes>taken)
    cdef bytes out
    resize_bytes(&taken, stream_frames(self, to, room, after, upto, at, opaque, every, got))
    out = <bytes>taken
    Py_DECREF(out)  # it was counted when it was made, and now again
    return out


cdef void look_over(Reading *got, uint64_t after) noexcept:
    """What those that were picked are."""
    cdef size_t i
    got.expirations = 0
    for i in range(got.count):
        got.expirations += picked[i][R_OPCODE] == OPCODE_EXPIRATION
    got.last = load_be64(picked[got.count - 1] + R_SEQNO) if got.count else after


cdef size_t copy_frames(
    Table self, char *to, size_t count, uint32_t opaque, bint keys_only, double now
) except? 9999:
    """Lay the picked frames out one behind the other."""
    cdef size_t i
    cdef uint32_t size, lock_time
    cdef char *start = to
    cdef const char *record
    for i in range(count):
        record = picked[i]
        size = frame_size(record, keys_only)
        memcpy(to, record + R_FRAME, size)
        store_be32(to + R_OPAQUE - R_FRAME, opaque)
        if keys_only:
            store_be32(to + R_BODY_LENGTH - R_FRAME, size - (R_EXTRAS - R_FRAME))
            to[R_DATATYPE - R_FRAME] = 0
        if now:
            lock_time = lock_time_of(self, record, now)
            if lock_time:
                store_be32(to + R_LOCK_TIME - R_FRAME, lock_time)
        to += size
    return to - start


cdef int pick(size_t count, const char *record) except -1:
    global picked, picked_room
    cdef void *moved
    if count >= picked_room:
        moved = realloc(picked, max(<size_t>4096, 2 * picked_room) * sizeof(char *))
        if moved == NULL:
            raise MemoryError
        picked = <const char **>moved
        picked_room = max(<size_t>4096, 2 * picked_room)
    picked[count] = record
    return 0


cdef size_t select(
    Table self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, bint every, bytes prefix, uint64_t *done,
    size_t most=PICKED_MAX
) except? 9999:
    """Pick the visible records of (after, upto], so many at most; `done` says how far they reach."""
    cdef uint32_t i = seek_chunk(self, after), place, first
    cdef size_t count = 0, total = 0, key_total = 0, value_total = 0, prefix_size = PyBytes_GET_SIZE(prefix)
    cdef uint64_t superseded_by, seqno, last = after
    cdef uint32_t size, key_size
    cdef Chunk *chunk
    cdef const char *record
    cdef const char *following
    cdef bint full = False
    global picked_bytes, picked_key_bytes, picked_value_bytes
    first = seek_place(self, i, after) if i < self.order_count else 0
    fetch_start(self, i, first)
    while i < self.order_count and not full:
        chunk = &self.chunks[self.order[i]]
        following = self.chunks[self.order[i + 1]].data if i + 1 < self.order_count else chunk.data
        place = first
        first = 0
        while place < chunk.used:
            record = chunk.data + place
            fetch_ahead(record, chunk.data + chunk.used, following)
            place += record_size(record)
            seqno = load_be64(record + R_SEQNO)
            if seqno > upto:
                full, last = True, upto
                break
            superseded_by = load64(record)
            if (every or not superseded_by or superseded_by > at) and (
                not prefix_size or (
                    load_be16(record + R_KEY_LENGTH) >= prefix_size
                    and not memcmp(record_key(record), PyBytes_AS_STRING(prefix), prefix_size)
                )
            ):
                size = full_size(record)
                if count == most or (total and total + size > max_bytes):
                    stop_reading(self, self.order[i], record, last)
                    full = True
                    break
                if count >= picked_room:
                    pick(count, record)
                else:
                    picked[count] = record
                count += 1
                total += size
                key_size = load_be16(record + R_KEY_LENGTH)
                key_total += key_size
                value_total += load_be32(record + R_BODY_LENGTH) - <uint8_t>record[R_EXTRAS_LENGTH] - key_size
            last = seqno
        i += 1
    picked_bytes, picked_key_bytes, picked_value_bytes = total, key_total, value_total
    done[0] = last if full else upto
    return count


cdef inline int compare_keys(const char *one, size_t one_size, const char *other, size_t other_size) noexcept:
    cdef int order = memcmp(one, other, min(one_size, other_size))
    return order if order else (one_size > other_size) - (one_size < other_size)


cdef inline bint is_before(const char *one, const char *other) noexcept:
    """Whether the key of a record comes before that of the other."""
    return compare_keys(
        record_key(one), load_be16(one + R_KEY_LENGTH), record_key(other), load_be16(other + R_KEY_LENGTH)
    ) < 0


cdef void sift_down(size_t place, size_t count, const char *record) noexcept:
    """Put the record into the heap of the picked ones, whose largest key stands first, from the hole at ``place``."""
    cdef size_t child
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and is_before(picked[child], picked[child + 1]):
            child += 1
        if not is_before(record, picked[child]):
            break
        picked[place] = picked[child]
        place = child
    picked[place] = record


cdef size_t pick_smallest(Table self, const char *start, size_t size, size_t limit, double now) except? 9999:
    """Pick the live records with the smallest keys from ``start`` on, as a heap: how many."""
    cdef size_t count = 0, place
    cdef uint32_t i, offset
    cdef Chunk *chunk
    cdef const char *record
    cdef const char *following
    if not limit:
        return 0
    for i in range(self.order_count):
        chunk = &self.chunks[self.order[i]]
        following = self.chunks[self.order[i + 1]].data if i + 1 < self.order_count else chunk.data
        offset = 0
        while offset < chunk.used:
            record = chunk.data + offset
            fetch_ahead(record, chunk.data + chunk.used, following)
            offset += record_size(record)
            if load64(record) or not is_live(record, now):
                continue
            if compare_keys(record_key(record), load_be16(record + R_KEY_LENGTH), start, size) < 0:
                continue
            if count == limit:
                if is_before(record, picked[0]):
                    sift_down(0, count, record)
                continue
            pick(count, record)
            place = count
            count += 1
            while place and is_before(picked[(place - 1) >> 1], record):
                picked[place] = picked[(place - 1) >> 1]
                place = (place - 1) >> 1
            picked[place] = record
    return count


cdef inline uint32_t stored_step(const char *data, size_t rest) noexcept:
    """The size of the stored record at ``data``, 0 if none that can be right stands there."""
    cdef uint64_t body, head
    if rest < <size_t>R_EXTRAS + DELETION_EXTRAS:
        return 0
    body = load_be32(data + R_BODY_LENGTH)
    head = <uint64_t><uint8_t>data[R_EXTRAS_LENGTH] + load_be16(data + R_KEY_LENGTH)
    if head > body or ((body + R_EXTRAS + 7) & ~<uint64_t>7) > rest:
        return 0
    return full_size(data)


cdef int raise_corrupt(uint16_t vbucket) except -1:
    raise CorruptData("", f"a record of vbucket {vbucket} cannot be read")


cdef int restore(Table self, size_t count, const uint8_t[::1] block) except -1:
    """Replace picked records whose value was evicted by the stored ones; both run in the order of seqnos."""
    cdef size_t i, offset = 0, size = 0
    cdef uint64_t seqno
    cdef uint32_t step = 0
    cdef const char *data = NULL
    if not self.evicted:
        return 0
    if block is not None:
        size = block.shape[0]
        data = <const char *>&block[0]  # the caller holds the block while the frames are made
    for i in range(count):
        if not picked[i][R_MARKS] & MARK_EVICTED:
            continue
        seqno = load_be64(picked[i] + R_SEQNO)
        while offset < size:
            step = stored_step(data + offset, size - offset)
            if not step:
                raise_corrupt(self.vbucket)
            if load_be64(data + offset + R_SEQNO) >= seqno:
                break
            offset += step
        if offset >= size or load_be64(data + offset + R_SEQNO) != seqno:
            raise CorruptData("", f"the value of change {seqno} is not on disk")
        # It must be what memory remembers in all but the value: a mutation of this key.
        if memcmp(data + offset + R_FRAME, picked[i] + R_FRAME, <size_t>(R_LOCK_TIME - R_FRAME)) or memcmp(
            record_key(data + offset), record_key(picked[i]), load_be16(picked[i] + R_KEY_LENGTH)
        ):
            raise CorruptData("", f"change {seqno} of vbucket {self.vbucket} is another one on disk")
        picked[i] = data + offset
    return 0


cdef object columns(
    Table self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, bint every, bint keys_only, bytes prefix,
    const uint8_t[::1] stored, double now, uint64_t *done
):
    """An Arrow batch of the visible records.

    Of many only some are picked, which tell how large the others will be: there is room for as many as are likely, and
    where it does not suffice the batch ends early.
    """
    cdef size_t most = PICKED_MAX if keys_only or prefix or self.evicted else ROWS_FIRST
    cdef size_t count = select(self, after, upto, at, max_bytes, every, prefix, done, most), taken = picked_bytes
    cdef size_t rows = count, key_bytes = picked_key_bytes, value_bytes = 0 if keys_only else picked_value_bytes
    cdef Columns to
    cdef ChangeColumns *block
    cdef ArrowArray batch
    clean_registers()
    if not keys_only:
        restore(self, count, stored)
    if count == most:
        value_bytes = min(max_bytes, taken + held_between(self, done[0], upto, max_bytes))
        # No more than one for each seqno; what keeps batches shall not keep room in them.
        rows = min(rows * value_bytes / taken * 5 / 4, count + (upto - done[0]))
        key_bytes = key_bytes * rows / count * 5 / 4
    block = lay_out(&to, rows, key_bytes, value_bytes)
    try:
        add_rows(self, &to, count, keys_only, now)
        if count == most:
            done[0] = stream_rows(self, &to, rows, key_bytes, done[0], upto, at, max_bytes - taken, every, now)
    except:
        give_block(block)
        raise
    describe(block, &to, &batch)
    try:
        return import_batch(<size_t>&batch, CHANGES)
    finally:
        if batch.release != NULL:  # Arrow did not take it
            batch.release(&batch)


cdef ChangeColumns *lay_out(Columns *to, size_t rows, size_t key_bytes, size_t value_bytes) except NULL:
    """One piece of memory for all columns, each at a multiple of 64 bytes as Arrow likes it; there are no rows yet."""
    cdef size_t[13] sizes = [
        rows * 2, rows, rows * 8, rows * 8, rows * 8, rows * 4, rows * 4, rows * 4, rows,
        rows * 4 + 4, key_bytes, rows * 4 + 4, value_bytes,
    ]
    cdef size_t[13] places
    cdef size_t i, total = 0
    cdef char *base
    cdef ChangeColumns *block
    for i in range(13):
        places[i] = total
        total += (sizes[i] + 63) & ~<size_t>63
    block = allocate_columns(total, &base)
    if block == NULL:
        raise MemoryError
    to.rows = 0
    to.vbucket = <uint16_t *>(base + places[0])
    to.event = <uint8_t *>(base + places[1])
    to.seqno = <uint64_t *>(base + places[2])
    to.rev_seqno = <uint64_t *>(base + places[3])
    to.cas = <uint64_t *>(base + places[4])
    to.flags = <uint32_t *>(base + places[5])
    to.expiry = <uint32_t *>(base + places[6])
    to.lock_time = <uint32_t *>(base + places[7])
    to.datatype = <uint8_t *>(base + places[8])
    to.key_ends = <uint32_t *>(base + places[9])
    to.key = base + places[10]
    to.value_ends = <uint32_t *>(base + places[11])
    to.value = base + places[12]
    to.key_ends[0] = to.value_ends[0] = 0
    return block


cdef int add_rows(Table self, Columns *to, size_t count, bint keys_only, double now) except -1:
    """Lay out what was picked."""
    cdef size_t i
    for i in range(count):
        add_row(to, picked[i], self.vbucket, lock_time_of(self, picked[i], now) if now else 0, keys_only)
    return 0


cdef uint64_t stream_rows(
    Table self, Columns *columns, size_t rows, size_t key_bytes, uint64_t after, uint64_t upto, uint64_t at,
    size_t max_bytes, bint every, double now
) except? 9999:
    """Select and lay out in one go what follows the first rows, for the plain case: how far the rows reach.

    While a row is written, others are on their way from memory.
    """
    cdef uint32_t i = seek_chunk(self, after), place
    cdef uint32_t first = seek_place(self, i, after) if i < self.order_count else 0
    cdef uint64_t superseded_by, seqno, passed = after
    cdef size_t total = 0
    cdef Chunk *chunk
    cdef const char *record
    cdef const char *following
    cdef Columns to = columns[0]  # which the compiler knows that no row is written over
    while i < self.order_count:
        chunk = &self.chunks[self.order[i]]
        place = first
        first = 0
        i += 1
        following = self.chunks[self.order[i]].data if i < self.order_count else chunk.data
        while place < chunk.used:
            record = chunk.data + place
            fetch_ahead(record, chunk.data + chunk.used, following)
            seqno = load_be64(record + R_SEQNO)
            if seqno > upto:
                columns.rows = to.rows
                return upto
            place += full_size(record)
            superseded_by = load64(record)
            if every or not superseded_by or superseded_by > at:
                total += full_size(record)
                if (
                    to.rows == rows or total > max_bytes
                    or to.key_ends[to.rows] + load_be16(record + R_KEY_LENGTH) > key_bytes
                ):
                    stop_reading(self, self.order[i - 1], record, passed)
                    columns.rows = to.rows
                    return passed
                add_row(&to, record, self.vbucket, lock_time_of(self, record, now) if now else 0, False)
            passed = seqno
    columns.rows = to.rows
    return upto


cdef inline void add_row(Columns *to, const char *record, uint16_t vbucket, uint32_t lock_time, bint keys_only) noexcept:
    """Lay out a record behind the rows that are there."""
    cdef size_t row = to.rows
    cdef uint8_t opcode = record[R_OPCODE]
    cdef uint32_t key_end = to.key_ends[row], value_end = to.value_ends[row]
    cdef uint32_t key_size = load_be16(record + R_KEY_LENGTH), value_size
    cdef const char *key = record_key(record)
    to.vbucket[row] = vbucket
    to.event[row] = opcode - EVENT_OF_OPCODE
    to.seqno[row] = load_be64(record + R_SEQNO)
    to.rev_seqno[row] = load_be64(record + R_REV_SEQNO)
    to.cas[row] = load_be64(record + R_CAS)
    to.datatype[row] = 0 if keys_only else <uint8_t>record[R_DATATYPE]
    to.lock_time[row] = lock_time
    if opcode == OPCODE_MUTATION:
        to.flags[row] = load_be32(record + R_FLAGS)
        to.expiry[row] = load_be32(record + R_EXPIRY)
    else:
        to.flags[row] = 0
        if opcode == OPCODE_DELETION:
            to.expiry[row] = load32(record + R_TIME)
        else:
            to.expiry[row] = load_be32(record + R_DELETE_TIME)
    memcpy(to.key + key_end, key, key_size)
    if not keys_only:
        value_size = load_be32(record + R_BODY_LENGTH) - <uint8_t>record[R_EXTRAS_LENGTH] - key_size
        memcpy(to.value + value_end, key + key_size, value_size)
        value_end += value_size
    row += 1
    to.key_ends[row] = key_end + key_size
    to.value_ends[row] = value_end
    to.rows = row


cdef void describe(ChangeColumns *block, const Columns *columns, ArrowArray *batch) noexcept:
    """Tell Arrow what stands where."""
    cdef const void **fixed = [
        columns.vbucket, columns.event, columns.seqno, columns.rev_seqno, columns.cas, columns.flags, columns.expiry,
        columns.lock_time, columns.datatype,
    ]
    cdef int i
    for i in range(9):
        describe_column(block, i, columns.rows, <const char *>fixed[i], NULL)
    describe_column(block, 9, columns.rows, <const char *>columns.key_ends, columns.key)
    describe_column(block, 10, columns.rows, <const char *>columns.value_ends, columns.value)
    describe_columns(block, batch, columns.rows)


# Storage.

cdef void clean(char *data, size_t size) noexcept:
    """On disk nothing is superseded or marked: a reader finds out while it loads."""
    cdef size_t offset = 0
    while offset < size:
        store64(data + offset, 0)
        data[offset + R_MARKS] = 0
        offset += full_size(data + offset)


cdef object load_records(Table self, const char *data, size_t size):
    cdef size_t offset = 0
    cdef uint64_t seqno, hashed, where, cas, last_cas = self.ledger.last_cas
    cdef uint32_t step, key_size, extras, number = 0, loaded = 0
    cdef uint8_t opcode
    cdef const char *source
    cdef Chunk *chunk
    cdef char *record
    cdef char *old
    if size >> 32:
        raise CorruptData("", f"too many records of vbucket {self.vbucket} in one piece")
    while offset < size:
        source = data + offset
        if size - offset < <size_t>R_EXTRAS + 18:
            raise CorruptData("", f"a record of vbucket {self.vbucket} cannot be read")
        step = full_size(source)
        opcode = source[R_OPCODE]
        key_size = load_be16(source + R_KEY_LENGTH)
        extras = <uint8_t>source[R_EXTRAS_LENGTH]
        if (
            load_be32(source + R_BODY_LENGTH) > VALUE_BYTES_MAX + 1024 or step > size - offset
            or load_be16(source + R_VBUCKET) != self.vbucket
            or extras != (31 if opcode == OPCODE_MUTATION else 18 if opcode == OPCODE_DELETION else 20)
            or not OPCODE_MUTATION <= opcode <= OPCODE_EXPIRATION
            or extras + key_size > load_be32(source + R_BODY_LENGTH)
        ):
            raise CorruptData("", f"a record of vbucket {self.vbucket} is not what it should be")
        offset += step
        seqno = load_be64(source + R_SEQNO)
        if seqno <= self.high_seqno:
            continue
        if (
            not number or self.chunks[number].used >= PLACE_END
            or self.chunks[number].size - self.chunks[number].used < step
        ):
            number = chunk_for(self, step, seqno)
        chunk = &self.chunks[number]
        record = chunk.data + chunk.used
        memcpy(record, source, step)
        store64(record, 0)
        record[R_MARKS] = 0
        reserve_slot(self)
        hashed = hash_record(self, record)
        old = self.lookup(record_key(record), key_size, hashed, &where)
        if old != NULL:
            supersede(self, self.slots[where], old, seqno)
        else:
            self.slots_used += 1
        self.slots[where] = (hashed & TAG_MASK) | slot_of(number, chunk.used)
        enter(self, chunk, record, step)
        cas = load_be64(record + R_CAS)
        if last_cas < cas < FOLLOWED_CAS_MAX:
            last_cas = cas
        loaded += 1
    self.ledger.last_cas = last_cas
    return loaded


def stored_value(const uint8_t[::1] block not None, uint64_t seqno):
    """The value of one change in a stored block."""
    cdef size_t offset = 0, size = block.shape[0]
    cdef uint32_t step
    cdef const char *record
    cdef const char *value
    while offset < size:
        record = <const char *>&block[offset]
        step = stored_step(record, size - offset)
        if not step:
            raise CorruptData("", "a stored record cannot be read")
        if load_be64(record + R_SEQNO) == seqno:
            value = record_key(record) + load_be16(record + R_KEY_LENGTH)
            return PyBytes_FromStringAndSize(
                value, record + R_EXTRAS + load_be32(record + R_BODY_LENGTH) - value
            )
        offset += step
    return None


def collect(list tables not None, bint with_records=True, bytearray room=None):
    """One group for the disk: a directory, then the records of each table that no group has held yet."""
    cdef Table table
    cdef size_t entries = 0, bodies = 0, size, part, body
    cdef char *to
    cdef char *directory
    cdef uint32_t i, place
    cdef Chunk *chunk
    for table in tables:
        entries += GROUP_ENTRY
        if not table.active:
            entries += GROUP_BOUNDS + 8 * <size_t>len(table.consistent_seqnos)
        if with_records:
            bodies += table.pending_bytes
    size = GROUP_HEADER + entries + bodies
    if room is None or <size_t>len(room) < size:
        room = PyByteArray_FromStringAndSize(NULL, size)
    directory = PyByteArray_AS_STRING(room)
    to = directory + GROUP_HEADER + entries
    store32(directory, <uint32_t>len(tables))
    store32(directory + 4, entries)
    directory += GROUP_HEADER
    for table in tables:
        body = table.pending_bytes
        memcpy(directory, &table.vbucket, 2)
        directory[2] = WROTE_ITSELF if table.active else 0
        directory[3] = 0
        store32(directory + 4, body)
        store64(directory + 8, table.high_seqno)
        directory += GROUP_ENTRY
        table.flushing_points = 0
        if not table.active:
            table.flushing_points = len(table.consistent_seqnos)
            store64(directory, table.snapshot_start)
            store64(directory + 8, table.snapshot_end)
            store32(directory + 16, table.flushing_points)
            directory += GROUP_BOUNDS
            for point in table.consistent_seqnos:
                store64(directory, point)
                directory += 8
        i = seek_chunk(table, table.persisted_seqno)
        part = 0
        while i < table.order_count:
            chunk = &table.chunks[table.order[i]]
            place = seek_place(table, i, table.persisted_seqno)
            if with_records:
                memcpy(to + part, chunk.data + place, chunk.used - place)
            part += chunk.used - place
            i += 1
        if part != body:
            raise AssertionError(f"vbucket {table.vbucket}: {part} bytes wait for the disk, not {body}")
        if with_records:
            clean(to, part)
            to += part
        table.flushing_seqno = table.high_seqno
        table.flushing_bytes = body
        table.flushing_chunk = 0
        if table.order_count:
            table.flushing_chunk = table.order[table.order_count - 1]
            table.flushing_place = table.chunks[table.flushing_chunk].used
    return memoryview(room)[:size]


def replay(uint64_t number, const uint8_t[::1] group not None, list tables not None):
    """Take a stored group back in, for the tables that are not newer than it."""
    cdef size_t size = group.shape[0], offset = GROUP_HEADER, body, points, i
    cdef const char *data = <const char *>&group[0] if size else NULL
    cdef uint32_t count, length
    cdef uint16_t vbucket
    cdef uint64_t high, start, end
    cdef const char *entry
    cdef Table table
    if size < GROUP_HEADER:
        raise CorruptData("", f"group {number} cannot be read")
    count = load32(data)
    body = GROUP_HEADER + <size_t>load32(data + 4)
    if body > size:
        raise CorruptData("", f"group {number} cannot be read")
    for _ in range(count):
        if offset + GROUP_ENTRY > body:
            raise CorruptData("", f"group {number} cannot be read")
        entry = data + offset
        memcpy(&vbucket, entry, 2)
        length = load32(entry + 4)
        start = end = high = load64(entry + 8)
        offset += GROUP_ENTRY
        points = 0
        if not entry[2] & WROTE_ITSELF:
            if offset + GROUP_BOUNDS > body:
                raise CorruptData("", f"group {number} cannot be read")
            start = load64(data + offset)
            end = load64(data + offset + 8)
            points = load32(data + offset + 16)
            offset += GROUP_BOUNDS
            if points > (body - offset) / 8:
                raise CorruptData("", f"group {number} cannot be read")
        if length > size - body:
            raise CorruptData("", f"group {number} ends too early")
        table = tables[vbucket] if vbucket < len(tables) else None
        if table is not None and number >= table.records_from_group and length:
            load_records(table, data + body, length)
        if table is not None and number >= table.state_from_group:
            table.high_seqno = max(table.high_seqno, high)
            table.snapshot_start = start
            table.snapshot_end = end
            for i in range(points):
                table.consistent_seqnos.append(load64(data + offset + 8 * i))
        offset += 8 * points
        body += length
