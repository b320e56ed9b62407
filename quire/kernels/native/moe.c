/* A mixture of experts in bf16: pairs of row and expert are sorted by expert, so that each expert's weights, packed as
 * in bf16.h, are read once. All of it is one parallel region: a row that reads eight small experts would otherwise
 * spend its time starting threads. */

#include <string.h>
#include "elements.h"
#include "threads.h"

/* What a panel's weights cost to read, counted in rows to multiply by them. */
enum { READING = 8, COLUMNS = 256 };
enum { SILU, SWIGLUOAI };

/* As moe_routing.py orders them. */
enum { SOFTMAX, TOPK_SOFTMAX, SIGMOID, SQRTSOFTPLUS };
enum { MAX, TOP2_SUM };
enum { MAX_EXPERTS = 4096 };

static float as_inf(float x) { return x == x ? x : INFINITY; }

/* The greatest of count numbers that is not taken, of equal ones the first; -1 if all are. */
static int64_t greatest(const float *x, const uint8_t *taken, int64_t count) {
    int64_t found = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (found < 0 || x[i] > x[found])) found = i;
    return found;
}

/* Take the experts of all groups but the top_groups best ones. */
static void leave_groups(const float *choice, uint8_t *taken, int64_t num_experts, int64_t groups, int64_t top_groups,
                         int group_score) {
    float best[MAX_EXPERTS];
    uint8_t kept[MAX_EXPERTS] = {0};
    int64_t size = num_experts / groups;
    for (int64_t g = 0; g < groups; g++) {
        float most = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > most) second = most, most = choice[e];
            else if (choice[e] > second) second = choice[e];
        }
        best[g] = group_score == TOP2_SUM ? as_inf(most + second) : most;
    }
    for (int64_t j = 0; j < top_groups; j++) kept[greatest(best, kept, groups)] = 1;
    for (int64_t e = 0; e < num_experts; e++) taken[e] = !kept[e / size];
}

/* logits [n, num_experts], bias of the choice [num_experts] or NULL -> weights and experts [n, top_k + shared], as
 * Routing of moe_routing.py says. */
int quire_route(const void *logits, const float *bias, float *weights, int32_t *experts, int64_t n, int64_t num_experts,
                int64_t top_k, int64_t groups, int64_t top_groups, int64_t shared, float epsilon, float scale,
                int scores, int group_score, int of_chosen, int by_logits, int type) {
    if (n < 0 || top_k < 1 || top_k > num_experts || num_experts > MAX_EXPERTS || groups < 1 || top_groups < 1 ||
        top_groups > groups || num_experts % groups || top_k > num_experts / groups * top_groups || shared < 0 ||
        shared > MAX_EXPERTS)
        return BAD_SIZE;
#pragma omp parallel for if (n * num_experts * top_k > WORTH_THREADS)
    for (int64_t row = 0; row < n; row++) {
        float score[MAX_EXPERTS], choice[MAX_EXPERTS], most = -INFINITY, all = 0, total = 0;
        uint8_t taken[MAX_EXPERTS];
        float *w = weights + row * (top_k + shared);
        int32_t *chosen = experts + row * (top_k + shared);
        for (int64_t e = 0; e < num_experts; e++) {
            float x = load(logits, row * num_experts + e, type);
            if (scores == SIGMOID) x = 1.0f / (1.0f + expf(-x));
            else if (scores == SQRTSOFTPLUS) x = sqrtf((x <= 0 ? 0 : x) + log1pf(expf(-fabsf(x))));
            else x = as_inf(x), most = x > most ? x : most;
            score[e] = x, choice[e] = as_inf(x), taken[e] = 0;
        }
        int needs_all = !by_logits || !of_chosen || epsilon > 0; /* else exponentials of the chosen ones do */
        if (scores >= SIGMOID) all = 1;
        else if (needs_all)
            for (int64_t e = 0; e < num_experts; e++) all += score[e] = expf(score[e] - most);
        if (!by_logits)
            for (int64_t e = 0; e < num_experts; e++)
                choice[e] = as_inf((scores < SIGMOID ? score[e] / all : score[e]) + (bias ? bias[e] : 0));
        if (top_groups < groups) leave_groups(choice, taken, num_experts, groups, top_groups, group_score);
        for (int64_t j = 0; j < top_k; j++) {
            int64_t e = greatest(choice, taken, num_experts);
            taken[e] = 1, chosen[j] = (int32_t)e, w[j] = scores < SIGMOID && !needs_all ? expf(score[e] - most) : score[e];
            total += w[j];
        }
        total = of_chosen ? total + epsilon * all : all;
        for (int64_t j = 0; j < top_k; j++) w[j] = w[j] / total * scale;
        for (int64_t j = 0; j < shared; j++) w[top_k + j] = 1, chosen[top_k + j] = (int32_t)(num_experts + j);
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
