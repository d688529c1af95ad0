# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled twin of ``frames``: see there."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    HEADER = 24
    OPCODE = 1
    EXTRAS_LENGTH = 4
    BODY_LENGTH = 8
    SEQNO = 24
    DELETION = 0x58
    EXPIRATION = 0x59
    # by_seqno, rev_seqno, then 4 bytes of time against 2 of nmeta.
    EXPIRATION_EXTRAS = 20
    DELETION_EXTRAS = 18
    SHARED_EXTRAS = 16
    SHORTER = EXPIRATION_EXTRAS - DELETION_EXTRAS


cdef inline uint32_t load_u32(const uint8_t *at) noexcept nogil:
    return (<uint32_t> at[0] << 24) | (<uint32_t> at[1] << 16) | (<uint32_t> at[2] << 8) | at[3]


cdef inline void store_u32(uint8_t *at, uint32_t number) noexcept nogil:
    at[0], at[1], at[2], at[3] = number >> 24, (number >> 16) & 0xFF, (number >> 8) & 0xFF, number & 0xFF


def expirations_as_deletions(bytes frames not None):
    """The same frames with a deletion in the place of each expiration."""
    cdef const uint8_t *data = <const uint8_t *> PyBytes_AS_STRING(frames)
    cdef size_t length = PyBytes_GET_SIZE(frames), at = 0, size, count = 0, rest
    cdef uint8_t *to
    cdef bytes out
    while at < length:
        count += data[at + OPCODE] == EXPIRATION
        at += HEADER + load_u32(data + at + BODY_LENGTH)
    if not count:
        return frames
    out = PyBytes_FromStringAndSize(NULL, length - count * SHORTER)
    to = <uint8_t *> PyBytes_AS_STRING(out)
    at = 0
    while at < length:
        size = HEADER + load_u32(data + at + BODY_LENGTH)
        if data[at + OPCODE] != EXPIRATION:
            memcpy(to, data + at, size)
            to += size
        else:
            memcpy(to, data + at, HEADER + SHARED_EXTRAS)
            to[OPCODE], to[EXTRAS_LENGTH] = DELETION, DELETION_EXTRAS
            store_u32(to + BODY_LENGTH, <uint32_t> (size - HEADER - SHORTER))
            to[HEADER + SHARED_EXTRAS] = to[HEADER + SHARED_EXTRAS + 1] = 0
            rest = size - HEADER - EXPIRATION_EXTRAS
            memcpy(to + HEADER + DELETION_EXTRAS, data + at + HEADER + EXPIRATION_EXTRAS, rest)
            to += size - SHORTER
        at += size
    return out


def last_seqno(bytes frames not None):
    """The seqno of the last frame; 0 if there is none."""
    cdef const uint8_t *data = <const uint8_t *> PyBytes_AS_STRING(frames)
    cdef size_t length = PyBytes_GET_SIZE(frames), at = 0, last = 0
    if not length:
        return 0
    while at < length:
        last = at
        at += HEADER + load_u32(data + at + BODY_LENGTH)
    return (<uint64_t> load_u32(data + last + SEQNO) << 32) | load_u32(data + last + SEQNO + 4)
