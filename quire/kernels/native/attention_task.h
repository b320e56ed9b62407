/* What one task of attention computes. A task is a block of queries of one row and some of its KV heads, each with all
 * query heads of its group: m rows that see the same keys. Keys come in tiles, the softmax is brought up to date after
 * each. attention.c makes the tasks of a step.
 *
 * A query's result has the same bits in whatever step, and beside whatever others, it is computed. So the order of its
 * sums depends on its position alone: tiles begin at multiples of TILE, and keys fall into parts of fixed places. Those of
 * a part are summed in order, then parts are merged in order. A task computes the parts of its queries one after the
 * other; of a single query with many keys each part is a task, and whichever ends last merges all. */

#pragma once
#include <string.h>
#include "attention_vectors.h"

enum { MAX_M = 192, MAX_D = 256 };

typedef struct Task {
    const void *q, *cache;
    void *out;
    const int32_t *pages; /* of the row */
    int64_t heads, kv_heads, d, block_size, first_head, num_heads, first_token, num_queries, position, window;
    int64_t split;      /* how many heads, as they are counted here, share a KV head's keys: its queries are dealt to them */
    int64_t begin, end; /* the keys it attends to, from the beginning of a tile */
    int64_t lowest;     /* the first key that any query sees: those before it in its tile may be nobody's */
    int many_rows;      /* whether its queries are those of as many rows, and its keys those that all rows share */
    /* Results of parts, of each query and head: d sums, the greatest score and the total. NULL: the task computes all
     * parts of its queries. */
    float *partials;           /* of the row's first part; one part's are heads * (d + 2) numbers */
    int64_t query_stride;      /* from a query's partial results to the next one's */
    int64_t part, num_parts;   /* of the row's */
    int resumes;               /* whether it goes on from what the place of its part holds */
    struct Task *first_of_row; /* its `unfinished` counts the row's tasks; NULL: others merge the parts */
    int unfinished;
    float scale, softcap;        /* softcap 0: none */
    const float *slopes, *sinks; /* of each head, or NULL */
    const int32_t *lengths;      /* of each row */
    const float *scales;         /* of a cache in int8, inside its pages of `page` bytes, for each token and head; or NULL */
    int64_t page;
    int type, tiles;             /* tiles: whether there are AMX's */
} Task;

static inline int64_t key_place(const Task *t, int64_t head, int64_t key, int kind) {
    int64_t page = ((int64_t)t->pages[key / t->block_size] * 2 + kind) * t->kv_heads + head / t->split;
    return (page * t->block_size + key % t->block_size) * t->d;
}

/* Of a cache in int8, where a key or value is (kind 1), and its scale. */
static inline const int8_t *find_int8(const Task *t, int64_t head, int64_t key, int kind, float *scale) {
    int64_t block = t->pages[key / t->block_size];
    int64_t place = (kind * t->kv_heads + head / t->split) * t->block_size + key % t->block_size;
    *scale = *(const float *)((const char *)t->scales + block * t->page + place * 4);
    return (const int8_t *)t->cache + block * t->page + place * t->d;
}

/* A key or value in float32. */
static inline void load_vector(const Task *t, int64_t head, int64_t key, int kind, float *x) {
    if (t->scales) {
        float scale;
        const int8_t *from = find_int8(t, head, key, kind, &scale);
        for (int64_t e = 0; e < t->d; e++) x[e] = from[e] * scale;
        return;
    }
    int64_t at = key_place(t, head, key, kind);
    for (int64_t e = 0; e < t->d; e++) x[e] = load(t->cache, at + e, t->type);
}

static inline int64_t first_key(int64_t position, int64_t window) {
    return window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
}

/* A part begins at every 1024th key and, from 32 * 1024 on, at every 32 * 1024th; the last takes the rest. */
enum { PART = 1024, MAX_PARTS = 64 };

static inline int64_t part_of(int64_t key) {
    int64_t part = key < 32 * PART ? key / PART : 31 + key / (32 * PART);
    return part < MAX_PARTS ? part : MAX_PARTS - 1;
}

