/* Replays a step of texts that are computed whole, some texts on each thread through all calls: threads wait for one
 * another once a step instead of at every call, and what a call hands to the next stays in caches. */

#include <stdlib.h>
#include <string.h>
#include "elements.h"
#include "replay.h"
#include "status.h"
#include "threads.h"

/* Sizes of a group of texts. Weights come from the last cache for each group, which costs least for large ones, but more
 * than MOST_BYTES of hidden states do not stay near; the last groups are small, so that threads end together. With fewer
 * tokens than LEAST for each thread, sharing each product is faster. */
enum { MOST_BYTES = 384 << 10, LEAST = 96, MAX_TEXTS = 512 };

/* Memory of intermediate results, of which each thread takes an equal part. */
typedef struct {
    char *base;
    int64_t bytes;
} Piece;

typedef struct {
    const Piece *pieces;
    int64_t num_pieces, thread, threads, first; /* token */
} Place;

/* Where a group's rows are of what is `bytes` wide by token: in the thread's part of a piece, else behind the rows of the
 * groups before. */
static void *placed(const Place *at, void *pointer, int64_t bytes) {
    char *p = pointer;
    for (int64_t i = 0; p && i < at->num_pieces; i++) {
        const Piece *piece = at->pieces + i;
        if (p >= piece->base && p < piece->base + piece->bytes)
            return p + piece->bytes / at->threads / 64 * 64 * at->thread;
    }
    return p ? p + at->first * bytes : p;
}

/* A call for the tokens of a group. `starts` are of its texts. */
static Call for_group(const Call *call, int64_t size, const Place *at, const int32_t *starts) {
    Call c = *call;
    Argument *a = c.a;
#define BY_TOKEN(i, bytes) a[i].p = placed(at, a[i].p, bytes)
    switch (c.kind) {
    case ENCODER_LINEAR: {
        int64_t each = a[7].i / size * width_of((int)a[12].i);
        BY_TOKEN(0, each * a[9].i);
        BY_TOKEN(3, each * a[8].i);
        BY_TOKEN(4, each * a[8].i);
        break;
    }
    case ENCODER_ATTENTION: {
        int64_t element = width_of((int)a[18].i), heads = a[10].i, d = a[12].i;
        BY_TOKEN(0, (heads + 2 * a[11].i) * d * element);
        BY_TOKEN(1, heads * d * element);
        BY_TOKEN(5, 8);
        a[2].p = (void *)starts;
        break;
    }
    case LAYER_NORM: {
        int64_t each = a[5].i / size * a[6].i * width_of((int)a[8].i);
        BY_TOKEN(0, each);
        BY_TOKEN(1, each);
        BY_TOKEN(4, each);
        break;
    }
    case ADD: {
        int64_t each = a[4].i / size * a[5].i * width_of((int)a[6].i);
        BY_TOKEN(0, each);
        if (a[2].p) BY_TOKEN(2, 8);
        else BY_TOKEN(1, each);
        BY_TOKEN(3, each);
        break;
    }
    case ACTIVATE: {
        int64_t each = a[2].i / size * a[3].i * width_of((int)a[6].i);
        BY_TOKEN(0, a[4].i ? 2 * each : each);
        BY_TOKEN(1, each);
        break;
    }
    }
#undef BY_TOKEN
    return c;
}

/* Where groups of texts of about `most` tokens end, `room` at the most. The number of groups, or 0 if threads would not end
 * at about the same time. */
static int64_t divide(const int32_t *starts, int64_t rows, int64_t threads, int64_t most, int64_t room, int32_t *ends) {
    int64_t tokens = starts[rows], count = 0, busiest = 0;
    int64_t *load = calloc(threads, sizeof *load);
    if (!load || tokens < LEAST * threads) {
        free(load);
        return 0;
    }
    for (int64_t text = 0; text < rows;) {
        int64_t first = text, limit = (tokens - starts[first]) / (2 * threads);
        limit = limit < LEAST ? LEAST : limit > most ? most : limit;
        do text++;
        while (text < rows && text - first < MAX_TEXTS && starts[text + 1] - starts[first] <= limit);
        ends[count++] = (int32_t)text;
        int64_t least = 0, length = starts[text] - starts[first];
        if (length > room) busiest = tokens; /* more than a thread's part of the pieces holds */
        for (int64_t i = 1; i < threads; i++)
            if (load[i] < load[least]) least = i;
        load[least] += length;
        if (load[least] > busiest) busiest = load[least];
    }
    free(load);
    return busiest * threads <= tokens + tokens / 16 ? count : 0;
}

/* As quire_replay, of calls whose results depend on nothing but the text: the kinds of for_group(). Texts begin and end at
 * starts [rows + 1]. The rows of the last result, `bytes` each, lie in `last` after the calls and are copied to `out`. */
int quire_replay_texts(const Call *calls, int64_t count, int64_t size, int64_t tokens, int64_t rows, const int32_t *starts,
                       const Piece *pieces, int64_t num_pieces, void *last, char *out, int64_t bytes) {
    if (tokens < 0 || tokens > size || rows < 0 || rows > size) return BAD_SIZE;
    int threads = omp_get_max_threads();
    int32_t *ends = malloc((rows + 1) * sizeof *ends);
    if (!ends) return NO_MEMORY;
    int64_t groups = 0, most = MOST_BYTES / bytes < LEAST ? LEAST : MOST_BYTES / bytes;
    int64_t room = size / threads - 1; /* one less, since a thread's part begins at a multiple of 64 bytes */
    if (threads > 1 && rows && starts[rows] == tokens) groups = divide(starts, rows, threads, most, room, ends);
    int status = DONE, pinned = quire_pinned();
    if (!groups) {
        status = quire_replay(calls, NULL, NULL, count, size, tokens, rows, 0);
        memcpy(out, last, tokens * bytes);
    } else {
#pragma omp parallel num_threads(threads) reduction(| : status)
        {
            quire_stay(pinned);
            Place at = {pieces, num_pieces, omp_get_thread_num(), threads, 0};
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t group = 0; group < groups; group++) {
                int64_t text = group ? ends[group - 1] : 0, texts = ends[group] - text;
                int32_t here[MAX_TEXTS + 1];
                at.first = starts[text];
                for (int64_t i = 0; i <= texts; i++) here[i] = starts[text + i] - starts[text];
                for (int64_t i = 0; i < count && status == DONE; i++) {
                    Call call = for_group(calls + i, size, &at, here);
                    status |= quire_replay(&call, NULL, NULL, 1, size, here[texts], texts, 0);
                }
                memcpy(out + at.first * bytes, placed(&at, last, bytes), here[texts] * bytes);
            }
        }
    }
    free(ends);
    return status;
}
