/* Stands in for CUDA's driver where there is no GPU: pages are those of memory files, mapped at reserved addresses. It
 * counts the bytes of pages that exist, and refuses more than `quire_stand_in_limit`. */

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { UNIT = 2 << 20, INVALID = 1, OUT_OF_MEMORY = 2, FILES = 1024 };

static size_t sizes[FILES]; /* of pages, by their descriptor */
size_t quire_stand_in_bytes, quire_stand_in_pinned, quire_stand_in_limit = (size_t)1 << 40;
size_t quire_stand_in_busy; /* kernels are in flight, and may use what is mapped */

int cuMemGetAllocationGranularity(size_t *unit, const void *properties, int option) {
    const int *words = properties; /* pinned, on a device */
    if (words[0] != 1 || words[2] != 1 || option) return INVALID;
    *unit = UNIT;
    return 0;
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted, unsigned long long flags) {
    if (size % UNIT || alignment != UNIT || wanted || flags) return INVALID;
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (uint64_t)(uintptr_t)found;
    return found == MAP_FAILED ? OUT_OF_MEMORY : 0;
}

int cuMemCreate(unsigned long long *pages, size_t size, const void *properties, unsigned long long flags) {
    (void)properties;
    if (size % UNIT || flags) return INVALID;
    if (quire_stand_in_bytes + size > quire_stand_in_limit) return OUT_OF_MEMORY;
    int file = memfd_create("stand-in", 0);
    if (file < 0 || file >= FILES || ftruncate(file, (off_t)size)) return OUT_OF_MEMORY;
    sizes[file] = size;
    quire_stand_in_bytes += size;
    *pages = (unsigned long long)file;
    return 0;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, unsigned long long pages, unsigned long long flags) {
    if (offset || flags || pages >= FILES || sizes[pages] != size) return INVALID;
    void *place = (void *)(uintptr_t)address;
    return mmap(place, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)pages, 0) == place ? 0 : INVALID;
}

int cuMemSetAccess(uint64_t address, size_t size, const void *access, size_t count) {
    const int *words = access; /* location, then to read and write */
    if (count != 1 || words[0] != 1 || words[2] != 3) return INVALID;
    return mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE) ? INVALID : 0;
}

int cuMemUnmap(uint64_t address, size_t size) {
    if (quire_stand_in_busy) return INVALID;
    void *place = (void *)(uintptr_t)address;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    return mmap(place, size, PROT_NONE, flags, -1, 0) == place ? 0 : INVALID;
}

int cuMemRelease(unsigned long long pages) {
    if (pages >= FILES || !sizes[pages]) return INVALID;
    quire_stand_in_bytes -= sizes[pages];
    sizes[pages] = 0;
    return close((int)pages) ? INVALID : 0;
}

int cuMemAddressFree(uint64_t address, size_t size) {
    return munmap((void *)(uintptr_t)address, size) ? INVALID : 0;
}

static __thread void *current = NULL;
static int context; /* its address */

int cuCtxGetCurrent(void **found) {
    *found = current ? current : (current = &context);
    return 0;
}

int cuCtxSetCurrent(void *wanted) {
    current = wanted;
    return wanted == &context ? 0 : INVALID;
}

int cuCtxSynchronize(void) {
    if (!current) return INVALID;
    quire_stand_in_busy = 0;
    return 0;
}

static struct { void *address; size_t size; } pinned[FILES];

static int pin(void *from, void *to, size_t size) {
    for (int i = 0; i < FILES; i++)
        if (__sync_bool_compare_and_swap(&pinned[i].address, from, to)) {
            if (to) pinned[i].size = size;
            __atomic_fetch_add(&quire_stand_in_pinned, to ? size : -pinned[i].size, __ATOMIC_RELAXED);
            return 0;
        }
    return INVALID;
}

int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    return !current || flags ? INVALID : pin(NULL, address, size);
}

/* Of pages that are no longer mapped it is too late. */
int cuMemHostUnregister(void *address) {
    return !current || !address || msync(address, 1, MS_ASYNC) ? INVALID : pin(address, NULL, 0);
}

int cuMemcpyDtoHAsync_v2(void *host, uint64_t device, size_t size, void *stream) {
    memcpy(host, (void *)(uintptr_t)device, size);
    return stream ? INVALID : 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t device, const void *host, size_t size, void *stream) {
    memcpy((void *)(uintptr_t)device, host, size);
    return stream ? INVALID : 0;
}
