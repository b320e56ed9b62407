/* A step's calls, noted with their arguments as Python would make them, made without it for as many tokens as there are. */

#include <stddef.h>
#include "replay.h"
#include "vectors.h"
#include "bf16.h"
#include "linear.h"
#include "threads.h"

int quire_rms_norm(const void *, void *, const void *, void *, int64_t, int64_t, int64_t, float, int);
int quire_layer_norm(const void *, void *, const void *, const void *, void *, int64_t, int64_t, float, int);
int quire_add(const void *, const void *, const int64_t *, void *, int64_t, int64_t, int);
int quire_activate(const void *, void *, int64_t, int64_t, int, int, int);
int quire_rope_and_write(const void *, void *, void *, const void *, const void *, float, const void *, const int64_t *,
                         const int64_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float *, int64_t, int);
int quire_linear(const bf16 *, const bf16 *, const bf16 *, bf16 *, int64_t, int64_t, int64_t);
int quire_int8_linear(const void *, const int8_t *, const int32_t *, const float *, const void *, void *, int64_t, int64_t,
                      int64_t, int);
int quire_linear_amx(const bf16 *, const bf16 *, const bf16 *, bf16 *, int64_t, int64_t, int64_t);
int quire_quantized_linear(const void *, const int64_t *, int64_t, const void *, void *, int64_t, int64_t, int64_t, int,
                           int);
Ahead quire_quantized_share(const int64_t *, int64_t, int64_t, const Worker *);
int quire_attention(const void *, void *, const void *, const int64_t *, const int32_t *, const int32_t *,
                    const int32_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    float, float, const float *, const float *, float *, int64_t, const float *, int64_t, int, int);
int quire_route(const void *, const float *, float *, int32_t *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                float, float, int, int, int, int, int);
int quire_moe(const bf16 *, const bf16 *, const bf16 *, const bf16 *, const bf16 *, const float *, const int32_t *,
              int32_t *, bf16 *, bf16 *, bf16 *, bf16 *, int64_t, int64_t, int64_t, int64_t, int64_t, int, int);
int quire_add_low_rank(const void *, const int32_t *, const int32_t *, const void *, const void *, float *, void *,
                       int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int);
int quire_all_reduce(void *, void *, int64_t, int64_t, int);
int quire_encoder_linear(const void *, const void *, const void *, void *, const void *, const float *, const float *,
                         int64_t, int64_t, int64_t, float, int, int);
int quire_encoder_attention(const void *, void *, const int32_t *, const float *, const void *, const int64_t *,
                            const float *, const float *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, float, float, int);
int quire_latent_write(bf16 *, const bf16 *, const float *, const bf16 *, const int64_t *, const int64_t *, bf16 *,
                       int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int);
int quire_latent_attention(const bf16 *, const bf16 *, const bf16 *, const bf16 *, const int64_t *, const int32_t *,
                           const int32_t *, const int32_t *, bf16 *, bf16 *, float *, bf16 *, int64_t, int64_t, int64_t,
                           int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, int);

static inline int64_t width_of_type(int64_t type) { return type ? 2 : 4; }

/* Of a step of `size` tokens as it was noted, tokens [first, first + count), and a thread's part of an arena or NULL. */
typedef struct {
    int64_t size, first, count;
    const Arena *arena;
    char *own;
} Tokens;

enum { BLOCK = 96, MANY_BLOCKS = 3 };

/* Where the rows are of what is `bytes` wide by token. */
static inline void *placed(const Tokens *t, void *p, int64_t bytes) {
    if (!p) return NULL;
    if (t->arena && (char *)p >= t->arena->base && (char *)p < t->arena->base + t->arena->width)
        return t->own + ((char *)p - t->arena->base) * BLOCK;
    return (char *)p + t->first * bytes;
}

/* The part of a call that some tokens are: its rows of theirs depend on no others. BAD_SIZE for a call that is not of this
 * kind. */
