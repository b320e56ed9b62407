/* Linear layers in int8: a weight with one scale for each output, rows of inputs rounded with a scale for each GROUP of them.
 * Products of a group are summed as integers, exact in whatever order, and groups in float32 in theirs: the bits of a result
 * depend on nothing beside the row and the output.
 *
 * A weight [n, k] lies in panels of 32 outputs, [panel][fours of inputs][32][4]; inputs past k are zero. Inputs are stored
 * 128 higher, without sign, as the instruction takes them: `start` [panel][group][32] has what that adds, taken off. */

#include <math.h>
#include <string.h>
#include "elements.h"
#include "threads.h"
#include "vectors.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include "int8_dot.h"
#define HAVE_INT8_DOT 1
#endif

enum { ROWS = 12, FEWEST_AHEAD = 6, ZERO = 128, FOUR = 4, GROUP = 192, GROUP_FOURS = GROUP / FOUR };

/* Panels of this many bytes stay in the second-level cache while all rows pass by (as in linear.c). */
enum { GROUP_BYTES = 128 << 10 };

typedef struct {
    const int8_t *packed;
    const int32_t *start;
    const float *scale;
    const void *bias;
    int64_t n, k, fours, groups;
    int type;
} Weight;

/* Rows of fours * 4 bytes, and the scales of each. */
typedef struct {
    uint8_t *q;
    float *scale;
} Inputs;

/* k numbers of one group: the greatest magnitude becomes 127. A NaN, whose bits are above those of all numbers, makes the scale NaN. */
static float round_group(const void *x, int64_t k, int64_t fours, int type, uint8_t *q) {
    union { uint32_t u; float f; } most = {.u = 0};
#ifdef HAVE_BF16_VECTORS
    if (type) {
        __m512i greatest = _mm512_setzero_si512(), magnitude = _mm512_set1_epi16(0x7fff);
        for (int64_t j = 0; j < k; j += 32) {
            __mmask32 here = k - j >= 32 ? 0xffffffff : (1u << (k - j)) - 1;
            __m512i v = _mm512_and_si512(_mm512_maskz_loadu_epi16(here, (const bf16 *)x + j), magnitude);
            greatest = _mm512_max_epu16(greatest, v);
        }
        __m512i halves = _mm512_max_epu32(_mm512_slli_epi32(greatest, 16), greatest);
        most.u = _mm512_reduce_max_epu32(halves) & 0xffff0000;
        __m512 by = _mm512_set1_ps(most.f > 1e-30f ? 127.0f / most.f : 0.0f);
        for (int64_t j = 0; j < k; j += 16) {
            __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load16((const bf16 *)x + j, first_lanes(k - j)), by));
            rounded = _mm512_add_epi32(rounded, _mm512_set1_epi32(ZERO));
            _mm_mask_storeu_epi8(q + j, first_lanes(fours * FOUR - j), _mm512_cvtepi32_epi8(rounded));
        }
        return most.f * (1.0f / 127.0f);
    }
#endif
    for (int64_t j = 0; j < k; j++) {
        union { float f; uint32_t u; } v = {.f = load(x, j, type)};
        most.u = (v.u & 0x7fffffff) > most.u ? v.u & 0x7fffffff : most.u;
    }
    float by = most.f > 1e-30f ? 127.0f / most.f : 0.0f;
    for (int64_t j = 0; j < k; j++) q[j] = (uint8_t)((int32_t)rintf(load(x, j, type) * by) + ZERO);
    for (int64_t j = k; j < fours * FOUR; j++) q[j] = ZERO;
    return most.f * (1.0f / 127.0f);
}

static void round_rows(const Weight *w, const void *x, Inputs to, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
        for (int64_t g = 0; g < w->groups; g++) {
            int64_t at = g * GROUP, inputs = w->k - at < GROUP ? w->k - at : GROUP;
            const char *from = (const char *)x + (i * w->k + at) * width_of(w->type);
            to.scale[i * w->groups + g] = round_group(from, inputs, (inputs + FOUR - 1) / FOUR, w->type,
                                                      to.q + i * w->fours * FOUR + at);
        }
}

