/* Prompt lookup: drafts from an earlier occurrence of a row's last tokens. */

#include "bf16.h"
#include "status.h"

enum { STRIP = 64 }; /* tokens compared at once, without a branch */

/* Where the tokens behind the earliest of the longest n-grams begin that end before `known` as all do; n from min to
 * max. 0: none. */
static int64_t find_ngram(const int32_t *ids, int64_t known, int64_t min, int64_t max) {
    const int32_t last = ids[known - 1], first = ids[known - min];
    const int32_t *before = ids + 1 - min;
    int64_t best = min - 1, found = 0;
    for (int64_t p = min - 1; p < known - 1; p += STRIP) {
        int64_t count = known - 1 - p < STRIP ? known - 1 - p : STRIP;
        int32_t any = 0;
        for (int64_t j = p; j < p + count; j++) any |= (ids[j] == last) & (before[j] == first);
        if (!any) continue;
        for (int64_t j = p; j < p + count; j++) {
            if (ids[j] != last || before[j] != first) continue;
            if (j < best || ids[j - best] != ids[known - 1 - best]) continue; /* no longer than the best */
            int64_t n = 1;
            while (n < max && n <= j && ids[j - n] == ids[known - 1 - n]) n++;
            if (n <= best) continue;
            best = n;
            found = j + 1;
            if (n == max) return found;
        }
    }
    return found;
}

/* token_ids [rows, stride], counts by row, rows [n] (-1: padding), num_found by row. Rows that have tokens to compute
 * before their last get no drafts. Zeros follow those found: a request must not verify what another left in its row. */
int quire_ngram_drafts(int32_t *token_ids, const int64_t *num_tokens, const int64_t *num_computed,
                       const int64_t *token_limit, int32_t *num_found, const int32_t *rows, int64_t n, int64_t stride,
                       int64_t min, int64_t max, int64_t drafts) {
    if (n < 0 || min < 1 || max < min || drafts < 1) return BAD_SIZE;
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++)
        if (rows[i] >= 0) total += num_tokens[rows[i]];
#pragma omp parallel for schedule(dynamic) if (n > 1 && total > 4 * WORTH_THREADS)
    for (int64_t i = 0; i < n; i++) {
        int64_t row = rows[i];
        if (row < 0) continue;
        int32_t *ids = token_ids + row * stride;
        int64_t known = num_tokens[row], count = token_limit[row] - known - 1;
        int64_t at = 0;
        if (known > min && count > 0 && num_computed[row] == known - 1) at = find_ngram(ids, known, min, max);
        if (!at) count = 0;
        if (count > drafts) count = drafts;
        if (count > known - at) count = known - at;
        for (int64_t j = 0; j < drafts; j++) ids[known + j] = j < count ? ids[at + j] : 0;
        num_found[row] = (int32_t)count;
    }
    return DONE;
}
