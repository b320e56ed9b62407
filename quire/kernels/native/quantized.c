/* Linear layers whose weights stay quantized; see quantized.h for how they are packed.
 *
 * Inputs are rounded to int8 by groups of 32, and multiplied as integers; zero times their sum is taken off as an integer
 * too. A row is summed in the same order however many rows there are: its result does not depend on the others, except where
 * many rows go through AMX (at the end of this file), unrounded. */

#include "quantized_groups.h"
#include "threads.h"

/* Of as many blocks of rows each unpacks the weights for itself, without a way through memory. */
enum { FEW_BLOCKS = 2 };

#define FOR_EVERY_FORMAT(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K)

INLINE void unpack_as(const int format, Reader reader, Group *to, int64_t groups) {
    for (int64_t g = 0; g < groups; g++) next_group(format, &reader, g, to + g);
}

static void unpack(int format, Reader reader, Group *to, int64_t groups) {
    switch (format) {
#define CASE(F)                                                                                                        \
    case F: unpack_as(F, reader, to, groups); break;
        FOR_EVERY_FORMAT(CASE)
#undef CASE
    }
}

/* 0: plain C, 1: AVX2, 2: AVX-512 with VNNI. */
int quire_quantized_kind(void) { return KIND_OF_DOT; }

/* Memory that a thread keeps between calls; NULL where there is none. */
static void *keep(int which, size_t size) {
    static _Thread_local struct {
        void *memory;
        size_t size;
    } kept[2];
    if (kept[which].size < size) {
        free(kept[which].memory);
        kept[which].size = 0;
        kept[which].memory = aligned_alloc(64, (size + 63) / 64 * 64);
        if (kept[which].memory) kept[which].size = size;
    }
    return kept[which].memory;
}

/* Rows `ids` of a packed weight [n, k], as floats. */
int quire_quantized_lookup(int format, const uint8_t *packed, const int64_t *ids, void *out, int64_t count, int64_t n,
                           int64_t k, int type) {
    if (count < 0 || !format_takes(format, k)) return BAD_SIZE;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= n) return BAD_SIZE;
    Format f = FORMATS[format];
    int64_t groups = k / GROUP;
    int status = DONE;
#pragma omp parallel for if (count > 16) reduction(| : status)
    for (int64_t i = 0; i < count; i++) {
        Group *all = keep(0, sizeof(Group) * groups);
        if (!all) status |= NO_MEMORY;
        if (!all) continue;
        unpack(format, read_vector(format, packed, ids[i] / WIDTH, k), all, groups);
        int lane = (int)(ids[i] % WIDTH);
        for (int64_t g = 0; g < groups; g++)
            for (int j = 0; j < GROUP; j++) {
                float q = (float)(((const uint8_t *)&all[g].w[j / 4])[lane * 4 + j % 4] - f.zero);
                float a = ((const float *)&all[g].a)[lane], b = ((const float *)&all[g].b)[lane];
                float value = f.kind == AFFINE ? a * q + b : f.kind == HALVES && j >= 16 ? b * q : a * q;
                int64_t to = i * k + g * GROUP + j;
                if (type) ((uint16_t *)out)[to] = narrow(value);
                else ((float *)out)[to] = value;
            }
    }
    return status;
}

/* The product */

/* Outputs that are one tensor in the checkpoint. */
typedef struct {
    const uint8_t *packed;
    int64_t format, outputs, offset;
} Segment;

/* Rows in int8, in blocks of ROWS (the last one smaller): [block][group][row], so that a block is read from end to end. */
typedef struct {
    int32_t *q;     /* 8 times 4 bytes a group */
    float *scale;   /* of q */
    float *total;   /* scale * sum of q */
    int32_t *start; /* [segment][2]: -zero * sum of q of each half; the first is of both halves unless HALVES */
} Inputs;

static inline Inputs block_of(Inputs x, int64_t row, int64_t groups) {
    int64_t at = row * groups;
    return (Inputs){x.q + at * QUADS, x.scale + at, x.total + at, x.start + at * 2};
}