/* A group of a panel's inputs: what rows of them add to sums [rows][PANEL], without the outputs' scales. The first group's
 * sums are what it adds. */
typedef struct {
    const int8_t *panel, *ahead; /* from the group on; ahead as in linear.c */
    const int32_t *start;
    const uint8_t *x;   /* rows of `stride` bytes */
    const float *scale; /* a row's is `groups` after the one before */
    int64_t fours, stride, groups;
    int is_first;
} Group;

#ifdef HAVE_INT8_DOT
/* By itself: within a loop over groups compilers keep its sums in memory. */
static inline __attribute__((always_inline)) void multiply(const int rows, const Group *g, float *sums) {
    __m512i a[ROWS], b[ROWS];
    __m512i first = _mm512_loadu_si512(g->start), second = _mm512_loadu_si512(g->start + 16);
    const int8_t *panel = g->panel, *ahead = g->ahead;
    const uint8_t *x = g->x;
    int64_t fours = g->fours, stride = g->stride;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) a[r] = first, b[r] = second;
    for (int64_t e = 0; e < fours; e++) {
        __m512i w0 = _mm512_loadu_si512(panel + e * PANEL * FOUR);
        __m512i w1 = _mm512_loadu_si512(panel + e * PANEL * FOUR + 64);
        if (rows >= FEWEST_AHEAD) __builtin_prefetch(ahead + e * PANEL * FOUR / 2, 0, 2);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + r * stride + e * FOUR, 4);
            __m512i v = _mm512_set1_epi32(four);
            a[r] = add_dots(a[r], v, w0);
            b[r] = add_dots(b[r], v, w1);
        }
    }
    __m512 zero = _mm512_setzero_ps();
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        __m512 by = _mm512_set1_ps(g->scale[r * g->groups]);
        float *to = sums + r * PANEL;
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[r]), by, g->is_first ? zero : _mm512_load_ps(to)));
        _mm512_store_ps(to + 16, _mm512_fmadd_ps(_mm512_cvtepi32_ps(b[r]), by, g->is_first ? zero : _mm512_load_ps(to + 16)));
    }
}
#else
static inline void multiply(const int rows, const Group *g, float *sums) {
    for (int r = 0; r < rows; r++) {
        int32_t of_group[PANEL];
        memcpy(of_group, g->start, sizeof of_group);
        for (int64_t e = 0; e < g->fours; e++) {
            const int8_t *four = g->panel + e * PANEL * FOUR;
            const uint8_t *v = g->x + r * g->stride + e * FOUR;
            for (int j = 0; j < PANEL; j++)
                of_group[j] += v[0] * four[4 * j] + v[1] * four[4 * j + 1] + v[2] * four[4 * j + 2] + v[3] * four[4 * j + 3];
        }
        for (int j = 0; j < PANEL; j++)
            sums[r * PANEL + j] = fmaf((float)of_group[j], g->scale[r * g->groups], g->is_first ? 0 : sums[r * PANEL + j]);
    }
}
#endif

