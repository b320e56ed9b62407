/* What attention in bf16 computes on a tile of keys and values, 16 numbers at a time: scores, their softmax, and the sums
 * of values. attention_task.h knows where keys are and who sees them. */

#pragma once
#include "elements.h"
#include "tile_products.h"
#include "vectors.h"

/* FEW: up to as many queries are multiplied with keys and values as they lie in the cache; ROWS: of more, as many at a time
 * have scores that stay in the nearest cache. */
enum { TILE = KEYS_AT_ONCE, FEW = 4, ROWS = 64 };

#ifdef HAVE_BF16_VECTORS

/* Elements of two rows in turns: the first 16 of each. */
#define PAIRS_LOW                                                                                                      \
    _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3,  \
                     34, 2, 33, 1, 32, 0)

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

static inline __mmask16 lanes(int64_t first, int64_t last, int64_t at) {
    int64_t from = first - at < 0 ? 0 : first - at > 16 ? 16 : first - at;
    int64_t to = last - at < 0 ? 0 : last - at > 16 ? 16 : last - at;
    return (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1));
}

/* Of 16 vectors of 16 numbers, the sum of each, or the greatest, in one lane. */
#define OF_EACH(NAME, WITH)                                                                                            \
    static inline __m512 NAME(const __m512 *x) {                                                                       \
        __m512 a[8], b[4], c[2];                                                                                       \
        for (int i = 0; i < 8; i++) a[i] = WITH(_mm512_unpacklo_ps(x[i], x[i + 8]), _mm512_unpackhi_ps(x[i], x[i + 8]));\
        for (int i = 0; i < 4; i++) b[i] = WITH(_mm512_unpacklo_ps(a[i], a[i + 4]), _mm512_unpackhi_ps(a[i], a[i + 4]));\
        for (int i = 0; i < 2; i++)                                                                                    \
            c[i] = WITH(_mm512_shuffle_f32x4(b[i], b[i + 2], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 2], 0xdd));       \
        __m512 s = WITH(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));               \
        /* In order of x: 0 4 8 12, 2 6 10 14, 1 5 9 13, 3 7 11 15. */                                                 \
        return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15), s);      \
    }
OF_EACH(sums_of, _mm512_add_ps)
OF_EACH(greatest_of, _mm512_max_ps)

/* The sum of 16 numbers, added in the order of sums_of(). */
static inline float sum_of(__m512 x) {
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return _mm512_cvtss_f32(x);
}

static const float LOG2E = 1.4426950408889634f;

/* soften() of one row, with the weights in bf16 beside the scores. whole: it sees every key of the tile. To the bit what
 * soften_rows() makes of it. */
static inline __attribute__((always_inline)) void soften_row(const float *scores, bf16 *to, float scale, int64_t d,
                                                             int64_t first, int64_t last, int whole, float *most,
                                                             float *total, float *acc) {
    enum { VECTORS = TILE / 16 };
    __m512 s[VECTORS], by = _mm512_set1_ps(scale * LOG2E), nothing = _mm512_set1_ps(-INFINITY);
    __mmask16 here[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        here[v] = whole ? 0xffff : lanes(first, last, v * 16);
        s[v] = _mm512_mask_load_ps(nothing, here[v], scores + v * 16);
    }
    __m512 greatest = s[0], sum = _mm512_setzero_ps();
    for (int v = 1; v < VECTORS; v++) greatest = _mm512_max_ps(greatest, s[v]);
    float before = *most, now = _mm512_reduce_max_ps(greatest) * scale;
    if (!(now > before)) now = before;
    __m512 base = _mm512_set1_ps(now * LOG2E), shrink = exp16(_mm512_set1_ps(before - now));
    for (int v = 0; v < VECTORS; v += 2) {
        __m512 a = _mm512_maskz_mov_ps(here[v], exp2_16(_mm512_fmsub_ps(s[v], by, base)));
        __m512 b = _mm512_maskz_mov_ps(here[v + 1], exp2_16(_mm512_fmsub_ps(s[v + 1], by, base)));
        sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
        _mm512_store_si512(to + v * 16, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    *total = _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(*total), _mm512_castps512_ps128(shrink), _mm_set_ss(sum_of(sum))));
    if (now > before) {
        for (int64_t e = 0; e < d; e += 16) _mm512_store_ps(acc + e, _mm512_mul_ps(_mm512_load_ps(acc + e), shrink));
        *most = now;
    }
}

