/* bucket.c - what goes into a collective, and what must come out?
 *
 * All pieces of a bucket lie in one block of memory, scattered in another order than they are listed and with guard
 * bytes between them. After the work the whole block is compared: outputs with the expected values, everything else
 * with its state before, so that a write outside an output is seen, whoever did it.
 *
 * Positions count through the bucket; the expected value of a position follows from the values of all
 * ranks there by the arithmetic that kernel.h promises, done here one element at a time on wide types.
 */
#include "bucket.h"

#include "kernel/kernel.h"
#include "slow_reduce.h"

#include <string.h>

#define GUARD 64

static int64_t number(int dtype, int op, int rank, uint64_t i)
{
    uint64_t k = i % HVD_BUCKET_PERIOD;
    if (dtype == HVD_DTYPE_bool)
        return (k + (uint64_t)rank) % 3 == 0;
    if (op == HVD_OP_product)
        return (k + (uint64_t)rank) % 8 == 0 ? 2 : 1;
    if (hvd_is_narrow(dtype) && hvd_dtype_bytes(dtype) == 1) /* exact with two bits of mantissa */
        return (int64_t)((k * 3 + (uint64_t)rank * 13) % 8) + 1;
    if (op == HVD_OP_min || op == HVD_OP_max)
        return (int64_t)((k * 7 + (uint64_t)rank * 13) % 101) + 1;
    return (int64_t)((k * 7 + (uint64_t)rank * 13) % 17) + 1;
}

static void store_float(int dtype, double value, void *to)
{
    float single = (float)value;
    _Float16 half = (_Float16)single;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    uint16_t brain = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* nearest, ties to even; never NaN here */
    switch (dtype) {
    case HVD_DTYPE_float8_e4m3fn:
    case HVD_DTYPE_float8_e5m2:
        slow_set_half(dtype, to, 0, slow_half_of_value(dtype, (double)single));
        break;
    case HVD_DTYPE_float16:
        memcpy(to, &half, 2);
        break;
    case HVD_DTYPE_bfloat16:
        memcpy(to, &brain, 2);
        break;
    case HVD_DTYPE_float32:
        memcpy(to, &single, 4);
        break;
    default:
        memcpy(to, &value, 8);
    }
}

static void store(int dtype, int64_t value, void *to)
{
    if (hvd_is_float(dtype))
        store_float(dtype, (double)value, to);
    else
        memcpy(to, &value, (size_t)hvd_dtype_bytes(dtype)); /* little endian: the low bytes, wrapped */
}

void hvd_bucket_value(int dtype, int op, int rank, uint64_t i, void *to)
{
    store(dtype, number(dtype, op, rank, i), to);
}

static int64_t combine(int op, int64_t a, int64_t b)
{
    switch (op) {
    case HVD_OP_min:
        return a < b ? a : b;
    case HVD_OP_max:
        return a > b ? a : b;
    case HVD_OP_product:
        return a * b;
    default:
        return a + b;
    }
}

void hvd_bucket_expect(const struct hvd_bucket *bucket, uint64_t i, void *to)
{
    const struct hvd_work *work = &bucket->work;
    int dtype = work->dtype, op = work->op, active = 0;
    int64_t all = 0;
    for (int rank = 0; rank < bucket->size; rank++) {
        if (bucket->joined >> rank & 1)
            continue;
        int64_t one = number(dtype, op, rank, i);
        all = active++ ? combine(op, all, one) : one;
    }
    double factor = 1;
    for (int times = 0; times < (op == HVD_OP_product ? active : 1); times++)
        factor *= work->prescale;
    factor *= work->postscale;
    if (dtype == HVD_DTYPE_bool) {
        store(dtype, op == HVD_OP_sum ? all != 0 : all, to);
    } else if (!hvd_is_float(dtype)) {
        if (op == HVD_OP_average)
            all /= work->divide_by;
        store(dtype, factor == 1 ? all : (int64_t)((double)all * factor), to);
    } else {
        factor = op == HVD_OP_average ? factor / work->divide_by : factor;
        store_float(dtype, dtype == HVD_DTYPE_float64 ? (double)all * factor : (float)all * (float)factor, to);
    }
}