/* Where the part of a key ends, for one of `keys` keys. */
static inline int64_t part_end(int64_t key, int64_t keys) {
    int64_t next = part_of(key) + 1, end = next < 32 ? next * PART : (next - 31) * 32 * PART;
    return next < MAX_PARTS && end < keys ? end : keys;
}

/* The keys [first, last) of a tile that query `position` sees. */
static inline void seen(const Task *t, int64_t position, int64_t tile, int64_t count, int64_t *first, int64_t *last) {
    *last = position - tile + 1 < count ? position - tile + 1 : count;
    *first = t->window > 0 ? position - t->window + 1 - tile : 0;
    if (*first < 0) *first = 0;
    if (*last < *first) *last = *first;
}

/* How many keys at the beginning of a tile no query sees. */
static inline int64_t unseen(const Task *t, int64_t tile) { return t->lowest > tile ? t->lowest - tile : 0; }

/* Whether queries first to last, counted from the task's first, see every key of a tile. */
static inline int see_all(const Task *t, int64_t first, int64_t last, int64_t tile, int64_t count) {
    if (count < TILE || t->position + first - tile + 1 < TILE) return 0;
    return t->window <= 0 || t->position + last - t->window + 1 <= tile;
}

/* Products of row i with keys [first, last) of a tile -> scores with soft-cap and ALiBi. The softmax only scales those of
 * a layer that has neither, so that they cost it nothing. */
static void bend(const Task *t, float *s, int64_t head, int64_t group, int64_t i, int64_t tile, int64_t first,
                 int64_t last) {
    if (t->softcap > 0) {
        float by = 2.0f * t->scale / t->softcap, cap = t->softcap;
        _Pragma("omp simd") for (int64_t j = first; j < last; j++) {
            float e = exp_fast(-fabsf(s[j] * by)); /* tanh |x| = (1 - exp -2|x|) / (1 + exp -2|x|) */
            s[j] = copysignf(cap * (1.0f - e) / (1.0f + e), s[j]);
        }
    } else {
        for (int64_t j = first; j < last; j++) s[j] *= t->scale;
    }
    if (t->slopes) {
        int64_t query = t->many_rows ? t->lengths[t->first_token + i / group] - 1 : t->position + i / group;
        float slope = t->slopes[head * group + i % group];
        int32_t from = (int32_t)(tile - query);
        for (int32_t j = first; j < last; j++) s[j] += slope * (float)(from + j);
    }
}

static inline int bends(const Task *t) { return t->softcap > 0 || t->slopes; }

