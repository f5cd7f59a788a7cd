/* memory.c - device memory that is the process's own, copied and filled in the order of a stream, and large blocks of
 * it that other processes can open. See stub.h. */
#define _GNU_SOURCE
#include "stub.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct copy {
    void *to;
    const void *from; /* NULL: filled */
    size_t bytes, count, pitch;
    uint64_t value;
};

static void run(void *self)
{
    struct copy *copy = self;
    if (copy->from)
        memmove(copy->to, copy->from, copy->bytes);
    for (size_t i = 0; !copy->from && i < copy->count; i++)
        memcpy((char *)copy->to + i * copy->pitch, &copy->value, copy->bytes);
    free(copy);
}

static int put(const char *name, void *stream, struct copy what)
{
    int failed = stub_called(name);
    if (failed)
        return failed;
    if (!stub_current(NULL))
        return 201;
    struct copy *copy = malloc(sizeof *copy);
    *copy = what;
    stub_put(stream, run, copy);
    return 0;
}

static int allocates(const char *name)
{
    int failed = stub_called(name);
    return failed ? failed : !stub_current(NULL) ? 201 : stub_unsafe();
}

/* Waits for the device, as CUDA does. */
static int frees(const char *name, void *memory)
{
    int device = 0, failed = allocates(name);
    if (failed)
        return failed;
    stub_current(&device);
    stub_drain(device);
    free(memory);
    return 0;
}

/* Large ones are files without a name, mapped, which other processes can open by way of this one's descriptors. */
enum { LARGE = 32 << 20, BLOCKS = 64 };
static struct block {
    uintptr_t address;
    size_t bytes;
    int fd; /* -1: another one's, opened */
} blocks[BLOCKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uintptr_t map(size_t bytes, int fd, bool keeps)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    pthread_mutex_lock(&lock);
    struct block *block = blocks;
    while (block->address && block < blocks + BLOCKS - 1)
        block++;
    *block = (struct block){(uintptr_t)memory, bytes, keeps ? fd : -1};
    pthread_mutex_unlock(&lock);
    return (uintptr_t)memory;
}

/* On which device is what cuMemAlloc gave? By address. */
static struct given {
    uintptr_t address;
    size_t bytes;
    int device;
    struct given *next;
} *given;

/* Memory that lies there from now on. */
EXPORT void stub_note(uintptr_t address, size_t bytes, int device)
{
    struct given *one = malloc(sizeof *one);
    *one = (struct given){.address = address, .bytes = bytes, .device = device};
    pthread_mutex_lock(&lock);
    one->next = given;
    given = one;
    pthread_mutex_unlock(&lock);
}

static void note(uintptr_t address, size_t bytes)
{
    int device = 0;
    stub_current(&device);
    stub_note(address, bytes, device);
}

static void forget(uintptr_t address)
{
    pthread_mutex_lock(&lock);
    for (struct given **at = &given; *at; at = &(*at)->next)
        if ((*at)->address == address) {
            struct given *one = *at;
            *at = one->next;
            free(one);
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* The block that begins there, taken out of the table if it is to go. */
static struct block find(uintptr_t address, bool goes)
{
    struct block found = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < BLOCKS; i++)
        if (address && blocks[i].address == address) {
            found = blocks[i];
            if (goes)
                blocks[i].address = 0;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

EXPORT int cuMemAlloc_v2(uintptr_t *address, size_t bytes)
{
    int failed = allocates("cuMemAlloc"), fd = -1;
    *address = 0;
    if (failed)
        return failed;
    if (bytes < LARGE) {
        *address = (uintptr_t)malloc(bytes);
        note(*address, bytes);
        return 0;
    }
    fd = memfd_create("stub", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        return 2; /* out of memory */
    *address = map(bytes, fd, true);
    note(*address, bytes);
    return 0;
}

EXPORT int cuMemFree_v2(uintptr_t address)
{
    int failed = allocates("cuMemFree"); /* CUDA waits here, too; but blocks are a process's, and ranks are threads */
    if (failed)
        return failed;
    struct block block = find(address, true);
    forget(address);
    if (block.address) {
        munmap((void *)address, block.bytes);
        close(block.fd);
    } else {
        free((void *)address);
    }
    return 0;
}

EXPORT int cuMemAllocHost_v2(void **memory, size_t bytes)
{
    int failed = allocates("cuMemAllocHost");
    *memory = failed ? NULL : malloc(bytes);
    return failed;
}

EXPORT int cuMemFreeHost(void *memory)
{
    return frees("cuMemFreeHost", memory);
}

EXPORT int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void *stream)
{
    return put("cuMemcpyDtoD", stream, (struct copy){.to = (void *)to, .from = (const void *)from, .bytes = bytes});
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *stream)
{
    return put("cuMemcpyDtoH", stream, (struct copy){.to = to, .from = (const void *)from, .bytes = bytes});
}

EXPORT int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, void *stream)
{
    return put("cuMemcpyHtoD", stream, (struct copy){.to = (void *)to, .from = from, .bytes = bytes});
}

static int fill(uintptr_t to, uint64_t value, size_t bytes, size_t pitch, size_t count, void *stream)
{
    return put("cuMemset", stream,
               (struct copy){.to = (void *)to, .bytes = bytes, .count = count, .pitch = pitch, .value = value});
}

EXPORT int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t count, void *stream)
{
    return fill(to, value, 1, 1, count, stream);
}

EXPORT int cuMemsetD16Async(uintptr_t to, unsigned short value, size_t count, void *stream)
{
    return fill(to, value, 2, 2, count, stream);
}

EXPORT int cuMemsetD32Async(uintptr_t to, unsigned value, size_t count, void *stream)
{
    return fill(to, value, 4, 4, count, stream);
}

EXPORT int cuMemsetD2D32Async(uintptr_t to, size_t pitch, unsigned value, size_t width, size_t height, void *stream)
{
    return width == 1 ? fill(to, value, 4, pitch, height, stream) : 1;
}
