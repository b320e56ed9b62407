/* The C kernels as an ARM processor runs them, against plain sums: `make test-arm` compiles this with them for aarch64 and
 * runs it in an emulator. Numbers are small integers or bounded errors; a line for every kernel, and 1 if one is wrong. */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "bf16.h"

int quire_linear_kind(void);
int quire_amx_start(void);
int64_t quire_quantized_panel_bytes(int, int64_t);
int quire_pack_linear(const bf16 *, bf16 *, int64_t, int64_t);
int quire_linear(const bf16 *, const bf16 *, const bf16 *, bf16 *, int64_t, int64_t, int64_t);
int quire_quantize_weight(int, const void *, uint8_t *, int64_t, int64_t, int);
int quire_pack_quantized(int, const uint8_t *, uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t);
int quire_quantized_lookup(int, const uint8_t *, const int64_t *, void *, int64_t, int64_t, int64_t, int);
int quire_quantized_linear(const void *, const int64_t *, int64_t, const void *, void *, int64_t, int64_t, int64_t, int,
                            int);
int quire_rms_norm(const void *, void *, const float *, void *, int64_t, int64_t, int64_t, float, int);
int quire_activate(const void *, void *, int64_t, int64_t, int, int, int);
int quire_argmax(const void *, int64_t *, int64_t, int64_t, int);
int quire_attention(const void *, void *, const void *, const int64_t *, const int32_t *, const int32_t *,
                     const int32_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     float, float, const float *, const float *, float *, int64_t, const float *, int64_t, int, int);

static int failures;

static void say(const char *what, int right) {
    printf("%-28s %s\n", what, right ? "right" : "WRONG");
    failures += !right;
}

static float random_number(void) { return (float)(rand() % 2001 - 1000) / 1000; }

static bf16 *random_bf16(int64_t count) {
    bf16 *made = malloc(count * 2);
    for (int64_t i = 0; i < count; i++) made[i] = narrow(random_number());
    return made;
}

static int near(double a, double b, double limit) { return fabs(a - b) <= limit * (1 + fabs(b)); }

static void check_linear(int64_t m, int64_t n, int64_t k) {
    bf16 *x = random_bf16(m * k), *weight = random_bf16(n * k), *bias = random_bf16(n), *out = malloc(m * n * 2);
    bf16 *packed = aligned_alloc(64, (n + PANEL - 1) / PANEL * ((k + 1) / 2) * PANEL * 4);
    quire_pack_linear(weight, packed, n, k);
    quire_linear(x, packed, bias, out, m, n, k);
    int right = 1;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = widen(bias[j]);
            for (int64_t e = 0; e < k; e++) sum += (double)widen(x[i * k + e]) * widen(weight[j * k + e]);
            right &= near(widen(out[i * n + j]), sum, 0.01);
        }
    char name[64];
    snprintf(name, sizeof name, "linear %d x %d x %d", (int)m, (int)n, (int)k);
    say(name, right);
}

static void check_quantized(int format, int block_bytes, int64_t m, int64_t n, int64_t k) {
    float *weight = malloc(n * k * 4), *x = malloc(m * k * 4), *out = malloc(m * n * 4), *numbers = malloc(n * k * 4);
    for (int64_t i = 0; i < n * k; i++) weight[i] = random_number();
    for (int64_t i = 0; i < m * k; i++) x[i] = random_number();
    uint8_t *blocks = malloc(n * k / 32 * block_bytes);
    uint8_t *packed = aligned_alloc(64, (n + 15) / 16 * quire_quantized_panel_bytes(format, k) / 64 * 64 + 64);
    quire_quantize_weight(format, weight, blocks, n, k, 0);
    quire_pack_quantized(format, blocks, packed, n, k, k / 32 * block_bytes, 0, 0);
    int64_t segment[4] = {(int64_t)packed, format, n, 0}, ids[64];
    for (int64_t i = 0; i < n; i++) ids[i] = i;
    quire_quantized_lookup(format, packed, ids, numbers, n, n, k, 0);
    quire_quantized_linear(x, segment, 1, NULL, out, m, n, k, 0, 0);
    int right = 1;
    for (int64_t i = 0; i < n * k; i++) right &= near(numbers[i], weight[i], 0.08);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t e = 0; e < k; e++) sum += (double)x[i * k + e] * numbers[j * k + e];
            right &= fabs(out[i * n + j] - sum) < 0.01 * sqrt((double)k); /* inputs are rounded to int8 */
        }
    char name[64];
    snprintf(name, sizeof name, "quantized %d, %d rows", format, (int)m);
    say(name, right);
}