static int call_rows(const Call *c, const Tokens *t) {
    const Argument *a = c->a;
    int64_t each, width; /* rows of a token, bytes of a number */
    int64_t first = t->first, count = t->count;
#define ROWS_OF(argument) each = (argument).i / t->size
#define FROM(argument, numbers) placed(t, (argument).p, each * (numbers) * width)
    switch (c->kind) {
    case RMS_NORM:
        ROWS_OF(a[4]), width = width_of_type(a[8].i);
        return quire_rms_norm(FROM(a[0], a[6].i), FROM(a[1], a[5].i), a[2].p, FROM(a[3], a[5].i), count * each, a[5].i,
                              a[6].i, a[7].f, a[8].i);
    case LAYER_NORM:
        ROWS_OF(a[5]), width = width_of_type(a[8].i);
        return quire_layer_norm(FROM(a[0], a[6].i), FROM(a[1], a[6].i), a[2].p, a[3].p, FROM(a[4], a[6].i), count * each,
                                a[6].i, a[7].f, a[8].i);
    case ADD: {
        ROWS_OF(a[4]), width = width_of_type(a[6].i);
        const int64_t *of_table = a[2].p ? (const int64_t *)a[2].p + first * each : 0;
        return quire_add(FROM(a[0], a[5].i), of_table ? a[1].p : FROM(a[1], a[5].i), of_table, FROM(a[3], a[5].i),
                         count * each, a[5].i, a[6].i);
    }
    case ACTIVATE:
        ROWS_OF(a[2]), width = width_of_type(a[6].i);
        return quire_activate(FROM(a[0], a[4].i ? 2 * a[3].i : a[3].i), FROM(a[1], a[3].i), count * each, a[3].i, a[4].i,
                              a[5].i, a[6].i);
    case ROPE_AND_WRITE:
        ROWS_OF(a[9]), width = width_of_type(a[17].i);
        return quire_rope_and_write(FROM(a[0], (a[10].i + 2 * a[11].i) * a[12].i), FROM(a[1], a[10].i * a[12].i), a[2].p,
                                    a[3].p, a[4].p, a[5].f, a[6].p, (const int64_t *)a[7].p + first * each,
                                    (const int64_t *)a[8].p + first * each, count * each, a[10].i, a[11].i, a[12].i,
                                    a[13].i, a[14].i, a[15].p, a[16].i, a[17].i);
    case LINEAR:
    case LINEAR_FOR_NEXT:
        ROWS_OF(a[4]), width = sizeof(bf16);
        return quire_linear(FROM(a[0], a[6].i), a[1].p, a[2].p, FROM(a[3], a[5].i), count * each, a[5].i, a[6].i);
    case ADD_LOW_RANK:
        ROWS_OF(a[7]), width = width_of_type(a[14].i);
        return quire_add_low_rank(FROM(a[0], a[8].i), (const int32_t *)a[1].p + first * each, a[2].p, a[3].p, a[4].p,
                                  placed(t, a[5].p, each * a[10].i * sizeof(float)), FROM(a[6], a[9].i), count * each, a[8].i,
                                  a[9].i, a[10].i, a[11].i, a[12].i, a[13].i, a[14].i);
    case INT8_LINEAR:
        ROWS_OF(a[6]), width = width_of_type(a[9].i);
        return quire_int8_linear(FROM(a[0], a[8].i), a[1].p, a[2].p, a[3].p, a[4].p, FROM(a[5], a[7].i), count * each,
                                 a[7].i, a[8].i, a[9].i);
    }
    return BAD_SIZE;
}

static int is_of_rows(const Call *c) {
    return c->kind == RMS_NORM || c->kind == LAYER_NORM || c->kind == ADD || c->kind == ACTIVATE ||
           c->kind == ROPE_AND_WRITE || c->kind == LINEAR || c->kind == ADD_LOW_RANK || c->kind == INT8_LINEAR;
}

/* Whether a product and the next call are SiLU's gates and what they gate, with results in between that nobody else reads. */
static int is_gated(const Call *c) {
    enum { SILU = 0 }; /* as kernels.c numbers it */
#ifdef HAVE_BF16_VECTORS
    const Argument *next = c[1].a;
    return c->kind == LINEAR_FOR_NEXT && c[1].kind == ACTIVATE && next[0].p == c->a[3].p && next[4].i &&
           next[5].i == SILU && next[6].i && c->a[5].i == 2 * next[3].i && c->a[5].i % (2 * PANEL) == 0;
#else
    return 0;
#endif
}

static int call_gated(const Call *c, const Tokens *t) {
#ifdef HAVE_BF16_VECTORS
    const Argument *a = c->a;
    int64_t each = a[4].i / t->size, width = sizeof(bf16);
    return quire_linear_silu_mul(FROM(a[0], a[6].i), a[1].p, a[2].p, FROM(c[1].a[1], a[5].i / 2), t->count * each, a[5].i,
                                 a[6].i);
#else
    return BAD_SIZE;
#endif
}

