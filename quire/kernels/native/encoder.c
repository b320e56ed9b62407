/* What encoders compute that decoders do not: linear layers in float32 too, with their activation, and attention of texts
 * that are computed whole, over a step's own keys. AVX-512 with bf16 instructions; elsewhere torch does it.
 *
 * A weight, and a text's keys, lie in panels as bf16.h has them; in float32 [panel][inputs][32]. Values do as the weight of
 * a layer from keys to a head's elements. So all products here are of up to 12 rows with a panel. */

#include <string.h>
#include "attention_vectors.h"
#include "threads.h"

int quire_encoder_kernels(void) {
#ifdef HAVE_BF16_VECTORS
    return 1;
#else
    return 0;
#endif
}

#ifdef HAVE_BF16_VECTORS

enum { STRIP = 12, GROUP_BYTES = 128 << 10 };
#define INLINE static inline __attribute__((always_inline))

/* As quire/kernels/activation.py numbers them. */
enum { SILU, GELU_TANH, GELU, RELU };

/* Out of line: the sums of a strip stay in registers while it is computed, and leave them at once. */
static __attribute__((noinline)) void activate_sums(__m512 *sums, int count, int kind) {
#define EACH(WITH)                                                                                                     \
    for (int i = 0; i < count; i++) sums[i] = WITH(sums[i]);                                                           \
    break;
    switch (kind) {
    case SILU: EACH(silu16)
    case GELU_TANH: EACH(gelu_tanh16)
    case GELU: EACH(gelu16)
    case RELU: EACH(relu16)
    }
}

