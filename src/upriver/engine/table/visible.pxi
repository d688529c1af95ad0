# Counting the changes that a range delivers.

cdef enum:
    # A range is looked at over at most this many seqnos: one bit for each.
    SPAN_MAX = 1 << 23


cdef object find_visible_end(Table self, uint64_t after, uint64_t upto, uint64_t most, size_t records_max):
    """Each record adds one change, and the record that supersedes it removes that one again.

    A bit for each seqno notes that a record of the range is superseded there. The superseding record itself may be gone,
    so the bits between two records count too.
    """
    cdef uint32_t i = seek_chunk(self, after), place
    cdef uint64_t seqno, superseded_by, last = after, visible = 0, gone, span
    cdef size_t looked_at = 0
    cdef Chunk *chunk
    cdef const char *record
    cdef uint64_t *bits
    if upto <= after:
        return after, 0
    span = min(upto - after, <uint64_t>SPAN_MAX)
    upto = after + span
    bits = <uint64_t *>calloc((span >> 6) + 2, sizeof(uint64_t))
    if bits == NULL:
        raise MemoryError
    try:
        place = seek_place(self, i, after) if i < self.order_count else 0
        while i < self.order_count:
            chunk = &self.chunks[self.order[i]]
            while place < chunk.used:
                record = chunk.data + place
                place += record_size(record)
                seqno = load_be64(record + R_SEQNO)
                if seqno > upto:
                    return upto, visible
                gone = count_bits(bits, last - after, seqno - after)
                if visible + 1 > most + gone:
                    return seqno - 1, visible
                if looked_at == records_max:
                    return last, visible
                looked_at += 1
                visible = visible + 1 - gone
                superseded_by = load64(record)
                if superseded_by and superseded_by <= upto:
                    bits[(superseded_by - after) >> 6] |= <uint64_t>1 << ((superseded_by - after) & 63)
                last = seqno
            place = 0
            i += 1
        return upto, visible
    finally:
        free(bits)
