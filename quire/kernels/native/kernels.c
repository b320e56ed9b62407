/* The CPU's element-wise kernels. Called through ctypes with raw pointers.
 *
 * Compiled for the machine it runs on, with OpenMP calls left open: they bind to the copy of libgomp that torch has
 * loaded, so that both share one pool of threads. Element types: 0 float32, 1 bfloat16. Every function here has a torch
 * twin in quire/kernels/ or quire/attention/. */

#include "elements.h"
#include "threads.h"
#include "vectors.h"

/* In a norm: row i of the residual, if there is one, becomes the sum, and what is normed. */
#define ADD_RESIDUAL(T, TO, FROM)                                                                                      \
    if (residual) {                                                                                                    \
        T *r = residual + i * d;                                                                                       \
        for (int64_t j = 0; j < d; j++) r[j] = FROM(TO(a[j]) + TO(r[j]));                                              \
        a = r;                                                                                                         \
    }

/* Rows of x [n, d], `stride` apart, with residual added first where there is one: the sum, rounded, is written over the
 * residual. Norms' weights are float32 whatever the type of x. */
#define RMS_NORM(NAME, T, TO, FROM)                                                                                    \
    static void NAME(const T *x, T *residual, const float *weight, T *out, int64_t n, int64_t d, int64_t stride,       \
                     float eps) {                                                                                      \
        _Pragma("omp parallel for if (n * d > WORTH_THREADS)") for (int64_t i = 0; i < n; i++) {                       \
            const T *a = x + i * stride;                                                                               \
            T *o = out + i * d;                                                                                        \
            ADD_RESIDUAL(T, TO, FROM)                                                                                  \
            float sum = 0;                                                                                             \
            _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < d; j++) sum += TO(a[j]) * TO(a[j]);         \
            float scale = 1.0f / sqrtf(sum / d + eps);                                                                 \
            for (int64_t j = 0; j < d; j++) o[j] = FROM(TO(a[j]) * scale * weight[j]);                                 \
        }                                                                                                              \
    }
#define SAME(x) (x)
RMS_NORM(rms_norm_f32, float, SAME, SAME)
RMS_NORM(rms_norm_bf16, bf16, widen, narrow)

int quire_rms_norm(const void *x, void *residual, const float *weight, void *out, int64_t n, int64_t d, int64_t stride,
                   float eps, int type) {
    if (n < 0 || d < 1 || stride < d) return BAD_SIZE;
#ifdef HAVE_BF16_VECTORS
    if (type) {
#pragma omp parallel for if (n * d > WORTH_THREADS)
        for (int64_t i = 0; i < n; i++)
            rms_norm_vectors((const bf16 *)x + i * stride, residual ? (bf16 *)residual + i * d : 0, weight,
                             (bf16 *)out + i * d, d, eps);
        return DONE;
    }
#endif
    if (type) rms_norm_bf16(x, residual, weight, out, n, d, stride, eps);
    else rms_norm_f32(x, residual, weight, out, n, d, stride, eps);
    return DONE;
}

/* The same with the mean taken off, and a bias where there is one. */
#define LAYER_NORM(NAME, T, TO, FROM)                                                                                  \
    static void NAME(const T *x, T *residual, const float *weight, const float *bias, T *out, int64_t n, int64_t d,    \
                     float eps) {                                                                                      \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const T *a = x + i * d;                                                                                    \
            T *o = out + i * d;                                                                                        \
            ADD_RESIDUAL(T, TO, FROM)                                                                                  \
            float sum = 0, squares = 0;                                                                                \
            _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < d; j++) sum += TO(a[j]);                    \
            float mean = sum / d;                                                                                      \
            _Pragma("omp simd reduction(+ : squares)") for (int64_t j = 0; j < d; j++) {                               \
                float off = TO(a[j]) - mean;                                                                           \
                squares += off * off;                                                                                  \
            }                                                                                                          \
            float scale = 1.0f / sqrtf(squares / d + eps);                                                             \
            for (int64_t j = 0; j < d; j++)                                                                            \
                o[j] = FROM((TO(a[j]) - mean) * scale * weight[j] + (bias ? bias[j] : 0.0f));                          \
        }                                                                                                              \
    }
