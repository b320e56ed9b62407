/* Linear layers in bf16 over packed panels (bf16.h), with the widest instructions that this file is compiled for: bf16
 * dot products of AVX-512, or bf16 widened to float32 in vectors of whatever the processor has. With AMX, amx.c
 * multiplies many rows by the same panels. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "bf16.h"
#include "linear.h"
#include "threads.h"
#include "vectors.h"
#ifdef HAVE_BF16_VECTORS
#define HAVE_BF16_DOT 1
#endif

/* In the order of LINEAR_KINDS in __init__.py. */
int quire_linear_kind(void) {
#if defined(HAVE_BF16_DOT)
    return 3;
#elif defined(__AVX512F__)
    return 2;
#elif defined(__AVX2__) && defined(__FMA__)
    return 1;
#elif defined(__ARM_NEON)
    return 4;
#else
    return 0;
#endif
}

static pthread_key_t scratch_key;
static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

void *quire_scratch(int64_t bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    enum { HEADER = 64 };
    pthread_once(&once, make_scratch_key);
    int64_t *held = pthread_getspecific(scratch_key);
    if (!held || *held < bytes) {
        free(held);
        held = aligned_alloc(64, (bytes + HEADER + 63) / 64 * 64);
        pthread_setspecific(scratch_key, held);
        if (!held) return NULL;
        *held = bytes;
    }
    return (char *)held + HEADER;
}

int quire_pack_linear(const bf16 *weight, bf16 *packed, int64_t n, int64_t k) {
    if (n < 1 || k < 1) return BAD_SIZE;
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
    return DONE;
}

#ifdef HAVE_BF16_DOT

enum { ROWS = 12, FEWEST_AHEAD = 6 };

/* Panels of this many bytes stay in the second-level cache while all rows pass by. A row's outputs are then written some at
 * a time: one panel's for every row at once would fall on few sets of the caches where the rows' distance is a multiple of
 * a large power of two, as that of logits mostly is. */
#ifndef GROUP_BYTES
#define GROUP_BYTES (128 << 10)
#endif

