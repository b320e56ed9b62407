/* Linear layers in int8: a weight with one scale for each output, rows of inputs rounded with one scale each. A product is a
 * sum of integers, exact in whatever order, and is scaled once: its bits depend on nothing beside the row and the output.
 *
 * A weight [n, k] lies in panels of 32 outputs, [panel][fours of inputs][32][4]; inputs past k are zero. Inputs are stored
 * 128 higher, without sign, as the instruction takes them: `start` has what that adds to each output, taken off. */

#include <math.h>
#include <string.h>
#include "elements.h"
#include "threads.h"
#include "vectors.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define HAVE_INT8_DOT 1
#endif

enum { ROWS = 12, FEWEST_AHEAD = 6, ZERO = 128, FOUR = 4 };

/* Panels of this many bytes stay in the second-level cache while all rows pass by (as in linear.c). */
enum { GROUP_BYTES = 128 << 10 };

typedef struct {
    const int8_t *packed;
    const int32_t *start;
    const float *scale;
    const void *bias;
    int64_t n, k, fours;
    int type;
} Weight;

/* Rows of fours * 4 bytes, and the scale of each. */
typedef struct {
    uint8_t *q;
    float *scale;
} Inputs;

/* One row: the greatest magnitude becomes 127. A NaN, whose bits are above those of all numbers, makes the scale NaN. */
static float round_row(const void *x, int64_t k, int64_t fours, int type, uint8_t *q) {
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
        to.scale[i] = round_row((const char *)x + i * w->k * (w->type ? 2 : 4), w->k, w->fours, w->type,
                                to.q + i * w->fours * FOUR);
}

#ifdef HAVE_INT8_DOT
/* ahead: as in linear.c. */
static inline __attribute__((always_inline)) void multiply(const int rows, const uint8_t *x, const int8_t *panel,
                                                           const int32_t *start, int64_t fours, int32_t *sums,
                                                           const int8_t *ahead) {
    __m512i a[ROWS], b[ROWS];
    __m512i first = _mm512_loadu_si512(start), second = _mm512_loadu_si512(start + 16);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) a[r] = first, b[r] = second;
    for (int64_t e = 0; e < fours; e++) {
        __m512i w0 = _mm512_loadu_si512(panel + e * PANEL * FOUR), w1 = _mm512_loadu_si512(panel + e * PANEL * FOUR + 64);
        if (rows >= FEWEST_AHEAD) __builtin_prefetch(ahead + e * PANEL * FOUR / 2, 0, 2);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + (r * fours + e) * FOUR, 4);
            __m512i v = _mm512_set1_epi32(four);
            a[r] = _mm512_dpbusd_epi32(a[r], v, w0);
            b[r] = _mm512_dpbusd_epi32(b[r], v, w1);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        _mm512_store_si512(sums + r * PANEL, a[r]);
        _mm512_store_si512(sums + r * PANEL + 16, b[r]);
    }
}
#else
static inline __attribute__((always_inline)) void multiply(const int rows, const uint8_t *x, const int8_t *panel,
                                                           const int32_t *start, int64_t fours, int32_t *sums,
                                                           const int8_t *ahead) {
    for (int r = 0; r < rows; r++) {
        int32_t *to = sums + r * PANEL;
        memcpy(to, start, sizeof(int32_t) * PANEL);
        for (int64_t e = 0; e < fours; e++) {
            const int8_t *w = panel + e * PANEL * FOUR;
            const uint8_t *v = x + (r * fours + e) * FOUR;
            for (int j = 0; j < PANEL; j++)
                to[j] += v[0] * w[4 * j] + v[1] * w[4 * j + 1] + v[2] * w[4 * j + 2] + v[3] * w[4 * j + 3];
        }
    }
}
#endif

static void multiply_rows(int rows, const uint8_t *x, const int8_t *panel, const int32_t *start, int64_t fours,
                          int32_t *sums, const int8_t *ahead) {
    switch (rows) {
#define CASE(R)                                                                                                        \
    case R: multiply(R, x, panel, start, fours, sums, ahead); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

/* Sums of one row and panel `p` -> outputs. */
static inline void write_outputs(const Weight *w, const int32_t *sums, int64_t p, float scale, void *out) {
    int64_t at = p * PANEL, width = w->n - at < PANEL ? w->n - at : PANEL;
#ifdef HAVE_BF16_VECTORS
    if (w->type) {
        for (int64_t j = 0; j < width; j += 16) {
            __mmask16 here = first_lanes(width - j);
            __m512 by = _mm512_mul_ps(_mm512_loadu_ps(w->scale + at + j), _mm512_set1_ps(scale));
            __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + j));
            __m512 bias = w->bias ? load16((const bf16 *)w->bias + at + j, here) : _mm512_setzero_ps();
            store16((bf16 *)out + at + j, here, _mm512_fmadd_ps(sum, by, bias));
        }
        return;
    }
#endif
    for (int64_t j = 0; j < width; j++) {
        float by = w->scale[at + j] * scale, bias = w->bias ? load(w->bias, at + j, w->type) : 0;
        store(out, at + j, fmaf((float)sums[j], by, bias), w->type);
    }
}

static void multiply_panels(const Weight *w, Inputs x, void *out, int64_t m, int64_t begin, int64_t end) {
    int64_t bytes = w->fours * PANEL * FOUR, group = GROUP_BYTES / bytes;
    int32_t sums[ROWS * PANEL] __attribute__((aligned(64)));
    int64_t strips = (m + ROWS - 1) / ROWS;
    if (group < 1 || m <= ROWS) group = 1;
    for (int64_t first = begin; first < end; first += group) {
        int64_t last = first + group < end ? first + group : end;
        for (int64_t s = 0; s < strips; s++) {
            int64_t i = m * s / strips;
            int rows = (int)(m * (s + 1) / strips - i);
            for (int64_t p = first; p < last; p++) {
                const int8_t *panel = w->packed + p * bytes, *ahead = panel;
                if (strips > 2 && strips - s <= 2 && p + group < end) ahead += (2 * group + (s + 1 == strips)) * bytes / 2;
                multiply_rows(rows, x.q + i * w->fours * FOUR, panel, w->start + p * PANEL, w->fours, sums, ahead);
                for (int r = 0; r < rows; r++)
                    write_outputs(w, sums + r * PANEL, p, x.scale[i + r],
                                  (char *)out + (i + r) * w->n * (w->type ? 2 : 4));
            }
        }
    }
}

/* x [m, k], a weight packed as above with start and scale for each output of every panel, bias [n] or NULL -> out [m, n]. */
int quire_int8_linear(const void *x, const int8_t *packed, const int32_t *start, const float *scale, const void *bias,
                      void *out, int64_t m, int64_t n, int64_t k, int type) {
    if (m < 0 || n < 1 || k < 1) return BAD_SIZE;
    int64_t fours = (k + FOUR - 1) / FOUR, panels = (n + PANEL - 1) / PANEL;
    Weight w = {packed, start, scale, bias, n, k, fours, type};
    float *scratch = quire_scratch(m * (fours * FOUR + sizeof(float)));
    if (!scratch) return NO_MEMORY;
    Inputs rounded = {(uint8_t *)(scratch + m), scratch};
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
