/* Reading and writing the fields of a record (upriver.model.record) in memory. */
#ifndef UPRIVER_ENGINE_RECORD_H
#define UPRIVER_ENGINE_RECORD_H

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define UPRIVER_BE16(x) (x)
#define UPRIVER_BE32(x) (x)
#define UPRIVER_BE64(x) (x)
#else
#define UPRIVER_BE16(x) __builtin_bswap16(x)
#define UPRIVER_BE32(x) __builtin_bswap32(x)
#define UPRIVER_BE64(x) __builtin_bswap64(x)
#endif

static inline uint16_t load_be16(const char *p) { uint16_t v; memcpy(&v, p, 2); return UPRIVER_BE16(v); }
static inline uint32_t load_be32(const char *p) { uint32_t v; memcpy(&v, p, 4); return UPRIVER_BE32(v); }
static inline uint64_t load_be64(const char *p) { uint64_t v; memcpy(&v, p, 8); return UPRIVER_BE64(v); }
static inline void store_be16(char *p, uint16_t v) { v = UPRIVER_BE16(v); memcpy(p, &v, 2); }
static inline void store_be32(char *p, uint32_t v) { v = UPRIVER_BE32(v); memcpy(p, &v, 4); }
static inline void store_be64(char *p, uint64_t v) { v = UPRIVER_BE64(v); memcpy(p, &v, 8); }
static inline uint64_t load64(const char *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline uint32_t load32(const char *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline void store64(char *p, uint64_t v) { memcpy(p, &v, 8); }
static inline void store32(char *p, uint32_t v) { memcpy(p, &v, 4); }

/* Offsets from the start of a record; a test compares them with the model. */
enum {
    R_SUPERSEDED_BY = 0, R_TIME = 8, R_TTL = 12, R_MARKS = 13,
    R_FRAME = 16, R_OPCODE = 17, R_KEY_LENGTH = 18, R_EXTRAS_LENGTH = 20, R_DATATYPE = 21, R_VBUCKET = 22,
    R_BODY_LENGTH = 24, R_OPAQUE = 28, R_CAS = 32, R_SEQNO = 40, R_REV_SEQNO = 48,
    R_FLAGS = 56, R_EXPIRY = 60, R_LOCK_TIME = 64, R_DELETE_TIME = 56, R_EXTRAS = 40,
    MARK_EVICTED = 1, MARK_REFERENCED = 2,
    OPCODE_MUTATION = 0x57, OPCODE_DELETION = 0x58, OPCODE_EXPIRATION = 0x59
};

static inline uint32_t align8(uint32_t size) { return (size + 7u) & ~7u; }

static inline const char *record_key(const char *r) { return r + R_EXTRAS + (uint8_t)r[R_EXTRAS_LENGTH]; }

/* The size on disk, with the value. */
static inline uint32_t full_size(const char *r) { return align8(R_EXTRAS + load_be32(r + R_BODY_LENGTH)); }

/* The size in memory: an evicted record ends after its key. */
static inline uint32_t record_size(const char *r) {
    if (r[R_MARKS] & MARK_EVICTED)
        return align8(R_EXTRAS + (uint8_t)r[R_EXTRAS_LENGTH] + load_be16(r + R_KEY_LENGTH));
    return full_size(r);
}

/* Keys are mixed eight bytes at a time; the seed is random per process, so clients cannot choose collisions. */
static inline uint64_t hash_key(const char *key, size_t size, uint64_t seed) {
    uint64_t h = seed ^ (size * 0x9E3779B97F4A7C15ull);
    while (size >= 8) {
        h = (h ^ load64(key)) * 0xFF51AFD7ED558CCDull;
        h ^= h >> 32;
        key += 8;
        size -= 8;
    }
    if (size) {
        uint64_t rest = 0;
        memcpy(&rest, key, size);
        h = (h ^ rest) * 0xFF51AFD7ED558CCDull;
        h ^= h >> 32;
    }
    h *= 0xC4CEB9FE1A85EC53ull;
    return h ^ (h >> 29);
}

/* The number of set bits from ``first`` to ``last``, both excluded and included like a range of seqnos: (first, last]. */
static inline uint64_t count_bits(const uint64_t *bits, uint64_t first, uint64_t last) {
    uint64_t count = 0, word = (first + 1) >> 6, end = last >> 6;
    uint64_t mask = ~0ull << ((first + 1) & 63);
    if (first >= last) return 0;
    for (; word < end; word++, mask = ~0ull) count += (uint64_t)__builtin_popcountll(bits[word] & mask);
    return count + (uint64_t)__builtin_popcountll(bits[end] & mask & (~0ull >> (63 - (last & 63))));
}

/* Some libraries, ISA-L's CRC-32 for one, leave the upper halves of the vector registers in use. From then on code that
 * is compiled for all x86-64 processors, as this is, waits in vector instructions for their former contents: a row of a
 * batch takes 1.5 times as long. Long loops therefore clear the upper halves first; the lower halves stay. */
static inline void clean_registers(void) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__AVX__) /* AVX code does this itself */
    if (__builtin_cpu_supports("avx")) __asm__ volatile("vzeroupper");
#endif
}

static inline void prefetch(const void *p) { __builtin_prefetch(p); }
static inline void prefetch_write(const void *p) { __builtin_prefetch(p, 1); }

/* Prefetch four cache lines eight kilobytes ahead: the processor's own prefetcher stops at the end of a page, and so at
 * the end of a chunk. The lines go to the second-level cache, which can wait for many more lines at once than the
 * first: that alone saves two fifths of the time. */
enum { AHEAD = 8192 };
static inline void fetch_later(const char *p) { __builtin_prefetch(p, 0, 2); }
static inline void fetch_ahead(const char *record, const char *end, const char *following) {
    const char *p = record + AHEAD;
    if (p >= end) p = following + (p - end);
    fetch_later(p);
    fetch_later(p + 64);
    fetch_later(p + 128);
    fetch_later(p + 192);
}

/* Prefetch the first eight kilobytes of a read. */
static inline void fetch_first(const char *record, const char *end) {
    const char *p, *stop = end - record < AHEAD ? end : record + AHEAD;
    for (p = record; p < stop; p += 64) fetch_later(p);
}

#endif
