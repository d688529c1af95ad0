/* JSON documents into columns, in one pass.
 *
 * `read_documents` reads one document after the other and writes each field into the column of its name. A column is
 * filled only where a document has its field, and gets its memory with the first one. If a document turns out
 * to be invalid, the cells that it has filled so far are emptied again; what is reported about its fields is noted when
 * it is complete.
 *
 * Documents of one store mostly have the same fields in the same order. Each column therefore remembers the column that
 * followed it last time, and a name is first compared with that one, quote included, before it is scanned and hashed. */
#ifndef UPRIVER_TABLES_DOCUMENTS_H
#define UPRIVER_TABLES_DOCUMENTS_H

#include "_json.h"

enum Kind { KIND_BOOL, KIND_INT, KIND_FLOAT, KIND_TEXT, KIND_JSON, KIND_COUNT, KIND_NONE = KIND_COUNT };
enum {
    NAMES_MAX = 4096,      /* unknown names with counts; then the rarer ones are dropped */
    NAMES_KEPT = 2048,     /* those that stay */
    NAME_BYTES_MAX = 255,  /* a longer name is not counted */
    NAME_SLOTS = 4 * NAMES_MAX,
    COPY_ROOM = 16,        /* a short text is copied with one wide move */
};
#define FLOAT_EXACT ((int64_t)1 << 53)

struct Column {
    enum Kind kind;
    uint8_t *name;         /* with a quote behind it, and zeros up to a multiple of 16 */
    size_t name_length;
    uint64_t mask[2];      /* the bytes of the name and its quote, if these are at most 16 */
    int comparable;        /* the name is written in a document as it is, without escapes */
    uint64_t hash;
    int next;              /* the column that followed last time */
    int64_t row;           /* the last row that had the field */
    int decimal;           /* an integer column that met a decimal */
    int64_t filled;        /* cells that are not null */
    uint8_t *validity;
    uint8_t *values;       /* numbers of 8 bytes, bits, or offsets of 4 bytes */
    int64_t offsets_done;  /* texts: offsets[0 .. offsets_done] are written */
    uint8_t *data;
    size_t size, room;
};

struct Name {
    uint8_t *text;
    uint32_t length;
    int64_t row;           /* the last row that was counted */
    uint64_t hash;
    uint32_t counts[KIND_COUNT];
};

struct Unknown {           /* a field of the current document that has no column */
    const uint8_t *name;
    uint32_t length;
    enum Kind kind;
};

struct Reading {
    struct Column *columns;
    int count, first;      /* columns, and the one that started the last document */
    int *slots;            /* column + 1 by hash; 0 is free */
    size_t slot_mask;
    uint64_t secret[2];    /* of the hash */
    int64_t rows, row, documents, raw_count, raw_bytes;
    uint8_t *raw;          /* per row: is the value kept? */
    /* of the current document */
    int *touched, touched_count;
    int *decimals, decimals_count;
    int incomplete;
    struct Unknown *unknown;
    size_t unknown_count, unknown_room;
    uint8_t *scratch;      /* names without their escapes */
    size_t scratch_size, scratch_room;
    /* the report */
    struct Name *names;
    int name_count;
    int *name_slots;       /* name + 1 by hash; 0 is free */
};

/* Hashing of names, keyed with a secret so that documents cannot be made to collide -------------------------------- */

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash_name(const struct Reading *reading, const uint8_t *p, size_t length) {
    uint64_t hash = reading->secret[0] ^ length, word = 0;
    for (; length > 8; p += 8, length -= 8) hash = fold(hash ^ load_word(p), reading->secret[1]);
    for (size_t i = 0; i < length; i++) word |= (uint64_t)p[i] << 8 * i;
    return fold(hash ^ word, reading->secret[1]);
}