/* How many pieces, and how many elements in piece k; empty ones come first, last and in between. */
static uint32_t split(enum hvd_bucket_shape shape, uint64_t count, uint64_t *of)
{
    uint32_t pieces = 0;
    uint64_t left = count;
    if (shape == HVD_BUCKET_ONE) {
        of[0] = count;
        return 1;
    }
    of[pieces++] = 0;
    for (uint64_t step = shape == HVD_BUCKET_FEW ? count / 3 + 1 : 1 + count / 200; left > 0;) {
        uint64_t take = step + pieces % 3 < left ? step + pieces % 3 : left;
        of[pieces++] = take;
        left -= take;
        if (pieces % 4 == 2)
            of[pieces++] = 0;
    }
    return pieces;
}

static uint64_t ragged(uint64_t count, uint32_t piece, int rank)
{
    return (piece + (uint32_t)rank) % 5 == 3 ? 0 : count + (uint64_t)((rank * 3 + (int)piece) % 4);
}

static uint64_t cell(int pattern, uint64_t count, int size, int from, int to)
{
    switch (pattern) {
    case HVD_BUCKET_EVEN:
        return count;
    case HVD_BUCKET_UNEVEN:
        return (from + 2 * to) % 5 == 3 ? 0 : count + (uint64_t)((from * 3 + to * 5) % 4);
    case HVD_BUCKET_ONE_CELL: /* from rank 0 to the last, or all is the last rank's share */
        return from == (to + 1) % size && to == size - 1 ? count : 0;
    case HVD_BUCKET_SILENT_RANK: /* rank 0 gives nothing, the last takes nothing */
        return from == 0 || to == size - 1 ? 0 : count;
    default: /* one pair has most */
        return from == size - 1 && to == 0 ? 9 * count + 1 : count / 50;
    }
}

static bool is_exchange(int kind)
{
    return kind == HVD_ALLTOALL || kind == HVD_REDUCESCATTER;
}

int hvd_bucket_shapes(int kind)
{
    return is_exchange(kind) ? HVD_BUCKET_PATTERNS : HVD_BUCKET_SHAPES;
}

static void make_counts(struct hvd_bucket *bucket, uint32_t pieces, const uint64_t *of, int shape)
{
    int size = bucket->size, kind = bucket->work.kind;
    int rows = kind == HVD_ALLTOALL ? size : (int)pieces;
    for (int row = 0; row < rows; row++)
        for (int rank = 0; rank < size; rank++)
            bucket->count_of[row * size + rank] =
                kind == HVD_ALLTOALL ? cell(shape, of[0], size, row, rank)
                : kind == HVD_REDUCESCATTER
                    ? cell(shape, of[0], size, shape == HVD_BUCKET_ONE_CELL ? (rank + 1) % size : size - 1, rank)
                    : ragged(of[row], (uint32_t)row, rank);
}

/* Of so many counts, each a step behind the one before. */
static uint64_t sum_of(const uint64_t *count_of, int many, int step)
{
    uint64_t total = 0;
    for (int k = 0; k < many; k++)
        total += count_of[k * step];
    return total;
}

/* Elements of the input and of the output of a piece; `of`: as it was split. */
static uint64_t in_count(const struct hvd_bucket *bucket, uint32_t piece, uint64_t of)
{
    int size = bucket->size, kind = bucket->work.kind;
    return kind == HVD_ALLGATHER       ? bucket->count_of[(int)piece * size + bucket->rank]
           : kind == HVD_ALLTOALL      ? sum_of(bucket->count_of + bucket->rank * size, size, 1)
           : kind == HVD_REDUCESCATTER ? sum_of(bucket->count_of, size, 1)
                                       : of;
}

static uint64_t out_count(const struct hvd_bucket *bucket, uint32_t piece)
{
    int size = bucket->size, kind = bucket->work.kind;
    return kind == HVD_ALLGATHER       ? sum_of(bucket->count_of + (int)piece * size, size, 1)
           : kind == HVD_ALLTOALL      ? sum_of(bucket->count_of + bucket->rank, size, size)
           : kind == HVD_REDUCESCATTER ? bucket->count_of[bucket->rank]
                                       : bucket->piece[piece].count;
}

/* What `from` gives `to`, at `at`; returns where it ends. */
static unsigned char *give(const struct hvd_bucket *bucket, int from, int to, unsigned char *at)
{
    int dtype = bucket->work.dtype;
    for (uint64_t i = 0; i < bucket->count_of[from * bucket->size + to]; i++, at += hvd_dtype_bytes(dtype))
        hvd_bucket_value(dtype, HVD_OP_min, from, i + 7 * (uint64_t)to, at);
    return at;
}