LAYER_NORM(layer_norm_f32, float, SAME, SAME)
LAYER_NORM(layer_norm_bf16, bf16, widen, narrow)

void quire_layer_norm_rows(const void *x, void *residual, const float *weight, const float *bias, void *out, int64_t n,
                           int64_t d, float eps, int type) {
#ifdef HAVE_BF16_VECTORS
    if (type) {
        for (int64_t i = 0; i < n; i++)
            layer_norm_vectors((const bf16 *)x + i * d, residual ? (bf16 *)residual + i * d : 0, weight, bias,
                               (bf16 *)out + i * d, d, eps);
        return;
    }
#endif
    if (type) layer_norm_bf16(x, residual, weight, bias, out, n, d, eps);
    else layer_norm_f32(x, residual, weight, bias, out, n, d, eps);
}

int quire_layer_norm(const void *x, void *residual, const float *weight, const float *bias, void *out, int64_t n,
                     int64_t d, float eps, int type) {
    if (n < 0 || d < 1) return BAD_SIZE;
#pragma omp parallel if (n * d > WORTH_THREADS)
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t first = n * thread / threads, last = n * (thread + 1) / threads, at = first * d * (type ? 2 : 4);
        quire_layer_norm_rows((const char *)x + at, residual ? (char *)residual + at : 0, weight, bias, (char *)out + at,
                              last - first, d, eps, type);
    }
    return DONE;
}

#define SUM_ROWS(NAME, T, TO)                                                                                          \
    static void NAME(const T *x, float *out, int64_t count, int64_t d) {                                               \
        for (int64_t j = 0; j < d; j++) out[j] = 0;                                                                    \
        for (int64_t i = 0; i < count; i++)                                                                            \
            for (int64_t j = 0; j < d; j++) out[j] += TO(x[i * d + j]);                                                \
    }
SUM_ROWS(sum_rows_f32, float, SAME)
SUM_ROWS(sum_rows_bf16, bf16, widen)

/* Of rows of x [rows, d] the sum of each of n chunks, counts[i] rows from firsts[i] on -> out [n, d] float32. */
int quire_sum_rows(const void *x, const int64_t *firsts, const int64_t *counts, float *out, int64_t rows, int64_t n,
                   int64_t d, int type) {
    if (n < 0 || d < 1) return BAD_SIZE;
    for (int64_t i = 0; i < n; i++)
        if (firsts[i] < 0 || counts[i] < 0 || firsts[i] + counts[i] > rows) return BAD_SIZE;
#pragma omp parallel for schedule(dynamic, 1) if (rows * d > WORTH_THREADS && n > 1)
    for (int64_t i = 0; i < n; i++) {
        if (type) sum_rows_bf16((const bf16 *)x + firsts[i] * d, out + i * d, counts[i], d);
        else sum_rows_f32((const float *)x + firsts[i] * d, out + i * d, counts[i], d);
    }
    return DONE;
}

/* out [n, d] = a + b. With rows, b is a table whose rows they number. */
int quire_add(const void *a, const void *b, const int64_t *rows, void *out, int64_t n, int64_t d, int type) {
    if (n < 0 || d < 1) return BAD_SIZE;
#pragma omp parallel for if (n * d > WORTH_THREADS)
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i * d, from = (rows ? rows[i] : i) * d;
#ifdef HAVE_BF16_VECTORS
        if (type) {
            add_vectors((const bf16 *)a + at, (const bf16 *)b + from, (bf16 *)out + at, d);
            continue;
        }
#endif
        for (int64_t j = 0; j < d; j++) store(out, at + j, load(a, at + j, type) + load(b, from + j, type), type);
    }
    return DONE;
}

/* As quire/kernels/activation.py numbers them. */
enum { SILU, GELU_TANH, GELU, RELU };

