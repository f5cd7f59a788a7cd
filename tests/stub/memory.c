/* memory.c - device memory that is the process's own, copied and filled in the order of a stream. See stub.h. */
#include "stub.h"

#include <stdlib.h>
#include <string.h>

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

static int put(void *stream, struct copy what)
{
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

EXPORT int cuMemAlloc_v2(uintptr_t *address, size_t bytes)
{
    int failed = allocates("cuMemAlloc");
    *address = failed ? 0 : (uintptr_t)malloc(bytes);
    return failed;
}

EXPORT int cuMemFree_v2(uintptr_t address)
{
    int failed = allocates("cuMemFree"); /* CUDA waits here, too; but blocks are a process's, and ranks are threads */
    if (!failed)
        free((void *)address);
    return failed;
}

EXPORT int cuMemAllocHost_v2(void **memory, size_t bytes)
{
    int failed = allocates("cuMemAllocHost");
    *memory = failed ? NULL : malloc(bytes);
    return failed;
}

/* Waits for the device, as CUDA does. */
EXPORT int cuMemFreeHost(void *memory)
{
    int device = 0, failed = allocates("cuMemFreeHost");
    if (failed)
        return failed;
    stub_current(&device);
    stub_drain(device);
    free(memory);
    return 0;
}

EXPORT int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void *stream)
{
    return put(stream, (struct copy){.to = (void *)to, .from = (const void *)from, .bytes = bytes});
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *stream)
{
    CALLED("cuMemcpyDtoH");
    return put(stream, (struct copy){.to = to, .from = (const void *)from, .bytes = bytes});
}

EXPORT int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, void *stream)
{
    CALLED("cuMemcpyHtoD");
    return put(stream, (struct copy){.to = (void *)to, .from = from, .bytes = bytes});
}

EXPORT int cuMemsetD2D32Async(uintptr_t to, size_t pitch, unsigned value, size_t width, size_t height, void *stream)
{
    if (width != 1)
        return 1;
    return put(stream, (struct copy){.to = (void *)to, .bytes = 4, .count = height, .pitch = pitch, .value = value});
}

#define FILL(bits, type)                                                                       \
    EXPORT int cuMemsetD##bits##Async(uintptr_t to, type value, size_t count, void *stream)    \
    {                                                                                          \
        const struct copy copy = {(void *)to, NULL, sizeof(type), count, sizeof(type), value}; \
        return put(stream, copy);                                                              \
    }
FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned)
