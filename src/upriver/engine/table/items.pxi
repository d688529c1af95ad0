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
        raise TemporaryFailure("the value is on disk, but the bucket has no disk", vbucket=self.vbucket)
    else:
        item.value = self.fetch(item.seqno)  # runs Python code; the record is not used after it
    return item


cdef char *live_record(Table self, bytes key, double *now) except? NULL:
    """The record of a live item, or NULL. If the clock must be asked, ``now`` is set."""
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


cdef object lock_of(Table self, bytes key):
    held = self.locks.get(key)
    if held is not None and held[1] <= self.ledger.ticks():
        del self.locks[key]
        return None
    return held


cdef uint32_t lock_time_of(Table self, const char *record, double now) except? 9999:
    """The remaining time of the lock of an item, in full seconds; 0 if there is none. It is rounded up: a copy may hold
    the lock longer than promised, but not shorter."""
    if load64(record) or <uint8_t>record[R_OPCODE] != OPCODE_MUTATION:
        return 0
    held = self.locks.get(key_of(record))
    if held is None or held[1] <= now:
        return 0
    # A version that was read back from disk does not say whether it is superseded.
    newest = lookup_bytes(self, key_of(record))
    if newest == NULL or load_be64(newest + R_SEQNO) != load_be64(record + R_SEQNO):
        return 0
    return <uint32_t>ceil(<double>held[1] - now)


cdef bint expire_if_due(Table self, bytes key, double now) except -1:
    """Write the expiration of an expired item, if there is room. Returns whether the item has expired."""
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
        write_change(self, EXPIRATION, key, b"", 0, 0, 0, 0, 0, &seqno, 255, now)
    return True


cdef object find_expired(Table self, uint64_t after):
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
