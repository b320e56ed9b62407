/* Collectives of ranks of one machine, over memory that all of them map. Each rank writes its part into a buffer, says
 * that it has arrived, and reads the others' parts once they have. Buffers alternate: a rank that writes to one for the
 * second time knows that all have arrived at the turn between, so have read what it overwrites: one meeting per piece
 * is enough. Sums are in float32, in the order of ranks: every rank gets the same bits. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "elements.h"

enum { MAX_RANKS = 64, PAGE = 4096, BLOCK = 2048 };
enum { WORTH_SHARING = 16384 }; /* elements; 4 ranks on 2 cores sum 262144 in 320 us, instead of 550 if each sums all */
enum { YIELDS = 100, NAP = 20 * 1000 * 1000 }; /* of nanoseconds, after which a rank looks whether the others live */
enum { GONE = 1, LATE, FAILED };               /* why the ranks can meet no more */
enum { ALL_REDUCE, ALL_GATHER, BROADCAST, COLLECTIVES };

typedef struct {
    _Alignas(128) _Atomic uint32_t arrived; /* at which turn; others sleep on it */
    _Atomic uint32_t sleepers;
    int32_t number; /* in the world */
    int32_t pid;
} Seat;

typedef struct {
    _Alignas(128) _Atomic uint64_t broken; /* the first cause, << 32, and the rank it is about */
    Seat seats[MAX_RANKS];
} Shared;

/* This process's end. Recorded calls point to it, so it is never freed; `shared` is NULL once it is closed. */
typedef struct {
    Shared *shared;
    char *buffers; /* [2][size][piece] */
    int64_t rank, size, piece, spins, calls[COLLECTIVES], bytes[COLLECTIVES];
    double limit;
    uint32_t turn;
    int fd;
} Group;

static __thread char message[160];

const char *quire_group_error(void) { return message; }

static int64_t header_bytes(void) { return (sizeof(Shared) + PAGE - 1) / PAGE * PAGE; }

int64_t quire_group_bytes(int64_t size, int64_t piece) {
    return size < 1 || size > MAX_RANKS || piece < 1 || piece % PAGE ? 0 : header_bytes() + 2 * size * piece;
}

/* The lock on a rank's byte of the file lasts until its process ends, however that happens, and until then only. */
static struct flock lock_of(int64_t rank) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

/* `fd`: a file of quire_group_bytes, zeros at first, which nothing else in this process opens or closes. A wait spins
 * `spins` times, and may take `limit` seconds. NULL if the file cannot be used. */
Group *quire_group_open(int fd, int64_t rank, int64_t size, int64_t piece, int64_t number, int64_t spins, float limit) {
    int64_t bytes = quire_group_bytes(size, piece);
    struct flock lock = lock_of(rank);
    Group *g = bytes && rank >= 0 && rank < size ? calloc(1, sizeof *g) : NULL;
    if (!g) return NULL;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED || fcntl(fd, F_SETLK, &lock)) {
        if (at != MAP_FAILED) munmap(at, bytes);
        free(g);
        return NULL;
    }
    *g = (Group){.shared = at, .buffers = (char *)at + header_bytes(), .rank = rank, .size = size, .piece = piece,
                 .spins = spins, .limit = limit, .fd = fd};
    g->shared->seats[rank].number = (int32_t)number;
    g->shared->seats[rank].pid = getpid();
    return g;
}

