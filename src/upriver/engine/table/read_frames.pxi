# Reading history as frames.

cdef object read_frames(
    Table self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, uint32_t opaque, bint every,
    bint keys_only, bytes prefix, block
):
    cdef const uint8_t[::1] stored = block if block else None
    cdef double now = self.ledger.ticks() if self.locks else 0
    cdef Reading got
    cdef size_t i, total = 0
    cdef bytes out
    if not (keys_only or prefix or self.evicted or self.locks) and upto > after + FEW and max_bytes <= ROOM_MAX:
        out = streamed_frames(self, max_bytes, after, upto, at, opaque, every, &got)
        if got.count or got.done >= upto:  # otherwise the next change is larger than the room
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


cdef object read_frames_into(
    Table self, uint8_t[::1] buffer, uint64_t after, uint64_t upto, uint64_t at, uint32_t opaque, bint every,
    bint keys_only, bytes prefix, block
):
    cdef const uint8_t[::1] stored = block if block else None
    cdef double now = self.ledger.ticks() if self.locks else 0
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


cdef object read_as_records(
    Table self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, bint keys_only, block
):
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


cdef struct Reading:
    # The number of changes, the seqno up to which the range is done, the last seqno, the number of expirations.
    size_t count
    uint64_t done
    uint64_t last
    size_t expirations


cdef inline uint32_t frame_size(const char *record, bint keys_only) noexcept:
    cdef uint32_t header = R_EXTRAS - R_FRAME
    if keys_only:
        return header + <uint8_t>record[R_EXTRAS_LENGTH] + load_be16(record + R_KEY_LENGTH)
    return header + load_be32(record + R_BODY_LENGTH)


cdef inline void fetch_start(Table self, uint32_t i, uint32_t place) noexcept:
    """Prefetch the first records; each record prefetches the ones further on."""
    cdef Chunk *chunk
    if i < self.order_count:
        chunk = &self.chunks[self.order[i]]
        fetch_first(chunk.data + place, chunk.data + chunk.used)


cdef size_t stream_frames(
    Table self, char *to, size_t room, uint64_t after, uint64_t upto, uint64_t at, uint32_t opaque, bint every,
    Reading *got
) noexcept:
    """Select and copy in one pass, for the plain case: each record is touched once."""
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
    """The same into a new bytes object, which is shortened to its contents.

    It is never larger than all records that follow: the C library maps large blocks afresh each time, and the kernel
    would clear their pages for every read of a small vbucket.
    """
    cdef PyObject *taken = new_bytes(NULL, min(room, held_between(self, after, upto, room)))
    cdef char *to = PyBytes_AS_STRING(<bytes>taken)
    cdef bytes out
    resize_bytes(&taken, stream_frames(self, to, room, after, upto, at, opaque, every, got))
    out = <bytes>taken
    Py_DECREF(out)  # the cast above has counted a second reference
    return out


cdef void look_over(Reading *got, uint64_t after) noexcept:
    """Fill in the expirations and the last seqno of the picked records."""
    cdef size_t i
    got.expirations = 0
    for i in range(got.count):
        got.expirations += picked[i][R_OPCODE] == OPCODE_EXPIRATION
    got.last = load_be64(picked[got.count - 1] + R_SEQNO) if got.count else after


cdef size_t copy_frames(
    Table self, char *to, size_t count, uint32_t opaque, bint keys_only, double now
) except? 9999:
    """Copy the frames of the picked records, one after the other."""
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
