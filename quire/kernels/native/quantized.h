/* What quantized.c and quantized_pack.c share: how a quantized weight lies in memory.
 *
 * Every format is d * q + m with an unsigned q of 4, 5, 6 or 8 bits, and a d and m for each output and group of inputs.
 * Symmetric formats are d * (q - zero) and store no m.
 *
 * A weight is packed in panels of 16 outputs, and a panel holds one group of 32 inputs after the other: 16 outputs x 4
 * inputs are 64 bytes, what one dot product instruction takes. With 4 to 6 bits, 64 bytes hold the nibbles of inputs i
 * and i + 16, and planes with the bits above follow. Then come the scales. K formats put what 8 groups share before the
 * first of them. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "bf16.h"

enum { LANES = 16, GROUP = 32, QUADS = GROUP / 4, SUPER = 8 };

/* In the order of FORMATS in quantized.py. */
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

/* How scales work: one d; d and m; a d for each half of the group. */
enum { SYMMETRIC, AFFINE, HALVES };

typedef struct {
    int bits, zero, kind, k_format;
    int elements, bytes; /* of a block in the file */
} Format;

static const Format FORMATS[] = {
    [Q4_0] = {4, 8, SYMMETRIC, 0, 32, 18},  [Q4_1] = {4, 0, AFFINE, 0, 32, 20},
    [Q5_0] = {5, 16, SYMMETRIC, 0, 32, 22}, [Q5_1] = {5, 0, AFFINE, 0, 32, 24},
    [Q8_0] = {8, 128, SYMMETRIC, 0, 32, 34}, [Q4_K] = {4, 0, AFFINE, 1, 256, 144},
    [Q5_K] = {5, 0, AFFINE, 1, 256, 176},   [Q6_K] = {6, 32, HALVES, 1, 256, 210},
};

/* Whether there are inputs of whole blocks. */
static inline int format_takes(int64_t format, int64_t k) {
    return format >= Q4_0 && format <= Q6_K && k > 0 && k % FORMATS[format].elements == 0;
}

static inline int64_t quant_bytes(int bits) { return bits * GROUP * LANES / 8; }

static inline int64_t scale_bytes(int kind, int k_format) {
    return k_format ? 2 * LANES : kind == AFFINE ? 4 * LANES : 2 * LANES;
}

static inline int64_t shared_bytes(int kind, int k_format) {
    return !k_format ? 0 : kind == AFFINE ? 4 * LANES : 2 * LANES;
}

static inline int64_t panel_bytes_of(int format, int64_t k) {
    Format f = FORMATS[format];
    int64_t groups = k / GROUP;
    return groups * (quant_bytes(f.bits) + scale_bytes(f.kind, f.k_format)) +
           groups / SUPER * shared_bytes(f.kind, f.k_format);
}

static inline float from_bits(uint32_t u) {
    union { uint32_t u; float f; } v = {.u = u};
    return v.f;
}

static inline uint32_t to_bits(float x) {
    union { float f; uint32_t u; } v = {.f = x};
    return v.u;
}

/* Also of subnormals: float's exponent reaches far enough to shift them by a product. */
static inline float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    float value = from_bits(rest) * 0x1p112f;
    if ((h & 0x7c00) == 0x7c00) value = from_bits(rest | 0x7f800000);
    return from_bits(to_bits(value) | sign);
}

static inline uint16_t to_half(float x) {
    uint32_t u = to_bits(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest >= 0x47800000) return (uint16_t)(sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (rest < 0x38800000) return (uint16_t)(sign | (uint32_t)lrintf(from_bits(rest) * 0x1p24f));
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - 0x38000000) >> 13);
}

static inline float load(const void *p, int64_t i, int type) {
    return type ? widen(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
