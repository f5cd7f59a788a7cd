/* test_plane_exchange.c - alltoall, reducescatter and reduce on every plane, for every cell of the matrix.
 *
 * planes x dtypes x ops x world sizes x counts x how uneven the counts are. Between, before and after the outputs lie
 * guards; a whole output block is compared, and the input must be as it was. Reducescatter must also give the bits of
 * the allreduce of the same input, for values whose sum depends on the order. */
#include "bucket.h"
#include "kernel/kernel.h"
#include "sizes.h"

#include <string.h>

#define SEGMENT_BYTES (256u << 10) /* the largest of any plane */
#define GUARD         64

/* How much goes from a rank to another, seen from `count`. */
enum pattern { EVEN, UNEVEN, ONE_CELL, SILENT_RANK, LOPSIDED, PATTERNS };

struct turn {
    const struct hvd_plane_arg *arg;
    const struct hvd_plane *plane;
    void *opened;
};

static _Atomic long works_done;

static void give_back(const struct hvd_plane *plane, bool in_plane, void *memory)
{
    if (in_plane)
        plane->release(memory);
    else
        free(memory);
}

static uint64_t cell(enum pattern pattern, uint64_t count, int size, int from, int to)
{
    switch (pattern) {
    case EVEN:
        return count;
    case UNEVEN:
        return (from + 2 * to) % 5 == 3 ? 0 : count + (uint64_t)((from * 3 + to * 5) % 4);
    case ONE_CELL: /* between two ranks, or of the last rank's share */
        return from == (to + 1) % size && to == size - 1 ? count : 0;
    case SILENT_RANK: /* rank 0 gives nothing, the last takes nothing */
        return from == 0 || to == size - 1 ? 0 : count;
    default: /* one pair has most */
        return from == size - 1 && to == 0 ? 9 * count + 1 : count / 50;
    }
}

/* An input of `work`, filled, and an output with guards, both off the cache line. */
struct blocks {
    unsigned char *input, *before, *output, *wanted;
    size_t input_bytes, output_bytes, element;
};

static struct blocks blocks_of(uint64_t given, uint64_t taken, size_t element)
{
    struct blocks blocks = {.input_bytes = given * element + element,
                            .output_bytes = taken * element + 2 * GUARD + element,
                            .element = element};
    blocks.input = malloc(blocks.input_bytes);
    blocks.before = malloc(blocks.input_bytes);
    blocks.output = malloc(blocks.output_bytes);
    blocks.wanted = malloc(blocks.output_bytes);
    CHECK(blocks.input && blocks.before && blocks.output && blocks.wanted, "no memory");
    memset(blocks.output, 0xa5, blocks.output_bytes);
    memset(blocks.wanted, 0xa5, blocks.output_bytes);
    memset(blocks.input, 0, blocks.input_bytes);
    return blocks;
}

static void run(const struct turn *turn, struct hvd_work *work, struct blocks *blocks, int pattern)
{
    struct hvd_piece piece = {blocks->input + blocks->element, blocks->output + GUARD + blocks->element, work->count};
    struct hvd_error error = {0};
    work->piece = &piece;
    work->pieces = 1;
    memcpy(blocks->before, blocks->input, blocks->input_bytes);
    CHECK(turn->plane->can(turn->opened, work), "plane %s cannot do kind %d", turn->plane->name, work->kind);
    int code = hvd_world_do(turn->arg, turn->plane, turn->opened, work, &error);
    CHECK(code == HVD_OK, "rank %d: %d %s", turn->arg->rank, code, error.text);
    works_done++;
    CHECK(memcmp(blocks->before, blocks->input, blocks->input_bytes) == 0, "an input was written");
    for (size_t i = 0; i < blocks->output_bytes; i++)
        CHECK(blocks->output[i] == blocks->wanted[i],
              "plane %s, rank %d of %d, kind %d, %s of %s, %llu elements, pattern %d: byte %zu of %zu is %02x not %02x",
              turn->plane->name, turn->arg->rank, turn->arg->size, work->kind, hvd_op_name(work->op),
              hvd_dtype_name(work->dtype), (unsigned long long)work->count, pattern, i, blocks->output_bytes,
              blocks->output[i], blocks->wanted[i]);
    free(blocks->input);
    free(blocks->before);
    free(blocks->output);
    free(blocks->wanted);
}

