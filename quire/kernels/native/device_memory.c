/* Device memory whose pages can be given back and put there again at the same addresses, by CUDA's virtual memory: an
 * allocator for torch's memory pools. The driver's functions are handed in, so that nothing is linked. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PINNED = 1, ON_DEVICE = 1, READ_AND_WRITE = 3 };

/* The driver's structures, of which the layout is fixed. */
struct location { int type, id; };
struct properties {
    int type, handle_types;
    struct location location;
    void *metadata;
    unsigned char flags[8];
};
struct access { struct location location; int flags; };

struct driver {
    int (*granularity)(size_t *, const struct properties *, int);
    int (*reserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
    int (*create)(unsigned long long *, size_t, const struct properties *, unsigned long long);
    int (*map)(uint64_t, size_t, size_t, unsigned long long, unsigned long long);
    int (*set_access)(uint64_t, size_t, const struct access *, size_t);
    int (*unmap)(uint64_t, size_t);
    int (*release)(unsigned long long);
    int (*free_address)(uint64_t, size_t);
    int (*synchronize)(void);
};

struct chunk {
    uint64_t address, size;
    unsigned long long pages;
    int device, tag, mapped;
};

static struct driver driver;
static struct chunk *chunks;
static int num_chunks, room, current_tag;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void quire_memory_use(void **functions) {
    memcpy(&driver, functions, sizeof driver);
}

void quire_memory_tag(int tag) {
    pthread_mutex_lock(&lock);
    current_tag = tag;
    pthread_mutex_unlock(&lock);
}

static struct properties properties_of(int device) {
    struct properties wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.type = PINNED;
    wanted.location = (struct location){ON_DEVICE, device};
    return wanted;
}

/* Pages for a reserved range. On failure nothing is left. */
static int map_chunk(struct chunk *chunk) {
    struct properties wanted = properties_of(chunk->device);
    struct access access = {wanted.location, READ_AND_WRITE};
    int error = driver.create(&chunk->pages, chunk->size, &wanted, 0);
    if (error) return error;
    error = driver.map(chunk->address, chunk->size, 0, chunk->pages, 0);
    if (!error) {
        error = driver.set_access(chunk->address, chunk->size, &access, 1);
        if (error) driver.unmap(chunk->address, chunk->size);
    }
    if (error) driver.release(chunk->pages);
    else chunk->mapped = 1;
    return error;
}

static int unmap_chunk(struct chunk *chunk) {
    int error = driver.unmap(chunk->address, chunk->size);
    if (!error) error = driver.release(chunk->pages);
    if (!error) chunk->mapped = 0;
    return error;
}

static struct chunk *find(uint64_t address) {
    for (int i = 0; i < num_chunks; i++)
        if (chunks[i].address == address) return &chunks[i];
    return NULL;
}

/* As torch calls them: size, device, stream; and address, size, device, stream. */
void *quire_memory_allocate(ptrdiff_t size, int device, void *stream) {
    struct properties wanted = properties_of(device);
    size_t unit = 0;
    (void)stream;
    if (size <= 0 || driver.granularity(&unit, &wanted, 0) || !unit) return NULL;
    pthread_mutex_lock(&lock);
    void *result = NULL;
    struct chunk chunk = {0, ((size_t)size + unit - 1) / unit * unit, 0, device, current_tag, 0};
    if (num_chunks == room) {
        struct chunk *more = realloc(chunks, (room ? 2 * room : 256) * sizeof *chunks);
        if (!more) goto done;
        chunks = more;
        room = room ? 2 * room : 256;
    }
    if (driver.reserve(&chunk.address, chunk.size, unit, 0, 0)) goto done;
    if (map_chunk(&chunk)) {
        driver.free_address(chunk.address, chunk.size);
        goto done;
    }
    chunks[num_chunks++] = chunk;
    result = (void *)(uintptr_t)chunk.address;
done:
    pthread_mutex_unlock(&lock);
    return result;
}

void quire_memory_free(void *address, ptrdiff_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    pthread_mutex_lock(&lock);
    struct chunk *chunk = find((uint64_t)(uintptr_t)address);
    if (chunk) {
        if (chunk->mapped) {
            driver.synchronize(); /* kernels in flight may use it; cudaFree, in whose place this is, waits as well */
            unmap_chunk(chunk);
        }
        driver.free_address(chunk->address, chunk->size);
        *chunk = chunks[--num_chunks];
    }
    pthread_mutex_unlock(&lock);
}

/* Address and size of up to `most` chunks of a tag, in order of allocation or so; returns how many there are. */
int quire_memory_list(int tag, uint64_t *found, int most) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_chunks; i++) {
        if (chunks[i].tag != tag) continue;
        if (count < most) {
            found[3 * count] = chunks[i].address;
            found[3 * count + 1] = chunks[i].size;
            found[3 * count + 2] = (uint64_t)chunks[i].mapped;
        }
        count++;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

/* Give a chunk's pages back, or put some there: 0, the driver's error, or -1 for an address that is none of ours. */
int quire_memory_map(uint64_t address, int mapped) {
    pthread_mutex_lock(&lock);
    struct chunk *chunk = find(address);
    int error = chunk ? 0 : -1;
    if (chunk && chunk->mapped != mapped) error = mapped ? map_chunk(chunk) : unmap_chunk(chunk);
    pthread_mutex_unlock(&lock);
    return error;
}
