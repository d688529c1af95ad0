# Going back to an earlier seqno.

cdef object truncate_to(Table self, uint64_t seqno):
    cdef uint32_t i, first = seek_chunk(self, seqno)
    cdef uint64_t dropped = 0, kept = 0, pending = 0
    for i in range(self.order_count):
        if i < first:
            kept += self.chunks[self.order[i]].used
        else:
            dropped += self.chunks[self.order[i]].used
    # Removing one key from the index costs as much as entering many into a new one.
    if dropped * 32 > kept:
        if first < self.order_count:
            kept += self.chunks[self.order[first]].used
        renew_index(self, min(self.slots_used, kept / RECORD_BYTES_MIN if seqno else 0))
        drop_after(self, seqno)
        rebuild_index(self, seqno)
    else:
        forget_after(self, first, seqno)
        drop_after(self, seqno)
        restore_superseded(self, seqno)
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


cdef int renew_index(Table self, uint64_t keys) except -1:
    """Make an empty index with room for this many keys."""
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


cdef void rebuild_index(Table self, uint64_t seqno) noexcept:
    """Count all records as of ``seqno`` and enter the current ones into the empty index, each key once."""
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
    """Enter the slots of keys that are not in the index yet."""
    cdef uint64_t where
    cdef uint32_t i
    for i in range(count):
        where = hashes[i] & self.mask
        while self.slots[where]:
            where = (where + 1) & self.mask
        self.slots[where] = slots[i]
    self.slots_used += count


cdef void forget_after(Table self, uint32_t i, uint64_t seqno) noexcept:
    """Subtract the records after ``seqno`` from the counts and remove their keys, while all records are still there."""
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
    """Drop the records after ``seqno`` from the chunks."""
    cdef Chunk *chunk
    while self.order_count and self.chunks[self.order[self.order_count - 1]].first_seqno > seqno:
        drop_chunk(self, self.order_count - 1)
    if self.order_count:
        chunk = &self.chunks[self.order[self.order_count - 1]]
        if chunk.last_seqno > seqno:
            chunk.used = seek_place(self, self.order_count - 1, seqno)
            chunk.last_seqno = seqno
            count_chunk(chunk)


cdef int restore_superseded(Table self, uint64_t seqno) except -1:
    """Make the versions that were superseded after ``seqno`` current again."""
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
    """Make a version current whose successor was dropped."""
    cdef uint32_t expiry = live_expiry(record)
    store64(record, 0)
    chunk.superseded -= 1
    if <uint8_t>record[R_OPCODE] != OPCODE_MUTATION:
        chunk.tombstones += 1
    elif expiry and expiry < chunk.min_expiry:
        chunk.min_expiry = expiry
