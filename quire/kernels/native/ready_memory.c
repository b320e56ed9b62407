/* Memory that is used for the first time costs its user: the kernel clears each page, and a virtual machine's host may
 * have to find it first, 8 us for 4 KiB. Here a thread that runs only while a core is idle does so beforehand. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include "status.h"

enum { SMALLEST_PAGE = 4096, AT_ONCE = 2 << 20 };

typedef struct {
    char *const *arrays;
    int64_t count, bytes;
    const int32_t *stop;
    const cpu_set_t *cpus;
} Memory;

static void *make_ready(void *argument) {
    const Memory *m = argument;
    char none = 0;
    __asm__("" : "+r"(none)); /* or compilers see that nothing is written */
#ifdef SCHED_IDLE
    struct sched_param idle = {0};
    sched_setaffinity(0, sizeof *m->cpus, m->cpus); /* compute threads, and who is started by them, stay on one core */
    if (sched_setscheduler(0, SCHED_IDLE, &idle) != 0) return NULL; /* it would be in others' way */
    for (int64_t from = 0; from < m->bytes; from += AT_ONCE)
        for (int64_t i = 0; i < m->count; i++)
            for (int64_t at = from; at < m->bytes && at < from + AT_ONCE; at += SMALLEST_PAGE) {
                if (__atomic_load_n(m->stop, __ATOMIC_RELAXED)) return NULL;
                __atomic_fetch_or(m->arrays[i] + at, none, __ATOMIC_RELAXED);
            }
#endif
    return NULL;
}

/* The first `bytes` of each array, from the front in all of them. What they hold stays as it is, whoever writes to them
 * meanwhile. Returns soon after *stop is not 0. The work is done by a thread of its own, since without privileges none
 * comes back from the lowest priority, at which it must hold no lock that others wait for. */
int quire_ready_memory(char *const *arrays, int64_t count, int64_t bytes, const int32_t *stop, const int32_t *cpus,
                       int64_t num_cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int64_t i = 0; i < num_cpus; i++)
        if (cpus[i] >= 0 && cpus[i] < CPU_SETSIZE) CPU_SET(cpus[i], &set);
    Memory memory = {arrays, count, bytes, stop, &set};
    pthread_t thread;
    if (pthread_create(&thread, NULL, make_ready, &memory) != 0) return DONE;
    pthread_join(thread, NULL);
    return DONE;
}
