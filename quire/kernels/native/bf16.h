/* bfloat16 and the packed form of a bf16 weight, for every file that multiplies by one. */

#pragma once
#include <stdint.h>
#include "status.h"

typedef uint16_t bf16;

static inline float widen(bf16 x) {
    union { uint32_t u; float f; } v = {.u = (uint32_t)x << 16};
    return v.f;
}

static inline bf16 narrow(float x) {
    union { float f; uint32_t u; } v = {.f = x};
    if ((v.u & 0x7fffffff) > 0x7f800000) return (bf16)((v.u >> 16) | 0x40);
    return (bf16)((v.u + 0x7fff + ((v.u >> 16) & 1)) >> 16);
}

/* Below this many elements threads cost more than they gain. */
#define WORTH_THREADS 16384

/* A weight [n, k] is packed into panels of 32 outputs, [panel][pairs of inputs][32][2]; outputs past n and an input
 * past an odd k are zero. */
enum { PANEL = 32 };

/* In passing `p`, for a weight that is multiplied by one row: what follows is fetched into the nearest cache alone. A step
 * reads more weights than caches hold, which would displace keys, values and all that Python needs between two steps. A
 * fifth of a step of Q4_1, measured. */
#define READ_ONCE(p) __builtin_prefetch((const char *)(p) + 2048, 0, 0)

/* Memory that a thread keeps from call to call: fresh memory would be mapped page by page. Aligned to 64 bytes; NULL where
 * there is none. */
void *quire_scratch(int64_t bytes);

/* One thread's share of a product: x [m, k] times panels [begin, end) of a packed weight [n, k], bias [n] or NULL ->
 * those columns of out [m, n]. DONE or NO_MEMORY. */
int quire_linear_part(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k,
                       int64_t begin, int64_t end);
/* The same on AMX's tiles, only where quire_amx_start says that they work. */
int quire_linear_amx_part(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n,
                          int64_t k, int64_t begin, int64_t end);
