/* Attention over pages. A task is a block of queries of one row and some of its KV heads, each with all query heads of
 * its group: m rows that see the same keys. Keys come in tiles, the softmax is brought up to date after each. */

#include <stdlib.h>
#include <string.h>
#include "elements.h"
#include "threads.h"
#include "tile_products.h"
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define HAVE_BF16_DOT 1
#endif

enum { MAX_M = 192, TILE = KEYS_AT_ONCE, MAX_D = 256 };

typedef struct {
    const void *q, *cache;
    void *out;
    const int32_t *pages; /* of the row */
    int64_t heads, kv_heads, d, block_size, first_head, num_heads, first_token, num_queries, position, window;
    int64_t shared;  /* leading keys that all rows share: attended to for many rows at once, before the rest */
    float *parts;    /* what came of that, [tokens, heads] of d sums, the greatest score and the total; or NULL */
    int makes_parts; /* whether this task is one of those for many rows, each of one query */
    float scale;
    int type, tiles; /* tiles: whether there are AMX's */
} Task;

static inline int64_t key_place(const Task *t, int64_t head, int64_t key, int kind) {
    int64_t page = ((int64_t)t->pages[key / t->block_size] * 2 + kind) * t->kv_heads + head;
    return (page * t->block_size + key % t->block_size) * t->d;
}

static inline int64_t first_key(const Task *t) {
    return t->window > 0 && t->position - t->window + 1 > 0 ? t->position - t->window + 1 : 0;
}

/* The keys [first, last) of a tile that query `position` sees. */
static inline void seen(const Task *t, int64_t position, int64_t tile, int64_t count, int64_t *first, int64_t *last) {
    *last = position - tile + 1 < count ? position - tile + 1 : count;
    *first = t->window > 0 ? position - t->window + 1 - tile : 0;
    if (*first < 0) *first = 0;
    if (*last < *first) *last = *first;
}

