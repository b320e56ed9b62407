/* The CPU's element-wise kernels and attention over pages. Called through ctypes with raw pointers.
 *
 * Compiled for the machine it runs on, with OpenMP calls left open: they bind to the copy of libgomp that torch has
 * loaded, so that both share one pool of threads. Element types: 0 float32, 1 bfloat16. Every function here has a torch
 * twin in quire/kernels/ or quire/attention/. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define HAVE_BF16_DOT 1
#endif

typedef uint16_t bf16;

static inline float widen(bf16 x) {
    union { uint32_t u; float f; } v = {.u = (uint32_t)x << 16};
    return v.f;
}

static inline bf16 narrow(float x) {
    union { float f; uint32_t u; } v = {.f = x};
    if ((v.u & 0x7fffffff) > 0x7f800000) return (bf16)((v.u >> 16) | 0x40);
    return (bf16)((v.u + 0x7fff + ((v.u >> 16) & 1)) >> 16);
}

static inline float load(const void *p, int64_t i, int type) {
    return type ? widen(((const bf16 *)p)[i]) : ((const float *)p)[i];
}

static inline void store(void *p, int64_t i, float x, int type) {
    if (type) ((bf16 *)p)[i] = narrow(x);
    else ((float *)p)[i] = x;
}

static inline int width_of(int type) { return type ? 2 : 4; }

/* Below this many elements threads cost more than they gain. */
#define WORTH_THREADS 16384

/* Rows of x [n, d], with residual added first where there is one: the sum, rounded, is written over the residual. */
#define RMS_NORM(NAME, T, TO, FROM)                                                                                    \
    static void NAME(const T *x, T *residual, const T *weight, T *out, int64_t n, int64_t d, float eps) {              \
        _Pragma("omp parallel for if (n * d > WORTH_THREADS)") for (int64_t i = 0; i < n; i++) {                       \
            const T *a = x + i * d;                                                                                    \
            T *o = out + i * d;                                                                                        \
            if (residual) {                                                                                            \
                T *r = residual + i * d;                                                                               \
                for (int64_t j = 0; j < d; j++) r[j] = FROM(TO(a[j]) + TO(r[j]));                                      \
                a = r;                                                                                                 \
            }                                                                                                          \
            float sum = 0;                                                                                             \
            _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < d; j++) sum += TO(a[j]) * TO(a[j]);         \
            float scale = 1.0f / sqrtf(sum / d + eps);                                                                 \
            for (int64_t j = 0; j < d; j++) o[j] = FROM(TO(a[j]) * scale * TO(weight[j]));                             \
        }                                                                                                              \
    }
#define SAME(x) (x)
RMS_NORM(rms_norm_f32, float, SAME, SAME)
RMS_NORM(rms_norm_bf16, bf16, widen, narrow)

void quire_rms_norm(const void *x, void *residual, const void *weight, void *out, int64_t n, int64_t d, float eps,
                    int type) {
    if (type) rms_norm_bf16(x, residual, weight, out, n, d, eps);
    else rms_norm_f32(x, residual, weight, out, n, d, eps);
}

/* [n, 2 * d], gate before up -> [n, d]. expf stays scalar in gcc without fast math; this one vectorizes. */
static inline float exp_fast(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float t = x * 1.4426950408889634f;
    float whole = nearbyintf(t);
    float r = (x - whole * 0.693145751953125f) - whole * 1.428606765330187e-06f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } two = {.i = ((int32_t)whole + 127) << 23};
    return p * two.f;
}

#define SILU_MUL(NAME, T, TO, FROM)                                                                                    \
    static void NAME(const T *x, T *out, int64_t n, int64_t d) {                                                       \
        _Pragma("omp parallel for if (n * d > WORTH_THREADS)") for (int64_t i = 0; i < n; i++) {                       \
            const T *gate = x + 2 * i * d, *up = gate + d;                                                             \
            T *o = out + i * d;                                                                                        \
            for (int64_t j = 0; j < d; j++) {                                                                          \
                float g = TO(gate[j]);                                                                                 \
                o[j] = FROM(g / (1.0f + exp_fast(-g)) * TO(up[j]));                                                    \
            }                                                                                                          \
        }                                                                                                              \
    }
