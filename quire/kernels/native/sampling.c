/* Draws and verification of drafts: random numbers by position, few operations where torch needs dozens, and a token
 * found in its distribution without writing that down. */

#include "elements.h"
#include "status.h"

enum { MOST_PIECES = 1024, SMALLEST_PIECE = 128 };

/* As kernels/philox.py has it: Philox4x32-10 of (position, purpose) under the key `seed`, 53 bits of it in [0, 1). */
static double uniform(uint64_t seed, uint64_t position, uint32_t purpose) {
    uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32), c2 = purpose, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (double)(((uint64_t)c0 << 21) | (c1 >> 11)) * 0x1p-53;
}

int quire_uniform(const int64_t *seeds, const int64_t *positions, double *out, int64_t n, int purpose) {
    if (n < 0) return BAD_SIZE;
    for (int64_t i = 0; i < n; i++) out[i] = uniform((uint64_t)seeds[i], (uint64_t)positions[i], (uint32_t)purpose);
    return DONE;
}

static inline float weight(float x, float most) { return x > -INFINITY ? exp_fast(x - most) : 0.0f; }

/* The token of softmax(x) in whose share of [0, 1), in order of ids, u is. Sums are of pieces, and those added in double:
 * the same for any number of threads. */
static int64_t draw(const float *x, int64_t d, double u) {
    float most = -INFINITY, sums[MOST_PIECES];
    int64_t size = (d + MOST_PIECES - 1) / MOST_PIECES, pieces, chosen = 0, found;
    if (size < SMALLEST_PIECE) size = SMALLEST_PIECE;
    pieces = (d + size - 1) / size;
#pragma omp simd reduction(max : most)
    for (int64_t j = 0; j < d; j++) most = x[j] > most ? x[j] : most;
    double total = 0, before = 0;
    for (int64_t i = 0; i < pieces; i++) {
        int64_t first = i * size, end = first + size < d ? first + size : d;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = first; j < end; j++) sum += weight(x[j], most);
        sums[i] = sum;
        total += sum;
    }
    /* Only what has weight counts, so that rounding never selects an impossible token. */
    double target = u * total, sum = 0;
    for (int64_t i = 0; i < pieces; i++) {
        if (!(sums[i] > 0)) continue;
        chosen = i;
        before = sum;
        sum += sums[i];
        if (sum > target) break;
    }
    found = chosen * size;
    sum = before;
    for (int64_t j = chosen * size; j < d && j < (chosen + 1) * size; j++) {
        float w = weight(x[j], most);
        if (!(w > 0)) continue;
        found = j;
        sum += w;
        if (sum > target) break;
    }
    return found;
}

int quire_draw(const float *x, const double *uniform, int64_t *out, int64_t n, int64_t d) {
    if (n < 0 || d < 1) return BAD_SIZE;
#pragma omp parallel for if (n > 1)
    for (int64_t i = 0; i < n; i++) out[i] = draw(x + i * d, d, uniform[i]);
    return DONE;
}

/* As kernels/accept_drafts.py says. tokens [m], first [n + 1], rows [n], out [n, width], num_sampled [n]; by row
 * token_ids [num_rows, length], num_tokens, num_computed and token_limit [num_rows]. */
int quire_accept_drafts(const int64_t *tokens, const int32_t *first, const int32_t *rows, int32_t *token_ids,
                        int64_t *num_tokens, int64_t *num_computed, const int64_t *token_limit, int32_t *out,
                        int32_t *num_sampled, int64_t m, int64_t n, int64_t num_rows, int64_t length, int64_t width) {
    for (int64_t i = 0; i < n; i++) {
        int64_t count = first[i + 1] - first[i];
        if (first[i] < 0 || count < 1 || count > width || first[i + 1] > m || rows[i] >= num_rows) return BAD_SIZE;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t row = rows[i], count = first[i + 1] - first[i], kept = 0;
        if (row < 0) continue;
        const int64_t *drawn = tokens + first[i];
        int32_t *held = token_ids + row * length + num_tokens[row];
        for (int64_t j = 0; j < count; j++) out[i * width + j] = (int32_t)drawn[j];
        /* A row that has not computed all its tokens has nothing to sample from yet. */
        if (num_computed[row] == num_tokens[row] + count - 1) {
            int64_t room = token_limit[row] - num_tokens[row];
            if (room > length - num_tokens[row]) room = length - num_tokens[row];
            for (int matches = 1; matches && kept < count && kept < room; kept++) {
                matches = kept + 1 < count && held[kept] == (int32_t)drawn[kept];
                held[kept] = drawn[kept] > 0 ? (int32_t)drawn[kept] : 0;
            }
            num_tokens[row] += kept;
            num_computed[row] = num_tokens[row] - 1;
        }
        num_sampled[i] = (int32_t)kept;
    }
    return DONE;
}