static __attribute__((noinline)) void multiply_group(int rows, const Group *g, float *sums) {
    switch (rows) {
#define CASE(R)                                                                                                        \
    case R: multiply(R, g, sums); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

/* Rows of x by a panel. */
static void multiply_rows(int rows, const Weight *w, const uint8_t *x, const float *scale, int64_t p,
                          const int8_t *ahead, float *sums) {
    for (int64_t i = 0, from = 0; i < w->groups; i++, from += GROUP_FOURS) {
        int64_t some = w->fours - from < GROUP_FOURS ? w->fours - from : GROUP_FOURS;
        Group g = {w->packed + (p * w->fours + from) * PANEL * FOUR, ahead + from * PANEL * FOUR / 2,
                   w->start + (p * w->groups + i) * PANEL, x + from * FOUR, scale + i, some, w->fours * FOUR, w->groups, !i};
        multiply_group(rows, &g, sums);
    }
}

/* Sums of one row and panel `p` -> outputs. */
static inline void write_outputs(const Weight *w, const float *sums, int64_t p, void *out) {
    int64_t at = p * PANEL, width = w->n - at < PANEL ? w->n - at : PANEL;
#ifdef HAVE_BF16_VECTORS
    if (w->type) {
        for (int64_t j = 0; j < width; j += 16) {
            __mmask16 here = first_lanes(width - j);
            __m512 by = _mm512_loadu_ps(w->scale + at + j), sum = _mm512_load_ps(sums + j);
            __m512 bias = w->bias ? load16((const bf16 *)w->bias + at + j, here) : _mm512_setzero_ps();
            store16((bf16 *)out + at + j, here, _mm512_fmadd_ps(sum, by, bias));
        }
        return;
    }
#endif
    for (int64_t j = 0; j < width; j++) {
        float bias = w->bias ? load(w->bias, at + j, w->type) : 0;
        store(out, at + j, fmaf(sums[j], w->scale[at + j], bias), w->type);
    }
}

static void multiply_panels(const Weight *w, Inputs x, void *out, int64_t m, int64_t begin, int64_t end) {
    int64_t bytes = w->fours * PANEL * FOUR, group = GROUP_BYTES / bytes;
    float sums[ROWS * PANEL] __attribute__((aligned(64)));
    int64_t strips = (m + ROWS - 1) / ROWS;
    if (group < 1 || m <= ROWS) group = 1;
    for (int64_t first = begin; first < end; first += group) {
        int64_t last = first + group < end ? first + group : end;
        for (int64_t s = 0; s < strips; s++) {
            int64_t i = m * s / strips;
            int rows = (int)(m * (s + 1) / strips - i);
            for (int64_t p = first; p < last; p++) {
                const int8_t *ahead = w->packed + p * bytes;
                if (strips > 2 && strips - s <= 2 && p + group < end) ahead += (2 * group + (s + 1 == strips)) * bytes / 2;
                multiply_rows(rows, w, x.q + i * w->fours * FOUR, x.scale + i * w->groups, p, ahead, sums);
                for (int r = 0; r < rows; r++)
                    write_outputs(w, sums + r * PANEL, p, (char *)out + (i + r) * w->n * width_of(w->type));
            }
        }
    }
}

/* x [m, k], a weight packed as above, a scale for each output of every panel, bias [n] or NULL -> out [m, n]. */
int quire_int8_linear(const void *x, const int8_t *packed, const int32_t *start, const float *scale, const void *bias,
                      void *out, int64_t m, int64_t n, int64_t k, int type) {
    if (m < 0 || n < 1 || k < 1) return BAD_SIZE;
    int64_t fours = (k + FOUR - 1) / FOUR, panels = (n + PANEL - 1) / PANEL;
    int64_t groups = (k + GROUP - 1) / GROUP;
    Weight w = {packed, start, scale, bias, n, k, fours, groups, type};
    float *scratch = quire_scratch(m * (fours * FOUR + groups * sizeof(float)));
    if (!scratch) return NO_MEMORY;
    Inputs rounded = {(uint8_t *)(scratch + m * groups), scratch};
    int together = m * k > WORTH_THREADS, pinned = quire_pinned();
    if (!together) round_rows(&w, x, rounded, 0, m);
#pragma omp parallel if (n * k > WORTH_THREADS)
    {
        quire_stay(pinned);
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        if (together) {
            round_rows(&w, x, rounded, m * thread / threads, m * (thread + 1) / threads);
#pragma omp barrier
        }
        multiply_panels(&w, rounded, out, m, panels * thread / threads, panels * (thread + 1) / threads);
    }
    return DONE;
}
