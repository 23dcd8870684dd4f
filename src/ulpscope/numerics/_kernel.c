/* SPDX-License-Identifier: Apache-2.0
 *
 * The compiled passes of ulpscope.numerics: statistics and fingerprint of one tensor, the difference of two, the elements of a view, and
 * many differences of tensors that lie in files.
 *
 * Policy. A plain shared library called through ctypes: no Python API, no global state, no threads of its own, no allocation. One pass over
 * memory in blocks that fit the first-level cache; within a block each quantity has a loop of its own that vectorises.
 * The passes are compiled once for each instruction set and chosen at run time. The number of lanes of a floating sum is
 * the same in each of them, and multiply-adds are fused only where the product is exact, so every CPU gives the same bits.
 * Where this file does not compile (no GNU vector extensions, big-endian) the package works with NumPy instead.
 *
 * The file includes itself: the second part below is the pass for one vector width.
 */
#ifndef ULPSCOPE_PASS

#if !defined(__GNUC__) || !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs GNU vector extensions and a little-endian machine"
#endif

/* ULPSCOPE_PORTABLE leaves out code for this machine alone, so that a test can build here what other machines build. */
#if defined(__x86_64__) && !defined(ULPSCOPE_PORTABLE)
#define ULPSCOPE_X86
#endif

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang fp contract(off)
#pragma clang diagnostic ignored "-Wpsabi"
#else
#pragma GCC optimize("fp-contract=off")
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define BLOCKWISE static __attribute__((noinline)) /* called once for each block: inlined, the file would compile twice as long */
#define UNALIGNED __attribute__((aligned(1), may_alias))

/* begin of layouts: tools/layouts.py writes it */
enum { KERNEL_VERSION = 7, BUCKETS = 496, CHUNK = 262144, STRIPE = 64 };
enum { MOST_DIMS = 16 }; /* of a view that is read as it lies */
/* CODES: one byte for each element, its value looked up in a table. */
enum kind { FLOAT64, FLOAT32, FLOAT16, BFLOAT16, INT64, INT32, INT16, UINT64, UINT32, UINT16, CODES };
/* Fingerprint and statistics of a tensor. */
struct summary {
    uint64_t s0;
    uint64_t s1;
    double min;
    double max;
    double sum;
    double sum_squares;
    uint64_t nan;
    uint64_t posinf;
    uint64_t neginf;
    uint64_t zero;
    uint64_t subnormal;
};
_Static_assert(sizeof(void *) != 8 || (sizeof(struct summary) == 88 && offsetof(struct summary, s0) == 0 && offsetof(struct summary, s1)
    == 8 && offsetof(struct summary, min) == 16 && offsetof(struct summary, max) == 24 && offsetof(struct summary, sum) == 32 &&
    offsetof(struct summary, sum_squares) == 40 && offsetof(struct summary, nan) == 48 && offsetof(struct summary, posinf) == 56 &&
    offsetof(struct summary, neginf) == 64 && offsetof(struct summary, zero) == 72 && offsetof(struct summary, subnormal) == 80),
    "tools/layouts.py");
/* What a pass over two tensors adds up; `worst` and `first_disagree` are -1 where there is none. */
struct difference {
    double max_abs;
    double max_rel;
    double sum_abs;
    double sum_squares;
    double sum_squares_subject;
    double sum_squares_reference;
    double sum_products;
    uint64_t within_1e4;
    uint64_t within_1e3;
    uint64_t within_5e3;
    uint64_t different;
    uint64_t sign_flips;
    uint64_t nan_disagree;
    uint64_t inf_disagree;
    uint64_t nonfinite;
    int64_t worst;
    int64_t first_disagree;
    uint64_t ulp_max;
    uint64_t ulp_counts[496];
};
_Static_assert(sizeof(void *) != 8 || (sizeof(struct difference) == 4112 && offsetof(struct difference, max_abs) == 0 && offsetof(struct
    difference, max_rel) == 8 && offsetof(struct difference, sum_abs) == 16 && offsetof(struct difference, sum_squares) == 24 &&
    offsetof(struct difference, sum_squares_subject) == 32 && offsetof(struct difference, sum_squares_reference) == 40 &&
    offsetof(struct difference, sum_products) == 48 && offsetof(struct difference, within_1e4) == 56 && offsetof(struct difference,
    within_1e3) == 64 && offsetof(struct difference, within_5e3) == 72 && offsetof(struct difference, different) == 80 &&
    offsetof(struct difference, sign_flips) == 88 && offsetof(struct difference, nan_disagree) == 96 && offsetof(struct difference,
    inf_disagree) == 104 && offsetof(struct difference, nonfinite) == 112 && offsetof(struct difference, worst) == 120 &&
    offsetof(struct difference, first_disagree) == 128 && offsetof(struct difference, ulp_max) == 136 && offsetof(struct difference,
    ulp_counts) == 144), "tools/layouts.py");
/* Bytes in a file, and their hash. */
struct kept {
    int64_t fd;
    uint64_t offset;
    uint64_t length;
    uint64_t high;
    uint64_t low;
};
_Static_assert(sizeof(void *) != 8 || (sizeof(struct kept) == 40 && offsetof(struct kept, fd) == 0 && offsetof(struct kept, offset) == 8
    && offsetof(struct kept, length) == 16 && offsetof(struct kept, high) == 24 && offsetof(struct kept, low) == 32),
    "tools/layouts.py");
/* Two of them, and the pairs of tensors that lie in them. */
struct unit {
    struct kept sides[2];
    uint64_t first_view;
    uint64_t num_views;
    uint64_t is_in_parts;
    uint64_t state;
};
_Static_assert(sizeof(void *) != 8 || (sizeof(struct unit) == 112 && offsetof(struct unit, sides) == 0 && offsetof(struct unit,
    first_view) == 80 && offsetof(struct unit, num_views) == 88 && offsetof(struct unit, is_in_parts) == 96 && offsetof(struct unit,
    state) == 104), "tools/layouts.py");
/* Where elements lie: pieces of so many bytes. Without dimensions there is one; else extents and strides are among the numbers, from these places on. */
struct layout {
    uint64_t first;
    uint64_t piece;
    uint64_t dims;
    uint64_t extents;
    uint64_t strides;
};
_Static_assert(sizeof(void *) != 8 || (sizeof(struct layout) == 40 && offsetof(struct layout, first) == 0 && offsetof(struct layout,
    piece) == 8 && offsetof(struct layout, dims) == 16 && offsetof(struct layout, extents) == 24 && offsetof(struct layout, strides) ==
    32), "tools/layouts.py");
/* A pair of tensors; `values` and `order` are tables of one-byte dtypes. */
struct view {
    uint64_t kind;
    uint64_t numel;
    const double *values;
    const int64_t *order;
    struct layout sides[2];
};
_Static_assert(sizeof(void *) != 8 || (sizeof(struct view) == 112 && offsetof(struct view, kind) == 0 && offsetof(struct view, numel) ==
    8 && offsetof(struct view, values) == 16 && offsetof(struct view, order) == 24 && offsetof(struct view, sides) == 32),
    "tools/layouts.py");
/* The fields of `struct difference` but its counts, two quantiles of these, and the bits of both elements at the worst place. */
struct result {
    uint8_t fields[144];
    uint64_t middle;
    uint64_t high;
    uint64_t bits[2];
};
_Static_assert(sizeof(void *) != 8 || (sizeof(struct result) == 176 && offsetof(struct result, fields) == 0 && offsetof(struct result,
    middle) == 144 && offsetof(struct result, high) == 152 && offsetof(struct result, bits) == 160), "tools/layouts.py");
/* Work that several threads share. */
struct units {
    struct unit *units;
    const struct view *views;
    const size_t *numbers;
    struct result *results;
    uint64_t count;
    uint64_t next;
};
_Static_assert(sizeof(void *) != 8 || (sizeof(struct units) == 48 && offsetof(struct units, units) == 0 && offsetof(struct units, views)
    == 8 && offsetof(struct units, numbers) == 16 && offsetof(struct units, results) == 24 && offsetof(struct units, count) == 32 &&
    offsetof(struct units, next) == 40), "tools/layouts.py");
/* end of layouts: tools/layouts.py writes it */

static const size_t SIZE[] = {8, 4, 2, 2, 8, 4, 2, 8, 4, 2, 1};
/* Whether values need a double; all others are floats of at most 24 bits. */
static const int IS_WIDE[] = {1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0};

enum { BLOCK = 4096, CODE_BLOCK = 32768, PAIR_BLOCK = 512, PAIR_LANES = 8, SLICES = 8 };
enum { SEGMENT = 1 << 18, ROUND = 64 }; /* bytes, a multiple of every block; segments in flight */

/* The contribution of one block of a pair. */
struct part {
    double max_abs, max_rel, sum_abs, sum_squares, sum_squares_subject, sum_squares_reference, sum_products;
    uint64_t beyond_1e4, beyond_1e3, beyond_5e3, sign_flips;
};

/* Positions within 1e-4 have ratios below this, also where the product with 1e-4 is subnormal and rounds up. */
#define FAR_RATIO 2.5e-4
#define SHRINK (1 - 0x1p-50)
#define MAGNITUDE 0x7FFFFFFFFFFFFFFFu