/* Scores [m][TILE] of a tile -> weights in place; greatest, sum and what is accumulated so far are brought up to date. */
static void soften(const Task *t, float *scores, int64_t tile, int64_t count, int64_t group, int64_t m, float *most,
                   float *total, float *acc) {
    for (int64_t i = 0; i < m; i++) {
        float *s = scores + i * TILE;
        int64_t first, last;
        seen(t, t->position + i / group, tile, count, &first, &last);
        float greatest = most[i];
        for (int64_t j = first; j < last; j++) {
            s[j] *= t->scale;
            greatest = s[j] > greatest ? s[j] : greatest;
        }
        for (int64_t j = 0; j < first && j < TILE; j++) s[j] = 0;
        for (int64_t j = last; j < TILE; j++) s[j] = 0;
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

/* Where row i of a KV head's queries lies, in q and in out. */
static inline int64_t query_place(const Task *t, int64_t head, int64_t group, int64_t i) {
    return ((t->first_token + i / group) * t->heads + head * group + i % group) * t->d;
}

static void attend_plain(const Task *t, int64_t head, int64_t group, int64_t m, float *scores, float *acc, float *most,
                         float *total, int64_t begin, int64_t end) {
    float q[MAX_D], k[MAX_D];
    for (int64_t tile = begin; tile < end; tile += TILE) {
        int64_t count = end - tile < TILE ? end - tile : TILE;
        for (int64_t j = 0; j < count; j++) {
            int64_t at = key_place(t, head, tile + j, 0);
            for (int64_t e = 0; e < t->d; e++) k[e] = load(t->cache, at + e, t->type);
            for (int64_t i = 0; i < m; i++) {
                int64_t from = query_place(t, head, group, i);
                float sum = 0;
                for (int64_t e = 0; e < t->d; e++) q[e] = load(t->q, from + e, t->type);
                _Pragma("omp simd reduction(+ : sum)") for (int64_t e = 0; e < t->d; e++) sum += q[e] * k[e];
                scores[i * TILE + j] = sum;
            }
        }
        soften(t, scores, tile, count, group, m, most, total, acc);
        for (int64_t j = 0; j < count; j++) {
            int64_t at = key_place(t, head, tile + j, 1);
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

/* exp of x <= 0; -inf gives 0. */
static inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f)); /* below it weights round to nothing */
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

static inline __mmask16 lanes(int64_t first, int64_t last, int64_t at) {
    int64_t from = first - at < 0 ? 0 : first - at > 16 ? 16 : first - at;
    int64_t to = last - at < 0 ? 0 : last - at > 16 ? 16 : last - at;
    return (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1));
}

/* soften(), with the weights in bf16 beside the scores. */
static void soften_bf16(const Task *t, const float *scores, bf16 *weights, int64_t tile, int64_t count, int64_t group,
                        int64_t m, float *most, float *total, float *acc) {
    enum { VECTORS = TILE / 16 };
    __m512 scale = _mm512_set1_ps(t->scale), nothing = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < m; i++) {
        int64_t first, last;
        seen(t, t->position + i / group, tile, count, &first, &last);
        bf16 *to = weights + i * TILE;
        if (last <= first) {
            memset(to, 0, TILE * 2);
            continue;
        }
        __m512 s[VECTORS], greatest = nothing, sum = _mm512_setzero_ps();
        for (int v = 0; v < VECTORS; v++) {
            __mmask16 here = lanes(first, last, v * 16);
            s[v] = _mm512_mask_mul_ps(nothing, here, _mm512_load_ps(scores + i * TILE + v * 16), scale);
            greatest = _mm512_max_ps(greatest, s[v]);
        }
        float before = most[i], now = _mm512_reduce_max_ps(greatest);
        if (!(now > before)) now = before;
        __m512 base = _mm512_set1_ps(now);
        for (int v = 0; v < VECTORS; v++) {
            __m512 w = _mm512_maskz_mov_ps(lanes(first, last, v * 16), exp16(_mm512_sub_ps(s[v], base)));
            sum = _mm512_add_ps(sum, w);
            _mm256_store_si256((__m256i *)(to + v * 16), (__m256i)_mm512_cvtneps_pbh(w));
        }
        if (now > before) {
            float shrink = before == -INFINITY ? 0.0f : exp_fast(before - now);
            total[i] *= shrink;
            __m512 by = _mm512_set1_ps(shrink);
            for (int64_t e = 0; e < t->d; e += 16)
                _mm512_store_ps(acc + i * t->d + e, _mm512_mul_ps(_mm512_load_ps(acc + i * t->d + e), by));
            most[i] = now;
        }
        total[i] += _mm512_reduce_add_ps(sum);
    }
}

/* q [m, d] times keys [d / 2][TILE] pairs of elements -> scores [m, TILE]; m in fours. */
static void score(const bf16 *q, const int32_t *keys, float *scores, int64_t m, int64_t d, int64_t blocks) {
    const int32_t *q_pairs = (const int32_t *)q;
    for (int64_t i = 0; i < m; i += 4)
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
                _mm512_store_ps(scores + (i + a) * TILE + b * 16, s[a][0]);
                _mm512_store_ps(scores + (i + a) * TILE + b * 16 + 16, s[a][1]);
            }
        }
}

/* acc [m, d] += weights [m, TILE] times values [TILE / 2][d] pairs of keys; m in fours. */
static void weigh(const bf16 *weights, const bf16 *values, float *acc, int64_t m, int64_t d, int64_t pairs) {
    const int32_t *w_pairs = (const int32_t *)weights;
    for (int64_t i = 0; i < m; i += 4)
        for (int64_t e = 0; e < d; e += 32) {
            __m512 o[4][2];
            for (int a = 0; a < 4; a++) {
                o[a][0] = _mm512_load_ps(acc + (i + a) * d + e);
                o[a][1] = _mm512_load_ps(acc + (i + a) * d + e + 16);
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
                _mm512_store_ps(acc + (i + a) * d + e, o[a][0]);
                _mm512_store_ps(acc + (i + a) * d + e + 16, o[a][1]);
            }
        }
}

/* bf16 with d a multiple of 32. Keys are packed [d / 2][TILE] pairs of elements, values [TILE / 2][d] pairs of keys, so
 * that one instruction multiplies 16 outputs by a pair, or one tile 16 rows by 16 pairs. Rows past m are zero. */