/* Scores [m][TILE] of a tile -> weights in place; greatest, sum and what is accumulated so far are brought up to date. */
static void soften(const Task *t, float *scores, int64_t head, int64_t tile, int64_t count, int64_t group, int64_t m,
                   float *most, float *total, float *acc) {
    float scale = bends(t) ? 1.0f : t->scale;
    for (int64_t i = 0; i < m; i++) {
        float *s = scores + i * TILE;
        int64_t first, last;
        seen(t, t->position + i / group, tile, count, &first, &last);
        float greatest = most[i];
        if (bends(t)) bend(t, s, head, group, i, tile, first, last);
        for (int64_t j = first; j < last; j++) {
            s[j] *= scale;
            greatest = s[j] > greatest ? s[j] : greatest;
        }
        if (last <= first) {
            memset(s, 0, TILE * 4);
            continue;
        }
        memset(s, 0, first * 4);
        memset(s + last, 0, (TILE - last) * 4);
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

/* Of one tile. There is one copy of this code, and arrays are aligned: of several copies, or from other addresses on,
 * compilers add the same numbers in another order. */
static __attribute__((noinline)) void attend_tile(const Task *t, int64_t head, int64_t group, int64_t m, int64_t tile,
                                                  float *acc, float *most, float *total) {
    float q[MAX_D] __attribute__((aligned(64))), k[MAX_D] __attribute__((aligned(64)));
    float scores[MAX_M * TILE] __attribute__((aligned(64)));
    int64_t count = t->end - tile < TILE ? t->end - tile : TILE, begin = unseen(t, tile);
    for (int64_t j = begin; j < count; j++) {
        load_vector(t, head, tile + j, 0, k);
        for (int64_t i = 0; i < m; i++) {
            int64_t from = query_place(t, head, group, i);
            float sum = 0;
            for (int64_t e = 0; e < t->d; e++) q[e] = load(t->q, from + e, t->type);
            _Pragma("omp simd reduction(+ : sum)") for (int64_t e = 0; e < t->d; e++) sum += q[e] * k[e];
            scores[i * TILE + j] = sum;
        }
    }
    soften(t, scores, head, tile, count, group, m, most, total, acc);
    for (int64_t j = begin; j < count; j++) {
        load_vector(t, head, tile + j, 1, k);
        for (int64_t i = 0; i < m; i++) {
            float w = scores[i * TILE + j];
            for (int64_t e = 0; e < t->d; e++) acc[i * t->d + e] += w * k[e];
        }
    }
}

#ifdef HAVE_BF16_VECTORS

/* Rows [begin, end) of a KV head, those from m on being padding; scores and weights are theirs alone. */
static void soften_bf16(const Task *t, float *scores, bf16 *weights, int64_t head, int64_t tile, int64_t count,
                        int64_t group, int64_t begin, int64_t end, int64_t m, float *most, float *total, float *acc) {
    float scale = bends(t) ? 1.0f : t->scale;
    for (int64_t i = begin; i < end; i++) {
        if (i + 16 <= end && i + 16 <= m && !bends(t) && see_all(t, i / group, (i + 15) / group, tile, count)) {
            soften_rows(scores + (i - begin) * TILE, weights + (i - begin) * TILE, scale, t->d, most + i, total + i,
                        acc + i * t->d);
            i += 15;
            continue;
        }
        int64_t first = 0, last = 0;
        float *s = scores + (i - begin) * TILE;
        bf16 *to = weights + (i - begin) * TILE;
        if (i < m) seen(t, t->position + i / group, tile, count, &first, &last);
        if (last <= first) {
            memset(to, 0, TILE * 2);
            continue;
        }
        if (bends(t)) bend(t, s, head, group, i, tile, first, last);
        if (last - first == TILE) soften_row(s, to, scale, t->d, 0, TILE, 1, most + i, total + i, acc + i * t->d);
        else soften_row(s, to, scale, t->d, first, last, 0, most + i, total + i, acc + i * t->d);
    }
}

/* Where the keys of a tile are; past the last, the last again, and before the first that is seen, that: they are finite,
 * and get no weight. */
static void find_rows(const Task *t, int64_t head, int64_t tile, int64_t count, const bf16 **rows) {
    int64_t begin = unseen(t, tile), key = tile + begin;
    const int32_t *page = t->pages + key / t->block_size;
    int64_t left = t->block_size - key % t->block_size; /* of a page */
    const bf16 *row = (const bf16 *)t->cache + key_place(t, head, key, 0);
    for (int64_t j = begin; j < count; j++, row += t->d) {
        if (left-- == 0) {
            row = (const bf16 *)t->cache + ((int64_t)*++page * 2 * t->kv_heads + head / t->split) * t->block_size * t->d;
            left = t->block_size - 1;
        }
        rows[j] = row;
    }
    for (int64_t j = 0; j < begin; j++) rows[j] = rows[begin];
    for (int64_t j = count; j < TILE; j++) rows[j] = rows[count - 1];
}

/* Keys [TILE][d] of a tile of a cache in int8, then its values, to `to`; in place of those that nobody sees, others. rows:
 * where the keys are then. */
static __attribute__((noinline)) void unpack_tile(const Task *t, int64_t head, int64_t tile, int64_t count, bf16 *to,
                                                  const bf16 **rows) {
    int64_t begin = unseen(t, tile);
    for (int64_t j = 0; j < TILE; j++) rows[j] = to + (j < begin ? begin : j < count ? j : count - 1) * t->d;
    for (int kind = 0; kind < 2; kind++, to += TILE * t->d)
        for (int64_t j = begin; j < count; j++) {
            float scale;
            const int8_t *from = find_int8(t, head, tile + j, kind, &scale);
            __m512 by = _mm512_set1_ps(scale);
            for (int64_t e = 0; e < t->d; e += 32) {
                __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + e)));
                __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + e + 16)));
                __m512 a = _mm512_mul_ps(_mm512_cvtepi32_ps(low), by), b = _mm512_mul_ps(_mm512_cvtepi32_ps(high), by);
                _mm512_store_si512(to + j * t->d + e, (__m512i)_mm512_cvtne2ps_pbh(b, a));
            }
        }
}

