/* Panels of quantized.h in vectors of what the machine has: a group's bytes as they are multiplied, and its scales. */

#pragma once
#include "quantized.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* What the machine has: WIDTH outputs are one vector, and ROWS rows x VECTORS vectors fit the registers. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define KIND_IS_WIDE 1
enum { KIND_OF_DOT = 2, WIDTH = 16, ROWS = 6, VECTORS = 2 };
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
enum { KIND_OF_DOT = 1, WIDTH = 8, ROWS = 2, VECTORS = 2 };
#else
enum { KIND_OF_DOT = 0, WIDTH = 4, ROWS = 1, VECTORS = 1 };
#endif

typedef uint8_t Bytes __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Shorts __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
#define INLINE static inline __attribute__((always_inline))

INLINE Bytes load_bytes(const uint8_t *p) {
    Bytes v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE Ints all_ints(int32_t x) { return x - (Ints){0}; }
INLINE Floats all_floats(float x) { return x - (Floats){0}; }

INLINE Bytes nibbles(Bytes v, int shift) { return (Bytes)((Shorts)v >> shift) & 0xf; }

/* Bits of a plane, moved to where they stand above a nibble: mask is 0x10 or 0x30. */
INLINE Bytes above(Bytes plane, int at, uint8_t mask) {
    Shorts v = (Shorts)plane;
    return (Bytes)(at > 4 ? v >> (at - 4) : v << (4 - at)) & mask;
}

/* dot: 4 inputs of each output; x holds 4 signed bytes. The loads make floats of float16, unsigned and signed bytes. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include "int8_dot.h"

INLINE Ints dot(Ints sum, Bytes w, int32_t x, int bits) {
    return (Ints)add_dots((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
}
INLINE Floats load_halves(const uint8_t *p) {
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE Floats load_u8(const uint8_t *p) {
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE Floats load_i8(const uint8_t *p) {
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

/* Products are added in pairs of 16 bits, too few for 8-bit weights: those are taken as two nibbles. */
INLINE Ints dot(Ints sum, Bytes w, int32_t x, int bits) {
    __m256i inputs = _mm256_set1_epi32(x), low = (__m256i)(bits == 8 ? w & 0xf : w);
    sum += (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(low, inputs), _mm256_set1_epi16(1));
    if (bits < 8) return sum;
    __m256i high = (__m256i)((Bytes)((Shorts)w >> 4) & 0xf);
    return sum + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(high, inputs), _mm256_set1_epi16(16));
}
INLINE Floats load_halves(const uint8_t *p) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE Floats load_u8(const uint8_t *p) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE Floats load_i8(const uint8_t *p) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

#else

INLINE Ints dot(Ints sum, Bytes w, int32_t x, int bits) {
    int8_t inputs[4];
    memcpy(inputs, &x, 4);
    for (int n = 0; n < WIDTH; n++)
        sum[n] += w[4 * n] * inputs[0] + w[4 * n + 1] * inputs[1] + w[4 * n + 2] * inputs[2] + w[4 * n + 3] * inputs[3];
    return sum;
}
INLINE Floats load_halves(const uint8_t *p) {
    uint16_t halves[WIDTH];
    memcpy(halves, p, sizeof halves);
    return (Floats){from_half(halves[0]), from_half(halves[1]), from_half(halves[2]), from_half(halves[3])};
}
INLINE Floats load_u8(const uint8_t *p) { return (Floats){p[0], p[1], p[2], p[3]}; }
INLINE Floats load_i8(const uint8_t *p) { return (Floats){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]}; }
INLINE Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }

#endif

/* From panels to bytes and float scales */

typedef struct {
    Bytes w[QUADS];
    Floats a, b; /* d and m, or the d of each half */
} Group;

/* Where the next group is, and which vector of its panel to read. Before the first of eight groups, K formats have what
 * they share. */
typedef struct {
    const uint8_t *at;
    int lane;
    Floats d, m;
} Reader;

INLINE Reader read_vector(int format, const uint8_t *packed, int64_t vector, int64_t k) {
    int64_t lane = vector * WIDTH;
    return (Reader){.at = packed + lane / LANES * panel_bytes_of(format, k), .lane = (int)(lane % LANES)};
}

INLINE void next_group(const int format, Reader *from, int64_t g, Group *to) {
    const Format f = FORMATS[format];
    const int lane = from->lane;
    if (f.k_format && g % SUPER == 0) {
        from->d = load_halves(from->at + 2 * lane);
        if (f.kind == AFFINE) from->m = load_halves(from->at + 2 * (LANES + lane));
        from->at += shared_bytes(f.kind, 1);
    }
    const uint8_t *p = from->at + 4 * lane;
    if (f.bits == 8) {
        for (int j = 0; j < QUADS; j++) to->w[j] = load_bytes(p + 64 * j);
    } else {
        for (int j = 0; j < QUADS / 2; j++) {
            Bytes both = load_bytes(p + 64 * j);
            to->w[j] = nibbles(both, 0);
            to->w[j + 4] = nibbles(both, 4);
        }
    }
    if (f.bits == 5)
        for (int j = 0; j < QUADS; j++) to->w[j] |= above(load_bytes(p + 256), j, 0x10);
    if (f.bits == 6)
        for (int j = 0; j < QUADS; j++) to->w[j] |= above(load_bytes(p + 256 + j / 4 * 64), j % 4 * 2, 0x30);
    p = from->at + quant_bytes(f.bits);
    from->at = p + scale_bytes(f.kind, f.k_format);
    if (f.kind == HALVES) {
        to->a = from->d * load_i8(p + lane);
        to->b = from->d * load_i8(p + LANES + lane);
    } else if (f.k_format) {
        to->a = from->d * load_u8(p + lane);
        to->b = -(from->m * load_u8(p + LANES + lane));
    } else {
        to->a = load_halves(p + 2 * lane);
        if (f.kind == AFFINE) to->b = load_halves(p + 2 * (LANES + lane));
    }
}