static void alltoall(const struct turn *turn, int dtype, uint64_t count, enum pattern pattern)
{
    int size = turn->arg->size, me = turn->arg->rank;
    uint64_t count_of[HVD_LOCAL_MAX * HVD_LOCAL_MAX], given = 0, taken = 0;
    size_t element = (size_t)hvd_dtype_bytes(dtype);
    for (int from = 0; from < size; from++)
        for (int to = 0; to < size; to++)
            count_of[from * size + to] = cell(pattern, count, size, from, to);
    for (int rank = 0; rank < size; rank++) {
        given += count_of[me * size + rank];
        taken += count_of[rank * size + me];
    }
    struct blocks blocks = blocks_of(given, taken, element);
    unsigned char *in = blocks.input + element, *out = blocks.wanted + GUARD + element;
    for (int rank = 0; rank < size; rank++) {
        for (uint64_t i = 0; i < count_of[me * size + rank]; i++, in += element)
            hvd_bucket_value(dtype, HVD_OP_min, me, i + 7 * (uint64_t)rank, in);
        for (uint64_t i = 0; i < count_of[rank * size + me]; i++, out += element)
            hvd_bucket_value(dtype, HVD_OP_min, rank, i + 7 * (uint64_t)me, out);
    }
    struct hvd_work work = {.kind = HVD_ALLTOALL, .dtype = dtype, .count = given, .count_of = count_of};
    run(turn, &work, &blocks, pattern);
}

static uint64_t shares(enum pattern pattern, uint64_t count, int size, uint64_t *count_of)
{
    uint64_t total = 0;
    for (int rank = 0; rank < size; rank++)
        total += count_of[rank] = cell(pattern, count, size, pattern == ONE_CELL ? (rank + 1) % size : size - 1, rank);
    return total;
}

static void reducescatter(const struct turn *turn, struct hvd_work work, uint64_t count, enum pattern pattern)
{
    int size = turn->arg->size, me = turn->arg->rank;
    uint64_t count_of[HVD_LOCAL_MAX], start = 0;
    size_t element = (size_t)hvd_dtype_bytes(work.dtype);
    work.kind = HVD_REDUCESCATTER;
    work.count = shares(pattern, count, size, count_of);
    work.count_of = count_of;
    for (int rank = 0; rank < me; rank++)
        start += count_of[rank];
    struct blocks blocks = blocks_of(work.count, count_of[me], element);
    struct hvd_bucket expected = {.work = work, .size = size};
    unsigned char period[HVD_BUCKET_PERIOD][8];
    for (uint64_t i = 0; i < work.count; i++)
        hvd_bucket_value(work.dtype, work.op, me, i, blocks.input + (i + 1) * element);
    for (uint64_t i = 0; i < HVD_BUCKET_PERIOD; i++)
        hvd_bucket_expect(&expected, i, period[i]);
    for (uint64_t i = 0; i < count_of[me]; i++)
        memcpy(blocks.wanted + GUARD + (i + 1) * element, period[(start + i) % HVD_BUCKET_PERIOD], element);
    run(turn, &work, &blocks, pattern);
}

/* Only the root gives an output. `in_plane`: memory from alloc, if this plane has any. */
static void reduce(const struct turn *turn, struct hvd_work work, uint64_t count, bool in_place, bool in_plane)
{
    bool root = turn->arg->rank == turn->arg->size - 1;
    size_t element = (size_t)hvd_dtype_bytes(work.dtype);
    struct hvd_bucket expected = {.work = work, .size = turn->arg->size};
    size_t bytes = (count + 1) * element;
    in_plane = in_plane && turn->plane->alloc;
    unsigned char *in = in_plane ? turn->plane->alloc(turn->opened, bytes) : malloc(bytes), *out = in;
    if (!in_place || !root)
        out = in_plane ? turn->plane->alloc(turn->opened, bytes) : malloc(bytes);
    unsigned char *wanted = malloc(bytes);
    CHECK(in && out && wanted, "no memory");
    for (uint64_t i = 0; i < count; i++)
        hvd_bucket_value(work.dtype, work.op, turn->arg->rank, i, in + i * element);
    for (uint64_t i = 0; i < count; i++)
        if (root)
            hvd_bucket_expect(&expected, i, wanted + i * element);
        else
            hvd_bucket_value(work.dtype, work.op, turn->arg->rank, i, wanted + i * element);
    struct hvd_piece piece = {in, root ? out : NULL, count};
    struct hvd_error error = {0};
    work.kind = HVD_ALLREDUCE;
    work.flags = in_plane ? HVD_WORK_IN_PLANE : 0;
    work.piece = &piece;
    work.pieces = 1;
    work.count = count;
    int code = hvd_world_do(turn->arg, turn->plane, turn->opened, &work, &error);
    CHECK(code == HVD_OK, "rank %d: %d %s", turn->arg->rank, code, error.text);
    CHECK(memcmp(root ? out : in, wanted, count * element) == 0, "reduce of %llu %s on rank %d of %d",
          (unsigned long long)count, hvd_dtype_name(work.dtype), turn->arg->rank, turn->arg->size);
    if (out != in)
        give_back(turn->plane, in_plane, out);
    give_back(turn->plane, in_plane, in);
    free(wanted);
}