static void attend_bf16(const Task *t, int64_t group, int64_t m, int64_t all, float *scores, float *acc, float *most,
                        float *total, int64_t begin, int64_t end) {
    int64_t d = t->d, to_values = t->kv_heads * t->block_size * d; /* from a key to its value */
    static const bf16 zeros[MAX_D];
    bf16 q[MAX_M * MAX_D] __attribute__((aligned(64)));
    int32_t keys[MAX_D / 2 * TILE] __attribute__((aligned(64)));
    bf16 values[TILE * MAX_D] __attribute__((aligned(64)));
    bf16 weights[MAX_M * TILE] __attribute__((aligned(64)));
    for (int64_t h = 0; h < t->num_heads; h++)
        for (int64_t i = 0; i < all; i++) {
            const bf16 *from = i < m ? (const bf16 *)t->q + query_place(t, t->first_head + h, group, i) : zeros;
            memcpy(q + (h * all + i) * d, from, d * 2);
        }
    memset(weights + m * TILE, 0, (all - m) * TILE * 2);
    if (t->tiles) quire_tiles_begin();
    __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                   4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t tile = begin; tile < end; tile += TILE)
        for (int64_t h = 0; h < t->num_heads; h++) {
            int64_t count = end - tile < TILE ? end - tile : TILE;
            int64_t blocks = (count + 31) / 32 * 2, pairs = blocks * 8;
            const bf16 *rows[TILE];
            for (int64_t j = 0; j < blocks * 16; j++)
                rows[j] = j < count ? (const bf16 *)t->cache + key_place(t, t->first_head + h, tile + j, 0) : zeros;
            for (int64_t b = 0; b < blocks; b++)
                for (int64_t e = 0; e < d / 2; e += 16) {
                    __m512i r[16];
                    for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_si512((const int32_t *)rows[b * 16 + j] + e);
                    transpose16(r);
                    for (int j = 0; j < 16; j++) _mm512_store_si512(keys + (e + j) * TILE + b * 16, r[j]);
                }
            if (t->tiles) quire_tile_scores(q + h * all * d, keys, scores, all, d, blocks);
            else score(q + h * all * d, keys, scores, all, d, blocks);
            float *sums = acc + h * all * d;
            soften_bf16(t, scores, weights, tile, count, group, m, most + h * all, total + h * all, sums);
            for (int64_t j = 0; j < pairs; j++) {
                const bf16 *a = 2 * j < count ? rows[2 * j] + to_values : zeros;
                const bf16 *b = 2 * j + 1 < count ? rows[2 * j + 1] + to_values : zeros;
                for (int64_t e = 0; e < d; e += 32) {
                    __m512i x = _mm512_loadu_si512(a + e), y = _mm512_loadu_si512(b + e);
                    _mm512_store_si512(values + (j * d + e) * 2, _mm512_permutex2var_epi16(x, low, y));
                    _mm512_store_si512(values + (j * d + e + 16) * 2, _mm512_permutex2var_epi16(x, high, y));
                }
            }
            if (t->tiles) quire_tile_values(weights, values, sums, all, d, blocks / 2);
            else weigh(weights, values, sums, all, d, (count + 1) / 2);
        }
    if (t->tiles) quire_tiles_end();
}
#endif

/* A KV head's rows, padded to what is multiplied at a time. */
static int64_t padded(int64_t m, int tiles) { return tiles ? (m + 15) / 16 * 16 : (m + 3) / 4 * 4; }

static void attend(const Task *t) {
    float scores[MAX_M * TILE] __attribute__((aligned(64)));
    float acc[MAX_M * MAX_D] __attribute__((aligned(64)));
    float most[MAX_M], total[MAX_M];
    int64_t d = t->d, group = t->heads / t->kv_heads, m = t->num_queries * group, all = padded(m, t->tiles);
    for (int64_t i = 0; i < t->num_heads * all; i++) most[i] = -INFINITY, total[i] = 0;
    memset(acc, 0, sizeof(float) * t->num_heads * all * d);
    int64_t begin = first_key(t), end = t->makes_parts ? t->shared : t->position + t->num_queries;
    if (t->parts && !t->makes_parts) {
        begin = t->shared;
        for (int64_t h = 0; h < t->num_heads; h++)
            for (int64_t i = 0; i < m; i++) {
                const float *part = t->parts + query_place(t, t->first_head + h, group, i) / d * (d + 2);
                memcpy(acc + (h * all + i) * d, part, d * 4);
                most[h * all + i] = part[d], total[h * all + i] = part[d + 1];
            }
    }
#ifdef HAVE_BF16_DOT
    if (t->type == 1 && d % 32 == 0) attend_bf16(t, group, m, all, scores, acc, most, total, begin, end);
    else
#endif
        for (int64_t h = 0; h < t->num_heads; h++)
            attend_plain(t, t->first_head + h, group, m, scores, acc + h * all * d, most + h * all, total + h * all,
                         begin, end);
    for (int64_t h = 0; h < t->num_heads; h++)
        for (int64_t i = 0; i < m; i++) {
            int64_t to = query_place(t, t->first_head + h, group, i), row = h * all + i;
            if (t->makes_parts) {
                float *part = t->parts + to / d * (d + 2);
                memcpy(part, acc + row * d, d * 4);
                part[d] = most[row], part[d + 1] = total[row];
                continue;
            }
            float scale = total[row] > 0 ? 1.0f / total[row] : 0.0f;
            for (int64_t e = 0; e < d; e++) store(t->out, to + e, acc[row * d + e] * scale, t->type);
        }
}

