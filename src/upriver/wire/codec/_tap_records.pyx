# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled version of ``tap_records``."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset


cdef enum:
    # A record: prefix, header, the numbers that all extras share, then those of a mutation.
    TIME = 8
    TTL = 12
    FRAME = 16
    OPCODE = 17
    KEY_LENGTH = 18
    EXTRAS_LENGTH = 20
    DATATYPE = 21
    BODY_LENGTH = 24
    SEQNO = 40
    REV_SEQNO = 48
    ITEM_FLAGS = 56
    NRU = 70
    EXTRAS = 40
    IS_MUTATION = 0x57
    SNAPPY = 2
    # A message.
    HEADER = 24
    MUTATION = 0x41
    MUTATION_EXTRAS = 16
    MUTATION_PRIVATE = 9
    DELETE = 0x42
    DELETE_EXTRAS = 8
    DELETE_PRIVATE = 8
    ACK = 1


# No messages are as long.
cdef size_t COMPRESSED = <size_t> -1


cdef inline uint32_t load_u32(const uint8_t *at) noexcept nogil:
    return (<uint32_t> at[0] << 24) | (<uint32_t> at[1] << 16) | (<uint32_t> at[2] << 8) | at[3]


cdef inline uint64_t load_u64(const uint8_t *at) noexcept nogil:
    return (<uint64_t> load_u32(at) << 32) | load_u32(at + 4)


cdef inline void store_u32(uint8_t *at, uint32_t number) noexcept nogil:
    at[0], at[1], at[2], at[3] = number >> 24, (number >> 16) & 0xFF, (number >> 8) & 0xFF, number & 0xFF


cdef inline bint is_left_out(
    const uint8_t *record, uint64_t seqno, uint32_t since, uint64_t since_upto, uint8_t ttl
) noexcept nogil:
    cdef uint32_t time
    memcpy(&time, record + TIME, 4)
    return ttl == 0 or (time < since and seqno <= since_upto)


cdef size_t measure(
    const uint8_t *data, size_t at, size_t length, size_t count_max, uint32_t since, uint64_t since_upto,
    uint8_t ttl_min,
) noexcept nogil:
    """The size of the messages in bytes; COMPRESSED if a value is compressed."""
    cdef size_t total = 0, count = 0
    cdef uint32_t body
    cdef const uint8_t *record
    while at < length and count < count_max:
        record = data + at
        body = load_u32(record + BODY_LENGTH)
        at += EXTRAS + body
        if is_left_out(record, load_u64(record + SEQNO), since, since_upto, max(record[TTL], ttl_min)):
            continue
        count += 1
        if record[OPCODE] == IS_MUTATION:
            if record[DATATYPE] & SNAPPY:
                return COMPRESSED
            total += HEADER + MUTATION_EXTRAS + MUTATION_PRIVATE + body - record[EXTRAS_LENGTH]
        else:
            total += HEADER + DELETE_EXTRAS + DELETE_PRIVATE
            total += (<size_t> record[KEY_LENGTH] << 8) | record[KEY_LENGTH + 1]
    return total


def lay_out(
    bytes records not None, size_t at, uint32_t opaque, size_t count_max, uint16_t flags, uint32_t since,
    uint64_t since_upto, uint8_t ttl_min, int ack,
):
    """Convert the records from ``at`` on. Returns the messages, their number, where it stopped, the last seqno, the number
    of records without hops, and whether nothing was converted because values are compressed."""
    cdef const uint8_t *data = <const uint8_t *> PyBytes_AS_STRING(records)
    cdef const uint8_t *record
    cdef size_t length = PyBytes_GET_SIZE(records), count = 0, tired = 0, rest
    cdef size_t total = measure(data, at, length, count_max, since, since_upto, ttl_min)
    if total == COMPRESSED:
        return b"", 0, at, 0, 0, True
    cdef uint64_t seqno = 0
    cdef uint32_t body
    cdef uint8_t ttl, extras
    cdef bytes out = PyBytes_FromStringAndSize(NULL, total)
    cdef uint8_t *start = <uint8_t *> PyBytes_AS_STRING(out)
    cdef uint8_t *to = start
    cdef uint8_t *last = NULL
    while at < length and count < count_max:
        record = data + at
        body = load_u32(record + BODY_LENGTH)
        at += EXTRAS + body
        seqno = load_u64(record + SEQNO)
        ttl = max(record[TTL], ttl_min)
        if is_left_out(record, seqno, since, since_upto, ttl):
            tired += ttl == 0
            continue
        last = to
        extras = record[EXTRAS_LENGTH]
        memcpy(to, record + FRAME, HEADER)
        store_u32(to + 12, <uint32_t> (opaque + count))
        memset(to + HEADER, 0, 8)
        to[HEADER + 4] = ttl
        if record[OPCODE] == IS_MUTATION:
            rest = body - extras
            to[1], to[4] = MUTATION, MUTATION_EXTRAS
            to[HEADER + 1] = MUTATION_PRIVATE
            to[HEADER + 2], to[HEADER + 3] = flags >> 8, flags & 0xFF
            memcpy(to + HEADER + 8, record + ITEM_FLAGS, 8)
            memcpy(to + HEADER + 16, record + REV_SEQNO, 8)
            to[HEADER + 24] = record[NRU]
            store_u32(to + 8, <uint32_t> (MUTATION_EXTRAS + MUTATION_PRIVATE + rest))
            to += HEADER + MUTATION_EXTRAS + MUTATION_PRIVATE
        else:
            rest = (<size_t> record[KEY_LENGTH] << 8) | record[KEY_LENGTH + 1]
            to[1], to[4], to[5] = DELETE, DELETE_EXTRAS, 0
            to[HEADER + 1] = DELETE_PRIVATE
            memcpy(to + HEADER + 8, record + REV_SEQNO, 8)
            store_u32(to + 8, <uint32_t> (DELETE_EXTRAS + DELETE_PRIVATE + rest))
            to += HEADER + DELETE_EXTRAS + DELETE_PRIVATE
        memcpy(to, record + EXTRAS + extras, rest)
        to += rest
        count += 1
    if last != NULL and ((ack & 1 and count == count_max) or (ack & 2 and at >= length)):
        last[HEADER + 3] |= ACK
    return out, count, at, seqno, tired, False
