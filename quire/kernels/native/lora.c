/* The low-rank terms of adapters: out += B[slot] (A[slot] x), row by row. Rows are sorted by slot and multiplied some at a
 * time, so that a factor is read once for all of these. What a row gets depends on no others. */

#include <stddef.h>
#include "elements.h"
#include "threads.h"
#include "vectors.h"

enum {
    TILE = 8,       /* rows of a slot that are multiplied at once */
    GROUP = 4,      /* rows of A at once: one sum alone waits for itself, and x is read once for all */
    CHUNK = 256,    /* outputs that a thread takes at once where there are few tiles */
    WIDE = 64,      /* of these in registers */
    MANY_TILES = 2, /* for each thread: then it takes them whole, and no thread waits between the two products */
};

typedef struct {
    const int32_t *rows;
    int32_t count, slot;
} Tile;

/* As quire_add_low_rank has them. */
typedef struct {
    const void *x, *a, *b;
    const int32_t *ranks;
    float *inner;
    void *out;
    const Tile *tiles;
    int64_t num_tiles, in, outputs, width, rank, parts, chunks, starts[4];
    int type;
} Terms;

#define SAME(x) (x)
#define DOT(NAME, T, TO)                                                                                               \
    static inline float NAME(const T *x, const T *y, int64_t n) {                                                      \
        float sum = 0;                                                                                                 \
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++) sum += TO(x[i]) * TO(y[i]);             \
        return sum;                                                                                                    \
    }                                                                                                                  \
    static inline void NAME##_group(float *out, const T *x, const T *y, int64_t n) {                                   \
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;                                                                          \
        _Pragma("omp simd reduction(+ : s0, s1, s2, s3)") for (int64_t i = 0; i < n; i++) {                            \
            float v = TO(x[i]);                                                                                        \
            s0 += v * TO(y[i]);                                                                                        \
            s1 += v * TO(y[i + n]);                                                                                    \
            s2 += v * TO(y[i + 2 * n]);                                                                                \
            s3 += v * TO(y[i + 3 * n]);                                                                                \
        }                                                                                                              \
        out[0] = s0, out[1] = s1, out[2] = s2, out[3] = s3;                                                            \
    }                                                                                                                  \
    /* inner [tile's rows][width] = x times `count` rows of a, at most GROUP */                                        \
    static void NAME##s(const Tile *tile, const T *x, const T *a, float *inner, int64_t in, int64_t width,             \
                        int64_t count) {                                                                               \
        for (int64_t i = 0; i < tile->count; i++) {                                                                    \
            const T *from = x + tile->rows[i] * in;                                                                    \
            float *to = inner + tile->rows[i] * width;                                                                 \
            if (count == GROUP) NAME##_group(to, from, a, in);                                                         \
            else for (int64_t r = 0; r < count; r++) to[r] = NAME(from, a + r * in, in);                               \
        }                                                                                                              \
    }
DOT(dot_f32, float, SAME)

/* out [n] += h [rank] times rows of b, each `stride` from the one before: outputs side by side, not one after the
 * other, because a rank is shorter than a vector. */
#define EXPAND(NAME, T, TO, BACK)                                                                                      \
    static inline void NAME(T *out, const float *h, const T *b, int64_t rank, int64_t stride, int64_t n) {             \
        for (int64_t some; n > 0; n -= some, out += some, b += some) {                                                 \
            float sum[WIDE] = {0};                                                                                     \
            some = n < WIDE ? n : WIDE;                                                                                \
            for (int64_t r = 0; r < rank; r++) {                                                                       \
                const T *row = b + r * stride;                                                                         \
                float scale = h[r];                                                                                    \
                _Pragma("omp simd") for (int64_t j = 0; j < some; j++) sum[j] += scale * TO(row[j]);                   \
            }                                                                                                          \
            _Pragma("omp simd") for (int64_t j = 0; j < some; j++) out[j] = BACK(TO(out[j]) + sum[j]);                 \
        }                                                                                                              \
    }                                                                                                                  \
    /* The same for all rows of a tile, of out [rows][outputs] and h [rows][width]. */                                 \
    static void NAME##s(const Tile *tile, T *out, const float *h, const T *b, int64_t rank, int64_t outputs,           \
                        int64_t width, int64_t n) {                                                                    \
        for (int64_t i = 0; i < tile->count; i++)                                                                      \
            NAME(out + tile->rows[i] * outputs, h + tile->rows[i] * width, b, rank, outputs, n);                       \
    }