static int find_column(const struct Reading *reading, const uint8_t *name, size_t length) {
    uint64_t hash = hash_name(reading, name, length);
    for (size_t slot = hash & reading->slot_mask; reading->slots[slot]; slot = (slot + 1) & reading->slot_mask) {
        const struct Column *column = &reading->columns[reading->slots[slot] - 1];
        if (column->hash == hash && column->name_length == length && !memcmp(column->name, name, length))
            return reading->slots[slot] - 1;
    }
    return -1;
}

static void index_column(struct Reading *reading, int index) {
    struct Column *column = &reading->columns[index];
    column->hash = hash_name(reading, column->name, column->name_length);
    size_t slot = column->hash & reading->slot_mask;
    while (reading->slots[slot]) slot = (slot + 1) & reading->slot_mask;
    reading->slots[slot] = index + 1;
}

/* Cells ------------------------------------------------------------------------------------------------------------ */

static inline void set_bit(uint8_t *bits, int64_t i) { bits[i >> 3] |= (uint8_t)(1 << (i & 7)); }
static inline void clear_bit(uint8_t *bits, int64_t i) { bits[i >> 3] &= (uint8_t)~(1 << (i & 7)); }
static inline int get_bit(const uint8_t *bits, int64_t i) { return bits[i >> 3] >> (i & 7) & 1; }

static inline void mark_filled(struct Column *column, int64_t row) {
    set_bit(column->validity, row);
    column->filled++;
}

static inline int has_texts(const struct Column *column) {
    return column->kind == KIND_TEXT || column->kind == KIND_JSON;
}

/* Offsets of the rows up to this one: their cells are empty. */
static inline void write_offsets(struct Column *column, int64_t row) {
    int32_t *offsets = (int32_t *)column->values;
    while (column->offsets_done < row) offsets[++column->offsets_done] = (int32_t)column->size;
}

/* Where a text of this length can be written; NULL without memory. */
static inline uint8_t *text_room(struct Column *column, size_t length) {
    size_t needed = column->size + length + COPY_ROOM;
    if (needed > column->room) {
        size_t room = column->room < 32768 ? 65536 : column->room * 2;
        if (room < needed) room = needed;
        uint8_t *data = realloc(column->data, room);
        if (!data) return NULL;
        column->data = data;
        column->room = room;
    }
    return column->data + column->size;
}

static inline void finish_text(struct Column *column, int64_t row, const uint8_t *stop) {
    write_offsets(column, row);
    column->size = (size_t)(stop - column->data);
    ((int32_t *)column->values)[row + 1] = (int32_t)column->size;
    column->offsets_done = row + 1;
    mark_filled(column, row);
}

static void empty_cell(struct Column *column, int64_t row) {
    if (!get_bit(column->validity, row)) return;
    clear_bit(column->validity, row);
    column->filled--;
    if (has_texts(column)) {
        column->size = (size_t)((int32_t *)column->values)[row];
        column->offsets_done = row;
    } else if (column->kind == KIND_BOOL) {
        clear_bit(column->values, row);
    } else {
        memset(column->values + row * 8, 0, 8);
    }
}

/* Empty cells for all rows. */
static int prepare_column(struct Column *column, int64_t rows) {
    size_t bits = (size_t)rows / 8 + 64;
    column->validity = calloc(bits, 1);
    column->values = has_texts(column)           ? calloc((size_t)rows + 1, 4)
                     : column->kind == KIND_BOOL ? calloc(bits, 1)
                                                 : calloc((size_t)rows, 8);
    return column->validity && column->values ? 0 : -1;
}

/* One field -------------------------------------------------------------------------------------------------------- */

enum Outcome { OUTCOME_INVALID, OUTCOME_VALID, OUTCOME_NO_MEMORY };

