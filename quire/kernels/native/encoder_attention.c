/* Attention of texts that are computed whole, over a step's own keys, in bf16 and float32. AVX-512 with bf16 instructions;
 * elsewhere torch does it. */

#include "encoder_products.h"

#ifdef HAVE_BF16_VECTORS

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

/* Less than any score, and no infinity: what is subtracted from it must not be NaN. */
#define UNSEEN (-1e30f)

/* A row's scores of `count` keys, a multiple of 16, of which it sees [first, last): scaled and with the bias by key where
 * there is one, UNSEEN elsewhere. */
static inline void hide_unseen(float *scores, int64_t count, int64_t first, int64_t last, float scale, const float *bias) {
    if (bias)
        for (int64_t j = 0; j < count; j += 16) {
            __m512 b = _mm512_maskz_loadu_ps(lanes(first, last, j), bias + j);
            _mm512_storeu_ps(scores + j, _mm512_fmadd_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(scale), b));
        }
    const __m512 unseen = _mm512_set1_ps(UNSEEN);
    for (int64_t j = 0; j < first; j += 16) _mm512_mask_storeu_ps(scores + j, first_lanes(first - j), unseen);
    for (int64_t j = last / 16 * 16; j < count; j += 16)
        _mm512_mask_storeu_ps(scores + j, j < last ? (__mmask16)~first_lanes(last - j) : 0xffff, unseen);
}

/* Scores of some rows, `apart` from one another -> weights not yet divided by their sums; the inverse of these at `inverses`.
 * In bf16 at `narrow`, else in place. */
static void softmax(int rows, float *scores, bf16 *narrow, int64_t apart, int64_t count, float scale, float *inverses) {
    __m512 found[16], factor = _mm512_set1_ps(narrow ? scale * 1.4426950408889634f : scale);
    float tops[16];
    for (int r = 0; r < 16; r++) found[r] = _mm512_setzero_ps();
    for (int r = 0; r < rows; r++) {
        found[r] = _mm512_loadu_ps(scores + r * apart);
        for (int64_t j = 16; j < count; j += 16) found[r] = _mm512_max_ps(found[r], _mm512_loadu_ps(scores + r * apart + j));
    }
    _mm512_storeu_ps(tops, _mm512_mul_ps(greatest_of(found), factor));
    for (int r = 0; r < rows; r++) {
        __m512 top = _mm512_set1_ps(tops[r]), sum = _mm512_setzero_ps();
        float *row = scores + r * apart;
        for (int64_t j = 0; j < count; j += 16) {
            __m512 s = _mm512_fmsub_ps(_mm512_loadu_ps(row + j), factor, top), e = narrow ? exp2_16(s) : exp16(s);
            sum = _mm512_add_ps(sum, e);
            if (narrow) store16(narrow + r * apart + j, 0xffff, e);
            else _mm512_storeu_ps(row + j, e);
        }
        found[r] = sum;
    }
    _mm512_storeu_ps(inverses, _mm512_div_ps(_mm512_set1_ps(1.0f), sums_of(found)));
}

/* A text's part for one KV head: its keys from `base` on, `keys` of them. */
typedef struct {
    const void *packed_keys, *values; /* in float32 values lie where they were */
    int64_t first_token, base, keys, length;
} Part;

INLINE void scores_strip(const int rows, const Attention *a, const Part *t, const void *q, int64_t stride, int64_t from,
                         int64_t to, float *scores, int64_t apart) {
    int64_t words = a->type ? (a->d + 1) / 2 : a->d;
    for (int64_t p = from; p < to; p += PANEL) {
        __m512 sums[2 * STRIP], zero = _mm512_setzero_ps();
        start(rows, sums, zero, zero);
        const int32_t *panel = (const int32_t *)t->packed_keys + p * words;
        if (a->type) multiply_bf16(rows, q, stride, (const bf16 *)panel, words, sums, (const char *)panel);
        else multiply_f32(rows, q, stride, (const float *)panel, PANEL, words, 0xffff, 0xffff, sums,
                           (const char *)panel);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            _mm512_storeu_ps(scores + r * apart + p - from, sums[2 * r]);
            _mm512_storeu_ps(scores + r * apart + p - from + 16, sums[2 * r + 1]);
        }
    }
}

INLINE void values_strip(const int rows, const Attention *a, const Part *t, const void *weights, int64_t apart,
                         int64_t from, int64_t to, const float *inverses, int64_t token, int64_t head) {
    int64_t pairs = (t->keys + PANEL - 1) / PANEL * PANEL / 2, width = (a->heads + 2 * a->kv_heads) * a->d;
    for (int64_t j = 0; j < a->d; j += PANEL) {
        __mmask16 low = first_lanes(a->d - j), high = a->d - j > 16 ? first_lanes(a->d - j - 16) : 0;
        __m512 sums[2 * STRIP], zero = _mm512_setzero_ps();
        start(rows, sums, zero, zero);
        if (a->type)
            multiply_bf16(rows, weights, apart, (const bf16 *)t->values + (j * pairs + from * PANEL / 2) * 2, (to - from) / 2,
                          sums, weights);
        else {
            int64_t last = to < t->keys ? to : t->keys;
            multiply_f32(rows, weights, apart, (const float *)t->values + from * width + j, width, last - from, low, high,
                         sums, weights);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            __m512 by = _mm512_set1_ps(inverses[r]);
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
    int64_t words = a->type ? (a->d + 1) / 2 : a->d, token = t->first_token + query, size = a->type ? 2 : 4;
    int64_t width = (a->heads + 2 * a->kv_heads) * a->d, stride = words * 4 / size;
    const void *queries = q;
    if (a->table || a->q_weight || (a->type && a->d % 2))
        for (int r = 0; r < rows; r++) prepare_head(a, token + r, head, a->q_weight, (int32_t *)q + r * words);
    else {
        queries = (const char *)a->qkv + (token * width + head * a->d) * size;
        stride = width;
    }
    /* Keys that some of the rows see, counted from `base`. */
    int64_t from = 0, to = t->keys;
    if (a->window) {
        from = query - a->window + 1 - t->base;
        to = query + rows - 1 + a->window - t->base;
    }
    from = from < 0 ? 0 : from / PANEL * PANEL;
    to = to < t->keys ? to : t->keys;
    int64_t count = (to - from + PANEL - 1) / PANEL * PANEL;
    FOR_ROWS(rows, scores_strip(R, a, t, queries, stride, from, from + count, scores, apart))
    for (int r = 0; r < rows; r++) {
        int64_t first = 0, last = to - from, at = query + r - t->base - from;
        if (a->window) {
            first = at - a->window + 1 < 0 ? 0 : at - a->window + 1;
            last = at + a->window < last ? at + a->window : last;
        }
        const float *bias = a->bias ? a->bias + head * (2 * a->longest - 1) + a->longest - 1 - at : 0;
        hide_unseen(scores + r * apart, count, first, last, a->scale, bias);
    }
    float inverses[16];
    softmax(rows, scores, a->type ? narrow : 0, apart, count, a->bias ? 1.0f : a->scale, inverses);
    const void *weights = a->type ? (const void *)narrow : (const void *)scores;
    FOR_ROWS(rows, values_strip(R, a, t, weights, apart, from, from + count, inverses, token, head))
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
        for (int64_t s = 0, strips = (last - first + STRIP - 1) / STRIP; s < strips; s++) {
            int64_t i = first + (last - first) * s / strips, rows = first + (last - first) * (s + 1) / strips - i;
            attend_strip(a, &part, (int)rows, i, head, parts[3], (float *)parts[4], (bf16 *)parts[5], padded);
        }
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
