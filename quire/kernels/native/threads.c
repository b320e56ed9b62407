/* Compute threads that stay on their cores. The pool belongs to libgomp, which torch loads, so libgomp's own variables
 * would have to be set before Python starts, and would bind every thread of the process. */

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