EXPAND(expand_f32, float, SAME, SAME)

#ifndef HAVE_BF16_VECTORS
DOT(dot_bf16, bf16, widen)
EXPAND(expand_bf16, bf16, widen, narrow)
#else
#define INLINE static inline __attribute__((always_inline))
#define UP_TO_4(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#define UP_TO_8(CASE) UP_TO_4(CASE) CASE(5) CASE(6) CASE(7) CASE(8)

INLINE void dot_vectors(const int rows, const int count, const int32_t *of, const bf16 *x, const bf16 *a, float *inner,
                        int64_t in, int64_t width) {
    __m512 sum[4][GROUP];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
        for (int r = 0; r < count; r++) sum[i][r] = _mm512_setzero_ps();
    for (int64_t e = 0; e < in; e += 32) {
        __mmask32 here = in - e >= 32 ? 0xffffffff : (1u << (in - e)) - 1;
        __m512bh v[4];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) v[i] = (__m512bh)_mm512_maskz_loadu_epi16(here, x + of[i] * in + e);
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) {
            __m512bh w = (__m512bh)_mm512_maskz_loadu_epi16(here, a + r * in + e);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) sum[i][r] = _mm512_dpbf16_ps(sum[i][r], v[i], w);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        float *to = inner + of[i] * width;
        if (count < GROUP) {
            for (int r = 0; r < count; r++) to[r] = _mm512_reduce_add_ps(sum[i][r]);
            continue;
        }
        /* Four sums over four lanes, then over the four parts of a vector. */
        __m512 s01 = _mm512_add_ps(_mm512_unpacklo_ps(sum[i][0], sum[i][1]), _mm512_unpackhi_ps(sum[i][0], sum[i][1]));
        __m512 s23 = _mm512_add_ps(_mm512_unpacklo_ps(sum[i][2], sum[i][3]), _mm512_unpackhi_ps(sum[i][2], sum[i][3]));
        __m512d low = _mm512_unpacklo_pd((__m512d)s01, (__m512d)s23), high = _mm512_unpackhi_pd((__m512d)s01, (__m512d)s23);
        __m512 s = _mm512_add_ps((__m512)low, (__m512)high);
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    }
}

static void dot_bf16s(const Tile *tile, const bf16 *x, const bf16 *a, float *inner, int64_t in, int64_t width,
                      int64_t count) {
    for (int64_t i = 0; i < tile->count; i += 4) {
        const int32_t *of = tile->rows + i;
        int64_t rows = tile->count - i < 4 ? tile->count - i : 4;
        for (int64_t r = 0; count < GROUP && r < count; r++)
            for (int64_t j = 0; j < rows; j++) dot_vectors(1, 1, of + j, x, a + r * in, inner + r, in, width);
        if (count == GROUP) switch (rows) {
#define CASE(ROWS)                                                                                                     \
    case ROWS: dot_vectors(ROWS, GROUP, of, x, a, inner, in, width); break;
            UP_TO_4(CASE)
#undef CASE
        }
    }
}

