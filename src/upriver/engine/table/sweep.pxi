# Sweeps: dropping, purging and evicting, one chunk at a time.

cdef object sweep_next(
    Table self, uint64_t after, uint64_t floor, uint64_t purge_to, uint64_t purge_before, uint64_t evict_to
):
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


cdef object find_purgeable(Table self, uint64_t after, uint64_t purge_to, uint64_t purge_before):
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


cdef object find_seqno_before(Table self, uint64_t time, uint64_t upto):
    cdef uint32_t i, place, stamp
    cdef uint64_t last = 0, seqno
    cdef double now = self.ledger.clock()
    cdef Chunk *chunk
    cdef Chunk *following
    for i in range(self.order_count):
        chunk = &self.chunks[self.order[i]]
        # Only the last of the chunks that are entirely old is walked: its last record may have been dropped.
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


cdef int sweep_chunk(
    Table self, uint32_t i, uint64_t floor, uint64_t purge_to, uint64_t purge_before, uint64_t evict_to
) except -1:
    """Rewrite one chunk without the dropped records; the others move up, into the chunk before while they fit."""
    cdef uint32_t number = self.order[i], place = 0, size, slim, home
    cdef uint64_t seqno
    cdef Chunk *chunk = &self.chunks[number]
    cdef Chunk *to = chunk
    cdef char *record
    cdef uint32_t before = chunk.used
    # Writers append to the last chunk, so its records stay in it.
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
            # The last chunk keeps room for the next writes, but not all the room that a large value has left.
            if i + 1 < self.order_count or arena_size(chunk.used) <= chunk.size / 4:
                shrink_chunk(self, chunk)
    return 0


cdef inline bint drop_record(
    Table self, const char *record, uint64_t floor, uint64_t purge_to, uint64_t purge_before
) noexcept:
    """Subtract a record that no retained state can see from the counts; returns whether it is such a record."""
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
    """Mark a value as evicted unless it was read since the last sweep; returns whether it was marked now."""
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