SILU_MUL(silu_mul_f32, float, SAME, SAME)
SILU_MUL(silu_mul_bf16, bf16, widen, narrow)

void quire_silu_mul(const void *x, void *out, int64_t n, int64_t d, int type) {
    if (type) silu_mul_bf16(x, out, n, d);
    else silu_mul_f32(x, out, n, d);
}

/* qkv [n, (heads + 2 * kv_heads) * d] -> q [n, heads, d] normed and rotated, keys and values in their pages.
 * norms: weights of queries, then of keys, or NULL; table [positions, r]: cosines of r / 2 angles, then sines, or NULL. */
void quire_rope_and_write(const void *qkv, void *q, void *cache, const void *q_weight, const void *k_weight, float eps,
                          const void *table, const int64_t *positions, const int64_t *slots, int64_t n, int64_t heads,
                          int64_t kv_heads, int64_t d, int64_t r, int64_t block_size, int type) {
    int64_t all = heads + 2 * kv_heads;
#pragma omp parallel for if (n * all * d > WORTH_THREADS)
    for (int64_t i = 0; i < n; i++) {
        float x[1024];
        for (int64_t h = 0; h < all; h++) {
            int64_t from = (i * all + h) * d;
            int is_v = h >= heads + kv_heads, is_q = h < heads;
            for (int64_t j = 0; j < d; j++) x[j] = load(qkv, from + j, type);
            if (q_weight && !is_v) {
                const void *weight = is_q ? q_weight : k_weight;
                float sum = 0;
                for (int64_t j = 0; j < d; j++) sum += x[j] * x[j];
                float scale = 1.0f / sqrtf(sum / d + eps);
                for (int64_t j = 0; j < d; j++) x[j] *= scale * load(weight, j, type);
            }
            if (table && !is_v) {
                int64_t half = r / 2, at = positions[i] * r;
                for (int64_t j = 0; j < half; j++) {
                    float c = load(table, at + j, type), s = load(table, at + half + j, type);
                    float a = x[j], b = x[half + j];
                    x[j] = a * c - b * s;
                    x[half + j] = b * c + a * s;
                }
            }
            if (is_q) {
                int64_t to = (i * heads + h) * d;
                for (int64_t j = 0; j < d; j++) store(q, to + j, x[j], type);
            } else {
                int64_t head = is_v ? h - heads - kv_heads : h - heads;
                int64_t page = (slots[i] / block_size * 2 + is_v) * kv_heads + head;
                int64_t to = (page * block_size + slots[i] % block_size) * d;
                for (int64_t j = 0; j < d; j++) store(cache, to + j, x[j], type);
            }
        }
    }
}

/* Attention: a task is a block of queries of one row and one KV head, with all query heads of its group. */

enum { MAX_M = 64, TILE = 64, MAX_D = 256 };

typedef struct {
    const void *q, *cache;
    void *out;
    const int32_t *pages; /* of the row */
    int64_t heads, kv_heads, d, block_size, kv_head, first_token, num_queries, position, window;
    float scale;
    int type;
} Task;

static inline int64_t key_place(const Task *t, int64_t key, int kind) {
    int64_t page = ((int64_t)t->pages[key / t->block_size] * 2 + kind) * t->kv_heads + t->kv_head;
    return (page * t->block_size + key % t->block_size) * t->d;
}

