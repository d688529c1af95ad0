# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled loops over keys: hashing, sorting and searching. ``plain_keys`` is the same in Python.

An entry is two 64-bit numbers: vbucket and the first 48 bits of the hash, then the next 32 bits of the hash and a
position. No loop touches a Python object, so all run without the GIL.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

import numpy as np

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    #if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #define UPRIVER_LE64(x) (x)
    #else
    #define UPRIVER_LE64(x) __builtin_bswap64(x)
    #endif
    static inline uint64_t load_le64(const uint8_t *p) { uint64_t x; memcpy(&x, p, 8); return UPRIVER_LE64(x); }

    #define ROTATE(x, b) (((x) << (b)) | ((x) >> (64 - (b))))
    #define ROUND \
        v0 += v1; v2 += v3; v1 = ROTATE(v1, 13); v3 = ROTATE(v3, 16); v1 ^= v0; v3 ^= v2; v0 = ROTATE(v0, 32); \
        v2 += v1; v0 += v3; v1 = ROTATE(v1, 17); v3 = ROTATE(v3, 21); v1 ^= v2; v3 ^= v0; v2 = ROTATE(v2, 32);
    #define ABSORB(word) { const uint64_t m = (word); v3 ^= m; ROUND ROUND v0 ^= m; }

    /* The last 0 to 7 of a key's bytes, without reading beyond either end of the key. */
    static inline uint64_t tail_of(const uint8_t *key, size_t length, size_t rest) {
        if (rest == 0) return 0;
        if (length >= 8) return load_le64(key + length - 8) >> (8 * (8 - rest));
        uint64_t word = 0;
        for (size_t i = 0; i < rest; i++) word |= (uint64_t) key[length - rest + i] << (8 * i);
        return word;
    }

    /* SipHash-2-4 with 128 bits of output (https://github.com/veorq/SipHash), over a vbucket in two bytes, the lower
       one first, and a key. */
    static inline void sip_key(
        uint64_t k0, uint64_t k1, uint64_t vbucket, const uint8_t *key, size_t length, uint64_t *out
    ) {
        uint64_t v0 = k0 ^ 0x736f6d6570736575ULL, v1 = k1 ^ 0x646f72616e646f6dULL ^ 0xee;
        uint64_t v2 = k0 ^ 0x6c7967656e657261ULL, v3 = k1 ^ 0x7465646279746573ULL;
        const uint64_t size = (uint64_t) (length + 2) << 56;
        size_t at = 6;
        if (length < 6) {
            ABSORB(size | tail_of(key, length, length) << 16 | vbucket)
        } else {
            ABSORB((length >= 8 ? load_le64(key) : tail_of(key, 6, 6)) << 16 | vbucket)
            for (; at + 8 <= length; at += 8) ABSORB(load_le64(key + at))
            ABSORB(size | tail_of(key, length, length - at))
        }
        v2 ^= 0xee;
        ROUND ROUND ROUND ROUND
        out[0] = v0 ^ v1 ^ v2 ^ v3;
        v1 ^= 0xdd;
        ROUND ROUND ROUND ROUND
        out[1] = v0 ^ v1 ^ v2 ^ v3;
    }

    static inline void entry_of(uint64_t vbucket, const uint64_t *hash, uint64_t position, uint64_t *entry) {
        entry[0] = vbucket << 48 | (hash[0] & 0xffffffffffffULL);
        entry[1] = (hash[0] >> 48 | (hash[1] & 0xffff) << 16) << 32 | position;
    }

    #define DIGIT_BITS 11
    #define DIGITS (1 << DIGIT_BITS)

    /* One stable pass over a digit of one of an entry's two numbers; returns 0 if all entries have the same digit. */
    static int radix_pass(const uint64_t *from, uint64_t *to, size_t count, int word, int shift) {
        size_t starts[DIGITS] = {0}, sum = 0;
        for (size_t i = 0; i < count; i++) starts[from[2 * i + word] >> shift & (DIGITS - 1)]++;
        if (starts[from[word] >> shift & (DIGITS - 1)] == count) return 0;
        for (int d = 0; d < DIGITS; d++) { const size_t n = starts[d]; starts[d] = sum; sum += n; }
        for (size_t i = 0; i < count; i++) {
            const size_t place = starts[from[2 * i + word] >> shift & (DIGITS - 1)]++;
            to[2 * place] = from[2 * i];
            to[2 * place + 1] = from[2 * i + 1];
        }
        return 1;
    }

    static inline int is_less(const uint64_t *a, const uint64_t *b) {
        return a[0] != b[0] ? a[0] < b[0] : a[1] < b[1];
    }

    /* Finish an almost sorted run; returns 0 if more than ``moves`` entries were out of order. */
    static int insertion_sort(uint64_t *entries, size_t count, size_t moves) {
        for (size_t i = 1; i < count; i++) {
            uint64_t *at = entries + 2 * i;
            const uint64_t moved[2] = {at[0], at[1]};
            for (; at > entries && is_less(moved, at - 2); at -= 2) {
                at[0] = at[-2];
                at[1] = at[-1];
                if (moves-- == 0) { at[-2] = moved[0]; at[-1] = moved[1]; return 0; }
            }
            at[0] = moved[0];
            at[1] = moved[1];
        }
        return 1;
    }

    /* Returns the array, of the two, that holds the sorted entries. */
    static uint64_t *sort_by(uint64_t *entries, uint64_t *room, size_t count, int word, int low, int high) {
        for (int shift = low; shift < high; shift += DIGIT_BITS) {
            if (radix_pass(entries, room, count, word, shift)) {
                uint64_t *other = entries; entries = room; room = other;
            }
        }
        return entries;
    }

    /* Hashes are evenly distributed: 44 bits almost always decide, an insertion sort orders the rest. */
    static void sort_entries_in(uint64_t *entries, uint64_t *room, size_t count) {
        uint64_t *found = entries;
        if (count > 64) found = sort_by(entries, room, count, 0, 20, 64);
        if (!insertion_sort(found, count, 8 * count + 4096)) {
            found = sort_by(found, found == entries ? room : entries, count, 1, 0, 64);
            found = sort_by(found, found == entries ? room : entries, count, 0, 0, 64);
        }
        if (found != entries) memcpy(entries, found, 16 * count);
    }

    /* Whether an entry comes before all, or with ``after`` before or among all, entries of a hash. */
    static inline int is_before(const uint64_t *entry, const uint64_t *hash, int after) {
        if (entry[0] != hash[0]) return entry[0] < hash[0];
        const uint64_t a = entry[1] >> 32, b = hash[1] >> 32;
        return after ? a <= b : a < b;
    }

    /* For each sorted hash, the entries that have it. Steps double from the last place, so that a few hashes in a long
       index cost a binary search each, and many cost a merge. */
    static void find_bounds(
        const uint64_t *entries, uint64_t count, const uint64_t *hashes, size_t n, uint32_t *first, uint32_t *last
    ) {
        uint64_t at = 0;
        for (size_t i = 0; i < n; i++) {
            const uint64_t *hash = hashes + 2 * i;
            uint64_t step = 1, low = at, high = at;
            while (high < count && is_before(entries + 2 * high, hash, 0)) { low = high + 1; high += step; step *= 2; }
            if (high > count) high = count;
            while (low < high) {
                const uint64_t middle = low + (high - low) / 2;
                if (is_before(entries + 2 * middle, hash, 0)) low = middle + 1; else high = middle;
            }
            at = low;
            first[i] = (uint32_t) at;
            uint64_t end = at;
            while (end < count && is_before(entries + 2 * end, hash, 1)) end++;
            last[i] = (uint32_t) end;
        }
    }

    static inline int is_same_hash(const uint64_t *a, const uint64_t *b) {
        return a[0] == b[0] && a[1] >> 32 == b[1] >> 32;
    }

    static int is_text(const uint8_t *p, const uint8_t *end) {
        while (p < end) {
            if (end - p >= 8 && !(load_le64(p) & 0x8080808080808080ULL)) { p += 8; continue; }
            const uint8_t c = *p++;
            if (c < 0x80) continue;
            if (c < 0xc2 || c > 0xf4) return 0;
            const int more = c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
            if (end - p < more) return 0;
            const uint8_t low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
            const uint8_t high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
            if (p[0] < low || p[0] > high) return 0;
            for (int i = 1; i < more; i++) if ((p[i] & 0xc0) != 0x80) return 0;
            p += more;
        }
        return 1;
    }
    """
    uint64_t load_le64(const uint8_t *p) nogil
    void sip_key(uint64_t k0, uint64_t k1, uint64_t vbucket, const uint8_t *key, size_t length, uint64_t *out) nogil
    void entry_of(uint64_t vbucket, const uint64_t *hash, uint64_t position, uint64_t *entry) nogil
    void sort_entries_in(uint64_t *entries, uint64_t *room, size_t count) nogil
    void find_bounds(
        const uint64_t *entries, uint64_t count, const uint64_t *hashes, size_t n, uint32_t *first, uint32_t *last
    ) nogil
    int is_same_hash(const uint64_t *a, const uint64_t *b) nogil
    int is_text(const uint8_t *p, const uint8_t *end) nogil
    int memcmp(const void *a, const void *b, size_t length) nogil


ctypedef fused offset_t:
    int32_t
    int64_t


def sip_hash(const uint8_t[::1] seed not None, int vbucket, const uint8_t[::1] key not None):
    """The whole hash of one key, 16 bytes."""
    cdef uint64_t out[2]
    cdef const uint8_t *at = &key[0] if key.shape[0] else NULL
    sip_key(load_le64(&seed[0]), load_le64(&seed[8]), vbucket, at, key.shape[0], out)
    return (<uint64_t> out[0]).to_bytes(8, "little") + (<uint64_t> out[1]).to_bytes(8, "little")


def hash_into(
    const uint8_t[::1] seed not None,
    const uint16_t[::1] vbuckets not None,
    const offset_t[::1] offsets not None,
    const uint8_t[::1] data not None,
    uint64_t first,
    uint64_t[:, ::1] entries not None,
):
    """Fill one entry per key; positions start at ``first``."""
    cdef Py_ssize_t i, count = entries.shape[0]
    cdef uint64_t hash[2]
    cdef const uint8_t *bytes_ = &data[0] if data.shape[0] else NULL
    if seed.shape[0] != 16 or vbuckets.shape[0] < count or offsets.shape[0] <= count:
        raise ValueError("arrays of different lengths")
    if count and (offsets[0] < 0 or offsets[count] > data.shape[0]):
        raise ValueError("offsets outside of the data")
    cdef uint64_t k0 = load_le64(&seed[0]), k1 = load_le64(&seed[8])
    with nogil:
        for i in range(count):
            sip_key(k0, k1, vbuckets[i], bytes_ + offsets[i], offsets[i + 1] - offsets[i], hash)
            entry_of(vbuckets[i], hash, first + i, &entries[i, 0])


def sort_in_place(uint64_t[:, ::1] entries not None):
    """Sort entries by both numbers; fast if entries with equal hashes come in the order of their positions."""
    cdef size_t count = entries.shape[0]
    if count < 2:
        return
    cdef uint64_t[:, ::1] room = np.empty((count, 2), np.uint64)
    with nogil:
        sort_entries_in(&entries[0, 0], &room[0, 0], count)


def bounds_into(
    const uint64_t[:, ::1] entries not None,
    const uint64_t[:, ::1] hashes not None,
    uint32_t[::1] first not None,
    uint32_t[::1] last not None,
):
    """For each sorted hash, where the entries that have it begin and end."""
    cdef uint64_t count = entries.shape[0]
    cdef size_t n = hashes.shape[0]
    if <size_t> first.shape[0] != n or <size_t> last.shape[0] != n:
        raise ValueError("arrays of different lengths")
    if n == 0:
        return
    with nogil:
        find_bounds(&entries[0, 0] if count else NULL, count, &hashes[0, 0], n, &first[0], &last[0])


def lower_bound(const uint64_t[:, ::1] entries not None, uint64_t high):
    """The number of entries whose first number is below ``high``."""
    cdef Py_ssize_t low = 0, middle, end = entries.shape[0]
    while low < end:
        middle = low + (end - low) // 2
        if entries[middle, 0] < high:
            low = middle + 1
        else:
            end = middle
    return low


def text_into(const offset_t[::1] offsets not None, const uint8_t[::1] data not None, uint8_t[::1] found not None):
    """Whether each key is valid UTF-8; returns how many are."""
    cdef Py_ssize_t i, count = found.shape[0], texts = 0
    cdef const uint8_t *bytes_ = &data[0] if data.shape[0] else NULL
    if offsets.shape[0] <= count or (count and (offsets[0] < 0 or offsets[count] > data.shape[0])):
        raise ValueError("offsets outside of the data")
    with nogil:
        for i in range(count):
            found[i] = is_text(bytes_ + offsets[i], bytes_ + offsets[i + 1])
            texts += found[i]
    return texts


cdef inline bint is_same_key(const offset_t *offsets, const uint8_t *data, uint32_t a, uint32_t b) noexcept nogil:
    cdef offset_t length = offsets[a + 1] - offsets[a]
    return length == offsets[b + 1] - offsets[b] and memcmp(data + offsets[a], data + offsets[b], length) == 0


def last_into(
    const uint64_t[:, ::1] entries not None,
    const offset_t[::1] offsets not None,
    const uint8_t[::1] data not None,
    uint8_t[::1] found not None,
):
    """Whether each of the sorted entries is the last one of its key. Positions are the numbers of the keys."""
    cdef Py_ssize_t start = 0, end, i, j, count = entries.shape[0]
    cdef const uint8_t *bytes_ = &data[0] if data.shape[0] else NULL
    if found.shape[0] != count or offsets.shape[0] <= count or (count and offsets[offsets.shape[0] - 1] > data.shape[0]):
        raise ValueError("arrays of different lengths")
    with nogil:
        while start < count:
            end = start + 1
            while end < count and is_same_hash(&entries[start, 0], &entries[end, 0]):
                end += 1
            for i in range(end - 1, start - 1, -1):
                found[i] = 1
                # Different keys of one hash are possible in theory: compare with the last of each, which almost always
                # is the last entry.
                for j in range(end - 1, i, -1):
                    if found[j] and is_same_key(
                        &offsets[0], bytes_, <uint32_t> entries[i, 1], <uint32_t> entries[j, 1]
                    ):
                        found[i] = 0
                        break
            start = end