/* Of many tokens a thread takes up to BLOCK at a time through all calls between two attentions: what one call writes the next
 * finds in the second-level cache, in memory that the thread used for the block before, and no thread waits for another.
 * Blocks are of equally many tokens, and as many for each thread. It needs memory whose rows are those of the same tokens in
 * every call (replay.py). */
static int call_blocks(const Call *calls, const Arena *arena, int64_t count, int64_t size, int64_t tokens) {
    int64_t threads = omp_get_max_threads(), tasks = (tokens + BLOCK * threads - 1) / (BLOCK * threads) * threads;
    int pinned = quire_pinned(), status = DONE;
#pragma omp parallel reduction(| : status)
    {
        quire_stay(pinned);
        char *own = arena ? arena->base + omp_get_thread_num() * arena->bytes : NULL;
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t task = 0; task < tasks; task++) {
            int64_t first = tokens * task / tasks;
            Tokens block = {size, first, tokens * (task + 1) / tasks - first, arena, own};
            for (const Call *c = calls; c < calls + count && status == DONE; c++) {
                if (c + 1 < calls + count && is_gated(c)) status |= call_gated(c++, &block);
                else status |= call_rows(c, &block);
            }
        }
    }
    return status;
}

/* Calls noted for a step of `size` tokens, made for one of `tokens` tokens in `rows` rows. */
typedef struct {
    const Call *calls, *blocks;
    const Arena *arena;
    int64_t count, size, tokens, rows, shared;
} Step;

/* What counts rows of numbers is a multiple of the tokens: of heads, where each has a norm. */
static int make_call(const Step *step, const Call *c) {
#define OF_TOKENS(argument) ((argument).i / step->size * step->tokens)
    const Argument *a = c->a;
    int64_t rows = step->rows, shared = step->shared;
    switch (c->kind) {
    default: return call_rows(c, &(Tokens){.size = step->size, .count = step->tokens});
    case ALL_REDUCE: return quire_all_reduce(a[0].p, a[1].p, OF_TOKENS(a[2]), a[3].i, a[4].i);
    case LINEAR_AMX:
        return quire_linear_amx(a[0].p, a[1].p, a[2].p, a[3].p, OF_TOKENS(a[4]), a[5].i, a[6].i);
    case QUANTIZED_LINEAR:
        return quire_quantized_linear(a[0].p, a[1].p, a[2].i, a[3].p, a[4].p, OF_TOKENS(a[5]), a[6].i, a[7].i,
                                      a[8].i, a[9].i);
    case ATTENTION: /* with a window (14) nothing is shared */
        return quire_attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, OF_TOKENS(a[7]), a[8].i,
                               rows, a[10].i, a[11].i, a[12].i, a[13].i, a[14].i, a[14].i ? 0 : shared, a[16].f,
                               a[17].f, a[18].p, a[19].p, a[20].p, a[21].i, a[22].p, a[23].i, a[24].i,
                               a[25].i);
#ifdef HAVE_BF16_VECTORS
    case ENCODER_LINEAR:
        return quire_encoder_linear(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, OF_TOKENS(a[7]), a[8].i,
                                    a[9].i, a[10].f, a[11].i, a[12].i);
    case ENCODER_ATTENTION:
        return quire_encoder_attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p,
                                       OF_TOKENS(a[8]), rows, a[10].i, a[11].i, a[12].i, a[13].i, a[14].i, a[15].i,
                                       a[16].f, a[17].f, a[18].i);
#endif
    case LATENT_WRITE:
        return quire_latent_write(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, OF_TOKENS(a[7]), a[8].i,
                                  a[9].i, a[10].i, a[11].i, a[12].i, a[13].i, a[14].f, a[15].i);
    case LATENT_ATTENTION:
        return quire_latent_attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p,
                                      a[9].p, a[10].p, a[11].p, OF_TOKENS(a[12]), a[13].i, a[14].i, rows, a[16].i,
                                      a[17].i, a[18].i, a[19].i, a[20].i, a[21].i, a[22].i, a[23].f, a[24].i);
    case ROUTE:
        return quire_route(a[0].p, a[1].p, a[2].p, a[3].p, OF_TOKENS(a[4]), a[5].i, a[6].i, a[7].i, a[8].i, a[9].i,
                           a[10].f, a[11].f, a[12].i, a[13].i, a[14].i, a[15].i, a[16].i);
    case MOE:
        return quire_moe(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].p, a[6].p, a[7].p, a[8].p, a[9].p, a[10].p,
                         a[11].p, OF_TOKENS(a[12]), a[13].i, a[14].i, a[15].i, a[16].i, a[17].i, a[18].i);
    }
}

