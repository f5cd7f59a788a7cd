/* test_plane_bits.c - results are the same to the last bit, however tensors are fused and in every run.
 *
 * Twelve tensors of values whose sum depends on the order go through the plane alone, in one bucket, in
 * three, in plane memory, and again, through each plane that adds floats in a fixed order; every result is compared
 * with the sum in rank order, made by a plain loop. Then two ranks combine any bits that a dtype can have, NaNs of
 * every payload and both zeros among them, by each op, scaled or not: as the kernel does it in rank order.
 */
#include "bucket.h"
#include "kernel/kernel.h"

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
static void run(struct hvd_seat *seat, char *memory, int dtype, int first, int last, uint32_t flags)
{
    size_t element = (size_t)hvd_dtype_bytes(dtype);
    struct hvd_piece piece[TENSORS];
    struct hvd_work work = hvd_bucket_sum(piece, memory, 0);
    work.dtype = dtype;
    work.flags = flags;
    work.pieces = (uint32_t)(last - first);
    uint64_t at = 0;
    for (int tensor = 0; tensor < last; at += counts[tensor++])
        if (tensor >= first) {
            char *here = memory + at * element;
            piece[tensor - first] = (struct hvd_piece){here, here, counts[tensor]};
            work.count += counts[tensor];
        }
    hvd_seat_done(seat, &work);
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

static void every_fusion(struct hvd_seat *seat)
{
    static const int fusions[][5] = {{1, 2, 3, 4, 12}, {12}, {3, 7, 12}, {2, 9, 12}, {12}, {1, 11, 12}};
    size_t total = 0;
    for (int tensor = 0; tensor < TENSORS; tensor++)
        total += counts[tensor];
    int memories = seat->plane->alloc ? 2 : 1;
    char *wanted = malloc(total * 8), *memory[] = {malloc(total * 8), NULL};
    if (memories > 1)
        memory[1] = seat->plane->alloc(seat->opened, total * 8);
    CHECK(wanted && memory[0] && memory[memories - 1], "no memory");
    for (int dtype = HVD_DTYPE_float32; dtype <= HVD_DTYPE_float64; dtype++) {
        expect(wanted, dtype, seat->arg.size, total);
        for (size_t k = 0; k < (size_t)memories * HVD_COUNT_OF(fusions); k++) {
            const int *until = fusions[k % HVD_COUNT_OF(fusions)];
            size_t in_plane = k / HVD_COUNT_OF(fusions);
            fill(memory[in_plane], dtype, seat->arg.rank);
            for (int i = 0, first = 0; first < TENSORS; first = until[i++])
                run(seat, memory[in_plane], dtype, first, until[i], in_plane ? HVD_WORK_IN_PLANE : 0);
            CHECK(memcmp(memory[in_plane], wanted, total * (size_t)hvd_dtype_bytes(dtype)) == 0,
                  "%s, rank %d of %d, %s: fusion %zu in %s memory gives other bits", seat->plane->name, seat->arg.rank,
                  seat->arg.size, hvd_dtype_name(dtype), k % HVD_COUNT_OF(fusions), in_plane ? "plane" : "private");
        }
    }
    if (memories > 1)
        seat->plane->release(memory[1]);
    free(memory[0]);
    free(wanted);
}

/* Any bits; in some places a zero of either sign, which min and max tell apart by their order. */
static void any_bits(unsigned char *to, size_t bytes, int rank, size_t element)
{
    uint64_t draw = 77 + (uint64_t)rank;
    for (size_t i = 0; i < bytes; i++)
        to[i] = (unsigned char)hvd_sim_below(&draw, 256);
    for (size_t i = 0; i < bytes / element; i += 5) {
        memset(to + i * element, 0, element);
        to[(i + 1) * element - 1] = (i & 1) == (size_t)rank ? 0x80 : 0;
    }
}

static void one_case(struct hvd_seat *seat, int dtype, int op, double postscale)
{
    enum { COUNT = 40001 };
    size_t element = (size_t)hvd_dtype_bytes(dtype), bytes = COUNT * element;
    unsigned char *in[2] = {malloc(bytes), malloc(bytes)}, *out = malloc(bytes), *due = malloc(bytes);
    CHECK(in[0] && in[1] && out && due, "no memory");
    for (int rank = 0; rank < 2; rank++)
        any_bits(in[rank], bytes, rank, element);
    struct hvd_piece piece[3];
    struct hvd_work work = hvd_bucket_sum(piece, out, COUNT);
    static const uint64_t begin[] = {0, 1, 20000, COUNT};
    for (int i = 0; i < 3; i++)
        piece[i] = (struct hvd_piece){in[seat->arg.rank] + begin[i] * element, out + begin[i] * element,
                                      begin[i + 1] - begin[i]};
    work.pieces = 3;
    work.dtype = dtype;
    work.op = op;
    work.divide_by = 2;
    work.postscale = postscale;
    struct hvd_scale scale = hvd_scale_fold(op, dtype, 2, 2, 1, postscale);
    hvd_reduce(dtype, &scale, due, (const void *const *)in, 2, COUNT);
    hvd_seat_done(seat, &work);
    CHECK(memcmp(out, due, bytes) == 0, "%s, rank %d, %s, op %d, times %g: other bits", seat->arg.algo, seat->arg.rank,
          hvd_dtype_name(dtype), op, postscale);
    free(in[0]);
    free(in[1]);
    free(out);
    free(due);
}

static void any_bits_of_two(struct hvd_seat *seat)
{
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
        for (int op = HVD_OP_average; op <= HVD_OP_product; op++)
            for (double postscale = 1; postscale > 0.2; postscale -= 0.7)
                if (op != HVD_OP_adasum && !hvd_reduce_check(op, dtype, 1, postscale))
                    one_case(seat, dtype, op, postscale);
}

int main(void)
{
    static const char *const of_two[] = {"exchange", "direct"};
    for (size_t k = 0; k < HVD_COUNT_OF(of_two); k++)
        hvd_world_seats(HVD_WORLD_THREADS, 2, "p2p", &(struct hvd_plane_arg){.algo = of_two[k]}, any_bits_of_two, NULL);
    static const int sizes[] = {2, 3, 4, 7};
    static const char *const planes[] = {"shm", "p2p"};
    for (size_t k = 0; k < HVD_COUNT_OF(planes); k++) {
        for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++)
            hvd_world_seats(HVD_WORLD_THREADS, sizes[i], planes[k], NULL, every_fusion, NULL);
        hvd_world_seats(HVD_WORLD_PROCESSES, 3, planes[k], NULL, every_fusion, NULL);
    }
    return 0;
}
