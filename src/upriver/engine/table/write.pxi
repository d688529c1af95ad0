# Writing one change, and the checks before it.

cdef int check_active(Table self) except -1:
    if not self.active:
        raise NotMyVbucket(vbucket=self.vbucket)
    return 0


cdef int check_room(Table self, bytes key, bytes value, uint8_t event) except -1:
    check_sizes(self, PyBytes_GET_SIZE(key), PyBytes_GET_SIZE(value))
    return check_limits(self, event)


cdef int check_sizes(Table self, size_t key_size, size_t value_size) except -1:
    if not 0 < key_size <= KEY_BYTES_MAX:
        raise InvalidArguments(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {key_size}", vbucket=self.vbucket)
    if value_size > VALUE_BYTES_MAX:
        raise TooBig(vbucket=self.vbucket)
    return 0


cdef int check_limits(Table self, uint8_t event) except -1:
    cdef Ledger ledger = self.ledger
    cdef int64_t limit
    if ledger.refusal:
        raise TemporaryFailure(ledger.refusal, vbucket=self.vbucket)
    if 0 < ledger.queue_bytes_max <= ledger.pending_bytes:
        raise TemporaryFailure("the queue to disk is full", vbucket=self.vbucket)
    if 0 < ledger.quota_bytes <= ledger.memory_bytes:
        soon = ledger.relief is not None and ledger.relief()
        # Where nothing can be evicted, only deletions make room, once compaction has dropped the deleted versions.
        limit = ledger.quota_bytes if event == MUTATION else with_reserve(ledger.quota_bytes)
        if limit <= ledger.memory_bytes:
            if soon:
                raise TemporaryFailure("memory is full until more is on disk", vbucket=self.vbucket)
            raise OutOfMemory(vbucket=self.vbucket)
    return 0


cdef int check_cas(Table self, bytes key, const char *record, uint64_t cas) except -1:
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


cdef inline uint64_t within(Table self, number, uint64_t most) except? 0xFFFFFFFFFFFFFFFF:
    """A client's number, if it is at most ``most``."""
    cdef uint64_t given
    if PyLong_Check(number):
        given = quick_number_of(number)
        if given <= most and given != NUMBER_MAX:
            return given
        PyErr_Clear()
    return checked_within(self, number, most)


cdef uint64_t checked_within(Table self, number, uint64_t most) except? 0xFFFFFFFFFFFFFFFF:
    """The same for a number that may be too large, or not be an int."""
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


cdef uint64_t write_change(
    Table self, uint8_t event, bytes key, bytes value, uint32_t flags, uint32_t expiry, uint8_t datatype,
    uint64_t cas, uint64_t rev_seqno, uint64_t *seqno, uint8_t ttl, double now
) except 0:
    """Append a record as the newest of its key; returns the CAS, or 1 if the given CAS is 0.

    ``seqno`` is 0 or a given seqno, and is set to that of the change: a callback may already write the next one.
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


cdef int write_version(Table self, Version *version, double now) except -1:
    """Fill in CAS, revision and seqno where they are 0, append the record and notify the waiters."""
    cdef uint64_t where
    cdef bint given = version.seqno != 0  # a received change keeps its CAS and revision, even if 0
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
        enqueue(self)
    return 0


cdef inline uint64_t revision_after(Table self, const char *old) noexcept:
    """One more than the revision of the old version, or else of any deleted key of the vbucket.

    A received change may have the highest revision that there is; then the CAS alone decides.
    """
    cdef uint64_t rev_seqno = load_be64(old + R_REV_SEQNO) if old != NULL else self.deleted_rev_seqno
    return rev_seqno if rev_seqno == REV_SEQNO_MAX else rev_seqno + 1


cdef uint32_t absolute(uint32_t expiry, double now) noexcept:
    """Memcached's rule: up to 30 days an expiry counts from now; a time beyond what a record holds becomes the last."""
    cdef double when
    if not 0 < expiry <= RELATIVE_EXPIRY_S_MAX:
        return expiry
    when = expiry + floor(now)
    return NEVER if when >= NEVER else <uint32_t>when


cdef inline int64_t with_reserve(int64_t quota_bytes) noexcept:
    """The quota with the reserve for deletions, which make room in the end."""
    return quota_bytes + quota_bytes / DELETIONS_PART


cdef inline void follow(Ledger ledger, uint64_t cas) noexcept:
    if ledger.last_cas < cas < FOLLOWED_CAS_MAX:
        ledger.last_cas = cas


cdef int append(Table self, Version *version, char *old, uint64_t where, double now) except -1:
    """Write the record at the end of the last chunk; it supersedes ``old``, and its slot is ``where``."""
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


cdef int enqueue(Table self) except -1:
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
