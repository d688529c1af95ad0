/* Handing columns over to Arrow through its C data interface: https://arrow.apache.org/docs/format/CDataInterface.html
 *
 * One allocation holds the contents of all columns and what describes them; Arrow frees it with the last user. */
#ifndef UPRIVER_ENGINE_ARROW_H
#define UPRIVER_ENGINE_ARROW_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children;
    struct ArrowArray *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

enum { CHANGE_COLUMNS = 11 };

struct ChangeColumns {
    struct ArrowArray arrays[CHANGE_COLUMNS];
    struct ArrowArray *children[CHANGE_COLUMNS];
    const void *buffers[CHANGE_COLUMNS][3];
    const void *no_buffer[1];
};

static void release_column(struct ArrowArray *array) { array->release = NULL; }

static void release_columns(struct ArrowArray *array) {
    int64_t i;
    for (i = 0; i < array->n_children; i++)
        if (array->children[i]->release) array->children[i]->release(array->children[i]);
    array->release = NULL;
    free(array->private_data);
}

/* A block for the description and so many bytes of contents, which start at `*contents`; NULL if there is no memory. */
static struct ChangeColumns *allocate_columns(size_t bytes, char **contents) {
    size_t head = (sizeof(struct ChangeColumns) + 63) & ~(size_t)63;
    char *block = (char *)aligned_alloc(64, head + ((bytes + 63) & ~(size_t)63));
    if (block != NULL) *contents = block + head;
    return (struct ChangeColumns *)block;
}

static void describe_column(struct ChangeColumns *block, int i, int64_t rows, const char *first, const char *second) {
    struct ArrowArray *array = &block->arrays[i];
    memset(array, 0, sizeof(*array));
    array->length = rows;
    array->n_buffers = second == NULL ? 2 : 3;
    array->buffers = block->buffers[i];
    array->release = release_column;
    block->buffers[i][0] = NULL; /* nothing is null */
    block->buffers[i][1] = first;
    block->buffers[i][2] = second;
    block->children[i] = array;
}

static void describe_columns(struct ChangeColumns *block, struct ArrowArray *batch, int64_t rows) {
    memset(batch, 0, sizeof(*batch));
    block->no_buffer[0] = NULL;
    batch->length = rows;
    batch->n_buffers = 1;
    batch->buffers = block->no_buffer;
    batch->n_children = CHANGE_COLUMNS;
    batch->children = block->children;
    batch->release = release_columns;
    batch->private_data = block;
}

#endif
