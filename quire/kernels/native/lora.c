/* The low-rank terms of adapters: out += B[slot] (A[slot] x), row by row. */

#include "elements.h"

enum {
    CHUNK = 256, /* outputs that a thread takes at once */
    WIDE = 64,   /* of these in registers */
    GROUP = 4,   /* rows of A at once: one sum alone waits for itself, and x is widened once for all */
};

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
    /* out [count] = x times rows of y */                                                                              \
    static inline void NAME##s(float *out, const T *x, const T *y, int64_t n, int64_t count) {                         \
        int64_t r = 0;                                                                                                 \
        for (; r + GROUP <= count; r += GROUP) NAME##_group(out + r, x, y + r * n, n);                                 \
        for (; r < count; r++) out[r] = NAME(x, y + r * n, n);                                                         \
    }
DOT(dot_f32, float, SAME)
DOT(dot_bf16, bf16, widen)

/* out [n] += h [rank] times rows of b, each `stride` from the one before: outputs side by side, not one after the
 * other, because a rank is shorter than a vector. */
#define EXPAND(NAME, T, TO, BACK)                                                                                      \
    static inline void NAME(T *out, const float *h, const T *b, int64_t rank, int64_t stride, int64_t n) {             \
        for (; n >= WIDE; n -= WIDE, out += WIDE, b += WIDE) {                                                         \
            float sum[WIDE] = {0};                                                                                     \
            for (int64_t r = 0; r < rank; r++) {                                                                       \
                const T *row = b + r * stride;                                                                         \
                float scale = h[r];                                                                                    \
                _Pragma("omp simd") for (int64_t j = 0; j < WIDE; j++) sum[j] += scale * TO(row[j]);                   \
            }                                                                                                          \
            _Pragma("omp simd") for (int64_t j = 0; j < WIDE; j++) out[j] = BACK(TO(out[j]) + sum[j]);                 \
        }                                                                                                              \
        float sum[WIDE] = {0};                                                                                         \
        for (int64_t r = 0; r < rank; r++) {                                                                           \
            const T *row = b + r * stride;                                                                             \
            float scale = h[r];                                                                                        \
            _Pragma("omp simd") for (int64_t j = 0; j < n; j++) sum[j] += scale * TO(row[j]);                          \
        }                                                                                                              \
        _Pragma("omp simd") for (int64_t j = 0; j < n; j++) out[j] = BACK(TO(out[j]) + sum[j]);                        \
    }
EXPAND(expand_f32, float, SAME, SAME)
EXPAND(expand_bf16, bf16, widen, narrow)

/* x [n, in], slots [n] (-1: none), ranks [slots], a [slots, width, in], b [slots, rank, outputs], inner [n, width] to
 * work in, out [n, outputs]. The width is that of up to three parts of the outputs, each of one rank, of which the
 * first ranks[slot] are not zero; the second and third part begin at those outputs. Each number is one thread's, so
 * bits do not depend on the number of threads. */
int quire_add_low_rank(const void *x, const int32_t *slots, const int32_t *ranks, const void *a, const void *b,
                       float *inner, void *out, int64_t n, int64_t in, int64_t outputs, int64_t width, int64_t rank,
                       int64_t second, int64_t third, int type) {
    if (n < 0 || in < 1 || outputs < 1 || rank < 1 || width % rank || width < rank || width > 3 * rank) return BAD_SIZE;
    int64_t starts[] = {0, second, third, outputs}, parts = width / rank, chunks = 0;
    int64_t groups = (rank + GROUP - 1) / GROUP; /* of rows of A in a part */
    for (int64_t part = 0; part < parts; part++) {
        if (part + 1 == parts) starts[part + 1] = outputs;
        if (starts[part] > starts[part + 1] || starts[part + 1] > outputs) return BAD_SIZE;
        chunks += (starts[part + 1] - starts[part] + CHUNK - 1) / CHUNK;
    }
#pragma omp parallel if (n * (width * in + outputs * rank) > WORTH_THREADS)
    {
#pragma omp for collapse(2)
        for (int64_t i = 0; i < n; i++)
            for (int64_t g = 0; g < parts * groups; g++) {
                int64_t first = g % groups * GROUP, r = g / groups * rank + first; /* of the part's, of all */
                if (slots[i] < 0 || first >= ranks[slots[i]]) continue;
                int64_t left = ranks[slots[i]] - first, count = left < GROUP ? left : GROUP;
                int64_t from = i * in, at = (slots[i] * width + r) * in;
                float *to = inner + i * width + r;
                if (type) dot_bf16s(to, (const bf16 *)x + from, (const bf16 *)a + at, in, count);
                else dot_f32s(to, (const float *)x + from, (const float *)a + at, in, count);
            }
#pragma omp for collapse(2)
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = 0; c < chunks; c++) {
                if (slots[i] < 0 || !ranks[slots[i]]) continue;
                int64_t part = 0, first = c;
                for (;; part++) {
                    int64_t own = (starts[part + 1] - starts[part] + CHUNK - 1) / CHUNK;
                    if (first < own) break;
                    first -= own;
                }
                int64_t begin = starts[part] + first * CHUNK;
                int64_t count = starts[part + 1] - begin < CHUNK ? starts[part + 1] - begin : CHUNK;
                const float *h = inner + i * width + part * rank;
                int64_t from = slots[i] * rank * outputs + begin, to = i * outputs + begin;
                if (type)
                    expand_bf16((bf16 *)out + to, h, (const bf16 *)b + from, ranks[slots[i]], outputs, count);
                else expand_f32((float *)out + to, h, (const float *)b + from, ranks[slots[i]], outputs, count);
            }
    }
    return DONE;
}
