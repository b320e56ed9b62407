/* A step's model inputs from the rows' state, as kernels/prepare_inputs.py says: one call, where torch needs a dozen, each
 * of which finds its code and data gone from the caches after a pass through the weights. */

#include <stdint.h>
#include "status.h"

/* Blocks of the cache, by row. */
typedef struct {
    const int32_t *blocks; /* [num_rows, stride] */
    int64_t stride, block_size;
} Table;

/* rows [n], query_start [n + 1]; by row token_ids [num_rows, length], `stride` apart, and num_computed [num_rows], which
 * advances -> input_ids and positions [tokens], slots [groups, tokens], seq_lens [n]. A row below 0 is padding. */
int quire_prepare_inputs(const int32_t *rows, const int32_t *query_start, const int32_t *token_ids, int64_t *num_computed,
                         const Table *tables, int64_t *input_ids, int64_t *positions, int64_t *slots, int32_t *seq_lens,
                         int64_t groups, int64_t n, int64_t tokens, int64_t num_rows, int64_t length,
                         int64_t stride) {
    for (int64_t i = 0; i < n; i++) {
        int64_t count = query_start[i + 1] - query_start[i], row = rows[i];
        if (query_start[i] < 0 || count < 0 || query_start[i + 1] > tokens) return BAD_SIZE;
        if (row < 0) continue;
        if (row >= num_rows || num_computed[row] < 0 || num_computed[row] + count > length) return BAD_SIZE;
        for (int64_t g = 0; g < groups; g++)
            if (count && (num_computed[row] + count - 1) / tables[g].block_size >= tables[g].stride) return BAD_SIZE;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t row = rows[i], padding = row < 0, position = padding ? 0 : num_computed[row];
        for (int64_t j = query_start[i]; j < query_start[i + 1]; j++, position += !padding) {
            input_ids[j] = padding ? 0 : token_ids[row * stride + position];
            positions[j] = position;
            for (int64_t g = 0; g < groups; g++) {
                const Table *t = tables + g;
                int64_t block = padding ? 0 : t->blocks[row * t->stride + position / t->block_size];
                slots[g * tokens + j] = block * t->block_size + position % t->block_size;
            }
        }
        seq_lens[i] = (int32_t)position;
        if (!padding) num_computed[row] = position;
    }
    return DONE;
}
