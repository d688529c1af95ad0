# Receiving changes in bulk, as frames or as Arrow columns.

cdef object receive_frames(Table self, const uint8_t[::1] frames, ttl):
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
            enqueue(self)
    return count


cdef object receive_batch(Table self, batch, ttl):
    cdef Columns columns
    cdef uint64_t before = self.high_seqno
    cdef double now = -1
    cdef size_t count = 0
    cdef Version version
    held = columns_of(batch, &columns)  # keeps the memory of the pointers
    version.ttl = within(self, ttl, TTL_MAX)
    try:
        while count < columns.rows:
            if columns.vbucket[count] != self.vbucket or not MUTATION <= columns.event[count] <= EXPIRATION:
                raise InvalidArguments(
                    f"row {count} is event {columns.event[count]} of vbucket {columns.vbucket[count]},"
                    f" not a change of a key of vbucket {self.vbucket}", vbucket=self.vbucket,
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
            enqueue(self)
        del held
    return count


cdef const char *malformed(const char *frame, size_t rest, uint16_t vbucket, size_t *where) noexcept:
    """What a malformed frame should have and, in ``where``, at which offset; NULL if it is a valid change for us."""
    cdef uint32_t fixed, meta
    cdef uint8_t opcode, extras
    where[0] = 0
    if rest < HEADER_BYTES:
        return "a complete header"
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
        return "a complete body"
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
    """Read the change of a well-formed frame; extended metadata after the value is dropped."""
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
    """Check and append one change of a received run, without notifying anybody yet."""
    cdef uint64_t where
    cdef char *old
    if version.seqno <= self.high_seqno:
        raise OutOfOrder(self.vbucket, version.seqno, f"it does not follow {self.high_seqno}")
    if version.seqno > self.snapshot_end:
        raise OutOfOrder(self.vbucket, version.seqno, f"the snapshot ends at {self.snapshot_end}")
    if version.seqno > SEQNO_MAX:
        raise OutOfOrder(self.vbucket, version.seqno, f"seqnos end at {SEQNO_MAX}")
    check_sizes(self, version.key_size, version.value_size)
    check_limits(self, version.event)
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
            self.lock(key, version.cas, <double>self.ledger.ticks() + version.lock_time)
    return 0


# The contents of a batch's columns.
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
    """Find the contents of the batch's columns; returns the buffers that must be kept meanwhile."""
    cdef list held = []
    cdef size_t[11] numbers
    cdef size_t[11] contents
    cdef Py_ssize_t place
    if not batch.schema.equals(CHANGES):
        raise InvalidArguments("the batch does not have the columns of a batch of changes")
    try:
        batch.validate(full=True)  # also the ends of keys and values, which are used without another check
    except pa.ArrowInvalid as error:
        raise InvalidArguments(f"the batch is invalid: {error}") from None
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
    """Prefetch the slot of the frame at ``offset``; whether it is a frame is checked later."""
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