/* soften_row() of 16 rows that see the whole tile: what is one number for each is one vector for all. */
static void soften_rows(const float *scores, bf16 *to, float scale, int64_t d, float *most, float *total, float *acc) {
    enum { VECTORS = TILE / 16 };
    float bases[16] __attribute__((aligned(64))), shrinks[16] __attribute__((aligned(64)));
    __m512 part[16], by = _mm512_set1_ps(scale * LOG2E);
    for (int r = 0; r < 16; r++) {
        part[r] = _mm512_load_ps(scores + r * TILE);
        for (int v = 1; v < VECTORS; v++) part[r] = _mm512_max_ps(part[r], _mm512_load_ps(scores + r * TILE + v * 16));
    }
    __m512 before = _mm512_loadu_ps(most);
    __m512 now = _mm512_max_ps(_mm512_mul_ps(greatest_of(part), _mm512_set1_ps(scale)), before);
    __m512 shrink = exp16(_mm512_sub_ps(before, now));
    __mmask16 grew = _mm512_cmp_ps_mask(now, before, _CMP_NEQ_UQ);
    _mm512_storeu_ps(most, now);
    _mm512_store_ps(shrinks, shrink);
    _mm512_store_ps(bases, _mm512_mul_ps(now, _mm512_set1_ps(LOG2E)));
    for (int r = 0; r < 16; r++) {
        __m512 base = _mm512_set1_ps(bases[r]);
        part[r] = _mm512_setzero_ps();
        for (int v = 0; v < VECTORS; v += 2) {
            __m512 a = exp2_16(_mm512_fmsub_ps(_mm512_load_ps(scores + r * TILE + v * 16), by, base));
            __m512 b = exp2_16(_mm512_fmsub_ps(_mm512_load_ps(scores + r * TILE + v * 16 + 16), by, base));
            part[r] = _mm512_add_ps(part[r], _mm512_add_ps(a, b));
            _mm512_store_si512(to + r * TILE + v * 16, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
    }
    _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), shrink, sums_of(part)));
    for (; grew; grew &= grew - 1) {
        int r = __builtin_ctz(grew);
        __m512 less = _mm512_set1_ps(shrinks[r]);
        for (int64_t e = 0; e < d; e += 16) {
            float *at = acc + r * d + e;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), less));
        }
    }
}

/* Rows that are multiplied at a time: sums enough that none waits for the one before. Fours are what is left. */
enum { STRIP_ROWS = 8 };
#define OF_STRIP static inline __attribute__((always_inline))

OF_STRIP void score_strip(const int rows, const int32_t *q_pairs, const int32_t *keys, float *scores, int64_t d) {
    __m512 s[STRIP_ROWS][2];
#pragma GCC unroll 8
    for (int a = 0; a < rows; a++) s[a][0] = s[a][1] = _mm512_setzero_ps();
    for (int64_t e = 0; e < d / 2; e++) {
        __m512bh k0 = (__m512bh)_mm512_load_si512(keys + e * TILE), k1 = (__m512bh)_mm512_load_si512(keys + e * TILE + 16);
#pragma GCC unroll 8
        for (int a = 0; a < rows; a++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32(q_pairs[a * (d / 2) + e]);
            s[a][0] = _mm512_dpbf16_ps(s[a][0], x, k0);
            s[a][1] = _mm512_dpbf16_ps(s[a][1], x, k1);
        }
    }
#pragma GCC unroll 8
    for (int a = 0; a < rows; a++) {
        _mm512_store_ps(scores + a * TILE, s[a][0]);
        _mm512_store_ps(scores + a * TILE + 16, s[a][1]);
    }
}

