/* The two products of attention on AMX's tiles, in amx.c; only where quire_amx_start says that they work. */

#pragma once
#include <stdint.h>
#include "bf16.h"

enum { KEYS_AT_ONCE = 64 };

/* Around all products of a task, in the thread that makes them. */
void quire_tiles_begin(void);
void quire_tiles_end(void);
/* q [m, d] times keys [d / 2][KEYS_AT_ONCE] pairs of elements -> scores [m, KEYS_AT_ONCE], of which 16 * blocks columns
 * are made. m is a multiple of 16, d of 32, blocks of 2. */
void quire_tile_scores(const bf16 *q, const int32_t *keys, float *scores, int64_t m, int64_t d, int64_t blocks);
/* acc [m, d] += weights [m, KEYS_AT_ONCE] times values [16 * steps][d] pairs of keys. */
void quire_tile_values(const bf16 *weights, const bf16 *values, float *acc, int64_t m, int64_t d, int64_t steps);
