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

/* x / (1 + exp -x); NaN stays NaN, being the second operand. */
static inline __m512 silu16(__m512 x) {
    __m512 e = exp16(_mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_sub_ps(_mm512_setzero_ps(), x)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* The same by a power of two, for numbers that are stored as bf16. */
static inline __m512 rough_silu16(__m512 x) {
    __m512 power = _mm512_max_ps(_mm512_set1_ps(-126.0f), _mm512_mul_ps(x, _mm512_set1_ps(-1.4426950408889634f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp2_16(power)));
}

/* The normal distribution's share below x: a polynomial in x for each of 32 parts of [-5.5, 5.5), fitted at Chebyshev's
 * nodes. Coefficients by power, then by part. */
static const float NORMAL_SHARE[5][32] = {
    {0.000734076893f, 0.0029249182f, 0.0100614531f, 0.0297694653f, 0.0754376575f, 0.162940159f, 0.298467755f,
     0.461606443f, 0.601883471f, 0.666385293f, 0.643841028f, 0.577355385f, 0.5231933f, 0.502049685f, 0.499551237f,
     0.499973029f, 0.5f, 0.500027001f, 0.500448763f, 0.497950345f, 0.4768067f, 0.422644585f, 0.356159002f,
     0.333614707f, 0.398116529f, 0.538393557f, 0.701532245f, 0.837059855f, 0.924562335f, 0.97023052f, 0.989938557f,
     0.997075081f},
    {0.000513650186f, 0.00216974225f, 0.00793475844f, 0.0250279363f, 0.0677830726f, 0.156761348f, 0.30753389f,
     0.507772624f, 0.699553311f, 0.798404157f, 0.756304562f, 0.614532173f, 0.474821597f, 0.405831456f, 0.39515698f,
     0.398482919f, 0.39893958f, 0.398482919f, 0.39515698f, 0.405831456f, 0.474821597f, 0.614532173f, 0.756304562f,
     0.798404157f, 0.699553311f, 0.507772624f, 0.30753389f, 0.156761348f, 0.0677830726f, 0.0250279363f,
     0.00793475844f, 0.00216974225f},
    {0.000134929229f, 0.000604466943f, 0.00235125655f, 0.00791219063f, 0.0229273587f, 0.056869816f, 0.119798534f,
     0.212017149f, 0.310409397f, 0.36725983f, 0.337789416f, 0.22423394f, 0.0887494013f, 0.00401388807f,
     -0.0130869141f, -0.00302914483f, 5.83234361e-15f, 0.00302914483f, 0.0130869141f, -0.00401388807f, -0.0887494013f,
     -0.22423394f, -0.337789416f, -0.36725983f, -0.310409397f, -0.212017149f, -0.119798534f, -0.056869816f,
     -0.0229273587f, -0.00791219063f, -0.00235125655f, -0.000604466943f},
    {1.57693812e-05f, 7.49465034e-05f, 0.000310230622f, 0.00111450162f, 0.0034588601f, 0.00921568461f, 0.0208943281f,
     0.0397809185f, 0.0622322224f, 0.0767742917f, 0.0676087067f, 0.0271183848f, -0.0314236693f, -0.0778605491f,
     -0.0900352225f, -0.0762211382f, -0.0661233887f, -0.0762211382f, -0.0900352225f, -0.0778605491f, -0.0314236693f,
     0.0271183848f, 0.0676087067f, 0.0767742917f, 0.0622322224f, 0.0397809185f, 0.0208943281f, 0.00921568461f,
     0.0034588601f, 0.00111450162f, 0.000310230622f, 7.49465107e-05f},
    {6.91799357e-07f, 3.48915273e-06f, 1.53760611e-05f, 5.90074524e-05f, 0.000196311084f, 0.000562592526f,
     0.00137573155f, 0.00282705878f, 0.00474953419f, 0.00614551175f, 0.00507689267f, -0.000345868291f,
     -0.00985574257f, -0.0194373485f, -0.0226871874f, -0.0154307662f, 3.80814412e-13f, 0.0154307662f, 0.0226871874f,
     0.0194373485f, 0.00985574257f, 0.000345868291f, -0.00507689267f, -0.00614551175f, -0.00474953419f,
     -0.00282705878f, -0.00137573155f, -0.000562592526f, -0.000196311084f, -5.90074524e-05f, -1.53760611e-05f,
     -3.48915273e-06f}};

/* x times the share below x: to 2e-6, without division or exp. NaN stays NaN, being the second operand. */
static inline __m512 gelu16(__m512 x) {
    __m512 at = _mm512_max_ps(_mm512_set1_ps(-5.5f), _mm512_min_ps(_mm512_set1_ps(5.3281245f), x));
    /* The number of its part ends in the lowest bits, which are all that the permutations read. */
    __m512i part = _mm512_castps_si512(_mm512_fmadd_ps(at, _mm512_set1_ps(32 / 11.0f), _mm512_set1_ps(12582912.0f + 16)));
#define OF_PART(power)                                                                                                 \
    _mm512_permutex2var_ps(_mm512_loadu_ps(NORMAL_SHARE[power]), part, _mm512_loadu_ps(NORMAL_SHARE[power] + 16))
    __m512 p = OF_PART(4);
    for (int power = 3; power >= 0; power--) p = _mm512_fmadd_ps(p, at, OF_PART(power));
#undef OF_PART
    /* Below, next to nothing is left, and less than the error that a large x would multiply. */
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-5.5f), _CMP_NLT_UQ), x, p);
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
        store16(out + j, here, _mm512_mul_ps(rough_silu16(load16(gate + j, here)), load16(up + j, here)));
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
