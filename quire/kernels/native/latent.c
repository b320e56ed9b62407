/* Latent attention in bf16 (attention/latent.py): latents and rotated parts into their pages; and attention with the
 * projections absorbed. A task is a block of queries of one row, with all heads: all see the same latents. The keys of a
 * single query, if many, are split into parts, each a task. */

#include <stdlib.h>
#include <string.h>
#include "attention_vectors.h"
#include "threads.h"

/* A single query's keys are split from twice PART on; about as many rows, of queries and heads, are in a task. */
enum { PART = 512, MAX_PARTS = 32, TASK_ROWS = 64 };

/* x [rope] by cosines and sines of rope / 2 angles, in place; pairs are neighbours or halves. */
static void rotate(bf16 *x, const bf16 *angles, int64_t rope, int interleaved) {
    int64_t half = rope / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    for (int64_t j = 0; j < half; j++) {
        bf16 *first = x + j * step, *second = first + apart;
        float c = widen(angles[j]), s = widen(angles[half + j]), a = widen(*first), b = widen(*second);
        *first = narrow(a * c - b * s), *second = narrow(b * c + a * s);
    }
}

/* q [n, heads, nope + rope], rows q_stride apart: rotated in place. kv [n, rank + rope], rows kv_stride apart: normed by
 * weight [rank] and rotated, into cache [pages, page_tokens, rank + rope]. table [positions, rope]. */
int quire_latent_write(bf16 *q, const bf16 *kv, const float *weight, const bf16 *table, const int64_t *positions,
                       const int64_t *slots, bf16 *cache, int64_t n, int64_t q_stride, int64_t kv_stride, int64_t heads,
                       int64_t nope, int64_t rank, int64_t rope, float eps, int interleaved) {
    if (n < 0 || heads < 1 || nope < 1 || rank < 1 || rope < 2 || rope % 2) return BAD_SIZE;
    int64_t width = rank + rope;
#pragma omp parallel for if (n * (heads * rope + width) > WORTH_THREADS)
    for (int64_t i = 0; i < n; i++) {
        const bf16 *from = kv + i * kv_stride, *angles = table + positions[i] * rope;
        bf16 *to = cache + slots[i] * width;
        float sum = 0;
        for (int64_t h = 0; h < heads; h++) rotate(q + i * q_stride + h * (nope + rope) + nope, angles, rope, interleaved);
        _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < rank; j++) sum += widen(from[j]) * widen(from[j]);
        float scale = 1.0f / sqrtf(sum / rank + eps);
        for (int64_t j = 0; j < rank; j++) to[j] = narrow(widen(from[j]) * scale * weight[j]);
        memcpy(to + rank, from + rank, rope * 2);
        rotate(to + rank, angles, rope, interleaved);
    }
    return DONE;
}

typedef struct {
    const bf16 *q, *cache;
    bf16 *latent; /* [heads][tokens][rank]: absorbed queries, then results */
    int64_t q_stride, tokens, heads, nope, rank, rope, page_tokens;
    float scale;
    int tiles;
} Layer;

typedef struct {
    const int32_t *pages; /* of the row */
    int64_t first_token, num_queries, position, begin, end;
    float *partials; /* of this part: heads results of rank sums, the greatest score and the total; NULL: there is one */
} Task;

static inline const bf16 *key_at(const Layer *l, const Task *t, int64_t key) {
    int64_t slot = (int64_t)t->pages[key / l->page_tokens] * l->page_tokens + key % l->page_tokens;
    return l->cache + slot * (l->rank + l->rope);
}

static inline bf16 *result_of(const Layer *l, int64_t token, int64_t head) {
    return l->latent + (head * l->tokens + token) * l->rank;
}

static inline const bf16 *rotated_of(const Layer *l, int64_t token, int64_t head) {
    return l->q + token * l->q_stride + head * (l->nope + l->rope) + l->nope;
}

/* Keys of a tile that row i of a task sees: those before this one. */
static inline int64_t seen_by(const Layer *l, const Task *t, int64_t i, int64_t tile, int64_t count) {
    int64_t last = t->position + i / l->heads - tile + 1;
    return last < 0 ? 0 : last < count ? last : count;
}

