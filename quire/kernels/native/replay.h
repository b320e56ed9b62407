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
    INT8_LINEAR,
    LINEAR_FOR_NEXT /* a LINEAR whose results only the next call reads (replay_blocks.py) */
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

/* Memory of threads for what calls hand to each other (replay_blocks.py): `bytes` for each of `threads`, for some tokens of
 * `width` bytes. In its calls a place in the first token's `width` bytes means one's own place in every token's. */
typedef struct {
    char *base;
    int64_t width, bytes, threads;
} Arena;

/* See replay.c. blocks: the same calls with places in an arena, or both NULL. */
int quire_replay(const Call *calls, const Call *blocks, const Arena *arena, int64_t count, int64_t size, int64_t tokens,
                 int64_t rows, int64_t shared);
