/* Products of many rows with a packed bf16 weight (bf16.h) on the tile unit of AMX.
 *
 * A block is 32 rows by a panel of 32 outputs: four tiles of sums, two of inputs, two of weights. Four loads feed four
 * products, which is the best that eight tiles allow, and a load takes half the time of a product. Two tiles of weights
 * lie side by side in a panel, 128 bytes from row to row, so that the panels of the other kernels serve as they are.
 * Inputs are copied, padded with zeros to whole tiles, in chunks that stay in the second-level cache while panels pass
 * by. */

#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include "bf16.h"
#include "tile_products.h"

/* What quire_amx_start returns, in the order of AMX_STATES in __init__.py. */
enum { WORKS, NOT_COMPILED, NOT_THERE, NOT_ENABLED, REFUSED, DIED, WRONG };

#if defined(QUIRE_EMULATE_AMX) ||                                                                                      \
    (defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 11 && !defined(QUIRE_NO_AMX))

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "threads.h"
#include "tiles.h"
#if !defined(QUIRE_EMULATE_AMX) || defined(__AVX512BF16__)
#include <immintrin.h>
#define HAVE_BF16_STORE 1
#endif
#ifndef QUIRE_EMULATE_AMX
#include <cpuid.h>
#endif

enum { TILE_ROWS = 16, STEP = 32, BLOCK = 2 * TILE_ROWS, MIN_BLOCKS_OF_GROUPS = 8 }; /* a step: a tile's depth in inputs */

/* Of inputs in a chunk, and of panels that pass them: with the next panels they fill most of a second-level cache of
 * 2 MiB. */
#ifndef CHUNK_BYTES
#define CHUNK_BYTES (768 << 10)
#endif
#ifndef GROUP_BYTES
#define GROUP_BYTES (256 << 10)
#endif
#ifndef PREFETCH
#define PREFETCH 1
#endif

typedef struct {
    const bf16 *x, *packed, *bias;
    bf16 *out;
    int64_t m, n, k;
    int64_t pairs, steps, panels;
    int64_t chunk; /* rows, a multiple of BLOCK */
} Product;