/* What follows the tile: the task's next one, or the first of the task `after`, or nothing. */
static __attribute__((noinline)) void foresee(const Task *t, const Task *after, int64_t tile, Coming *coming) {
    int64_t key = tile + TILE;
    coming->count = 0;
    if (key >= t->end && after) t = after, key = t->begin;
    for (int64_t end = t->end - key < TILE ? t->end : key + TILE, some; key < end; key += some) {
        int64_t of_page = t->block_size - key % t->block_size;
        some = of_page < end - key ? of_page : end - key;
        for (int kind = 0; kind < 2; kind++)
            for (int64_t head = t->first_head; head < t->first_head + t->num_heads; head++) {
                float scale;
                const char *from = t->scales ? (const char *)find_int8(t, head, key, kind, &scale)
                                             : (const char *)t->cache + key_place(t, head, key, kind) * 2;
                expect(coming, from, some * t->d * (t->scales ? 1 : 2));
            }
    }
    begin_fetching(coming);
}

/* after: the task that follows, or NULL. */
static inline __attribute__((always_inline)) void attend_few(const Task *t, const Task *after, int64_t m, int64_t d,
                                                             float *acc, float *most, float *total) {
    int64_t to_values = t->scales ? TILE * d : t->kv_heads * t->block_size * d;
    bf16 unpacked[2 * TILE * MAX_D] __attribute__((aligned(64)));
    bf16 q[FEW * MAX_D] __attribute__((aligned(64))), weights[FEW * TILE] __attribute__((aligned(64)));
    float scores[FEW * TILE] __attribute__((aligned(64)));
    const bf16 *rows[TILE];
    Coming coming = {.count = 0};
    for (int64_t tile = t->begin; tile < t->end; tile += TILE)
        for (int64_t h = 0; h < t->num_heads; h++) {
            int64_t count = t->end - tile < TILE ? t->end - tile : TILE, head = t->first_head + h;
            if (!h) foresee(t, after, tile, &coming);
            if (t->scales) unpack_tile(t, head, tile, count, unpacked, rows);
            else find_rows(t, head, tile, count, rows);
            memcpy(q, (const bf16 *)t->q + query_place(t, head, m, 0), m * d * 2);
            switch (m) { /* each as many registers */
#define CASE(M)                                                                                                        \
    case M: score_few(q, rows, scores, M, d, count, &coming); break;
                CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
            }
            float *sums = acc + h * FEW * d;
            soften_bf16(t, scores, weights, head, tile, count, m, 0, m, m, most + h * FEW, total + h * FEW, sums);
            switch (m) {
#define CASE(M)                                                                                                        \
    case M: weigh_few(weights, rows, to_values, sums, M, d, count, &coming); break;
                CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
            }
        }
}

/* How many keys of a tile, from its first, some rows see: `rows` of them from row i on, or where the tile goes on past what
 * those see, only as many as are multiplied at a time. */
static inline int64_t seen_by_strip(const Task *t, int64_t tile, int64_t count, int64_t group, int64_t i, int64_t rows,
                                    int64_t *strip) {
    int64_t own = t->position - tile + 1;
    *strip = own + i / group >= count || rows < STRIP_ROWS ? rows : STRIP_ROWS;
    int64_t last = own + (i + *strip - 1) / group;
    return last > count ? count : last < 1 ? 1 : last;
}