INLINE void expand_vectors(const int rows, const int32_t *of, bf16 *out, const float *h, const bf16 *b, int64_t rank,
                           int64_t outputs, int64_t width, int64_t n) {
    for (int64_t j = 0; j < n; j += 32) {
        __mmask16 first = first_lanes(n - j), second = n - j > 16 ? first_lanes(n - j - 16) : 0;
        __m512 low[TILE], high[TILE];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) low[i] = high[i] = _mm512_setzero_ps();
        for (int64_t r = 0; r < rank; r++) {
            __m512 w0 = load16(b + r * outputs + j, first), w1 = load16(b + r * outputs + j + 16, second);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) {
                __m512 scale = _mm512_set1_ps(h[of[i] * width + r]);
                low[i] = _mm512_fmadd_ps(scale, w0, low[i]), high[i] = _mm512_fmadd_ps(scale, w1, high[i]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            bf16 *to = out + of[i] * outputs + j;
            store16(to, first, _mm512_add_ps(load16(to, first), low[i]));
            store16(to + 16, second, _mm512_add_ps(load16(to + 16, second), high[i]));
        }
    }
}

static void expand_bf16s(const Tile *tile, bf16 *out, const float *h, const bf16 *b, int64_t rank, int64_t outputs,
                         int64_t width, int64_t n) {
    switch (tile->count) {
#define CASE(ROWS)                                                                                                     \
    case ROWS: expand_vectors(ROWS, tile->rows, out, h, b, rank, outputs, width, n); break;
        UP_TO_8(CASE)
#undef CASE
    }
}
#endif

/* A tile's inner products by GROUP rows of A, or as many as the slot has from its `first` on. */
static void shrink(const Terms *t, const Tile *tile, int64_t part, int64_t first) {
    int64_t left = t->ranks[tile->slot] - first, count = left < GROUP ? left : GROUP, r = part * t->rank + first;
    int64_t at = (tile->slot * t->width + r) * t->in;
    if (t->type)
        dot_bf16s(tile, t->x, (const bf16 *)t->a + at, t->inner + r, t->in, t->width, count);
    else dot_f32s(tile, t->x, (const float *)t->a + at, t->inner + r, t->in, t->width, count);
}

/* The terms of a tile's outputs [begin, end), which are all of one part. */
static void expand(const Terms *t, const Tile *tile, int64_t part, int64_t begin, int64_t end) {
    int64_t at = tile->slot * t->rank * t->outputs + begin, rank = t->ranks[tile->slot];
    const float *h = t->inner + part * t->rank;
    if (t->type)
        expand_bf16s(tile, (bf16 *)t->out + begin, h, (const bf16 *)t->b + at, rank, t->outputs, t->width, end - begin);
    else expand_f32s(tile, (float *)t->out + begin, h, (const float *)t->b + at, rank, t->outputs, t->width, end - begin);
}

static int add_tiles(const void *argument, Worker *worker) {
    const Terms *t = argument;
    for (int64_t i; (i = quire_take(worker, t->num_tiles)) >= 0;)
        for (int64_t part = 0; part < t->parts; part++) {
            for (int64_t r = 0; r < t->ranks[t->tiles[i].slot]; r += GROUP) shrink(t, t->tiles + i, part, r);
            expand(t, t->tiles + i, part, t->starts[part], t->starts[part + 1]);
        }
    return DONE;
}

static int shrink_groups(const void *argument, Worker *worker) {
    const Terms *t = argument;
    int64_t groups = (t->rank + GROUP - 1) / GROUP, pieces = t->parts * groups;
    for (int64_t i; (i = quire_take(worker, t->num_tiles * pieces)) >= 0;) {
        const Tile *tile = t->tiles + i / pieces;
        int64_t part = i % pieces / groups, first = i % groups * GROUP;
        if (first < t->ranks[tile->slot]) shrink(t, tile, part, first);
    }
    return DONE;
}

static int64_t chunks_of(const Terms *t, int64_t part) {
    return (t->starts[part + 1] - t->starts[part] + CHUNK - 1) / CHUNK;
}

