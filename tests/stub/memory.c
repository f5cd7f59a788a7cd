/* memory.c - device memory that is the process's own, copied and filled in the order of a stream. See stub.h. */
#include "stub.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

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

EXPORT int cuMemAlloc_v2(uintptr_t *address, size_t bytes)
{
    int failed = stub_called("cuMemAlloc");
    *address = failed ? 0 : (uintptr_t)malloc(bytes);
    return failed;
}

EXPORT int cuMemFree_v2(uintptr_t address)
{
    free((void *)address);
    return stub_called("cuMemFree");
}

EXPORT int cuMemAllocHost_v2(void **memory, size_t bytes)
{
    int failed = stub_called("cuMemAllocHost");
    *memory = failed ? NULL : malloc(bytes);
    return failed;
}

EXPORT int cuMemFreeHost(void *memory)
{
    free(memory);
    return stub_called("cuMemFreeHost");
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