/* bf16 with d a multiple of 32. Keys are packed [d / 2][TILE] pairs of elements, values [TILE / 2][d] pairs of keys, so
 * that one instruction multiplies 16 outputs by a pair, or one tile 16 rows by 16 pairs. Rows past m are zero. */
static __attribute__((noinline)) void attend_bf16(const Task *t, const Task *after, int64_t group, int64_t m, int64_t all,
                                                  float *acc, float *most, float *total) {
    int64_t begin = t->begin, end = t->end;
    int64_t d = t->d, to_values = t->scales ? TILE * d : t->kv_heads * t->block_size * d; /* from a key to its value */
    static const bf16 zeros[MAX_D];
    bf16 unpacked[2 * TILE * MAX_D] __attribute__((aligned(64)));
    bf16 q[MAX_M * MAX_D] __attribute__((aligned(64)));
    int32_t keys[MAX_D / 2 * TILE] __attribute__((aligned(64)));
    bf16 values[TILE * MAX_D] __attribute__((aligned(64)));
    float scores[ROWS * TILE] __attribute__((aligned(64)));
    bf16 weights[ROWS * TILE] __attribute__((aligned(64)));
    const bf16 *rows[TILE];
    const char *lines[PLACES];
    Coming coming = {.count = 0};
    for (int64_t h = 0; h < t->num_heads; h++)
        for (int64_t i = 0; i < all; i++) {
            const bf16 *from = i < m ? (const bf16 *)t->q + query_place(t, t->first_head + h, group, i) : zeros;
            memcpy(q + (h * all + i) * d, from, d * 2);
        }
    if (t->tiles) quire_tiles_begin();
    const __m512i low = PAIRS_LOW, high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t tile = begin; tile < end; tile += TILE)
        for (int64_t h = 0; h < t->num_heads; h++) {
            int64_t count = end - tile < TILE ? end - tile : TILE, head = t->first_head + h;
            int64_t blocks = (count + 31) / 32 * 2, pairs = blocks * 8;
            if (!h) foresee(t, after, tile, &coming);
            if (t->scales) unpack_tile(t, head, tile, count, unpacked, rows);
            else find_rows(t, head, tile, count, rows);
            for (int64_t b = 0; b < blocks; b++)
                for (int64_t e = 0; e < d / 2; e += 16) {
                    __m512i r[16];
                    for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_si512((const int32_t *)rows[b * 16 + j] + e);
                    transpose16(r);
                    next_of_each(&coming, lines);
                    for (int j = 0; j < 16; j++) {
                        FETCH_LINE(lines, j);
                        _mm512_store_si512(keys + (e + j) * TILE + b * 16, r[j]);
                    }
                }
            for (int64_t j = 0; j < pairs; j++) {
                const bf16 *x = rows[2 * j] + to_values, *y = rows[2 * j + 1] + to_values;
                for (int64_t e = 0; e < d; e += 32) {
                    __m512i a = _mm512_loadu_si512(x + e), b = _mm512_loadu_si512(y + e);
                    int64_t line = j * d / 16 + e / 16;
                    if (line % 16 == 0) next_of_each(&coming, lines);
                    FETCH_LINE(lines, line), FETCH_LINE(lines, line + 1);
                    _mm512_store_si512(values + (j * d + e) * 2, _mm512_permutex2var_epi16(a, low, b));
                    _mm512_store_si512(values + (j * d + e + 16) * 2, _mm512_permutex2var_epi16(a, high, b));
                }
            }
            float *sums = acc + h * all * d;
            for (int64_t i = 0; i < all; i += ROWS) {
                int64_t some = all - i < ROWS ? all - i : ROWS;
                if (t->tiles) quire_tile_scores(q + (h * all + i) * d, keys, scores, some, d, blocks);
                else
                    for (int64_t r = 0, strip; r < some; r += strip) {
                        int64_t sees = seen_by_strip(t, tile, count, group, i + r, some - r, &strip);
                        score(q + (h * all + i + r) * d, keys, scores + r * TILE, strip, d, (sees + 31) / 32 * 2);
                    }
                soften_bf16(t, scores, weights, head, tile, count, group, i, i + some, m, most + h * all,
                            total + h * all, sums);
                if (t->tiles) quire_tile_values(weights, values, sums + i * d, some, d, blocks / 2);
                else
                    for (int64_t r = 0, strip; r < some; r += strip) {
                        int64_t sees = seen_by_strip(t, tile, count, group, i + r, some - r, &strip);
                        weigh(weights + r * TILE, values, sums + (i + r) * d, strip, d, (sees + 1) / 2);
                    }
            }
        }
    if (t->tiles) quire_tiles_end();
}
#endif

