# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled version of ``frame_runs``."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from upriver.wire.framing import BODY_BYTES_MAX

cdef enum:
    HEADER = 24
    REQUEST = 0x80
    OPCODE = 1
    KEY_LENGTH = 2
    EXTRAS_LENGTH = 4
    VBUCKET = 6
    BODY_LENGTH = 8
    OPAQUE = 12
    SEQNO = 24
    MUTATION = 0x57
    DELETION = 0x58
    EXPIRATION = 0x59
    # by_seqno, rev_seqno, then 4 bytes of time against 2 of nmeta.
    EXPIRATION_EXTRAS = 20
    DELETION_EXTRAS = 18
    SHARED_EXTRAS = 16
    SHORTER = EXPIRATION_EXTRAS - DELETION_EXTRAS


cdef inline uint32_t load_u32(const uint8_t *at) noexcept nogil:
    return (<uint32_t> at[0] << 24) | (<uint32_t> at[1] << 16) | (<uint32_t> at[2] << 8) | at[3]


cdef inline uint64_t load_u64(const uint8_t *at) noexcept nogil:
    return (<uint64_t> load_u32(at) << 32) | load_u32(at + 4)


cdef inline void store_u32(uint8_t *at, uint32_t number) noexcept nogil:
    at[0], at[1], at[2], at[3] = number >> 24, (number >> 16) & 0xFF, (number >> 8) & 0xFF, number & 0xFF


def expired_as_deleted(bytes frames not None):
    """The same frames, with each expiration as a deletion."""
    cdef const uint8_t *data = <const uint8_t *> PyBytes_AS_STRING(frames)
    cdef size_t length = PyBytes_GET_SIZE(frames), at = 0, size, count = 0, rest
    cdef uint8_t *to
    cdef bytes out
    while at < length:
        count += data[at + OPCODE] == EXPIRATION
        at += HEADER + load_u32(data + at + BODY_LENGTH)
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


cdef inline bint is_change(const uint8_t *frame, bint modern) noexcept nogil:
    """Whether this is a change whose extras have an allowed length."""
    cdef uint8_t opcode = frame[OPCODE], extras = frame[EXTRAS_LENGTH]
    if frame[0] != REQUEST:
        return False
    if opcode == MUTATION:
        return extras == 31 or (extras == 30 and not modern)
    if opcode == DELETION:
        return extras == DELETION_EXTRAS or (extras == 21 and modern)
    return opcode == EXPIRATION and (extras == DELETION_EXTRAS or (extras == EXPIRATION_EXTRAS and modern))


def change_run(
    const uint8_t[::1] data not None, size_t at, uint64_t after, uint64_t upto, bint modern,
    size_t body_bytes_max=BODY_BYTES_MAX,
):
    """The run of changes that starts at ``at``: where it ends, its last seqno, and how many changes it has."""
    cdef size_t length = data.shape[0], body, count = 0, first = at
    cdef const uint8_t *frame
    cdef uint64_t seqno
    cdef uint16_t key
    while at <= length and length - at >= HEADER:
        frame = &data[at]
        body = load_u32(frame + BODY_LENGTH)
        key = (<uint16_t> frame[KEY_LENGTH] << 8) | frame[KEY_LENGTH + 1]
        if not is_change(frame, modern) or not key or body < <size_t> frame[EXTRAS_LENGTH] + key:
            break
        if body > body_bytes_max or length - at - HEADER < body:
            break
        if memcmp(frame + VBUCKET, &data[first] + VBUCKET, 2) or memcmp(frame + OPAQUE, &data[first] + OPAQUE, 4):
            break
        seqno = load_u64(frame + SEQNO)
        if seqno <= after or seqno > upto:
            break
        after = seqno
        count += 1
        at += HEADER + body
    return at, after, count


def alike_run(const uint8_t[::1] data not None, size_t at):
    """The complete packets from ``at`` on that differ only in their opaque: where they end, and their opaques."""
    cdef size_t length = data.shape[0], size
    cdef const uint8_t *first
    cdef const uint8_t *packet
    cdef list opaques = []
    if at > length or length - at < HEADER:
        return at, opaques
    first = &data[at]
    size = HEADER + <size_t> load_u32(first + BODY_LENGTH)
    while length - at >= size:
        packet = &data[at]
        if memcmp(packet, first, OPAQUE) or memcmp(packet + OPAQUE + 4, first + OPAQUE + 4, size - OPAQUE - 4):
            break
        opaques.append(load_u32(packet + OPAQUE))
        at += size
    return at, opaques


def changes_end(const uint8_t[::1] data not None, size_t at):
    """The end of the changes at ``at``, of any stream; beyond the data if the last one is incomplete."""
    cdef size_t length = data.shape[0]
    while at + HEADER <= length and data[at] == REQUEST and MUTATION <= data[at + OPCODE] <= EXPIRATION:
        at += HEADER + <size_t> load_u32(&data[at] + BODY_LENGTH)
    return at