static int expand_chunks(const void *argument, Worker *worker) {
    const Terms *t = argument;
    for (int64_t i; (i = quire_take(worker, t->num_tiles * t->chunks)) >= 0;) {
        int64_t part = 0, chunk = i % t->chunks;
        for (; chunk >= chunks_of(t, part); part++) chunk -= chunks_of(t, part);
        int64_t begin = t->starts[part] + chunk * CHUNK, end = t->starts[part + 1];
        expand(t, t->tiles + i / t->chunks, part, begin, end - begin < CHUNK ? end : begin + CHUNK);
    }
    return DONE;
}

static inline int has_terms(int32_t slot, const int32_t *ranks) { return slot >= 0 && ranks[slot] > 0; }

/* Tiles of the rows that have terms, and their number; `rows` gets those, by slot. `ends` [slots] is to work in. */
static int64_t make_tiles(const int32_t *slots, const int32_t *ranks, int64_t n, int64_t num_slots, int32_t *ends,
                          int32_t *rows, Tile *tiles) {
    int64_t count = 0;
    for (int64_t s = 0; s < num_slots; s++) ends[s] = 0;
    for (int64_t i = 0; i < n; i++)
        if (has_terms(slots[i], ranks)) ends[slots[i]]++;
    int32_t begin = 0;
    for (int64_t s = 0; s < num_slots; s++) {
        int32_t own = ends[s];
        ends[s] = begin;
        for (int32_t first = 0; first < own; first += TILE)
            tiles[count++] = (Tile){rows + begin + first, own - first < TILE ? own - first : TILE, (int32_t)s};
        begin += own;
    }
    for (int64_t i = 0; i < n; i++)
        if (has_terms(slots[i], ranks)) rows[ends[slots[i]]++] = (int32_t)i;
    return count;
}

/* x [n, in], slots [n] (-1: none), ranks [slots], a [slots, width, in], b [slots, rank, outputs], inner [n, width] to
 * work in, out [n, outputs]. The width is that of up to three parts of the outputs, each of one rank, of which the
 * first ranks[slot] are not zero; the second and third part begin at those outputs. Each number is one thread's, so
 * bits do not depend on the number of threads. */
int quire_add_low_rank(const void *x, const int32_t *slots, const int32_t *ranks, const void *a, const void *b,
                       float *inner, void *out, int64_t n, int64_t in, int64_t outputs, int64_t width, int64_t rank,
                       int64_t second, int64_t third, int type) {
    if (n < 0 || in < 1 || outputs < 1 || rank < 1 || width % rank || width < rank || width > 3 * rank) return BAD_SIZE;
    Terms t = {x, a, b, ranks, inner, out, NULL, 0, in, outputs, width, rank, width / rank, 0, {0, second, third}, type};
    t.starts[t.parts] = outputs;
    for (int64_t part = 0; part < t.parts; part++) {
        if (t.starts[part] > t.starts[part + 1]) return BAD_SIZE;
        t.chunks += chunks_of(&t, part);
    }
    int64_t num_slots = 0;
    for (int64_t i = 0; i < n; i++)
        if (slots[i] >= num_slots && has_terms(slots[i], ranks)) num_slots = slots[i] + 1;
    if (!num_slots) return DONE;
    Tile *tiles = quire_scratch(n * (int64_t)(sizeof(Tile) + 4) + num_slots * 4);
    if (!tiles) return NO_MEMORY;
    int32_t *rows = (int32_t *)(tiles + n);
    t.tiles = tiles;
    t.num_tiles = make_tiles(slots, ranks, n, num_slots, rows + n, rows, tiles);
    int worth = n * (width * in + outputs * rank) > WORTH_THREADS;
    if (t.num_tiles >= MANY_TILES * omp_get_max_threads()) return quire_share(add_tiles, &t, worth);
    int status = quire_share(shrink_groups, &t, worth);
    return status | quire_share(expand_chunks, &t, worth);
}