static inline enum Outcome read_text(struct Column *column, int64_t row, const uint8_t *start, const uint8_t *close,
                                     const uint8_t *limit, unsigned flags) {
    size_t length = (size_t)(close - start);
    uint8_t *to = text_room(column, length);
    if (!to) return OUTCOME_NO_MEMORY;
    if (flags & JSON_ESCAPED) {
        finish_text(column, row, unescape(to, start, close));
        return OUTCOME_VALID;
    }
    if (length <= COPY_ROOM && limit - start >= COPY_ROOM) memcpy(to, start, COPY_ROOM);
    else memcpy(to, start, length);
    finish_text(column, row, to + length);
    return OUTCOME_VALID;
}

static enum Outcome read_nested(struct Column *column, int64_t row, const uint8_t *start, const uint8_t *stop,
                                unsigned flags) {
    size_t length = (size_t)(stop - start);
    uint8_t *to = text_room(column, length);
    if (!to) return OUTCOME_NO_MEMORY;
    if (flags & JSON_SPACED) {
        finish_text(column, row, put_compact(to, start, stop));
    } else {
        memcpy(to, start, length);
        finish_text(column, row, to + length);
    }
    return OUTCOME_VALID;
}

static inline int put_number(struct Reading *reading, struct Column *column, const struct Number *number) {
    int64_t row = reading->row;
    if (column->kind == KIND_INT) {
        if (number->kind == NUMBER_INT) {
            memcpy(column->values + row * 8, &number->whole, 8);
            mark_filled(column, row);
            return 1;
        }
        if (number->kind == NUMBER_FLOAT && !column->decimal)
            reading->decimals[reading->decimals_count++] = (int)(column - reading->columns);
    } else if (column->kind == KIND_FLOAT) {
        int exact = number->kind == NUMBER_INT && number->whole >= -FLOAT_EXACT && number->whole <= FLOAT_EXACT;
        double real = exact ? (double)number->whole : number->real;
        if (exact || number->kind == NUMBER_FLOAT) {
            memcpy(column->values + row * 8, &real, 8);
            mark_filled(column, row);
            return exact || !number->is_rounded;
        }
    }
    return 0;
}

/* Read the value at *place into the column, if there is one and it can hold the value. `kind` becomes the kind of
 * column that could. */
static inline enum Outcome read_value(struct Reading *reading, struct Column *column, const uint8_t **place,
                                      const uint8_t *end, const uint8_t *limit, enum Kind *kind) {
    const uint8_t *p = *place, *stop;
    enum Outcome outcome = OUTCOME_VALID;
    unsigned flags = 0;
    int placed = 0;
    *kind = KIND_NONE;
    switch (peek(p, end)) {
    case '"':
        stop = scan_string(p + 1, end, limit, &flags);
        if (!stop) return OUTCOME_INVALID;
        if (!(flags & JSON_LONE)) *kind = KIND_TEXT;
        if (column && column->kind == *kind) {
            outcome = read_text(column, reading->row, p + 1, stop, limit, flags);
            placed = 1;
        }
        stop++;
        break;
    case '-': case '0': case '1': case '2': case '3': case '4': case '5': case '6': case '7': case '8': case '9': {
        struct Number number = {NUMBER_BEYOND, 0, 0, 0};
        stop = scan_number(p, end, &number);
        if (!stop) return OUTCOME_INVALID;
        if (number.kind != NUMBER_BEYOND) *kind = number.kind == NUMBER_INT ? KIND_INT : KIND_FLOAT;
        if (column) placed = put_number(reading, column, &number);
        break;
    }
    case '{': case '[':
        stop = skip_nested(p, end, limit, 1, &flags);
        if (!stop) return OUTCOME_INVALID;
        if (!(flags & JSON_LONE)) *kind = KIND_JSON;
        if (column && column->kind == *kind) {
            outcome = read_nested(column, reading->row, p, stop, flags);
            placed = 1;
        }
        break;
    case 't': case 'f':
        stop = skip_literal(p, end);
        if (!stop) return OUTCOME_INVALID;
        *kind = KIND_BOOL;
        if (column && column->kind == KIND_BOOL) {
            if (*p == 't') set_bit(column->values, reading->row);
            mark_filled(column, reading->row);
            placed = 1;
        }
        break;
    case 'n':
        stop = skip_literal(p, end);
        if (!stop) return OUTCOME_INVALID;
        break;
    default:
        return OUTCOME_INVALID;
    }
    if (!placed) reading->incomplete = 1;
    *place = stop;
    return outcome;
}