static void attend_plain(const Layer *l, const Task *t, int64_t m, float *acc, float *most, float *total) {
    int64_t rank = l->rank, rope = l->rope;
    float scores[TILE];
    for (int64_t tile = t->begin; tile < t->end; tile += TILE) {
        int64_t count = t->end - tile < TILE ? t->end - tile : TILE;
        for (int64_t i = 0; i < m; i++) {
            int64_t token = t->first_token + i / l->heads, last = seen_by(l, t, i, tile, count);
            const bf16 *a = result_of(l, token, i % l->heads), *b = rotated_of(l, token, i % l->heads);
            float *sums = acc + i * rank, greatest = most[i];
            for (int64_t j = 0; j < last; j++) {
                const bf16 *k = key_at(l, t, tile + j);
                float s = 0;
                _Pragma("omp simd reduction(+ : s)") for (int64_t e = 0; e < rank; e++) s += widen(a[e]) * widen(k[e]);
                for (int64_t e = 0; e < rope; e++) s += widen(b[e]) * widen(k[rank + e]);
                scores[j] = s * l->scale;
                greatest = scores[j] > greatest ? scores[j] : greatest;
            }
            if (greatest > most[i]) {
                float shrink = most[i] == -INFINITY ? 0.0f : exp_fast(most[i] - greatest);
                total[i] *= shrink;
                for (int64_t e = 0; e < rank; e++) sums[e] *= shrink;
                most[i] = greatest;
            }
            for (int64_t j = 0; j < last; j++) {
                const bf16 *k = key_at(l, t, tile + j);
                float w = exp_fast(scores[j] - greatest);
                total[i] += w;
                for (int64_t e = 0; e < rank; e++) sums[e] += w * widen(k[e]);
            }
        }
    }
}

#ifdef HAVE_BF16_VECTORS
/* rank and rank + rope multiples of 32. As attend_bf16 of attention_task.h, but values are a part of the keys. `all`: m
 * in sixteens; q [all, rank + rope] and the rest of `room` are the thread's. */
static void attend_vectors(const Layer *l, const Task *t, int64_t m, int64_t all, bf16 *room, float *acc, float *most,
                           float *total) {
    int64_t rank = l->rank, d = rank + l->rope;
    bf16 *q = room, *values = q + all * d, *weights = values + TILE * rank;
    int32_t *keys = (int32_t *)(weights + ROWS * TILE);
    float *scores = (float *)(keys + d / 2 * TILE);
    const bf16 *rows[TILE];
    for (int64_t i = 0; i < all; i++) {
        int64_t token = t->first_token + i / l->heads;
        if (i >= m) {
            memset(q + i * d, 0, d * 2);
            continue;
        }
        memcpy(q + i * d, result_of(l, token, i % l->heads), rank * 2);
        memcpy(q + i * d + rank, rotated_of(l, token, i % l->heads), l->rope * 2);
    }
    if (l->tiles) quire_tiles_begin();
    const __m512i low = PAIRS_LOW, high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t tile = t->begin; tile < t->end; tile += TILE) {
        int64_t count = t->end - tile < TILE ? t->end - tile : TILE, blocks = (count + 31) / 32 * 2;
        for (int64_t j = 0; j < TILE; j++) rows[j] = key_at(l, t, tile + (j < count ? j : count - 1));
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t e = 0; e < d / 2; e += 16) {
                __m512i r[16];
                for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_si512((const int32_t *)rows[b * 16 + j] + e);
                transpose16(r);
                for (int j = 0; j < 16; j++) _mm512_store_si512(keys + (e + j) * TILE + b * 16, r[j]);
            }
        for (int64_t j = 0; j < blocks * 8; j++)
            for (int64_t e = 0; e < rank; e += 32) {
                __m512i a = _mm512_loadu_si512(rows[2 * j] + e), b = _mm512_loadu_si512(rows[2 * j + 1] + e);
                _mm512_store_si512(values + (j * rank + e) * 2, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(values + (j * rank + e + 16) * 2, _mm512_permutex2var_epi16(a, high, b));
            }
        for (int64_t i = 0; i < all; i += ROWS) {
            int64_t some = all - i < ROWS ? all - i : ROWS;
            if (l->tiles) quire_tile_scores(q + i * d, keys, scores, some, d, blocks);
            else score(q + i * d, keys, scores, some, d, blocks);
            for (int64_t r = 0; r < some; r++) {
                int64_t row = i + r, last = row < m ? seen_by(l, t, row, tile, count) : 0;
                if (!last) memset(weights + r * TILE, 0, TILE * 2);
                else
                    soften_row(scores + r * TILE, weights + r * TILE, l->scale, rank, 0, last, last == TILE, most + row,
                               total + row, acc + row * rank);
            }
            if (l->tiles) quire_tile_values(weights, values, acc + i * rank, some, rank, blocks / 2);
            else weigh(weights, values, acc + i * rank, some, rank, blocks * 8);
        }
    }
    if (l->tiles) quire_tiles_end();
}
#endif