/* Scores [m][TILE] of a tile -> weights in place; greatest, sum and what is accumulated so far are brought up to date. */
static void soften(const Task *t, float *scores, int64_t tile, int64_t count, int64_t group, int64_t m, float *most,
                   float *total, float *acc) {
    for (int64_t i = 0; i < m; i++) {
        float *s = scores + i * TILE;
        int64_t position = t->position + i / group;
        int64_t last = position - tile + 1 < count ? position - tile + 1 : count; /* keys seen: [first, last) */
        int64_t first = t->window > 0 ? position - t->window + 1 - tile : 0;
        if (first < 0) first = 0;
        if (last < first) last = first;
        float greatest = most[i];
        for (int64_t j = first; j < last; j++) {
            s[j] *= t->scale;
            greatest = s[j] > greatest ? s[j] : greatest;
        }
        for (int64_t j = 0; j < first && j < TILE; j++) s[j] = 0;
        for (int64_t j = last < 0 ? 0 : last; j < TILE; j++) s[j] = 0;
        if (last <= first) continue;
        float sum = 0;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t j = first; j < last; j++) {
            s[j] = exp_fast(s[j] - greatest);
            sum += s[j];
        }
        if (greatest > most[i]) {
            float shrink = most[i] == -INFINITY ? 0.0f : exp_fast(most[i] - greatest);
            total[i] *= shrink;
            for (int64_t j = 0; j < t->d; j++) acc[i * t->d + j] *= shrink;
            most[i] = greatest;
        }
        total[i] += sum;
    }
}

static void attend_plain(const Task *t, int64_t group, int64_t m, float *scores, float *acc, float *most, float *total,
                         int64_t begin, int64_t end) {
    float q[MAX_D], k[MAX_D];
    for (int64_t tile = begin; tile < end; tile += TILE) {
        int64_t count = end - tile < TILE ? end - tile : TILE;
        for (int64_t j = 0; j < count; j++) {
            int64_t at = key_place(t, tile + j, 0);
            for (int64_t e = 0; e < t->d; e++) k[e] = load(t->cache, at + e, t->type);
            for (int64_t i = 0; i < m; i++) {
                int64_t from = ((t->first_token + i / group) * t->heads + t->kv_head * group + i % group) * t->d;
                float sum = 0;
                for (int64_t e = 0; e < t->d; e++) q[e] = load(t->q, from + e, t->type);
                _Pragma("omp simd reduction(+ : sum)") for (int64_t e = 0; e < t->d; e++) sum += q[e] * k[e];
                scores[i * TILE + j] = sum;
            }
        }
        soften(t, scores, tile, count, group, m, most, total, acc);
        for (int64_t j = 0; j < count; j++) {
            int64_t at = key_place(t, tile + j, 1);
            for (int64_t e = 0; e < t->d; e++) k[e] = load(t->cache, at + e, t->type);
            for (int64_t i = 0; i < m; i++) {
                float w = scores[i * TILE + j];
                for (int64_t e = 0; e < t->d; e++) acc[i * t->d + e] += w * k[e];
            }
        }
    }
}

#ifdef HAVE_BF16_DOT

