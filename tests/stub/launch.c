/* launch.c - modules and kernels: the very source of the kernels (csrc/cuda/, .cu), run by the CPU, one thread of one
 * block after the other. What a launch is given is copied, as CUDA does it. See stub.h.
 */
#include "stub.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct three {
    unsigned x;
};
struct uint4 {
    unsigned x, y, z, w;
};
static _Thread_local struct three blockIdx, threadIdx;

#define KERNEL static
#define INLINE static inline
#define SMALL
#define FLOAT_BITS(value) bits_of(value)
#define BITS_FLOAT(bits)  float_of(bits)
#define DOUBLE_NAN        (double)NAN

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE float from_half(uint16_t bits)
{
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}

INLINE uint16_t to_half(float value)
{
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

#include "../../csrc/cuda/pack.cu"

struct launch {
    void *kernel;
    unsigned blocks;
    struct hvd_pack_table table;
};

static void run(void *self)
{
    struct launch *launch = self;
    for (blockIdx.x = 0; blockIdx.x < launch->blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < HVD_PACK_THREADS; threadIdx.x++)
            ((void (*)(struct hvd_pack_table))launch->kernel)(launch->table);
    free(launch);
}

/* Only what looks like our PTX. */
EXPORT int cuModuleLoadData(void **module, const void *image)
{
    int failed = stub_called("cuModuleLoadData");
    failed = failed ? failed : stub_unsafe();
    *module = (void *)(uintptr_t)image;
    return failed ? failed : strncmp(image, ".version ", 9) == 0 ? 0 : 218; /* invalid PTX */
}

EXPORT int cuModuleUnload(void *module)
{
    (void)module;
    return stub_called("cuModuleUnload");
}

EXPORT int cuModuleGetFunction(void **kernel, void *module, const char *name)
{
    char entry[64] = ".visible .entry ";
    int failed = stub_called("cuModuleGetFunction");
    strcat(strncat(entry, name, 40), "(");
    *(void **)kernel = strcmp(name, HVD_PACK_COPY) == 0     ? (void *)hvd_pack_copy
                       : strcmp(name, HVD_PACK_NARROW) == 0 ? (void *)hvd_pack_narrow
                       : strcmp(name, HVD_PACK_WIDEN) == 0  ? (void *)hvd_pack_widen
                                                            : (void *)hvd_pack_scale;
    return failed ? failed : strstr(module, entry) ? 0 : 500; /* not found */
}

EXPORT int cuLaunchKernel(void *kernel, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned ty,
                          unsigned tz, unsigned shared, void *stream, void **arguments, void **more)
{
    int failed = stub_called("cuLaunchKernel");
    if (failed)
        return failed;
    if (!stub_current(NULL))
        return 201;
    if (blocks == 0 || threads != HVD_PACK_THREADS || y * z * ty * tz != 1 || shared || more)
        return 1;
    struct launch *launch = malloc(sizeof *launch);
    launch->kernel = kernel;
    launch->blocks = blocks;
    memcpy(&launch->table, arguments[0], sizeof launch->table);
    stub_put(stream, run, launch);
    return 0;
}
