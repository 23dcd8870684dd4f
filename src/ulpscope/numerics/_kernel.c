/* SPDX-License-Identifier: Apache-2.0
 *
 * The compiled passes of ulpscope.numerics: statistics and fingerprint of one tensor, and the difference of two.
 *
 * Policy. A plain shared library called through ctypes: no Python API, no global state, no allocation. One pass over
 * memory in blocks that fit the first-level cache; within a block each quantity has a loop of its own that vectorises.
 * The passes are compiled once for each instruction set and chosen at run time. The number of lanes of a floating sum is
 * the same in each of them and nothing is contracted into fused multiply-adds, so every CPU gives the same bits.
 * Where this file does not compile (no GNU vector extensions, big-endian) the package works with NumPy instead.
 *
 * The file includes itself: the second part below is the pass for one vector width.
 */
#ifndef ULPSCOPE_PASS

#if !defined(__GNUC__) || !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs GNU vector extensions and a little-endian machine"
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

/* The numbers are those of KINDS in kernel.py. CODES: one byte for each element, its value looked up in a table. */
enum kind { FLOAT64, FLOAT32, FLOAT16, BFLOAT16, INT64, INT32, INT16, UINT64, UINT32, UINT16, CODES };

static const size_t SIZE[] = {8, 4, 2, 2, 8, 4, 2, 8, 4, 2, 1};

struct summary {
    uint64_t s0, s1;
    double min, max, sum, sum_squares;
    uint64_t nan, posinf, neginf, zero, subnormal;
};

enum { BLOCK = 4096, CODE_BLOCK = 32768, PAIR_BLOCK = 512, PAIR_LANES = 8, BUCKETS = 496, SLICES = 4 };

struct difference {
    double max_abs, max_rel, sum_abs, sum_squares, sum_squares_subject, sum_squares_reference, sum_products;
    uint64_t within_1e4, within_1e3, within_5e3, different, sign_flips, nan_disagree, inf_disagree, nonfinite;
    int64_t worst, first_disagree; /* -1: none */
    uint64_t ulp_max;
    uint64_t ulp_counts[BUCKETS];
};

/* What one block of a pair contributes. */
struct part {
    double max_abs, max_rel, sum_abs, sum_squares, sum_squares_subject, sum_squares_reference, sum_products;
    uint64_t within_1e4, within_1e3, within_5e3, sign_flips;
};

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
INLINE double value_bfloat16(uint16_t bits) { return from_bits32((uint32_t)bits << 16); }
INLINE double value_float16(uint16_t bits) {
    uint32_t magnitude = (uint32_t)(bits & 0x7FFF) << 13, sign = (uint32_t)(bits & 0x8000) << 16;
    double value = from_bits32(magnitude | (magnitude >= 0x0F800000 ? 0x7F800000 : 0)) * 0x1p112;
    return sign ? -value : value;
}

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
#if defined(__x86_64__)
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

/* Takes what is not finite out of a block of doubles: zero on both sides, counted, and not kept for the distances. */
static size_t scrub(double *a, double *b, size_t n, size_t start, uint8_t *keep, struct difference *out) {
    size_t nonfinite = 0;
    for (size_t i = 0; i < n; i++) {
        keep[i] = a[i] - a[i] == 0 && b[i] - b[i] == 0;
        if (keep[i])
            continue;
        int nan = (a[i] != a[i]) != (b[i] != b[i]);
        int inf = !nan && a[i] == a[i] && a[i] != b[i];
        out->nan_disagree += (unsigned)nan;
        out->inf_disagree += (unsigned)inf;
        if ((nan || inf) && out->first_disagree < 0)
            out->first_disagree = (int64_t)(start + i);
        a[i] = b[i] = 0;
        nonfinite++;
    }
    out->nonfinite += nonfinite;
    return nonfinite;
}

static size_t scrub_equal(double *a, size_t n) {
    size_t nonfinite = 0;
    for (size_t i = 0; i < n; i++)
        if (a[i] - a[i] != 0) {
            a[i] = 0;
            nonfinite++;
        }
    return nonfinite;
}

static void flush(uint32_t slices[SLICES][BUCKETS], struct difference *out) {
    for (size_t slice = 0; slice < SLICES; slice++)
        for (size_t i = 0; i < BUCKETS; i++) {
            out->ulp_counts[i] += slices[slice][i];
            slices[slice][i] = 0;
        }
}

