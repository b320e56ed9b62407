/* Attention over pages: the tasks of a step (attention_task.h), shared among threads. */

#include <stdlib.h>
#include "attention_task.h"
#include "threads.h"

int quire_attention_fits(int64_t heads, int64_t kv_heads, int64_t d) {
    return heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= MAX_M && d > 0 && d <= MAX_D;
}

/* A step's rows, and memory for partial results. */
typedef struct {
    const int64_t *rows;
    const int32_t *query_start, *seq_lens, *table;
    int64_t table_stride, shared;
    float *slots; /* of a query's partial results each */
} Batch;

static inline int64_t queries_of(const Batch *b, int64_t i) { return b->query_start[i + 1] - b->query_start[i]; }

/* Of the first query of a row. */
static inline int64_t position_of(const Batch *b, int64_t i) { return b->seq_lens[i] - queries_of(b, i); }

static inline int64_t tile_of(int64_t key) { return key / TILE * TILE; }

/* The parts of a single query. */
static inline int64_t parts_of(const Batch *b, int64_t i, int64_t window) {
    int64_t last = b->seq_lens[i] - 1;
    return last < 0 ? 1 : part_of(last) - part_of(tile_of(first_key(last, window))) + 1;
}

/* How many tasks the keys of a row's own are, if each part is one; 0: the row is one task for all of its parts. Rows of
 * several queries are; they have tasks enough. */
static inline int64_t own_parts(const Batch *b, int64_t i, int64_t window) {
    if (queries_of(b, i) != 1) return 0;
    if (b->shared) return part_of(b->seq_lens[i] - 1) - part_of(b->shared) + 1;
    int64_t parts = parts_of(b, i, window);
    return parts > 2 ? parts : 0;
}

static int64_t slots_needed(const Batch *b, int64_t i, int64_t window) {
    return own_parts(b, i, window) ? parts_of(b, i, window) : 0;
}

typedef struct {
    const Task *tasks;
    const int64_t *starts; /* of shares */
    int64_t shares;
} Shares;

static int attend_shares(const void *argument, Worker *worker) {
    const Shares *all = argument;
    int64_t taken;
    while ((taken = quire_take(worker, all->shares)) >= 0) {
        int64_t s = all->shares - 1 - taken, last = all->starts[s + 1] - 1;
        for (int64_t i = all->starts[s]; i <= last; i++) attend(all->tasks + i, i < last ? all->tasks + i + 1 : NULL);
    }
    return DONE;
}

/* A thread takes tasks of `keys_at_once` keys or more at a time, and knows which follows. starts: room for count + 1. */
static void attend_all(const Task *tasks, int64_t count, int64_t keys_at_once, int64_t *starts) {
    int64_t shares = 0, keys = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!i || keys >= keys_at_once) starts[shares++] = i, keys = 0;
        keys += tasks[i].end - tasks[i].begin;
    }
    starts[shares] = count;
    quire_share(attend_shares, &(Shares){tasks, starts, shares}, shares > 1);
}

/* The shared keys, for rows [first, last), `at_once` of them to a task. Returns how many tasks were made. */
static int64_t make_shared_tasks(Task *tasks, const Task *common, const Batch *b, int64_t first, int64_t last,
                                 int64_t at_once, int64_t row_slots) {
    int64_t made = 0;
    Task t = *common;
    t.pages = b->table + b->rows[0] * b->table_stride, t.many_rows = 1, t.position = b->shared, t.num_heads = 1;
    t.query_stride = row_slots;
    for (int64_t row = first; row < last; row += at_once)
        for (t.first_head = 0; t.first_head < common->kv_heads; t.first_head++) {
            t.first_token = row, t.num_queries = last - row < at_once ? last - row : at_once;
            t.partials = b->slots + (row - first) * row_slots;
            for (t.begin = 0; t.begin < b->shared; t.begin = t.end) {
                t.part = part_of(t.begin), t.end = part_end(t.begin, b->shared);
                tasks[made++] = t;
            }
        }
    return made;
}

/* The parts of a row of one query, each a task. Returns how many they are. */
static int64_t append_parts(Task *tasks, const Task *whole, int64_t shared) {
    int64_t made = 0, first = part_of(shared ? 0 : whole->begin);
    for (int64_t begin = whole->begin; begin < whole->end; begin = tasks[made++].end) {
        Task *t = tasks + made;
        *t = *whole;
        t->begin = begin, t->end = part_end(begin, whole->end), t->part = part_of(begin) - first;
        t->resumes = !made && shared && part_of(shared - 1) == part_of(begin);
        t->first_of_row = tasks;
    }
    tasks->unfinished = (int)made;
    return made;
}