/* Rows of x, `stride` elements apart, times a panel's 32 columns, added to sums [rows][2]. In bf16 `count` is of pairs. */
INLINE void multiply_bf16(const int rows, const bf16 *x, int64_t stride, const bf16 *panel, int64_t count, __m512 *sums) {
    for (int64_t e = 0; e < count; e++) {
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
                         __mmask16 low, __mmask16 high, __m512 *sums) {
    for (int64_t e = 0; e < count; e++) {
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
static void pack_words(const int32_t *from, int64_t n, int64_t words, int64_t stride, int32_t *to) {
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

/* A float32 weight [n, k] -> [panels][k][32]. */
int quire_pack_float32(const float *weight, float *packed, int64_t n, int64_t k) {
    if (n < 1 || k < 1) return BAD_SIZE;
#pragma omp parallel for
    for (int64_t p = 0; p < (n + PANEL - 1) / PANEL; p++) {
        int64_t rows = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
        pack_words((const int32_t *)weight + p * PANEL * k, rows, k, k, (int32_t *)packed + p * PANEL * k);
    }
    return DONE;
}

typedef struct {
    const void *x, *packed, *bias;
    void *out;
    int64_t n, k;
    int activation;
} Linear;

INLINE void linear_bf16(const int rows, const Linear *l, int64_t i, int64_t p) {
    int64_t at = p * PANEL, pairs = (l->k + 1) / 2;
    __mmask16 low = first_lanes(l->n - at), high = l->n - at > 16 ? first_lanes(l->n - at - 16) : 0;
    const bf16 *bias = (const bf16 *)l->bias + at, *x = (const bf16 *)l->x + i * l->k;
    const bf16 *panel = (const bf16 *)l->packed + p * pairs * PANEL * 2;
    __m512 sums[2 * STRIP], zero = _mm512_setzero_ps();
    start(rows, sums, l->bias ? load16(bias, low) : zero, l->bias ? load16(bias + 16, high) : zero);
    multiply_bf16(rows, x, l->k, panel, l->k / 2, sums);
    if (l->k & 1) {
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + l->k / 2 * 64);
        __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + l->k / 2 * 64 + 32);
        for (int r = 0; r < rows; r++) {
            __m512bh v = (__m512bh)_mm512_set1_epi32(x[r * l->k + l->k - 1]);
            sums[2 * r] = _mm512_dpbf16_ps(sums[2 * r], w0, v);
            sums[2 * r + 1] = _mm512_dpbf16_ps(sums[2 * r + 1], w1, v);
        }
    }
    if (l->activation >= 0) {
        __m512 kept[2 * STRIP];
#pragma GCC unroll 24
        for (int r = 0; r < 2 * rows; r++) kept[r] = sums[r];
        activate_sums(kept, 2 * rows, l->activation);
#pragma GCC unroll 24
        for (int r = 0; r < 2 * rows; r++) sums[r] = kept[r];
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        bf16 *out = (bf16 *)l->out + (i + r) * l->n + at;
        store16(out, low, sums[2 * r]);
        store16(out + 16, high, sums[2 * r + 1]);
    }
}

INLINE void linear_f32(const int rows, const Linear *l, int64_t i, int64_t p) {
    int64_t at = p * PANEL;
    __mmask16 low = first_lanes(l->n - at), high = l->n - at > 16 ? first_lanes(l->n - at - 16) : 0;
    const float *bias = (const float *)l->bias + at;
    __m512 sums[2 * STRIP], zero = _mm512_setzero_ps();
    start(rows, sums, l->bias ? _mm512_maskz_loadu_ps(low, bias) : zero,
          l->bias ? _mm512_maskz_loadu_ps(high, bias + 16) : zero);
    multiply_f32(rows, (const float *)l->x + i * l->k, l->k, (const float *)l->packed + at * l->k, PANEL, l->k, 0xffff,
                 0xffff, sums);
    if (l->activation >= 0) {
        __m512 kept[2 * STRIP];
#pragma GCC unroll 24
        for (int r = 0; r < 2 * rows; r++) kept[r] = sums[r];
        activate_sums(kept, 2 * rows, l->activation);
#pragma GCC unroll 24
        for (int r = 0; r < 2 * rows; r++) sums[r] = kept[r];
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        float *out = (float *)l->out + (i + r) * l->n + at;
        _mm512_mask_storeu_ps(out, low, sums[2 * r]);
        _mm512_mask_storeu_ps(out + 16, high, sums[2 * r + 1]);
    }
}

static void linear_strip(int rows, const Linear *l, int64_t i, int64_t p, int type) {
    if (type) FOR_ROWS(rows, linear_bf16(R, l, i, p))
    else FOR_ROWS(rows, linear_f32(R, l, i, p))
}

/* x [m, k], bias [n] or NULL -> out [m, n], activated unless `activation` is negative. */
int quire_encoder_linear(const void *x, const void *packed, const void *bias, void *out, int64_t m, int64_t n, int64_t k,
                         int activation, int type) {
    if (m < 0 || n < 1 || k < 1 || activation > RELU) return BAD_SIZE;
    Linear l = {x, packed, bias, out, n, k, activation};
    int64_t panels = (n + PANEL - 1) / PANEL, bytes = (type ? (k + 1) / 2 : k) * PANEL * 4;
    int64_t group = bytes > GROUP_BYTES || m <= STRIP ? 1 : GROUP_BYTES / bytes;
    int pinned = quire_pinned();
#pragma omp parallel if (n * k > WORTH_THREADS)
    {
        quire_stay(pinned);
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t end = panels * (thread + 1) / threads;
        for (int64_t first = panels * thread / threads; first < end; first += group)
            for (int64_t i = 0; i < m; i += STRIP)
                for (int64_t p = first; p < first + group && p < end; p++)
                    linear_strip(m - i < STRIP ? (int)(m - i) : STRIP, &l, i, p, type);
    }
    return DONE;
}

typedef struct {
    const void *qkv;
    void *out;
    const float *bias; /* [heads, 2 * longest - 1] or NULL */
    const void *table; /* of rotary angles, [positions, rotary], or NULL */
    const int64_t *positions;
    const float *q_weight, *k_weight; /* of norms, or NULL */
    int64_t heads, kv_heads, d, rotary, window, longest;
    float scale, eps;
    int type;
} Attention;

/* A head's elements of token i, normed and rotated, at `to`. */
static void prepare_head(const Attention *a, int64_t i, int64_t head, const float *weight, void *to) {
    int64_t width = (a->heads + 2 * a->kv_heads) * a->d, d = a->d, half = a->table ? a->rotary / 2 : 0;
    if (a->type) {
        const bf16 *angles = a->table ? (const bf16 *)a->table + a->positions[i] * a->rotary : 0;
        rope_vectors((const bf16 *)a->qkv + i * width + head * d, to, weight, a->eps, angles, a->rotary, d);
        return;
    }
    const float *x = (const float *)a->qkv + i * width + head * d;
    const float *angles = a->table ? (const float *)a->table + a->positions[i] * a->rotary : 0;
    float *out = to, sum = 0;
    if (weight) {
        _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < d; j++) sum += x[j] * x[j];
        float scale = 1.0f / sqrtf(sum / d + a->eps);
        for (int64_t j = 0; j < d; j++) out[j] = x[j] * scale * weight[j];
    } else memcpy(out, x, d * 4);
    for (int64_t j = 0; j < half; j++) {
        float first = out[j], second = out[half + j];
        out[j] = first * angles[j] - second * angles[half + j];
        out[half + j] = second * angles[j] + first * angles[half + j];
    }
}

/* Values [n][d], rows `stride` apart -> panels of 32 elements: [panel][pairs of keys][32][2]. */
static void pack_values(const bf16 *from, int64_t n, int64_t d, int64_t stride, int64_t pairs, bf16 *to) {
    for (int64_t e = 0; e < pairs; e++)
        for (int64_t j = 0; j < (d + PANEL - 1) / PANEL * PANEL; j += 16) {
            __mmask16 here = j < d ? first_lanes(d - j) : 0;
            __m256i a = _mm256_maskz_loadu_epi16(2 * e < n ? here : 0, from + 2 * e * stride + j);
            __m256i b = _mm256_maskz_loadu_epi16(2 * e + 1 < n ? here : 0, from + (2 * e + 1) * stride + j);
            __m512i both = _mm512_permutex2var_epi16(_mm512_castsi256_si512(a), PAIRS_LOW, _mm512_castsi256_si512(b));
            _mm512_storeu_si512(to + ((j / PANEL * pairs + e) * PANEL + j % PANEL) * 2, both);
        }
}

/* Scores of keys [first, last) among `count`, a multiple of 16 -> weights, not yet divided by their sum, which is
 * returned; those of other keys are 0. bias: by key, or NULL. In bf16 at `narrow`, else in place. */
INLINE float softmax(float *scores, bf16 *narrow, int64_t count, int64_t first, int64_t last, float scale,
                     const float *bias) {
    __m512 most = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(bias ? 1.0f : scale);
    for (int64_t j = 0; j < count; j += 16) {
        __m512 s = _mm512_loadu_ps(scores + j);
        __mmask16 seen = lanes(first, last, j);
        if (bias) {
            s = _mm512_fmadd_ps(s, _mm512_set1_ps(scale), _mm512_maskz_loadu_ps(seen, bias + j));
            _mm512_storeu_ps(scores + j, s);
        }
        most = _mm512_mask_max_ps(most, seen, most, s);
    }
    const __m512 log2e = _mm512_set1_ps(1.4426950408889634f);
    if (narrow) factor = _mm512_mul_ps(factor, log2e);
    __m512 top = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(most)), factor), sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j += 16) {
        __m512 s = _mm512_fmsub_ps(_mm512_loadu_ps(scores + j), factor, top);
        __m512 e = _mm512_maskz_mov_ps(lanes(first, last, j), narrow ? exp2_16(s) : exp16(s));
        sum = _mm512_add_ps(sum, e);
        if (narrow) store16(narrow + j, 0xffff, e);
        else _mm512_storeu_ps(scores + j, e);
    }
    return _mm512_reduce_add_ps(sum);
}