/* 16 rows of 16 dwords become 16 columns. */
static inline void transpose16(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* bf16 with d a multiple of 32. Keys are packed [d / 2][TILE] pairs of elements, values [TILE / 2][d] pairs of keys, so
 * that one instruction multiplies 16 outputs by a pair. Rows come in fours; those past m are zero. */
static void attend_bf16(const Task *t, int64_t group, int64_t m, float *scores, float *acc, float *most, float *total,
                        int64_t begin, int64_t end) {
    int64_t d = t->d, m4 = (m + 3) / 4 * 4;
    static const bf16 zeros[MAX_D];
    const bf16 *cache = t->cache;
    bf16 q[MAX_M * MAX_D] __attribute__((aligned(64)));
    int32_t keys[MAX_D / 2 * TILE] __attribute__((aligned(64)));
    bf16 values[TILE * MAX_D] __attribute__((aligned(64)));
    bf16 weights[MAX_M * TILE] __attribute__((aligned(64)));
    for (int64_t i = 0; i < m4; i++) {
        int64_t from = ((t->first_token + i / group) * t->heads + t->kv_head * group + i % group) * d;
        memcpy(q + i * d, i < m ? (const bf16 *)t->q + from : zeros, d * 2);
    }
    const int32_t *q_pairs = (const int32_t *)q;
    __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                   4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t tile = begin; tile < end; tile += TILE) {
        int64_t count = end - tile < TILE ? end - tile : TILE;
        int64_t blocks = (count + 15) / 16;
        const bf16 *rows[TILE];
        for (int64_t j = 0; j < blocks * 16; j++) rows[j] = j < count ? cache + key_place(t, tile + j, 0) : zeros;
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t e = 0; e < d / 2; e += 16) {
                __m512i r[16];
                for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_si512((const int32_t *)rows[b * 16 + j] + e);
                transpose16(r);
                for (int j = 0; j < 16; j++) _mm512_store_si512(keys + (e + j) * TILE + b * 16, r[j]);
            }
        for (int64_t i = 0; i < m4; i += 4)
            for (int64_t b = 0; b < blocks; b += 2) {
                __m512 s[4][2];
                for (int a = 0; a < 4; a++) s[a][0] = s[a][1] = _mm512_setzero_ps();
                for (int64_t e = 0; e < d / 2; e++) {
                    __m512bh k0 = (__m512bh)_mm512_load_si512(keys + e * TILE + b * 16);
                    __m512bh k1 = (__m512bh)_mm512_load_si512(keys + e * TILE + b * 16 + 16);
                    for (int a = 0; a < 4; a++) {
                        __m512bh x = (__m512bh)_mm512_set1_epi32(q_pairs[(i + a) * (d / 2) + e]);
                        s[a][0] = _mm512_dpbf16_ps(s[a][0], x, k0);
                        s[a][1] = _mm512_dpbf16_ps(s[a][1], x, k1);
                    }
                }
                for (int a = 0; a < 4; a++) {
                    _mm512_storeu_ps(scores + (i + a) * TILE + b * 16, s[a][0]);
                    _mm512_storeu_ps(scores + (i + a) * TILE + b * 16 + 16, s[a][1]);
                }
            }
        soften(t, scores, tile, count, group, m, most, total, acc);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < TILE; j += 16) {
                __m256bh w = _mm512_cvtneps_pbh(_mm512_loadu_ps(scores + i * TILE + j));
                _mm256_store_si256((__m256i *)(weights + i * TILE + j), (__m256i)w);
            }
        for (int64_t i = m; i < m4; i++) memset(weights + i * TILE, 0, TILE * 2);
        int64_t pairs = (count + 1) / 2;
        for (int64_t j = 0; j < pairs; j++) {
            const bf16 *a = cache + key_place(t, tile + 2 * j, 1);
            const bf16 *b = 2 * j + 1 < count ? cache + key_place(t, tile + 2 * j + 1, 1) : zeros;
            for (int64_t e = 0; e < d; e += 32) {
                __m512i x = _mm512_loadu_si512(a + e), y = _mm512_loadu_si512(b + e);
                _mm512_store_si512(values + (j * d + e) * 2, _mm512_permutex2var_epi16(x, low, y));
                _mm512_store_si512(values + (j * d + e + 16) * 2, _mm512_permutex2var_epi16(x, high, y));
            }
        }
        const int32_t *w_pairs = (const int32_t *)weights;
        for (int64_t i = 0; i < m4; i += 4)
            for (int64_t e = 0; e < d; e += 32) {
                __m512 o[4][2];
                for (int a = 0; a < 4; a++) {
                    o[a][0] = _mm512_loadu_ps(acc + (i + a) * d + e);
                    o[a][1] = _mm512_loadu_ps(acc + (i + a) * d + e + 16);
                }
                for (int64_t j = 0; j < pairs; j++) {
                    __m512bh v0 = (__m512bh)_mm512_load_si512(values + (j * d + e) * 2);
                    __m512bh v1 = (__m512bh)_mm512_load_si512(values + (j * d + e + 16) * 2);
                    for (int a = 0; a < 4; a++) {
                        __m512bh w = (__m512bh)_mm512_set1_epi32(w_pairs[(i + a) * (TILE / 2) + j]);
                        o[a][0] = _mm512_dpbf16_ps(o[a][0], w, v0);
                        o[a][1] = _mm512_dpbf16_ps(o[a][1], w, v1);
                    }
                }
                for (int a = 0; a < 4; a++) {
                    _mm512_storeu_ps(acc + (i + a) * d + e, o[a][0]);
                    _mm512_storeu_ps(acc + (i + a) * d + e + 16, o[a][1]);
                }
            }
    }
}
#endif

