/* Reading one JSON text (RFC 8259) in place: strings, numbers, and nested values that are only checked.
 *
 * A text ends at `end`. Wide loads may look beyond it up to `limit`, the end of the memory that holds all texts, but
 * nothing is decided by what they see there. Every function returns the place after what it read, or NULL if the text
 * is invalid there. Nothing allocates, except to convert a number of many digits. */
#ifndef UPRIVER_TABLES_JSON_H
#define UPRIVER_TABLES_JSON_H

#include <float.h>
#include <locale.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__APPLE__)
#include <xlocale.h>
#endif

enum {
    JSON_DEPTH_MAX = 1000,
    JSON_NUMBER_BYTES_MAX = 800, /* a longer number is not converted */
};
enum {
    JSON_ESCAPED = 1, /* a string has escapes */
    JSON_LONE = 2,    /* a string has half of a surrogate pair, which cannot be stored as text */
    JSON_SPACED = 4,  /* there is white space outside strings */
};

static inline uint64_t load_word(const uint8_t *p) { uint64_t x; memcpy(&x, p, 8); return x; }

/* The next byte; 0, which is valid nowhere, at the end. */
static inline uint8_t peek(const uint8_t *p, const uint8_t *end) { return p < end ? *p : 0; }

static inline const uint8_t *skip_space(const uint8_t *p, const uint8_t *end) {
    while (p < end && *p <= ' ' && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) p++;
    return p;
}

/* Strings ------------------------------------------------------------------------------------------------------- */

static inline int is_plain(uint8_t c) { return c >= 0x20 && c < 0x80 && c != '"' && c != '\\'; }

/* The first byte that is not an ordinary ASCII character of a string. It may lie behind the end of the text. */
static inline const uint8_t *skip_plain(const uint8_t *p, const uint8_t *limit) {
#if defined(__SSE2__)
    const __m128i space = _mm_set1_epi8(0x20), quote = _mm_set1_epi8('"'), escape = _mm_set1_epi8('\\');
    for (; limit - p >= 16; p += 16) {
        __m128i x = _mm_loadu_si128((const __m128i *)p);
        /* As signed bytes, what is not ASCII is below the space too. */
        __m128i special = _mm_or_si128(_mm_cmplt_epi8(x, space),
                                       _mm_or_si128(_mm_cmpeq_epi8(x, quote), _mm_cmpeq_epi8(x, escape)));
        unsigned mask = (unsigned)_mm_movemask_epi8(special);
        if (mask) return p + __builtin_ctz(mask);
    }
#else
    for (; limit - p >= 8; p += 8) {
        const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
        uint64_t x = load_word(p), quote = x ^ (ones * '"'), escape = x ^ (ones * '\\');
        if ((x | (x - ones * 0x20) | (quote - ones) | (escape - ones)) & tops) break; /* there may be one */
    }
#endif
    while (p < limit && is_plain(*p)) p++;
    return p;
}

/* The length of the UTF-8 sequence at p, which does not start with an ASCII character; 0 if it is invalid. */
static inline int sequence_length(const uint8_t *p, const uint8_t *end) {
    ptrdiff_t rest = end - p;
    uint8_t c = p[0];
    if (c < 0xC2 || c > 0xF4 || rest < 2 || (p[1] & 0xC0) != 0x80) return 0;
    if (c < 0xE0) return 2;
    if (rest < 3 || (p[2] & 0xC0) != 0x80) return 0;
    if (c < 0xF0) {
        if ((c == 0xE0 && p[1] < 0xA0) || (c == 0xED && p[1] > 0x9F)) return 0; /* too long, or a surrogate */
        return 3;
    }
    if (rest < 4 || (p[3] & 0xC0) != 0x80) return 0;
    if ((c == 0xF0 && p[1] < 0x90) || (c == 0xF4 && p[1] > 0x8F)) return 0; /* too long, or beyond U+10FFFF */
    return 4;
}

/* The 16 bits of \uXXXX at p; -1 if it is not one. */
static inline int32_t read_unit(const uint8_t *p, const uint8_t *end) {
    int32_t unit = 0;
    if (end - p < 6 || p[0] != '\\' || p[1] != 'u') return -1;
    for (int i = 2; i < 6; i++) {
        uint8_t c = p[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10 : -1;
        if (digit < 0) return -1;
        unit = unit << 4 | digit;
    }
    return unit;
}

static inline int is_high(int32_t unit) { return unit >= 0xD800 && unit < 0xDC00; }
static inline int is_low(int32_t unit) { return unit >= 0xDC00 && unit < 0xE000; }

static const uint8_t *skip_escape(const uint8_t *p, const uint8_t *end, unsigned *flags) {
    *flags |= JSON_ESCAPED;
    switch (peek(p + 1, end)) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
        return p + 2;
    }
    int32_t unit = read_unit(p, end);
    if (unit < 0) return NULL;
    p += 6;
    if (is_high(unit) && is_low(read_unit(p, end))) return p + 6;
    if (is_high(unit) || is_low(unit)) *flags |= JSON_LONE;
    return p;
}

