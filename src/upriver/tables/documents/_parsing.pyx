# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled reader of documents: a binary Arrow array in, Arrow columns out, without a Python object per field.

The work is done in ``_documents.h``, without the GIL; this module describes the columns to it and hands its memory over
to Arrow. ``plain_parsing`` does the same in plain Python and says what is returned.
"""

import os

import pyarrow as pa

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

cdef extern from "_documents.h":
    enum:
        KIND_COUNT
        KIND_BOOL
        NAMES_MAX
        NAMES_KEPT
        NAME_BYTES_MAX
        READ_NO_MEMORY
        READ_BAD_OFFSETS
        JSON_DEPTH_MAX
        JSON_NUMBER_BYTES_MAX
        POWER_MIN
        POWER_MAX
    struct Column:
        int kind  # an enum
        uint8_t *name
        size_t name_length
        uint64_t mask[2]
        int comparable
        int next
        int64_t row
        int decimal
        int64_t filled
        uint8_t *validity
        uint8_t *values
        uint8_t *data
        size_t size
        size_t room
    struct Name:
        uint8_t *text
        uint32_t length
        uint32_t counts[5]
    struct Reading:
        Column *columns
        int count
        int *slots
        size_t slot_mask
        uint64_t secret[2]
        int64_t rows
        int64_t documents
        int64_t raw_count
        int64_t raw_bytes
        uint8_t *raw
        int *touched
        int *decimals
        Name *names
        int name_count
    uint64_t powers_of_five[1][2]
    int prepare_numbers() noexcept nogil
    int has_texts(Column *column) noexcept nogil
    void index_column(Reading *reading, int index) noexcept nogil
    int read_documents(
        Reading *reading, const uint8_t *validity, int64_t shift, const int32_t *offsets, const uint8_t *data,
        int64_t size
    ) noexcept nogil
    void copy_raw(
        Reading *reading, const int32_t *offsets, const uint8_t *data, uint8_t *validity, int32_t *to_offsets,
        uint8_t *to
    ) noexcept nogil
    void release_reading(Reading *reading) noexcept nogil

#: The same limits as in the plain twin; a test compares them.
LIMITS = {
    "DEPTH_MAX": JSON_DEPTH_MAX,
    "NUMBER_BYTES_MAX": JSON_NUMBER_BYTES_MAX,
    "NAMES_MAX": NAMES_MAX,
    "NAMES_KEPT": NAMES_KEPT,
    "NAME_BYTES_MAX": NAME_BYTES_MAX,
}
#: In the order of the kinds in ``_documents.h``.
KINDS = ("bool", "int", "float", "text", "json")
TYPES = (pa.bool_(), pa.int64(), pa.float64(), pa.string(), pa.string())


def _fill_powers():
    """5^q with its highest bit in bit 127. The paper rounds -27 to -1 up and all others down."""
    cdef int q
    five = int("5")  # a Python number, of any size
    for q in range(POWER_MIN, POWER_MAX + 1):
        power = five ** (<object> abs(q))
        if q < -27:
            power = (1 << 2 * power.bit_length() + 128) // power + 1
        elif q < 0:
            power = (1 << power.bit_length() + 127) // power + 1
        excess = power.bit_length() - 128
        power = power >> excess if excess >= 0 else power << -excess
        powers_of_five[q - POWER_MIN][0] = <uint64_t> (power >> 64)
        powers_of_five[q - POWER_MIN][1] = <uint64_t> (power & 0xFFFFFFFFFFFFFFFF)


_fill_powers()
if prepare_numbers():
    raise ImportError("the C locale is not available")
_SECRET = os.urandom(16)


cdef class _Memory:
    """Memory of the C library that Arrow uses; freed with the last array on it."""

    cdef void *address

    def __dealloc__(self):
        free(self.address)


cdef object buffer_of(void **place, size_t size):
    """Hand memory over to Arrow: it is no longer ours."""
    cdef _Memory memory = _Memory.__new__(_Memory)
    memory.address = place[0]
    place[0] = NULL
    return pa.foreign_buffer(<size_t> memory.address, size, memory)


def parse_columns(values, columns):
    """See ``plain_parsing.parse_columns``."""
    cdef Reading reading
    cdef int64_t shift = values.offset, size = 0
    cdef const uint8_t *validity = NULL
    cdef const uint8_t *data = NULL
    cdef const int32_t *offsets = NULL
    cdef int outcome
    if values.type != pa.binary():
        raise TypeError(f"documents must be a binary array, not {values.type}")
    memset(&reading, 0, sizeof(reading))
    reading.rows = len(values)
    if reading.rows:
        first, second, third = values.buffers()
        if first is not None:
            validity = <const uint8_t *> <size_t> first.address
        if second.size < (shift + reading.rows + 1) * 4:
            raise ValueError("the array has fewer offsets than rows")
        offsets = <const int32_t *> <size_t> second.address + shift
        if third is not None:
            data, size = <const uint8_t *> <size_t> third.address, third.size
    try:
        describe_columns(&reading, columns)
        with nogil:
            outcome = read_documents(&reading, validity, shift, offsets, data, size)
        if outcome == READ_NO_MEMORY:
            raise MemoryError
        if outcome == READ_BAD_OFFSETS:
            raise ValueError("the array's offsets are out of order")
        nothing = {}
        return (
            [array_of(&reading.columns[index], reading.rows, nothing) for index in range(reading.count)],
            raw_of(&reading, values, offsets, data),
            reading.documents,
            names_of(&reading),
            [column.name for index, column in enumerate(columns) if reading.columns[index].decimal],
        )
    finally:
        release_reading(&reading)


cdef int describe_columns(Reading *reading, columns) except -1:
    cdef int index, count = len(columns)
    cdef Column *column
    cdef size_t slots = 16, length, padded
    cdef bytes secret = _SECRET
    cdef bytes name
    cdef const uint8_t *text
    memcpy(reading.secret, <const uint8_t *> secret, 16)
    reading.secret[1] |= 1
    while slots < 4 * <size_t> count:
        slots *= 2
    reading.slot_mask = slots - 1
    reading.slots = <int *> calloc(slots, sizeof(int))
    reading.touched = <int *> malloc((count + 1) * sizeof(int))
    reading.decimals = <int *> malloc((count + 1) * sizeof(int))
    reading.raw = <uint8_t *> calloc(reading.rows + 1, 1)
    reading.columns = <Column *> calloc(count + 1, sizeof(Column))
    if not (reading.slots and reading.touched and reading.decimals and reading.raw and reading.columns):
        raise MemoryError
    reading.count = count
    for index in range(count):
        column = &reading.columns[index]
        name = columns[index].name.encode()
        text, length = name, len(name)
        padded = (length + 1 + 15) // 16 * 16
        column.name = <uint8_t *> calloc(padded, 1)
        if not column.name:
            raise MemoryError
        memcpy(column.name, text, length)
        column.name[length] = c'"'
        column.name_length = length
        if length < 16:
            memset(column.mask, 0xFF, length + 1)
        column.comparable = not any(byte < 0x20 or byte in b'"\\' for byte in name)
        column.kind = KINDS.index(columns[index].kind)
        column.row = -1
        column.next = index + 1
        index_column(reading, index)
    return 0


cdef object array_of(Column *column, int64_t rows, dict nothing):
    """A column as an Arrow array, which owns its memory."""
    cdef size_t bits = (rows + 7) // 8
    type_ = TYPES[column.kind]
    if not column.filled:
        if type_ not in nothing:  # empty columns share their memory
            nothing[type_] = pa.nulls(rows, type_)
        return nothing[type_]
    validity = buffer_of(<void **> &column.validity, bits) if column.filled < rows else None
    if has_texts(column):
        shrink(column)
        offsets = buffer_of(<void **> &column.values, (rows + 1) * 4)
        buffers = [validity, offsets, buffer_of(<void **> &column.data, column.size)]
    else:
        size = bits if column.kind == KIND_BOOL else rows * 8
        buffers = [validity, buffer_of(<void **> &column.values, size)]
    return pa.Array.from_buffers(type_, rows, buffers, rows - column.filled)


cdef void shrink(Column *column) noexcept:
    """Give back the room that the texts of a column did not need."""
    cdef void *smaller = NULL
    if column.room - column.size > column.size // 4:
        smaller = realloc(column.data, column.size + 1)
        if smaller != NULL:
            column.data = <uint8_t *> smaller


cdef object raw_of(Reading *reading, values, const int32_t *offsets, const uint8_t *data):
    """The values that the columns do not represent completely; the others are null."""
    cdef size_t bits = (reading.rows + 7) // 8
    cdef void *validity
    cdef void *to_offsets
    cdef void *to
    if reading.raw_count == 0:
        return pa.nulls(reading.rows, pa.binary())
    if reading.raw_count == reading.rows - values.null_count:
        return values
    validity = calloc(bits, 1)
    to_offsets = malloc((reading.rows + 1) * 4)
    to = malloc(reading.raw_bytes + 1)
    if not (validity and to_offsets and to):
        free(validity)
        free(to_offsets)
        free(to)
        raise MemoryError
    with nogil:
        copy_raw(reading, offsets, data, <uint8_t *> validity, <int32_t *> to_offsets, <uint8_t *> to)
    buffers = [
        buffer_of(&validity, bits), buffer_of(&to_offsets, (reading.rows + 1) * 4), buffer_of(&to, reading.raw_bytes)
    ]
    return pa.Array.from_buffers(pa.binary(), reading.rows, buffers, reading.rows - reading.raw_count)


cdef dict names_of(Reading *reading):
    cdef int index, kind
    cdef Name *name
    found = {}
    for index in range(reading.name_count):
        name = &reading.names[index]
        found[name.text[:name.length].decode()] = {
            KINDS[kind]: name.counts[kind] for kind in range(KIND_COUNT) if name.counts[kind]
        }
    return found