/* Names ------------------------------------------------------------------------------------------------------------ */

static inline int is_named(const struct Column *column, const uint8_t *p, const uint8_t *end, const uint8_t *limit) {
    size_t length = column->name_length + 1;
    if (!column->comparable || (size_t)(end - p) < length) return 0;
    if (length > 16 || limit - p < 16) return !memcmp(p, column->name, length);
    return !(((load_word(p) ^ load_word(column->name)) & column->mask[0])
             | ((load_word(p + 8) ^ load_word(column->name + 8)) & column->mask[1]));
}

struct FieldName {
    const uint8_t *text;
    size_t length;
    int lone;
};

/* A name that was not expected. Its text lives as long as the document is read. */
static enum Outcome read_name(struct Reading *reading, const uint8_t **place, const uint8_t *end, const uint8_t *limit,
                              struct FieldName *name) {
    unsigned flags = 0;
    const uint8_t *start = *place, *close = scan_string(start, end, limit, &flags);
    if (!close) return OUTCOME_INVALID;
    name->text = start;
    name->length = (size_t)(close - start);
    name->lone = (flags & JSON_LONE) != 0;
    if ((flags & JSON_ESCAPED) && !name->lone) {
        if (!reading->scratch_size) {
            /* All names of a document fit into its own length, so the texts before are never moved. */
            size_t needed = (size_t)(end - start);
            if (needed > reading->scratch_room) {
                uint8_t *scratch = realloc(reading->scratch, needed);
                if (!scratch) return OUTCOME_NO_MEMORY;
                reading->scratch = scratch;
                reading->scratch_room = needed;
            }
        }
        uint8_t *to = reading->scratch + reading->scratch_size, *stop = unescape(to, start, close);
        name->text = to;
        name->length = (size_t)(stop - to);
        reading->scratch_size += name->length;
    }
    *place = close + 1;
    return OUTCOME_VALID;
}

static int note_unknown(struct Reading *reading, const struct FieldName *name, enum Kind kind) {
    if (kind == KIND_NONE || name->lone || name->length > NAME_BYTES_MAX) return 0;
    if (reading->unknown_count == reading->unknown_room) {
        size_t room = reading->unknown_room ? reading->unknown_room * 2 : 64;
        struct Unknown *unknown = realloc(reading->unknown, room * sizeof(struct Unknown));
        if (!unknown) return -1;
        reading->unknown = unknown;
        reading->unknown_room = room;
    }
    struct Unknown *unknown = &reading->unknown[reading->unknown_count++];
    unknown->name = name->text;
    unknown->length = (uint32_t)name->length;
    unknown->kind = kind;
    return 0;
}

/* The report ------------------------------------------------------------------------------------------------------- */

