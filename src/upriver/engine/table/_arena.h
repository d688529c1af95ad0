/* Memory for chunks and indexes: pieces of 16 to 256 KiB out of large regions in huge pages. Free pieces are reused.
 *
 * A thousand vbuckets each write to the end of their own chunk: with small pages nearly every write misses the TLB, and
 * every 4 KiB cost a page fault. The first writer of a huge page waits until the kernel has cleared it. Therefore, once
 * much memory is in use, a helper thread asks the kernel for pages a little ahead of the writers. It never touches
 * contents: a page that exists already stays as it is. Larger blocks are mapped and unmapped one by one.
 *
 * Free pieces up to a share of the memory in use are kept; the others are returned to the system, except the page with
 * the link to the next piece. The share is what a compaction frees when memory is short, a tenth of the quota: writers
 * take that memory again at once, and would pay for each page a second time. The interpreter's lock guards everything
 * but the helper. */
#ifndef UPRIVER_ENGINE_ARENA_H
#define UPRIVER_ENGINE_ARENA_H

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PIECE_MIN = 16 * 1024, PIECE_MAX = 256 * 1024, PIECE_CLASSES = 5 };
#define SMALL_PAGE ((size_t)4096)
#define HUGE_PAGE ((size_t)2 << 20)

/* The size of the piece for a request of this many bytes. */
static inline uint32_t arena_size(uint32_t size) {
    uint32_t piece = PIECE_MIN;
    if (size > PIECE_MAX) return (uint32_t)(((size_t)size + SMALL_PAGE - 1) & ~(SMALL_PAGE - 1));
    while (piece < size) piece *= 2;
    return piece;
}

#ifdef __SANITIZE_ADDRESS__ /* separate pieces, so that the sanitizer sees accesses beyond their end */

static inline char *arena_take(uint32_t least, uint32_t *size) {
    *size = arena_size(*size < least ? least : *size);
    return (char *)malloc(*size);
}
static inline void arena_give(char *piece, uint32_t size) { (void)size; free(piece); }
static inline char *zeroed_take(size_t size) { return (char *)calloc(1, size); }
static inline void zeroed_give(char *memory, size_t size) { (void)size; free(memory); }

#else

#define REGION_BYTES ((size_t)256 << 20)
#define SPARE_BYTES ((size_t)8 << 20)
#define AHEAD_BYTES ((size_t)8 << 20)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static char *arena_spare[PIECE_CLASSES];
static char *arena_next, *arena_end, *arena_asked;
static size_t arena_given, arena_spare_bytes;

/* The helper and the range that it populates next; NULL when it has nothing to do. */
static pthread_mutex_t helper_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t helper_work = PTHREAD_COND_INITIALIZER;
static char *helper_from;
static size_t helper_bytes;
static int helper_started, helper_useless;

static void *arena_populate(void *unused) {
    (void)unused;
    pthread_mutex_lock(&helper_lock);
    while (!helper_useless) {
        char *from = helper_from;
        size_t size = helper_bytes;
        if (from == NULL) {
            pthread_cond_wait(&helper_work, &helper_lock);
            continue;
        }
        pthread_mutex_unlock(&helper_lock);
        int failed = madvise(from, size, MADV_POPULATE_WRITE);
        pthread_mutex_lock(&helper_lock);
        if (failed) helper_useless = 1; /* an older kernel, or no memory: writers fault pages in as they go */
        helper_from = NULL;
    }
    pthread_mutex_unlock(&helper_lock);
    return NULL;
}