/* ahead: memory of as many bytes as half of a panel, fetched meanwhile unless there are few rows to do it beside. */
static inline __attribute__((always_inline)) void multiply(const int rows, const bf16 *x, const bf16 *panel,
                                                           float *bias, bf16 *out, int64_t k, int64_t n, int64_t width,
                                                           const bf16 *ahead) {
    __m512 a[ROWS], b[ROWS];
    __m512 first = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
    __m512 second = bias ? _mm512_loadu_ps(bias + 16) : _mm512_setzero_ps();
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) a[r] = first, b[r] = second;
    int64_t pairs = k / 2;
    for (int64_t e = 0; e < pairs; e++) {
        if (rows == 1) READ_ONCE(panel + e * PANEL * 2), READ_ONCE(panel + e * PANEL * 2 + 32);
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + e * PANEL * 2);
        __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + e * PANEL * 2 + 32);
        if (rows >= FEWEST_AHEAD) __builtin_prefetch(ahead + e * PANEL, 0, 2);
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
                          int64_t width, const bf16 *ahead) {
    switch (rows) {
#define CASE(R)                                                                                                        \
    case R: multiply(R, x, panel, bias, out, k, n, width, ahead); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

/* A panel's share of what comes after the product. */
static void fetch_share(const Ahead *after, int64_t panel, int64_t panels) {
    const char *end = after->begin + after->bytes * (panel + 1) / panels;
    for (const char *at = after->begin + after->bytes * panel / panels; at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

static int multiply_part(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k,
                         int64_t begin, int64_t end, const Ahead *after) {
    int64_t pairs = (k + 1) / 2, group = GROUP_BYTES / (pairs * PANEL * 4);
    int64_t strips = (m + ROWS - 1) / ROWS;
    if (group < 1 || m <= ROWS) group = 1;
    for (int64_t first = begin; first < end; first += group) {
        int64_t last = first + group < end ? first + group : end;
        for (int64_t s = 0; s < strips; s++) { /* of about equally many rows: few do not fill the pipelines */
            int64_t i = m * s / strips;
            for (int64_t p = first; p < last; p++) {
                int64_t at = p * PANEL, width = n - at < PANEL ? n - at : PANEL;
                const bf16 *panel = packed + p * pairs * PANEL * 2, *ahead = panel;
                float added[PANEL] = {0};
                if (bias)
                    for (int64_t j = 0; j < width; j++) added[j] = widen(bias[at + j]);
                for (int part = 0; after && s == 0 && part < AFTER; part++)
                    fetch_share(after + part, p, (n + PANEL - 1) / PANEL);
                /* The last two strips fetch the next group, a half each: memory is as slow as that. */
                if (strips > 2 && strips - s <= 2 && p + group < end)
                    ahead += (2 * group + (s + 1 == strips)) * pairs * PANEL;
                multiply_rows((int)(m * (s + 1) / strips - i), x + i * k, panel, bias ? added : NULL, out + i * n + at, k,
                              n, width, ahead);
            }
        }
    }
    return DONE;
}

int quire_linear_silu_mul(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k) {
    if (n % (2 * PANEL)) return BAD_SIZE;
    int64_t panels = n / PANEL / 2, size = (k + 1) / 2 * PANEL * 2, group = GROUP_BYTES / (size * 4);
    int64_t strips = (m + ROWS - 1) / ROWS, width = n / 2;
    if (group < 1) group = 1;
    for (int64_t first = 0; first < panels; first += group) {
        int64_t last = first + group < panels ? first + group : panels;
        for (int64_t s = 0; s < strips; s++) {
            int64_t i = m * s / strips;
            int rows = (int)(m * (s + 1) / strips - i);
            for (int64_t p = first; p < last; p++) {
                bf16 both[ROWS * 2 * PANEL] __attribute__((aligned(64))); /* of each row gates, then what they gate */
                for (int half = 0; half < 2; half++) {
                    int64_t at = p + half * panels;
                    const bf16 *panel = packed + at * size, *ahead = panel;
                    float added[PANEL];
                    for (int64_t j = 0; bias && j < PANEL; j++) added[j] = widen(bias[at * PANEL + j]);
                    if (strips > 2 && strips - s <= 2 && p + group < panels) /* as above */
                        ahead += group * size + (s + 1 == strips) * size / 2;
                    multiply_rows(rows, x + i * k, panel, bias ? added : NULL, both + half * PANEL, k, 2 * PANEL, PANEL,
                                  ahead);
                }
                for (int r = 0; r < rows; r++)
                    silu_mul_vectors(both + r * 2 * PANEL, both + (r * 2 + 1) * PANEL, out + (i + r) * width + p * PANEL,
                                     PANEL);
            }
        }
    }
    return DONE;
}

#else

/* Without such an instruction a pair of weights becomes two float32: shifted up, and with its low half cleared. LANES
 * is a vector register. ROWS x STRIP vectors of sums, and the weights, fit the registers; one and two rows need more
 * vectors, because each sum waits for the one before it. An output is one sum, of whatever rows it is: its products are
 * added in the same order. */
#if defined(__AVX512F__)
enum { LANES = 16, STRIP = 2, STRIP_OF_FEW = 2, ROWS = 8 };
#elif defined(__AVX__)
enum { LANES = 8, STRIP = 2, STRIP_OF_FEW = 4, ROWS = 4 };
#else
enum { LANES = 4, STRIP = 2, STRIP_OF_FEW = 4, ROWS = 4 };
#endif
typedef float Floats __attribute__((vector_size(LANES * 4), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), may_alias));

/* Widened inputs of this many bytes stay in the second-level cache while panels pass by. */
enum { WIDENED_BYTES = 256 << 10 };

/* x [rows][2 * pairs] float32; sums [rows][PANEL], of which `strip` vectors are computed. */
static inline __attribute__((always_inline)) void multiply(const int rows, const int strip, const float *x,
                                                           const bf16 *panel, float *sums, int64_t pairs) {
    Floats a[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < strip; v++) a[r][v] = (Floats){0};
    for (int64_t e = 0; e < pairs; e++) {
#pragma GCC unroll 4
        for (int v = 0; v < strip; v++) {
            Words w;
            memcpy(&w, panel + (e * PANEL + v * LANES) * 2, sizeof w);
            Floats even = (Floats)(w << 16), odd = (Floats)(w & 0xffff0000u);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const float *pair = x + (r * pairs + e) * 2;
                a[r][v] += even * pair[0];
                a[r][v] += odd * pair[1];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < strip; v++) memcpy(sums + r * PANEL + v * LANES, &a[r][v], sizeof(Floats));
}

static void multiply_rows(int rows, const float *x, const bf16 *panel, float *sums, int64_t pairs) {
    int outputs = (rows <= 2 ? STRIP_OF_FEW : STRIP) * LANES;
    for (int j = 0; j < PANEL; j += outputs)
        switch (rows) {
#define CASE(R)                                                                                                        \
    case R:                                                                                                            \
        if (R <= ROWS) multiply(R, R <= 2 ? STRIP_OF_FEW : STRIP, x, panel + j * 2, sums + j, pairs);                  \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#if defined(__AVX512F__)
            CASE(5) CASE(6) CASE(7) CASE(8)
#endif
        }
}

static int multiply_part(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k,
                         int64_t begin, int64_t end, const Ahead *after) {
    (void)after;
    int64_t pairs = (k + 1) / 2;
    int64_t most = WIDENED_BYTES / (pairs * 8) / ROWS * ROWS;
    if (most < ROWS) most = ROWS;
    for (int64_t first = 0; begin < end && first < m; first += most) {
        int64_t rows = m - first < most ? m - first : most;
        float *wide = quire_scratch(rows * pairs * 8);
        if (!wide) return NO_MEMORY;
        for (int64_t i = 0; i < rows; i++) {
            float *to = wide + i * pairs * 2;
            const bf16 *from = x + (first + i) * k;
            for (int64_t e = 0; e < k; e++) to[e] = widen(from[e]);
            if (k & 1) to[k] = 0;
        }
        for (int64_t p = begin; p < end; p++) {
            int64_t at = p * PANEL, width = n - at < PANEL ? n - at : PANEL;
            const bf16 *panel = packed + p * pairs * PANEL * 2;
            float sums[ROWS * PANEL] __attribute__((aligned(64)));
            for (int64_t i = 0; i < rows; i += ROWS) {
                int some = rows - i < ROWS ? (int)(rows - i) : ROWS;
                multiply_rows(some, wide + i * pairs * 2, panel, sums, pairs);
                for (int r = 0; r < some; r++) {
                    bf16 *to = out + (first + i + r) * n + at;
                    for (int64_t j = 0; j < width; j++)
                        to[j] = narrow(sums[r * PANEL + j] + (bias ? widen(bias[at + j]) : 0));
                }
            }
        }
    }
    return DONE;
}
#endif

int quire_linear_part(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k,
                      int64_t begin, int64_t end) {
    return multiply_part(x, packed, bias, out, m, n, k, begin, end, NULL);
}

typedef struct {
    const bf16 *x, *packed, *bias;
    bf16 *out;
    int64_t m, n, k;
    const Ahead *after;
} Product;

/* Of few rows a panel at a time, as long as there are any. */
static int multiply_panels(const void *argument, Worker *worker) {
    const Product *p = argument;
    int64_t panels = (p->n + PANEL - 1) / PANEL, pieces = p->m <= ROWS ? panels : worker->threads, i;
#ifndef HAVE_BF16_DOT
    pieces = worker->threads; /* each widens all inputs */
#endif
    int status = DONE;
    while ((i = quire_take(worker, pieces)) >= 0)
        status |= multiply_part(p->x, p->packed, p->bias, p->out, p->m, p->n, p->k, panels * i / pieces,
                                panels * (i + 1) / pieces, p->after);
    return status;
}

/* x [m, k], packed as above, bias [n] or NULL -> out [m, n]. */
int quire_linear(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k) {
    return quire_linear_before(x, packed, bias, out, m, n, k, NULL);
}

int quire_linear_before(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k,
                        const Ahead *after) {
    if (m < 0 || n < 1 || k < 1) return BAD_SIZE;
    Product product = {x, packed, bias, out, m, n, k, after};
    return quire_share(multiply_panels, &product, n * k > WORTH_THREADS);
}
