/* Attention over pages: the tasks of a step (attention_task.h), shared among threads. */

#include <stdlib.h>
#include "attention_task.h"
#include "threads.h"

/* A single query's keys are split from twice PART on. */
enum { PART = 1024, MAX_PARTS = 32 };

int quire_attention_fits(int64_t heads, int64_t kv_heads, int64_t d) {
    return heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= MAX_M && d > 0 && d <= MAX_D;
}

/* How many keys a part has. It depends on the number of keys alone, so that a row's result, to the bit, depends neither
 * on the rows beside it nor on the number of threads. */
static int64_t part_size(int64_t keys) {
    int64_t parts = keys / PART < MAX_PARTS ? keys / PART : MAX_PARTS;
    return parts < 2 ? keys : ((keys + parts - 1) / parts + TILE - 1) / TILE * TILE;
}

static int64_t count_parts(int64_t keys) { return keys > 0 ? (keys + part_size(keys) - 1) / part_size(keys) : 1; }

/* A step's rows, and memory for partial results. */
typedef struct {
    const int64_t *rows;
    const int32_t *query_start, *seq_lens, *table;
    int64_t table_stride, shared;
    float *slots; /* of a query's partial results each */
} Batch;

static inline int64_t queries_of(const Batch *b, int64_t i) { return b->query_start[i + 1] - b->query_start[i]; }

/* Of a row of one query, the first of the keys that are its own. */
static inline int64_t first_own(const Batch *b, int64_t i, int64_t window) {
    return b->shared ? b->shared : first_key(b->seq_lens[i] - 1, window);
}

static inline int64_t own_parts(const Batch *b, int64_t i, int64_t window) {
    return queries_of(b, i) == 1 ? count_parts(b->seq_lens[i] - first_own(b, i, window)) : 1;
}

/* The slots that a row may need: for each part of the shared keys or, later, of its own; and for the result of the former. */
static int64_t slots_needed(const Batch *b, int64_t i, int64_t window) {
    int64_t own = own_parts(b, i, window), before = b->shared ? count_parts(b->shared) : 1;
    int64_t parts = own > before ? own : before;
    return (parts > 1 ? parts : 0) + (b->shared > 0);
}

/* Appends the parts of a task. Returns how many they are. */
static int64_t append_parts(Task *tasks, const Task *whole, float *partials, int64_t stride) {
    int64_t keys = whole->end - whole->begin, size = part_size(keys), count = count_parts(keys);
    for (int64_t p = 0; p < count; p++) {
        Task *t = tasks + p;
        *t = *whole;
        t->begin = whole->begin + p * size, t->end = p + 1 < count ? t->begin + size : whole->end;
        t->part = p, t->num_parts = count, t->first_part = tasks, t->unfinished = (int)count;
        t->partials = partials, t->stride = stride;
        if (p) t->from = NULL;
    }
    return count;
}

/* A thread takes tasks of `keys_at_once` keys or more at a time, and knows which follows. starts: room for count + 1. */
static void attend_all(const Task *tasks, int64_t count, int64_t keys_at_once, int64_t *starts) {
    int64_t shares = 0, keys = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!i || keys >= keys_at_once) starts[shares++] = i, keys = 0;
        keys += tasks[i].end - tasks[i].begin;
    }
    starts[shares] = count;
    int pinned = quire_pinned();
#pragma omp parallel for schedule(dynamic, 1) if (shares > 1)
    for (int64_t s = shares - 1; s >= 0; s--) {
        int64_t last = starts[s + 1] - 1;
        quire_stay(pinned);
        for (int64_t i = starts[s]; i <= last; i++) attend(tasks + i, i < last ? tasks + i + 1 : NULL);
    }
}

/* The shared keys, for rows [first, last), `at_once` of them to a task. Returns how many tasks were made. */
static int64_t make_shared_tasks(Task *tasks, const Task *common, const Batch *b, int64_t first, int64_t last,
                                 int64_t at_once, int64_t slot) {
    int64_t made = 0, stride = (last - first) * slot;
    Task t = *common;
    t.pages = b->table + b->rows[0] * b->table_stride, t.many_rows = 1, t.position = t.end = b->shared, t.num_heads = 1;
    for (int64_t row = first; row < last; row += at_once)
        for (t.first_head = 0; t.first_head < common->kv_heads; t.first_head++) {
            t.first_token = row, t.num_queries = last - row < at_once ? last - row : at_once;
            t.to = b->slots + (row - first) * slot;
            made += append_parts(tasks + made, &t, t.to + stride, stride);
        }
    return made;
}

