# Selecting the records of a read.

cdef int pick(size_t count, const char *record) except -1:
    global picked, picked_room
    cdef void *moved
    if count >= picked_room:
        moved = realloc(picked, max(<size_t>4096, 2 * picked_room) * sizeof(char *))
        if moved == NULL:
            raise MemoryError
        picked = <const char **>moved
        picked_room = max(<size_t>4096, 2 * picked_room)
    picked[count] = record
    return 0


cdef size_t select(
    Table self, uint64_t after, uint64_t upto, uint64_t at, size_t max_bytes, bint every, bytes prefix, uint64_t *done,
    size_t most=PICKED_MAX
) except? 9999:
    """Pick the visible records of (after, upto], at most ``most``; ``done`` is the seqno that they reach."""
    cdef uint32_t i = seek_chunk(self, after), place, first
    cdef size_t count = 0, total = 0, key_total = 0, value_total = 0, prefix_size = PyBytes_GET_SIZE(prefix)
    cdef uint64_t superseded_by, seqno, last = after
    cdef uint32_t size, key_size
    cdef Chunk *chunk
    cdef const char *record
    cdef const char *following
    cdef bint full = False
    global picked_bytes, picked_key_bytes, picked_value_bytes
    first = seek_place(self, i, after) if i < self.order_count else 0
    fetch_start(self, i, first)
    while i < self.order_count and not full:
        chunk = &self.chunks[self.order[i]]
        following = self.chunks[self.order[i + 1]].data if i + 1 < self.order_count else chunk.data
        place = first
        first = 0
        while place < chunk.used:
            record = chunk.data + place
            fetch_ahead(record, chunk.data + chunk.used, following)
            place += record_size(record)
            seqno = load_be64(record + R_SEQNO)
            if seqno > upto:
                full, last = True, upto
                break
            superseded_by = load64(record)
            if (every or not superseded_by or superseded_by > at) and (
                not prefix_size or (
                    load_be16(record + R_KEY_LENGTH) >= prefix_size
                    and not memcmp(record_key(record), PyBytes_AS_STRING(prefix), prefix_size)
                )
            ):
                size = full_size(record)
                if count == most or (total and total + size > max_bytes):
                    stop_reading(self, self.order[i], record, last)
                    full = True
                    break
                if count >= picked_room:
                    pick(count, record)
                else:
                    picked[count] = record
                count += 1
                total += size
                key_size = load_be16(record + R_KEY_LENGTH)
                key_total += key_size
                value_total += load_be32(record + R_BODY_LENGTH) - <uint8_t>record[R_EXTRAS_LENGTH] - key_size
            last = seqno
        i += 1
    picked_bytes, picked_key_bytes, picked_value_bytes = total, key_total, value_total
    done[0] = last if full else upto
    return count


cdef object find_evicted(Table self, uint64_t after, uint64_t upto):
    cdef uint32_t i, place
    cdef Chunk *chunk
    cdef char *record
    cdef uint64_t seqno
    if not self.evicted:
        return 0
    i = seek_chunk(self, after)
    while i < self.order_count:
        chunk = &self.chunks[self.order[i]]
        i += 1
        if not chunk.evicted:
            continue
        place = 0
        while place < chunk.used:
            record = chunk.data + place
            place += record_size(record)
            if record[R_MARKS] & MARK_EVICTED:
                seqno = load_be64(record + R_SEQNO)
                if seqno > after:
                    return seqno if seqno <= upto else 0
    return 0


cdef int restore(Table self, size_t count, const uint8_t[::1] block) except -1:
    """Replace picked records whose value was evicted by the stored ones; both are in the order of seqnos."""
    cdef size_t i, offset = 0, size = 0
    cdef uint64_t seqno
    cdef uint32_t step = 0
    cdef const char *data = NULL
    if not self.evicted:
        return 0
    if block is not None:
        size = block.shape[0]
        data = <const char *>&block[0]  # the caller keeps the block while the frames are made
    for i in range(count):
        if not picked[i][R_MARKS] & MARK_EVICTED:
            continue
        seqno = load_be64(picked[i] + R_SEQNO)
        while offset < size:
            step = stored_step(data + offset, size - offset)
            if not step:
                raise_corrupt(self.vbucket)
            if load_be64(data + offset + R_SEQNO) >= seqno:
                break
            offset += step
        if offset >= size or load_be64(data + offset + R_SEQNO) != seqno:
            raise CorruptData("", f"the value of change {seqno} is not on disk")
        # It must equal the record in memory in everything but the value.
        if memcmp(data + offset + R_FRAME, picked[i] + R_FRAME, <size_t>(R_LOCK_TIME - R_FRAME)) or memcmp(
            record_key(data + offset), record_key(picked[i]), load_be16(picked[i] + R_KEY_LENGTH)
        ):
            raise CorruptData("", f"change {seqno} of vbucket {self.vbucket} differs from the one on disk")
        picked[i] = data + offset
    return 0
