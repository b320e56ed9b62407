/* What encoders' linear layers and attention share: products of up to 12 rows with a panel of 32 columns, and packing.
 *
 * A weight, and a text's keys, lie in panels as bf16.h has them; in float32 [panel][inputs][32]. Values do as the weight of
 * a layer from keys to a head's elements. */

#pragma once
#include <string.h>
#include "attention_vectors.h"
#include "threads.h"

#ifdef HAVE_BF16_VECTORS

/* Rows that are multiplied with a panel at a time: their sums fill the registers. */
enum { STRIP = 12 };
#define INLINE static inline __attribute__((always_inline))

/* Rows of x, `stride` elements apart, times a panel's 32 columns, added to sums [rows][2]. In bf16 `count` is of pairs.
 * `ahead`: lines that are wanted next, as many as `count`; where there are none, any that are near. */
INLINE void multiply_bf16(const int rows, const bf16 *x, int64_t stride, const bf16 *panel, int64_t count, __m512 *sums,
                          const char *ahead) {
    for (int64_t e = 0; e < count; e++) {
        _mm_prefetch(ahead + e * 64, _MM_HINT_T1);
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + e * 64);
        __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + e * 64 + 32);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * stride + 2 * e, 4);
            __m512bh v = (__m512bh)_mm512_set1_epi32(pair);
            sums[2 * r] = _mm512_dpbf16_ps(sums[2 * r], w0, v);
            sums[2 * r + 1] = _mm512_dpbf16_ps(sums[2 * r + 1], w1, v);
        }
    }
}

INLINE void multiply_f32(const int rows, const float *x, int64_t stride, const float *panel, int64_t apart, int64_t count,
                         __mmask16 low, __mmask16 high, __m512 *sums, const char *ahead) {
    for (int64_t e = 0; e < count; e++) {
        _mm_prefetch(ahead + e * 64, _MM_HINT_T1);
        __m512 w0 = _mm512_maskz_loadu_ps(low, panel + e * apart);
        __m512 w1 = _mm512_maskz_loadu_ps(high, panel + e * apart + 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            __m512 v = _mm512_set1_ps(x[r * stride + e]);
            sums[2 * r] = _mm512_fmadd_ps(w0, v, sums[2 * r]);
            sums[2 * r + 1] = _mm512_fmadd_ps(w1, v, sums[2 * r + 1]);
        }
    }
}

/* Calls NAME with the number of rows known to the compiler. */
#define FOR_ROWS(ROWS, CALL)                                                                                           \
    switch (ROWS) {                                                                                                    \
    case 1: { enum { R = 1 }; CALL; break; }                                                                           \
    case 2: { enum { R = 2 }; CALL; break; }                                                                           \
    case 3: { enum { R = 3 }; CALL; break; }                                                                           \
    case 4: { enum { R = 4 }; CALL; break; }                                                                           \
    case 5: { enum { R = 5 }; CALL; break; }                                                                           \
    case 6: { enum { R = 6 }; CALL; break; }                                                                           \
    case 7: { enum { R = 7 }; CALL; break; }                                                                           \
    case 8: { enum { R = 8 }; CALL; break; }                                                                           \
    case 9: { enum { R = 9 }; CALL; break; }                                                                           \
    case 10: { enum { R = 10 }; CALL; break; }                                                                         \
    case 11: { enum { R = 11 }; CALL; break; }                                                                         \
    case 12: { enum { R = 12 }; CALL; break; }                                                                         \
    }

INLINE void start(const int rows, __m512 *sums, __m512 low, __m512 high) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sums[2 * r] = low, sums[2 * r + 1] = high;
}

/* [n][words] of four bytes, rows `stride` words apart -> [panel][words][32], zero behind the last row. */
static inline void pack_words(const int32_t *from, int64_t n, int64_t words, int64_t stride, int32_t *to) {
    for (int64_t i = 0; i < n; i += 16) {
        int32_t *panel = to + i / PANEL * words * PANEL + i % PANEL;
        int64_t rows = n - i < 16 ? n - i : 16;
        for (int64_t w = 0; w < words; w += 16) {
            __m512i tile[16];
            __mmask16 here = first_lanes(words - w);
            for (int r = 0; r < 16; r++)
                tile[r] = r < rows ? _mm512_maskz_loadu_epi32(here, from + (i + r) * stride + w) : _mm512_setzero_si512();
            transpose16(tile);
            for (int c = 0; c < 16 && w + c < words; c++) _mm512_storeu_si512(panel + (w + c) * PANEL, tile[c]);
        }
    }
    if (n % PANEL && n % PANEL <= 16)
        for (int64_t w = 0; w < words; w++)
            _mm512_storeu_si512(to + (n / PANEL * words + w) * PANEL + 16, _mm512_setzero_si512());
}

#endif
