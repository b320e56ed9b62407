/* A product that is followed by work whose memory is to be fetched meanwhile. */

#pragma once
#include "bf16.h"
#include "threads.h"

enum { AFTER = 2 }; /* pieces of memory */

/* quire_linear; threads fetch their shares of after [AFTER], or of nothing where that is NULL. */
int quire_linear_before(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k,
                        const Ahead *after);
