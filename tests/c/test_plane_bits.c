/* test_plane_bits.c - sums of floats are the same to the last bit, however tensors are fused and in every run.
 *
 * Twelve tensors of values whose sum depends on the order go through the plane alone, in one bucket, in
 * three, in plane memory, and again; every result is compared with the sum in rank order, made by a plain loop.
 */
#include "kernel/kernel.h"
#include "world.h"

#include <string.h>

enum { TENSORS = 12 };
static const uint64_t counts[TENSORS] = {1, 0, 17, 30011, 4, 1000, 131072, 65536, 3, 250000, 64, 9};

static float value(int rank, int tensor, uint64_t i)
{
    uint32_t bits = (uint32_t)rank * 2654435761u + (uint32_t)tensor * 40503u + (uint32_t)i * 2246822519u;
    bits ^= bits >> 15;
    bits *= 2654435761u;
    bits ^= bits >> 13;
    return (float)((int)(bits & 0xffff) - 0x8000) * (bits >> 16 & 1 ? 1e-6f : 7.3e2f);
}

/* One work on tensors [first, last), in place in `memory`. */
static void run(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened, char *memory, int dtype,
                int first, int last, uint32_t flags)
{
    size_t element = (size_t)hvd_dtype_bytes(dtype);
    struct hvd_piece piece[TENSORS];
    struct hvd_error error = {0};
    struct hvd_work work = {.kind = HVD_ALLREDUCE,
                            .op = HVD_OP_sum,
                            .dtype = dtype,
                            .flags = flags,
                            .divide_by = 1,
                            .prescale = 1,
                            .postscale = 1,
                            .piece = piece,
                            .pieces = (uint32_t)(last - first)};
    uint64_t at = 0;
    for (int tensor = 0; tensor < last; at += counts[tensor++])
        if (tensor >= first) {
            char *here = memory + at * element;
            piece[tensor - first] = (struct hvd_piece){here, here, counts[tensor]};
            work.count += counts[tensor];
        }
    CHECK(hvd_world_do(arg, plane, opened, &work, &error) == HVD_OK, "%s", error.text);
}

static void fill(char *memory, int dtype, int rank)
{
    uint64_t at = 0;
    for (int tensor = 0; tensor < TENSORS; tensor++)
        for (uint64_t i = 0; i < counts[tensor]; i++, at++)
            if (dtype == HVD_DTYPE_float32)
                ((float *)memory)[at] = value(rank, tensor, i);
            else
                ((double *)memory)[at] = (double)value(rank, tensor, i) * 1.1;
}

static void expect(char *memory, int dtype, int size, size_t total)
{
    char *next = malloc(total * 8);
    fill(memory, dtype, 0);
    for (int rank = 1; rank < size; rank++) {
        fill(next, dtype, rank);
        for (size_t i = 0; i < total; i++)
            if (dtype == HVD_DTYPE_float32)
                ((float *)memory)[i] += ((float *)next)[i];
            else
                ((double *)memory)[i] += ((double *)next)[i];
    }
    free(next);
}

static void every_fusion(const struct hvd_plane_arg *arg, void *more)
{
    static const int fusions[][5] = {{1, 2, 3, 4, 12}, {12}, {3, 7, 12}, {2, 9, 12}, {12}, {1, 11, 12}};
    (void)more;
    void *opened;
    const struct hvd_plane *plane = hvd_world_open(arg, "shm", &opened);
    size_t total = 0;
    for (int tensor = 0; tensor < TENSORS; tensor++)
        total += counts[tensor];
    char *wanted = malloc(total * 8), *private = malloc(total * 8), *shared = plane->alloc(opened, total * 8);
    CHECK(wanted && private && shared, "no memory");
    for (int dtype = HVD_DTYPE_float32; dtype <= HVD_DTYPE_float64; dtype++) {
        expect(wanted, dtype, arg->size, total);
        for (size_t k = 0; k < 2 * HVD_COUNT_OF(fusions); k++) {
            char *memory = k % 2 ? shared : private;
            fill(memory, dtype, arg->rank);
            for (int i = 0, first = 0; first < TENSORS; first = fusions[k / 2][i++])
                run(arg, plane, opened, memory, dtype, first, fusions[k / 2][i], k % 2 ? HVD_WORK_IN_PLANE : 0);
            CHECK(memcmp(memory, wanted, total * (size_t)hvd_dtype_bytes(dtype)) == 0,
                  "rank %d of %d, %s: fusion %zu in %s memory gives other bits", arg->rank, arg->size,
                  hvd_dtype_name(dtype), k / 2, k % 2 ? "plane" : "private");
        }
    }
    plane->release(shared);
    free(private);
    free(wanted);
    hvd_world_meet(arg);
    plane->close(opened);
}

int main(void)
{
    static const int sizes[] = {2, 3, 4, 7};
    for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++)
        hvd_world_run(HVD_WORLD_THREADS, sizes[i], 200, every_fusion, NULL);
    hvd_world_run(HVD_WORLD_PROCESSES, 3, 200, every_fusion, NULL);
    return 0;
}