/* Rows [first, last), for which there are slots. */
static int attend_rows(const Task *common, const Batch *b, int64_t first, int64_t last) {
    int64_t kv_heads = common->kv_heads, group = common->heads / kv_heads, most = MAX_M / group;
    int64_t n = last - first, slot = common->heads * (common->d + 2);
    int64_t units = 0, singles = 0, others = 0, keys = 0;
    for (int64_t i = first; i < last; i++) {
        int64_t queries = queries_of(b, i), parts = own_parts(b, i, common->window);
        units += parts;
        if (queries == 1) singles += parts, keys += b->seq_lens[i] - first_own(b, i, common->window);
        else others += (queries + most - 1) / most * kv_heads;
    }
    /* A page holds the keys and values of all heads: reading them together is reading in order, which memory does three
     * times as fast. So a single query takes all heads at once, if that leaves every thread enough to do. */
    int64_t shares = 4 * omp_get_max_threads();
    int64_t rows_of_head = padded(1, group, common->type, common->d, common->tiles);
    int64_t together = units >= shares && kv_heads * rows_of_head <= MAX_M ? kv_heads : 1;
    int64_t at_once = most > 1 ? most / 2 : 1; /* rows that share keys: tasks enough for all threads */
    int64_t count = singles * (kv_heads / together) + others;
    int64_t before = b->shared ? (n + at_once - 1) / at_once * kv_heads * count_parts(b->shared) : 0;
    if (!count) return DONE;
    int64_t room = (count > before ? count : before) + 1;
    Task *tasks = malloc((sizeof(Task) + sizeof(int64_t)) * room);
    if (!tasks) return NO_MEMORY;
    int64_t *starts = (int64_t *)(tasks + room);
    float *partials = b->slots;
    if (b->shared) {
        attend_all(tasks, make_shared_tasks(tasks, common, b, first, last, at_once, slot), 0, starts);
        partials += n * slot;
    }
    int64_t made = 0;
    for (int64_t i = first; i < last; i++) {
        int64_t queries = queries_of(b, i), parts = own_parts(b, i, common->window);
        Task t = *common;
        t.pages = b->table + b->rows[i] * b->table_stride;
        if (queries == 1) {
            t.first_token = b->query_start[i], t.num_queries = 1, t.position = b->seq_lens[i] - 1;
            t.begin = first_own(b, i, t.window), t.end = b->seq_lens[i], t.num_heads = together;
            if (b->shared) t.from = b->slots + (i - first) * slot;
            for (t.first_head = 0; t.first_head < kv_heads; t.first_head += together)
                made += append_parts(tasks + made, &t, partials, slot);
            partials += parts > 1 ? parts * slot : 0;
            continue;
        }
        t.num_heads = t.num_parts = 1;
        for (int64_t query = 0; query < queries; query += most)
            for (t.first_head = 0; t.first_head < kv_heads; t.first_head++) {
                t.num_queries = queries - query < most ? queries - query : most;
                t.first_token = b->query_start[i] + query, t.position = b->seq_lens[i] - queries + query;
                t.begin = first_key(t.position, t.window), t.end = t.position + t.num_queries;
                tasks[made++] = t;
            }
    }
    /* Single queries are alike: shares can be larger. */
    attend_all(tasks, made, others ? 0 : keys * (kv_heads / together) / shares, starts);
    free(tasks);
    return DONE;
}

/* q, out [tokens, heads, d]; rows [n] of table; query_start [n + 1]; seq_lens [n]; window 0: none; shared: leading keys
 * in pages that all rows have, if they are worth a pass of their own: every row has one query then, there is no window,
 * and each has keys beyond them; softcap 0: none; slopes (ALiBi) and sinks [heads] or NULL; scales: of a cache in int8,
 * [blocks, 2, kv_heads, block_size] inside its pages of `page` bytes, or NULL; slots: memory for
 * num_slots * heads * (d + 2) numbers, more than MAX_PARTS, nobody else's meanwhile; tiles: whether quire_amx_start found
 * that AMX works. */
int quire_attention(const void *q, void *out, const void *cache, const int64_t *rows, const int32_t *query_start,
                    const int32_t *seq_lens, const int32_t *table, int64_t tokens, int64_t table_stride, int64_t n,
                    int64_t heads, int64_t kv_heads, int64_t d, int64_t block_size, int64_t window, int64_t shared,
                    float scale, float softcap, const float *slopes, const float *sinks, float *slots,
                    int64_t num_slots, const float *scales, int64_t page, int type, int tiles) {
    if (n < 0 || block_size < 1 || shared < 0 || (scales && page < 2 * kv_heads * block_size * (d + 4)) || num_slots <= MAX_PARTS) return BAD_SIZE;
    if (!quire_attention_fits(heads, kv_heads, d)) return BAD_SIZE;
    int64_t rest = (tokens - query_start[n]) * heads * d; /* of nobody's tokens */
    if (rest > 0) memset((char *)out + query_start[n] * heads * d * width_of(type), 0, rest * width_of(type));
    Task common = {.q = q, .cache = cache, .out = out, .heads = heads, .kv_heads = kv_heads, .d = d,
                   .block_size = block_size, .window = window, .scale = scale, .softcap = softcap, .slopes = slopes,
                   .sinks = sinks, .scales = scales, .page = page, .lengths = seq_lens, .type = type, .tiles = tiles};
    Batch batch = {rows, query_start, seq_lens, table, table_stride, shared, slots};
    int status = DONE;
    for (int64_t first = 0, last; first < n && status == DONE; first = last) { /* as many as there are slots for */
        int64_t needed = 0;
        for (last = first; last < n; last++) {
            needed += slots_needed(&batch, last, window);
            if (needed > num_slots) break;
        }
        status = attend_rows(&common, &batch, first, last);
    }
    return status;
}
