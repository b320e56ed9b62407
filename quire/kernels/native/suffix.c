/* Suffix decoding: drafts are the most frequent continuation of a row's last tokens, in its own text and in texts that
 * were generated before.
 *
 * A suffix tree would count how often each continuation of each suffix occurs. Here occurrences are found when they are
 * needed, which gives the same counts: in the row's text by comparing all of it, which takes a microsecond for thousands
 * of tokens; in the texts before by chains of positions with the same last three tokens, newest first. */

#include "bf16.h"
#include "status.h"

enum {
    STRIP = 64,     /* tokens compared at once, without a branch */
    GRAM = 3,       /* tokens that a chain's positions have in common */
    LEAST = 2,      /* tokens that a match in the row's own text has at least */
    KEPT = 256,     /* occurrences that are counted: the longest, then the newest */
    VISITED = 256,  /* positions of a chain that are compared */
    TABLE = 512,
};

/* Positions count all tokens ever written and index rings of `capacity`, a power of two. A text is in one piece. */
typedef struct {
    int64_t start, end, salt; /* end == start: it is no longer there */
} text;

typedef struct {
    int32_t *tokens, *owner; /* [capacity]: owner is the slot of its text */
    int64_t *before;         /* [capacity]: 1 + the position before it in its chain; 0: none */
    int64_t *newest;         /* [chains], a power of two: 1 + the first position of each chain */
    text *texts;             /* [slots]: text i is at i % slots */
    int64_t capacity, chains, slots, written, first, next; /* those from first to next are there */
} shared;

typedef struct {
    const int32_t *next, *end; /* the tokens behind the match */
    int64_t length;            /* of the match */
} occurrence;

static int64_t chain_of(const shared *s, const int32_t *last, int64_t salt) {
    uint64_t hash = (uint64_t)salt;
    for (int j = 0; j < GRAM; j++) hash = (hash ^ (uint32_t)last[-j]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    return (int64_t)(hash & (uint64_t)(s->chains - 1));
}

int quire_texts_add(shared *s, const int32_t *ids, int64_t count, int64_t salt) {
    if (count < 0 || s->capacity < 2 || s->capacity & (s->capacity - 1) || s->chains & (s->chains - 1) || s->slots < 1)
        return BAD_SIZE;
    int64_t mask = s->capacity - 1, start = s->written;
    if (count > s->capacity / 2) {
        ids += count - s->capacity / 2;
        count = s->capacity / 2;
    }
    if ((start & mask) + count > s->capacity) start = (start | mask) + 1;
    while (s->first < s->next &&
           (s->next - s->first == s->slots || s->texts[s->first % s->slots].start + s->capacity < start + count))
        s->first++;
    int64_t slot = s->next % s->slots, at = start & mask;
    s->texts[slot] = (text){start, start + count, salt};
    for (int64_t i = 0; i < count; i++) {
        s->tokens[at + i] = ids[i];
        s->owner[at + i] = (int32_t)slot;
        s->before[at + i] = 0;
        if (i < GRAM - 1 || i == count - 1) continue; /* nothing follows the last */
        int64_t chain = chain_of(s, ids + i, salt);
        s->before[at + i] = s->newest[chain];
        s->newest[chain] = start + i + 1;
    }
    s->written = start + count;
    s->next++;
    return DONE;
}

int quire_texts_remove(shared *s, int64_t number) {
    if (number >= s->first && number < s->next) s->texts[number % s->slots].end = s->texts[number % s->slots].start;
    return DONE;
}

static inline int64_t common(const int32_t *a, const int32_t *b, int64_t most) {
    int64_t n = 0;
    while (n < most && a[-n] == b[-n]) n++;
    return n;
}

/* One more occurrence; if there are too many those of the shortest matches are forgotten. How many there are. With
 * *least at the depth nothing is longer than what was kept. */
static int64_t keep(occurrence *found, int64_t count, occurrence new, int64_t *least, int64_t depth) {
    while (count == KEPT && *least < depth) {
        int64_t kept = 0;
        ++*least;
        for (int64_t i = 0; i < count; i++)
            if (found[i].length >= *least) found[kept++] = found[i];
        count = kept;
    }
    if (new.length >= *least && count < KEPT) found[count++] = new;
    return count;
}

static int64_t find_own(const int32_t *ids, int64_t known, int64_t depth, occurrence *found) {
    const int32_t *end = ids + known, *last = end - 1;
    int64_t count = 0, least = LEAST;
    for (int64_t to = known - 1; to > 1; to -= STRIP) { /* the newest first */
        int64_t from = to - STRIP < 1 ? 1 : to - STRIP;
        int32_t any = 0;
        for (int64_t p = from; p < to; p++) any |= (ids[p] == last[0]) & (ids[p - 1] == last[-1]);
        if (!any) continue;
        for (int64_t p = to - 1; p >= from; p--) {
            if (ids[p] != last[0] || ids[p - 1] != last[-1]) continue;
            int64_t length = common(ids + p, last, p + 1 < depth ? p + 1 : depth);
            count = keep(found, count, (occurrence){ids + p + 1, end, length}, &least, depth);
            if (count == KEPT && least == depth) return count;
        }
    }
    return count;
}

static int64_t find_shared(const shared *s, const int32_t *ids, int64_t known, int64_t depth, int64_t salt,
                           occurrence *found) {
    if (known < GRAM || depth < GRAM || s->first == s->next) return 0;
    const int32_t *last = ids + known - 1;
    int64_t mask = s->capacity - 1, oldest = s->texts[s->first % s->slots].start, count = 0, least = GRAM;
    int64_t at = s->newest[chain_of(s, last, salt)] - 1;
    for (int visited = 0; at >= oldest && visited < VISITED; visited++, at = s->before[at & mask] - 1) {
        const text *t = s->texts + s->owner[at & mask];
        if (at < t->start || at >= t->end || t->salt != salt) continue;
        const int32_t *here = s->tokens + (at & mask);
        int64_t most = at - t->start + 1;
        if (most > known) most = known;
        int64_t length = common(here, last, most < depth ? most : depth);
        count = keep(found, count, (occurrence){here + 1, here + (t->end - at), length}, &least, depth);
        if (count == KEPT && least == depth) break;
    }
    return count;
}

/* The most frequent of the tokens `offset` behind n matches, and of several the newest. How often it occurs. */
static int64_t most_frequent(const occurrence *const *matches, int64_t n, int64_t offset, int32_t *token) {
    if (n == 1) { /* as a copied text is */
        if (matches[0]->next + offset >= matches[0]->end) return 0;
        *token = matches[0]->next[offset];
        return 1;
    }
    int32_t tokens[TABLE];
    int16_t counts[TABLE] = {0};
    int64_t best = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < n; i++) {
            if (matches[i]->next + offset >= matches[i]->end) continue;
            int32_t t = matches[i]->next[offset];
            uint32_t slot = ((uint32_t)t * 2654435761u) >> 23;
            while (counts[slot] && tokens[slot] != t) slot = (slot + 1) % TABLE;
            if (!pass) {
                tokens[slot] = t;
                if (++counts[slot] > best) best = counts[slot];
            } else if (counts[slot] == best) {
                *token = t;
                return best;
            }
        }
    return 0;
}

