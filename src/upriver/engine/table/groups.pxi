# Stored records, blocks of them, and the groups of a commit.

cdef inline uint32_t stored_step(const char *data, size_t rest) noexcept:
    """The size of the stored record at ``data``; 0 if it cannot be valid."""
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


cdef void clean(char *data, size_t size) noexcept:
    """Remove the marks and `superseded_by`, which are not stored: loading sets them."""
    cdef size_t offset = 0
    while offset < size:
        store64(data + offset, 0)
        data[offset + R_MARKS] = 0
        offset += full_size(data + offset)


cdef object stored_records(Table self, uint64_t after, uint64_t upto, size_t max_bytes):
    cdef uint32_t i = seek_chunk(self, after), place, size
    cdef uint64_t last = after, seqno
    cdef size_t total = 0, offset = 0, start
    cdef Chunk *chunk
    cdef bytes out
    cdef char *to
    cdef bint full = False
    # First measure, then copy runs of records.
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
        raise CorruptData("", f"a block of vbucket {self.vbucket} exceeds 4 GiB")
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
            raise CorruptData("", f"a record of vbucket {self.vbucket} is damaged")
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


cdef object retained_records(Table self, const uint8_t[::1] data, uint64_t tombstones_to):
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
        # The block and the chunks are both in the order of seqnos.
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
    """Load a stored group into the tables that are not newer than it."""
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