/* 32 numbers as q * scale; sums of q of each half. A NaN makes the scale NaN: as bits it is above all numbers. */
#ifdef __AVX512BW__
INLINE float round_group(const void *x, int64_t at, int type, void *q, int32_t *sums) {
    __m512 v[2];
    __m512i most = _mm512_setzero_si512(), magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int i = 0; i < 2; i++) {
        v[i] = type ? (__m512)_mm512_slli_epi32(
                          _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)((const bf16 *)x + at + 16 * i))), 16)
                    : _mm512_loadu_ps((const float *)x + at + 16 * i);
        most = _mm512_max_epi32(most, _mm512_and_si512((__m512i)v[i], magnitude));
    }
    float largest = from_bits((uint32_t)_mm512_reduce_max_epi32(most)), inverse = largest > 1e-30f ? 127 / largest : 0;
    for (int i = 0; i < 2; i++) {
        __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], _mm512_set1_ps(inverse)));
        _mm_storeu_si128((__m128i *)q + i, _mm512_cvtepi32_epi8(rounded));
        sums[i] = _mm512_reduce_add_epi32(rounded);
    }
    return largest / 127;
}
#else
INLINE float round_group(const void *x, int64_t at, int type, void *q, int32_t *sums) {
    float v[GROUP];
    uint32_t most = 0;
    for (int i = 0; i < GROUP; i++) {
        v[i] = load(x, at + i, type);
        uint32_t magnitude = to_bits(v[i]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    float largest = from_bits(most), inverse = largest > 1e-30f ? 127 / largest : 0;
    sums[0] = sums[1] = 0;
    for (int i = 0; i < GROUP; i++) {
        int32_t rounded = (int32_t)rintf(v[i] * inverse);
        ((int8_t *)q)[i] = (int8_t)rounded;
        sums[i / 16] += rounded;
    }
    return largest / 127;
}
#endif

/* Row first + row of x becomes row `row` of all `rows`. */
static void quantize_row(const void *x, int64_t first, int64_t row, int64_t rows, int64_t k, int type,
                         const Segment *segments, int64_t count, Inputs all, int64_t numbers) {
    int64_t block = row / ROWS * ROWS, height = rows - block < ROWS ? rows - block : ROWS;
    Inputs to = block_of(all, block, k / GROUP);
    x = (const char *)x + (first + row) * k * (type ? 2 : 4);
    row -= block;
    for (int64_t g = 0; g < k / GROUP; g++) {
        int64_t at = g * height + row;
        int32_t sums[2];
        float scale = round_group(x, g * GROUP, type, to.q + at * QUADS, sums);
        to.scale[at] = scale;
        to.total[at] = scale * (float)(sums[0] + sums[1]);
        for (int64_t s = 0; s < count; s++) {
            const Format *f = FORMATS + segments[s].format;
            int32_t *start = to.start + s * numbers * 2 + at * 2;
            start[0] = -f->zero * (f->kind == HALVES ? sums[0] : sums[0] + sums[1]);
            start[1] = -f->zero * sums[1];
        }
    }
}

/* A group of `vectors` vectors times `rows` rows, added to y[row][vector]. Both are taken side by side: what is loaded serves
 * several products, and none waits for the one before. */
INLINE void add_group(const int kind, const int bits, const int rows, const int vectors, Floats (*y)[VECTORS],
                      const Group *const *w, const int32_t *x, const float *scale, const float *total,
                      const int32_t *start) {
    Ints sum[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < vectors; p++) sum[r][p] = kind == AFFINE ? (Ints){0} : all_ints(start[2 * r]);
#pragma GCC unroll 16
    for (int j = 0; j < QUADS; j++) {
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < vectors; p++) {
                if (kind == HALVES && j == QUADS / 2) {
                    y[r][p] = fused(__builtin_convertvector(sum[r][p], Floats), w[p]->a * scale[r], y[r][p]);
                    sum[r][p] = all_ints(start[2 * r + 1]);
                }
                sum[r][p] = dot(sum[r][p], w[p]->w[j], x[r * QUADS + j], bits);
            }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < vectors; p++) {
            Floats d = kind == HALVES ? w[p]->b : w[p]->a;
            y[r][p] = fused(__builtin_convertvector(sum[r][p], Floats), d * scale[r], y[r][p]);
            if (kind == AFFINE) y[r][p] = fused(w[p]->b, all_floats(total[r]), y[r][p]);
        }
}

static void write_row(Floats y, void *out, int64_t at, int width, int type) {
    float values[WIDTH];
    memcpy(values, &y, sizeof values);
    if (!type) memcpy((float *)out + at, values, sizeof(float) * width);
    else
        for (int n = 0; n < width; n++) ((uint16_t *)out)[at + n] = narrow(values[n]);
}

/* `rows` rows of one block by `vectors` vectors that are unpacked already, one `groups` groups after the other. */
INLINE void multiply_as(const int kind, const int bits, const int rows, const int vectors, const Group *w,
                        int64_t groups, Inputs x, Floats (*y)[VECTORS]) {
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < vectors; p++) sums[r][p] = y[0][p];
    for (int64_t g = 0; g < groups; g++) {
        const Group *both[2] = {w + g, w + groups + g};
        int64_t at = g * rows;
        add_group(kind, bits, rows, vectors, sums, both, x.q + at * QUADS, x.scale + at, x.total + at,
                  x.start + at * 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < vectors; p++) y[r][p] = sums[r][p];
}

/* More than fits the registers never comes: those cases are left out. */
#define CASE(P, R)                                                                                                     \
    case P * 8 + R:                                                                                                    \
        if (R <= ROWS && P <= VECTORS)                                                                                  \
            multiply_as(KIND, BITS, R <= ROWS ? R : 1, P <= VECTORS ? P : 1, w, groups, x, y);                          \
        break;
#define EVERY_CASE                                                                                                     \
    CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(1, 5) CASE(1, 6)                                                  \
    CASE(2, 1) CASE(2, 2) CASE(2, 3) CASE(2, 4) CASE(2, 5) CASE(2, 6)
#define MULTIPLY(NAME, K, B)                                                                                           \
    static void NAME(int rows, int vectors, const Group *w, int64_t groups, Inputs x, Floats (*y)[VECTORS]) {            \
        enum { KIND = K, BITS = B };                                                                                   \
        switch (vectors * 8 + rows) { EVERY_CASE }                                                                      \
    }
MULTIPLY(multiply_symmetric, SYMMETRIC, 8)
MULTIPLY(multiply_affine, AFFINE, 5)
MULTIPLY(multiply_halves, HALVES, 6)
#undef CASE

/* Few rows, all of one block, by one vector: the weight goes through registers only. */
INLINE void multiply_few_as(const int format, const int rows, Reader reader, int64_t groups, Inputs x,
                            Floats (*y)[VECTORS]) {
    const Format f = FORMATS[format];
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) sums[r][0] = y[0][0];
    for (int64_t g = 0; g < groups; g++) {
        Group w;
        const Group *one[1] = {&w};
        int64_t at = g * rows;
        if (rows == 1 && (int)WIDTH == (int)LANES)
            for (int64_t i = 0; i < quant_bytes(f.bits) + scale_bytes(f.kind, f.k_format); i += 64)
                READ_ONCE(reader.at + i);
        next_group(format, &reader, g, &w);
        add_group(f.kind, f.bits, rows, 1, sums, one, x.q + at * QUADS, x.scale + at, x.total + at, x.start + at * 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) y[r][0] = sums[r][0];
}

static void multiply_few(int format, int rows, Reader reader, int64_t groups, Inputs x, Floats (*y)[VECTORS]) {
    switch (format * 8 + rows) {
#define CASE(F, R)                                                                                                     \
    case F * 8 + R:                                                                                                    \
        if (R <= ROWS) multiply_few_as(F, R <= ROWS ? R : 1, reader, groups, x, y);                                     \
        break;
#define CASES(F) CASE(F, 1) CASE(F, 2) CASE(F, 3) CASE(F, 4) CASE(F, 5) CASE(F, 6)
        FOR_EVERY_FORMAT(CASES)
#undef CASES
#undef CASE
    }
}

/* Vector `at` of a weight and, where they belong together, the one after it. */
static int multiply_vectors(const Segment *s, int64_t at, const void *bias, void *out, Inputs x, int64_t rows, int64_t n,
                            int64_t k, int type) {
    const Format f = FORMATS[s->format];
    int64_t groups = k / GROUP, left = s->outputs - at * WIDTH, to = s->offset + at * WIDTH;
    int vectors = VECTORS > 1 && left > WIDTH ? 2 : 1, width[2], format = (int)s->format;
    Floats first[2] = {{0}};
    for (int p = 0; p < vectors; p++) {
        width[p] = left - p * WIDTH < WIDTH ? (int)(left - p * WIDTH) : WIDTH;
        if (bias)
            for (int i = 0; i < width[p]; i++) first[p][i] = load(bias, to + p * WIDTH + i, type);
    }
    if (rows <= FEW_BLOCKS * ROWS) {
        for (int p = 0; p < vectors; p++)
            for (int64_t r = 0; r < rows; r += ROWS) {
                int some = rows - r < ROWS ? (int)(rows - r) : ROWS;
                Floats y[ROWS][VECTORS] = {{first[p]}};
                Reader reader = read_vector(format, s->packed, at + p, k);
                multiply_few(format, some, reader, groups, block_of(x, r, groups), y);
                for (int i = 0; i < some; i++) write_row(y[i][0], out, (r + i) * n + to + p * WIDTH, width[p], type);
            }
        return DONE;
    }
    Group *w = keep(0, sizeof(Group) * groups * VECTORS);
    if (!w) return NO_MEMORY;
    for (int p = 0; p < vectors; p++)
        unpack(format, read_vector(format, s->packed, at + p, k), w + p * groups, groups);
    /* What comes next is prefetched meanwhile, all of it or, of few rows, more: unpacking would wait for memory each time. */
    int64_t bytes = panel_bytes_of(format, k) * VECTORS * WIDTH / LANES, each = bytes * ROWS / rows;
    const uint8_t *next = s->packed + at * WIDTH / LANES * panel_bytes_of(format, k) + bytes;
    if (left <= 2 * VECTORS * WIDTH) each = 0;
    for (int64_t r = 0; r < rows; r += ROWS) {
        int some = rows - r < ROWS ? (int)(rows - r) : ROWS;
        for (int64_t i = 0; i < each; i += 64, next += 64) __builtin_prefetch(next, 0, 2);
        Floats y[ROWS][VECTORS];
        for (int p = 0; p < vectors; p++) y[0][p] = first[p];
        if (f.kind == SYMMETRIC) multiply_symmetric(some, vectors, w, groups, block_of(x, r, groups), y);
        else if (f.kind == AFFINE) multiply_affine(some, vectors, w, groups, block_of(x, r, groups), y);
        else multiply_halves(some, vectors, w, groups, block_of(x, r, groups), y);
        for (int i = 0; i < some; i++)
            for (int p = 0; p < vectors; p++) write_row(y[i][p], out, (r + i) * n + to + p * WIDTH, width[p], type);
    }
    return DONE;
}

/* Vectors are dealt out VECTORS at a time. */
static inline int64_t deals(const Segment *s) { return (s->outputs + WIDTH * VECTORS - 1) / (WIDTH * VECTORS); }

/* Rows whose int8 form stays in the second-level cache while all panels pass. */
#define INPUT_BYTES (512 * 1024)

/* Rows from `begin` on. */
typedef struct {
    const void *x, *bias;
    void *out; /* of the first of them */
    const Segment *segments;
    int64_t count, begin, rows, n, k, numbers;
    Inputs inputs;
    int type;
} Product;

static int quantize_rows(const void *argument, Worker *worker) {
    const Product *p = argument;
    for (int64_t r; (r = quire_take(worker, p->rows)) >= 0;)
        quantize_row(p->x, p->begin, r, p->rows, p->k, p->type, p->segments, p->count, p->inputs, p->numbers);
    return DONE;
}

static int multiply_deals(const void *argument, Worker *worker) {
    const Product *p = argument;
    int64_t total = 0;
    int status = DONE;
    for (int64_t s = 0; s < p->count; s++) total += deals(p->segments + s);
    for (int64_t deal; (deal = quire_take(worker, total)) >= 0;) {
        const Segment *s = p->segments;
        while (deal >= deals(s)) deal -= deals(s++);
        Inputs x = p->inputs;
        x.start += (s - p->segments) * p->numbers * 2;
        status |= multiply_vectors(s, deal * VECTORS, p->bias, p->out, x, p->rows, p->n, p->k, p->type);
    }
    return status;
}

/* What a worker reads first of a weight: to the end of the segment that its share begins in. */
Ahead quire_quantized_share(const Segment *segments, int64_t count, int64_t k, const Worker *worker) {
    int64_t total = 0, bytes = 0;
    for (int64_t s = 0; s < count; s++) total += deals(segments + s);
    int64_t deal = total * worker->thread / worker->threads;
    const Segment *s = segments;
    while (deal >= deals(s)) deal -= deals(s++);
    bytes = panel_bytes_of((int)s->format, k);
    return (Ahead){(const char *)s->packed + deal * VECTORS * WIDTH / LANES * bytes,
                   (s->outputs - deal * VECTORS * WIDTH) / LANES * bytes};
}

static int multiply_rounded(const void *x, const Segment *segments, int64_t count, const void *bias, void *out,
                            int64_t m, int64_t n, int64_t k, int type) {
    int64_t most = INPUT_BYTES / k / ROWS * ROWS;
    int status = DONE;
    if (most < ROWS) most = ROWS;
    if (most > m) most = m;
    int64_t numbers = most * (k / GROUP);
    char *memory = keep(1, (size_t)(numbers * (GROUP + 8 + 8 * count)));
    if (!memory) return NO_MEMORY;
    Inputs all = {.q = (int32_t *)memory, .scale = (float *)(memory + numbers * GROUP)};
    all.total = all.scale + numbers;
    all.start = (int32_t *)(all.total + numbers);
    for (int64_t begin = 0; begin < m; begin += most) {
        int64_t rows = m - begin < most ? m - begin : most;
        char *target = (char *)out + begin * n * (type ? 2 : 4);
        Product p = {x, bias, target, segments, count, begin, rows, n, k, numbers, all, type};
        quire_share(quantize_rows, &p, rows * k > WORTH_THREADS && rows > 1);
        status |= quire_share(multiply_deals, &p, n * k > WORTH_THREADS);
    }
    return status;
}

/* Many rows on AMX: a weight's panels become bf16, some at a time, and stay near while all rows pass. */

#if defined(KIND_IS_WIDE) && defined(__AVX512BF16__)
enum { PANELS_AT_ONCE = 8, MIN_TILED_ROWS = 48 };

/* 16 outputs' numbers for inputs 4 * j .. 4 * j + 3 of a group -> two pairs of inputs of a packed bf16 weight. */
INLINE void widen_quad(const int kind, const int zero, const Group *w, int j, bf16 *to) {
    const __m512i in_turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                              21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 a = (__m512)(kind == HALVES && j >= QUADS / 2 ? w->b : w->a);
    __m512 b = kind == AFFINE ? (__m512)w->b : _mm512_mul_ps(a, _mm512_set1_ps((float)-zero)), x[4];
    for (int i = 0; i < 4; i++) {
        __m512i q = _mm512_and_si512(_mm512_srli_epi32((__m512i)w->w[j], 8 * i), _mm512_set1_epi32(0xff));
        x[i] = _mm512_fmadd_ps(a, _mm512_cvtepi32_ps(q), b);
    }
    for (int i = 0; i < 4; i += 2) {
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(x[i + 1], x[i]);
        _mm512_store_si512(to + i / 2 * PANEL * 2, _mm512_permutexvar_epi16(in_turns, both));
    }
}

INLINE void widen_as(const int format, Reader reader, int64_t groups, bf16 *to) {
    const Format f = FORMATS[format];
    for (int64_t g = 0; g < groups; g++, to += GROUP * PANEL) {
        Group w;
        next_group(format, &reader, g, &w);
        for (int j = 0; j < QUADS; j++) widen_quad(f.kind, f.zero, &w, j, to + j * 4 * PANEL);
    }
}

/* 16 outputs in their half of a panel of 32. */
static void widen_vector(int format, const uint8_t *packed, int64_t vector, int64_t k, bf16 *panel) {
    Reader reader = read_vector(format, packed, vector, k);
    switch (format) {
#define CASE(F)                                                                                                        \
    case F: widen_as(F, reader, k / GROUP, panel + vector % 2 * PANEL); break;
        FOR_EVERY_FORMAT(CASE)
#undef CASE
    }
}

/* For bf16, with inputs that are not rounded. The outputs of every segment are whole panels. */
int quire_quantized_linear_amx(const bf16 *x, const Segment *segments, int64_t count, const bf16 *bias, bf16 *out,
                               int64_t m, int64_t n, int64_t k) {
    int64_t panels = n / PANEL;
    int pinned = quire_pinned(), status = DONE;
#pragma omp parallel if (n * k > WORTH_THREADS) reduction(| : status)
    {
        quire_stay(pinned);
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t at = panels * thread / threads, last = panels * (thread + 1) / threads;
        bf16 *wide = keep(0, (size_t)(PANELS_AT_ONCE * k * PANEL * 2));
        if (!wide) status |= NO_MEMORY;
        while (wide && at < last) {
            const Segment *s = segments;
            while (s + 1 < segments + count && at * PANEL >= s[1].offset) s++;
            int64_t end = (s->offset + s->outputs) / PANEL, some = PANELS_AT_ONCE;
            if (some > last - at) some = last - at;
            if (some > end - at) some = end - at;
            for (int64_t i = 0; i < some * 2; i++)
                widen_vector((int)s->format, s->packed, at * 2 - s->offset / LANES + i, k, wide + i / 2 * k * PANEL);
            status |= quire_linear_amx_part(x, wide, bias ? bias + at * PANEL : 0, out + at * PANEL, m, n, k, 0, some);
            at += some;
        }
    }
    return status;
}

static int worth_tiles(const Segment *segments, int64_t count, int64_t m) {
    int whole = m >= MIN_TILED_ROWS;
    for (int64_t i = 0; i < count; i++) whole &= segments[i].outputs % PANEL == 0;
    return whole;
}
#else
static int worth_tiles(const Segment *segments, int64_t count, int64_t m) { return 0; }
int quire_quantized_linear_amx(const bf16 *x, const Segment *segments, int64_t count, const bf16 *bias, bf16 *out,
                               int64_t m, int64_t n, int64_t k) { return BAD_SIZE; }
#endif

/* x [m, k], bias [n] or NULL -> out [m, n]; tiles: whether quire_amx_start found that AMX works. */
int quire_quantized_linear(const void *x, const Segment *segments, int64_t count, const void *bias, void *out, int64_t m,
                           int64_t n, int64_t k, int type, int tiles) {
    int64_t end = 0;
    for (const Segment *s = segments; s < segments + count; end += s->outputs, s++)
        if (!format_takes(s->format, k) || s->outputs < 1 || s->offset != end) return BAD_SIZE;
    if (m < 0 || n < 1 || end != n) return BAD_SIZE;
    if (m == 0) return DONE;
    if (tiles && type == 1 && worth_tiles(segments, count, m))
        return quire_quantized_linear_amx(x, segments, count, bias, out, m, n, k);
    return multiply_rounded(x, segments, count, bias, out, m, n, k, type);
}