static void finish(const Layer *l, int64_t token, int64_t head, const float *sums, float total) {
    bf16 *to = result_of(l, token, head);
    float scale = total > 0 || total != total ? 1.0f / total : 0.0f;
    for (int64_t e = 0; e < l->rank; e++) to[e] = narrow(sums[e] * scale);
}

static int attend(const Layer *l, const Task *t) {
    int64_t m = t->num_queries * l->heads, all = (m + 15) / 16 * 16, rank = l->rank, d = rank + l->rope;
    int64_t sums = all * (rank + 2) * 4;
    sums = (sums + 63) / 64 * 64;
    char *room = quire_scratch(sums + (all * d + TILE * rank + ROWS * TILE) * 2 + d / 2 * TILE * 4 + ROWS * TILE * 4 + 256);
    if (!room) return NO_MEMORY;
    float *acc = (float *)room, *most = acc + all * rank, *total = most + all;
    memset(acc, 0, all * rank * 4);
    for (int64_t i = 0; i < all; i++) most[i] = -INFINITY, total[i] = 0;
#ifdef HAVE_BF16_VECTORS
    if (rank % 32 == 0 && d % 32 == 0) attend_vectors(l, t, m, all, (bf16 *)(room + sums), acc, most, total);
    else
#endif
        attend_plain(l, t, m, acc, most, total);
    for (int64_t i = 0; i < m; i++) {
        if (t->partials) {
            float *to = t->partials + i * (rank + 2);
            memcpy(to, acc + i * rank, rank * 4);
            to[rank] = most[i], to[rank + 1] = total[i];
        } else finish(l, t->first_token + i / l->heads, i % l->heads, acc + i * rank, total[i]);
    }
    return DONE;
}

/* The parts of a single query, in their order, whichever ended first. */
static void combine(const Layer *l, int64_t token, int64_t head, const float *partials, int64_t parts) {
    int64_t rank = l->rank, stride = l->heads * (rank + 2);
    float sums[1024], total = 0, most = -INFINITY;
    partials += head * (rank + 2);
    for (int64_t p = 0; p < parts; p++) most = partials[p * stride + rank] > most ? partials[p * stride + rank] : most;
    memset(sums, 0, rank * 4);
    for (int64_t p = 0; p < parts; p++) {
        const float *part = partials + p * stride;
        float weight = part[rank] == most ? 1.0f : exp_fast(part[rank] - most);
        for (int64_t e = 0; e < rank; e++) sums[e] += weight * part[e];
        total += weight * part[rank + 1];
    }
    finish(l, token, head, sums, total);
}

/* Depends on the keys alone, so that a row's result does not depend on the rows beside it. */
static int64_t parts_of(int64_t queries, int64_t keys) {
    int64_t parts = keys / PART < MAX_PARTS ? keys / PART : MAX_PARTS;
    return queries > 1 || parts < 2 ? 1 : parts;
}

typedef struct {
    int64_t token, parts;
    const float *partials;
} Split;

/* Rows [first, last), whose partial results fit. */
static int attend_rows(const Layer *l, const int64_t *rows, const int32_t *starts, const int32_t *lens,
                       const int32_t *table, int64_t table_stride, int64_t first, int64_t last, float *slots) {
    int64_t at_once = TASK_ROWS / l->heads > 0 ? TASK_ROWS / l->heads : 1, most = 0, count = 0, splits = 0;
    for (int64_t i = first; i < last; i++) {
        int64_t queries = starts[i + 1] - starts[i];
        most += (queries + at_once - 1) / at_once + MAX_PARTS * (queries == 1);
    }
    if (!most) return DONE;
    Task *tasks = malloc((sizeof(Task) + sizeof(Split)) * most);
    if (!tasks) return NO_MEMORY;
    Split *split = (Split *)(tasks + most);
    for (int64_t i = first; i < last; i++) {
        int64_t queries = starts[i + 1] - starts[i], keys = lens[i], parts = parts_of(queries, keys);
        if (keys < queries || rows[i] < 0) continue;
        Task t = {.pages = table + rows[i] * table_stride, .num_queries = 1, .end = keys};
        if (parts > 1) {
            int64_t size = ((keys + parts - 1) / parts + TILE - 1) / TILE * TILE;
            parts = (keys + size - 1) / size;
            t.first_token = starts[i], t.position = keys - 1;
            split[splits++] = (Split){starts[i], parts, slots};
            for (int64_t p = 0; p < parts; p++, slots += l->heads * (l->rank + 2)) {
                t.begin = p * size, t.end = t.begin + size < keys ? t.begin + size : keys, t.partials = slots;
                tasks[count++] = t;
            }
            continue;
        }
        for (int64_t query = 0; query < queries; query += at_once) {
            t.num_queries = queries - query < at_once ? queries - query : at_once;
            t.first_token = starts[i] + query, t.position = keys - queries + query;
            t.end = t.position + t.num_queries;
            tasks[count++] = t;
        }
    }
    int pinned = quire_pinned(), status = DONE;
#pragma omp parallel reduction(| : status) if (count > 1)
    {
        quire_stay(pinned);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = count - 1; i >= 0; i--) status |= attend(l, tasks + i);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < splits * l->heads; i++)
            combine(l, split[i / l->heads].token, i % l->heads, split[i / l->heads].partials, split[i / l->heads].parts);
    }
    free(tasks);
    return status;
}

