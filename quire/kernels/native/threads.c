/* Compute threads that stay on their cores, and how they share work. The pool belongs to libgomp, which torch loads, so
 * libgomp's own variables would have to be set before Python starts, and would bind every thread of the process. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "threads.h"

static __thread int pinned; /* how many threads, in the thread that the pool belongs to */
static int cpu_of[CPU_SETSIZE];

int quire_pinned(void) { return pinned; }

void quire_pin_this_thread(int thread) {
    /* A program's main thread starts others, which would inherit its one core. */
    if (thread == 0 && syscall(SYS_gettid) == getpid()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu_of[thread], &set);
    sched_setaffinity(0, sizeof set, &set);
}

/* Thread i of the calling thread's pool goes to cpus[i]. Returns whether it was done. */
int quire_pin_threads(const int32_t *cpus, int64_t count) {
    if (count < 1 || count > CPU_SETSIZE || omp_get_max_threads() != count) return 0;
    for (int64_t i = 0; i < count; i++) {
        if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) return 0;
        cpu_of[i] = cpus[i];
    }
    int all = pinned = (int)count;
#pragma omp parallel
    quire_stay(all);
    return 1;
}

enum {
    MOST_WORKERS = 256,
    SPINS = 4096,              /* before a thread that waits lets others have its core */
    AHEAD_BYTES = 256 << 10,   /* that a thread fetches while it waits: a part of its second-level cache */
    AHEAD_AT_ONCE = 4 * 64,    /* between two looks at what it waits for */
    LEADER_AHEAD_BYTES = 4096, /* that the leader fetches before it goes on: as much as memory has in flight */
};

typedef struct {
    _Alignas(64) int64_t value;
} Line; /* of a cache, so that threads do not take it from each other */

typedef struct Crew {
    Line taken[MOST_WORKERS]; /* pieces of each thread's share */
    Line given, done;         /* works so far; threads that have done theirs, of all works */
    Line status;              /* theirs, or-ed */
    Work work;                /* NULL: no more */
    const void *argument;
    Reads reads; /* what comes after this work; or NULL */
    const void *read;
} Crew;

static __thread Worker *leader; /* the calling thread, where others wait for it */

static inline void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void fetch(const char *begin, const char *end) {
    for (; begin < end; begin += 64) __builtin_prefetch(begin, 0, 2);
}

static Ahead ahead_of(const Crew *crew, const Worker *worker, int64_t most) {
    Ahead ahead = crew->reads ? crew->reads(crew->read, worker) : (Ahead){0};
    if (ahead.bytes > most) ahead.bytes = most;
    return ahead;
}

/* Until `line` is at least `least`. */
static void await(const Line *line, int64_t least, Ahead ahead) {
    for (int64_t spins = 0; __atomic_load_n(&line->value, __ATOMIC_ACQUIRE) < least;) {
        if (ahead.bytes > 0) {
            fetch(ahead.begin, ahead.begin + AHEAD_AT_ONCE);
            ahead.begin += AHEAD_AT_ONCE, ahead.bytes -= AHEAD_AT_ONCE;
        } else if (spins++ < SPINS) rest();
        else sched_yield();
    }
}

int64_t quire_take(Worker *worker, int64_t pieces) {
    for (; worker->visited < worker->threads; worker->visited++) {
        int64_t owner = (worker->thread + worker->visited) % worker->threads;
        int64_t at = pieces * owner / worker->threads, end = pieces * (owner + 1) / worker->threads;
        at += __atomic_fetch_add(&worker->crew->taken[owner].value, 1, __ATOMIC_RELAXED);
        if (at < end) return at;
    }
    return -1;
}

static int take_part(const Crew *crew, Worker *worker) {
    worker->visited = 0;
    return crew->work(crew->argument, worker);
}

/* What the leader gives, until that is nothing. */
static void follow(Crew *crew, Worker *worker) {
    Ahead ahead = {0};
    for (int64_t works = 1;; works++) {
        await(&crew->given, works, ahead);
        if (!crew->work) return;
        ahead = ahead_of(crew, worker, AHEAD_BYTES);
        __atomic_or_fetch(&crew->status.value, take_part(crew, worker), __ATOMIC_RELAXED);
        __atomic_add_fetch(&crew->done.value, 1, __ATOMIC_RELEASE);
    }
}

static void give(Crew *crew, Work work, const void *argument) {
    for (int64_t i = 0; i < leader->threads; i++) crew->taken[i].value = 0;
    crew->work = work, crew->argument = argument;
    __atomic_add_fetch(&crew->given.value, 1, __ATOMIC_RELEASE);
}

static int share_with_followers(Work work, const void *argument) {
    Crew *crew = leader->crew;
    give(crew, work, argument);
    int status = take_part(crew, leader);
    await(&crew->done, crew->given.value * (leader->threads - 1), (Ahead){0});
    Ahead ahead = ahead_of(crew, leader, LEADER_AHEAD_BYTES);
    fetch(ahead.begin, ahead.begin + ahead.bytes);
    return status | (int)crew->status.value;
}

int quire_share(Work work, const void *argument, int worth) {
    if (leader && worth) return share_with_followers(work, argument);
    Crew crew;
    if (!worth || omp_in_parallel()) {
        crew.taken[0].value = 0;
        return work(argument, &(Worker){&crew, 0, 1, 0});
    }
    int most = omp_get_max_threads(), all = quire_pinned(), status = 0;
    if (most > MOST_WORKERS) most = MOST_WORKERS;
    for (int i = 0; i < most; i++) crew.taken[i].value = 0;
    crew.work = work, crew.argument = argument;
#pragma omp parallel num_threads(most) reduction(| : status)
    {
        quire_stay(all);
        Worker worker = {&crew, omp_get_thread_num(), omp_get_num_threads(), 0};
        status |= take_part(&crew, &worker);
    }
    return status;
}

int quire_lead(Work lead, const void *argument) {
    Crew crew = {.work = NULL};
    int most = omp_get_max_threads(), all = quire_pinned(), status = 0;
    if (most > MOST_WORKERS) most = MOST_WORKERS;
#pragma omp parallel num_threads(most) reduction(| : status)
    {
        quire_stay(all);
        Worker worker = {&crew, omp_get_thread_num(), omp_get_num_threads(), 0};
        if (worker.thread) follow(&crew, &worker);
        else {
            leader = &worker;
            status |= lead(argument, &worker);
            give(&crew, NULL, NULL);
            leader = NULL;
        }
    }
    return status;
}

void quire_read_ahead(Worker *worker, Reads reads, const void *argument) {
    worker->crew->reads = reads, worker->crew->read = argument;
}