/* q [m, d] times keys [d / 2][TILE] pairs of elements -> scores [m, TILE]; m in fours. */
static __attribute__((noinline)) void score(const bf16 *q, const int32_t *keys, float *scores, int64_t m, int64_t d,
                                            int64_t blocks) {
    for (int64_t i = 0; i < m; i += STRIP_ROWS)
        for (int64_t b = 0; b < blocks; b += 2) {
            const int32_t *from = (const int32_t *)(q + i * d);
            float *to = scores + i * TILE + b * 16;
            if (m - i >= STRIP_ROWS) score_strip(STRIP_ROWS, from, keys + b * 16, to, d);
            else score_strip(4, from, keys + b * 16, to, d);
        }
}

OF_STRIP void weigh_strip(const int rows, const int32_t *w_pairs, const bf16 *values, float *acc, int64_t d,
                          int64_t pairs) {
    __m512 o[STRIP_ROWS][2];
#pragma GCC unroll 8
    for (int a = 0; a < rows; a++) o[a][0] = _mm512_load_ps(acc + a * d), o[a][1] = _mm512_load_ps(acc + a * d + 16);
    for (int64_t j = 0; j < pairs; j++) {
        __m512bh v0 = (__m512bh)_mm512_load_si512(values + j * d * 2);
        __m512bh v1 = (__m512bh)_mm512_load_si512(values + j * d * 2 + 32);
#pragma GCC unroll 8
        for (int a = 0; a < rows; a++) {
            __m512bh w = (__m512bh)_mm512_set1_epi32(w_pairs[a * (TILE / 2) + j]);
            o[a][0] = _mm512_dpbf16_ps(o[a][0], w, v0);
            o[a][1] = _mm512_dpbf16_ps(o[a][1], w, v1);
        }
    }
#pragma GCC unroll 8
    for (int a = 0; a < rows; a++) _mm512_store_ps(acc + a * d, o[a][0]), _mm512_store_ps(acc + a * d + 16, o[a][1]);
}

/* acc [m, d] += weights [m, TILE] times values [TILE / 2][d] pairs of keys; m in fours. */
static __attribute__((noinline)) void weigh(const bf16 *weights, const bf16 *values, float *acc, int64_t m, int64_t d,
                                            int64_t pairs) {
    for (int64_t i = 0; i < m; i += STRIP_ROWS)
        for (int64_t e = 0; e < d; e += 32) {
            const int32_t *from = (const int32_t *)(weights + i * TILE);
            if (m - i >= STRIP_ROWS) weigh_strip(STRIP_ROWS, from, values + e * 2, acc + i * d + e, d, pairs);
            else weigh_strip(4, from, values + e * 2, acc + i * d + e, d, pairs);
        }
}

/* What is read next, fetched into the second cache some lines at a time, evenly, while something else is computed. Pages
 * lie anywhere, and no hardware prefetcher can know the next; but it follows addresses that ascend. So lines are fetched
 * in their order in memory, not in that of their use, and of a few places in turns: of four 29 GB/s, of one 24, in the
 * order of use 17. */
enum { MOST_RUNS = 64, PLACES = 4, LINES = 16 / PLACES };

typedef struct {
    const char *at, *end;
} Run;

typedef struct {
    Run runs[MOST_RUNS];
    int count, now[PLACES], last[PLACES]; /* each place is that of some of the runs */
} Coming;

static inline void expect(Coming *c, const char *from, int64_t bytes) {
    Run *next = c->runs + c->count;
    if (c->count && next[-1].end == from) next[-1].end += bytes;
    else if (c->count < MOST_RUNS) *next = (Run){from, from + bytes}, c->count++;
}

static inline void begin_fetching(Coming *c) {
    for (int i = 0; i < PLACES; i++) c->now[i] = c->count * i / PLACES, c->last[i] = c->count * (i + 1) / PLACES;
}