/* For each head, x [tokens, k] times its packed weight [n, k] -> out [tokens, n]. */
static int by_head(const bf16 *x, const bf16 *packed, bf16 *out, int64_t heads, int64_t tokens, int64_t n, int64_t k,
                   int amx) {
    int64_t panels = (n + PANEL - 1) / PANEL, size = panels * ((k + 1) / 2) * PANEL * 2, share = panels;
    int pinned = quire_pinned(), status = DONE;
    while (share > 1 && heads * (panels / share) < 4 * omp_get_max_threads()) share = (share + 1) / 2;
    int64_t shares = (panels + share - 1) / share;
#pragma omp parallel reduction(| : status) if (heads * tokens * n * k > WORTH_THREADS)
    {
        quire_stay(pinned);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < heads * shares; i++) {
            int64_t h = i / shares, begin = i % shares * share, end = begin + share < panels ? begin + share : panels;
            status |= (amx ? quire_linear_amx_part : quire_linear_part)(x + h * tokens * k, packed + h * size, NULL,
                                                                      out + h * tokens * n, tokens, n, k, begin, end);
        }
    }
    return status;
}

/* q as quire_latent_write left it; w_uk [heads][rank, nope] and w_uv [heads][v, rank] packed; cache and rows as those of
 * quire_attention. latent: room for tokens * heads * rank, heads_room for tokens * heads * the larger of nope and v; slots:
 * num_slots times heads * (rank + 2), more than MAX_PARTS of them. -> out [tokens, heads, v]. */
int quire_latent_attention(const bf16 *q, const bf16 *w_uk, const bf16 *w_uv, const bf16 *cache, const int64_t *rows,
                           const int32_t *query_start, const int32_t *seq_lens, const int32_t *table, bf16 *latent,
                           bf16 *heads_room, float *slots, bf16 *out, int64_t tokens, int64_t q_stride,
                           int64_t table_stride, int64_t n, int64_t heads, int64_t nope, int64_t rank, int64_t rope,
                           int64_t v, int64_t page_tokens, int64_t num_slots, float scale, int amx) {
    if (tokens < 0 || n < 0 || heads < 1 || nope < 1 || rope < 1 || v < 1 || page_tokens < 1) return BAD_SIZE;
    if (rank < 1 || rank > 1024 || num_slots <= MAX_PARTS) return BAD_SIZE;
    Layer layer = {q, cache, latent, q_stride, tokens, heads, nope, rank, rope, page_tokens, scale, amx};
#pragma omp parallel for if (tokens * heads * nope > WORTH_THREADS)
    for (int64_t i = 0; i < tokens * heads; i++) {
        int64_t h = i / tokens, token = i % tokens;
        memcpy(heads_room + i * nope, q + token * q_stride + h * (nope + rope), nope * 2);
    }
    int status = by_head(heads_room, w_uk, latent, heads, tokens, rank, nope, amx);
    for (int64_t first = 0, last; first < n && status == DONE; first = last) { /* as many as there are slots for */
        int64_t needed = 0;
        for (last = first; last < n; last++) {
            int64_t parts = parts_of(query_start[last + 1] - query_start[last], seq_lens[last]);
            needed += parts > 1 ? parts : 0;
            if (needed > num_slots) break;
        }
        status = attend_rows(&layer, rows, query_start, seq_lens, table, table_stride, first, last, slots);
    }
    if (status == DONE) status = by_head(latent, w_uv, heads_room, heads, tokens, v, rank, amx);
#pragma omp parallel for if (tokens * heads * v > WORTH_THREADS)
    for (int64_t i = 0; i < tokens * heads; i++)
        memcpy(out + i * v, heads_room + ((i % heads) * tokens + i / heads) * v, v * 2);
    return status;
}
