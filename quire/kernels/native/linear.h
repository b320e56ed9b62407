/* A product that is followed by work whose memory is to be fetched meanwhile. */

#pragma once
#include "bf16.h"
#include "threads.h"

enum { AFTER = 2 }; /* pieces of memory */

/* quire_linear; threads fetch their shares of after [AFTER], or of nothing where that is NULL. */
int quire_linear_before(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k,
                        const Ahead *after);

/* quire_linear's outputs, silu of the first half of them times the second -> out [m, n / 2], to the bit what quire_activate
 * makes of them. By one thread; n is a multiple of 2 * PANEL. Only where there are bf16 vectors (vectors.h). */
int quire_linear_silu_mul(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k);
