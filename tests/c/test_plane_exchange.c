/* test_plane_exchange.c - alltoall and reducescatter on every plane, for every cell of the matrix.
 *
 * planes x dtypes x ops x world sizes x counts x how uneven the counts are. Reducescatter must also give the bits of
 * the allreduce of the same input, for values whose sum depends on the order. */
#include "kernel/kernel.h"
#include "matrix.h"

#include <string.h>

static void alltoall(struct hvd_seat *seat, int dtype, uint64_t count, int pattern)
{
    hvd_bucket_do(seat, &(struct hvd_work){.kind = HVD_ALLTOALL, .dtype = dtype}, count, pattern, 0, 0);
}

/* Any bits: the sums depend on the order, some are NaN. */
static void reducescatter_is_a_slice_of_allreduce(struct hvd_seat *seat, struct hvd_work work, uint64_t count)
{
    int size = seat->arg.size, me = seat->arg.rank;
    uint64_t count_of[HVD_LOCAL_MAX], start = 0, total = 0;
    size_t element = (size_t)hvd_dtype_bytes(work.dtype);
    for (int rank = 0; rank < size; rank++) {
        start = rank == me ? total : start;
        total += count_of[rank] = rank % 5 == 3 ? 0 : count + (uint64_t)(rank * 5 % 4);
    }
    unsigned char *in = malloc(total * element + 1), *all = malloc(total * element + 1);
    unsigned char *out = malloc(count_of[me] * element + 1);
    CHECK(in && all && out, "no memory");
    for (uint64_t i = 0, seed = 88172645463325252u + (uint64_t)me; i < total * element; i++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        in[i] = work.dtype == HVD_DTYPE_bool ? seed & 1 : (unsigned char)seed;
    }
    struct hvd_piece piece = {in, all, total};
    work.piece = &piece;
    work.pieces = 1;
    work.count = total;
    work.count_of = count_of;
    for (int kind = HVD_ALLREDUCE; kind <= HVD_REDUCESCATTER; kind += HVD_REDUCESCATTER - HVD_ALLREDUCE) {
        work.kind = kind;
        piece.out = kind == HVD_ALLREDUCE ? all : out;
        hvd_seat_done(seat, &work);
    }
    CHECK(memcmp(out, all + start * element, count_of[me] * element) == 0,
          "%s of %llu %s: other bits on rank %d of %d than in an allreduce", hvd_op_name(work.op),
          (unsigned long long)total, hvd_dtype_name(work.dtype), me, size);
    free(in);
    free(all);
    free(out);
}

static void slices(struct hvd_seat *seat)
{
    static const uint64_t counts[] = {0, 1, 7, 1000};
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
        for (int i = 0; hvd_op_number(i) >= 0; i++) {
            struct hvd_work work = {
                .op = hvd_op_number(i), .dtype = dtype, .divide_by = seat->arg.size, .prescale = 1, .postscale = 1};
            if (!hvd_dtype_asked(dtype) || hvd_reduce_check(work.op, dtype, 1, 1) ||
                (seat->arg.size == 64 && dtype != HVD_DTYPE_float32))
                continue;
            for (size_t k = 0; k < HVD_COUNT_OF(counts); k++)
                reducescatter_is_a_slice_of_allreduce(seat, work, counts[k]);
            work.prescale = 0.3;
            work.postscale = 0.25;
            if (dtype != HVD_DTYPE_bool)
                reducescatter_is_a_slice_of_allreduce(seat, work, 1000);
        }
}

/* Point-to-point, many times around any ring, between works of other kinds that leave other words behind. */
static void one_pair_among_bystanders(struct hvd_seat *seat)
{
    struct hvd_piece none;
    struct hvd_work work = hvd_bucket_sum(&none, NULL, 0);
    work.dtype = HVD_DTYPE_int16;
    for (int times = 0; times < 3; times++) {
        alltoall(seat, HVD_DTYPE_float64, 9 * HVD_MATRIX_ABOVE / sizeof(double) + 5, HVD_BUCKET_ONE_CELL);
        alltoall(seat, HVD_DTYPE_uint8, 3, HVD_BUCKET_ONE_CELL);
        alltoall(seat, HVD_DTYPE_uint8, 3, HVD_BUCKET_EVEN);
        work.kind = HVD_REDUCESCATTER;
        hvd_bucket_do(seat, &work, 3 * HVD_MATRIX_ABOVE, HVD_BUCKET_ONE_CELL, 0, 0);
        work.kind = HVD_ALLREDUCE;
        hvd_bucket_do(seat, &work, 1000u * (unsigned)times + 50000, times, times % 2 | HVD_BUCKET_ROOTED, 0);
        alltoall(seat, HVD_DTYPE_float32, HVD_MATRIX_ABOVE, HVD_BUCKET_LOPSIDED);
    }
}

/* Rank 0 sends to rank 1. The others are through before either has started; so is rank 0 before rank 1, if the message
 * fits a few slots. */
static void bystanders_wait_for_nobody(struct hvd_seat *seat)
{
    const struct hvd_plane_arg *arg = &seat->arg;
    for (int times = 0; times < 20; times++) {
        /* One pair, from rank 0 to the last. */
        int sender = 0, receiver = arg->size - 1;
        uint64_t count = times % 2 ? 9 * HVD_MATRIX_ABOVE : 3 * HVD_MATRIX_ABOVE / 2;
        if (arg->rank != sender && arg->rank != receiver)
            alltoall(seat, HVD_DTYPE_uint8, count, HVD_BUCKET_ONE_CELL);
        hvd_world_meet(arg);
        if (arg->rank == sender || (times % 2 && arg->rank == receiver))
            alltoall(seat, HVD_DTYPE_uint8, count, HVD_BUCKET_ONE_CELL);
        hvd_world_meet(arg);
        if (times % 2 == 0 && arg->rank == receiver)
            alltoall(seat, HVD_DTYPE_uint8, count, HVD_BUCKET_ONE_CELL);
        if (times % 5 == 4)
            alltoall(seat, HVD_DTYPE_int32, 1000, HVD_BUCKET_UNEVEN);
    }
}

static void works(struct hvd_seat *seat)
{
    hvd_matrix(seat, 1u << HVD_ALLTOALL | 1u << HVD_REDUCESCATTER, false);
    slices(seat);
    if (seat->arg.size < 64)
        one_pair_among_bystanders(seat);
}

static void every_plane(const struct hvd_plane_arg *arg, void *more)
{
    hvd_every_plane(arg, works);
}

int main(void)
{
    hvd_every_size(every_plane);
    hvd_world_seats(HVD_WORLD_THREADS, 3, "shm", NULL, bystanders_wait_for_nobody, NULL);
    hvd_world_seats(HVD_WORLD_PROCESSES, 5, "shm", NULL, bystanders_wait_for_nobody, NULL);
    hvd_world_processes(3, 200, every_plane, NULL);
    return 0;
}
