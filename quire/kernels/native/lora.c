/* The low-rank terms of adapters: out += B[slot] (A[slot] x), row by row. */

#include "elements.h"

enum { CHUNK = 64 }; /* outputs that a thread takes at once */

#define SAME(x) (x)
#define DOT(NAME, T, TO)                                                                                               \
    static inline float NAME(const T *x, const T *y, int64_t n) {                                                      \
        float sum = 0;                                                                                                 \
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++) sum += TO(x[i]) * TO(y[i]);             \
        return sum;                                                                                                    \
    }
DOT(dot_f32, float, SAME)
DOT(dot_bf16, bf16, widen)

static inline float dot_inner(const float *x, const void *y, int64_t at, int64_t n, int type) {
    if (!type) return dot_f32(x, (const float *)y + at, n);
    const bf16 *b = (const bf16 *)y + at;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * widen(b[i]);
    return sum;
}

/* x [n, in], slots [n] (-1: none), a [slots, width, in], b [slots, outputs, rank], inner [n, width] to work in, out
 * [n, outputs]. The width is that of up to three parts of the outputs, each of one rank; the second and third part
 * begin at those outputs. Each number is one thread's, so bits do not depend on the number of threads. */
int quire_add_low_rank(const void *x, const int32_t *slots, const void *a, const void *b, float *inner, void *out,
                       int64_t n, int64_t in, int64_t outputs, int64_t width, int64_t rank, int64_t second,
                       int64_t third, int type) {
    if (n < 0 || in < 1 || outputs < 1 || rank < 1 || width % rank || width < rank || width > 3 * rank) return BAD_SIZE;
    int64_t chunks = (outputs + CHUNK - 1) / CHUNK;
#pragma omp parallel if (n * (width * in + outputs * rank) > WORTH_THREADS)
    {
#pragma omp for collapse(2)
        for (int64_t i = 0; i < n; i++)
            for (int64_t r = 0; r < width; r++) {
                if (slots[i] < 0) continue;
                int64_t from = i * in, at = (slots[i] * width + r) * in;
                inner[i * width + r] = type ? dot_bf16((const bf16 *)x + from, (const bf16 *)a + at, in)
                                            : dot_f32((const float *)x + from, (const float *)a + at, in);
            }
#pragma omp for collapse(2)
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = 0; c < chunks; c++) {
                if (slots[i] < 0) continue;
                int64_t end = (c + 1) * CHUNK < outputs ? (c + 1) * CHUNK : outputs;
                for (int64_t j = c * CHUNK; j < end; j++) {
                    const float *h = inner + i * width + ((j >= second) + (j >= third)) * rank;
                    float term = dot_inner(h, b, (slots[i] * outputs + j) * rank, rank, type);
                    store(out, i * outputs + j, load(out, i * outputs + j, type) + term, type);
                }
            }
    }
    return DONE;
}