/* Rows [first, first + rows) of x -> [groups of 16 rows][steps][16][32]. */
static void copy_rows(const Product *p, int64_t first, int64_t rows, bf16 *to) {
    int64_t whole = p->k / STEP, rest = p->k % STEP;
    for (int64_t i = 0; i < (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; i++) {
        bf16 *tile = to + (i / TILE_ROWS * p->steps * TILE_ROWS + i % TILE_ROWS) * STEP;
        const bf16 *from = p->x + (first + i) * p->k;
        for (int64_t s = 0; s < p->steps; s++, tile += TILE_ROWS * STEP) {
            if (i < rows && s < whole) memcpy(tile, from + s * STEP, STEP * 2);
            else {
                memset(tile, 0, STEP * 2);
                if (i < rows) memcpy(tile, from + s * STEP, rest * 2);
            }
        }
    }
}

/* Inputs a [1 + tall][steps][16][32] times a panel, whose last step is in `rest` if it is not whole -> sums. */
static inline __attribute__((always_inline)) TILES_TARGET void multiply_block(const int tall, const bf16 *a,
                                                                              const bf16 *panel, const bf16 *rest,
                                                                              int64_t steps, const char *next,
                                                                              int64_t lines, float *sums) {
    const bf16 *below = a + steps * TILE_ROWS * STEP;
    tile_zero(0);
    tile_zero(1);
    if (tall) {
        tile_zero(2);
        tile_zero(3);
    }
    for (int64_t s = 0; s < steps; s++) {
        const bf16 *b = rest && s == steps - 1 ? rest : panel + s * STEP * PANEL;
        tile_load(4, a + s * TILE_ROWS * STEP, STEP * 2);
        tile_load(6, b, PANEL * 4);
        tile_dot_bf16(0, 4, 6);
        tile_load(7, b + PANEL, PANEL * 4);
        tile_dot_bf16(1, 4, 7);
        if (tall) {
            tile_load(5, below + s * TILE_ROWS * STEP, STEP * 2);
            tile_dot_bf16(2, 5, 6);
            tile_dot_bf16(3, 5, 7);
        }
        for (int64_t i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
    }
    tile_store(0, sums, PANEL * 4);
    tile_store(1, sums + TILE_ROWS, PANEL * 4);
    if (tall) {
        tile_store(2, sums + TILE_ROWS * PANEL, PANEL * 4);
        tile_store(3, sums + TILE_ROWS * PANEL + TILE_ROWS, PANEL * 4);
    }
}

/* sums [rows, PANEL] + bias -> out, n apart, of which `width` columns exist. */
static inline TILES_TARGET void store_block(const float *sums, const float *bias, bf16 *out, int64_t rows, int64_t n,
                                            int64_t width) {
#ifdef HAVE_BF16_STORE
    __mmask16 low = width >= 16 ? 0xffff : (__mmask16)((1u << width) - 1);
    __mmask16 high = width >= 32 ? 0xffff : width > 16 ? (__mmask16)((1u << (width - 16)) - 1) : 0;
    __m512 first = _mm512_loadu_ps(bias), second = _mm512_loadu_ps(bias + 16);
    for (int64_t r = 0; r < rows; r++, out += n, sums += PANEL) {
        __m512 a = _mm512_add_ps(_mm512_load_ps(sums), first), b = _mm512_add_ps(_mm512_load_ps(sums + 16), second);
        _mm256_mask_storeu_epi16(out, low, (__m256i)_mm512_cvtneps_pbh(a));
        _mm256_mask_storeu_epi16(out + 16, high, (__m256i)_mm512_cvtneps_pbh(b));
    }
#else
    for (int64_t r = 0; r < rows; r++, out += n, sums += PANEL)
        for (int64_t j = 0; j < width; j++) out[j] = narrow(sums[j] + bias[j]);
#endif
}

/* One thread's part: tasks [first, last), a task being a chunk of rows and a panel, chunk by chunk. Some panels at a time
 * pass all rows of a chunk, for the reason that linear.c gives; of few blocks of rows each panel passes all by itself, in
 * the first-level cache. */
static __attribute__((noinline)) TILES_TARGET void multiply_part(const Product *p, int64_t first, int64_t last,
                                                                 bf16 *inputs) {
    float sums[BLOCK * PANEL] __attribute__((aligned(64)));
    bf16 rest[STEP * PANEL] __attribute__((aligned(64))) = {0};
    int64_t rest_pairs = p->pairs % (STEP / 2), panel_bytes = p->pairs * PANEL * 4, copied = -1;
    tiles_begin();
    for (int64_t task = first, some; task < last; task += some) {
        int64_t from = task % p->panels, row = task / p->panels * p->chunk;
        int64_t rows = p->m - row < p->chunk ? p->m - row : p->chunk, blocks = (rows + BLOCK - 1) / BLOCK;
        some = blocks < MIN_BLOCKS_OF_GROUPS || GROUP_BYTES < panel_bytes ? 1 : GROUP_BYTES / panel_bytes;
        if (some > p->panels - from) some = p->panels - from;
        if (some > last - task) some = last - task;
        if (row != copied) copy_rows(p, row, rows, inputs), copied = row;
        /* The next panels are prefetched while these are multiplied, some lines in every step. */
        const char *next = (const char *)p->packed + (task + some) % p->panels * panel_bytes;
        int64_t after = last - task - some < some ? last - task - some : some, all_steps = blocks * some * p->steps;
        int64_t lines = PREFETCH ? (after * panel_bytes / 64 + all_steps - 1) / all_steps : 0;
        for (int64_t i = 0; i < rows; i += BLOCK)
            for (int64_t at = from * PANEL; at < (from + some) * PANEL; at += PANEL, next += lines * p->steps * 64) {
                const bf16 *a = inputs + i * p->steps * STEP, *panel = p->packed + at * p->pairs * 2;
                int64_t width = p->n - at < PANEL ? p->n - at : PANEL, tall = rows - i < BLOCK ? rows - i : BLOCK;
                float bias[PANEL] = {0};
                if (p->bias)
                    for (int64_t j = 0; j < width; j++) bias[j] = widen(p->bias[at + j]);
                if (rest_pairs) memcpy(rest, panel + (p->steps - 1) * STEP * PANEL, rest_pairs * PANEL * 4);
                const bf16 *partial = rest_pairs ? rest : NULL;
                if (tall > TILE_ROWS) multiply_block(1, a, panel, partial, p->steps, next, lines, sums);
                else multiply_block(0, a, panel, partial, p->steps, next, lines, sums);
                store_block(sums, bias, p->out + (row + i) * p->n + at, tall, p->n, width);
            }
    }
    tiles_end();
}

static Product make_product(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n,
                            int64_t k, int64_t threads) {
    Product p = {.x = x, .packed = packed, .bias = bias, .out = out, .m = m, .n = n, .k = k, .pairs = (k + 1) / 2,
                 .steps = (k + STEP - 1) / STEP, .panels = (n + PANEL - 1) / PANEL};
    int64_t all = (m + BLOCK - 1) / BLOCK, most = CHUNK_BYTES / (p.steps * STEP * 2 * BLOCK); /* in blocks */
    if (most < 1) most = 1;
    int64_t chunks = (all + most - 1) / most, wanted = (4 * threads + p.panels - 1) / p.panels;
    if (chunks < wanted) chunks = wanted; /* enough tasks to share out evenly */
    /* By rows if those are the larger side: a thread then copies no other's inputs, but reads every panel. */
    if (m >= n) chunks = (chunks + threads - 1) / threads * threads;
    if (chunks > all) chunks = all;
    p.chunk = (all + chunks - 1) / chunks * BLOCK;
    return p;
}

/* x [m, k], bias [n] or NULL -> out [m, n]. */
int quire_linear_amx(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k) {
    if (m < 0 || n < 1 || k < 1) return BAD_SIZE;
    if (m == 0) return DONE;
    Product p = make_product(x, packed, bias, out, m, n, k, omp_get_max_threads());
    int64_t tasks = (m + p.chunk - 1) / p.chunk * p.panels;
    int pinned = quire_pinned(), status = DONE;
#pragma omp parallel if (n * k > WORTH_THREADS) reduction(| : status)
    {
        quire_stay(pinned);
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t first = tasks * thread / threads, last = tasks * (thread + 1) / threads;
        bf16 *inputs = first < last ? quire_scratch(p.chunk * p.steps * STEP * 2) : NULL;
        if (inputs) multiply_part(&p, first, last, inputs);
        else if (first < last) status |= NO_MEMORY;
    }
    return status;
}

int quire_linear_amx_part(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n,
                          int64_t k, int64_t begin, int64_t end) {
    if (m < 1 || begin >= end) return DONE;
    Product p = make_product(x, packed, bias, out, m, n, k, 1);
    bf16 *inputs = quire_scratch(p.chunk * p.steps * STEP * 2);
    if (!inputs) return NO_MEMORY;
    for (int64_t first = 0; first * p.chunk < m; first++)
        multiply_part(&p, first * p.panels + begin, first * p.panels + end, inputs);
    return DONE;
}

void quire_tiles_begin(void) { tiles_begin(); }
void quire_tiles_end(void) { tiles_end(); }

/* `tall` x 2 tiles of c += a [., 32 * steps] times b [16 * steps pairs, 32]. Strides in bytes. */
static inline __attribute__((always_inline)) TILES_TARGET void multiply_tiles(const int tall, const char *a,
                                                                              int64_t a_stride, const char *b,
                                                                              int64_t b_stride, char *c, int64_t c_stride,
                                                                              int64_t steps, const int from_zero) {
    char *below = c + TILE_ROWS * c_stride;
    if (from_zero) {
        tile_zero(0);
        tile_zero(1);
        if (tall) {
            tile_zero(2);
            tile_zero(3);
        }
    } else {
        tile_load(0, c, c_stride);
        tile_load(1, c + 64, c_stride);
        if (tall) {
            tile_load(2, below, c_stride);
            tile_load(3, below + 64, c_stride);
        }
    }
    for (int64_t s = 0; s < steps; s++, a += STEP * 2, b += TILE_ROWS * b_stride) {
        tile_load(4, a, a_stride);
        tile_load(6, b, b_stride);
        tile_dot_bf16(0, 4, 6);
        tile_load(7, b + 64, b_stride);
        tile_dot_bf16(1, 4, 7);
        if (tall) {
            tile_load(5, a + TILE_ROWS * a_stride, a_stride);
            tile_dot_bf16(2, 5, 6);
            tile_dot_bf16(3, 5, 7);
        }
    }
    tile_store(0, c, c_stride);
    tile_store(1, c + 64, c_stride);
    if (tall) {
        tile_store(2, below, c_stride);
        tile_store(3, below + 64, c_stride);
    }
}

static inline __attribute__((always_inline)) TILES_TARGET void multiply_all(const char *a, int64_t a_stride,
                                                                            const char *b, int64_t b_stride,
                                                                            int64_t width, char *c, int64_t c_stride,
                                                                            int64_t m, int64_t steps,
                                                                            const int from_zero) {
    for (int64_t i = 0; i < m; i += BLOCK)
        for (int64_t j = 0; j < width; j += 32) {
            const char *left = a + i * a_stride, *right = b + j * 4;
            char *to = c + i * c_stride + j * 4;
            if (m - i > TILE_ROWS) multiply_tiles(1, left, a_stride, right, b_stride, to, c_stride, steps, from_zero);
            else multiply_tiles(0, left, a_stride, right, b_stride, to, c_stride, steps, from_zero);
        }
}

TILES_TARGET void quire_tile_scores(const bf16 *q, const int32_t *keys, float *scores, int64_t m, int64_t d,
                                    int64_t blocks) {
    multiply_all((const char *)q, d * 2, (const char *)keys, KEYS_AT_ONCE * 4, blocks * 16, (char *)scores,
                 KEYS_AT_ONCE * 4, m, d / STEP, 1);
}

TILES_TARGET void quire_tile_values(const bf16 *weights, const bf16 *values, float *acc, int64_t m, int64_t d,
                                    int64_t steps) {
    multiply_all((const char *)weights, KEYS_AT_ONCE * 2, (const char *)values, d * 4, d, (char *)acc, d * 4, m, steps,
                 0);
}

/* A small product with odd sizes against plain sums. Memory and the child it runs in are all it needs. */
static int small_product_is_right(void) {
    enum { M = 19, N = 37, K = 67, PAIRS = (K + 1) / 2, PANELS = (N + PANEL - 1) / PANEL };
    static bf16 x[M * K], weight[N * K], packed[PANELS * PAIRS * PANEL * 2], out[M * N];
    static bf16 inputs[BLOCK * 3 * STEP] __attribute__((aligned(64)));
    for (int i = 0; i < M * K; i++) x[i] = narrow((float)(i * 7 % 13 - 6));
    for (int i = 0; i < N * K; i++) weight[i] = narrow((float)(i * 5 % 11 - 5));
    for (int j = 0; j < N; j++)
        for (int e = 0; e < K; e++)
            packed[((j / PANEL * PAIRS + e / 2) * PANEL + j % PANEL) * 2 + e % 2] = weight[j * K + e];
    Product p = make_product(x, packed, NULL, out, M, N, K, 1);
    if (p.chunk != BLOCK || p.steps != 3) return 0;
    multiply_part(&p, 0, p.panels, inputs);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            float sum = 0; /* of small integers: exact in any order */
            for (int e = 0; e < K; e++) sum += widen(x[i * K + e]) * widen(weight[j * K + e]);
            if (out[i * N + j] != narrow(sum)) return 0;
        }
    return 1;
}

/* In a child, so that an instruction that is advertised but not there ends only that. */
static int try_in_a_child(void) {
    pid_t child = fork();
    if (child < 0) return DIED;
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        signal(SIGILL, SIG_DFL);
        signal(SIGSEGV, SIG_DFL);
        signal(SIGALRM, SIG_DFL);
        alarm(10);
        _exit(small_product_is_right() ? 0 : 1);
    }
    int status;
    pid_t got;
    do got = waitpid(child, &status, 0);
    while (got < 0 && errno == EINTR);
    if (got != child || !WIFEXITED(status)) return DIED;
    return WEXITSTATUS(status) == 0 ? WORKS : WRONG;
}

