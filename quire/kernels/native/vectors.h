/* AVX-512 with bf16 instructions: 16 numbers at a time. What compilers make of the plain loops takes five times as long:
 * they divide, round by integers, and use half of the width. */

#pragma once
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAVE_BF16_VECTORS 1
#include <immintrin.h>
#include "bf16.h"

/* The first `count` lanes of 16. */
static inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

static inline __m512 load16(const bf16 *x, __mmask16 here) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, x)), 16));
}

static inline void store16(bf16 *x, __mmask16 here, __m512 v) {
    _mm256_mask_storeu_epi16(x, here, (__m256i)_mm512_cvtneps_pbh(v));
}

/* exp of x <= 88; of less than -87 that of -87, next to nothing; NaN stays, being the second operand. */
static inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
    __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.4426950408889634f)), 0);
    __m512 r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.6931471805599453f), x);
    __m512 p = _mm512_set1_ps(8.3334519073e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* 2 ** x to 4e-5, more than bf16 holds; -inf gives NaN, all else that is too small 0. */
static inline __m512 exp2_16(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(9.6181291e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

/* 1 / x by an estimate of 14 bits and one step of Newton's: more than bf16 holds. */
static inline __m512 inverse16(__m512 x) {
    __m512 y = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
}

/* x / (1 + exp -x); NaN stays NaN. */
static inline __m512 silu16(__m512 x) {
    __m512 e = exp16(_mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_sub_ps(_mm512_setzero_ps(), x)));
    return _mm512_mul_ps(x, inverse16(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

/* The normal distribution's share between 0 and x, for x in [0, 5.5): a polynomial for each of 16 parts, in the place
 * within the part, fitted at Chebyshev's nodes. Coefficients by power, then by part. */
static const float NORMAL_SHARE[5][16] = {
    {0.0f, 0.13448289f, 0.254116148f, 0.348788142f, 0.415434211f, 0.45717001f, 0.480419904f, 0.491941392f,
     0.497020245f, 0.499011785f, 0.499706447f, 0.499921978f, 0.499981463f, 0.499996066f, 0.499999255f, 0.499999881f},
    {0.137132034f, 0.129266635f, 0.108272932f, 0.0805816203f, 0.0532881506f, 0.0313111767f, 0.016346978f,
     0.00758298114f, 0.00312537444f, 0.00114450837f, 0.000372379815f, 0.000107646345f, 2.76474057e-05f,
     6.30881414e-06f, 1.27901603e-06f, 2.30375434e-07f},
    {3.52868992e-05f, -0.00761936419f, -0.0127995331f, -0.0143031841f, -0.0126144774f, -0.00926195085f,
     -0.00579761108f, -0.00313333352f, -0.00147317594f, -0.000605491921f, -0.000218279529f, -6.9183232e-05f,
     -1.93123687e-05f, -4.75443494e-06f, -1.03334389e-06f, -1.98442621e-07f},
    {-0.00280054798f, -0.00229861098f, -0.00111145515f, 0.000158049108f, 0.00099579955f, 0.00124204729f,
     0.00105661363f, 0.000707580126f, 0.00039193168f, 0.000183830212f, 7.39810785e-05f, 2.57570464e-05f,
     7.80088067e-06f, 2.06330628e-06f, 4.77980961e-07f, 9.71940679e-08f},
    {0.000115909075f, 0.000284563808f, 0.000310142466f, 0.000209701248f, 6.64034815e-05f, -4.13424277e-05f,
     -8.45062677e-05f, -7.83916694e-05f, -5.2608204e-05f, -2.81981283e-05f, -1.25562119e-05f, -4.73935643e-06f,
     -1.53451936e-06f, -4.29504382e-07f, -1.04476896e-07f, -2.2172177e-08f}};

/* x times the share below x: to 5e-7, and one table serves without division or exp. NaN stays NaN. */
static inline __m512 gelu16(__m512 x) {
    __m512 at = _mm512_min_ps(_mm512_abs_ps(x), _mm512_set1_ps(5.4999995f));
    at = _mm512_mul_ps(at, _mm512_set1_ps(16 / 5.5f));
    __m512i part = _mm512_cvttps_epi32(at);
    __m512 within = _mm512_sub_ps(at, _mm512_cvtepi32_ps(part));
    __m512 p = _mm512_permutexvar_ps(part, _mm512_loadu_ps(NORMAL_SHARE[4]));
    for (int power = 3; power >= 0; power--)
        p = _mm512_fmadd_ps(p, within, _mm512_permutexvar_ps(part, _mm512_loadu_ps(NORMAL_SHARE[power])));
    const __m512 sign = _mm512_set1_ps(-0.0f);
    p = _mm512_or_ps(p, _mm512_and_ps(sign, x));
    return _mm512_mul_ps(x, _mm512_add_ps(p, _mm512_set1_ps(0.5f)));
}

static inline __m512 gelu_tanh16(__m512 x) {
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 y = _mm512_mul_ps(_mm512_set1_ps(-1.5957691216057308f), _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x));
    __m512 e = exp16(_mm512_min_ps(_mm512_set1_ps(88.0f), y));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

static inline __m512 relu16(__m512 x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }

static inline void rms_norm_vectors(const bf16 *x, bf16 *residual, const float *weight, bf16 *out, int64_t d, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        __m512 v = load16(x + j, here);
        if (residual) {
            /* Rounded before it is normed: the next layer reads the rounded one. */
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(v, load16(residual + j, here)));
            _mm256_mask_storeu_epi16(residual + j, here, rounded);
            v = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
        }
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    const bf16 *from = residual ? residual : x;
    __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / d + eps));
    for (int64_t j = 0; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        __m512 gain = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(here, weight + j));
        store16(out + j, here, _mm512_mul_ps(load16(from + j, here), gain));
    }
}

static inline void layer_norm_vectors(const bf16 *x, bf16 *residual, const float *weight, const float *bias, bf16 *out,
                                      int64_t d, float eps) {
    __m512 sum = _mm512_setzero_ps(), squares = sum;
    for (int64_t j = 0; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        __m512 v = load16(x + j, here);
        if (residual) {
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(v, load16(residual + j, here)));
            _mm256_mask_storeu_epi16(residual + j, here, rounded);
            v = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
        }
        sum = _mm512_add_ps(sum, v);
    }
    const bf16 *from = residual ? residual : x;
    __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / d);
    for (int64_t j = 0; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        __m512 off = _mm512_maskz_sub_ps(here, load16(from + j, here), mean);
        squares = _mm512_fmadd_ps(off, off, squares);
    }
    __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / d + eps));
    for (int64_t j = 0; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        __m512 gain = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(here, weight + j));
        __m512 shift = bias ? _mm512_maskz_loadu_ps(here, bias + j) : _mm512_setzero_ps();
        store16(out + j, here, _mm512_fmadd_ps(_mm512_sub_ps(load16(from + j, here), mean), gain, shift));
    }
}

