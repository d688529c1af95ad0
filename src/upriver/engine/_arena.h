/* Memory for chunks: pieces of 16 to 256 KiB out of large regions in huge pages, used again when given back.
 *
 * A thousand vbuckets each write to the end of their own chunk: with small pages nearly every write misses the
 * TLB and every 4 KiB cost a page fault. Guarded by the interpreter's lock. */
#ifndef UPRIVER_ENGINE_ARENA_H
#define UPRIVER_ENGINE_ARENA_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { PIECE_MIN = 16 * 1024, PIECE_MAX = 256 * 1024, PIECE_CLASSES = 5 };
#define REGION_BYTES ((size_t)64 << 20)
#define HUGE_PAGE ((size_t)2 << 20)

static char *arena_spare[PIECE_CLASSES];
static char *arena_next, *arena_end;

static inline int arena_class(uint32_t size) {
    int which = 0;
    while (((uint32_t)PIECE_MIN << which) < size) which++;
    return which;
}

/* A piece of one of the sizes 16, 32, 64, 128 and 256 KiB, or NULL. */
static inline char *arena_take(uint32_t size) {
    int which = arena_class(size);
    char *piece = arena_spare[which];
    size = (uint32_t)PIECE_MIN << which;
    if (piece != NULL) {
        memcpy(&arena_spare[which], piece, sizeof(char *));
        return piece;
    }
    if ((size_t)(arena_end - arena_next) < size) {
        char *region;
        /* What is left of the old region serves for smaller pieces. */
        while (arena_end - arena_next >= PIECE_MIN) {
            memcpy(arena_next, &arena_spare[0], sizeof(char *));
            arena_spare[0] = arena_next;
            arena_next += PIECE_MIN;
        }
        region = (char *)mmap(NULL, REGION_BYTES + HUGE_PAGE, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region == (char *)MAP_FAILED) return NULL;
        region = (char *)(((uintptr_t)region + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
#ifdef MADV_HUGEPAGE
        madvise(region, REGION_BYTES, MADV_HUGEPAGE);
#endif
        arena_next = region;
        arena_end = region + REGION_BYTES;
    }
    piece = arena_next;
    arena_next += size;
    return piece;
}

static inline void arena_give(char *piece, uint32_t size) {
    int which = arena_class(size);
    memcpy(piece, &arena_spare[which], sizeof(char *));
    arena_spare[which] = piece;
}

#endif