#if defined(QUIRE_EMULATE_AMX) || defined(QUIRE_AMX_UNCHECKED)
static int permission(void) { return WORKS; }
#else
/* Leaf 0x1D of CPUID, which describes the tiles, is not read: some hypervisors leave it out. */
static int permission(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return NOT_THERE;
    int has_tiles = (d >> 22 & 1) && (d >> 24 & 1);                    /* AMX-BF16, AMX-TILE */
    int has_vectors = (b >> 16 & 1) && (b >> 30 & 1) && (b >> 31 & 1); /* AVX512F, BW, VL */
    if (!has_tiles || !has_vectors) return NOT_THERE;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return NOT_THERE; /* AVX512-BF16 */
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return NOT_ENABLED;       /* OSXSAVE */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x600e6) != 0x600e6) return NOT_ENABLED; /* SSE, AVX, AVX-512, tile configuration and data */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? REFUSED : WORKS;
}
#endif

/* Whether tiles can be used from now on: advertised, enabled, permitted to this process, and right. */
int quire_amx_start(void) {
    int state = permission();
    return state == WORKS ? try_in_a_child() : state;
}

#else

int quire_amx_start(void) { return NOT_COMPILED; }

void quire_tiles_begin(void) {}
void quire_tiles_end(void) {}
void quire_tile_scores(const bf16 *q, const int32_t *keys, float *scores, int64_t m, int64_t d, int64_t blocks) {
    (void)q, (void)keys, (void)scores, (void)m, (void)d, (void)blocks;
}
void quire_tile_values(const bf16 *weights, const bf16 *values, float *acc, int64_t m, int64_t d, int64_t steps) {
    (void)weights, (void)values, (void)acc, (void)m, (void)d, (void)steps;
}
int quire_linear_amx(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n, int64_t k) {
    (void)x, (void)packed, (void)bias, (void)out, (void)m, (void)n, (void)k;
    return BAD_SIZE;
}
int quire_linear_amx_part(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *out, int64_t m, int64_t n,
                          int64_t k, int64_t begin, int64_t end) {
    (void)x, (void)packed, (void)bias, (void)out, (void)m, (void)n, (void)k, (void)begin, (void)end;
    return BAD_SIZE;
}

#endif