static void attend(const Task *t) {
    float scores[MAX_M * TILE] __attribute__((aligned(64)));
    float acc[MAX_M * MAX_D] __attribute__((aligned(64)));
    float most[MAX_M], total[MAX_M];
    int64_t group = t->heads / t->kv_heads, m = t->num_queries * group;
    for (int64_t i = 0; i < m; i++) most[i] = -INFINITY, total[i] = 0;
    memset(acc, 0, sizeof(float) * ((m + 3) / 4 * 4) * t->d);
    int64_t end = t->position + t->num_queries;
    int64_t begin = t->window > 0 && t->position - t->window + 1 > 0 ? t->position - t->window + 1 : 0;
#ifdef HAVE_BF16_DOT
    if (t->type == 1 && t->d % 32 == 0) attend_bf16(t, group, m, scores, acc, most, total, begin, end);
    else
#endif
        attend_plain(t, group, m, scores, acc, most, total, begin, end);
    for (int64_t i = 0; i < m; i++) {
        int64_t to = ((t->first_token + i / group) * t->heads + t->kv_head * group + i % group) * t->d;
        float scale = total[i] > 0 ? 1.0f / total[i] : 0.0f;
        for (int64_t e = 0; e < t->d; e++) store(t->out, to + e, acc[i * t->d + e] * scale, t->type);
    }
}

int quire_attention_fits(int64_t heads, int64_t kv_heads, int64_t d) {
    return heads / kv_heads <= MAX_M && d <= MAX_D;
}

/* q, out [tokens, heads, d]; rows [n] of table; query_start [n + 1]; seq_lens [n]; window 0: none. */
void quire_attention(const void *q, void *out, const void *cache, const int64_t *rows, const int32_t *query_start,
                     const int32_t *seq_lens, const int32_t *table, int64_t table_stride, int64_t n, int64_t heads,
                     int64_t kv_heads, int64_t d, int64_t block_size, int64_t window, float scale, int type) {
    int64_t group = heads / kv_heads, most = MAX_M / group, tasks = 0;
    for (int64_t i = 0; i < n; i++) tasks += (query_start[i + 1] - query_start[i] + most - 1) / most * kv_heads;
    if (!tasks) return;
    Task *all = malloc(sizeof(Task) * tasks);
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t count = query_start[i + 1] - query_start[i];
        for (int64_t first = 0; first < count; first += most)
            for (int64_t h = 0; h < kv_heads; h++)
                all[at++] = (Task){
                    .q = q, .cache = cache, .out = out, .pages = table + rows[i] * table_stride, .heads = heads,
                    .kv_heads = kv_heads, .d = d, .block_size = block_size, .kv_head = h,
                    .first_token = query_start[i] + first,
                    .num_queries = count - first < most ? count - first : most,
                    .position = seq_lens[i] - count + first, .window = window, .scale = scale, .type = type};
    }
#pragma omp parallel for schedule(dynamic, 1) if (tasks > 1)
    for (int64_t i = tasks - 1; i >= 0; i--) attend(all + i);
    free(all);
}

/* Linear layers in bf16. A weight [n, k] is packed into panels of 32 outputs, [panel][k / 2][32] pairs of inputs: one
 * instruction multiplies a pair of inputs by 16 outputs, and a panel is read from end to end. */