static inline void add_vectors(const bf16 *a, const bf16 *b, bf16 *out, int64_t d) {
    for (int64_t j = 0; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        store16(out + j, here, _mm512_add_ps(load16(a + j, here), load16(b + j, here)));
    }
}

static inline void silu_mul_vectors(const bf16 *gate, const bf16 *up, bf16 *out, int64_t d) {
    for (int64_t j = 0; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        store16(out + j, here, _mm512_mul_ps(silu16(load16(gate + j, here)), load16(up + j, here)));
    }
}

/* By erf; `up` multiplies where there is one. */
static inline void gelu_vectors(const bf16 *x, const bf16 *up, bf16 *out, int64_t d) {
    for (int64_t j = 0; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        __m512 v = gelu16(load16(x + j, here));
        store16(out + j, here, up ? _mm512_mul_ps(v, load16(up + j, here)) : v);
    }
}

static inline void gelu_vectors_f32(const float *x, const float *up, float *out, int64_t d) {
    for (int64_t j = 0; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        __m512 v = gelu16(_mm512_maskz_loadu_ps(here, x + j));
        _mm512_mask_storeu_ps(out + j, here, up ? _mm512_mul_ps(v, _mm512_maskz_loadu_ps(here, up + j)) : v);
    }
}

/* One head: normed by `weight` where there is one, its first r elements rotated by cosines and sines of r / 2 angles where
 * there are any, and written to `out`. */
static inline void rope_vectors(const bf16 *x, bf16 *out, const float *weight, float eps, const bf16 *cosines, int64_t r,
                                int64_t d) {
    __m512 scale = _mm512_set1_ps(1.0f);
    if (weight) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t j = 0; j < d; j += 16) {
            __m512 v = load16(x + j, first_lanes(d - j));
            sum = _mm512_fmadd_ps(v, v, sum);
        }
        scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / d + eps));
    }
    int64_t half = cosines ? r / 2 : 0;
    for (int64_t j = 0; j < half; j += 16) {
        __mmask16 here = first_lanes(half - j);
        __m512 a = load16(x + j, here), b = load16(x + half + j, here);
        if (weight) {
            a = _mm512_mul_ps(a, _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(here, weight + j)));
            b = _mm512_mul_ps(b, _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(here, weight + half + j)));
        }
        __m512 c = load16(cosines + j, here), s = load16(cosines + half + j, here);
        store16(out + j, here, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        store16(out + half + j, here, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
    for (int64_t j = 2 * half; j < d; j += 16) {
        __mmask16 here = first_lanes(d - j);
        __m512 v = load16(x + j, here);
        if (weight) v = _mm512_mul_ps(v, _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(here, weight + j)));
        store16(out + j, here, v);
    }
}
#endif
