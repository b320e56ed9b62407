/* Elements of either type, 0 float32 or 1 bfloat16, and an exponential that vectorizes: gcc leaves expf scalar. */

#pragma once
#include <math.h>
#include <stdint.h>
#include "bf16.h"

static inline float load(const void *p, int64_t i, int type) {
    return type ? widen(((const bf16 *)p)[i]) : ((const float *)p)[i];
}

static inline void store(void *p, int64_t i, float x, int type) {
    if (type) ((bf16 *)p)[i] = narrow(x);
    else ((float *)p)[i] = x;
}

static inline int width_of(int type) { return type ? 2 : 4; }

static inline float exp_fast(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float t = x * 1.4426950408889634f;
    float whole = nearbyintf(t);
    float r = (x - whole * 0.693145751953125f) - whole * 1.428606765330187e-06f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } two = {.i = ((int32_t)whole + 127) << 23};
    return p * two.f;
}

/* One thread's rows of quire_layer_norm. The residual may be `out`, which is not read before. */
void quire_layer_norm_rows(const void *x, void *residual, const float *weight, const float *bias, void *out, int64_t n,
                           int64_t d, float eps, int type);