/* What a piece's input holds: the bucket's positions; allgather: each piece its own, by rank. */
static void fill(struct hvd_bucket *bucket, uint32_t piece, uint64_t position, unsigned char *to)
{
    const struct hvd_work *work = &bucket->work;
    size_t bytes = (size_t)hvd_dtype_bytes(work->dtype);
    if (work->kind == HVD_ALLGATHER)
        position = piece * 5;
    for (int other = 0; work->kind == HVD_ALLTOALL && other < bucket->size; other++)
        to = give(bucket, bucket->rank, other, to);
    for (uint64_t i = 0; work->kind != HVD_ALLTOALL && i < bucket->piece[piece].count; i++)
        hvd_bucket_value(work->dtype, work->op, bucket->rank, position + i, to + i * bytes);
}

/* One piece's places in the block from `at` on; returns where they end. */
static size_t place_piece(struct hvd_bucket *bucket, uint32_t k, int place, size_t at)
{
    struct hvd_piece *piece = &bucket->piece[k];
    size_t element = (size_t)hvd_dtype_bytes(bucket->work.dtype);
    piece->in = piece->out = bucket->memory + at;
    at += HVD_ALIGN_UP(out_count(bucket, k) * element, GUARD) + element;
    if (place & HVD_BUCKET_OUT_OF_PLACE || is_exchange(bucket->work.kind)) {
        piece->in = bucket->memory + at;
        at += HVD_ALIGN_UP(piece->count * element, GUARD) + element;
    } else if (bucket->work.kind == HVD_ALLGATHER) {
        uint64_t before = sum_of(bucket->count_of + (int)k * bucket->size, bucket->rank, 1);
        piece->in = (const char *)piece->in + before * element;
    }
    if (place & HVD_BUCKET_ROOTED && bucket->rank != bucket->work.root)
        piece->out = NULL;
    CHECK(at <= bucket->bytes, "a bucket of %zu bytes", bucket->bytes);
    return at;
}

void hvd_bucket_make(struct hvd_bucket *bucket, const struct hvd_work *like, uint64_t count, int shape, int place,
                     int rank, int size, uint64_t joined, const struct hvd_plane *plane, void *lender)
{
    uint64_t of[420];
    *bucket = (struct hvd_bucket){
        .work = *like, .rank = rank, .size = size, .joined = joined, .plane = plane, .lender = lender};
    bucket->work.active = size - __builtin_popcountll(joined);
    struct hvd_work *work = &bucket->work;
    size_t element = (size_t)hvd_dtype_bytes(work->dtype);
    uint32_t pieces = split(is_exchange(work->kind) ? HVD_BUCKET_ONE : shape, count, of);
    bucket->piece = calloc(pieces, sizeof *bucket->piece);
    bucket->count_of = calloc(pieces + (uint32_t)size, sizeof(uint64_t) * (size_t)size);
    CHECK(pieces <= 420 && bucket->piece && bucket->count_of, "%u pieces", pieces);
    make_counts(bucket, pieces, of, shape);
    work->piece = bucket->piece;
    work->pieces = pieces;
    work->count_of = bucket->count_of;
    bucket->bytes = 2 * GUARD + element;
    for (uint32_t k = 0; k < pieces; k++) {
        work->count += bucket->piece[k].count = in_count(bucket, k, of[k]);
        bucket->bytes += (bucket->piece[k].count + out_count(bucket, k)) * element + 2 * GUARD + 2 * element;
    }
    bucket->memory = lender ? plane->alloc(lender, bucket->bytes) : malloc(bucket->bytes);
    bucket->inputs = malloc(bucket->bytes);
    CHECK(bucket->memory && bucket->inputs, "no %zu bytes for a bucket", bucket->bytes);
    memset(bucket->memory, 0xa5, bucket->bytes);
    size_t at = GUARD + (is_exchange(work->kind) ? element : 0);
    uint64_t end = work->count;
    for (uint32_t k = pieces; k-- > 0;) { /* last piece first, each one element further off the cache line */
        end -= bucket->piece[k].count;
        if (joined >> rank & 1)
            continue;
        at = place_piece(bucket, k, place, at);
        fill(bucket, k, end, (void *)(uintptr_t)bucket->piece[k].in);
    }
    memcpy(bucket->inputs, bucket->memory, bucket->bytes);
}

