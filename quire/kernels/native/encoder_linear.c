/* Encoders' linear layers, in bf16 and float32, each in one pass with what follows it: the activation, or the sum with the
 * residual and its norm. AVX-512 with bf16 instructions; elsewhere torch does it. */

#include "elements.h"
#include "encoder_products.h"

int quire_encoder_kernels(void) {
#ifdef HAVE_BF16_VECTORS
    return 1;
#else
    return 0;
#endif
}

#ifdef HAVE_BF16_VECTORS

/* Of up to SOME_ROWS each thread computes some panels of all rows: equal shares of FEW_ROWS, else as many as it gets done.
 * Of more it takes blocks of rows, whose inputs stay in the second-level cache while all panels pass by; the last ones are
 * smaller, so that threads end together. Work is not divided beforehand because other threads need these cores too. */
enum { FEW_ROWS = 2 * STRIP, SOME_ROWS = 32 * STRIP, BLOCK = 8 * STRIP, LAST_BLOCK = 2 * STRIP };
/* A thread alone has nobody to end with: its blocks are about equal, of up to so many rows. */
enum { LONE_BLOCK = 10 * STRIP };
/* From so many strips on, the next panel is fetched beforehand: it takes as long as some of them. */
enum { FETCHING = 5 };

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

INLINE void activate(const int rows, int kind, __m512 *sums) {
    if (kind < 0) return;
    __m512 kept[2 * STRIP];
#pragma GCC unroll 24
    for (int r = 0; r < 2 * rows; r++) kept[r] = sums[r];
    activate_sums(kept, 2 * rows, kind);
#pragma GCC unroll 24
    for (int r = 0; r < 2 * rows; r++) sums[r] = kept[r];
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
    const void *residual; /* [m, n], or NULL: no norm */
    const float *norm_weight, *norm_bias;
    int64_t n, k;
    float eps;
    int activation, type;
} Linear;

INLINE void linear_bf16(const int rows, const Linear *l, int64_t i, int64_t p, const char *ahead) {
    int64_t at = p * PANEL, pairs = (l->k + 1) / 2;
    __mmask16 low = first_lanes(l->n - at), high = l->n - at > 16 ? first_lanes(l->n - at - 16) : 0;
    const bf16 *bias = (const bf16 *)l->bias + at, *x = (const bf16 *)l->x + i * l->k;
    const bf16 *panel = (const bf16 *)l->packed + p * pairs * PANEL * 2;
    __m512 sums[2 * STRIP], zero = _mm512_setzero_ps();
    start(rows, sums, l->bias ? load16(bias, low) : zero, l->bias ? load16(bias + 16, high) : zero);
    multiply_bf16(rows, x, l->k, panel, l->k / 2, sums, ahead);
    if (l->k & 1) {
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + l->k / 2 * 64);
        __m512bh w1 = (__m512bh)_mm512_loadu_si512(panel + l->k / 2 * 64 + 32);
        for (int r = 0; r < rows; r++) {
            __m512bh v = (__m512bh)_mm512_set1_epi32(x[r * l->k + l->k - 1]);
            sums[2 * r] = _mm512_dpbf16_ps(sums[2 * r], w0, v);
            sums[2 * r + 1] = _mm512_dpbf16_ps(sums[2 * r + 1], w1, v);
        }
    }
    activate(rows, l->activation, sums);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        bf16 *out = (bf16 *)l->out + (i + r) * l->n + at;
        store16(out, low, sums[2 * r]);
        store16(out + 16, high, sums[2 * r + 1]);
    }
}

INLINE void linear_f32(const int rows, const Linear *l, int64_t i, int64_t p, const char *ahead) {
    int64_t at = p * PANEL;
    __mmask16 low = first_lanes(l->n - at), high = l->n - at > 16 ? first_lanes(l->n - at - 16) : 0;
    const float *bias = (const float *)l->bias + at;
    __m512 sums[2 * STRIP], zero = _mm512_setzero_ps();
    start(rows, sums, l->bias ? _mm512_maskz_loadu_ps(low, bias) : zero,
          l->bias ? _mm512_maskz_loadu_ps(high, bias + 16) : zero);
    multiply_f32(rows, (const float *)l->x + i * l->k, l->k, (const float *)l->packed + at * l->k, PANEL, l->k, 0xffff,
                 0xffff, sums, ahead);
    activate(rows, l->activation, sums);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        float *out = (float *)l->out + (i + r) * l->n + at;
        _mm512_mask_storeu_ps(out, low, sums[2 * r]);
        _mm512_mask_storeu_ps(out + 16, high, sums[2 * r + 1]);
    }
}