/* Rows [first, last), for which there are slots. */
static int attend_rows(const Task *common, const Batch *b, int64_t first, int64_t last) {
    int64_t kv_heads = common->kv_heads, group = common->heads / kv_heads, most = MAX_M / group, window = common->window;
    int64_t n = last - first, slot = common->heads * (common->d + 2);
    int64_t units = 0, singles = 0, others = 0, keys = 0, row_slots = 0;
    for (int64_t i = first; i < last; i++) {
        int64_t queries = queries_of(b, i), parts = own_parts(b, i, window), needed = slots_needed(b, i, window);
        if (!parts) parts = 1;
        if (b->shared && needed * slot > row_slots) row_slots = needed * slot;
        units += parts;
        if (queries == 1) singles += parts, keys += b->seq_lens[i] - (b->shared ? b->shared : first_key(position_of(b, i), window));
        else others += (queries + most - 1) / most * kv_heads;
    }
    /* A page holds the keys and values of all heads: reading them together is reading in order, which memory does three
     * times as fast. So a single query takes all heads at once, if that leaves every thread enough to do. */
    int64_t shares = 4 * omp_get_max_threads();
    int64_t rows_of_head = padded(1, group, common->type, common->d, common->tiles);
    int64_t together = units >= shares && kv_heads * rows_of_head <= MAX_M ? kv_heads : 1;
    /* Few heads are dealt out by their queries, so that no thread is left without any. */
    int64_t split = 1, alone = singles * kv_heads;
    if (is_few(1, group, common->type, common->d, common->tiles))
        while (split < group && (alone * split < omp_get_max_threads() || group % split)) split++;
    int64_t at_once = most > 1 ? most / 2 : 1; /* rows that share keys: tasks enough for all threads */
    int64_t count = singles * (kv_heads * split / together) + others;
    int64_t before = b->shared ? (n + at_once - 1) / at_once * kv_heads * (part_of(b->shared - 1) + 1) : 0;
    if (!count) return DONE;
    int64_t room = (count > before ? count : before) + 1;
    Task *tasks = malloc((sizeof(Task) + sizeof(int64_t)) * room);
    if (!tasks) return NO_MEMORY;
    int64_t *starts = (int64_t *)(tasks + room);
    if (b->shared)
        attend_all(tasks, make_shared_tasks(tasks, common, b, first, last, at_once, row_slots), 0, starts);
    int64_t made = 0;
    float *slots = b->slots;
    for (int64_t i = first; i < last; i++) {
        int64_t queries = queries_of(b, i), parts = own_parts(b, i, window);
        Task t = *common;
        t.pages = b->table + b->rows[i] * b->table_stride;
        if (queries == 1) {
            t.first_token = b->query_start[i], t.num_queries = 1, t.position = position_of(b, i);
            t.lowest = b->shared ? b->shared : first_key(t.position, window);
            t.begin = tile_of(t.lowest), t.end = b->seq_lens[i], t.num_heads = together;
            if (parts) t.partials = slots, t.num_parts = parts_of(b, i, window);
            t.split = split;
            for (t.first_head = 0; t.first_head < kv_heads * split; t.first_head += together) {
                if (parts) made += append_parts(tasks + made, &t, b->shared);
                else tasks[made++] = t;
            }
            slots += b->shared ? row_slots : parts ? t.num_parts * slot : 0;
            continue;
        }
        t.num_heads = 1;
        for (int64_t query = 0; query < queries; query += most)
            for (t.first_head = 0; t.first_head < kv_heads; t.first_head++) {
                t.num_queries = queries - query < most ? queries - query : most;
                t.first_token = b->query_start[i] + query, t.position = position_of(b, i) + query;
                t.lowest = first_key(t.position, window);
                t.begin = tile_of(t.lowest), t.end = t.position + t.num_queries;
                tasks[made++] = t;
            }
    }
    /* Single queries are alike: shares can be larger. */
    attend_all(tasks, made, others ? 0 : keys * (kv_heads * split / together) / shares, starts);
    free(tasks);
    return DONE;
}

/* q, out [tokens, heads, d]; rows [n] of table; query_start [n + 1]; seq_lens [n]; window 0: none; shared: leading keys
 * in pages that all rows have, if they are worth a pass of their own: every row has one query then, there is no window,
 * and each has keys beyond them; softcap 0: none; slopes (ALiBi) and sinks [heads] or NULL; scales: of a cache in int8,
 * [blocks, 2, kv_heads, block_size] inside its pages of `page` bytes, or NULL; slots: memory for
 * num_slots * heads * (d + 2) numbers, at least MAX_PARTS of them, nobody else's meanwhile; tiles: whether quire_amx_start found
 * that AMX works. */
int quire_attention(const void *q, void *out, const void *cache, const int64_t *rows, const int32_t *query_start,
                    const int32_t *seq_lens, const int32_t *table, int64_t tokens, int64_t table_stride, int64_t n,
                    int64_t heads, int64_t kv_heads, int64_t d, int64_t block_size, int64_t window, int64_t shared,
                    float scale, float softcap, const float *slopes, const float *sinks, float *slots,
                    int64_t num_slots, const float *scales, int64_t page, int type, int tiles) {
    if (n < 0 || block_size < 1 || shared < 0 || (scales && page < 2 * kv_heads * block_size * (d + 4)) || num_slots < MAX_PARTS) return BAD_SIZE;
    if (!quire_attention_fits(heads, kv_heads, d)) return BAD_SIZE;
    int64_t rest = (tokens - query_start[n]) * heads * d; /* of nobody's tokens */
    if (rest > 0) memset((char *)out + query_start[n] * heads * d * width_of(type), 0, rest * width_of(type));
    Task common = {.q = q, .cache = cache, .out = out, .heads = heads, .kv_heads = kv_heads, .split = 1, .d = d,
                   .block_size = block_size, .window = window, .scale = scale, .softcap = softcap, .slopes = slopes,
                   .sinks = sinks, .scales = scales, .page = page, .lengths = seq_lens, .type = type, .tiles = tiles};
    Batch batch = {rows, query_start, seq_lens, table, table_stride, tile_of(shared), slots};
    int status = DONE;
    for (int64_t first = 0, last; first < n && status == DONE; first = last) { /* as many as there are slots for */
        int64_t needed = 0, most = 0;
        for (last = first; last < n; last++) {
            int64_t some = slots_needed(&batch, last, window);
            most = some > most ? some : most, needed += some;
            if ((batch.shared ? most * (last - first + 1) : needed) > num_slots) break;
        }
        status = attend_rows(&common, &batch, first, last);
    }
    return status;
}