/* The next LINES lines of a place, or of one after it; what is past the end of a run does no harm. */
static inline const char *next_lines(Coming *c, int place) {
    for (int i = 0; i < PLACES; i++, place = (place + 1) % PLACES)
        if (c->now[place] < c->last[place]) {
            Run *run = c->runs + c->now[place];
            const char *lines = run->at;
            if ((run->at += LINES * 64) >= run->end) c->now[place]++;
            return lines;
        }
    return (const char *)c;
}

static inline __attribute__((always_inline)) void next_of_each(Coming *c, const char **lines) {
    for (int i = 0; i < PLACES; i++) lines[i] = next_lines(c, i);
}

/* The i-th of LINES * PLACES. */
#define FETCH_LINE(lines, i) __builtin_prefetch((lines)[(i) % PLACES] + (i) / PLACES % LINES * 64, 0, 2)

/* Scores of up to FEW queries with keys as they lie, 16 keys at a time: a key's products are added in the order of score(),
 * to the bit. */
static inline __attribute__((always_inline)) void score_few(const bf16 *q, const bf16 **rows, float *scores,
                                                            int64_t m, int64_t d, int64_t count, Coming *coming) {
    const int32_t *q_pairs = (const int32_t *)q;
    for (int64_t at = 0; at < count; at += 16) {
        __m512 sums[FEW];
        for (int i = 0; i < m; i++) sums[i] = _mm512_setzero_ps();
        for (int64_t e = 0; e < d / 2; e += 16) {
            __m512i r[16];
            for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_si512((const int32_t *)rows[at + j] + e);
            transpose16(r);
            const char *lines[PLACES];
            next_of_each(coming, lines);
            for (int j = 0; j < 16; j++) {
                FETCH_LINE(lines, j);
                for (int i = 0; i < m; i++) {
                    __m512bh x = (__m512bh)_mm512_set1_epi32(q_pairs[i * (d / 2) + e + j]);
                    sums[i] = _mm512_dpbf16_ps(sums[i], x, (__m512bh)r[j]);
                }
            }
        }
        for (int i = 0; i < m; i++) _mm512_store_ps(scores + i * TILE + at, sums[i]);
    }
}

/* acc [m, d] += weights [m, TILE] times values as they lie, two keys at a time. */
static inline __attribute__((always_inline)) void weigh_few(const bf16 *weights, const bf16 **rows,
                                                            int64_t to_values, float *acc, int64_t m, int64_t d,
                                                            int64_t count, Coming *coming) {
    const __m512i low = PAIRS_LOW, high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int32_t *w_pairs = (const int32_t *)weights;
    for (int64_t e = 0; e < d; e += 32) {
        __m512 o[FEW][2];
        for (int i = 0; i < m; i++) {
            o[i][0] = _mm512_load_ps(acc + i * d + e);
            o[i][1] = _mm512_load_ps(acc + i * d + e + 16);
        }
        const char *lines[PLACES];
        for (int64_t j = 0; j < count; j += 2) {
            if (j % 16 == 0) next_of_each(coming, lines);
            FETCH_LINE(lines, j), FETCH_LINE(lines, j + 1);
            __m512i x = _mm512_loadu_si512(rows[j] + to_values + e), y = _mm512_loadu_si512(rows[j + 1] + to_values + e);
            __m512bh v0 = (__m512bh)_mm512_permutex2var_epi16(x, low, y);
            __m512bh v1 = (__m512bh)_mm512_permutex2var_epi16(x, high, y);
            for (int i = 0; i < m; i++) {
                __m512bh w = (__m512bh)_mm512_set1_epi32(w_pairs[i * (TILE / 2) + j / 2]);
                o[i][0] = _mm512_dpbf16_ps(o[i][0], w, v0);
                o[i][1] = _mm512_dpbf16_ps(o[i][1], w, v1);
            }
        }
        for (int i = 0; i < m; i++) {
            _mm512_store_ps(acc + i * d + e, o[i][0]);
            _mm512_store_ps(acc + i * d + e + 16, o[i][1]);
        }
    }
}

#endif