enum { PANEL = 32, ROWS = 12 };

int quire_has_linear(void) {
#ifdef HAVE_BF16_DOT
    return 1;
#else
    return 0;
#endif
}

void quire_pack_linear(const bf16 *weight, bf16 *packed, int64_t n, int64_t k) {
    int64_t pairs = (k + 1) / 2, panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (int64_t p = 0; p < panels; p++)
        for (int64_t e = 0; e < pairs; e++)
            for (int64_t j = 0; j < PANEL; j++) {
                bf16 *to = packed + ((p * pairs + e) * PANEL + j) * 2;
                int64_t row = p * PANEL + j;
                to[0] = row < n ? weight[row * k + 2 * e] : 0;
                to[1] = row < n && 2 * e + 1 < k ? weight[row * k + 2 * e + 1] : 0;
            }
}

#ifdef HAVE_BF16_DOT

static inline __attribute__((always_inline)) void multiply(const int rows, const bf16 *x, const bf16 *panel, float *bias,
                                                           bf16 *out, int64_t k, int64_t n, int64_t width) {
    __m512 a[ROWS], b[ROWS];
    __m512 first = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
    __m512 second = bias ? _mm512_loadu_ps(bias + 16) : _mm512_setzero_ps();
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) a[r] = first, b[r] = second;
    int64_t pairs = k / 2;
    for (int64_t e = 0; e < pairs; e++) {
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + e * PANEL * 2);
        __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + e * PANEL * 2 + 32);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * k + 2 * e, 4);
            __m512bh v = (__m512bh)_mm512_set1_epi32(pair);
            a[r] = _mm512_dpbf16_ps(a[r], w0, v);
            b[r] = _mm512_dpbf16_ps(b[r], w1, v);
        }
    }
    if (k & 1) {
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + pairs * PANEL * 2);
        __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + pairs * PANEL * 2 + 32);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            __m512bh v = (__m512bh)_mm512_set1_epi32(x[r * k + k - 1]);
            a[r] = _mm512_dpbf16_ps(a[r], w0, v);
            b[r] = _mm512_dpbf16_ps(b[r], w1, v);
        }
    }
    __mmask16 low = width >= 16 ? 0xffff : (__mmask16)((1u << width) - 1);
    __mmask16 high = width >= 32 ? 0xffff : width > 16 ? (__mmask16)((1u << (width - 16)) - 1) : 0;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        _mm256_mask_storeu_epi16(out + r * n, low, (__m256i)_mm512_cvtneps_pbh(a[r]));
        _mm256_mask_storeu_epi16(out + r * n + 16, high, (__m256i)_mm512_cvtneps_pbh(b[r]));
    }
}

static void multiply_rows(int rows, const bf16 *x, const bf16 *panel, float *bias, bf16 *out, int64_t k, int64_t n,
                          int64_t width) {
    switch (rows) {
#define CASE(R)                                                                                                        \
    case R: multiply(R, x, panel, bias, out, k, n, width); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}
#endif

/* x [m, k], packed as above, bias [n] or NULL -> out [m, n]. */
void quire_linear(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k) {
#ifdef HAVE_BF16_DOT
    int64_t pairs = (k + 1) / 2, panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) if (n * k > WORTH_THREADS)
    for (int64_t p = 0; p < panels; p++) {
        int64_t at = p * PANEL, width = n - at < PANEL ? n - at : PANEL;
        const bf16 *panel = packed + p * pairs * PANEL * 2;
        float added[PANEL] = {0};
        if (bias)
            for (int64_t j = 0; j < width; j++) added[j] = widen(bias[at + j]);
        for (int64_t i = 0; i < m; i += ROWS)
            multiply_rows(m - i < ROWS ? (int)(m - i) : ROWS, x + i * k, panel, bias ? added : NULL, out + i * n + at, k,
                          n, width);
    }
#endif
}