/* Any bits: the sums depend on the order, some are NaN. */
static void reducescatter_is_a_slice_of_allreduce(const struct turn *turn, struct hvd_work work, uint64_t count)
{
    int size = turn->arg->size, me = turn->arg->rank;
    uint64_t count_of[HVD_LOCAL_MAX], start = 0, total = shares(UNEVEN, count, size, count_of);
    size_t element = (size_t)hvd_dtype_bytes(work.dtype);
    unsigned char *in = malloc(total * element + 1), *all = malloc(total * element + 1);
    unsigned char *out = malloc(count_of[me] * element + 1);
    CHECK(in && all && out, "no memory");
    for (uint64_t i = 0, seed = 88172645463325252u + (uint64_t)me; i < total * element; i++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        in[i] = work.dtype == HVD_DTYPE_bool ? seed & 1 : (unsigned char)seed;
    }
    for (int rank = 0; rank < me; rank++)
        start += count_of[rank];
    struct hvd_piece piece = {in, all, total};
    struct hvd_error error = {0};
    work.piece = &piece;
    work.pieces = 1;
    work.count = total;
    work.count_of = count_of;
    for (int kind = HVD_ALLREDUCE; kind <= HVD_REDUCESCATTER; kind += HVD_REDUCESCATTER - HVD_ALLREDUCE) {
        work.kind = kind;
        piece.out = kind == HVD_ALLREDUCE ? all : out;
        CHECK(hvd_world_do(turn->arg, turn->plane, turn->opened, &work, &error) == HVD_OK, "%s", error.text);
    }
    CHECK(memcmp(out, all + start * element, count_of[me] * element) == 0,
          "%s of %llu %s: other bits on rank %d of %d than in an allreduce", hvd_op_name(work.op),
          (unsigned long long)total, hvd_dtype_name(work.dtype), me, size);
    free(in);
    free(all);
    free(out);
}

static void reductions(const struct turn *turn, struct hvd_work work, bool thorough)
{
    uint64_t above = SEGMENT_BYTES / (uint64_t)hvd_dtype_bytes(work.dtype) + 1;
    uint64_t counts[] = {0, 1, 7, 1000, above};
    bool scaled = work.dtype != HVD_DTYPE_bool;
    for (size_t i = 0; i < HVD_COUNT_OF(counts) - !thorough; i++) {
        for (int pattern = 0; pattern < PATTERNS; pattern++)
            if (hvd_picked(pattern, PATTERNS, (int)i + work.dtype + work.op + turn->arg->size))
                reducescatter(turn, work, counts[i], pattern);
        reducescatter_is_a_slice_of_allreduce(turn, work, counts[i]);
        reduce(turn, work, counts[i], i % 2, false);
        reduce(turn, work, counts[i], (i + 1) % 2, true);
    }
    if (scaled) {
        work.prescale = 2;
        work.postscale = 0.25;
        reducescatter(turn, work, 100, UNEVEN);
        work.prescale = 0.3;
        reducescatter_is_a_slice_of_allreduce(turn, work, 1000);
    }
}