/* A text's part for one KV head: its keys from `base` on, `keys` of them. */
typedef struct {
    const void *packed_keys, *values; /* in float32 values lie where they were */
    int64_t first_token, base, keys, length;
} Part;

INLINE void scores_strip(const int rows, const Attention *a, const Part *t, const void *q, int64_t from, int64_t to,
                         float *scores, int64_t apart) {
    int64_t words = a->type ? (a->d + 1) / 2 : a->d;
    for (int64_t p = from; p < to; p += PANEL) {
        __m512 sums[2 * STRIP], zero = _mm512_setzero_ps();
        start(rows, sums, zero, zero);
        const int32_t *panel = (const int32_t *)t->packed_keys + p * words;
        if (a->type) multiply_bf16(rows, q, 2 * words, (const bf16 *)panel, words, sums);
        else multiply_f32(rows, q, words, (const float *)panel, PANEL, words, 0xffff, 0xffff, sums);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            _mm512_storeu_ps(scores + r * apart + p - from, sums[2 * r]);
            _mm512_storeu_ps(scores + r * apart + p - from + 16, sums[2 * r + 1]);
        }
    }
}

INLINE void values_strip(const int rows, const Attention *a, const Part *t, const void *weights, int64_t apart,
                         int64_t from, int64_t to, const float *totals, int64_t token, int64_t head) {
    int64_t pairs = (t->keys + PANEL - 1) / PANEL * PANEL / 2, width = (a->heads + 2 * a->kv_heads) * a->d;
    for (int64_t j = 0; j < a->d; j += PANEL) {
        __mmask16 low = first_lanes(a->d - j), high = a->d - j > 16 ? first_lanes(a->d - j - 16) : 0;
        __m512 sums[2 * STRIP], zero = _mm512_setzero_ps();
        start(rows, sums, zero, zero);
        if (a->type)
            multiply_bf16(rows, weights, apart, (const bf16 *)t->values + (j * pairs + from * PANEL / 2) * 2, (to - from) / 2,
                          sums);
        else {
            int64_t last = to < t->keys ? to : t->keys;
            multiply_f32(rows, weights, apart, (const float *)t->values + from * width + j, width, last - from, low, high,
                         sums);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            __m512 by = _mm512_set1_ps(1.0f / totals[r]);
            int64_t at = ((token + r) * a->heads + head) * a->d + j;
            __m512 x = _mm512_mul_ps(sums[2 * r], by), y = _mm512_mul_ps(sums[2 * r + 1], by);
            if (a->type) {
                store16((bf16 *)a->out + at, low, x);
                store16((bf16 *)a->out + at + 16, high, y);
            } else {
                _mm512_mask_storeu_ps((float *)a->out + at, low, x);
                _mm512_mask_storeu_ps((float *)a->out + at + 16, high, y);
            }
        }
    }
}

