# Single records, and the counts that follow from them.

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
    """Count the record that was written at the chunk's end."""
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