static Ahead read_weight(const void *argument, const Worker *worker) {
    const Call *c = argument;
    if (c->kind == QUANTIZED_LINEAR) return quire_quantized_share(c->a[1].p, c->a[2].i, c->a[7].i, worker);
    int64_t panels = (c->a[5].i + PANEL - 1) / PANEL, bytes = (c->a[6].i + 1) / 2 * PANEL * 4;
    int64_t first = panels * worker->thread / worker->threads, last = panels * (worker->thread + 1) / worker->threads;
    return (Ahead){(const char *)c->a[1].p + first * bytes, (last - first) * bytes};
}

/* A product, while the factors of the terms that are added to it next are fetched: those of all slots from the first to the
 * last that has rows. There is too little work with them to hide how slow memory is. */
static int multiply_before_terms(const Step *step, const Call *c) {
    enum { MOST = 512 << 10 }; /* bytes, a part of the second-level caches */
    const Argument *a = c->a, *t = c[1].a;
    const int32_t *slots = t[1].p, *ranks = t[2].p;
    int64_t first = INT32_MAX, last = -1, width = width_of_type(t[14].i);
    for (int64_t i = 0, rows = OF_TOKENS(t[7]); i < rows; i++) {
        if (slots[i] < 0 || !ranks[slots[i]]) continue;
        if (slots[i] < first) first = slots[i];
        if (slots[i] > last) last = slots[i];
    }
    int64_t of_a = t[10].i * t[8].i * width, of_b = t[9].i * t[11].i * width, count = last + 1 - first;
    Ahead factors[AFTER] = {{(const char *)t[3].p + first * of_a, count * of_a},
                            {(const char *)t[4].p + first * of_b, count * of_b}};
    int fetch = last >= 0 && count * (of_a + of_b) <= MOST;
    return quire_linear_before(a[0].p, a[1].p, a[2].p, a[3].p, OF_TOKENS(a[4]), a[5].i, a[6].i, fetch ? factors : NULL);
}

/* The first call that is not DONE is the last. */
static int make_calls(const void *argument, Worker *leader) {
    const Step *step = argument;
    const Call *end = step->calls + step->count, *next = step->calls;
    int status = DONE, many = step->tokens >= MANY_BLOCKS * BLOCK * omp_get_max_threads();
    for (const Call *c = step->calls; c < end && status == DONE; c++) {
        int64_t run = 0; /* calls of rows that follow each other */
        while (many && c + run < end && is_of_rows(c + run)) run++;
        if (run > 1) {
            status = call_blocks(step->blocks + (c - step->calls), step->arena, run, step->size, step->tokens);
            c += run - 1;
            continue;
        }
        while (next < end && (next <= c || (next->kind != LINEAR && next->kind != QUANTIZED_LINEAR))) next++;
        if (leader) quire_read_ahead(leader, next < end ? read_weight : NULL, next);
        int terms = c->kind == LINEAR && c + 1 < end && c[1].kind == ADD_LOW_RANK;
        status = terms ? multiply_before_terms(step, c) : make_call(step, c);
    }
    return status;
}

/* Whether all that several threads should do of a step is what quire_share gives them. Of few tokens that is so for the
 * kinds here: what is not shared is small beside the products. */
static int can_be_led(const Step *step) {
    enum { FEW_TOKENS = 4 };
    int led = step->tokens <= FEW_TOKENS;
    for (const Call *c = step->calls; led && c < step->calls + step->count; c++) switch (c->kind) {
        case RMS_NORM:
        case LAYER_NORM:
        case ADD:
        case ACTIVATE:
        case ROPE_AND_WRITE:
        case LINEAR:
        case QUANTIZED_LINEAR:
        case ATTENTION:
        case ADD_LOW_RANK: break;
        default: led = 0;
        }
    return led;
}

int quire_replay(const Call *calls, const Call *blocks, const Arena *arena, int64_t count, int64_t size, int64_t tokens,
                 int64_t rows, int64_t shared) {
    if (tokens < 0 || tokens > size || rows < 0 || rows > size) return BAD_SIZE;
    int fits = arena && arena->width * BLOCK <= arena->bytes && omp_get_max_threads() <= arena->threads;
    Step step = {calls, fits ? blocks : calls, fits ? arena : NULL, count, size, tokens, rows, shared};
    return can_be_led(&step) ? quire_lead(make_calls, &step) : make_calls(&step, NULL);
}