int quire_attention_fits(int64_t heads, int64_t kv_heads, int64_t d) {
    return heads / kv_heads <= MAX_M && d <= MAX_D;
}

static void attend_all(const Task *tasks, int64_t count) {
    int pinned = quire_pinned();
#pragma omp parallel for schedule(dynamic, 1) if (count > 1)
    for (int64_t i = count - 1; i >= 0; i--) {
        quire_stay(pinned);
        attend(tasks + i);
    }
}

/* q, out [tokens, heads, d]; rows [n] of table; query_start [n + 1]; seq_lens [n]; window 0: none; shared: leading keys
 * in pages that all rows have, if they are worth a pass of their own: every row has one query then, there is no window,
 * and each has keys beyond them; tiles: whether quire_amx_start found that AMX works. */
void quire_attention(const void *q, void *out, const void *cache, const int64_t *rows, const int32_t *query_start,
                     const int32_t *seq_lens, const int32_t *table, int64_t tokens, int64_t table_stride, int64_t n,
                     int64_t heads, int64_t kv_heads, int64_t d, int64_t block_size, int64_t window, int64_t shared,
                     float scale, int type, int tiles) {
    int64_t rest = (tokens - query_start[n]) * heads * d; /* of nobody's tokens */
    if (rest > 0) memset((char *)out + query_start[n] * heads * d * width_of(type), 0, rest * width_of(type));
    int64_t group = heads / kv_heads, most = MAX_M / group, count = 0;
    /* A page holds the keys and values of all heads: reading them together is reading in order, which memory does three
     * times as fast. So a single query takes all heads at once, if that leaves every thread enough to do. */
    int64_t together = n >= 4 * omp_get_max_threads() && kv_heads * padded(group, tiles) <= MAX_M ? kv_heads : 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t queries = query_start[i + 1] - query_start[i];
        count += queries == 1 ? kv_heads / together : (queries + most - 1) / most * kv_heads;
    }
    if (!count) return;
    Task *tasks = malloc(sizeof(Task) * (count > n * kv_heads ? count : n * kv_heads)), common = {
        .q = q, .cache = cache, .out = out, .heads = heads, .kv_heads = kv_heads, .d = d, .block_size = block_size,
        .window = window, .shared = shared, .scale = scale, .type = type, .tiles = tiles};
    if (shared) {
        common.parts = malloc(sizeof(float) * n * heads * (d + 2));
        int64_t at_once = most > 1 ? most / 2 : 1, made = 0; /* tasks enough for all threads */
        for (int64_t first = 0; first < n; first += at_once)
            for (int64_t h = 0; h < kv_heads; h++) {
                Task *t = tasks + made++;
                *t = common;
                t->pages = table + rows[0] * table_stride, t->makes_parts = 1, t->position = shared;
                t->first_token = first, t->num_queries = n - first < at_once ? n - first : at_once;
                t->first_head = h, t->num_heads = 1;
            }
        attend_all(tasks, made);
    }
    int64_t made = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t queries = query_start[i + 1] - query_start[i], taken = queries == 1 ? together : 1;
        for (int64_t first = 0; first < queries; first += most)
            for (int64_t h = 0; h < kv_heads; h += taken) {
                Task *t = tasks + made++;
                *t = common;
                t->pages = table + rows[i] * table_stride, t->position = seq_lens[i] - queries + first;
                t->first_token = query_start[i] + first, t->num_queries = queries - first < most ? queries - first : most;
                t->first_head = h, t->num_heads = taken;
            }
    }
    attend_all(tasks, made);
    free(common.parts);
    free(tasks);
}
