/* Handing columns over to Arrow through its C data interface: https://arrow.apache.org/docs/format/CDataInterface.html
 *
 * One block holds the contents of all columns and their description; Arrow releases it after its last use. */
#ifndef UPRIVER_ENGINE_ARROW_H
#define UPRIVER_ENGINE_ARROW_H

#include <pthread.h>
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
    size_t bytes; /* of the complete block */
};

#ifdef __SANITIZE_ADDRESS__ /* so that the sanitizer sees uses of a released batch */

static struct ChangeColumns *spare_block(size_t bytes) { (void)bytes; return NULL; }
static void give_block(struct ChangeColumns *block) { free(block); }

#else

/* Released blocks are reused for the next batches, the last one first, because the caches still hold it. The C library
 * would return many of them to the system, and the new pages of a batch cost as much as its rows. It keeps small blocks
 * itself.
 *
 * Arrow may release blocks from any thread. If the lock is taken we do not wait. */
enum { SPARE_BLOCKS = 16, SPARE_BLOCK_MIN = 64 * 1024, SPARE_BLOCKS_BYTES = 8 * 1024 * 1024 };
static pthread_mutex_t spare_lock = PTHREAD_MUTEX_INITIALIZER;
static struct SpareBlock { struct ChangeColumns *block; size_t bytes; } spare_blocks[SPARE_BLOCKS];
static size_t spare_count, spare_bytes;

static struct ChangeColumns *remove_spare(size_t i) {
    struct ChangeColumns *block = spare_blocks[i].block;
    spare_bytes -= spare_blocks[i].bytes;
    memmove(&spare_blocks[i], &spare_blocks[i + 1], (--spare_count - i) * sizeof(struct SpareBlock));
    return block;
}

/* A free block of this many bytes but not many more, because a kept batch should hold little unused room; or NULL. */
static struct ChangeColumns *spare_block(size_t bytes) {
    struct ChangeColumns *block = NULL;
    size_t i;
    if (bytes < SPARE_BLOCK_MIN || pthread_mutex_trylock(&spare_lock)) return NULL;
    for (i = spare_count; block == NULL && i-- > 0;)
        if (bytes <= spare_blocks[i].bytes && spare_blocks[i].bytes <= bytes + bytes / 4) block = remove_spare(i);
    pthread_mutex_unlock(&spare_lock);
    return block;
}

static void give_block(struct ChangeColumns *block) {
    size_t bytes = block->bytes;
    if (bytes < SPARE_BLOCK_MIN || bytes > SPARE_BLOCKS_BYTES || pthread_mutex_trylock(&spare_lock)) {
        free(block);
        return;
    }
    while (spare_count == SPARE_BLOCKS || spare_bytes + bytes > SPARE_BLOCKS_BYTES) free(remove_spare(0));
    spare_blocks[spare_count].block = block;
    spare_blocks[spare_count++].bytes = bytes;
    spare_bytes += bytes;
    pthread_mutex_unlock(&spare_lock);
}

#endif

static void release_column(struct ArrowArray *array) { array->release = NULL; }

static void release_columns(struct ArrowArray *array) {
    int64_t i;
    for (i = 0; i < array->n_children; i++)
        if (array->children[i]->release) array->children[i]->release(array->children[i]);
    array->release = NULL;
    give_block((struct ChangeColumns *)array->private_data);
}

/* A block for the description and this many bytes of contents, from `*contents` on; NULL if there is no memory. */
static struct ChangeColumns *allocate_columns(size_t bytes, char **contents) {
    size_t head = (sizeof(struct ChangeColumns) + 63) & ~(size_t)63;
    size_t whole = head + ((bytes + 63) & ~(size_t)63);
    struct ChangeColumns *block = spare_block(whole);
    if (block == NULL) {
        block = (struct ChangeColumns *)aligned_alloc(64, whole);
        if (block == NULL) return NULL;
        block->bytes = whole;
    }
    *contents = (char *)block + head;
    return block;
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