/* Rows [first, last) with panels [from, to), each of which stays in the nearest cache while the rows pass by. The first
 * strips of a panel fetch the next one, half of it each; behind the last that is `then`. */
static void linear_part(const Linear *l, int64_t first, int64_t last, int64_t from, int64_t to, int64_t then) {
    int64_t strips = (last - first + STRIP - 1) / STRIP, panels = (l->n + PANEL - 1) / PANEL;
    int64_t half = l->type ? l->k / 2 * 64 : l->k * 64;
    for (int64_t p = from; p < to; p++) {
        int64_t next = p + 1 < to ? p + 1 : then;
        const char *ahead = strips >= FETCHING && next < panels ? (const char *)l->packed + next * 2 * half : 0;
        for (int64_t s = 0; s < strips; s++) { /* of about equally many rows: few of them do not fill the pipelines */
            int64_t i = first + (last - first) * s / strips;
            int rows = (int)(first + (last - first) * (s + 1) / strips - i);
            const char *lines = ahead && s < 2 ? ahead + s * half : (const char *)l->packed + p * 2 * half;
            if (l->type) FOR_ROWS(rows, linear_bf16(R, l, i, p, lines))
            else FOR_ROWS(rows, linear_f32(R, l, i, p, lines))
        }
    }
}

static void norm_rows(const Linear *l, int64_t first, int64_t last) {
    int64_t at = first * l->n * (l->type ? 2 : 4);
    char *out = (char *)l->out + at;
    if (l->residual)
        quire_layer_norm_rows((const char *)l->residual + at, out, l->norm_weight, l->norm_bias, out, last - first, l->n,
                              l->eps, l->type);
}

/* x [m, k], bias [n] or NULL -> out [m, n], activated unless `activation` is negative. With a residual [m, n]: its sum with
 * that, normed. */
int quire_encoder_linear(const void *x, const void *packed, const void *bias, void *out, const void *residual,
                         const float *norm_weight, const float *norm_bias, int64_t m, int64_t n, int64_t k, float eps,
                         int activation, int type) {
    if (m < 0 || n < 1 || k < 1 || activation > RELU) return BAD_SIZE;
    Linear l = {x, packed, bias, out, residual, norm_weight, norm_bias, n, k, eps, activation, type};
    int64_t panels = (n + PANEL - 1) / PANEL, blocks = m * 3 / 4 / BLOCK, rest = m - blocks * BLOCK;
    int64_t tasks = blocks + (rest + LAST_BLOCK - 1) / LAST_BLOCK;
    int pinned = quire_pinned();
#pragma omp parallel if (n * k > WORTH_THREADS)
    {
        quire_stay(pinned);
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        if (threads == 1) {
            int64_t parts = (m + LONE_BLOCK - 1) / LONE_BLOCK;
            for (int64_t part = 0; part < parts; part++) {
                linear_part(&l, m * part / parts, m * (part + 1) / parts, 0, panels, part + 1 < parts ? 0 : panels);
                norm_rows(&l, m * part / parts, m * (part + 1) / parts);
            }
        } else if (m > SOME_ROWS) {
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t task = 0; task < tasks; task++) {
                int64_t first = task < blocks ? task * BLOCK : blocks * BLOCK + (task - blocks) * LAST_BLOCK;
                int64_t last = first + (task < blocks ? BLOCK : LAST_BLOCK);
                last = last < m ? last : m;
                linear_part(&l, first, last, 0, panels, panels);
                norm_rows(&l, first, last);
            }
        } else {
            if (m > FEW_ROWS) {
                int64_t some = panels / (6 * threads) < 1 ? 1 : panels / (6 * threads);
#pragma omp for schedule(dynamic, 1) nowait
                for (int64_t p = 0; p < panels; p += some)
                    linear_part(&l, 0, m, p, p + some < panels ? p + some : panels, p + some * threads);
            } else linear_part(&l, 0, m, panels * thread / threads, panels * (thread + 1) / threads, panels);
            if (residual) {
#pragma omp barrier
                norm_rows(&l, m * thread / threads, m * (thread + 1) / threads);
            }
        }
    }
    return DONE;
}

#endif
