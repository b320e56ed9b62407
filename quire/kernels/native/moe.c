/* A mixture of experts in bf16: pairs of row and expert are sorted by expert, so that each expert's weights, packed as
 * in bf16.h, are read once. All of it is one parallel region: a row that reads eight small experts would otherwise
 * spend its time starting threads. */

#include <string.h>
#include "elements.h"
#include "threads.h"

/* What a panel's weights cost to read, counted in rows to multiply by them. */
enum { READING = 8, COLUMNS = 256 };
enum { SILU, SWIGLUOAI };

/* logits [n, num_experts] -> the top_k largest of each row, of equal ones the lower first, and the softmax over all or
 * over those. NaN counts as infinity: whatever a row holds, its experts exist, and its weights are NaN. */
int quire_route(const void *logits, float *weights, int32_t *experts, int64_t n, int64_t num_experts, int64_t top_k,
                int of_chosen, int type) {
    if (n < 0 || top_k < 1 || top_k > num_experts || num_experts > INT32_MAX) return BAD_SIZE;
#pragma omp parallel for if (n * num_experts * top_k > WORTH_THREADS)
    for (int64_t row = 0; row < n; row++) {
        float *w = weights + row * top_k, total = 0;
        int32_t *chosen = experts + row * top_k;
        for (int64_t j = 0; j < top_k; j++) {
            float best = -INFINITY, last = j ? w[j - 1] : INFINITY;
            int64_t found = -1, after = j ? chosen[j - 1] : -1;
            for (int64_t e = 0; e < num_experts; e++) {
                float x = load(logits, row * num_experts + e, type);
                if (x != x) x = INFINITY;
                if ((x < last || (x == last && e > after)) && (found < 0 || x > best)) best = x, found = e;
            }
            w[j] = best, chosen[j] = (int32_t)found;
        }
        float most = w[0];
        if (!of_chosen)
            for (int64_t e = 0; e < num_experts; e++) total += expf(load(logits, row * num_experts + e, type) - most);
        for (int64_t j = 0; j < top_k; j++) {
            w[j] = expf(w[j] - most);
            if (of_chosen) total += w[j];
        }
        for (int64_t j = 0; j < top_k; j++) w[j] /= total;
    }
    return DONE;
}

typedef struct {
    const bf16 *packed, *bias; /* of all experts */
    int64_t n, k;
} Weights;

/* x [pairs, k] by the weights of each pair's expert -> out [pairs, n], this thread's share: whole panels, as many of
 * them as make up its part of the cost. */
static int multiply(const Weights *w, const bf16 *x, bf16 *out, const int32_t *start, int64_t num_experts, int amx) {
    int status = DONE;
    int64_t panels = (w->n + PANEL - 1) / PANEL, size = panels * ((w->k + 1) / 2) * PANEL * 2, total = 0, seen = 0;
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (int64_t e = 0; e < num_experts; e++)
        if (start[e + 1] > start[e]) total += panels * (start[e + 1] - start[e] + READING);
    int64_t first = total * thread / threads, last = total * (thread + 1) / threads;
    for (int64_t e = 0; e < num_experts && seen < last; e++) {
        int64_t rows = start[e + 1] - start[e], each = rows + READING;
        if (rows == 0) continue;
        int64_t begin = first > seen ? (first - seen + each - 1) / each : 0, end = (last - seen + each - 1) / each;
        seen += panels * each;
        if (end > panels) end = panels;
        if (begin >= end) continue;
        status |= (amx ? quire_linear_amx_part : quire_linear_part)(
            x + start[e] * w->k, w->packed + e * size, w->bias ? w->bias + e * w->n : NULL, out + start[e] * w->n, rows,
            w->n, w->k, begin, end);
    }
    return status;
}

/* [2 * d], gate before up -> [d] */
static void activate(const bf16 *gate, bf16 *out, int64_t d, int activation) {
    const bf16 *up = gate + d;
    if (activation == SWIGLUOAI)
        for (int64_t j = 0; j < d; j++) {
            float g = widen(gate[j]), u = widen(up[j]);
            g = g > 7.0f ? 7.0f : g;
            u = u > 7.0f ? 7.0f : u < -7.0f ? -7.0f : u;
            out[j] = narrow((u + 1.0f) * g / (1.0f + exp_fast(-1.702f * g)));
        }
    else
        for (int64_t j = 0; j < d; j++) {
            float g = widen(gate[j]);
            out[j] = narrow(g / (1.0f + exp_fast(-g)) * widen(up[j]));
        }
}

/* x [n, h]; gate_up [experts][2 * d, h] and down [experts][h, d] packed; biases [experts, 2 * d], [experts, h] or NULL;
 * weights, experts [n, top_k] -> out [n, h].
 * Room for n * top_k pairs: numbers [experts + 1 + 2 * pairs], rows [pairs, h], halves [pairs, 2 * d],
 * inner [pairs, d]. */
int quire_moe(const bf16 *x, const bf16 *gate_up, const bf16 *down, const bf16 *gate_up_bias, const bf16 *down_bias,
              const float *weights, const int32_t *experts, int32_t *numbers, bf16 *rows, bf16 *halves, bf16 *inner,
              bf16 *out, int64_t n, int64_t top_k, int64_t num_experts, int64_t h, int64_t d, int activation, int amx) {
    if (n < 0 || top_k < 1 || top_k > num_experts || h < 1 || d < 1 || n > INT32_MAX / top_k) return BAD_SIZE;
    int64_t pairs = n * top_k, blocks = (h + COLUMNS - 1) / COLUMNS;
    int32_t *start = numbers, *order = start + num_experts + 1, *place = order + pairs;
    memset(start, 0, (num_experts + 1) * sizeof *start);
    for (int64_t p = 0; p < pairs; p++) {
        if (experts[p] < 0 || experts[p] >= num_experts) return BAD_SIZE;
        start[experts[p] + 1]++;
    }
    for (int64_t e = 0; e < num_experts; e++) start[e + 1] += start[e];
    for (int64_t p = 0; p < pairs; p++) order[place[p] = start[experts[p]]++] = (int32_t)p;
    for (int64_t e = num_experts; e > 0; e--) start[e] = start[e - 1];
    start[0] = 0;

    Weights first = {gate_up, gate_up_bias, 2 * d, h}, second = {down, down_bias, h, d};
    int pinned = quire_pinned(), status = DONE;
#pragma omp parallel if (pairs * h * d > WORTH_THREADS) reduction(| : status)
    {
        quire_stay(pinned);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < pairs; i++) memcpy(rows + i * h, x + order[i] / top_k * h, h * sizeof *x);
        status |= multiply(&first, rows, halves, start, num_experts, amx);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t i = 0; i < pairs; i++) activate(halves + i * 2 * d, inner + i * d, d, activation);
        status |= multiply(&second, inner, rows, start, num_experts, amx);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t task = 0; task < n * blocks; task++) {
            int64_t row = task / blocks, from = task % blocks * COLUMNS;
            int64_t width = h - from < COLUMNS ? h - from : COLUMNS;
            float sums[COLUMNS] = {0};
            for (int64_t j = 0; j < top_k; j++) {
                float w = weights[row * top_k + j];
                const bf16 *y = rows + place[row * top_k + j] * h + from;
                for (int64_t c = 0; c < width; c++) sums[c] += w * widen(y[c]);
            }
            for (int64_t c = 0; c < width; c++) out[row * h + from + c] = narrow(sums[c]);
        }
    }
    return status;
}