static void attend_strip(const Attention *a, const Part *t, int rows, int64_t query, int64_t head, void *q, float *scores,
                         bf16 *narrow, int64_t apart) {
    int64_t words = a->type ? (a->d + 1) / 2 : a->d, token = t->first_token + query;
    for (int r = 0; r < rows; r++) prepare_head(a, token + r, head, a->q_weight, (int32_t *)q + r * words);
    /* Keys that some of the rows see, counted from `base`. */
    int64_t from = 0, to = t->keys;
    if (a->window) {
        from = query - a->window + 1 - t->base;
        to = query + rows - 1 + a->window - t->base;
    }
    from = from < 0 ? 0 : from / PANEL * PANEL;
    to = to < t->keys ? to : t->keys;
    int64_t count = (to - from + PANEL - 1) / PANEL * PANEL;
    FOR_ROWS(rows, scores_strip(R, a, t, q, from, from + count, scores, apart))
    float totals[STRIP];
    for (int r = 0; r < rows; r++) {
        int64_t first = 0, last = to - from, at = query + r - t->base - from;
        if (a->window) {
            first = at - a->window + 1;
            last = at + a->window < last ? at + a->window : last;
        }
        const float *bias = a->bias ? a->bias + head * (2 * a->longest - 1) + a->longest - 1 - at : 0;
        bf16 *to_bf16 = a->type ? narrow + r * apart : 0;
        totals[r] = softmax(scores + r * apart, to_bf16, count, first < 0 ? 0 : first, last, a->scale, bias);
    }
    const void *weights = a->type ? (const void *)narrow : (const void *)scores;
    FOR_ROWS(rows, values_strip(R, a, t, weights, apart, from, from + count, totals, token, head))
}

