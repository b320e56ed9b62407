/* The CPU's element-wise kernels. Called through ctypes with raw pointers.
 *
 * Compiled for the machine it runs on, with OpenMP calls left open: they bind to the copy of libgomp that torch has
 * loaded, so that both share one pool of threads. Element types: 0 float32, 1 bfloat16. Every function here has a torch
 * twin in quire/kernels/ or quire/attention/. */

#include "elements.h"

/* Rows of x [n, d], with residual added first where there is one: the sum, rounded, is written over the residual. */
#define RMS_NORM(NAME, T, TO, FROM)                                                                                    \
    static void NAME(const T *x, T *residual, const T *weight, T *out, int64_t n, int64_t d, float eps) {              \
        _Pragma("omp parallel for if (n * d > WORTH_THREADS)") for (int64_t i = 0; i < n; i++) {                       \
            const T *a = x + i * d;                                                                                    \
            T *o = out + i * d;                                                                                        \
            if (residual) {                                                                                            \
                T *r = residual + i * d;                                                                               \
                for (int64_t j = 0; j < d; j++) r[j] = FROM(TO(a[j]) + TO(r[j]));                                      \
                a = r;                                                                                                 \
            }                                                                                                          \
            float sum = 0;                                                                                             \
            _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < d; j++) sum += TO(a[j]) * TO(a[j]);         \
            float scale = 1.0f / sqrtf(sum / d + eps);                                                                 \
            for (int64_t j = 0; j < d; j++) o[j] = FROM(TO(a[j]) * scale * TO(weight[j]));                             \
        }                                                                                                              \
    }
#define SAME(x) (x)
RMS_NORM(rms_norm_f32, float, SAME, SAME)
RMS_NORM(rms_norm_bf16, bf16, widen, narrow)

void quire_rms_norm(const void *x, void *residual, const void *weight, void *out, int64_t n, int64_t d, float eps,
                    int type) {
    if (type) rms_norm_bf16(x, residual, weight, out, n, d, eps);
    else rms_norm_f32(x, residual, weight, out, n, d, eps);
}

/* [n, 2 * d], gate before up -> [n, d]. */
#define SILU_MUL(NAME, T, TO, FROM)                                                                                    \
    static void NAME(const T *x, T *out, int64_t n, int64_t d) {                                                       \
        _Pragma("omp parallel for if (n * d > WORTH_THREADS)") for (int64_t i = 0; i < n; i++) {                       \
            const T *gate = x + 2 * i * d, *up = gate + d;                                                             \
            T *o = out + i * d;                                                                                        \
            for (int64_t j = 0; j < d; j++) {                                                                          \
                float g = TO(gate[j]);                                                                                 \
                o[j] = FROM(g / (1.0f + exp_fast(-g)) * TO(up[j]));                                                    \
            }                                                                                                          \
        }                                                                                                              \
    }
SILU_MUL(silu_mul_f32, float, SAME, SAME)
SILU_MUL(silu_mul_bf16, bf16, widen, narrow)

void quire_silu_mul(const void *x, void *out, int64_t n, int64_t d, int type) {
    if (type) silu_mul_bf16(x, out, n, d);
    else silu_mul_f32(x, out, n, d);
}

/* qkv [n, (heads + 2 * kv_heads) * d] -> q [n, heads, d] normed and rotated, keys and values in their pages.
 * norms: weights of queries, then of keys, or NULL; table [positions, r]: cosines of r / 2 angles, then sines, or NULL. */
void quire_rope_and_write(const void *qkv, void *q, void *cache, const void *q_weight, const void *k_weight, float eps,
                          const void *table, const int64_t *positions, const int64_t *slots, int64_t n, int64_t heads,
                          int64_t kv_heads, int64_t d, int64_t r, int64_t block_size, int type) {
    int64_t all = heads + 2 * kv_heads;
#pragma omp parallel for if (n * all * d > WORTH_THREADS)
    for (int64_t i = 0; i < n; i++) {
        float x[1024];
        for (int64_t h = 0; h < all; h++) {
            int64_t from = (i * all + h) * d;
            int is_v = h >= heads + kv_heads, is_q = h < heads;
            for (int64_t j = 0; j < d; j++) x[j] = load(qkv, from + j, type);
            if (q_weight && !is_v) {
                const void *weight = is_q ? q_weight : k_weight;
                float sum = 0;
                for (int64_t j = 0; j < d; j++) sum += x[j] * x[j];
                float scale = 1.0f / sqrtf(sum / d + eps);
                for (int64_t j = 0; j < d; j++) x[j] *= scale * load(weight, j, type);
            }
            if (table && !is_v) {
                int64_t half = r / 2, at = positions[i] * r;
                for (int64_t j = 0; j < half; j++) {
                    float c = load(table, at + j, type), s = load(table, at + half + j, type);
                    float a = x[j], b = x[half + j];
                    x[j] = a * c - b * s;
                    x[half + j] = b * c + a * s;
                }
            }
            if (is_q) {
                int64_t to = (i * heads + h) * d;
                for (int64_t j = 0; j < d; j++) store(q, to + j, x[j], type);
            } else {
                int64_t head = is_v ? h - heads - kv_heads : h - heads;
                int64_t page = (slots[i] / block_size * 2 + is_v) * kv_heads + head;
                int64_t to = (page * block_size + slots[i] % block_size) * d;
                for (int64_t j = 0; j < d; j++) store(cache, to + j, x[j], type);
            }
        }
    }
}

/* x [n, d] -> the first greatest of each row, a NaN being greater than anything. */
#define ARGMAX(NAME, T, TO)                                                                                            \
    static int64_t NAME(const T *x, int64_t d) {                                                                       \
        enum { AT_ONCE = 256 };                                                                                        \
        float most = -INFINITY;                                                                                        \
        int64_t best = 0;                                                                                              \
        for (int64_t at = 0; at < d; at += AT_ONCE) {                                                                  \
            int64_t count = d - at < AT_ONCE ? d - at : AT_ONCE;                                                       \
            int greater = 0;                                                                                           \
            _Pragma("omp simd reduction(| : greater)") for (int64_t j = 0; j < count; j++) greater |=                  \
                !(TO(x[at + j]) <= most);                                                                              \
            if (!greater) continue;                                                                                    \
            for (int64_t j = at; j < at + count; j++) {                                                                \
                float value = TO(x[j]);                                                                                \
                if (value != value) return j;                                                                          \
                if (value > most) most = value, best = j;                                                              \
            }                                                                                                          \
        }                                                                                                              \
        return best;                                                                                                   \
    }
ARGMAX(argmax_f32, float, SAME)
ARGMAX(argmax_bf16, bf16, widen)

void quire_argmax(const void *x, int64_t *out, int64_t n, int64_t d, int type) {
#pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++)
        out[i] = type ? argmax_bf16((const bf16 *)x + i * d, d) : argmax_f32((const float *)x + i * d, d);
}