/* Of all ranks, so that sleeping ones look around. */
static void wake_all(Group *g) {
    for (int64_t r = 0; r < g->size; r++)
        syscall(SYS_futex, &g->shared->seats[r].arrived, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static int broken(Group *g) {
    if (!g->shared) {
        snprintf(message, sizeof message, "the group of ranks is closed");
        return LOST_RANK;
    }
    uint64_t cause = atomic_load(&g->shared->broken);
    if (!cause) return DONE;
    const Seat *seat = &g->shared->seats[cause & 0xffffffff];
    int length = snprintf(message, sizeof message, "rank %d (process %d) ", seat->number, seat->pid);
    char *rest = message + length;
    size_t left = sizeof message - length;
    switch (cause >> 32) {
    case GONE: snprintf(rest, left, "has ended"); break;
    case LATE: snprintf(rest, left, "did not take part in a collective within %g seconds", g->limit); break;
    default: snprintf(rest, left, "has failed");
    }
    return LOST_RANK;
}

static int break_off(Group *g, uint64_t why, int64_t rank) {
    uint64_t none = 0;
    atomic_compare_exchange_strong(&g->shared->broken, &none, why << 32 | (uint64_t)rank);
    wake_all(g);
    return broken(g);
}

/* This rank will take part in nothing more: ends the waits of all. */
int quire_group_fail(Group *g) {
    if (g->shared) break_off(g, FAILED, g->rank);
    return DONE;
}

/* Not while another thread is in a collective. The caller closes the file. */
int quire_group_close(Group *g) {
    if (g->shared) munmap(g->shared, quire_group_bytes(g->size, g->piece));
    g->shared = NULL;
    return DONE;
}

/* [3][2]: calls and bytes of this rank's tensors, by collective. */
int quire_group_counts(const Group *g, int64_t *out) {
    for (int i = 0; i < COLLECTIVES; i++) out[2 * i] = g->calls[i], out[2 * i + 1] = g->bytes[i];
    return DONE;
}

static int start(Group *g, int collective, int64_t bytes) {
    g->calls[collective]++;
    g->bytes[collective] += bytes;
    return broken(g);
}

static int has_arrived(const Seat *seat, uint32_t turn) {
    return (int32_t)(atomic_load_explicit(&seat->arrived, memory_order_acquire) - turn) >= 0;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Whether it makes sense to go on waiting: nobody that this turn needs has ended, and there is time left. */
static int look_around(Group *g, int64_t awaited, uint32_t turn, int64_t since) {
    int status = broken(g);
    for (int64_t r = 0; r < g->size && !status; r++) {
        struct flock lock = lock_of(r);
        if (r == g->rank || has_arrived(&g->shared->seats[r], turn) || fcntl(g->fd, F_GETLK, &lock)) continue;
        if (lock.l_type == F_UNLCK && !has_arrived(&g->shared->seats[r], turn)) status = break_off(g, GONE, r);
    }
    if (!status && now() - since > g->limit * 1e9) status = break_off(g, LATE, awaited);
    return status;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int wait_for(Group *g, int64_t rank, uint32_t turn) {
    Seat *seat = &g->shared->seats[rank];
    for (int64_t i = 0; i < g->spins; i++) {
        if (has_arrived(seat, turn)) return DONE;
        relax();
    }
    for (int i = 0; i < YIELDS; i++) {
        if (has_arrived(seat, turn)) return DONE;
        sched_yield();
    }
    const struct timespec nap = {.tv_nsec = NAP};
    int64_t since = now();
    int status = DONE;
    atomic_fetch_add(&seat->sleepers, 1); /* before `arrived` is read: who arrives after that sees it, and wakes */
    for (;;) {
        uint32_t seen = atomic_load(&seat->arrived);
        if ((int32_t)(seen - turn) >= 0 || (status = look_around(g, rank, turn, since))) break;
        syscall(SYS_futex, &seat->arrived, FUTEX_WAIT, seen, &nap, NULL, 0);
    }
    atomic_fetch_sub(&seat->sleepers, 1);
    return status;
}

/* What this rank wrote for the turn is there; afterwards so is what all others wrote. */
static int meet(Group *g, uint32_t turn) {
    Seat *mine = &g->shared->seats[g->rank];
    atomic_store(&mine->arrived, turn);
    if (atomic_load(&mine->sleepers)) syscall(SYS_futex, &mine->arrived, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    int status = DONE;
    for (int64_t r = 0; r < g->size && status == DONE; r++)
        if (r != g->rank && !has_arrived(&g->shared->seats[r], turn)) status = wait_for(g, r, turn);
    return status;
}

static char *part(const Group *g, uint32_t turn, int64_t rank) {
    return g->buffers + ((turn & 1) * g->size + rank) * g->piece;
}

static inline float widen_half(uint16_t x) {
    union { uint32_t u; float f; } v = {.u = (uint32_t)(x & 0x7fff) << 13};
    v.f *= 0x1p112f; /* exponents are biased by 127, not 15; subnormals come out right too */
    if ((x & 0x7c00) == 0x7c00) v.u |= 0x7f800000;
    v.u |= (uint32_t)(x & 0x8000) << 16;
    return v.f;
}

static inline uint16_t narrow_half(float x) {
    union { float f; uint32_t u; } v = {.f = x}, small;
    uint16_t sign = v.u >> 16 & 0x8000;
    v.u &= 0x7fffffff;
    small.f = v.f + 0.5f; /* shifts a subnormal's bits to their place, rounded */
    if (v.u > 0x7f800000) return sign | 0x7e00;
    if (v.u >= 0x47800000) return sign | 0x7c00;
    if (v.u < 0x38800000) return sign | (uint16_t)(small.u - 0x3f000000);
    return sign | (uint16_t)((v.u - 0x38000000 + 0xfff + (v.u >> 13 & 1)) >> 13);
}

#define SAME(x) (x)
#define SUM(NAME, T, TO, FROM)                                                                                         \
    static void NAME(const Group *g, uint32_t turn, T *out, int64_t begin, int64_t n) {                                \
        float sums[BLOCK];                                                                                             \
        const T *first = (const T *)part(g, turn, 0) + begin;                                                          \
        for (int64_t i = 0; i < n; i++) sums[i] = TO(first[i]);                                                        \
        for (int64_t r = 1; r < g->size; r++) {                                                                        \
            const T *other = (const T *)part(g, turn, r) + begin;                                                      \
            for (int64_t i = 0; i < n; i++) sums[i] += TO(other[i]);                                                   \
        }                                                                                                              \
        for (int64_t i = 0; i < n; i++) out[begin + i] = FROM(sums[i]);                                                \
    }
SUM(sum_f32, float, SAME, SAME)
SUM(sum_bf16, bf16, widen, narrow)
SUM(sum_f16, uint16_t, widen_half, narrow_half)

/* Elements [begin, end) of the sum of what all wrote for this turn. */
static void sum_parts(const Group *g, uint32_t turn, char *out, int64_t begin, int64_t end, int type) {
#pragma omp parallel for if (end - begin > WORTH_THREADS)
    for (int64_t i = begin; i < end; i += BLOCK) {
        int64_t count = end - i < BLOCK ? end - i : BLOCK;
        if (type == 0) sum_f32(g, turn, (float *)out, i, count);
        else if (type == 1) sum_bf16(g, turn, (bf16 *)out, i, count);
        else sum_f16(g, turn, (uint16_t *)out, i, count);
    }
}

/* Each rank sums a share of what all wrote, and all read it at the next turn: one more meeting, but less to sum. */
static int sum_shares(Group *g, uint32_t turn, char *out, int64_t n, int type) {
    int64_t item = width_of(type), share = (n + g->size - 1) / g->size;
    int64_t begin = share * g->rank, end = begin + share < n ? begin + share : n;
    uint32_t next = ++g->turn;
    if (begin < end) sum_parts(g, turn, part(g, next, g->rank), begin, end, type);
    int status = meet(g, next);
    for (int64_t r = 0; r < g->size && status == DONE; r++) {
        int64_t first = share * r, count = n - first < share ? n - first : share;
        if (count > 0) memcpy(out + first * item, part(g, next, r) + first * item, count * item);
    }
    return status;
}

/* The sum over ranks of x [rows, width], in place. Types: 0 float32, 1 bfloat16, 2 float16. */
int quire_all_reduce(Group *g, void *x, int64_t rows, int64_t width, int type) {
    if (rows < 0 || width < 1 || type < 0 || type > 2) return BAD_SIZE;
    int64_t item = width_of(type), total = rows * width, most = g->piece / item;
    int status = start(g, ALL_REDUCE, total * item);
    for (int64_t done = 0; done < total && status == DONE; done += most) {
        int64_t n = total - done < most ? total - done : most;
        char *mine = (char *)x + done * item;
        uint32_t turn = ++g->turn;
        memcpy(part(g, turn, g->rank), mine, n * item);
        if ((status = meet(g, turn))) break;
        if (g->size > 2 && n > WORTH_SHARING) status = sum_shares(g, turn, mine, n, type);
        else sum_parts(g, turn, mine, 0, n, type);
    }
    return status;
}

/* Row i of out is row i of rank 0's x, of rank 1's, and so on; x [rows] of `width` bytes each. */
int quire_all_gather(Group *g, const char *x, char *out, int64_t rows, int64_t width) {
    if (rows < 0 || width < 1) return BAD_SIZE;
    int64_t wide = width < g->piece ? width : g->piece, tall = g->piece / wide;
    int status = start(g, ALL_GATHER, rows * width);
    for (int64_t column = 0; column < width; column += wide) {
        int64_t w = width - column < wide ? width - column : wide;
        for (int64_t row = 0; row < rows && status == DONE; row += tall) {
            int64_t n = rows - row < tall ? rows - row : tall;
            uint32_t turn = ++g->turn;
            char *mine = part(g, turn, g->rank);
            for (int64_t i = 0; i < n; i++) memcpy(mine + i * w, x + (row + i) * width + column, w);
            if ((status = meet(g, turn))) break;
            for (int64_t r = 0; r < g->size; r++)
                for (int64_t i = 0; i < n; i++)
                    memcpy(out + ((row + i) * g->size + r) * width + column, part(g, turn, r) + i * w, w);
        }
    }
    return status;
}

int quire_broadcast(Group *g, char *x, int64_t bytes, int64_t source) {
    if (bytes < 0 || source < 0 || source >= g->size) return BAD_SIZE;
    int status = start(g, BROADCAST, bytes);
    for (int64_t done = 0; done < bytes && status == DONE; done += g->piece) {
        int64_t n = bytes - done < g->piece ? bytes - done : g->piece;
        uint32_t turn = ++g->turn;
        char *from = part(g, turn, source);
        if (g->rank == source) memcpy(from, x + done, n);
        if ((status = meet(g, turn)) == DONE && g->rank != source) memcpy(x + done, from, n);
    }
    return status;
}
