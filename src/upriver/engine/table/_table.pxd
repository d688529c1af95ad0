# The item table, for other compiled modules to cimport. `_table.pyi` documents the fields and methods.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, int64_t


cdef struct Chunk:
    char *data
    uint32_t used
    uint32_t size
    uint64_t first_seqno
    uint64_t last_seqno
    uint32_t last_time
    uint32_t min_expiry
    uint32_t evicted
    uint32_t superseded
    uint32_t tombstones


# A change to append to a table; key and value are copied then.
cdef struct Version:
    const char *key
    const char *value
    uint32_t key_size
    uint32_t value_size
    uint64_t hashed
    uint64_t cas
    uint64_t rev_seqno
    uint64_t seqno
    uint32_t flags
    uint32_t expiry
    uint32_t lock_time
    uint8_t event
    uint8_t datatype
    uint8_t ttl


cdef class Ledger:
    cdef public object clock, ticks, relief, wake
    cdef public bint replicates_locks
    cdef public str refusal
    cdef public int64_t quota_bytes, queue_bytes_max, pending_bytes, memory_bytes, history_bytes
    cdef public double due_s
    cdef public uint64_t last_cas, gets, get_misses, sets, deletes, expirations
    cdef list dirty
    cdef uint64_t seed
    cdef uint64_t take_cas(self, double now)
    cpdef bint may_expire(self)


cdef class StoredItem:
    cdef public uint8_t event, datatype
    cdef public bytes value
    cdef public uint32_t flags, expiry, time
    cdef public uint64_t cas, seqno, rev_seqno


cdef class Table:
    cdef readonly uint16_t vbucket
    cdef readonly Ledger ledger
    cdef public bint active, queued
    cdef public uint64_t vbucket_uuid
    cdef public uint64_t high_seqno, persisted_seqno, flushing_seqno, checkpointed_seqno
    cdef public uint64_t snapshot_start, snapshot_end, purge_seqno, deleted_rev_seqno
    cdef readonly uint64_t highest_rev_seqno
    cdef public uint64_t records_from_group, state_from_group
    cdef public list consistent_seqnos
    cdef readonly int64_t items, tombstones, evicted_items, evicted
    cdef readonly int64_t memory_bytes, history_bytes, pending_bytes
    cdef public dict locks
    cdef public object on_change, fetch
    # Chunks by number; `order` lists the numbers by seqno, `spare` those that are free.
    cdef Chunk *chunks
    cdef uint32_t *order
    cdef uint32_t *spare
    cdef uint32_t chunk_count, chunk_room, order_count, spare_count
    # The index: 16 bits of hash, 28 of chunk number, 20 of place in the chunk; 0 is empty.
    cdef uint64_t *slots
    cdef uint64_t mask
    cdef uint64_t slots_used
    # While a larger index is filled: the old one, how far it has been moved, and the writes since the last move.
    cdef uint64_t *old_slots
    cdef uint64_t old_mask, old_place
    cdef uint32_t waited
    # The place of the first record that is not on disk, and of the first that no group has taken.
    cdef uint32_t persisted_chunk, persisted_place, flushing_chunk, flushing_place
    # Where the last read that ran out of room stopped, and after which seqno, so that the next one need not search.
    cdef uint32_t read_chunk, read_place
    cdef uint64_t read_seqno
    cdef int64_t flushing_bytes
    cdef Py_ssize_t flushing_points

    cdef char *lookup(self, const char *key, size_t size, uint64_t hashed, uint64_t *where) noexcept
    # For loops that answer requests directly from their input: `Table.set` with all its checks and errors, without
    # Python objects for key, value and answer.
    cdef uint64_t set_raw(
        self, const char *key, size_t key_size, const char *value, size_t value_size, uint32_t flags,
        uint32_t expiry, uint8_t datatype, double now, uint64_t *seqno
    ) except 0
    # `Table.store` in the same way; the caller fills in key, value, sizes, event and metadata.
    cdef int store_raw(self, Version *version, double now) except -1


cdef inline Chunk *chunk_at(Table self, uint64_t slot) noexcept:
    return &self.chunks[(slot >> 20) & 0xFFFFFFF]


cdef inline char *record_at(Table self, uint64_t slot) noexcept:
    return chunk_at(self, slot).data + ((slot & 0xFFFFF) << 3)


# The absolute time of a client's expiry.
cdef uint32_t absolute(uint32_t expiry, double now) noexcept