static void matrix(const struct turn *turn)
{
    int size = turn->arg->size;
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++) {
        uint64_t above = SEGMENT_BYTES / (uint64_t)hvd_dtype_bytes(dtype) + 1;
        uint64_t counts[] = {0, 1, 7, 1000, above};
        bool thorough = size < 64 && (dtype == HVD_DTYPE_float32 || size == 3);
        if (!hvd_dtype_asked(dtype) || (size == 64 && dtype != HVD_DTYPE_float32))
            continue;
        for (size_t i = 0; i < HVD_COUNT_OF(counts) - !thorough; i++)
            for (int pattern = 0; pattern < PATTERNS; pattern++)
                if (dtype == HVD_DTYPE_float32 || hvd_picked(pattern, PATTERNS, (int)i + dtype + size))
                    alltoall(turn, dtype, counts[i], pattern);
        for (int i = 0; hvd_op_number(i) >= 0; i++) {
            struct hvd_work work = {
                .op = hvd_op_number(i), .dtype = dtype, .divide_by = size, .prescale = 1, .postscale = 1};
            if (!hvd_reduce_check(work.op, work.dtype, 1, 1))
                reductions(turn, work, thorough && work.op <= HVD_OP_sum);
        }
    }
}

/* Point-to-point, many times around any ring, between works of other kinds that leave other words behind. */
static void one_pair_among_bystanders(const struct turn *turn)
{
    struct hvd_work work = {.op = HVD_OP_sum, .dtype = HVD_DTYPE_int16, .divide_by = 1, .prescale = 1, .postscale = 1};
    for (int times = 0; times < 3; times++) {
        alltoall(turn, HVD_DTYPE_float64, 9 * SEGMENT_BYTES / sizeof(double) + 5, ONE_CELL);
        alltoall(turn, HVD_DTYPE_uint8, 3, ONE_CELL);
        alltoall(turn, HVD_DTYPE_uint8, 3, EVEN);
        reducescatter(turn, work, 3 * SEGMENT_BYTES, ONE_CELL);
        reduce(turn, work, (uint64_t)1000 * (uint64_t)times + 50000, false, times == 1);
        alltoall(turn, HVD_DTYPE_float32, SEGMENT_BYTES, LOPSIDED);
    }
}

/* Rank 0 sends to rank 1. The others are through before either has started; so is rank 0 before rank 1, if the message
 * fits a few slots. */
static void bystanders_wait_for_nobody(const struct hvd_plane_arg *arg, void *more)
{
    (void)more;
    struct turn turn = {.arg = arg};
    turn.plane = hvd_world_open(arg, "shm", &turn.opened);
    for (int times = 0; times < 20; times++) {
        /* One pair as cell() has it: from rank 0 to the last. */
        int sender = 0, receiver = arg->size - 1;
        uint64_t count = times % 2 ? 9 * SEGMENT_BYTES : 3 * SEGMENT_BYTES / 2;
        if (arg->rank != sender && arg->rank != receiver)
            alltoall(&turn, HVD_DTYPE_uint8, count, ONE_CELL);
        hvd_world_meet(arg);
        if (arg->rank == sender || (times % 2 && arg->rank == receiver))
            alltoall(&turn, HVD_DTYPE_uint8, count, ONE_CELL);
        hvd_world_meet(arg);
        if (times % 2 == 0 && arg->rank == receiver)
            alltoall(&turn, HVD_DTYPE_uint8, count, ONE_CELL);
        if (times % 5 == 4)
            alltoall(&turn, HVD_DTYPE_int32, 1000, UNEVEN);
    }
    hvd_world_meet(arg);
    turn.plane->close(turn.opened);
}

static void every_plane(const struct hvd_plane_arg *arg, void *more)
{
    (void)more;
    for (int i = 0; hvd_planes[i]; i++) {
        struct turn turn = {.arg = arg, .plane = hvd_planes[i]};
        struct hvd_error error = {0};
        if (turn.plane->device) /* test_plane_nccl.c */
            continue;
        if (turn.plane->open(arg, &turn.opened, &error) != HVD_OK) {
            CHECK(!arg->one_host || strcmp(turn.plane->name, "shm") != 0, "%s", error.text);
            continue;
        }
        matrix(&turn);
        if (arg->size < 64)
            one_pair_among_bystanders(&turn);
        hvd_world_meet(arg);
        turn.plane->close(turn.opened);
    }
}

int main(void)
{
    hvd_every_size(every_plane, &works_done);
    hvd_world_run(HVD_WORLD_THREADS, 3, 60, bystanders_wait_for_nobody, NULL);
    hvd_world_processes(5, 60, bystanders_wait_for_nobody, NULL);
    hvd_world_processes(3, 200, every_plane, NULL);
    return 0;
}