/* The closing quote of a string whose contents start at p. */
static inline const uint8_t *scan_string(const uint8_t *p, const uint8_t *end, const uint8_t *limit, unsigned *flags) {
    for (;;) {
        p = skip_plain(p, limit);
        if (p >= end) return NULL;
        if (*p == '"') return p;
        if (*p == '\\') {
            p = skip_escape(p, end, flags);
            if (!p) return NULL;
        } else {
            if (*p < 0x20) return NULL;
            do {
                int length = sequence_length(p, end);
                if (!length) return NULL;
                p += length;
            } while (p < end && *p >= 0x80);
        }
    }
}

static inline uint8_t *put_code_point(uint8_t *to, uint32_t c) {
    if (c < 0x80) {
        *to++ = (uint8_t)c;
        return to;
    }
    if (c < 0x800) {
        *to++ = (uint8_t)(0xC0 | c >> 6);
    } else {
        if (c < 0x10000) {
            *to++ = (uint8_t)(0xE0 | c >> 12);
        } else {
            *to++ = (uint8_t)(0xF0 | c >> 18);
            *to++ = (uint8_t)(0x80 | (c >> 12 & 0x3F));
        }
        *to++ = (uint8_t)(0x80 | (c >> 6 & 0x3F));
    }
    *to++ = (uint8_t)(0x80 | (c & 0x3F));
    return to;
}

/* Write the contents of a string that was scanned and has no lone surrogate. They are never longer than the string. */
static uint8_t *unescape(uint8_t *to, const uint8_t *p, const uint8_t *close) {
    while (p < close) {
        const uint8_t *next = memchr(p, '\\', (size_t)(close - p));
        size_t length = (size_t)((next ? next : close) - p);
        memcpy(to, p, length);
        to += length;
        if (!next) break;
        p = next + 2;
        switch (next[1]) {
        case 'b': *to++ = '\b'; break;
        case 'f': *to++ = '\f'; break;
        case 'n': *to++ = '\n'; break;
        case 'r': *to++ = '\r'; break;
        case 't': *to++ = '\t'; break;
        case 'u': {
            int32_t unit = read_unit(next, close);
            p = next + 6;
            if (is_high(unit)) {
                unit = 0x10000 + ((unit - 0xD800) << 10) + (read_unit(p, close) - 0xDC00);
                p += 6;
            }
            to = put_code_point(to, (uint32_t)unit);
            break;
        }
        default: *to++ = next[1];
        }
    }
    return to;
}

/* Numbers -------------------------------------------------------------------------------------------------------- */

enum NumberKind { NUMBER_INT, NUMBER_FLOAT, NUMBER_BEYOND /* a column cannot hold it */ };
struct Number {
    enum NumberKind kind;
    int64_t whole;
    double real;
    int is_rounded; /* the text says more than the double */
};

/* 5^q as 128 bits, high word first, for the algorithm of Eisel and Lemire; the module fills it in. */
enum { POWER_MIN = -342, POWER_MAX = 308 };
static uint64_t powers_of_five[POWER_MAX - POWER_MIN + 1][2];
static locale_t c_locale; /* in others a decimal point is a comma */

static int prepare_numbers(void) {
    if (!c_locale) c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    return c_locale ? 0 : -1;
}

/* Correct rounding of any number, slowly. */
static double convert_slowly(const uint8_t *start, const uint8_t *stop) {
    char text[JSON_NUMBER_BYTES_MAX + 1];
    size_t length = (size_t)(stop - start);
    memcpy(text, start, length);
    text[length] = 0;
    return strtod_l(text, NULL, c_locale);
}

/* The double nearest to digits * 10^power, by Eisel and Lemire ("Number parsing at a gigabyte per second", 2021).
 * Returns 0 where the product of 128 bits cannot tell, or the result is not a normal number. */
