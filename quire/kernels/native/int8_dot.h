/* Products of four bytes each, added to 16 sums. */

#pragma once
#include <immintrin.h>

/* x without sign, y with. The intrinsic's sums gcc 12 copies each time, in memory where there are many: int8 products took
 * twice as long. */
static inline __attribute__((always_inline)) __m512i add_dots(__m512i sums, __m512i x, __m512i y) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(y));
    return sums;
}