#define ULPSCOPE_PASS
#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(base) PASTE(base, TARGET)

#if defined(__x86_64__)
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
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
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

#if defined(__x86_64__)
static int level(void) {
    static int found = -1;
    if (found < 0) {
        __builtin_cpu_init();
        int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl");
        found = !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c") ? 0 : wide ? 2 : 1;
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
#define DISPATCH(function, ...) function##_plain(__VA_ARGS__)
#endif

/* That of VERSION in kernel.py: goes up with every change of a result or a signature, so that a library left over from an older source is not used. */
EXPORT int ulpscope_version(void) { return 1; }

/* The best instruction set that this CPU has: 0 plain, 1 AVX2, 2 AVX-512. A `target` below means one of these, or -1 for the best. */
EXPORT int ulpscope_level(void) { return level(); }

EXPORT void ulpscope_fingerprint(const void *data, size_t size_bytes, uint64_t sums[2], int target) {
    (void)target;
    DISPATCH(fingerprint, data, size_bytes, sums)
}

/* 0, or -1 where the size is no whole number of elements. `values` is the table of CODES, else unused. */
EXPORT int ulpscope_summarize(int kind, const void *data, size_t size_bytes, const double *values, double tiny, struct summary *out,
                              int target) {
    (void)target;
    if (kind < 0 || kind > CODES || size_bytes % SIZE[kind])
        return -1;
    control before = exact_subnormals();
    DISPATCH(summarize, kind, data, size_bytes, values, tiny, out)
    restore(before);
    return 0;
}

/* `values` and `order` are the tables of CODES (value, and position among the ordered values), else unused. */
EXPORT int ulpscope_difference(int kind, const void *subject, const void *reference, size_t numel, const double *values,
                               const int64_t *order, struct difference *out, int target) {
    (void)target;
    if (kind < 0 || kind > CODES)
        return -1;
    control before = exact_subnormals();
    DISPATCH(difference, kind, subject, reference, numel, values, order, out)
    restore(before);
    return 0;
}

#else /* ULPSCOPE_PASS: the passes for one vector width */

#define V_F64 NAME(f64)
#define V_U64 NAME(u64)
#define V_I64 NAME(i64)
#define V_F32 NAME(f32)
#define V_U32 NAME(u32)
#define V_I32 NAME(i32)
#define V_U16 NAME(u16)
#define V_I16 NAME(i16)
/* Vectors that hold as many elements as a full vector of doubles. */
typedef double V_F64 __attribute__((vector_size(WIDTH)));
typedef uint64_t V_U64 __attribute__((vector_size(WIDTH)));
typedef int64_t V_I64 __attribute__((vector_size(WIDTH)));
typedef float V_F32 __attribute__((vector_size(WIDTH / 2)));
typedef uint32_t V_U32 __attribute__((vector_size(WIDTH / 2)));
typedef int32_t V_I32 __attribute__((vector_size(WIDTH / 2)));
typedef uint16_t V_U16 __attribute__((vector_size(WIDTH / 4)));
typedef int16_t V_I16 __attribute__((vector_size(WIDTH / 4)));

#define PER (WIDTH / 8)    /* doubles in a vector */
#define LANES 16           /* of a sum: the same for every width */
#define REGISTERS (LANES / PER)
#define WIDEN(vector) __builtin_convertvector(vector, V_F64)
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

/* Decoding one vector of elements to doubles. `finite` zeroes what is NaN or infinite. */
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
    return WIDEN((V_F32)u);
}
INLINE V_F64 NAME(decode_bfloat16)(const void *p, int finite) {
    V_U32 u = __builtin_convertvector(NAME(load_u16)(p), V_U32) << 16;
    if (finite)
        u &= (V_U32)((u & 0x7FFFFFFFu) < (uint32_t)0x7F800000u);
    return WIDEN((V_F32)u);
}
#if WIDTH == 16
/* The exponent of float16 in the place of that of float32 is a number 2**112 too small; exact for subnormal numbers as well. */
INLINE V_F64 NAME(decode_float16)(const void *p, int finite) {
    V_U32 u = __builtin_convertvector(NAME(load_u16)(p), V_U32);
    V_U32 sign = (u & 0x8000u) << 16, magnitude = (u & 0x7FFFu) << 13;
    V_U32 special = (V_U32)(magnitude >= (uint32_t)0x0F800000u);
    magnitude = finite ? magnitude & ~special : magnitude | (special & 0x7F800000u);
    V_F32 scaled = (V_F32)magnitude * 0x1p112f;
    return WIDEN((V_F32)((V_U32)scaled | sign));
}
#else
INLINE V_F64 NAME(decode_float16)(const void *p, int finite) {
    V_U16 u = NAME(load_u16)(p);
    if (finite)
        u &= (V_U16)((u & 0x7FFF) < (uint16_t)0x7C00);
#if WIDTH == 64
    return WIDEN((V_F32)_mm256_cvtph_ps((__m128i)u));
#else
    return WIDEN((V_F32)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)&u)));
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
#define SUMS(type, storage)                                                                                                                \
    INLINE void NAME(sums_##type)(const uint8_t *p, size_t n, int finite, double *sum, double *sum_squares) {                              \
        V_F64 s[REGISTERS] = {{0}}, q[REGISTERS] = {{0}};                                                                                  \
        size_t i = 0;                                                                                                                      \
        for (; i + LANES <= n; i += LANES)                                                                                                 \
            for (size_t r = 0; r < REGISTERS; r++) {                                                                                       \
                V_F64 x = NAME(decode_##type)(p + sizeof(storage) * (i + r * PER), finite);                                                \
                s[r] += x;                                                                                                                 \
                q[r] += x * x;                                                                                                             \
            }                                                                                                                              \
        if (i < n) {                                                                                                                       \
            storage rest[LANES] = {0};                                                                                                     \
            memcpy(rest, p + sizeof(storage) * i, sizeof(storage) * (n - i));                                                              \
            for (size_t r = 0; r < REGISTERS; r++) {                                                                                       \
                V_F64 x = NAME(decode_##type)(rest + r * PER, finite);                                                                     \
                s[r] += x;                                                                                                                 \
                q[r] += x * x;                                                                                                             \
            }                                                                                                                              \
        }                                                                                                                                  \
        *sum += NAME(total)(s);                                                                                                            \
        *sum_squares += NAME(total)(q);                                                                                                    \
    }

/* Range and counts of a block of a floating dtype, from its bits. Among values of one sign the bits order like the magnitudes, so the
 * largest signed and the largest and smallest unsigned bits hold minimum and maximum; no ordered key has to be made for each element. */
#define FLOAT_BLOCK(type, U, S, SIGN, EXPONENT, SMALLEST_NORMAL)                                                                           \
    SUMS(type, U)                                                                                                                          \
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
    SUMS(type, T)                                                                                                                          \
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

/* Decoding a block to doubles, padded with zeros to whole vectors. */
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
DECODE_BLOCK(float64, uint64_t)
DECODE_BLOCK(float32, uint32_t)
DECODE_BLOCK(float16, uint16_t)
DECODE_BLOCK(bfloat16, uint16_t)
DECODE_BLOCK(int64, int64_t)
DECODE_BLOCK(int32, int32_t)
DECODE_BLOCK(int16, int16_t)
DECODE_BLOCK(uint64, uint64_t)
DECODE_BLOCK(uint32, uint32_t)
DECODE_BLOCK(uint16, uint16_t)
#undef DECODE_BLOCK

BLOCKWISE void NAME(decode_block)(int kind, const uint8_t *p, size_t n, const double *values, double *out) {
    switch (kind) {
    case FLOAT64: NAME(decode_block_float64)(p, n, out); break;
    case FLOAT32: NAME(decode_block_float32)(p, n, out); break;
    case FLOAT16: NAME(decode_block_float16)(p, n, out); break;
    case BFLOAT16: NAME(decode_block_bfloat16)(p, n, out); break;
    case INT64: NAME(decode_block_int64)(p, n, out); break;
    case INT32: NAME(decode_block_int32)(p, n, out); break;
    case INT16: NAME(decode_block_int16)(p, n, out); break;
    case UINT64: NAME(decode_block_uint64)(p, n, out); break;
    case UINT32: NAME(decode_block_uint32)(p, n, out); break;
    case UINT16: NAME(decode_block_uint16)(p, n, out); break;
    default:
        for (size_t i = 0; i < n; i++)
            out[i] = values[p[i]];
    }
    for (size_t i = n; i % PAIR_LANES; i++)
        out[i] = 0;
}

/* Distances in units in the last place of a block, from the places of its values; positions that are not kept count as 0. */
#define ULP_BLOCK(name, STORAGE, U, PLACE)                                                                                                 \
    BLOCKWISE void NAME(ulp_##name)(const uint8_t *subject, const uint8_t *reference, size_t n, const uint8_t *keep, const int64_t *order, \
                                 struct difference *out, uint32_t slices[SLICES][BUCKETS]) {                                               \
        typedef STORAGE UNALIGNED unaligned;                                                                                               \
        const unaligned *p = (const unaligned *)subject, *q = (const unaligned *)reference;                                                \
        U distance[PAIR_BLOCK], most = 0, different = 0;                                                                                   \
        (void)order;                                                                                                                       \
        for (size_t i = 0; i < n; i++) {                                                                                                   \
            U left = (U)PLACE(p[i]), right = (U)PLACE(q[i]);                                                                               \
            distance[i] = BELOW(left, right) ? (U)(right - left) : (U)(left - right);                                                      \
        }                                                                                                                                  \
        if (keep)                                                                                                                          \
            for (size_t i = 0; i < n; i++)                                                                                                 \
                distance[i] = keep[i] ? distance[i] : 0;                                                                                   \
        for (size_t i = 0; i < n; i++) {                                                                                                   \
            most = distance[i] > most ? distance[i] : most;                                                                                \
            different = (U)(different + (distance[i] != 0));                                                                               \
        }                                                                                                                                  \
        out->different += different;                                                                                                       \
        out->ulp_max = most > out->ulp_max ? most : out->ulp_max;                                                                          \
        size_t rest = n % SLICES;                                                                                                          \
        for (size_t i = n - rest; i < n; i++)                                                                                              \
            slices[0][bucket(distance[i])]++;                                                                                              \
        if (most < 16)                                                                                                                     \
            for (size_t i = 0; i < n - rest; i += SLICES)                                                                                  \
                for (size_t slice = 0; slice < SLICES; slice++)                                                                            \
                    slices[slice][distance[i + slice]]++;                                                                                  \
        else                                                                                                                               \
            for (size_t i = 0; i < n - rest; i += SLICES)                                                                                  \
                for (size_t slice = 0; slice < SLICES; slice++)                                                                            \
                    slices[slice][bucket(distance[i + slice])]++;                                                                          \
    }
/* The place of a floating value: its magnitude bits, negative for negative values, modulo 2**width. */
#define PLACE64(u) ((int64_t)(u) < 0 ? -((u) & 0x7FFFFFFFFFFFFFFFu) : (u))
#define PLACE32(u) ((int32_t)(u) < 0 ? -((u) & 0x7FFFFFFFu) : (u))
#define PLACE16(u) ((int16_t)(u) < 0 ? -((u) & 0x7FFFu) : (u))
#define PLACE_CODE(u) order[u]
#define ITSELF(u) (u)
#define BELOW(left, right) ((int64_t)(left) < (int64_t)(right))
ULP_BLOCK(float64, uint64_t, uint64_t, PLACE64)
ULP_BLOCK(int64, uint64_t, uint64_t, ITSELF)
ULP_BLOCK(codes, uint8_t, uint64_t, PLACE_CODE)
#undef BELOW
#define BELOW(left, right) ((int32_t)(left) < (int32_t)(right))
ULP_BLOCK(float32, uint32_t, uint32_t, PLACE32)
ULP_BLOCK(int32, uint32_t, uint32_t, ITSELF)
#undef BELOW
#define BELOW(left, right) ((int16_t)(left) < (int16_t)(right))
ULP_BLOCK(float16, uint16_t, uint16_t, PLACE16)
ULP_BLOCK(int16, uint16_t, uint16_t, ITSELF)
#undef BELOW
#define BELOW(left, right) ((left) < (right))
ULP_BLOCK(uint64, uint64_t, uint64_t, ITSELF)
ULP_BLOCK(uint32, uint32_t, uint32_t, ITSELF)
ULP_BLOCK(uint16, uint16_t, uint16_t, ITSELF)
#undef BELOW
#undef ULP_BLOCK
#undef PLACE64
#undef PLACE32
#undef PLACE16
#undef PLACE_CODE
#undef ITSELF

BLOCKWISE void NAME(ulp_block)(int kind, const uint8_t *p, const uint8_t *q, size_t n, const uint8_t *keep, const int64_t *order,
                            struct difference *out, uint32_t slices[SLICES][BUCKETS]) {
    switch (kind) {
    case FLOAT64: NAME(ulp_float64)(p, q, n, keep, order, out, slices); break;
    case FLOAT32: NAME(ulp_float32)(p, q, n, keep, order, out, slices); break;
    case FLOAT16:
    case BFLOAT16: NAME(ulp_float16)(p, q, n, keep, order, out, slices); break;
    case INT64: NAME(ulp_int64)(p, q, n, keep, order, out, slices); break;
    case INT32: NAME(ulp_int32)(p, q, n, keep, order, out, slices); break;
    case INT16: NAME(ulp_int16)(p, q, n, keep, order, out, slices); break;
    case UINT64: NAME(ulp_uint64)(p, q, n, keep, order, out, slices); break;
    case UINT32: NAME(ulp_uint32)(p, q, n, keep, order, out, slices); break;
    case UINT16: NAME(ulp_uint16)(p, q, n, keep, order, out, slices); break;
    default: NAME(ulp_codes)(p, q, n, keep, order, out, slices);
    }
}

#define PAIR_REGISTERS (PAIR_LANES / PER)
INLINE V_F64 NAME(magnitude)(V_F64 x) { return (V_F64)((V_U64)x & 0x7FFFFFFFFFFFFFFFu); }
INLINE V_F64 NAME(maximum)(V_F64 x, V_F64 y) {
    V_I64 larger = x > y;
    return (V_F64)(((V_I64)x & larger) | ((V_I64)y & ~larger));
}
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
INLINE uint64_t NAME(pair_count)(const V_I64 masks[PAIR_REGISTERS]) {
    int64_t lanes[PAIR_LANES], count = 0;
    memcpy(lanes, masks, sizeof lanes);
    for (int i = 0; i < PAIR_LANES; i++)
        count -= lanes[i];
    return (uint64_t)count;
}

/* Sum of squares of a padded block. */
BLOCKWISE double NAME(squares)(const double *a, size_t padded) {
    V_F64 sum[PAIR_REGISTERS] = {{0}};
    for (size_t i = 0; i < padded; i += PAIR_LANES)
        for (size_t r = 0; r < PAIR_REGISTERS; r++) {
            V_F64 x = NAME(load_f64)(a + i + r * PER);
            sum[r] += x * x;
        }
    return NAME(pair_total)(sum);
}

/* Everything that is a sum or a maximum of float64 values, over one padded block, into a fresh `part`. */
BLOCKWISE void NAME(compare_values)(const double *a, const double *b, size_t padded, struct part *part) {
    V_F64 sum_abs[PAIR_REGISTERS] = {{0}}, squares[PAIR_REGISTERS] = {{0}}, subject[PAIR_REGISTERS] = {{0}};
    V_F64 reference[PAIR_REGISTERS] = {{0}}, products[PAIR_REGISTERS] = {{0}}, most[PAIR_REGISTERS] = {{0}};
    for (size_t i = 0; i < padded; i += PAIR_LANES)
        for (size_t r = 0; r < PAIR_REGISTERS; r++) {
            V_F64 x = NAME(load_f64)(a + i + r * PER), y = NAME(load_f64)(b + i + r * PER), d = x - y, size = NAME(magnitude)(d);
            sum_abs[r] += size;
            squares[r] += d * d;
            subject[r] += x * x;
            reference[r] += y * y;
            products[r] += x * y;
            most[r] = NAME(maximum)(size, most[r]);
        }
    part->sum_abs = NAME(pair_total)(sum_abs);
    part->sum_squares = NAME(pair_total)(squares);
    part->sum_squares_subject = NAME(pair_total)(subject);
    part->sum_squares_reference = NAME(pair_total)(reference);
    part->sum_products = NAME(pair_total)(products);
    part->max_abs = NAME(pair_maximum)(most);

    V_F64 relative[PAIR_REGISTERS] = {{0}};
    V_I64 within_1e4[PAIR_REGISTERS] = {{0}}, within_1e3[PAIR_REGISTERS] = {{0}}, within_5e3[PAIR_REGISTERS] = {{0}};
    V_I64 flips[PAIR_REGISTERS] = {{0}};
    for (size_t i = 0; i < padded; i += PAIR_LANES)
        for (size_t r = 0; r < PAIR_REGISTERS; r++) {
            V_F64 x = NAME(load_f64)(a + i + r * PER), y = NAME(load_f64)(b + i + r * PER), size = NAME(magnitude)(x - y);
            V_F64 scale = NAME(magnitude)(y), ratio = size / scale;
            relative[r] = NAME(maximum)((V_F64)((V_I64)ratio & (scale != 0.0)), relative[r]);
            within_1e4[r] += size <= scale * 1e-4;
            within_1e3[r] += size <= scale * 1e-3;
            within_5e3[r] += size <= scale * 5e-3;
            flips[r] += (((V_I64)x ^ (V_I64)y) < 0) & (x != 0.0) & (y != 0.0);
        }
    part->max_rel = NAME(pair_maximum)(relative);
    part->within_1e4 = NAME(pair_count)(within_1e4);
    part->within_1e3 = NAME(pair_count)(within_1e3);
    part->within_5e3 = NAME(pair_count)(within_5e3);
    part->sign_flips = NAME(pair_count)(flips);
}

BLOCKWISE void NAME(add_part)(const struct part *part, size_t not_elements, struct difference *out) {
    out->sum_abs += part->sum_abs;
    out->sum_squares += part->sum_squares;
    out->sum_squares_subject += part->sum_squares_subject;
    out->sum_squares_reference += part->sum_squares_reference;
    out->sum_products += part->sum_products;
    out->max_rel = part->max_rel > out->max_rel ? part->max_rel : out->max_rel;
    out->within_1e4 += part->within_1e4 - not_elements;
    out->within_1e3 += part->within_1e3 - not_elements;
    out->within_5e3 += part->within_5e3 - not_elements;
    out->sign_flips += part->sign_flips;
}

/* A block whose bytes are the same on both sides. */
BLOCKWISE void NAME(add_equal_block)(double *a, size_t n, size_t padded, struct difference *out) {
    double sum = NAME(squares)(a, padded);
    size_t nonfinite = 0;
    if (sum - sum != 0) {
        nonfinite = scrub_equal(a, n);
        sum = NAME(squares)(a, padded);
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

static void NAME(difference)(int kind, const uint8_t *subject, const uint8_t *reference, size_t numel, const double *values,
                             const int64_t *order, struct difference *out) {
    double a[PAIR_BLOCK] __attribute__((aligned(64))), b[PAIR_BLOCK] __attribute__((aligned(64)));
    uint32_t slices[SLICES][BUCKETS];
    uint8_t keep[PAIR_BLOCK];
    const size_t size = SIZE[kind];
    memset(out, 0, sizeof *out);
    memset(slices, 0, sizeof slices);
    out->worst = out->first_disagree = -1;
    for (size_t start = 0; start < numel; start += PAIR_BLOCK) {
        const uint8_t *p = subject + size * start, *q = reference + size * start;
        size_t n = numel - start < PAIR_BLOCK ? numel - start : PAIR_BLOCK;
        size_t padded = (n + PAIR_LANES - 1) / PAIR_LANES * PAIR_LANES, nonfinite = 0;
        NAME(decode_block)(kind, p, n, values, a);
        if (memcmp(p, q, size * n) == 0) {
            NAME(add_equal_block)(a, n, padded, out);
            continue;
        }
        NAME(decode_block)(kind, q, n, values, b);
        struct part part;
        NAME(compare_values)(a, b, padded, &part);
        double check = part.sum_squares_subject + part.sum_squares_reference;
        if (check - check != 0) {
            nonfinite = scrub(a, b, n, start, keep, out);
            NAME(compare_values)(a, b, padded, &part);
        }
        NAME(add_part)(&part, padded - n + nonfinite, out);
        if (part.max_abs > out->max_abs) {
            size_t i = 0;
            while (i + 1 < n && from_bits64(bits64(a[i] - b[i]) & 0x7FFFFFFFFFFFFFFFu) != part.max_abs)
                i++;
            out->max_abs = part.max_abs;
            out->worst = (int64_t)(start + i);
        }
        NAME(ulp_block)(kind, p, q, n, nonfinite ? keep : NULL, order, out, slices);
        if (start / PAIR_BLOCK % (1 << 20) == 0)
            flush(slices, out);
    }
    flush(slices, out);
    out->ulp_counts[0] -= out->nonfinite;
}

#undef PAIR_REGISTERS
#undef PER
#undef LANES
#undef REGISTERS
#undef WIDEN
#undef V_F64
#undef V_U64
#undef V_I64
#undef V_F32
#undef V_U32
#undef V_I32
#undef V_U16
#undef V_I16
#endif