static int convert_exactly(uint64_t digits, int64_t power, double *result) {
    if (power < POWER_MIN || power > POWER_MAX) return 0;
    int shift = __builtin_clzll(digits);
    digits <<= shift;
    const uint64_t *five = powers_of_five[power - POWER_MIN];
    unsigned __int128 product = (unsigned __int128)digits * five[0];
    uint64_t high = (uint64_t)(product >> 64), low = (uint64_t)product;
    if ((high & 0x1FF) == 0x1FF) {
        uint64_t more = (uint64_t)(((unsigned __int128)digits * five[1]) >> 64);
        low += more;
        if (low < more) high++;
    }
    if (low == UINT64_MAX) return 0;
    int top = (int)(high >> 63);
    uint64_t mantissa = high >> (top + 9);
    int64_t exponent = ((217706 * power) >> 16) + 63 + top - shift + 1023;
    if (exponent <= 0) return 0;
    /* Exactly between two numbers: to the even one. */
    if (low <= 1 && power >= -4 && power <= 23 && (mantissa & 3) == 1 && mantissa << (top + 9) == high)
        mantissa &= ~(uint64_t)1;
    mantissa = (mantissa + (mantissa & 1)) >> 1;
    if (mantissa >= (uint64_t)1 << 53) {
        mantissa = (uint64_t)1 << 52;
        exponent++;
    }
    if (exponent >= 0x7FF) return 0;
    uint64_t bits = (mantissa & (((uint64_t)1 << 52) - 1)) | (uint64_t)exponent << 52;
    memcpy(result, &bits, 8);
    return 1;
}