/* Queries [first, last) of a text, of all heads of a KV head. */
static int attend(const Attention *a, int64_t token, int64_t length, int64_t kv_head, int64_t first, int64_t last) {
    int64_t base = 0, end = length, d = a->d, all = a->heads + 2 * a->kv_heads, size = a->type ? 2 : 4;
    if (a->window) {
        base = first - a->window + 1 < 0 ? 0 : (first - a->window + 1) / PANEL * PANEL;
        end = last - 1 + a->window < length ? last - 1 + a->window : length;
    }
    int64_t keys = end - base, padded = (keys + PANEL - 1) / PANEL * PANEL, words = a->type ? (d + 1) / 2 : d;
    int64_t wide = (d + PANEL - 1) / PANEL * PANEL, group = a->heads / a->kv_heads;
    int64_t bytes[] = {padded * words * 4, padded * wide * 2, padded * words * 4, STRIP * words * 4, STRIP * padded * 4,
                       STRIP * padded * 2};
    int64_t total = 0;
    for (int i = 0; i < 6; i++) total += bytes[i] = (bytes[i] + 63) / 64 * 64;
    char *scratch = quire_scratch(total);
    if (!scratch) return NO_MEMORY;
    char *parts[6];
    for (int i = 0; i < 6; scratch += bytes[i], i++) parts[i] = scratch;
    int32_t *rotated = (int32_t *)parts[2];
    const char *qkv = a->qkv;
    int64_t key_head = a->heads + kv_head, value_at = (a->heads + a->kv_heads + kv_head) * d;
    const char *values = qkv + ((token + base) * all * d + value_at) * size;
    if (a->table || a->k_weight || d * size % 4) {
        for (int64_t i = 0; i < keys; i++) {
            if (a->type && d % 2) rotated[i * words + words - 1] = 0;
            prepare_head(a, token + base + i, key_head, a->k_weight, rotated + i * words);
        }
        pack_words(rotated, keys, words, words, (int32_t *)parts[0]);
    } else
        pack_words((const int32_t *)(qkv + ((token + base) * all + key_head) * d * size), keys, words, all * words,
                   (int32_t *)parts[0]);
    if (a->type) pack_values((const bf16 *)values, keys, d, all * d, padded / 2, (bf16 *)parts[1]);
    Part part = {parts[0], a->type ? (const void *)parts[1] : (const void *)values, token, base, keys, length};
    if (a->type && d % 2)
        for (int r = 0; r < STRIP; r++) ((bf16 *)parts[3])[r * 2 * words + d] = 0;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t i = first; i < last; i += STRIP)
            attend_strip(a, &part, last - i < STRIP ? (int)(last - i) : STRIP, i, head, parts[3], (float *)parts[4],
                         (bf16 *)parts[5], padded);
    return DONE;
}

/* qkv [tokens, (heads + 2 * kv_heads) * d] -> out [tokens, heads * d]; texts begin and end at starts [n + 1]. A query sees
 * keys of its text at a distance smaller than `window`, or all if that is 0. Tokens behind the last text get zeros. */
int quire_encoder_attention(const void *qkv, void *out, const int32_t *starts, const float *bias, const void *table,
                            const int64_t *positions, const float *q_weight, const float *k_weight, int64_t tokens,
                            int64_t n, int64_t heads, int64_t kv_heads, int64_t d, int64_t rotary, int64_t window,
                            int64_t longest, float scale, float eps, int type) {
    enum { LARGEST = 504 };
    if (n < 0 || heads < 1 || kv_heads < 1 || heads % kv_heads || d < 1 || (table && (rotary < 2 || rotary > d || rotary % 2)))
        return BAD_SIZE;
    Attention a = {qkv, out, bias, table, positions, q_weight, k_weight, heads, kv_heads, d, rotary, window, longest, scale,
                   eps, type};
    int64_t most = 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t length = starts[i + 1] - starts[i];
        if (length < 0 || starts[i + 1] > tokens || (bias && length > longest)) return BAD_SIZE;
        most = length > most ? length : most;
    }
    int64_t ended = n ? starts[n] : 0, chunk = LARGEST;
    memset((char *)out + ended * heads * d * (type ? 2 : 4), 0, (tokens - ended) * heads * d * (type ? 2 : 4));
    int threads = omp_get_max_threads();
    while (chunk > 4 * STRIP && n * kv_heads * ((most + chunk - 1) / chunk) < 4 * threads) chunk = chunk / 2 / STRIP * STRIP;
    int64_t chunks = (most + chunk - 1) / chunk, tasks = n * kv_heads * chunks, at_once = tasks / (16 * threads);
    int status = DONE, pinned = quire_pinned();
#pragma omp parallel if (ended * heads * d > WORTH_THREADS / 4) reduction(| : status)
    {
        quire_stay(pinned);
#pragma omp for schedule(dynamic, at_once < 1 ? 1 : at_once)
        for (int64_t task = 0; task < tasks; task++) {
            int64_t text = task / (kv_heads * chunks), first = task % chunks * chunk;
            int64_t length = starts[text + 1] - starts[text], last = first + chunk < length ? first + chunk : length;
            if (first < last) status |= attend(&a, starts[text], length, task / chunks % kv_heads, first, last);
        }
    }
    return status;
}

#endif