INLINE double from_bits64(uint64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

INLINE uint64_t bits64(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

INLINE float from_bits32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE double value_float64(uint64_t bits) { return from_bits64(bits); }
INLINE double value_float32(uint32_t bits) { return from_bits32(bits); }
/* The exponent of float16 in the place of that of float32 is a number 2**112 too small; exact for subnormal numbers as well. */
INLINE float narrow_float16(uint16_t bits) {
    uint32_t magnitude = (uint32_t)(bits & 0x7FFF) << 13, sign = (uint32_t)(bits & 0x8000) << 16, scaled;
    float value = from_bits32(magnitude | (magnitude >= 0x0F800000 ? 0x7F800000 : 0)) * 0x1p112f;
    memcpy(&scaled, &value, 4);
    return from_bits32(scaled | sign);
}
INLINE float narrow_bfloat16(uint16_t bits) { return from_bits32((uint32_t)bits << 16); }
INLINE double value_float16(uint16_t bits) { return narrow_float16(bits); }
INLINE double value_bfloat16(uint16_t bits) { return narrow_bfloat16(bits); }

#define RATIO 0xD1342543DE82EF95u

INLINE uint64_t power(size_t exponent) {
    uint64_t result = 1;
    for (uint64_t square = RATIO; exponent; exponent >>= 1, square *= square)
        result *= exponent & 1 ? square : 1;
    return result;
}

INLINE uint64_t mix(uint64_t word) {
    word *= 0x9E3779B97F4A7C15u;
    word ^= word >> 32;
    word *= 0xD6E8FEB86659FD93u;
    return word ^ word >> 32;
}

/* A thread may flush subnormal numbers to zero (torch.set_flush_denormal): the passes count every value. */
#if defined(ULPSCOPE_X86)
#include <immintrin.h>
typedef unsigned control;
INLINE control exact_subnormals(void) {
    control before = _mm_getcsr();
    if (before & 0x8040)
        _mm_setcsr(before & ~0x8040u);
    return before;
}
INLINE void restore(control before) {
    if (before & 0x8040)
        _mm_setcsr(before);
}
#elif defined(__aarch64__)
typedef uint64_t control;
INLINE control exact_subnormals(void) {
    control before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if (before >> 24 & 1)
        __asm__ volatile("msr fpcr, %0" : : "r"(before & ~(UINT64_C(1) << 24)));
    return before;
}
INLINE void restore(control before) {
    if (before >> 24 & 1)
        __asm__ volatile("msr fpcr, %0" : : "r"(before));
}
#else
typedef int control;
INLINE control exact_subnormals(void) { return 0; }
INLINE void restore(control before) { (void)before; }
#endif

/* One byte for each element: how often each code occurs says everything. Several tables, since equal neighbours would wait for each other. */
static void count_codes(const uint8_t *codes, size_t n, uint64_t counts[256]) {
    uint32_t tables[4][256] = {{0}};
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (size_t t = 0; t < 4; t++)
            tables[t][codes[i + t]]++;
    for (; i < n; i++)
        tables[0][codes[i]]++;
    for (size_t code = 0; code < 256; code++)
        counts[code] += (uint64_t)tables[0][code] + tables[1][code] + tables[2][code] + tables[3][code];
}

static void summarize_codes(const uint64_t counts[256], const double *values, double tiny, struct summary *out) {
    for (size_t code = 0; code < 256; code++) {
        uint64_t count = counts[code];
        double value = values[code];
        if (!count)
            continue;
        if (value != value) {
            out->nan += count;
            continue;
        }
        out->min = value < out->min ? value : out->min;
        out->max = value > out->max ? value : out->max;
        if (value - value != 0) {
            *(value > 0 ? &out->posinf : &out->neginf) += count;
            continue;
        }
        out->zero += value == 0 ? count : 0;
        out->subnormal += value != 0 && value < tiny && value > -tiny ? count : 0;
        out->sum += (double)count * value;
        out->sum_squares += (double)count * (value * value);
    }
}

/* Bucket of a distance: exact below 16, then eight buckets for each power of two. */
INLINE unsigned bucket(uint64_t distance) {
    unsigned shift = 60 - (unsigned)__builtin_clzll(distance | 8);
    return 8 * shift + (unsigned)(distance >> shift);
}

/* Takes non-finite values out of a block: zero on both sides, counted, and not kept for the distances. */
#define SCRUB(name, T)                                                                                                                     \
    static size_t scrub_##name(T *a, T *b, size_t n, size_t start, uint8_t *keep, struct difference *out) {                                \
        size_t nonfinite = 0;                                                                                                              \
        for (size_t i = 0; i < n; i++) {                                                                                                   \
            keep[i] = a[i] - a[i] == 0 && b[i] - b[i] == 0;                                                                                \
            if (keep[i])                                                                                                                   \
                continue;                                                                                                                  \
            int nan = (a[i] != a[i]) != (b[i] != b[i]);                                                                                    \
            int inf = !nan && a[i] == a[i] && a[i] != b[i];                                                                                \
            out->nan_disagree += (unsigned)nan;                                                                                            \
            out->inf_disagree += (unsigned)inf;                                                                                            \
            if ((nan || inf) && out->first_disagree < 0)                                                                                   \
                out->first_disagree = (int64_t)(start + i);                                                                                \
            a[i] = b[i] = 0;                                                                                                               \
            nonfinite++;                                                                                                                   \
        }                                                                                                                                  \
        out->nonfinite += nonfinite;                                                                                                       \
        return nonfinite;                                                                                                                  \
    }                                                                                                                                      \
    static size_t scrub_equal_##name(T *a, size_t n) {                                                                                     \
        size_t nonfinite = 0;                                                                                                              \
        for (size_t i = 0; i < n; i++)                                                                                                     \
            if (a[i] - a[i] != 0) {                                                                                                        \
                a[i] = 0;                                                                                                                  \
                nonfinite++;                                                                                                               \
            }                                                                                                                              \
        return nonfinite;                                                                                                                  \
    }
SCRUB(wide, double)
SCRUB(narrow, float)
#undef SCRUB

/* Buckets of the last block that wait to be counted, while the next block is read: adding one to memory and arithmetic on vectors
 * go on side by side. Neighbours have tables of their own, since equal ones would wait for each other. */
struct counting {
    uint32_t index[PAIR_BLOCK] __attribute__((aligned(64)));
    size_t pending;
    uint32_t slices[SLICES][BUCKETS];
};

/* Counts the pending buckets from position `from`, a multiple of the slices. */
static void count_rest(struct counting *counting, size_t from) {
    for (size_t i = from; i < counting->pending; i++)
        counting->slices[i % SLICES][counting->index[i]]++;
    counting->pending = 0;
}

static void flush(struct counting *counting, struct difference *out) {
    for (size_t slice = 0; slice < SLICES; slice++)
        for (size_t i = 0; i < BUCKETS; i++) {
            out->ulp_counts[i] += counting->slices[slice][i];
            counting->slices[slice][i] = 0;
        }
}

/* Puts the summary of a segment behind those before it; `words` is the length of the segment. */
static void append(struct summary *out, const struct summary *part, size_t words) {
    out->s0 += part->s0;
    out->s1 = out->s1 * power(words) + part->s1;
    out->min = part->min < out->min ? part->min : out->min;
    out->max = part->max > out->max ? part->max : out->max;
    out->sum += part->sum;
    out->sum_squares += part->sum_squares;
    out->nan += part->nan;
    out->posinf += part->posinf;
    out->neginf += part->neginf;
    out->zero += part->zero;
    out->subnormal += part->subnormal;
}

#if (defined(__unix__) || defined(__APPLE__)) && defined(__SIZEOF_INT128__)
#define ULPSCOPE_FILES
#include <errno.h>
#include <time.h>
#include <unistd.h>

/* XXH3 with 128 bits, for more than 240 bytes, as the xxHash specification has it. */
enum { HASH_BLOCK = 1024, SECRET = 192 };
static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90,
    0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d,
    0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28,
    0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e,
    0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b,
    0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83,
    0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16,
    0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
static const uint64_t hash_start[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
#endif

#define ULPSCOPE_PASS
#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(base) PASTE(base, TARGET)

#if defined(ULPSCOPE_X86)
#define TARGET avx512
#define WIDTH 64
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,f16c,prefer-vector-width=512")
#endif
#include "_kernel.c"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef TARGET
#undef WIDTH

#define TARGET avx2
#define WIDTH 32
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")
#endif
#include "_kernel.c"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef TARGET
#undef WIDTH
#endif

#define TARGET plain
#define WIDTH 16
#include "_kernel.c"
#undef TARGET
#undef WIDTH

#if defined(ULPSCOPE_X86)
static int level(void) {
    static int found = -1;
    if (found < 0) {
        __builtin_cpu_init();
        int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl");
        int middle = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
        found = !middle ? 0 : wide ? 2 : 1;
    }
    return found;
}
#define DISPATCH(function, ...)                                                                                                            \
    switch (target < 0 ? level() : target) {                                                                                               \
    case 2: function##_avx512(__VA_ARGS__); break;                                                                                         \
    case 1: function##_avx2(__VA_ARGS__); break;                                                                                           \
    default: function##_plain(__VA_ARGS__);                                                                                                \
    }
#else
static int level(void) { return 0; }
#define DISPATCH(function, ...) function##_plain(__VA_ARGS__);
#endif

EXPORT int ulpscope_version(void) { return KERNEL_VERSION; }

/* The best instruction set that this CPU has: 0 plain, 1 AVX2, 2 AVX-512. A `target` below means one of these, or -1 for the best. */
EXPORT int ulpscope_level(void) { return level(); }

EXPORT void ulpscope_fingerprint(const void *data, size_t size_bytes, uint64_t sums[2], int target) {
    (void)target;
    DISPATCH(fingerprint, data, size_bytes, sums)
}

/* Segments of one tensor that several threads take one after the other. Sums are added up within a segment and then in the order of the
 * segments, so they do not depend on which thread took which segment. */
struct segments {
    int kind, target;
    const uint8_t *data;
    size_t size_bytes, first, count, taken;
    const double *values;
    double tiny;
    size_t piece, dims;
    const size_t *extents, *strides;
    struct summary parts[ROUND];
};

static size_t segment_length(const struct segments *job, size_t segment) {
    size_t start = segment * SEGMENT;
    return job->size_bytes - start < SEGMENT ? job->size_bytes - start : SEGMENT;
}

static void summarize_segments(void *argument) {
    struct segments *job = argument;
    const int target = job->target;
    (void)target;
    control before = exact_subnormals();
    for (size_t i; (i = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED)) < job->count;) {
        const size_t segment = job->first + i;
        DISPATCH(summarize, job->kind, job->data + segment * SEGMENT, segment_length(job, segment), job->values, job->tiny, &job->parts[i])
    }
    restore(before);
}

/* Copies a part of the bytes of a view, in the order of its indices. */
static void gather_part(const struct segments *job, size_t start, size_t length, uint8_t *to) {
    size_t index[MOST_DIMS], rest = start / job->piece, inner = start % job->piece;
    const uint8_t *from = job->data;
    for (size_t d = job->dims; d-- > 0; rest /= job->extents[d]) {
        index[d] = rest % job->extents[d];
        from += index[d] * job->strides[d];
    }
    while (length) {
        const size_t count = job->piece - inner < length ? job->piece - inner : length;
        memcpy(to, from + inner, count);
        to += count;
        length -= count;
        inner = 0;
        for (size_t d = job->dims; d-- > 0;) {
            from += job->strides[d];
            if (++index[d] < job->extents[d])
                break;
            from -= job->strides[d] * job->extents[d];
            index[d] = 0;
        }
    }
}

static void summarize_gathered(void *argument) {
    struct segments *job = argument;
    const int target = job->target;
    (void)target;
    uint64_t room[SEGMENT / 8];
    control before = exact_subnormals();
    for (size_t i; (i = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED)) < job->count;) {
        const size_t segment = job->first + i, length = segment_length(job, segment);
        gather_part(job, segment * SEGMENT, length, (uint8_t *)room);
        DISPATCH(summarize, job->kind, (const uint8_t *)room, length, job->values, job->tiny, &job->parts[i])
    }
    restore(before);
}

/* Returns 0, or -1 where the size is no whole number of elements. `values` is the table of CODES, else unused. With `dims` the data are
 * pieces of `piece` bytes, as many as the extents say, `strides` bytes apart. `parallel`, where it is given, calls a function with its
 * argument in each of so many threads and returns when all are done; its last argument is 0. */
