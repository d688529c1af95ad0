# Reading history as Arrow columns.

cdef object columns(
    Table self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, bint every, bint keys_only, bytes prefix,
    const uint8_t[::1] stored, double now, uint64_t *done
):
    """An Arrow batch of the visible records.

    If there are many records, the first ones tell how large the others are likely to be, and room is taken for those.
    Where the room does not suffice, the batch ends early.
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
        # At most one row per seqno: a kept batch should hold little unused room.
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
    """Allocate one piece of memory for all columns, each aligned to 64 bytes for Arrow; there are no rows yet."""
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
    """Add rows for the picked records."""
    cdef size_t i
    for i in range(count):
        add_row(to, picked[i], self.vbucket, lock_time_of(self, picked[i], now) if now else 0, keys_only)
    return 0


cdef uint64_t stream_rows(
    Table self, Columns *columns, size_t rows, size_t key_bytes, uint64_t after, uint64_t upto, uint64_t at,
    size_t max_bytes, bint every, double now
) except? 9999:
    """Select and add the rows that follow the first ones, in one pass, for the plain case. Returns the seqno reached.

    While a row is written, the next records are on their way from memory.
    """
    cdef uint32_t i = seek_chunk(self, after), place
    cdef uint32_t first = seek_place(self, i, after) if i < self.order_count else 0
    cdef uint64_t superseded_by, seqno, passed = after
    cdef size_t total = 0
    cdef Chunk *chunk
    cdef const char *record
    cdef const char *following
    cdef Columns to = columns[0]  # a local copy: the compiler knows that writing rows does not change it
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


cdef inline void add_row(
    Columns *to, const char *record, uint16_t vbucket, uint32_t lock_time, bint keys_only
) noexcept:
    """Add a row for a record."""
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
    """Describe the columns to Arrow."""
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