/* The expected output of a piece goes to `to`. */
static void expect_piece(const struct hvd_bucket *bucket, uint32_t k, uint64_t position, unsigned char *to)
{
    const struct hvd_work *work = &bucket->work;
    int kind = work->kind, me = bucket->rank;
    size_t element = (size_t)hvd_dtype_bytes(work->dtype);
    unsigned char period[HVD_BUCKET_PERIOD][8];
    bool reduces = kind == HVD_ALLREDUCE || kind == HVD_REDUCESCATTER;
    for (uint64_t i = 0; i < HVD_BUCKET_PERIOD && reduces; i++)
        hvd_bucket_expect(bucket, i, period[i]);
    if (kind == HVD_REDUCESCATTER)
        position = sum_of(bucket->count_of, me, 1);
    for (int rank = 0; kind == HVD_ALLTOALL && rank < bucket->size; rank++)
        to = give(bucket, rank, me, to);
    for (int rank = 0; kind == HVD_ALLGATHER && rank < bucket->size; rank++)
        for (uint64_t i = 0; i < bucket->count_of[(int)k * bucket->size + rank]; i++, to += element)
            hvd_bucket_value(work->dtype, work->op, rank, k * 5 + i, to);
    for (uint64_t i = 0; (reduces || kind == HVD_BROADCAST) && i < out_count(bucket, k); i++, to += element)
        if (reduces)
            memcpy(to, period[(position + i) % HVD_BUCKET_PERIOD], element);
        else
            hvd_bucket_value(work->dtype, work->op, work->root, position + i, to);
}

void hvd_bucket_check(struct hvd_bucket *bucket)
{
    const struct hvd_work *work = &bucket->work;
    uint64_t position = 0;
    for (uint32_t k = 0; k < work->pieces; k++) {
        if (bucket->piece[k].out)
            expect_piece(bucket, k, position,
                         bucket->inputs + ((unsigned char *)bucket->piece[k].out - bucket->memory));
        position += bucket->piece[k].count;
    }
    bool same = memcmp(bucket->memory, bucket->inputs, bucket->bytes) == 0;
    for (size_t i = 0; !same && i < bucket->bytes; i++)
        CHECK(bucket->memory[i] == bucket->inputs[i],
              "rank %d of %d, kind %d, %s of %s, %llu elements in %u pieces, joined %llx: byte %zu of %zu is %02x not "
              "%02x (first output at %td)",
              bucket->rank, bucket->size, work->kind, hvd_op_name(work->op), hvd_dtype_name(work->dtype),
              (unsigned long long)work->count, work->pieces, (unsigned long long)bucket->joined, i, bucket->bytes,
              bucket->memory[i], bucket->inputs[i],
              bucket->piece[0].out ? (unsigned char *)bucket->piece[0].out - bucket->memory : (ptrdiff_t)-1);
    if (bucket->lender)
        bucket->plane->release(bucket->memory);
    else
        free(bucket->memory);
    free(bucket->inputs);
    free(bucket->piece);
    free(bucket->count_of);
}

_Atomic long hvd_bucket_works;

void hvd_bucket_do(struct hvd_seat *seat, const struct hvd_work *like, uint64_t count, int shape, int place,
                   uint64_t joined)
{
    struct hvd_bucket bucket;
    hvd_bucket_make(&bucket, like, count, shape, place, seat->arg.rank, seat->arg.size, joined, NULL, NULL);
    bool can = seat->plane->can(seat->opened, &bucket.work);
    CHECK(can || seat->rest, "plane %s cannot do kind %d, %s of %s", seat->plane->name, like->kind,
          hvd_op_name(like->op), hvd_dtype_name(like->dtype));
    hvd_seat_done(can ? seat : seat->rest, &bucket.work);
    hvd_bucket_works += can;
    hvd_bucket_check(&bucket);
}

struct hvd_work hvd_bucket_sum(struct hvd_piece *piece, void *memory, uint64_t count)
{
    *piece = (struct hvd_piece){memory, memory, count};
    return (struct hvd_work){.kind = HVD_ALLREDUCE,
                             .op = HVD_OP_sum,
                             .dtype = HVD_DTYPE_float32,
                             .divide_by = 1,
                             .prescale = 1,
                             .postscale = 1,
                             .piece = piece,
                             .pieces = 1,
                             .count = count};
}