EXPORT int ulpscope_summarize(int kind, const void *data, size_t size_bytes, size_t piece, size_t dims, const size_t *extents,
                              const size_t *strides, const double *values, double tiny, struct summary *out, int target,
                              void (*parallel)(void (*)(void *), void *, unsigned, unsigned), unsigned threads) {
    if (kind < 0 || kind > CODES || size_bytes % SIZE[kind] || dims > MOST_DIMS)
        return -1;
    void (*const summarize_some)(void *) = dims ? summarize_gathered : summarize_segments;
    struct segments job;
    job.kind = kind;
    job.target = target;
    job.data = data;
    job.size_bytes = size_bytes;
    job.piece = piece;
    job.dims = dims;
    job.extents = extents;
    job.strides = strides;
    job.values = values;
    job.tiny = tiny;
    memset(out, 0, sizeof *out);
    out->min = __builtin_inf();
    out->max = -__builtin_inf();
    const size_t segments = (size_bytes + SEGMENT - 1) / SEGMENT;
    for (job.first = 0; job.first < segments; job.first += job.count) {
        job.count = segments - job.first < ROUND ? segments - job.first : ROUND;
        job.taken = 0;
        if (parallel && threads > 1 && job.count >= 4)
            parallel(summarize_some, &job, threads, 0);
        else
            summarize_some(&job);
        for (size_t i = 0; i < job.count; i++)
            append(out, &job.parts[i], (segment_length(&job, job.first + i) + 7) / 8);
    }
    return 0;
}

static void begin_difference(struct counting *counting, struct difference *out) {
    memset(out, 0, sizeof *out);
    memset(counting->slices, 0, sizeof counting->slices);
    counting->pending = 0;
    out->worst = out->first_disagree = -1;
}

static void end_difference(size_t numel, struct counting *counting, struct difference *out) {
    count_rest(counting, 0);
    flush(counting, out);
    out->different = numel - out->ulp_counts[0];
    out->ulp_counts[0] -= out->nonfinite;
}

/* `values` and `order` are the tables of CODES (value, and position among the ordered values), else unused. */
EXPORT int ulpscope_difference(int kind, const void *subject, const void *reference, size_t numel, const double *values,
                               const int64_t *order, struct difference *out, int target) {
    (void)target;
    if (kind < 0 || kind > CODES)
        return -1;
    struct counting counting;
    control before = exact_subnormals();
    begin_difference(&counting, out);
    DISPATCH(difference, kind, subject, reference, 0, numel, values, order, &counting, out)
    end_difference(numel, &counting, out);
    restore(before);
    return 0;
}

/* Copies `count` items of `size` bytes that lie `stride` bytes apart. */
INLINE uint8_t *gather_row(const uint8_t *from, size_t count, size_t stride, size_t size, uint8_t *to) {
    typedef uint64_t UNALIGNED eight;
    typedef uint32_t UNALIGNED four;
    typedef uint16_t UNALIGNED two;
    for (size_t i = 0; size == 8 && i < count; i++)
        ((eight *)to)[i] = *(const eight *)(from + i * stride);
    for (size_t i = 0; size == 4 && i < count; i++)
        ((four *)to)[i] = *(const four *)(from + i * stride);
    for (size_t i = 0; size == 2 && i < count; i++)
        ((two *)to)[i] = *(const two *)(from + i * stride);
    for (size_t i = 0; size != 8 && size != 4 && size != 2 && i < count; i++)
        memcpy(to + i * size, from + i * stride, size);
    return to + count * size;
}

static uint8_t *gather_rows(const uint8_t *from, size_t size, size_t dims, const size_t *extents, const size_t *strides, uint8_t *to) {
    if (dims == 1)
        return gather_row(from, *extents, *strides, size, to);
    for (size_t i = 0; i < *extents; i++)
        to = gather_rows(from + i * *strides, size, dims - 1, extents + 1, strides + 1, to);
    return to;
}

/* Copies the items of a view of one dimension or more, one after the other; strides are in bytes. All lie within the data. */
EXPORT void ulpscope_gather(const void *data, size_t size, size_t dims, const size_t *extents, const size_t *strides, void *out) {
    gather_rows(data, size, dims, extents, strides, out);
}

/* Counts the finite elements of the subject, and finds the largest of those that stand where the reference is zero. */
#define AT_ZEROS(name, S, EXPONENT, FLOAT)                                                                                                 \
    static size_t name(const void *subject, const void *reference, size_t numel, double *largest) {                                        \
        typedef S UNALIGNED bits;                                                                                                          \
        const bits *p = subject, *q = reference;                                                                                           \
        const S magnitude = EXPONENT | (EXPONENT - 1);                                                                                     \
        S most = 0;                                                                                                                        \
        size_t finite = 0;                                                                                                                 \
        for (size_t start = 0; start < numel; start += 4096) {                                                                             \
            const size_t end = numel - start < 4096 ? numel : start + 4096;                                                                \
            S count = 0;                                                                                                                   \
            for (size_t i = start; i < end; i++) {                                                                                         \
                const S u = p[i] & magnitude, is_finite = -(S)(u < EXPONENT), is_zero = -(S)((q[i] & magnitude) == 0);                     \
                const S at_zero = u & is_finite & is_zero;                                                                                 \
                count -= is_finite;                                                                                                        \
                most = at_zero > most ? at_zero : most;                                                                                    \
            }                                                                                                                              \
            finite += (size_t)count;                                                                                                       \
        }                                                                                                                                  \
        FLOAT value;                                                                                                                       \
        memcpy(&value, &most, sizeof value);                                                                                               \
        *largest = value;                                                                                                                  \
        return finite;                                                                                                                     \
    }
AT_ZEROS(at_zeros_f64, int64_t, 0x7FF0000000000000, double)
AT_ZEROS(at_zeros_f32, int32_t, 0x7F800000, float)

/* Takes float64 and float32 only. */
EXPORT size_t ulpscope_at_zeros(int kind, const void *subject, const void *reference, size_t numel, double *largest) {
    return kind == FLOAT64 ? at_zeros_f64(subject, reference, numel, largest) : at_zeros_f32(subject, reference, numel, largest);
}

#if defined(ULPSCOPE_FILES)
/* Pairs of tensors in files: read, verified, put in order and compared without the interpreter. An error is not described here: the caller
 * looks at such a pair again and finds out. */