static void helper_start(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    helper_started = 1;
    sigfillset(&all); /* signals are for the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, arena_populate, NULL)) helper_useless = 1;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Prepare the pages after `arena_next`: an eighth of the memory in use, at most 8 MiB. If the lock is taken we do not
 * wait: the helper is busy, or was busy when this process was forked. */
static inline void arena_look_ahead(void) {
    size_t ahead = arena_given / 8 < AHEAD_BYTES ? arena_given / 8 : AHEAD_BYTES;
    if (arena_asked < arena_next) arena_asked = arena_next;
    if (ahead < HUGE_PAGE || helper_useless || (size_t)(arena_asked - arena_next) > ahead / 2) return;
    if ((size_t)(arena_end - arena_asked) < ahead) ahead = arena_end - arena_asked;
    if (ahead == 0 || pthread_mutex_trylock(&helper_lock)) return;
    if (helper_from == NULL) {
        if (!helper_started) helper_start();
        helper_from = (char *)((uintptr_t)arena_asked & ~(uintptr_t)(SMALL_PAGE - 1));
        helper_bytes = ahead;
        arena_asked += ahead;
        pthread_cond_signal(&helper_work);
    }
    pthread_mutex_unlock(&helper_lock);
}

/* Zeroed memory, in huge pages if it is large; NULL if there is no memory. */
static inline char *arena_map(size_t size) {
    size_t more = size >= HUGE_PAGE ? HUGE_PAGE : 0;
    char *mapped = (char *)mmap(NULL, size + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                -1, 0);
    if (mapped == (char *)MAP_FAILED) return NULL;
    if (more) { /* align to a huge page and unmap both ends */
        char *start = (char *)(((uintptr_t)mapped + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
        size_t before = start - mapped;
        if (before) munmap(mapped, before);
        if (more > before) munmap(start + size, more - before);
        mapped = start;
#ifdef MADV_HUGEPAGE
        madvise(mapped, size, MADV_HUGEPAGE);
#endif
    }
    return mapped;
}

static inline int arena_class(uint32_t size) {
    int which = 0;
    while (((uint32_t)PIECE_MIN << which) < size) which++;
    return which;
}

static inline char *spare_take(int which) {
    char *piece = arena_spare[which];
    if (piece != NULL) {
        memcpy(&arena_spare[which], piece, sizeof(char *));
        arena_spare_bytes -= (size_t)PIECE_MIN << which;
    }
    return piece;
}

static inline void spare_put(char *piece, int which) {
    memcpy(piece, &arena_spare[which], sizeof(char *));
    arena_spare[which] = piece;
    arena_spare_bytes += (size_t)PIECE_MIN << which;
}

/* Split a larger free piece and keep the rest of it free: small vbuckets that come after a large one reuse its memory
 * without wasting it. */
static inline char *spare_split(int which, int other) {
    char *piece = spare_take(other);
    while (piece != NULL && other > which) {
        other--;
        spare_put(piece + ((size_t)PIECE_MIN << other), other);
    }
    return piece;
}

/* A block of at least `least` bytes, preferably of `*size`; `*size` is set to its size. NULL if there is no memory.
 * Free pieces are used first, smaller ones before larger ones, so that little memory is taken beyond what is in use. */
static inline char *arena_take(uint32_t least, uint32_t *size) {
    char *piece = NULL;
    int which, other, lowest;
    if (*size < least) *size = least;
    *size = arena_size(*size);
    if (*size > PIECE_MAX) {
        piece = arena_map(*size);
        if (piece != NULL) arena_given += *size;
        return piece;
    }
    which = arena_class(*size);
    lowest = arena_class(least);
    for (other = which; piece == NULL && other >= lowest; other--) {
        piece = spare_take(other);
        if (piece != NULL) *size = (uint32_t)PIECE_MIN << other;
    }
    for (other = which + 1; piece == NULL && other < PIECE_CLASSES; other++) piece = spare_split(which, other);
    if (piece == NULL) {
        if ((size_t)(arena_end - arena_next) < *size) {
            size_t room = REGION_BYTES;
            char *region = arena_map(room);
            while (region == NULL && room > HUGE_PAGE) region = arena_map(room /= 2);
            if (region == NULL) return NULL;
            /* The rest of the old region is used for smaller pieces. */
            for (; arena_end - arena_next >= PIECE_MIN; arena_next += PIECE_MIN) spare_put(arena_next, 0);
            arena_next = arena_asked = region;
            arena_end = region + room;
        }
        piece = arena_next;
        arena_next += *size;
        arena_given += *size;
        arena_look_ahead();
        return piece;
    }
    arena_given += *size;
    return piece;
}

static inline void arena_give(char *piece, uint32_t size) {
    arena_given -= size;
    if (size > PIECE_MAX) {
        munmap(piece, size);
        return;
    }
    spare_put(piece, arena_class(size));
    if (arena_spare_bytes > SPARE_BYTES && arena_spare_bytes > arena_given / 8)
        madvise(piece + SMALL_PAGE, size - SMALL_PAGE, MADV_DONTNEED);
}

/* Zeroed memory for an index, whose size is a power of two. */
static inline char *zeroed_take(size_t size) {
    uint32_t piece = (uint32_t)size;
    char *memory;
    if (size < PIECE_MIN) return (char *)calloc(1, size);
    if (size > PIECE_MAX) return arena_map(size);
    memory = arena_take(piece, &piece);
    if (memory != NULL) memset(memory, 0, size);
    return memory;
}

static inline void zeroed_give(char *memory, size_t size) {
    if (size < PIECE_MIN) free(memory);
    else if (size > PIECE_MAX) munmap(memory, size);
    else arena_give(memory, (uint32_t)size);
}

#endif
#endif
