/* Calls of kernels as replay.py notes them. */

#pragma once
#include <stdint.h>

/* As replay.py numbers them. */
enum {
    RMS_NORM,
    ROPE_AND_WRITE,
    LINEAR,
    LINEAR_AMX,
    QUANTIZED_LINEAR,
    ATTENTION,
    ROUTE,
    MOE,
    LAYER_NORM,
    ADD,
    ACTIVATE,
    ADD_LOW_RANK,
    ALL_REDUCE,
    ENCODER_LINEAR,
    ENCODER_ATTENTION,
    LATENT_WRITE,
    LATENT_ATTENTION,
    INT8_LINEAR
};
typedef union {
    int64_t i;
    double f;
    void *p;
} Argument;
typedef struct {
    int64_t kind;
    Argument a[26];
} Call;

/* See replay.c. */
int quire_replay(const Call *calls, int64_t count, int64_t size, int64_t tokens, int64_t rows, int64_t shared);