static int compare_words(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void index_name(struct Reading *reading, int index) {
    size_t slot = reading->names[index].hash & (NAME_SLOTS - 1);
    while (reading->name_slots[slot]) slot = (slot + 1) & (NAME_SLOTS - 1);
    reading->name_slots[slot] = index + 1;
}

/* The more frequent first, and of equal ones the older. */
static uint64_t rank_of(const struct Reading *reading, int index) {
    uint64_t total = 0;
    for (int kind = 0; kind < KIND_COUNT; kind++) total += reading->names[index].counts[kind];
    return (UINT32_MAX - (total > UINT32_MAX ? UINT32_MAX : total)) << 32 | (uint32_t)index;
}

/* Forget the rarer names, so that random names cannot fill the memory. */
static void drop_rare_names(struct Reading *reading) {
    uint64_t ranks[NAMES_MAX];
    int kept = 0;
    for (int i = 0; i < reading->name_count; i++) ranks[i] = rank_of(reading, i);
    qsort(ranks, (size_t)reading->name_count, sizeof(uint64_t), compare_words);
    uint64_t last = ranks[NAMES_KEPT - 1];
    memset(reading->name_slots, 0, NAME_SLOTS * sizeof(int));
    for (int i = 0; i < reading->name_count; i++) {
        if (rank_of(reading, i) > last) {
            free(reading->names[i].text);
        } else {
            reading->names[kept] = reading->names[i];
            index_name(reading, kept++);
        }
    }
    reading->name_count = kept;
}

static struct Name *find_name(struct Reading *reading, const struct Unknown *unknown) {
    uint64_t hash = hash_name(reading, unknown->name, unknown->length);
    struct Name *name;
    for (size_t slot = hash & (NAME_SLOTS - 1); reading->name_slots[slot]; slot = (slot + 1) & (NAME_SLOTS - 1)) {
        name = &reading->names[reading->name_slots[slot] - 1];
        if (name->hash == hash && name->length == unknown->length && !memcmp(name->text, unknown->name, name->length))
            return name;
    }
    if (reading->name_count == NAMES_MAX) drop_rare_names(reading);
    name = &reading->names[reading->name_count];
    memset(name, 0, sizeof(*name));
    name->text = malloc(unknown->length + 1);
    if (!name->text) return NULL;
    memcpy(name->text, unknown->name, unknown->length);
    name->length = unknown->length;
    name->hash = hash;
    name->row = -1;
    index_name(reading, reading->name_count++);
    return name;
}

static int report_unknown(struct Reading *reading) {
    if (!reading->names) {
        reading->names = malloc(NAMES_MAX * sizeof(struct Name));
        reading->name_slots = calloc(NAME_SLOTS, sizeof(int));
        if (!reading->names || !reading->name_slots) return -1;
    }
    for (size_t i = 0; i < reading->unknown_count; i++) {
        struct Name *name = find_name(reading, &reading->unknown[i]);
        if (!name) return -1;
        if (name->row != reading->row) name->counts[reading->unknown[i].kind]++;
        name->row = reading->row;
    }
    return 0;
}

/* Documents -------------------------------------------------------------------------------------------------------- */

static enum Outcome read_fields(struct Reading *reading, const uint8_t *p, const uint8_t *end, const uint8_t *limit) {
    int *expected = &reading->first;
    struct FieldName name = {NULL, 0, 0};
    enum Outcome outcome;
    enum Kind kind;
    p = skip_space(p, end);
    if (peek(p, end) != '{') return OUTCOME_INVALID;
    p = skip_space(p + 1, end);
    if (peek(p, end) == '}') return skip_space(p + 1, end) == end ? OUTCOME_VALID : OUTCOME_INVALID;
    for (;;) {
        struct Column *column = NULL;
        if (peek(p, end) != '"') return OUTCOME_INVALID;
        p++;
        if (*expected < reading->count && is_named(&reading->columns[*expected], p, end, limit)) {
            column = &reading->columns[*expected];
            p += column->name_length + 1;
            expected = &column->next;
        } else {
            outcome = read_name(reading, &p, end, limit, &name);
            if (outcome != OUTCOME_VALID) return outcome;
            int index = name.lone ? -1 : find_column(reading, name.text, name.length);
            if (index >= 0) {
                column = &reading->columns[index];
                *expected = index;
                expected = &column->next;
            }
        }
        p = skip_space(p, end);
        if (peek(p, end) != ':') return OUTCOME_INVALID;
        p = skip_space(p + 1, end);
        if (column && column->row != reading->row) {
            if (!column->validity && prepare_column(column, reading->rows)) return OUTCOME_NO_MEMORY;
            column->row = reading->row;
            reading->touched[reading->touched_count++] = (int)(column - reading->columns);
            outcome = read_value(reading, column, &p, end, limit, &kind);
        } else {
            outcome = read_value(reading, NULL, &p, end, limit, &kind);
            if (column) empty_cell(column, reading->row); /* a second field of this name: neither is shown */
            else if (note_unknown(reading, &name, kind)) return OUTCOME_NO_MEMORY;
        }
        if (outcome != OUTCOME_VALID) return outcome;
        p = skip_space(p, end);
        if (peek(p, end) == ',') {
            p = skip_space(p + 1, end);
        } else {
            if (peek(p, end) != '}') return OUTCOME_INVALID;
            return skip_space(p + 1, end) == end ? OUTCOME_VALID : OUTCOME_INVALID;
        }
    }
}

static int read_document(struct Reading *reading, const uint8_t *p, const uint8_t *end, const uint8_t *limit) {
    reading->touched_count = reading->decimals_count = reading->incomplete = 0;
    reading->unknown_count = reading->scratch_size = 0;
    enum Outcome outcome = read_fields(reading, p, end, limit);
    if (outcome == OUTCOME_NO_MEMORY) return -1;
    if (outcome == OUTCOME_VALID) {
        reading->documents++;
        for (int i = 0; i < reading->decimals_count; i++) reading->columns[reading->decimals[i]].decimal = 1;
        if (reading->unknown_count && report_unknown(reading)) return -1;
    } else {
        for (int i = 0; i < reading->touched_count; i++)
            empty_cell(&reading->columns[reading->touched[i]], reading->row);
        reading->incomplete = 1;
    }
    if (reading->incomplete) {
        reading->raw[reading->row] = 1;
        reading->raw_count++;
        reading->raw_bytes += end - p;
    }
    return 0;
}

enum { READ_NO_MEMORY = -1, READ_BAD_OFFSETS = -2 };

/* Read the values of a binary Arrow array; `offsets` starts with its first row, the validity `shift` bits earlier. */
static int read_documents(struct Reading *reading, const uint8_t *validity, int64_t shift, const int32_t *offsets,
                          const uint8_t *data, int64_t size) {
    for (int64_t row = 0; row < reading->rows; row++) {
        int32_t start = offsets[row], stop = offsets[row + 1];
        if (start < 0 || stop < start || stop > size) return READ_BAD_OFFSETS;
        if (validity && !get_bit(validity, shift + row)) continue;
        reading->row = row;
        if (read_document(reading, data + start, data + stop, data + size)) return READ_NO_MEMORY;
    }
    for (int i = 0; i < reading->count; i++)
        if (reading->columns[i].data) write_offsets(&reading->columns[i], reading->rows);
    return 0;
}

/* Copy the values that are kept. */
static void copy_raw(const struct Reading *reading, const int32_t *offsets, const uint8_t *data, uint8_t *validity,
                     int32_t *to_offsets, uint8_t *to) {
    size_t size = 0;
    to_offsets[0] = 0;
    for (int64_t row = 0; row < reading->rows; row++) {
        if (reading->raw[row]) {
            size_t length = (size_t)(offsets[row + 1] - offsets[row]);
            if (length) memcpy(to + size, data + offsets[row], length);
            size += length;
            set_bit(validity, row);
        }
        to_offsets[row + 1] = (int32_t)size;
    }
}

static void release_reading(struct Reading *reading) {
    for (int i = 0; reading->columns && i < reading->count; i++) {
        struct Column *column = &reading->columns[i];
        free(column->name);
        free(column->validity);
        free(column->values);
        free(column->data);
    }
    for (int i = 0; i < reading->name_count; i++) free(reading->names[i].text);
    free(reading->columns);
    free(reading->slots);
    free(reading->raw);
    free(reading->touched);
    free(reading->decimals);
    free(reading->unknown);
    free(reading->scratch);
    free(reading->names);
    free(reading->name_slots);
    memset(reading, 0, sizeof(*reading));
}

#endif
