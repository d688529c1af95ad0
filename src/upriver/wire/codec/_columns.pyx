# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled columnar codec: runs of change packets to Arrow buffers and back, driven by the tables of
``row_layout``.

Decoding makes two passes. The first walks the headers, checks every length and notes where each row, its key and its
value lie; it stops at the first byte that is not a valid row, so the second pass needs no checks. The second
fills one column after the other, in blocks of rows that stay in the cache. Neither touches a Python object, so both run
without the GIL.
"""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

import pyarrow as pa

cdef extern from *:
    """
    #include <stdint.h>
    #include <stdlib.h>
    #include <string.h>
    #if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #define UPRIVER_BE16(x) __builtin_bswap16(x)
    #define UPRIVER_BE32(x) __builtin_bswap32(x)
    #define UPRIVER_BE64(x) __builtin_bswap64(x)
    #else
    #define UPRIVER_BE16(x) (x)
    #define UPRIVER_BE32(x) (x)
    #define UPRIVER_BE64(x) (x)
    #endif
    static inline uint16_t load16(const uint8_t *p) { uint16_t x; memcpy(&x, p, 2); return UPRIVER_BE16(x); }
    static inline uint32_t load32(const uint8_t *p) { uint32_t x; memcpy(&x, p, 4); return UPRIVER_BE32(x); }
    static inline uint64_t load64(const uint8_t *p) { uint64_t x; memcpy(&x, p, 8); return UPRIVER_BE64(x); }
    static inline void store16(uint8_t *p, uint16_t x) { x = UPRIVER_BE16(x); memcpy(p, &x, 2); }
    static inline void store32(uint8_t *p, uint32_t x) { x = UPRIVER_BE32(x); memcpy(p, &x, 4); }
    static inline void store64(uint8_t *p, uint64_t x) { x = UPRIVER_BE64(x); memcpy(p, &x, 8); }

    /* Keys are short: two overlapping fixed-size moves beat a call with a length that varies. */
    static inline void copy_short(uint8_t *to, const uint8_t *from, size_t n) {
        if (n > 32) { memcpy(to, from, n); return; }
        if (n >= 16) { memcpy(to, from, 16); memcpy(to + n - 16, from + n - 16, 16); return; }
        if (n >= 8) { memcpy(to, from, 8); memcpy(to + n - 8, from + n - 8, 8); return; }
        if (n >= 4) { memcpy(to, from, 4); memcpy(to + n - 4, from + n - 4, 4); return; }
        while (n--) to[n] = from[n];
    }

    /* Arrow's C data interface: https://arrow.apache.org/docs/format/CDataInterface.html */
    struct ArrowArray {
        int64_t length, null_count, offset, n_buffers, n_children;
        const void **buffers;
        struct ArrowArray **children;
        struct ArrowArray *dictionary;
        void (*release)(struct ArrowArray *);
        void *private_data;
    };

    #define COLUMNS_ROOM 16
    /* One allocation holds the contents of all columns and what describes them; two batches share it. */
    struct Block {
        int references;
        size_t size;
        struct ArrowArray arrays[COLUMNS_ROOM];
        struct ArrowArray *children[COLUMNS_ROOM];
        const void *buffers[COLUMNS_ROOM][3];
        const void *no_buffer[1];
    };

    /* The first access to each page of new memory costs more than filling it, so a few blocks of released batches are
       reused. Batches are released in any thread, perhaps while another one forks: a thread that does not get the
       lock at once uses the allocator instead, and never waits. */
    #define KEPT_BLOCKS_MAX 16
    #define KEPT_BYTES_MAX (8 << 20)
    #define KEPT_FROM (64 << 10)
    #if defined(__SANITIZE_ADDRESS__)
    #define KEEPS_BLOCKS 0
    #else
    #define KEEPS_BLOCKS 1
    #endif
    static struct Block *kept[KEPT_BLOCKS_MAX];
    static int kept_count;
    static size_t kept_bytes;
    static char kept_lock;
    static struct Block *take_block(size_t size) {
        struct Block *block = NULL;
        if (size >= KEPT_FROM) size = (size + KEPT_FROM - 1) / KEPT_FROM * KEPT_FROM;
        if (size >= KEPT_FROM && KEEPS_BLOCKS && !__atomic_test_and_set(&kept_lock, __ATOMIC_ACQUIRE)) {
            for (int i = kept_count - 1; i >= 0; i--)
                if (kept[i]->size >= size && kept[i]->size / 2 <= size) {
                    block = kept[i];
                    memmove(kept + i, kept + i + 1, (--kept_count - i) * sizeof(*kept));
                    kept_bytes -= block->size;
                    break;
                }
            __atomic_clear(&kept_lock, __ATOMIC_RELEASE);
        }
        if (!block) {
            block = aligned_alloc(64, size);
            if (block) block->size = size;
        }
        return block;
    }
    static void give_back_block(struct Block *block) {
        size_t size = block->size;
        if (size >= KEPT_FROM && size <= KEPT_BYTES_MAX && KEEPS_BLOCKS
            && !__atomic_test_and_set(&kept_lock, __ATOMIC_ACQUIRE)) {
            /* The oldest are freed first: sizes change with the values, and blocks that no longer fit must not stay. */
            while (kept_count && (kept_count == KEPT_BLOCKS_MAX || kept_bytes + size > KEPT_BYTES_MAX)) {
                kept_bytes -= kept[0]->size;
                free(kept[0]);
                memmove(kept, kept + 1, --kept_count * sizeof(*kept));
            }
            kept[kept_count++] = block;
            kept_bytes += size;
            block = NULL;
            __atomic_clear(&kept_lock, __ATOMIC_RELEASE);
        }
        free(block);
    }
    static void release_column(struct ArrowArray *array) { array->release = NULL; }
    static void release_batch(struct ArrowArray *array) {
        struct Block *block = array->private_data;
        for (int64_t i = 0; i < array->n_children; i++)
            if (array->children[i]->release) array->children[i]->release(array->children[i]);
        array->release = NULL;
        if (__atomic_sub_fetch(&block->references, 1, __ATOMIC_ACQ_REL) == 0) give_back_block(block);
    }
    static void describe_column(struct Block *block, int i, int64_t rows, int n_buffers) {
        struct ArrowArray *array = &block->arrays[i];
        memset(array, 0, sizeof(*array));
        array->length = rows;
        array->n_buffers = n_buffers;
        array->buffers = block->buffers[i];
        array->release = release_column;
        block->children[i] = array;
    }
    static void describe_batch(struct Block *block, struct ArrowArray *batch, int64_t rows, int first, int count) {
        memset(batch, 0, sizeof(*batch));
        batch->length = rows;
        batch->n_buffers = 1;
        batch->buffers = block->no_buffer;
        batch->n_children = count;
        batch->children = block->children + first;
        batch->release = release_batch;
        batch->private_data = block;
    }
    """
    struct ArrowArray:
        void (*release)(ArrowArray *) noexcept nogil
    struct Block:
        int references
        const void *buffers[16][3]
        const void *no_buffer[1]
    Block *take_block(size_t size) noexcept nogil
    void describe_column(Block *block, int i, int64_t rows, int n_buffers) noexcept nogil
    void describe_batch(Block *block, ArrowArray *batch, int64_t rows, int first, int count) noexcept nogil
    uint16_t load16(const uint8_t *p) noexcept nogil
    uint32_t load32(const uint8_t *p) noexcept nogil
    uint64_t load64(const uint8_t *p) noexcept nogil
    void store16(uint8_t *p, uint16_t x) noexcept nogil
    void store32(uint8_t *p, uint32_t x) noexcept nogil
    void store64(uint8_t *p, uint64_t x) noexcept nogil
    void copy_short(uint8_t *to, const uint8_t *source, size_t n) noexcept nogil

cdef enum:
    HEADER = 24
    LAYOUTS_MAX = 64
    COLUMNS_MAX = 16
    #: A template is a header and at most this much of a fixed part.
    HEAD_MAX = 64
    #: Rows of a block: their packets should still be in the cache when the last column is filled.
    BLOCK = 256
    ALIGN = 64

ctypedef fused number:
    uint8_t
    uint16_t
    uint32_t
    uint64_t

cdef struct Layout:
    uint8_t opcode
    uint8_t extras_length
    uint8_t event
    uint8_t has_value
    uint16_t fixed_length
    int16_t private_offset
    int16_t trailer_offset
    #: Offset of each wanted column in the packet, -1 if it is absent.
    int16_t places[COLUMNS_MAX]

cdef struct Row:
    const uint8_t *packet
    uint32_t key_length
    uint32_t value_length
    #: Size of extras and engine-private part, of which the layout may know only the beginning.
    uint32_t fixed_length
    uint16_t layout

cdef enum Kind:
    NUMBER, EVENT, KEY, VALUE

cdef struct Column:
    Kind kind
    int place
    int size
    Py_ssize_t start
    Py_ssize_t length
    Py_ssize_t offsets_start
    uint8_t *out
    int32_t *offsets

cdef struct Rows:
    Row *at
    Py_ssize_t count
    Py_ssize_t room
    Py_ssize_t key_bytes
    Py_ssize_t value_bytes


cdef inline bint push_row(Rows *rows, Row row) noexcept nogil:
    cdef Row *moved
    if rows.count == rows.room:
        rows.room = rows.room * 2 if rows.room else 1024
        moved = <Row *> realloc(rows.at, rows.room * sizeof(Row))
        if moved == NULL:
            return False
        rows.at = moved
    rows.at[rows.count] = row
    rows.count += 1
    rows.key_bytes += row.key_length
    rows.value_bytes += row.value_length
    return True


cdef class RowReader:
    """Turns runs of change packets into Arrow arrays; the plain twin says what each method returns."""

    cdef Layout layouts[LAYOUTS_MAX]
    #: The first layout of each opcode, -1 for other opcodes; the layouts of an opcode are adjacent.
    cdef int16_t first_layout[256]
    cdef int layout_count
    cdef uint32_t body_bytes_max
    cdef tuple columns
    cdef int sizes[COLUMNS_MAX]
    cdef int record_columns
    cdef object records_schema, transport_schema

    def __init__(self, layouts, records_schema, transport_schema, body_bytes_max):
        self.records_schema, self.transport_schema = records_schema, transport_schema
        self.record_columns = len(records_schema)
        self.columns = (*records_schema.names, *transport_schema.names)
        types = (*records_schema.types, *transport_schema.types)
        self.body_bytes_max = min(body_bytes_max, 0x7FFFFFFF)
        ordered = sorted(layouts, key=lambda layout: layout.opcode)
        if len(ordered) > LAYOUTS_MAX or len(self.columns) > COLUMNS_MAX:
            raise ValueError("more layouts or columns than the compiled codec has room for")
        for index, type_ in enumerate(types):
            self.sizes[index] = 0 if pa.types.is_binary(type_) else type_.bit_width // 8
        memset(self.first_layout, 0xFF, sizeof(self.first_layout))
        self.layout_count = len(ordered)
        for index, layout in enumerate(ordered):
            self._set_layout(index, layout)
            if self.first_layout[layout.opcode] < 0:
                self.first_layout[layout.opcode] = index

    def _set_layout(self, int index, layout):
        cdef Layout *own = &self.layouts[index]
        own.opcode = layout.opcode
        own.extras_length = layout.extras_length
        own.event = int(layout.event)
        own.has_value = layout.has_value
        own.fixed_length = layout.fixed_length
        own.private_offset = -1 if layout.private is None else layout.private.offset
        own.trailer_offset = -1 if layout.trailer is None else layout.trailer.offset
        for column, name in enumerate(self.columns):
            place = layout.places.get(name)
            own.places[column] = -1 if place is None else place.offset

    def read(self, const uint8_t[::1] head, const uint8_t[::1] data, Py_ssize_t start, Py_ssize_t rows_max,
             Py_ssize_t bytes_max):
        cdef Rows rows
        cdef Py_ssize_t head_length = head.shape[0], length = data.shape[0], budget = bytes_max
        cdef Py_ssize_t size, at = start
        cdef const uint8_t *head_bytes = &head[0] if head_length else NULL
        cdef const uint8_t *bytes_ = &data[0] if length else NULL
        cdef bint enough = True
        memset(&rows, 0, sizeof(rows))
        try:
            with nogil:
                if head_length:
                    size = self.scan(head_bytes, head_length, &rows, &enough)
                    budget -= size
                    if not size:
                        rows_max = 0
                while rows.count < rows_max and budget > 0 and enough:
                    size = self.scan(bytes_ + at, length - at, &rows, &enough)
                    if size == 0:
                        break
                    at += size
                    budget -= size
            if not enough:
                raise MemoryError
            if rows.count == 0:
                return 0, start, None, None
            return rows.count, at, *self.fill(&rows)
        finally:
            free(rows.at)

    cdef Py_ssize_t scan(self, const uint8_t *packet, Py_ssize_t available, Rows *rows, bint *enough) noexcept nogil:
        """Record the row at ``packet``; returns its size, or 0 if it is not a complete, valid row."""
        cdef uint32_t body, fixed, key, trailer = 0
        cdef int index, longest = -1
        cdef Layout *layout
        cdef Row row
        if available < HEADER or packet[0] != 0x80:
            return 0
        index = self.first_layout[packet[1]]
        if index < 0:
            return 0
        body = load32(packet + 8)
        if body > self.body_bytes_max or available - HEADER < <Py_ssize_t> body:
            return 0
        fixed = packet[4]
        while index < self.layout_count and self.layouts[index].opcode == packet[1]:
            layout = &self.layouts[index]
            if layout.extras_length == packet[4]:
                if layout.private_offset >= 0 and body >= packet[4]:
                    fixed = packet[4] + load16(packet + layout.private_offset)
                # Only an engine-private part may be longer than what we know of it.
                if layout.fixed_length == fixed or (layout.private_offset >= 0 and layout.fixed_length < fixed and (
                        longest < 0 or layout.fixed_length > self.layouts[longest].fixed_length)):
                    longest = index
                if layout.fixed_length == fixed:
                    break
            index += 1
        if longest < 0:
            return 0
        layout = &self.layouts[longest]
        key = load16(packet + 2)
        if fixed + key > body:
            return 0
        if layout.trailer_offset >= 0:
            trailer = load16(packet + layout.trailer_offset)
        if fixed + key + trailer > body or (fixed + key + trailer < body and not layout.has_value):
            return 0
        row.packet = packet
        row.layout = longest
        row.fixed_length = fixed
        row.key_length = key
        row.value_length = body - fixed - key - trailer
        if not push_row(rows, row):
            enough[0] = False
            return 0
        return HEADER + body

    cdef tuple fill(self, Rows *rows):
        """Both batches, in one allocation that they share."""
        cdef Py_ssize_t total = aligned(sizeof(Block))
        cdef Column columns[COLUMNS_MAX]
        cdef int index, count = len(self.columns)
        cdef Block *block
        cdef ArrowArray records, transport
        for index in range(count):
            total = self.plan(&columns[index], index, rows, total)
        block = take_block(total)
        if block == NULL:
            raise MemoryError
        block.references = 2
        block.no_buffer[0] = NULL
        for index in range(count):
            columns[index].out = <uint8_t *> block + columns[index].start
            columns[index].offsets = <int32_t *> (<uint8_t *> block + columns[index].offsets_start)
            block.buffers[index][0] = NULL
            if columns[index].kind in (KEY, VALUE):
                block.buffers[index][1] = columns[index].offsets
                block.buffers[index][2] = columns[index].out
                describe_column(block, index, rows.count, 3)
            else:
                block.buffers[index][1] = columns[index].out
                describe_column(block, index, rows.count, 2)
        with nogil:
            fill_columns(rows, self.layouts, columns, count)
        describe_batch(block, &records, rows.count, 0, self.record_columns)
        describe_batch(block, &transport, rows.count, self.record_columns, count - self.record_columns)
        return import_batch(&records, self.records_schema), import_batch(&transport, self.transport_schema)

    cdef Py_ssize_t plan(self, Column *column, int index, Rows *rows, Py_ssize_t start):
        """Place a column at or after ``start``; returns the offset for the next one."""
        name = self.columns[index]
        column.place = index
        column.size = self.sizes[index]
        column.kind = {"event": EVENT, "key": KEY, "value": VALUE}.get(name, NUMBER)
        column.start = start
        column.length = rows.count * column.size
        if column.kind == KEY:
            column.length = rows.key_bytes
        elif column.kind == VALUE:
            column.length = rows.value_bytes
        column.offsets_start = start + aligned(column.length)
        if column.kind in (KEY, VALUE):
            return column.offsets_start + aligned((rows.count + 1) * 4)
        return column.offsets_start


cdef import_batch(ArrowArray *array, schema):
    """Hand an array over to Arrow, which releases it when the last user of the batch is gone."""
    try:
        return pa.RecordBatch._import_from_c(<size_t> array, schema)
    finally:
        if array.release != NULL:  # refused: still ours
            array.release(array)


cdef inline Py_ssize_t aligned(Py_ssize_t size) noexcept nogil:
    return (size + ALIGN - 1) // ALIGN * ALIGN


cdef void fill_columns(Rows *rows, Layout *layouts, Column *columns, int count) noexcept nogil:
    cdef Py_ssize_t first = 0, last
    cdef int index
    cdef bint alike
    cdef Column *column
    while first < rows.count:
        last = min(first + BLOCK, rows.count)
        alike = all_alike(rows, first, last)
        for index in range(count):
            column = &columns[index]
            if column.kind == EVENT:
                fill_events(rows, layouts, first, last, column.out)
            elif column.kind == KEY:
                copy_keys(rows, first, last, column)
            elif column.kind == VALUE:
                copy_values(rows, first, last, column)
            elif column.size == 8:
                fill_numbers(rows, layouts, column.place, alike, first, last, <uint64_t *> column.out)
            elif column.size == 4:
                fill_numbers(rows, layouts, column.place, alike, first, last, <uint32_t *> column.out)
            elif column.size == 2:
                fill_numbers(rows, layouts, column.place, alike, first, last, <uint16_t *> column.out)
            else:
                fill_numbers(rows, layouts, column.place, alike, first, last, <uint8_t *> column.out)
        first = last


cdef void fill_events(Rows *rows, Layout *layouts, Py_ssize_t first, Py_ssize_t last, uint8_t *out) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(first, last):
        out[i] = layouts[rows.at[i].layout].event


cdef inline number load(const uint8_t *at, number *kind) noexcept nogil:
    """The number at ``at``; ``kind`` only tells its type."""
    if number is uint64_t:
        return load64(at)
    elif number is uint32_t:
        return load32(at)
    elif number is uint16_t:
        return load16(at)
    else:
        return at[0]


cdef void fill_numbers(Rows *rows, Layout *layouts, int column, bint alike, Py_ssize_t first, Py_ssize_t last,
                       number *out) noexcept nogil:
    cdef Py_ssize_t i
    cdef int16_t place = layouts[rows.at[first].layout].places[column]
    if alike and place >= 0:
        for i in range(first, last):
            out[i] = load(rows.at[i].packet + place, out)
        return
    for i in range(first, last):
        place = layouts[rows.at[i].layout].places[column]
        out[i] = load(rows.at[i].packet + place, out) if place >= 0 else 0


cdef bint all_alike(Rows *rows, Py_ssize_t first, Py_ssize_t last) noexcept nogil:
    """Whether these rows share one layout. Most blocks do, and need no look-up per row."""
    cdef Py_ssize_t i
    cdef uint16_t different = 0
    for i in range(first, last):
        different |= rows.at[i].layout ^ rows.at[first].layout
    return different == 0


cdef void copy_keys(Rows *rows, Py_ssize_t first, Py_ssize_t last, Column *column) noexcept nogil:
    cdef Py_ssize_t i
    cdef Row *row
    cdef int32_t end = column.offsets[first] if first else 0
    column.offsets[0] = 0
    for i in range(first, last):
        row = &rows.at[i]
        copy_short(column.out + end, row.packet + HEADER + row.fixed_length, row.key_length)
        end += row.key_length
        column.offsets[i + 1] = end


cdef void copy_values(Rows *rows, Py_ssize_t first, Py_ssize_t last, Column *column) noexcept nogil:
    cdef Py_ssize_t i
    cdef Row *row
    cdef int32_t end = column.offsets[first] if first else 0
    column.offsets[0] = 0
    for i in range(first, last):
        row = &rows.at[i]
        memcpy(column.out + end, row.packet + HEADER + row.fixed_length + row.key_length, row.value_length)
        end += row.value_length
        column.offsets[i + 1] = end


# Encoding

cdef struct Source:
    const uint8_t *numbers
    int16_t place
    uint8_t size

cdef struct Template:
    uint8_t head[HEAD_MAX]
    uint16_t head_length
    uint16_t header_length
    uint16_t opaque_place
    uint8_t tells_key_length
    uint8_t key_bytes_min
    uint8_t has_value
    uint8_t source_count
    Source sources[COLUMNS_MAX]

cdef struct Bytes:
    const uint8_t *content
    const int32_t *offsets


cdef const uint8_t *numbers_of(array) except NULL:
    """Where the numbers of an Arrow array lie."""
    buffer = array.buffers()[1]
    cdef size_t address = buffer.address + array.offset * (array.type.bit_width // 8)
    return <const uint8_t *> address


cdef Bytes bytes_of(array):
    """Where the contents and the offsets of a binary Arrow array lie."""
    cdef Bytes found
    _, offsets, content = array.buffers()
    cdef size_t address = offsets.address + array.offset * sizeof(int32_t)
    found.offsets = <const int32_t *> address
    address = 0 if content is None else content.address
    found.content = <const uint8_t *> address
    return found


cdef int set_template(Template *own, template, batch) except -1:
    cdef const uint8_t[::1] head = template.head
    layout = template.layout
    if head.shape[0] > HEAD_MAX:
        raise ValueError("a fixed part longer than the compiled codec has room for")
    memset(own, 0, sizeof(Template))
    memcpy(own.head, &head[0], head.shape[0])
    own.head_length = head.shape[0]
    own.header_length = template.framing.header_size
    own.opaque_place = layout.places["opaque"].offset
    own.tells_key_length = template.tells_key_length
    own.key_bytes_min = template.key_bytes_min
    own.has_value = layout.has_value
    for name, place in layout.places.items():
        if name in batch.schema.names and (name != "vbucket" or template.vbucket_varies):
            own.sources[own.source_count].numbers = numbers_of(batch.column(name))
            own.sources[own.source_count].place = place.offset
            own.sources[own.source_count].size = place.size
            own.source_count += 1
    return 0


# CRC-32 as zlib computes it, eight bytes at a step (Kounavis and Berry's slicing).
cdef uint32_t crc_tables[8][256]


cdef void fill_crc_tables() noexcept:
    cdef uint32_t crc
    cdef int i, k
    for i in range(256):
        crc = i
        for k in range(8):
            crc = (crc >> 1) ^ (0xEDB88320u if crc & 1 else 0u)
        crc_tables[0][i] = crc
    for k in range(1, 8):
        for i in range(256):
            crc = crc_tables[k - 1][i]
            crc_tables[k][i] = (crc >> 8) ^ crc_tables[0][crc & 0xFF]


fill_crc_tables()


cdef uint32_t crc_of(const uint8_t *data, Py_ssize_t size) noexcept nogil:
    cdef uint32_t crc = 0xFFFFFFFFu
    while size >= 8:
        crc ^= data[0] | (<uint32_t> data[1] << 8) | (<uint32_t> data[2] << 16) | (<uint32_t> data[3] << 24)
        crc = (
            crc_tables[7][crc & 0xFF] ^ crc_tables[6][(crc >> 8) & 0xFF] ^ crc_tables[5][(crc >> 16) & 0xFF]
            ^ crc_tables[4][crc >> 24] ^ crc_tables[3][data[4]] ^ crc_tables[2][data[5]] ^ crc_tables[1][data[6]]
            ^ crc_tables[0][data[7]]
        )
        data += 8
        size -= 8
    while size:
        crc = (crc >> 8) ^ crc_tables[0][(crc ^ data[0]) & 0xFF]
        data += 1
        size -= 1
    return crc ^ 0xFFFFFFFFu


def key_vbuckets(keys, uint16_t vbuckets):
    """The vbucket of each key of a binary Arrow array without nulls, in a bucket with this number of vbuckets."""
    cdef Py_ssize_t rows = len(keys), i
    cdef Bytes found
    cdef size_t base
    if not vbuckets:
        raise ValueError("a bucket has at least one vbucket")
    if not rows:
        return pa.array([], pa.uint16())
    found = bytes_of(keys)
    buffer = pa.allocate_buffer(rows * sizeof(uint16_t))
    base = buffer.address
    with nogil:
        for i in range(rows):
            (<uint16_t *> base)[i] = (
                (crc_of(found.content + found.offsets[i], found.offsets[i + 1] - found.offsets[i]) >> 16) & 0x7FFF
            ) % vbuckets
    return pa.Array.from_buffers(pa.uint16(), rows, [None, buffer])


def write_rows(batch, templates, *, uint32_t opaque, uint32_t opaque_step, bint keys_only):
    """The packets of a batch of changes, joined in one Arrow buffer."""
    cdef Template own[8]
    cdef uint8_t known[8]
    cdef Py_ssize_t rows = batch.num_rows, total, bad = -1
    cdef Bytes keys, values
    cdef const uint8_t *events
    cdef size_t base
    if rows == 0:
        return b""
    memset(known, 0, sizeof(known))
    for event, template in templates.items():
        set_template(&own[int(event)], template, batch)
        known[int(event)] = 1
    keys, values = bytes_of(batch.column("key")), bytes_of(batch.column("value"))
    events = numbers_of(batch.column("event"))
    with nogil:
        total = measure(rows, own, known, events, &keys, &values, keys_only, &bad)
    if bad >= 0:
        raise ValueError(f"row {bad} cannot be a packet: event {events[bad]}, "
                         f"a key of {keys.offsets[bad + 1] - keys.offsets[bad]} bytes")
    buffer = pa.allocate_buffer(total)
    base = buffer.address
    with nogil:
        write_packets(rows, own, events, &keys, &values, keys_only, opaque, opaque_step, <uint8_t *> base,
                      <uint8_t *> base + total)
    return buffer


cdef Py_ssize_t measure(Py_ssize_t rows, Template *templates, uint8_t *known, const uint8_t *events, Bytes *keys,
                        Bytes *values, bint keys_only, Py_ssize_t *bad) noexcept nogil:
    """The total size of all packets; ``bad`` becomes the first row that cannot be encoded."""
    cdef Py_ssize_t i, total = 0
    cdef uint8_t event
    cdef int32_t key
    for i in range(rows):
        event = events[i]
        key = keys.offsets[i + 1] - keys.offsets[i]
        if event >= 8 or not known[event] or not templates[event].key_bytes_min <= key <= 0xFFFF:
            bad[0] = i
            return 0
        total += templates[event].head_length + key
        if templates[event].has_value and not keys_only:
            total += values.offsets[i + 1] - values.offsets[i]
    return total


cdef void write_packets(Py_ssize_t rows, Template *templates, const uint8_t *events, Bytes *keys, Bytes *values,
                        bint keys_only, uint32_t opaque, uint32_t opaque_step, uint8_t *out,
                        uint8_t *end) noexcept nogil:
    cdef Py_ssize_t i
    cdef int s
    cdef Template *template
    cdef Source *source
    cdef uint8_t *at
    cdef uint32_t key, value
    for i in range(rows):
        template = &templates[events[i]]
        key = keys.offsets[i + 1] - keys.offsets[i]
        value = 0
        if template.has_value and not keys_only:
            value = values.offsets[i + 1] - values.offsets[i]
        if end - out >= HEAD_MAX:  # a copy of fixed size is faster; the key overwrites the excess
            memcpy(out, template.head, HEAD_MAX)
        else:
            memcpy(out, template.head, template.head_length)
        if template.tells_key_length:
            store16(out + 2, key)
        store32(out + 8, template.head_length - template.header_length + key + value)
        store32(out + template.opaque_place, opaque)
        opaque += opaque_step
        for s in range(template.source_count):
            source = &template.sources[s]
            at = out + source.place
            if source.size == 8:
                store64(at, (<const uint64_t *> source.numbers)[i])
            elif source.size == 4:
                store32(at, (<const uint32_t *> source.numbers)[i])
            elif source.size == 2:
                store16(at, (<const uint16_t *> source.numbers)[i])
            else:
                at[0] = source.numbers[i]
        out += template.head_length
        copy_short(out, keys.content + keys.offsets[i], key)
        out += key
        if value:
            memcpy(out, values.content + values.offsets[i], value)
            out += value