/* The best drafts of all lengths of matches: those of which most are expected to be right, by how often they followed.
 * That number. */
static float choose(const occurrence *found, int64_t count, int64_t room, float factor, float least, int32_t *drafts,
                    int64_t *num_drafts) {
    const occurrence *matches[KEPT];
    int32_t trial[256];
    float best = 0;
    int64_t length = INT64_MAX;
    for (;;) {
        int64_t next = 0, n = 0; /* the next shorter length that there is */
        for (int64_t i = 0; i < count; i++)
            if (found[i].length < length && found[i].length > next) next = found[i].length;
        if (!next) return best;
        length = next;
        float allowed = (float)length * factor + 1e-4f;
        int64_t limit = allowed < (float)room ? (int64_t)allowed : room;
        if (best >= (float)limit) return best;
        for (int64_t i = 0; i < count; i++)
            if (found[i].length >= length) matches[n++] = found + i;
        float probability = 1, score = 0;
        int64_t made = 0;
        for (; made < limit && n; made++) {
            int64_t times = most_frequent(matches, n, made, trial + made), kept = 0;
            probability *= (float)times / (float)n;
            if (!times || probability < least) break;
            score += probability;
            for (int64_t i = 0; i < n; i++)
                if (matches[i]->next + made < matches[i]->end && matches[i]->next[made] == trial[made])
                    matches[kept++] = matches[i];
            n = kept;
        }
        if (score > best) {
            best = score;
            *num_drafts = made;
            for (int64_t i = 0; i < made; i++) drafts[i] = trial[i];
        }
    }
}

/* token_ids [rows, stride], counts and salts by row, rows [n] (-1: padding), num_found by row. `s` may be NULL. Rows that
 * have tokens to compute before their last get no drafts. Zeros follow those found: a request must not verify what
 * another left in its row. */
int quire_suffix_drafts(const shared *s, int32_t *token_ids, const int64_t *num_tokens, const int64_t *num_computed,
                        const int64_t *token_limit, int32_t *num_found, const int64_t *salts, const int32_t *rows,
                        int64_t n, int64_t stride, int64_t drafts, int64_t depth, float factor, float least) {
    if (n < 0 || drafts < 1 || drafts > 256 || depth < 1) return BAD_SIZE;
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++)
        if (rows[i] >= 0) total += num_tokens[rows[i]];
#pragma omp parallel for schedule(dynamic) if (n > 1 && total > 4 * WORTH_THREADS)
    for (int64_t i = 0; i < n; i++) {
        int64_t row = rows[i];
        if (row < 0) continue;
        int32_t *ids = token_ids + row * stride, guess[256];
        int64_t known = num_tokens[row], room = token_limit[row] - known - 1, number = 0, other = 0;
        if (room > drafts) room = drafts;
        if (known > 1 && room > 0 && num_computed[row] == known - 1) {
            occurrence found[KEPT];
            int64_t count = find_own(ids, known, depth, found);
            float score = choose(found, count, room, factor, least, ids + known, &number);
            count = s ? find_shared(s, ids, known, depth, salts[row], found) : 0;
            if (choose(found, count, room, factor, least, guess, &other) > score) {
                number = other;
                for (int64_t j = 0; j < number; j++) ids[known + j] = guess[j];
            }
        }
        for (int64_t j = number; j < drafts; j++) ids[known + j] = 0;
        num_found[row] = (int32_t)number;
    }
    return DONE;
}