INLINE uint64_t read64(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

static uint64_t hash_merged(const uint64_t sums[8], const uint8_t *key, uint64_t hash) {
    for (size_t i = 0; i < 8; i += 2) {
        unsigned __int128 product = (unsigned __int128)(sums[i] ^ read64(key + 8 * i)) * (sums[i + 1] ^ read64(key + 8 * i + 8));
        hash += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9u;
    return hash ^ hash >> 32;
}

/* Adds a part to the hash of `total` bytes: `length` of them from position `at`, a multiple of the block. Parts come in their order; where
 * this is not the first, the 64 bytes before it stand in front of it. */
static void hash_part(uint64_t sums[8], const uint8_t *p, size_t at, size_t length, size_t total, int target) {
    (void)target;
    const size_t all_blocks = (total - 1) / HASH_BLOCK, before = at / HASH_BLOCK;
    size_t blocks = length / HASH_BLOCK;
    blocks = before + blocks > all_blocks ? all_blocks - before : blocks;
    DISPATCH(hash_blocks, sums, p, blocks)
    if (at + length < total)
        return;
    DISPATCH(hash_stripes, sums, p + blocks * HASH_BLOCK, secret, (total - 1 - all_blocks * HASH_BLOCK) / STRIPE)
    DISPATCH(hash_stripes, sums, p + length - STRIPE, secret + SECRET - STRIPE - 7, 1)
}

static int is_hash(const uint64_t sums[8], size_t total, uint64_t high, uint64_t low) {
    return hash_merged(sums, secret + 11, total * PRIME64_1) == low &&
           hash_merged(sums, secret + SECRET - STRIPE - 11, ~(total * PRIME64_2)) == high;
}

enum { WAITING, TAKEN, COMPARED, FAILED }; /* the states of a unit */

static uint64_t bucket_at(const struct difference *found, double share) {
    uint64_t total = 0, reached = 0, needed, i;
    for (i = 0; i < BUCKETS; i++)
        total += found->ulp_counts[i];
    const double many = share * (double)total;
    needed = (uint64_t)many;
    needed += (double)needed < many;
    needed += !needed;
    for (i = 0; i < BUCKETS; i++)
        if ((reached += found->ulp_counts[i]) >= needed)
            break;
    return i;
}

/* Keeps the bits at the worst place, where it lies in this part. */
static void note_worst(int kind, const uint8_t *const sides[2], size_t first, const struct difference *found, struct result *result) {
    const int64_t worst = found->first_disagree >= 0 ? found->first_disagree : found->worst;
    if (worst >= (int64_t)first)
        for (size_t side = 0; side < 2; side++) {
            result->bits[side] = 0;
            memcpy(&result->bits[side], sides[side] + SIZE[kind] * ((size_t)worst - first), SIZE[kind]);
        }
}

static void finish(size_t numel, struct counting *counting, struct difference *found, struct result *result) {
    end_difference(numel, counting, found);
    memcpy(result->fields, found, sizeof result->fields);
    result->middle = bucket_at(found, 0.5);
    result->high = bucket_at(found, 0.99);
}

static int read_kept(const struct kept *kept, uint64_t at, size_t length, uint8_t *to) {
    while (length) {
        ssize_t more = pread((int)kept->fd, to, length, (off_t)(kept->offset + at));
        if (more < 0 && errno == EINTR)
            continue;
        if (more <= 0)
            return 0;
        at += (uint64_t)more;
        to += more;
        length -= (size_t)more;
    }
    return 1;
}

/* Compares one pair that is all of the bytes, part by part: only two parts are in memory, at any size of the tensors. */
static int compare_in_parts(const struct unit *unit, const struct view *view, struct result *result, uint8_t *scratch, int target) {
    (void)target;
    const uint8_t *parts[2] = {scratch + STRIPE, scratch + 2 * STRIPE + CHUNK};
    const size_t total = unit->sides[0].length, size = SIZE[view->kind];
    uint64_t sums[2][8];
    struct counting counting;
    struct difference found;
    for (size_t side = 0; side < 2; side++)
        memcpy(sums[side], hash_start, sizeof hash_start);
    begin_difference(&counting, &found);
    for (size_t at = 0, length; at < total; at += length) {
        length = total - at < CHUNK ? total - at : CHUNK;
        for (size_t side = 0; side < 2; side++) {
            uint8_t *part = (uint8_t *)parts[side];
            memcpy(part - STRIPE, part + CHUNK - STRIPE, STRIPE);
            if (!read_kept(&unit->sides[side], at, length, part))
                return 0;
            hash_part(sums[side], part, at, length, total, target);
        }
        DISPATCH(difference, (int)view->kind, parts[0], parts[1], at / size, length / size, view->values, view->order, &counting, &found)
        note_worst((int)view->kind, parts, at / size, &found, result);
    }
    finish(view->numel, &counting, &found, result);
    return is_hash(sums[0], total, unit->sides[0].high, unit->sides[0].low) &&
           is_hash(sums[1], total, unit->sides[1].high, unit->sides[1].low);
}

static const uint8_t *in_order(const uint8_t *data, const struct layout *layout, const size_t *numbers, uint8_t *to) {
    if (!layout->dims)
        return data + layout->first;
    gather_rows(data + layout->first, layout->piece, layout->dims, numbers + layout->extents, numbers + layout->strides, to);
    return to;
}

/* Compares several pairs in the same bytes, which are read once. */
static int compare_views(const struct unit *unit, const struct view *views, const size_t *numbers, struct result *results, uint8_t *scratch,
                         int target) {
    (void)target;
    uint8_t *const data[2] = {scratch, scratch + unit->sides[0].length};
    uint8_t *const rooms[2] = {data[1] + unit->sides[1].length, data[1] + unit->sides[1].length + unit->sides[0].length};
    for (size_t side = 0; side < 2; side++) {
        const struct kept *kept = &unit->sides[side];
        uint64_t sums[8];
        memcpy(sums, hash_start, sizeof sums);
        if (!read_kept(kept, 0, kept->length, data[side]))
            return 0;
        hash_part(sums, data[side], 0, kept->length, kept->length, target);
        if (!is_hash(sums, kept->length, kept->high, kept->low))
            return 0;
    }
    for (size_t i = 0; i < unit->num_views; i++) {
        const struct view *view = &views[i];
        const uint8_t *sides[2];
        struct counting counting;
        struct difference found;
        for (size_t side = 0; side < 2; side++)
            sides[side] = in_order(data[side], &view->sides[side], numbers, rooms[side]);
        begin_difference(&counting, &found);
        DISPATCH(difference, (int)view->kind, sides[0], sides[1], 0, view->numel, view->values, view->order, &counting, &found)
        note_worst((int)view->kind, sides, 0, &found, &results[i]);
        finish(view->numel, &counting, &found, &results[i]);
    }
    return 1;
}

/* Does one unit unless another thread has begun it. */
static void compare_unit(const struct units *all, uint64_t at, uint8_t *scratch, int target) {
    struct unit *unit = &all->units[at];
    uint64_t state = WAITING;
    if (!__atomic_compare_exchange_n(&unit->state, &state, TAKEN, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    const struct view *views = all->views + unit->first_view;
    struct result *results = all->results + unit->first_view;
    int done = unit->is_in_parts ? compare_in_parts(unit, views, results, scratch, target)
                                 : compare_views(unit, views, all->numbers, results, scratch, target);
    __atomic_store_n(&unit->state, done ? COMPARED : FAILED, __ATOMIC_RELEASE);
}

/* Works on units until the wanted one is done, or until none is left where it is -1; several threads may be at it, each with a scratch of
 * its own. Returns whether the wanted one is compared. */
EXPORT int ulpscope_compare_kept(struct units *all, int64_t wanted, void *scratch, int target) {
    const struct timespec moment = {0, 20000};
    control before = exact_subnormals();
    if (wanted >= 0)
        compare_unit(all, (uint64_t)wanted, scratch, target);
    for (;;) {
        if (wanted >= 0 && __atomic_load_n(&all->units[wanted].state, __ATOMIC_ACQUIRE) >= COMPARED)
            break;
        const uint64_t next = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED);
        if (next < all->count)
            compare_unit(all, next, scratch, target);
        else if (wanted < 0)
            break;
        else
            nanosleep(&moment, NULL);
    }
    restore(before);
    return wanted < 0 || all->units[wanted].state == COMPARED;
}
#endif

#else /* ULPSCOPE_PASS: the passes for one vector width */

#define V_F64 NAME(f64)
#define V_U64 NAME(u64)
#define V_I64 NAME(i64)
#define V_F32 NAME(f32)
#define V_U32 NAME(u32)
#define V_I32 NAME(i32)
#define V_U16 NAME(u16)
#define V_I16 NAME(i16)
#define V_U32S NAME(u32s)
#define V_I32S NAME(i32s)
#define V_F32S NAME(f32s)
/* Vectors that hold as many elements as a full vector of doubles. */
typedef double V_F64 __attribute__((vector_size(WIDTH)));
typedef uint64_t V_U64 __attribute__((vector_size(WIDTH)));
typedef int64_t V_I64 __attribute__((vector_size(WIDTH)));
typedef float V_F32 __attribute__((vector_size(WIDTH / 2)));
typedef uint32_t V_U32 __attribute__((vector_size(WIDTH / 2)));
typedef int32_t V_I32 __attribute__((vector_size(WIDTH / 2)));
typedef uint16_t V_U16 __attribute__((vector_size(WIDTH / 4)));
typedef int16_t V_I16 __attribute__((vector_size(WIDTH / 4)));

/* Full vectors of 32 bits. */
typedef uint32_t V_U32S __attribute__((vector_size(WIDTH), may_alias));
typedef int32_t V_I32S __attribute__((vector_size(WIDTH)));
typedef float V_F32S __attribute__((vector_size(WIDTH)));

#define PER (WIDTH / 8)    /* doubles in a vector */
#define LANES 16           /* lanes of a sum: the same for every width */
#define REGISTERS (LANES / PER)
#define WIDEN(vector) __builtin_convertvector(vector, V_F64)
/* Some compilers convert a vector half by half. */
#if WIDTH == 64
#define WIDEN_FLOATS(vector) ((V_F64)_mm512_cvtps_pd((__m256)(vector)))
#define WIDEN_HALVES(vector) ((V_U32)_mm256_cvtepu16_epi32((__m128i)(vector)))
#else
#define WIDEN_FLOATS(vector) WIDEN(vector)
#define WIDEN_HALVES(vector) __builtin_convertvector(vector, V_U32)
#endif
#define LOADER(name, vector_type)                                                                                                          \
    INLINE vector_type NAME(load_##name)(const void *p) {                                                                                  \
        vector_type v;                                                                                                                     \
        memcpy(&v, p, sizeof v);                                                                                                           \
        return v;                                                                                                                          \
    }
LOADER(f64, V_F64)
LOADER(u64, V_U64)
LOADER(i64, V_I64)
LOADER(u32, V_U32)
LOADER(i32, V_I32)
LOADER(u16, V_U16)
LOADER(i16, V_I16)
#undef LOADER

/* Decode one vector of elements to doubles. With `finite`, NaN and infinities become zero. */
INLINE V_F64 NAME(decode_float64)(const void *p, int finite) {
    V_U64 u = NAME(load_u64)(p);
    if (finite)
        u &= (V_U64)((u & 0x7FFFFFFFFFFFFFFFu) < (uint64_t)0x7FF0000000000000u);
    return (V_F64)u;
}
INLINE V_F64 NAME(decode_float32)(const void *p, int finite) {
    V_U32 u = NAME(load_u32)(p);
    if (finite)
        u &= (V_U32)((u & 0x7FFFFFFFu) < (uint32_t)0x7F800000u);
    return WIDEN_FLOATS((V_F32)u);
}
INLINE V_F64 NAME(decode_bfloat16)(const void *p, int finite) {
    V_U32 u = WIDEN_HALVES(NAME(load_u16)(p)) << 16;
    if (finite)
        u &= (V_U32)((u & 0x7FFFFFFFu) < (uint32_t)0x7F800000u);
    return WIDEN_FLOATS((V_F32)u);
}
#if WIDTH == 16
INLINE V_F64 NAME(decode_float16)(const void *p, int finite) {
    V_U32 u = WIDEN_HALVES(NAME(load_u16)(p));
    V_U32 sign = (u & 0x8000u) << 16, magnitude = (u & 0x7FFFu) << 13;
    V_U32 special = (V_U32)(magnitude >= (uint32_t)0x0F800000u);
    magnitude = finite ? magnitude & ~special : magnitude | (special & 0x7F800000u);
    V_F32 scaled = (V_F32)magnitude * 0x1p112f;
    return WIDEN_FLOATS((V_F32)((V_U32)scaled | sign));
}
#else
INLINE V_F64 NAME(decode_float16)(const void *p, int finite) {
    V_U16 u = NAME(load_u16)(p);
    if (finite)
        u &= (V_U16)((u & 0x7FFF) < (uint16_t)0x7C00);
#if WIDTH == 64
    return WIDEN_FLOATS((V_F32)_mm256_cvtph_ps((__m128i)u));
#else
    return WIDEN_FLOATS((V_F32)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)&u)));
#endif
}
#endif
INLINE V_F64 NAME(decode_int64)(const void *p, int finite) { (void)finite; return WIDEN(NAME(load_i64)(p)); }
INLINE V_F64 NAME(decode_uint64)(const void *p, int finite) { (void)finite; return WIDEN(NAME(load_u64)(p)); }
INLINE V_F64 NAME(decode_int32)(const void *p, int finite) { (void)finite; return WIDEN(NAME(load_i32)(p)); }
INLINE V_F64 NAME(decode_uint32)(const void *p, int finite) { (void)finite; return WIDEN(NAME(load_u32)(p)); }
INLINE V_F64 NAME(decode_int16)(const void *p, int finite) {
    (void)finite;
    return WIDEN(__builtin_convertvector(NAME(load_i16)(p), V_I32));
}
INLINE V_F64 NAME(decode_uint16)(const void *p, int finite) {
    (void)finite;
    return WIDEN(__builtin_convertvector(NAME(load_u16)(p), V_I32));
}

