#pragma once
#include <omp.h>
#include <stdint.h>

/* How many threads of the caller's pool are pinned: 0 or all. */
int quire_pinned(void);
void quire_pin_this_thread(int thread);

/* In the parallel regions that every step has, with what quire_pinned said outside: libgomp may have ended threads and
 * started others, and those are where the thread that started them is. */
static inline void quire_stay(int pinned) {
    static __thread int done;
    if (done == pinned || !pinned || omp_get_thread_num() >= pinned) return;
    done = pinned;
    quire_pin_this_thread(omp_get_thread_num());
}

/* One of the threads that share a piece of work. */
typedef struct {
    struct Crew *crew;
    int64_t thread, threads;
    int64_t visited; /* threads whose shares are used up: its own comes first */
} Worker;

/* What each of the threads does of it; returns a status. */
typedef int (*Work)(const void *argument, Worker *worker);

/* `work` by all threads, or by this one if it is not worth more or is one of several already; the statuses, or-ed. Inside
 * quire_lead's `lead` the other threads are waiting for it already, else they are gathered in a parallel region. */
int quire_share(Work work, const void *argument, int worth);

/* The next of `pieces` pieces of a work, which every worker asks for in turn; -1: there is none left. A thread's own share is
 * in one piece of memory, as a rule, and read in order. Then it helps others, one of which may have lost its core for a while. */
int64_t quire_take(Worker *worker, int64_t pieces);

/* `lead` by the calling thread, while all others wait for what it shares: a meeting of threads that wait actively takes a
 * fraction of what a parallel region does. */
int quire_lead(Work lead, const void *argument);

/* What a worker will read first of its share of a weight. */
typedef struct {
    const char *begin;
    int64_t bytes;
} Ahead;
typedef Ahead (*Reads)(const void *argument, const Worker *worker);

/* The weight of the work after the one that is shared next: threads that have to wait meanwhile fetch it. NULL: none. */
void quire_read_ahead(Worker *worker, Reads reads, const void *argument);