/* Whether queries are multiplied one by one: one of a group of few heads. Not where many are multiplied on tiles, which add
 * products in an order of their own. */
static int is_few(int64_t queries, int64_t group, int type, int64_t d, int tiles) {
#ifdef HAVE_BF16_VECTORS
    return queries == 1 && group <= FEW && type == 1 && d % 32 == 0 && !tiles;
#else
    return 0;
#endif
}

/* A KV head's rows, padded to what is multiplied at a time. */
static int64_t padded(int64_t queries, int64_t group, int type, int64_t d, int tiles) {
    int64_t unit = tiles ? 16 : 4;
    return (queries * group + unit - 1) / unit * unit;
}

/* Where the partial results of row i of a KV head are. */
static inline float *partial_place(const Task *t, int64_t part, int64_t head, int64_t group, int64_t i) {
    return t->partials + i / group * t->query_stride + ((part * t->heads) + head * group + i % group) * (t->d + 2);
}

/* Adds the result of other keys. Which of two products is rounded is said here: compilers choose by where a number is. */
static void merge(int64_t d, float *sums, float *most, float *total, const float *more,
                                            float more_most, float more_total) {
    if (more_total == 0) return; /* of no key */
    if (*total == 0) {
        memcpy(sums, more, d * 4);
        *most = more_most, *total = more_total;
        return;
    }
    float greatest = more_most > *most ? more_most : *most;
    float keep = *most == greatest ? 1.0f : exp_fast(*most - greatest);
    float add = more_most == greatest ? 1.0f : exp_fast(more_most - greatest);
    for (int64_t e = 0; e < d; e++) sums[e] = fmaf(more[e], add, sums[e] * keep);
    *total = fmaf(more_total, add, *total * keep);
    *most = greatest;
}

static void finish(const Task *t, int64_t head, int64_t group, int64_t i, float *sums, float most, float total) {
    static const float zeros[MAX_D];
    int64_t to = query_place(t, head, group, i);
    if (t->sinks) merge(t->d, sums, &most, &total, zeros, t->sinks[head * group + i % group], 1.0f);
    float scale = total > 0 ? 1.0f / total : 0.0f;
#ifdef HAVE_BF16_VECTORS
    if (t->type) {
        for (int64_t e = 0; e < t->d; e += 16) {
            __mmask16 here = first_lanes(t->d - e);
            __m512 sum = _mm512_maskz_loadu_ps(here, sums + e);
            store16((bf16 *)t->out + to + e, here, _mm512_mul_ps(sum, _mm512_set1_ps(scale)));
        }
        return;
    }
#endif
    for (int64_t e = 0; e < t->d; e++) store(t->out, to + e, sums[e] * scale, t->type);
}

/* All parts of a row, in their order, whichever ended first. */
static void merge_parts(const Task *t, int64_t group, int64_t m) {
    float sums[MAX_D];
    for (int64_t head = t->first_head; head < t->first_head + t->num_heads; head++)
        for (int64_t i = 0; i < m; i++) {
            float most = -INFINITY, total = 0;
            memset(sums, 0, t->d * 4);
            for (int64_t p = 0; p < t->num_parts; p++) {
                const float *part = partial_place(t, p, head, group, i);
                merge(t->d, sums, &most, &total, part, part[t->d], part[t->d + 1]);
            }
            finish(t, head, group, i, sums, most, total);
        }
}