INLINE V_F64 NAME(magnitude)(V_F64 x) { return (V_F64)((V_U64)x & 0x7FFFFFFFFFFFFFFFu); }
/* The larger value, a bit for each lane that is above, and sum + x * y for exact products, where fusing changes no bit. */
#if WIDTH == 64
INLINE V_F64 NAME(maximum)(V_F64 x, V_F64 y) { return (V_F64)_mm512_max_pd((__m512d)x, (__m512d)y); }
INLINE unsigned NAME(above)(V_F64 x, V_F64 y) { return _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, _CMP_GT_OQ); }
INLINE unsigned NAME(at_least)(V_F64 x, V_F64 y) { return _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, _CMP_GE_OQ); }
INLINE V_F64 NAME(add_exact)(V_F64 sum, V_F64 x, V_F64 y) { return (V_F64)_mm512_fmadd_pd((__m512d)x, (__m512d)y, (__m512d)sum); }
#elif WIDTH == 32
INLINE V_F64 NAME(maximum)(V_F64 x, V_F64 y) { return (V_F64)_mm256_max_pd((__m256d)x, (__m256d)y); }
INLINE unsigned NAME(above)(V_F64 x, V_F64 y) { return (unsigned)_mm256_movemask_pd((__m256d)(x > y)); }
INLINE unsigned NAME(at_least)(V_F64 x, V_F64 y) { return (unsigned)_mm256_movemask_pd((__m256d)(x >= y)); }
INLINE V_F64 NAME(add_exact)(V_F64 sum, V_F64 x, V_F64 y) { return (V_F64)_mm256_fmadd_pd((__m256d)x, (__m256d)y, (__m256d)sum); }
#else
INLINE V_F64 NAME(maximum)(V_F64 x, V_F64 y) {
    V_I64 larger = x > y;
    return (V_F64)(((V_I64)x & larger) | ((V_I64)y & ~larger));
}
#if defined(ULPSCOPE_X86)
INLINE unsigned NAME(above)(V_F64 x, V_F64 y) { return (unsigned)_mm_movemask_pd((__m128d)(x > y)); }
INLINE unsigned NAME(at_least)(V_F64 x, V_F64 y) { return (unsigned)_mm_movemask_pd((__m128d)(x >= y)); }
#else
INLINE unsigned NAME(two_bits)(V_I64 mask) { return (unsigned)((mask[0] & 1) | (mask[1] & 2)); }
INLINE unsigned NAME(above)(V_F64 x, V_F64 y) { return NAME(two_bits)(x > y); }
INLINE unsigned NAME(at_least)(V_F64 x, V_F64 y) { return NAME(two_bits)(x >= y); }
#endif
INLINE V_F64 NAME(add_exact)(V_F64 sum, V_F64 x, V_F64 y) { return sum + x * y; }
#endif
/* Lanes are added pairwise, lane i to lane i + half. */
INLINE double NAME(total)(const V_F64 parts[REGISTERS]) {
    double lanes[LANES];
    memcpy(lanes, parts, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Fingerprint of `words` whole words. A lane does what the definition's loop does, with the ratio of a whole round of lanes. */
BLOCKWISE void NAME(fingerprint_words)(const uint8_t *p, size_t words, uint64_t *s0, uint64_t *s1) {
#if WIDTH >= 32
    enum { STRIDE = 4 * PER };
    V_U64 sum[4] = {{0}}, weighted[4] = {{0}};
    const uint64_t ratio = power(STRIDE);
    size_t rounds = words / STRIDE;
    for (size_t t = 0; t < rounds; t++)
        for (size_t r = 0; r < 4; r++) {
            V_U64 w = NAME(load_u64)(p + 8 * (t * STRIDE + r * PER));
            w *= 0x9E3779B97F4A7C15u;
            w ^= w >> 32;
            w *= 0xD6E8FEB86659FD93u;
            w ^= w >> 32;
            sum[r] += w;
            weighted[r] = weighted[r] * ratio + w;
        }
#else
    enum { STRIDE = 4 };
    uint64_t sum[4] = {0}, weighted[4] = {0};
    const uint64_t ratio = power(STRIDE);
    size_t rounds = words / STRIDE;
    for (size_t t = 0; t < rounds; t++)
        for (size_t r = 0; r < 4; r++) {
            uint64_t w;
            memcpy(&w, p + 8 * (t * STRIDE + r), 8);
            w = mix(w);
            sum[r] += w;
            weighted[r] = weighted[r] * ratio + w;
        }
#endif
    uint64_t lane_sum[STRIDE], lane_weighted[STRIDE], total = 0, all = 0;
    memcpy(lane_sum, sum, sizeof lane_sum);
    memcpy(lane_weighted, weighted, sizeof lane_weighted);
    for (size_t lane = 0; lane < STRIDE; lane++) {
        total += lane_sum[lane];
        all = all * RATIO + lane_weighted[lane];
    }
    for (size_t j = rounds * STRIDE; j < words; j++) {
        uint64_t w;
        memcpy(&w, p + 8 * j, 8);
        w = mix(w);
        total += w;
        all = all * RATIO + w;
    }
    *s0 = total;
    *s1 = all;
}

/* Appends the fingerprint of a block; only the last block may have a rest of bytes. */
BLOCKWISE void NAME(fingerprint_block)(const uint8_t *p, size_t size_bytes, uint64_t *s0, uint64_t *s1) {
    size_t words = size_bytes / 8, rest = size_bytes % 8;
    uint64_t total, all;
    NAME(fingerprint_words)(p, words, &total, &all);
    if (rest) {
        uint64_t w = 0;
        memcpy(&w, p + 8 * words, rest);
        w = mix(w);
        total += w;
        all = all * RATIO + w;
    }
    *s0 += total;
    *s1 = *s1 * power(words + (rest != 0)) + all;
}

static void NAME(fingerprint)(const uint8_t *p, size_t size_bytes, uint64_t sums[2]) {
    sums[0] = sums[1] = 0;
    NAME(fingerprint_block)(p, size_bytes, &sums[0], &sums[1]);
}

/* Sum and sum of squares of a block. */
#define SUMS(type, storage, is_exact)                                                                                                                \
    INLINE void NAME(sums_##type)(const uint8_t *p, size_t n, int finite, double *sum, double *sum_squares) {                              \
        V_F64 s[REGISTERS] = {{0}}, q[REGISTERS] = {{0}};                                                                                  \
        size_t i = 0;                                                                                                                      \
        for (; i + LANES <= n; i += LANES)                                                                                                 \
            for (size_t r = 0; r < REGISTERS; r++) {                                                                                       \
                V_F64 x = NAME(decode_##type)(p + sizeof(storage) * (i + r * PER), finite);                                                \
                s[r] += x;                                                                                                                 \
                q[r] = is_exact ? NAME(add_exact)(q[r], x, x) : q[r] + x * x;                                                                                                           \
            }                                                                                                                              \
        if (i < n) {                                                                                                                       \
            storage rest[LANES] = {0};                                                                                                     \
            memcpy(rest, p + sizeof(storage) * i, sizeof(storage) * (n - i));                                                              \
            for (size_t r = 0; r < REGISTERS; r++) {                                                                                       \
                V_F64 x = NAME(decode_##type)(rest + r * PER, finite);                                                                     \
                s[r] += x;                                                                                                                 \
                q[r] = is_exact ? NAME(add_exact)(q[r], x, x) : q[r] + x * x;                                                                                                           \
            }                                                                                                                              \
        }                                                                                                                                  \
        *sum += NAME(total)(s);                                                                                                            \
        *sum_squares += NAME(total)(q);                                                                                                    \
    }

/* Range and counts of a block of a floating dtype, from its bits. Among values of one sign the bits order like the magnitudes, so the
 * largest signed and the largest and smallest unsigned bits hold minimum and maximum; no ordered key has to be made for each element. */
#define FLOAT_BLOCK(type, U, S, SIGN, EXPONENT, SMALLEST_NORMAL)                                                                           \
    SUMS(type, U, sizeof(U) < 8)                                                                                                                          \
    BLOCKWISE void NAME(summarize_##type)(const uint8_t *bytes, size_t n, struct summary *out) {                                           \
        typedef U UNALIGNED unaligned;                                                                                                     \
        const unaligned *p = (const unaligned *)bytes;                                                                                     \
        const U sign = (U)(SIGN), exponent = (U)(EXPONENT), magnitudes = (U)((U)(SIGN) - 1);                                               \
        S top = (S)sign;                                                                                                                   \
        U most = 0, least = (U)~(U)0, small = 0, zero = 0;                                                                                 \
        for (size_t i = 0; i < n; i++) {                                                                                                   \
            U u = p[i];                                                                                                                    \
            top = (S)u > top ? (S)u : top;                                                                                                 \
            most = u > most ? u : most;                                                                                                    \
            least = u < least ? u : least;                                                                                                 \
            small = (U)(small + ((U)(u & magnitudes) < (U)(SMALLEST_NORMAL)));                                                             \
        }                                                                                                                                  \
        if (small)                                                                                                                         \
            for (size_t i = 0; i < n; i++)                                                                                                 \
                zero = (U)(zero + ((U)(p[i] & magnitudes) == 0));                                                                          \
        out->zero += zero;                                                                                                                 \
        out->subnormal += (U)(small - zero);                                                                                               \
        if (top < (S)exponent && most < (U)(exponent | sign)) {                                                                            \
            NAME(sums_##type)(bytes, n, 0, &out->sum, &out->sum_squares);                                                                  \
        } else {                                                                                                                           \
            U nan = 0, posinf = 0, neginf = 0;                                                                                             \
            top = (S)sign, most = 0, least = (U)~(U)0;                                                                                     \
            for (size_t i = 0; i < n; i++) {                                                                                               \
                U u = p[i];                                                                                                                \
                int is_nan = (U)(u & magnitudes) > exponent;                                                                               \
                U high = is_nan ? sign : u, low = is_nan ? 0 : u, near = is_nan ? (U)~(U)0 : u;                                            \
                top = (S)high > top ? (S)high : top;                                                                                       \
                most = low > most ? low : most;                                                                                            \
                least = near < least ? near : least;                                                                                       \
                nan = (U)(nan + is_nan);                                                                                                   \
                posinf = (U)(posinf + (u == exponent));                                                                                    \
                neginf = (U)(neginf + (u == (U)(exponent | sign)));                                                                        \
            }                                                                                                                              \
            out->nan += nan;                                                                                                               \
            out->posinf += posinf;                                                                                                         \
            out->neginf += neginf;                                                                                                         \
            NAME(sums_##type)(bytes, n, 1, &out->sum, &out->sum_squares);                                                                  \
            if (nan == n)                                                                                                                  \
                return;                                                                                                                    \
        }                                                                                                                                  \
        double min = value_##type(most & sign ? most : least), max = value_##type(top < 0 ? least : (U)top);                               \
        out->min = min < out->min ? min : out->min;                                                                                        \
        out->max = max > out->max ? max : out->max;                                                                                        \
    }
FLOAT_BLOCK(float64, uint64_t, int64_t, 0x8000000000000000u, 0x7FF0000000000000u, 0x0010000000000000u)
FLOAT_BLOCK(float32, uint32_t, int32_t, 0x80000000u, 0x7F800000u, 0x00800000u)
FLOAT_BLOCK(float16, uint16_t, int16_t, 0x8000u, 0x7C00u, 0x0400u)
FLOAT_BLOCK(bfloat16, uint16_t, int16_t, 0x8000u, 0x7F80u, 0x0080u)
#undef FLOAT_BLOCK

#define INTEGER_BLOCK(type, T, U)                                                                                                          \
    SUMS(type, T, sizeof(T) < 4)                                                                                                                          \
    BLOCKWISE void NAME(summarize_##type)(const uint8_t *bytes, size_t n, struct summary *out) {                                           \
        typedef T UNALIGNED unaligned;                                                                                                     \
        const unaligned *p = (const unaligned *)bytes;                                                                                     \
        T low = p[0], high = p[0];                                                                                                         \
        U zero = 0;                                                                                                                        \
        for (size_t i = 0; i < n; i++) {                                                                                                   \
            low = p[i] < low ? p[i] : low;                                                                                                 \
            high = p[i] > high ? p[i] : high;                                                                                              \
            zero = (U)(zero + (p[i] == 0));                                                                                                \
        }                                                                                                                                  \
        out->zero += zero;                                                                                                                 \
        NAME(sums_##type)(bytes, n, 0, &out->sum, &out->sum_squares);                                                                      \
        out->min = (double)low < out->min ? (double)low : out->min;                                                                        \
        out->max = (double)high > out->max ? (double)high : out->max;                                                                      \
    }
INTEGER_BLOCK(int64, int64_t, uint64_t)
INTEGER_BLOCK(int32, int32_t, uint32_t)
INTEGER_BLOCK(int16, int16_t, uint16_t)
INTEGER_BLOCK(uint64, uint64_t, uint64_t)
INTEGER_BLOCK(uint32, uint32_t, uint32_t)
INTEGER_BLOCK(uint16, uint16_t, uint16_t)
#undef INTEGER_BLOCK
#undef SUMS

static void NAME(summarize)(int kind, const uint8_t *p, size_t size_bytes, const double *values, double tiny, struct summary *out) {
    memset(out, 0, sizeof *out);
    out->min = __builtin_inf();
    out->max = -__builtin_inf();
    uint64_t counts[256];
    if (kind == CODES)
        memset(counts, 0, sizeof counts);
    size_t step = kind == CODES ? CODE_BLOCK : BLOCK * SIZE[kind];
    for (size_t start = 0; start < size_bytes; start += step) {
        const uint8_t *block = p + start;
        size_t length = size_bytes - start < step ? size_bytes - start : step, n = length / SIZE[kind];
        NAME(fingerprint_block)(block, length, &out->s0, &out->s1);
        switch (kind) {
        case FLOAT64: NAME(summarize_float64)(block, n, out); break;
        case FLOAT32: NAME(summarize_float32)(block, n, out); break;
        case FLOAT16: NAME(summarize_float16)(block, n, out); break;
        case BFLOAT16: NAME(summarize_bfloat16)(block, n, out); break;
        case INT64: NAME(summarize_int64)(block, n, out); break;
        case INT32: NAME(summarize_int32)(block, n, out); break;
        case INT16: NAME(summarize_int16)(block, n, out); break;
        case UINT64: NAME(summarize_uint64)(block, n, out); break;
        case UINT32: NAME(summarize_uint32)(block, n, out); break;
        case UINT16: NAME(summarize_uint16)(block, n, out); break;
        default: count_codes(block, n, counts);
        }
    }
    if (kind == CODES)
        summarize_codes(counts, values, tiny, out);
}

/* Decode a block to doubles or, where floats hold every value, to floats, padded with zeros to whole vectors. */
#define DECODE_BLOCK(type, storage)                                                                                                        \
    BLOCKWISE void NAME(decode_block_##type)(const uint8_t *p, size_t n, double *out) {                                                    \
        size_t i = 0;                                                                                                                      \
        for (; i + PER <= n; i += PER) {                                                                                                   \
            V_F64 x = NAME(decode_##type)(p + sizeof(storage) * i, 0);                                                                     \
            memcpy(out + i, &x, sizeof x);                                                                                                 \
        }                                                                                                                                  \
        if (i < n) {                                                                                                                       \
            storage rest[PER] = {0};                                                                                                       \
            memcpy(rest, p + sizeof(storage) * i, sizeof(storage) * (n - i));                                                              \
            V_F64 x = NAME(decode_##type)(rest, 0);                                                                                        \
            memcpy(out + i, &x, sizeof x);                                                                                                 \
        }                                                                                                                                  \
    }
DECODE_BLOCK(int64, int64_t)
DECODE_BLOCK(int32, int32_t)
DECODE_BLOCK(uint64, uint64_t)
DECODE_BLOCK(uint32, uint32_t)
#undef DECODE_BLOCK

#define DECODE_NARROW(type, storage, value)                                                                                                \
    BLOCKWISE void NAME(decode_block_##type)(const uint8_t *bytes, size_t n, const double *values, float *out) {                           \
        typedef storage UNALIGNED unaligned;                                                                                               \
        const unaligned *p = (const unaligned *)bytes;                                                                                     \
        (void)values;                                                                                                                      \
        for (size_t i = 0; i < n; i++)                                                                                                     \
            out[i] = (float)value(p[i]);                                                                                                   \
    }
#define ITSELF(u) (u)
#define CODED(u) values[u]
DECODE_NARROW(float16, uint16_t, narrow_float16)
DECODE_NARROW(bfloat16, uint16_t, narrow_bfloat16)
DECODE_NARROW(int16, int16_t, ITSELF)
DECODE_NARROW(uint16, uint16_t, ITSELF)
DECODE_NARROW(codes, uint8_t, CODED)
#undef ITSELF
#undef CODED
#undef DECODE_NARROW

/* Return where a block's values are read from: `out`, or the block itself where nothing has to be decoded. */
BLOCKWISE const void *NAME(decode_block)(int kind, const uint8_t *p, size_t n, const double *values, double *out) {
    const size_t padded = (n + PAIR_LANES - 1) / PAIR_LANES * PAIR_LANES, size = IS_WIDE[kind] ? 8 : 4;
    switch (kind) {
    case FLOAT64:
    case FLOAT32:
        if (n == padded)
            return p;
        memcpy(out, p, size * n);
        break;
    case FLOAT16: NAME(decode_block_float16)(p, n, values, (float *)out); break;
    case BFLOAT16: NAME(decode_block_bfloat16)(p, n, values, (float *)out); break;
    case INT64: NAME(decode_block_int64)(p, n, out); break;
    case INT32: NAME(decode_block_int32)(p, n, out); break;
    case INT16: NAME(decode_block_int16)(p, n, values, (float *)out); break;
    case UINT64: NAME(decode_block_uint64)(p, n, out); break;
    case UINT32: NAME(decode_block_uint32)(p, n, out); break;
    case UINT16: NAME(decode_block_uint16)(p, n, values, (float *)out); break;
    default: NAME(decode_block_codes)(p, n, values, (float *)out);
    }
    memset((uint8_t *)out + size * n, 0, size * (padded - n));
    return out;
}

/* The bucket of a distance of at least 16 stands in the bits of its half as a float: exponent, then three bits. `& ~(d >> 6)` clears a bit
 * below these, so that rounding to 24 bits carries into none of them. */
INLINE V_U32S NAME(buckets)(V_U32S d) {
    V_U32S small = (V_U32S)(d < 16), half = (V_U32S)__builtin_convertvector((V_I32S)(d >> 1 & ~(d >> 6)), V_F32S);
    return (d & small) | (((half >> 20) - 1024) & ~small);
}
INLINE V_U32S NAME(larger)(V_U32S x, V_U32S y) {
#if WIDTH == 64
    return (V_U32S)_mm512_max_epu32((__m512i)x, (__m512i)y);
#elif WIDTH == 32
    return (V_U32S)_mm256_max_epu32((__m256i)x, (__m256i)y);
#else
    V_U32S above = (V_U32S)(x > y);
    return (x & above) | (y & ~above);
#endif
}
INLINE uint32_t NAME(largest)(V_U32S parts) {
    uint32_t most = 0, lanes[WIDTH / 4];
    memcpy(lanes, &parts, sizeof lanes);
    for (size_t i = 0; i < WIDTH / 4; i++)
        most = lanes[i] > most ? lanes[i] : most;
    return most;
}

/* Distances in units in the last place of a block become buckets. Values of one sign are as far apart as their bits, of two signs as their
 * magnitudes together. Positions that are not kept count as 0. */
BLOCKWISE void NAME(buckets_float32)(const uint8_t *subject, const uint8_t *reference, size_t n, const uint8_t *keep, uint32_t *index,
                                     struct difference *out) {
    const size_t per = WIDTH / 4;
    uint32_t ends[2][WIDTH / 4] = {{0}};
    V_U32S most = {0};
    for (size_t i = 0; i < n; i += per) {
        const uint8_t *p = subject + 4 * i, *q = reference + 4 * i;
        V_U32S u, v, kept;
        if (n - i < per) {
            memcpy(ends[0], p, 4 * (n - i));
            memcpy(ends[1], q, 4 * (n - i));
            p = (const uint8_t *)ends[0];
            q = (const uint8_t *)ends[1];
        }
        memcpy(&u, p, WIDTH);
        memcpy(&v, q, WIDTH);
        V_I32S apart = (V_I32S)(u - v), opposite = (V_I32S)(u ^ v) >> 31, negative = apart >> 31;
        V_U32S one = (V_U32S)(apart ^ negative) - (V_U32S)negative, two = (u + v) ^ 0x80000000u;
        V_U32S distance = (one & (V_U32S)~opposite) | (two & (V_U32S)opposite);
        if (keep) {
            for (size_t lane = 0; lane < per; lane++)
                kept[lane] = i + lane < n && keep[i + lane] ? 0xFFFFFFFFu : 0;
            distance &= kept;
        }
        most = NAME(larger)(distance, most);
        distance = NAME(buckets)(distance);
        memcpy(index + i, &distance, WIDTH);
    }
    uint32_t all = NAME(largest)(most);
    out->ulp_max = all > out->ulp_max ? all : out->ulp_max;
}

#define BUCKETS_NARROW(name, STORAGE, S, PLACE)                                                                                            \
    BLOCKWISE void NAME(buckets_##name)(const uint8_t *subject, const uint8_t *reference, size_t n, const uint8_t *keep,                   \
                                        const int64_t *order, uint32_t *index, struct difference *out) {                                   \
        typedef STORAGE UNALIGNED unaligned;                                                                                               \
        const unaligned *p = (const unaligned *)subject, *q = (const unaligned *)reference;                                                \
        V_U32S most = {0};                                                                                                                 \
        (void)order;                                                                                                                       \
        for (size_t i = 0; i < n; i++) {                                                                                                   \
            S left = (S)PLACE(p[i]), right = (S)PLACE(q[i]);                                                                               \
            index[i] = left < right ? (uint32_t)right - (uint32_t)left : (uint32_t)left - (uint32_t)right;                                 \
        }                                                                                                                                  \
        if (keep)                                                                                                                          \
            for (size_t i = 0; i < n; i++)                                                                                                 \
                index[i] = keep[i] ? index[i] : 0;                                                                                         \
        for (size_t i = n; i % 16; i++)                                                                                                    \
            index[i] = 0;                                                                                                                  \
        for (size_t i = 0; i < n; i += WIDTH / 4) {                                                                                        \
            V_U32S distance;                                                                                                               \
            memcpy(&distance, index + i, WIDTH);                                                                                           \
            most = NAME(larger)(distance, most);                                                                                           \
            distance = NAME(buckets)(distance);                                                                                            \
            memcpy(index + i, &distance, WIDTH);                                                                                           \
        }                                                                                                                                  \
        uint32_t all = NAME(largest)(most);                                                                                                \
        out->ulp_max = all > out->ulp_max ? all : out->ulp_max;                                                                            \
    }
#define BUCKETS_WIDE(name, U, S, PLACE)                                                                                                    \
    BLOCKWISE void NAME(buckets_##name)(const uint8_t *subject, const uint8_t *reference, size_t n, const uint8_t *keep, uint32_t *index,  \
                                        struct difference *out) {                                                                          \
        typedef U UNALIGNED unaligned;                                                                                                     \
        const unaligned *p = (const unaligned *)subject, *q = (const unaligned *)reference;                                                \
        uint64_t distance[PAIR_BLOCK] __attribute__((aligned(64))), most = 0;                                                              \
        for (size_t i = 0; i < n; i++) {                                                                                                   \
            S left = (S)PLACE(p[i]), right = (S)PLACE(q[i]);                                                                               \
            distance[i] = left < right ? (uint64_t)right - (uint64_t)left : (uint64_t)left - (uint64_t)right;                              \
        }                                                                                                                                  \
        if (keep)                                                                                                                          \
            for (size_t i = 0; i < n; i++)                                                                                                 \
                distance[i] = keep[i] ? distance[i] : 0;                                                                                   \
        for (size_t i = 0; i < n; i++)                                                                                                     \
            most = distance[i] > most ? distance[i] : most;                                                                                \
        for (size_t i = 0; i < n; i++)                                                                                                     \
            index[i] = bucket(distance[i]);                                                                                                \
        out->ulp_max = most > out->ulp_max ? most : out->ulp_max;                                                                          \
    }
/* The place of a floating value: its magnitude bits, negative for negative values. */
#define PLACE64(u) ((int64_t)(u) < 0 ? -((u) & 0x7FFFFFFFFFFFFFFFu) : (u))
#define PLACE16(u) ((int16_t)(u) < 0 ? -(int32_t)((u) & 0x7FFFu) : (int32_t)(u))
#define PLACE_CODE(u) order[u]
#define ITSELF(u) (u)
BUCKETS_WIDE(float64, uint64_t, int64_t, PLACE64)
BUCKETS_WIDE(int64, int64_t, int64_t, ITSELF)
BUCKETS_WIDE(uint64, uint64_t, uint64_t, ITSELF)
BUCKETS_NARROW(int32, int32_t, int32_t, ITSELF)
BUCKETS_NARROW(uint32, uint32_t, uint32_t, ITSELF)
BUCKETS_NARROW(float16, uint16_t, int32_t, PLACE16)
BUCKETS_NARROW(int16, int16_t, int32_t, ITSELF)
BUCKETS_NARROW(uint16, uint16_t, int32_t, ITSELF)
BUCKETS_NARROW(codes, uint8_t, int32_t, PLACE_CODE)
#undef BUCKETS_NARROW
#undef BUCKETS_WIDE
#undef PLACE64
#undef PLACE16
#undef PLACE_CODE
#undef ITSELF

BLOCKWISE void NAME(ulp_block)(int kind, const uint8_t *p, const uint8_t *q, size_t n, const uint8_t *keep, const int64_t *order,
                               struct difference *out, struct counting *counting) {
    uint32_t *index = counting->index;
    counting->pending = n;
    switch (kind) {
    case FLOAT64: NAME(buckets_float64)(p, q, n, keep, index, out); break;
    case FLOAT32: NAME(buckets_float32)(p, q, n, keep, index, out); break;
    case FLOAT16:
    case BFLOAT16: NAME(buckets_float16)(p, q, n, keep, order, index, out); break;
    case INT64: NAME(buckets_int64)(p, q, n, keep, index, out); break;
    case INT32: NAME(buckets_int32)(p, q, n, keep, order, index, out); break;
    case INT16: NAME(buckets_int16)(p, q, n, keep, order, index, out); break;
    case UINT64: NAME(buckets_uint64)(p, q, n, keep, index, out); break;
    case UINT32: NAME(buckets_uint32)(p, q, n, keep, order, index, out); break;
    case UINT16: NAME(buckets_uint16)(p, q, n, keep, order, index, out); break;
    default: NAME(buckets_codes)(p, q, n, keep, order, index, out);
    }
}

#define PAIR_REGISTERS (PAIR_LANES / PER)
INLINE double NAME(pair_total)(const V_F64 parts[PAIR_REGISTERS]) {
    double lanes[PAIR_LANES];
    memcpy(lanes, parts, sizeof lanes);
    for (int half = PAIR_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}
INLINE double NAME(pair_maximum)(const V_F64 parts[PAIR_REGISTERS]) {
    double lanes[PAIR_LANES], most = 0;
    memcpy(lanes, parts, sizeof lanes);
    for (int i = 0; i < PAIR_LANES; i++)
        most = lanes[i] > most ? lanes[i] : most;
    return most;
}
/* The passes over the values of a padded block exist twice: `wide` reads doubles, else floats. Narrow values are floats that have at most 24
 * bits, so products of two are exact in float64. */
INLINE V_F64 NAME(load_values)(const void *values, size_t at, int wide) {
    if (wide)
        return NAME(load_f64)((const uint8_t *)values + 8 * at);
    return WIDEN_FLOATS((V_F32)NAME(load_u32)((const uint8_t *)values + 4 * at));
}
INLINE double NAME(load_value)(const void *values, size_t at, int wide) {
    double value;
    float narrow;
    if (wide)
        memcpy(&value, (const uint8_t *)values + 8 * at, 8);
    else {
        memcpy(&narrow, (const uint8_t *)values + 4 * at, 4);
        value = narrow;
    }
    return value;
}

/* Adds up sums, and sets a bit in `far` where the sides are more than `limit` of the reference apart; for wide values also at the limit. */
INLINE void NAME(sum_values)(const void *a, const void *b, size_t padded, int wide, double limit, struct part *part,
                             uint8_t far[PAIR_BLOCK / 8], struct counting *counting) {
    const size_t pending = counting->pending;
    V_F64 sum_abs[PAIR_REGISTERS] = {{0}}, squares[PAIR_REGISTERS] = {{0}}, subject[PAIR_REGISTERS] = {{0}};
    V_F64 reference[PAIR_REGISTERS] = {{0}}, products[PAIR_REGISTERS] = {{0}}, most[PAIR_REGISTERS] = {{0}};
    for (size_t i = 0; i < padded; i += PAIR_LANES) {
        unsigned bits = 0;
        if (i < pending)
            for (size_t slice = 0; slice < SLICES; slice++)
                counting->slices[slice][counting->index[i + slice]]++;
        for (size_t r = 0; r < PAIR_REGISTERS; r++) {
            V_F64 x = NAME(load_values)(a, i + r * PER, wide), y = NAME(load_values)(b, i + r * PER, wide);
            V_F64 d = x - y, size = NAME(magnitude)(d);
            sum_abs[r] += size;
            squares[r] += d * d;
            subject[r] = wide ? subject[r] + x * x : NAME(add_exact)(subject[r], x, x);
            reference[r] = wide ? reference[r] + y * y : NAME(add_exact)(reference[r], y, y);
            products[r] = wide ? products[r] + x * y : NAME(add_exact)(products[r], x, y);
            most[r] = NAME(maximum)(size, most[r]);
            V_F64 allowed = NAME(magnitude)(y) * limit;
            bits |= (wide ? NAME(at_least)(size, allowed) : NAME(above)(size, allowed)) << (r * PER);
        }
        far[i / PAIR_LANES] = (uint8_t)bits;
    }
    part->sum_abs = NAME(pair_total)(sum_abs);
    part->sum_squares = NAME(pair_total)(squares);
    part->sum_squares_subject = NAME(pair_total)(subject);
    part->sum_squares_reference = NAME(pair_total)(reference);
    part->sum_products = NAME(pair_total)(products);
    part->max_abs = NAME(pair_maximum)(most);
    count_rest(counting, padded);
}

/* Keeps the largest ratio. Callers shrink the bound by more than two roundings, so no larger ratio is missed. */
INLINE void NAME(add_ratio)(double x, double y, struct part *part) {
    double size = from_bits64(bits64(x - y) & MAGNITUDE), scale = from_bits64(bits64(y) & MAGNITUDE), ratio = scale != 0 ? size / scale : 0;
    part->max_rel = ratio > part->max_rel ? ratio : part->max_rel;
}

INLINE size_t NAME(count_bits)(const uint8_t bits[PAIR_BLOCK / 8], size_t padded) {
    uint64_t words[PAIR_BLOCK / 64] = {0};
    size_t many = 0;
    memcpy(words, bits, padded / 8);
    for (size_t word = 0; word < PAIR_BLOCK / 64; word++)
        many += (size_t)__builtin_popcountll(words[word]);
    return many;
}

/* Handles a block with many far positions: leaves in `far` only those whose ratio may be larger than all before. */
INLINE void NAME(add_many_far)(const void *a, const void *b, size_t padded, int wide, uint8_t far[PAIR_BLOCK / 8], struct part *part) {
    const double limit = part->max_rel * SHRINK;
    uint8_t beyond[3][PAIR_BLOCK / 8], flips[PAIR_BLOCK / 8];
    for (size_t i = 0; i < padded; i += PAIR_LANES) {
        unsigned larger = 0, bits_1e4 = 0, bits_1e3 = 0, bits_5e3 = 0, turned = 0;
        for (size_t r = 0; r < PAIR_REGISTERS; r++) {
            V_F64 x = NAME(load_values)(a, i + r * PER, wide), y = NAME(load_values)(b, i + r * PER, wide), zero = {0};
            V_F64 size = NAME(magnitude)(x - y), scale = NAME(magnitude)(y), allowed = scale * limit;
            V_F64 sign = wide ? (V_F64)((V_I64)(((V_I64)x ^ (V_I64)y) < 0) & (x != 0.0) & (y != 0.0) & (V_I64)(zero - 1)) : x * y;
            bits_1e4 |= NAME(above)(size, scale * 1e-4) << (r * PER);
            bits_1e3 |= NAME(above)(size, scale * 1e-3) << (r * PER);
            bits_5e3 |= NAME(above)(size, scale * 5e-3) << (r * PER);
            turned |= NAME(above)(zero, sign) << (r * PER);
            larger |= (wide ? NAME(at_least)(size, allowed) : NAME(above)(size, allowed)) << (r * PER);
        }
        beyond[0][i / PAIR_LANES] = (uint8_t)bits_1e4;
        beyond[1][i / PAIR_LANES] = (uint8_t)bits_1e3;
        beyond[2][i / PAIR_LANES] = (uint8_t)bits_5e3;
        flips[i / PAIR_LANES] = (uint8_t)turned;
        far[i / PAIR_LANES] = (uint8_t)larger;
    }
    part->beyond_1e4 = NAME(count_bits)(beyond[0], padded);
    part->beyond_1e3 = NAME(count_bits)(beyond[1], padded);
    part->beyond_5e3 = NAME(count_bits)(beyond[2], padded);
    part->sign_flips = NAME(count_bits)(flips, padded);
}

INLINE void NAME(add_far_value)(double x, double y, struct part *part) {
    double size = from_bits64(bits64(x - y) & MAGNITUDE), scale = from_bits64(bits64(y) & MAGNITUDE);
    NAME(add_ratio)(x, y, part);
    part->beyond_1e4 += size > scale * 1e-4;
    part->beyond_1e3 += size > scale * 1e-3;
    part->beyond_5e3 += size > scale * 5e-3;
    part->sign_flips += (bits64(x) ^ bits64(y)) >> 63 & (x != 0) & (y != 0);
}

/* Looks at the far positions only, for larger ratios, thresholds and changes of sign. Mostly few are far. */
INLINE void NAME(add_far)(const void *a, const void *b, size_t padded, int wide, uint8_t far[PAIR_BLOCK / 8], struct part *part) {
    uint64_t words[PAIR_BLOCK / 64] = {0};
    const int is_many = NAME(count_bits)(far, padded) > padded / 16;
    if (is_many)
        NAME(add_many_far)(a, b, padded, wide, far, part);
    memcpy(words, far, padded / 8);
    for (size_t word = 0; word < PAIR_BLOCK / 64; word++)
        for (uint64_t bits = words[word]; bits; bits &= bits - 1) {
            size_t i = 64 * word + (size_t)__builtin_ctzll(bits);
            double x = NAME(load_value)(a, i, wide), y = NAME(load_value)(b, i, wide);
            if (is_many)
                NAME(add_ratio)(x, y, part);
            else
                NAME(add_far_value)(x, y, part);
        }
}

#define VALUES_PASS(suffix, wide)                                                                                                          \
    BLOCKWISE void NAME(sum_values_##suffix)(const void *a, const void *b, size_t padded, double limit, struct part *part,                 \
                                         uint8_t *far, struct counting *counting) {                                                        \
        NAME(sum_values)(a, b, padded, wide, limit, part, far, counting);                                                                  \
    }                                                                                                                                      \
    BLOCKWISE void NAME(add_far_##suffix)(const void *a, const void *b, size_t padded, uint8_t *far, struct part *part) {                  \
        NAME(add_far)(a, b, padded, wide, far, part);                                                                                      \
    }                                                                                                                                      \
    BLOCKWISE double NAME(squares_##suffix)(const void *a, size_t padded) {                                                                \
        V_F64 sum[PAIR_REGISTERS] = {{0}};                                                                                                 \
        for (size_t i = 0; i < padded; i += PAIR_LANES)                                                                                    \
            for (size_t r = 0; r < PAIR_REGISTERS; r++) {                                                                                  \
                V_F64 x = NAME(load_values)(a, i + r * PER, wide);                                                                         \
                sum[r] = wide ? sum[r] + x * x : NAME(add_exact)(sum[r], x, x);                                                            \
            }                                                                                                                              \
        return NAME(pair_total)(sum);                                                                                                      \
    }
VALUES_PASS(wide, 1)
VALUES_PASS(narrow, 0)
#undef VALUES_PASS

BLOCKWISE void NAME(add_part)(const struct part *part, size_t elements, struct difference *out) {
    out->sum_abs += part->sum_abs;
    out->sum_squares += part->sum_squares;
    out->sum_squares_subject += part->sum_squares_subject;
    out->sum_squares_reference += part->sum_squares_reference;
    out->sum_products += part->sum_products;
    out->max_rel = part->max_rel > out->max_rel ? part->max_rel : out->max_rel;
    out->within_1e4 += elements - part->beyond_1e4;
    out->within_1e3 += elements - part->beyond_1e3;
    out->within_5e3 += elements - part->beyond_5e3;
    out->sign_flips += part->sign_flips;
}

/* Adds a block whose bytes are the same on both sides. */
BLOCKWISE void NAME(add_equal_block)(int wide, const void *values, void *a, size_t n, size_t padded, struct difference *out) {
    double sum = wide ? NAME(squares_wide)(values, padded) : NAME(squares_narrow)(values, padded);
    size_t nonfinite = 0;
    if (sum - sum != 0) {
        if (values != a)
            memcpy(a, values, padded * (wide ? 8 : 4));
        nonfinite = wide ? scrub_equal_wide(a, n) : scrub_equal_narrow(a, n);
        sum = wide ? NAME(squares_wide)(a, padded) : NAME(squares_narrow)(a, padded);
    }
    out->nonfinite += nonfinite;
    out->sum_squares_subject += sum;
    out->sum_squares_reference += sum;
    out->sum_products += sum;
    out->within_1e4 += n - nonfinite;
    out->within_1e3 += n - nonfinite;
    out->within_5e3 += n - nonfinite;
    out->ulp_counts[0] += n;
}

INLINE void NAME(add_values)(int wide, const void *a, const void *b, size_t padded, double known, struct part *part,
                             struct counting *counting) {
    const double limit = known < FAR_RATIO && known * SHRINK < 1e-4 ? known * SHRINK : 1e-4;
    uint8_t far[PAIR_BLOCK / 8];
    memset(part, 0, sizeof *part);
    part->max_rel = known;
    if (wide)
        NAME(sum_values_wide)(a, b, padded, limit, part, far, counting);
    else
        NAME(sum_values_narrow)(a, b, padded, limit, part, far, counting);
    double check = part->sum_squares_subject + part->sum_squares_reference;
    if (check - check != 0)
        return;
    if (wide)
        NAME(add_far_wide)(a, b, padded, far, part);
    else
        NAME(add_far_narrow)(a, b, padded, far, part);
}

/* Adds a part of two tensors: `numel` elements from position `first`, a multiple of the block. Parts come in their order. */
static void NAME(difference)(int kind, const uint8_t *subject, const uint8_t *reference, size_t first, size_t numel, const double *values,
                             const int64_t *order, struct counting *counting, struct difference *out) {
    double a[PAIR_BLOCK] __attribute__((aligned(64))), b[PAIR_BLOCK] __attribute__((aligned(64)));
    uint8_t keep[PAIR_BLOCK];
    const size_t size = SIZE[kind];
    const int wide = IS_WIDE[kind];
    for (size_t start = 0; start < numel; start += PAIR_BLOCK) {
        const uint8_t *p = subject + size * start, *q = reference + size * start;
        size_t n = numel - start < PAIR_BLOCK ? numel - start : PAIR_BLOCK;
        size_t padded = (n + PAIR_LANES - 1) / PAIR_LANES * PAIR_LANES, nonfinite = 0;
        const void *x = NAME(decode_block)(kind, p, n, values, a);
        if (memcmp(p, q, size * n) == 0) {
            NAME(add_equal_block)(wide, x, a, n, padded, out);
            continue;
        }
        const void *y = NAME(decode_block)(kind, q, n, values, b);
        struct part part;
        NAME(add_values)(wide, x, y, padded, out->max_rel, &part, counting);
        double check = part.sum_squares_subject + part.sum_squares_reference;
        if (check - check != 0) {
            if (x != a) {
                memcpy(a, x, padded * (wide ? 8 : 4));
                memcpy(b, y, padded * (wide ? 8 : 4));
                x = a;
                y = b;
            }
            nonfinite =
                wide ? scrub_wide(a, b, n, first + start, keep, out) : scrub_narrow((float *)a, (float *)b, n, first + start, keep, out);
            NAME(add_values)(wide, x, y, padded, out->max_rel, &part, counting);
        }
        NAME(add_part)(&part, n - nonfinite, out);
        if (part.max_abs > out->max_abs) {
            size_t i = 0;
            while (i + 1 < n && from_bits64(bits64(NAME(load_value)(x, i, wide) - NAME(load_value)(y, i, wide)) & MAGNITUDE) != part.max_abs)
                i++;
            out->max_abs = part.max_abs;
            out->worst = (int64_t)(first + start + i);
        }
        NAME(ulp_block)(kind, p, q, n, nonfinite ? keep : NULL, order, out, counting);
        if ((first + start) / PAIR_BLOCK % (1 << 20) == 0)
            flush(counting, out);
    }
}

#if defined(ULPSCOPE_FILES)
/* Sums of XXH3, eight lanes of 64 bits. */
#if defined(ULPSCOPE_X86) && WIDTH == 64
#define LOW_PRODUCT(x, y) ((V_U64)_mm512_mul_epu32((__m512i)(x), (__m512i)(y)))
#elif defined(ULPSCOPE_X86) && WIDTH == 32
#define LOW_PRODUCT(x, y) ((V_U64)_mm256_mul_epu32((__m256i)(x), (__m256i)(y)))
#elif defined(ULPSCOPE_X86)
#define LOW_PRODUCT(x, y) ((V_U64)_mm_mul_epu32((__m128i)(x), (__m128i)(y)))
#else
#define LOW_PRODUCT(x, y) (((x) & 0xFFFFFFFFu) * ((y) & 0xFFFFFFFFu))
#endif
#if WIDTH == 64
#define NEIGHBOURS 1, 0, 3, 2, 5, 4, 7, 6
#elif WIDTH == 32
#define NEIGHBOURS 1, 0, 3, 2
#else
#define NEIGHBOURS 1, 0
#endif
#if defined(__clang__)
#define SWAPPED(x) __builtin_shufflevector(x, x, NEIGHBOURS)
#else
#define SWAPPED(x) __builtin_shuffle(x, (V_U64){NEIGHBOURS})
#endif
#define HASH_REGISTERS (8 / PER)
INLINE void NAME(add_stripes)(V_U64 sums[HASH_REGISTERS], const uint8_t *p, const uint8_t *key, size_t stripes) {
    for (size_t stripe = 0; stripe < stripes; stripe++, p += STRIPE, key += 8)
        for (size_t r = 0; r < HASH_REGISTERS; r++) {
            V_U64 data = NAME(load_u64)(p + r * WIDTH), mixed = data ^ NAME(load_u64)(key + r * WIDTH);
            sums[r] += SWAPPED(data) + LOW_PRODUCT(mixed, mixed >> 32);
        }
}
static void NAME(hash_stripes)(uint64_t sums[8], const uint8_t *p, const uint8_t *key, size_t stripes) {
    V_U64 lanes[HASH_REGISTERS];
    memcpy(lanes, sums, 64);
    NAME(add_stripes)(lanes, p, key, stripes);
    memcpy(sums, lanes, 64);
}
static void NAME(hash_blocks)(uint64_t sums[8], const uint8_t *p, size_t blocks) {
    V_U64 lanes[HASH_REGISTERS];
    memcpy(lanes, sums, 64);
    for (size_t block = 0; block < blocks; block++, p += HASH_BLOCK) {
        NAME(add_stripes)(lanes, p, secret, HASH_BLOCK / STRIPE);
        for (size_t r = 0; r < HASH_REGISTERS; r++) {
            const V_U64 prime = (V_U64){0} + PRIME32_1;
            V_U64 sum = lanes[r];
            sum ^= sum >> 47;
            sum ^= NAME(load_u64)(secret + SECRET - STRIPE + r * WIDTH);
            lanes[r] = LOW_PRODUCT(sum, prime) + (LOW_PRODUCT(sum >> 32, prime) << 32);
        }
    }
    memcpy(sums, lanes, 64);
}
#undef LOW_PRODUCT
#undef NEIGHBOURS
#undef SWAPPED
#undef HASH_REGISTERS
#endif

#undef PAIR_REGISTERS
#undef PER
#undef LANES
#undef REGISTERS
#undef WIDEN
#undef WIDEN_FLOATS
#undef WIDEN_HALVES
#undef V_F64
#undef V_U64
#undef V_I64
#undef V_F32
#undef V_U32
#undef V_I32
#undef V_U16
#undef V_I16
#undef V_U32S
#undef V_I32S
#undef V_F32S
#endif