/* One row of several queries, then one of a single query with `second` keys, over pages in another order. */
static void check_attention(int type, int second) {
    enum { HEADS = 6, KV = 2, D = 64, BLOCK = 16, PAGES = 256, FIRST = 37, QUERIES = 5, TOKENS = QUERIES + 1, SLOTS = 40 };
    int64_t cells = (PAGES + 8) * 2 * KV * BLOCK * D, rows[2] = {0, 1};
    int32_t starts[3] = {0, QUERIES, TOKENS}, lengths[2] = {FIRST, second}, table[2 * PAGES] = {3, 1, 7};
    for (int i = 0; i < PAGES; i++) table[PAGES + i] = 8 + i * 37 % PAGES;
    float *slots = malloc(SLOTS * HEADS * (D + 2) * 4);
    float *q = malloc(TOKENS * HEADS * D * 4), *cache = malloc(cells * 4), *out = malloc(TOKENS * HEADS * D * 4);
    bf16 *q16 = malloc(TOKENS * HEADS * D * 2), *cache16 = malloc(cells * 2), *out16 = malloc(TOKENS * HEADS * D * 2);
    for (int64_t i = 0; i < TOKENS * HEADS * D; i++) q[i] = widen(q16[i] = narrow(random_number()));
    for (int64_t i = 0; i < cells; i++) cache[i] = widen(cache16[i] = narrow(random_number()));
    quire_attention(type ? (void *)q16 : q, type ? (void *)out16 : out, type ? (void *)cache16 : cache, rows, starts,
                    lengths, table, TOKENS, PAGES, 2, HEADS, KV, D, BLOCK, 0, 0, 0.125f, 0, NULL, NULL, slots,
                    SLOTS, NULL, 0, type, 0);
    int right = 1;
    for (int64_t token = 0; token < TOKENS; token++)
        for (int64_t h = 0; h < HEADS; h++) {
            int row = token >= QUERIES, position = row ? second - 1 : FIRST - QUERIES + (int)token;
            double total = 0, sums[D] = {0};
            for (int key = 0; key <= position; key++) {
                int64_t at = (int64_t)table[row * PAGES + key / BLOCK] * 2 * KV + h / (HEADS / KV);
                const float *k = cache + (at * BLOCK + key % BLOCK) * D, *v = k + KV * BLOCK * D;
                double s = 0;
                for (int e = 0; e < D; e++) s += (double)q[(token * HEADS + h) * D + e] * k[e];
                double weight = exp(s * 0.125);
                total += weight;
                for (int e = 0; e < D; e++) sums[e] += weight * v[e];
            }
            for (int e = 0; e < D; e++) {
                int64_t at = (token * HEADS + h) * D + e;
                right &= near(type ? widen(out16[at]) : out[at], sums[e] / total, type ? 0.02 : 1e-4);
            }
        }
    char name[64];
    snprintf(name, sizeof name, "attention in %s, %d keys", type ? "bf16" : "float32", second);
    say(name, right);
}

static void check_elements(void) {
    enum { N = 3, DIM = 100 };
    float x[N * DIM], weight[DIM], out[N * DIM], gated[N * DIM / 2];
    int64_t best[N];
    for (int i = 0; i < N * DIM; i++) x[i] = random_number();
    for (int i = 0; i < DIM; i++) weight[i] = random_number();
    quire_rms_norm(x, NULL, weight, out, N, DIM, DIM, 1e-5f, 0);
    quire_activate(x, gated, N, DIM / 2, 1, 0, 0);
    quire_argmax(x, best, N, DIM, 0);
    int norm = 1, silu = 1, argmax = 1;
    for (int i = 0; i < N; i++) {
        double squares = 0;
        for (int j = 0; j < DIM; j++) squares += (double)x[i * DIM + j] * x[i * DIM + j];
        for (int j = 0; j < DIM; j++) {
            norm &= near(out[i * DIM + j], x[i * DIM + j] / sqrt(squares / DIM + 1e-5) * weight[j], 1e-4);
            argmax &= x[i * DIM + j] <= x[i * DIM + best[i]];
        }
        for (int j = 0; j < DIM / 2; j++) {
            double g = x[i * DIM + j], up = x[i * DIM + DIM / 2 + j];
            silu &= near(gated[i * DIM / 2 + j], g / (1 + exp(-g)) * up, 1e-4);
        }
    }
    say("norm", norm), say("silu", silu), say("argmax", argmax);
}

int main(void) {
    srand(1);
    say("kind is neon", quire_linear_kind() == 4);
    say("no amx", quire_amx_start() != 0);
    check_linear(1, 100, 67), check_linear(2, 64, 64), check_linear(7, 37, 96), check_linear(13, 96, 33);
    for (int64_t m = 1; m < 8; m += 3) check_quantized(1, 20, m, 50, 96), check_quantized(4, 34, m, 50, 96);
    for (int type = 0; type < 2; type++) check_attention(type, 70), check_attention(type, 4000);
    check_elements();
    return failures ? 1 : 0;
}