/* Some keys of one part. */
static void attend_part(const Task *t, const Task *after, int64_t group, int64_t m, int64_t all, float *acc, float *most,
                        float *total) {
    int64_t d = t->d;
    for (int64_t i = 0; i < t->num_heads * all; i++) most[i] = -INFINITY, total[i] = 0;
    memset(acc, 0, sizeof(float) * t->num_heads * all * d);
    if (t->resumes)
        for (int64_t h = 0; h < t->num_heads; h++)
            for (int64_t i = 0; i < m; i++) {
                const float *from = partial_place(t, t->part, t->first_head + h, group, i);
                memcpy(acc + (h * all + i) * d, from, d * 4);
                most[h * all + i] = from[d], total[h * all + i] = from[d + 1];
            }
#ifdef HAVE_BF16_VECTORS
    int few = is_few(t->num_queries, group, t->type, d, t->tiles);
    if (few && d == 64) attend_few(t, after, m, 64, acc, most, total);
    else if (few && d == 128) attend_few(t, after, m, 128, acc, most, total);
    else if (few && d == 256) attend_few(t, after, m, 256, acc, most, total);
    else if (few) attend_few(t, after, m, d, acc, most, total);
    else if (t->type == 1 && d % 32 == 0) attend_bf16(t, after, group, m, all, acc, most, total);
    else
#endif
        for (int64_t h = 0; h < t->num_heads; h++)
            for (int64_t tile = t->begin; tile < t->end; tile += TILE)
                attend_tile(t, t->first_head + h, group, m, tile, acc + h * all * d, most + h * all, total + h * all);
}

/* The parts of a task one after the other. */
static __attribute__((noinline)) void attend_parts(const Task *t, const Task *after, int64_t group, int64_t m,
                                                   int64_t all, float *acc, float *most, float *total) {
    float more[MAX_M * MAX_D] __attribute__((aligned(64)));
    float more_most[MAX_M], more_total[MAX_M];
    Task part = *t;
    part.end = part_end(t->begin, t->end);
    attend_part(&part, NULL, group, m, all, acc, most, total);
    while (part.end < t->end) {
        part.begin = part.end, part.end = part_end(part.begin, t->end);
        attend_part(&part, part.end == t->end ? after : NULL, group, m, all, more, more_most, more_total);
        for (int64_t i = 0; i < t->num_heads * all; i++)
            merge(t->d, acc + i * t->d, most + i, total + i, more + i * t->d, more_most[i], more_total[i]);
    }
}

static void attend(const Task *t, const Task *after) {
    float acc[MAX_M * MAX_D] __attribute__((aligned(64)));
    float most[MAX_M], total[MAX_M];
    int64_t d = t->d, group = t->heads / t->kv_heads / t->split, m = t->num_queries * group;
    int64_t all = padded(t->num_queries, group, t->type, d, t->tiles);
    int one = t->begin >= t->end || part_end(t->begin, t->end) == t->end;
    (one ? attend_part : attend_parts)(t, after, group, m, all, acc, most, total);
    for (int64_t h = 0; h < t->num_heads; h++)
        for (int64_t i = 0; i < m; i++) {
            int64_t head = t->first_head + h, row = h * all + i;
            if (!t->partials) {
                finish(t, head, group, i, acc + row * d, most[row], total[row]);
                continue;
            }
            float *to = partial_place(t, t->part, head, group, i);
            memcpy(to, acc + row * d, d * 4);
            to[d] = most[row], to[d + 1] = total[row];
        }
    if (t->first_of_row && !__atomic_sub_fetch(&t->first_of_row->unfinished, 1, __ATOMIC_ACQ_REL))
        merge_parts(t, group, m);
}
