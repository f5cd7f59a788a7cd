/* bench_kernel.c - how fast the loops run: GB/s over the bytes read and written, best of a few rounds.
 *
 * Usage: bench_kernel [elements]. By default 64 Ki elements (fits L2 for two sources) and 1 Mi elements, two
 * sources and eight, in every variant; then hvd_copy. About two seconds. Best, not median: the machine is
 * shared, and the loop's own speed is wanted.
 */
#include "kernel/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS    7
#define ROUND_NS  1500000u
#define SOURCES   8
#define BYTES_MAX (8u << 20)

static char *arrays[SOURCES + 1];

static double gbytes_per_s(int dtype, int op, double factor, int divide, int n, size_t count)
{
    struct hvd_scale scale = {op, divide, factor, 1.0};
    uint64_t best = UINT64_MAX;
    size_t bytes = count * (size_t)hvd_dtype_bytes(dtype) * (size_t)(n + 1);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t start = hvd_now_ns(), end;
        uint64_t calls = 0;
        do {
            hvd_reduce(dtype, &scale, arrays[SOURCES], (const void *const *)arrays, n, count);
            calls++;
            end = hvd_now_ns();
        } while (end - start < ROUND_NS);
        if ((end - start) / calls < best)
            best = (end - start) / calls;
    }
    return (double)bytes / (double)(best ? best : 1);
}

static void bench_loops(size_t count)
{
    static const char *const variants[] = {"portable", "neon", "avx2", "avx512"};
    static const int ops[] = {HVD_OP_sum, HVD_OP_max};
    printf("%zu elements, GB/s over bytes read and written\n%-10s %-9s", count, "dtype", "variant");
    printf(" %9s %9s %9s %9s\n", "sum of 2", "max of 2", "avg of 2", "sum of 8");
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
        for (size_t v = 0; v < HVD_COUNT_OF(variants); v++) {
            if (hvd_kernel_use(variants[v]) != HVD_OK || count * (size_t)hvd_dtype_bytes(dtype) > BYTES_MAX)
                continue;
            bool whole = dtype < HVD_DTYPE_float16;
            printf("%-10s %-9s", hvd_dtype_name(dtype), variants[v]);
            for (size_t o = 0; o < HVD_COUNT_OF(ops); o++)
                printf(" %9.1f", gbytes_per_s(dtype, dtype == HVD_DTYPE_bool ? HVD_OP_max : ops[o], 1.0, 1, 2, count));
            printf(" %9.1f", dtype == HVD_DTYPE_bool
                                 ? 0.0
                                 : gbytes_per_s(dtype, HVD_OP_sum, whole ? 1.0 : 0.5, whole ? 2 : 1, 2, count));
            printf(" %9.1f\n",
                   gbytes_per_s(dtype, dtype == HVD_DTYPE_bool ? HVD_OP_max : HVD_OP_sum, 1.0, 1, 8, count));
        }
}

static void bench_copy(size_t bytes)
{
    uint64_t best = UINT64_MAX;
    for (int round = 0; round < ROUNDS * 4; round++) {
        uint64_t start = hvd_now_ns();
        hvd_copy(arrays[SOURCES], arrays[0], bytes);
        uint64_t taken = hvd_now_ns() - start;
        if (taken < best)
            best = taken;
    }
    printf("hvd_copy %8zu bytes: %.1f GB/s\n", bytes, (double)bytes * 2 / (double)(best ? best : 1));
}

int main(int argc, char **argv)
{
    for (int k = 0; k <= SOURCES; k++) {
        arrays[k] = aligned_alloc(HVD_PAGE, BYTES_MAX + HVD_PAGE);
        if (!arrays[k])
            return 77;
        memset(arrays[k], 0, BYTES_MAX); /* zeros: as fast as any number but subnormals */
    }
    if (argc > 1) {
        bench_loops(strtoul(argv[1], NULL, 10));
    } else {
        bench_loops(64 << 10);
        bench_loops(1 << 20);
    }
    for (size_t bytes = 4096; bytes <= BYTES_MAX; bytes *= 8)
        bench_copy(bytes);
    for (int k = 0; k <= SOURCES; k++)
        free(arrays[k]);
    return 0;
}