static double convert_decimal(uint64_t digits, int count, int64_t power, const uint8_t *start, const uint8_t *stop) {
    static const double tens[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                  1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    double real;
#if FLT_EVAL_METHOD == 0
    /* Both operands are exact, so a single operation rounds correctly. */
    if (count <= 15 && power >= -22 && power <= 22) {
        real = power < 0 ? (double)digits / tens[-power] : (double)digits * tens[power];
        return *start == '-' ? -real : real;
    }
#endif
    if (count <= 19 && digits && convert_exactly(digits, power, &real)) return *start == '-' ? -real : real;
    return convert_slowly(start, stop);
}

static inline int is_digit(uint8_t c) { return (uint8_t)(c - '0') < 10; }

enum { DIGITS_SURE = 15, DIGITS_MAX = 17 };

/* Whether a double, written with as many digits as the text has, gives the text's digits again. It always does for up to
 * 15 digits and a normal number, and never for more than 17. */
static int is_faithful(double real, int64_t count, const uint8_t *start, const uint8_t *stop) {
    if (count <= DIGITS_SURE && (count == 0 || fabs(real) >= DBL_MIN)) return 1;
    char wanted[DIGITS_MAX + 1], found[DIGITS_MAX + 1], text[64];
    int used = 0, zeros = 0, same = 0;
    for (const uint8_t *p = start; p < stop && *p != 'e' && *p != 'E'; p++) {
        if (!is_digit(*p) || (*p == '0' && used + zeros == 0)) continue;
        if (*p == '0') {
            zeros++; /* perhaps at the end, where they do not count */
            continue;
        }
        if (used + zeros >= DIGITS_MAX) return 0;
        for (; zeros; zeros--) wanted[used++] = '0';
        wanted[used++] = (char)*p;
    }
    if (used == 0) return 1;
    snprintf(text, sizeof text, "%.*e", used - 1, fabs(real));
    for (const char *p = text; *p && *p != 'e' && same < used; p++)
        if (is_digit((uint8_t)*p)) found[same++] = *p;
    return same == used && memcmp(found, wanted, (size_t)used) == 0;
}

/* The part of a number after its integer digits, which starts with '.', 'e' or 'E'. */
static const uint8_t *scan_decimal(const uint8_t *start, const uint8_t *p, const uint8_t *end, uint64_t digits,
                                   int64_t count, struct Number *number) {
    int64_t power = 0, exponent = 0;
    int down = 0;
    if (*p == '.') {
        const uint8_t *point = ++p;
        for (; p < end && is_digit(*p); p++) {
            if (count < 19) digits = digits * 10 + (uint64_t)(*p - '0');
            if (digits || count >= 19) count++; /* leading zeros do not count */
        }
        if (p == point) return NULL;
        power = point - p;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        if (p < end && (*p == '+' || *p == '-')) down = *p++ == '-';
        const uint8_t *first = p;
        for (; p < end && is_digit(*p); p++)
            if (exponent < 100000) exponent = exponent * 10 + (*p - '0');
        if (p == first) return NULL;
        power += down ? -exponent : exponent;
    }
    number->kind = NUMBER_BEYOND;
    if (p - start > JSON_NUMBER_BYTES_MAX) return p;
    number->real = convert_decimal(digits, count > 100 ? 100 : (int)count, power, start, p);
    if (isfinite(number->real)) number->kind = NUMBER_FLOAT;
    number->is_rounded = !is_faithful(number->real, count, start, p);
    return p;
}

static inline const uint8_t *scan_number(const uint8_t *p, const uint8_t *end, struct Number *number) {
    const uint8_t *start = p;
    uint64_t digits = 0;
    int negative = *p == '-';
    p += negative;
    const uint8_t *first = p;
    if (peek(p, end) == '0') {
        p++;
    } else {
        /* Twenty digits overflow, and are not used. */
        for (; p < end && is_digit(*p); p++) digits = digits * 10 + (uint64_t)(*p - '0');
        if (p == first) return NULL;
    }
    int64_t count = p - first;
    if (p < end && (*p == '.' || *p == 'e' || *p == 'E')) {
        if (count > 19) count = 100;
        return scan_decimal(start, p, end, digits, digits || count > 1 ? count : 0, number);
    }
    if (count <= 19 && digits <= (uint64_t)INT64_MAX + (uint64_t)negative) {
        number->kind = NUMBER_INT;
        number->whole = (int64_t)(negative ? 0 - digits : digits);
    } else {
        number->kind = NUMBER_BEYOND;
    }
    return p;
}

static inline const uint8_t *skip_number(const uint8_t *p, const uint8_t *end) {
    const uint8_t *first;
    p += *p == '-';
    first = p;
    if (peek(p, end) == '0') p++;
    else while (p < end && is_digit(*p)) p++;
    if (p == first) return NULL;
    if (peek(p, end) == '.') {
        first = ++p;
        while (p < end && is_digit(*p)) p++;
        if (p == first) return NULL;
    }
    if ((peek(p, end) | 0x20) == 'e') {
        p++;
        if (peek(p, end) == '+' || peek(p, end) == '-') p++;
        first = p;
        while (p < end && is_digit(*p)) p++;
        if (p == first) return NULL;
    }
    return p;
}

/* Literals and nested values ------------------------------------------------------------------------------------- */

static inline const uint8_t *skip_word(const uint8_t *p, const uint8_t *end, const char *word, size_t length) {
    return (size_t)(end - p) >= length && !memcmp(p, word, length) ? p + length : NULL;
}

static inline const uint8_t *skip_literal(const uint8_t *p, const uint8_t *end) {
    switch (*p) {
    case 't': return skip_word(p, end, "true", 4);
    case 'f': return skip_word(p, end, "false", 5);
    case 'n': return skip_word(p, end, "null", 4);
    }
    return NULL;
}

/* Check an object or array that lies `depth` levels deep. */
static const uint8_t *skip_nested(const uint8_t *p, const uint8_t *end, const uint8_t *limit, int depth,
                                  unsigned *flags) {
    uint64_t objects[JSON_DEPTH_MAX / 64 + 1]; /* one bit per level: is it an object? */
    const int outside = depth;
    unsigned found = 0;
    const uint8_t *before;
    int inside; /* whether the innermost level is an object */

#define SPACE (before = p, p = skip_space(p, end), found |= p == before ? 0 : JSON_SPACED)
open:
    if (depth == JSON_DEPTH_MAX) return NULL;
    inside = *p == '{';
    objects[depth / 64] = (objects[depth / 64] & ~((uint64_t)1 << depth % 64)) | (uint64_t)inside << depth % 64;
    depth++;
    p++;
    SPACE;
    if (peek(p, end) == (inside ? '}' : ']')) goto close;
next:
    if (inside) {
        if (peek(p, end) != '"') return NULL;
        p = scan_string(p + 1, end, limit, &found);
        if (!p) return NULL;
        p++;
        SPACE;
        if (peek(p, end) != ':') return NULL;
        p++;
        SPACE;
    }
    if (p >= end) return NULL;
    if (*p == '"') {
        p = scan_string(p + 1, end, limit, &found);
        if (p) p++;
    } else if (*p == '{' || *p == '[') {
        goto open;
    } else {
        p = *p == '-' || is_digit(*p) ? skip_number(p, end) : skip_literal(p, end);
    }
    if (!p) return NULL;
after:
    SPACE;
    if (peek(p, end) == ',') {
        p++;
        SPACE;
        goto next;
    }
    if (peek(p, end) != (inside ? '}' : ']')) return NULL;
close:
    p++;
    if (--depth == outside) {
        *flags |= found;
        return p;
    }
    inside = objects[(depth - 1) / 64] >> (depth - 1) % 64 & 1;
    goto after;
#undef SPACE
}

/* Copy a value that was checked, without the white space outside its strings. */
static uint8_t *put_compact(uint8_t *to, const uint8_t *p, const uint8_t *stop) {
    while (p < stop) {
        if (*p == '"') {
            const uint8_t *start = p++;
            while (*p != '"') p += *p == '\\' ? 2 : 1;
            p++;
            memcpy(to, start, (size_t)(p - start));
            to += p - start;
        } else {
            if (*p > ' ') *to++ = *p;
            p++;
        }
    }
    return to;
}

#endif