static inline __attribute__((always_inline)) float activated(float x, int kind) {
    switch (kind) {
    case SILU: return x / (1.0f + exp_fast(-x));
    case GELU_TANH: return x / (1.0f + exp_fast(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    default: return x < 0 ? 0 : x; /* NaN stays */
    }
}

/* [n, d] -> [n, d], or if gated [n, 2 * d], gate before up -> [n, d]. */
#define ACTIVATE(NAME, T, TO, FROM)                                                                                    \
    static inline __attribute__((always_inline)) void NAME##_row(const T *x, const T *up, T *out, int64_t d, int kind) {\
        for (int64_t j = 0; j < d; j++) {                                                                              \
            float v = activated(TO(x[j]), kind);                                                                       \
            out[j] = FROM(up ? v * TO(up[j]) : v);                                                                     \
        }                                                                                                              \
    }                                                                                                                  \
    static void NAME(const T *x, T *out, int64_t n, int64_t d, int gated, int kind) {                                  \
        _Pragma("omp parallel for if (n * d > WORTH_THREADS)") for (int64_t i = 0; i < n; i++) {                       \
            const T *row = x + i * d * (gated ? 2 : 1), *up = gated ? row + d : 0;                                     \
            T *o = out + i * d;                                                                                        \
            switch (kind) {                                                                                            \
            case SILU: NAME##_row(row, up, o, d, SILU); break;                                                         \
            case GELU_TANH: NAME##_row(row, up, o, d, GELU_TANH); break;                                               \
            case GELU: NAME##_row(row, up, o, d, GELU); break;                                                         \
            case RELU: NAME##_row(row, up, o, d, RELU); break;                                                         \
            }                                                                                                          \
        }                                                                                                              \
    }
ACTIVATE(activate_f32, float, SAME, SAME)
ACTIVATE(activate_bf16, bf16, widen, narrow)

int quire_activate(const void *x, void *out, int64_t n, int64_t d, int gated, int kind, int type) {
    if (n < 0 || d < 1 || kind < SILU || kind > RELU) return BAD_SIZE;
#ifdef HAVE_BF16_VECTORS
    if (type && gated && kind == SILU) {
#pragma omp parallel for if (n * d > WORTH_THREADS)
        for (int64_t i = 0; i < n; i++)
            silu_mul_vectors((const bf16 *)x + 2 * i * d, (const bf16 *)x + (2 * i + 1) * d, (bf16 *)out + i * d, d);
        return DONE;
    }
#endif
#ifdef HAVE_BF16_VECTORS
    if (kind == GELU) {
#pragma omp parallel for if (n * d > WORTH_THREADS)
        for (int64_t i = 0; i < n; i++) {
            int64_t at = i * d * (gated ? 2 : 1);
            if (type) gelu_vectors((const bf16 *)x + at, gated ? (const bf16 *)x + at + d : 0, (bf16 *)out + i * d, d);
            else gelu_vectors_f32((const float *)x + at, gated ? (const float *)x + at + d : 0, (float *)out + i * d, d);
        }
        return DONE;
    }
#endif
    if (type) activate_bf16(x, out, n, d, gated, kind);
    else activate_f32(x, out, n, d, gated, kind);
    return DONE;
}

/* A vector x [d] to its slot of a cache in int8, with its scale. head: values' after those of keys. As kv_scales.py rounds. */
static void write_int8(const float *x, void *cache, float *scales, int64_t page, int64_t slot, int64_t block_size,
                       int64_t head, int64_t d) {
    int64_t block = slot / block_size, place = head * block_size + slot % block_size;
    int8_t *to = (int8_t *)cache + block * page + place * d;
    float most = 1e-20f;
    _Pragma("omp simd reduction(max : most)") for (int64_t j = 0; j < d; j++) {
        float size = fabsf(x[j]);
        most = size > most ? size : most;
    }
    float factor = 127.0f / most;
    for (int64_t j = 0; j < d; j++) to[j] = (int8_t)floorf(x[j] * factor + 0.5f);
    *((float *)((char *)scales + block * page) + place) = most * (1.0f / 127.0f);
}

/* qkv [n, (heads + 2 * kv_heads) * d] -> q [n, heads, d] normed and rotated, keys and values in their pages.
 * norms: weights of queries, then of keys, float32, or NULL; table [positions, r]: cosines of r / 2 angles, then sines, or
 * NULL. scales: of a cache in int8, [blocks, 2, kv_heads, block_size] inside its pages of `page` bytes, to be written; or
 * NULL. */
int quire_rope_and_write(const void *qkv, void *q, void *cache, const float *q_weight, const float *k_weight, float eps,
                         const void *table, const int64_t *positions, const int64_t *slots, int64_t n, int64_t heads,
                         int64_t kv_heads, int64_t d, int64_t r, int64_t block_size, float *scales, int64_t page,
                         int type) {
    enum { MAX_D = 1024 };
    if (n < 0 || heads < 1 || kv_heads < 1 || d < 1 || d > MAX_D || block_size < 1) return BAD_SIZE;
    if (table && (r < 2 || r > d || r % 2)) return BAD_SIZE;
    if (scales && page < 2 * kv_heads * block_size * (d + 4)) return BAD_SIZE;
    int64_t all = heads + 2 * kv_heads;
#pragma omp parallel for if (n * all * d > WORTH_THREADS)
    for (int64_t i = 0; i < n; i++) {
        float x[MAX_D];
        for (int64_t h = 0; h < all; h++) {
            int64_t from = (i * all + h) * d;
            int is_v = h >= heads + kv_heads, is_q = h < heads;
#ifdef HAVE_BF16_VECTORS
            if (type) {
                int64_t head = is_v ? h - heads - kv_heads : h - heads;
                int64_t head_page = (slots[i] / block_size * 2 + is_v) * kv_heads + head;
                bf16 *to = is_q ? (bf16 *)q + (i * heads + h) * d
                                : (bf16 *)cache + (head_page * block_size + slots[i] % block_size) * d;
                const float *weight = is_v ? 0 : is_q ? q_weight : k_weight;
                const bf16 *angles = table && !is_v ? (const bf16 *)table + positions[i] * r : 0;
                bf16 kept[MAX_D];
                rope_vectors((const bf16 *)qkv + from, scales && !is_q ? kept : to, weight, eps, angles, r, d);
                if (scales && !is_q) {
                    for (int64_t j = 0; j < d; j++) x[j] = widen(kept[j]);
                    write_int8(x, cache, scales, page, slots[i], block_size, h - heads, d);
                }
                continue;
            }
#endif
            for (int64_t j = 0; j < d; j++) x[j] = load(qkv, from + j, type);
            if (q_weight && !is_v) {
                const float *weight = is_q ? q_weight : k_weight;
                float sum = 0;
                for (int64_t j = 0; j < d; j++) sum += x[j] * x[j];
                float scale = 1.0f / sqrtf(sum / d + eps);
                for (int64_t j = 0; j < d; j++) x[j] *= scale * weight[j];
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
            } else if (scales) {
                write_int8(x, cache, scales, page, slots[i], block_size, h - heads, d);
            } else {
                int64_t head = is_v ? h - heads - kv_heads : h - heads;
                int64_t head_page = (slots[i] / block_size * 2 + is_v) * kv_heads + head;
                int64_t to = (head_page * block_size + slots[i] % block_size) * d;
                for (int64_t j = 0; j < d; j++) store(cache, to + j, x[j], type);
            }
        }
    }
    return DONE;
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

int quire_argmax(const void *x, int64_t *out, int64_t n, int64_t d, int type) {
    if (n < 0 || d < 1) return BAD_SIZE;
#pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++)
        out[i] = type ? argmax_bf16((const bf16 *)x + i * d, d) : argmax_f32((const float *)x + i * d, d);
    return DONE;
}
