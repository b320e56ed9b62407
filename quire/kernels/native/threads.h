#pragma once
#include <omp.h>

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
