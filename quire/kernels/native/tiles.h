/* The instructions of AMX that Quire uses, and a software version of them (QUIRE_EMULATE_AMX) with which tests run the
 * code around them anywhere. There are eight tiles of 16 rows of 64 bytes.
 *
 * The instructions are written here because the compiler's own intrinsics do not say that they read memory: gcc 12
 * drops stores to what a tile or a configuration is loaded from. */

#pragma once
#include <stdint.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TileConfig;

_Static_assert(sizeof(TileConfig) == 64, "the processor reads 64 bytes");

#ifndef QUIRE_EMULATE_AMX

#define TILES_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))

static inline __attribute__((always_inline)) TILES_TARGET void tile_configure(const TileConfig *config) {
    __asm__ volatile("ldtilecfg %0" ::"m"(*config) : "memory");
}
static inline __attribute__((always_inline)) TILES_TARGET void tile_release(void) {
    __asm__ volatile("tilerelease" ::: "memory");
}
#define tile_zero(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define tile_load(t, from, stride)                                                                                     \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define tile_store(t, to, stride)                                                                                      \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
/* c [16, 16] float32 += a [16, 32] bf16 x b [16 pairs, 16, 2] bf16 */
#define tile_dot_bf16(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

#else

#include <stdlib.h>
#include <string.h>

#define TILES_TARGET

static __thread TileConfig tile_shapes; /* palette 0: not configured, every use is an error as on the processor */
static __thread uint8_t tile_bytes[8][16][64];

static void tile_check(int right) {
    if (!right) abort();
}
static void tile_configure(const TileConfig *config) {
    tile_check((uintptr_t)config % 64 == 0 && config->palette == 1 && config->start_row == 0);
    for (int i = 0; i < 14; i++) tile_check(config->reserved[i] == 0);
    for (int t = 0; t < 8; t++)
        tile_check(config->rows[t] >= 1 && config->rows[t] <= 16 && config->row_bytes[t] >= 4 &&
                   config->row_bytes[t] <= 64 && config->row_bytes[t] % 4 == 0);
    for (int t = 8; t < 16; t++) tile_check(config->rows[t] == 0 && config->row_bytes[t] == 0);
    tile_shapes = *config;
    memset(tile_bytes, 0, sizeof tile_bytes);
}
static void tile_release(void) { memset(&tile_shapes, 0, sizeof tile_shapes); }
static void tile_zero(int t) {
    tile_check(tile_shapes.palette == 1);
    memset(tile_bytes[t], 0, sizeof tile_bytes[t]);
}
static void tile_load(int t, const void *from, int64_t stride) {
    tile_check(tile_shapes.palette == 1);
    memset(tile_bytes[t], 0, sizeof tile_bytes[t]);
    for (int r = 0; r < tile_shapes.rows[t]; r++)
        memcpy(tile_bytes[t][r], (const uint8_t *)from + r * stride, tile_shapes.row_bytes[t]);
}
static void tile_store(int t, void *to, int64_t stride) {
    tile_check(tile_shapes.palette == 1);
    for (int r = 0; r < tile_shapes.rows[t]; r++)
        memcpy((uint8_t *)to + r * stride, tile_bytes[t][r], tile_shapes.row_bytes[t]);
}
static void tile_dot_bf16(int c, int a, int b) {
    const TileConfig *s = &tile_shapes;
    tile_check(s->palette == 1 && c != a && a != b && c != b);
    tile_check(s->rows[c] == s->rows[a] && s->row_bytes[a] == 4 * s->rows[b] && s->row_bytes[c] == s->row_bytes[b]);
    for (int r = 0; r < s->rows[c]; r++)
        for (int j = 0; j < s->row_bytes[c] / 4; j++) {
            float even = 0, odd = 0, sum;
            for (int e = 0; e < s->rows[b]; e++) {
                bf16 x[2], w[2];
                memcpy(x, tile_bytes[a][r] + 4 * e, 4);
                memcpy(w, tile_bytes[b][e] + 4 * j, 4);
                even += widen(x[0]) * widen(w[0]);
                odd += widen(x[1]) * widen(w[1]);
            }
            memcpy(&sum, tile_bytes[c][r] + 4 * j, 4);
            sum += even + odd;
            memcpy(tile_bytes[c][r] + 4 * j, &sum, 4);
        }
}

#endif

/* All tiles at their full size, which suits every element type. Shorter operands are padded with zeros instead: loading
 * another configuration clears the tiles. */
static inline TILES_TARGET void tiles_begin(void) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.rows[t] = 16, config.row_bytes[t] = 64;
    tile_configure(&config);
}

static inline TILES_TARGET void tiles_end(void) { tile_release(); }
