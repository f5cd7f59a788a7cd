/* test_plane_nccl_cast.c - plane nccl over a GPU that is none (tests/stub): tensors that may travel in 16 bits do, cast
 * by the kernel that packs them. Is every value rounded once, to the nearest, ties to even, whatever it is and wherever
 * it lies, and is that one launch for all of them and no copy?
 */
#include "gpus.h"
#include "kernel/kernel.h"
#include "world.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS = 161, LAUNCHES = 2, LARGE = 4200, GIVES = 0, ZEROS = 1 }; /* of tables with 128 rows */
static const struct hvd_plane *plane;                                     /* nccl */

/* The 16 bits of a number that is not negative, as a double; infinity as what would follow the largest. */
static double value_of(int wire, int bits)
{
    int digits = wire == HVD_DTYPE_float16 ? 10 : 7, bias = wire == HVD_DTYPE_float16 ? 15 : 127;
    int exponent = bits >> digits, digit = bits & ((1 << digits) - 1);
    return exponent ? ldexp(digit + (1 << digits), exponent - bias - digits) : ldexp(digit, 1 - bias - digits);
}

/* As a value of 16 bits has it: by looking for the nearest among all there are. */
static double nearest(int wire, double value)
{
    int low = 0, high = wire == HVD_DTYPE_float16 ? 0x7c00 : 0x7f80, infinite = high;
    double size = fabs(value);
    if (isnan(value))
        return value;
    while (low < high) { /* the greatest that is not more */
        int middle = (low + high + 1) / 2;
        if (value_of(wire, middle) <= size)
            low = middle;
        else
            high = middle - 1;
    }
    if (low < infinite) {
        double less = size - value_of(wire, low), more = value_of(wire, low + 1) - size;
        low += more < less || (more == less && low % 2);
    }
    return copysign(low == infinite ? INFINITY : value_of(wire, low), value);
}

/* Anything at all, or what lies in the middle of two neighbours of 16 bits, or beside that. */
static double some_value(int dtype, int wire, uint64_t *seed)
{
    uint64_t bits = *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    bits ^= bits >> 29;
    double value;
    if (bits % 4 == 0) {
        uint32_t half = (uint32_t)(bits >> 32);
        float any;
        memcpy(dtype == HVD_DTYPE_float32 ? (void *)&any : (void *)&value,
               dtype == HVD_DTYPE_float32 ? (void *)&half : (void *)&bits, (size_t)hvd_dtype_bytes(dtype));
        return dtype == HVD_DTYPE_float32 ? (double)any : value;
    }
    int at = (int)((bits >> 8 & 0xffff) % (wire == HVD_DTYPE_float16 ? 0x7c00 : 0x7f80));
    value = (value_of(wire, at) + value_of(wire, at + 1)) / 2;
    if (dtype == HVD_DTYPE_float32)
        value = bits % 4 == 1   ? value
                : bits % 4 == 2 ? nextafterf((float)value, INFINITY)
                                : nextafterf((float)value, 0);
    else
        value = bits % 4 == 1 ? value : bits % 4 == 2 ? nextafter(value, INFINITY) : nextafter(value, 0);
    return bits >> 40 & 1 ? -value : value;
}

static double read_value(int dtype, const void *memory, uint64_t i)
{
    return dtype == HVD_DTYPE_float32 ? (double)((const float *)memory)[i] : ((const double *)memory)[i];
}

static void write_value(int dtype, void *memory, uint64_t i, double value)
{
    if (dtype == HVD_DTYPE_float32)
        ((float *)memory)[i] = (float)value;
    else
        ((double *)memory)[i] = value;
}

/* What the sum of the ranks is to be: rank 0's value, multiplied and narrowed, and nothing else. */
static double due(int dtype, int wire, double value, double factor)
{
    return nearest(wire, dtype == HVD_DTYPE_float32 ? (double)((float)value * (float)factor) : value * factor);
}

struct tensors {
    int dtype, wire, op, divide;
    uint32_t pieces;
    unsigned char *memory;
    struct hvd_piece piece[TENSORS];
    uint64_t count;
};

/* Of all sizes, from places that are multiples of 16 bytes or not. Rank 0 has values, rank 1 zeros (or the same, of an
 * extreme), and others have joined. */
static void lay_out(struct tensors *all, int rank)
{
    size_t bytes = (size_t)hvd_dtype_bytes(all->dtype), each = (LARGE + 32) * bytes;
    uint64_t seed = 99;
    all->memory = calloc(all->pieces, each);
    all->count = 0;
    CHECK(all->memory, "no memory");
    for (uint32_t i = 0; i < all->pieces; i++) {
        void *begin = all->memory + i * each + i % 7 * bytes;
        uint64_t count = all->pieces == 1 || i % 40 == 7 ? LARGE : i % 13;
        bool same = all->op == HVD_OP_min || rank == GIVES;
        for (uint64_t k = 0; k < count; k++) {
            double value = some_value(all->dtype, all->wire, &seed);
            write_value(all->dtype, begin, k, same ? value : 0);
        }
        all->piece[i] = (struct hvd_piece){begin, begin, count};
        if (rank > ZEROS)
            all->piece[i].in = all->piece[i].out = NULL;
        all->count += count;
    }
}

static void compare(const struct tensors *all)
{
    size_t bytes = (size_t)hvd_dtype_bytes(all->dtype), each = (LARGE + 32) * bytes;
    uint64_t seed = 99, infinite = 0, tiny = 0;
    double factor = all->op == HVD_OP_average ? 1.0 / all->divide : 1;
    for (uint32_t i = 0; i < all->pieces; i++) {
        unsigned char *end = (unsigned char *)all->piece[i].out + all->piece[i].count * bytes;
        for (uint64_t k = 0; k < all->piece[i].count; k++) {
            double value = some_value(all->dtype, all->wire, &seed), got = read_value(all->dtype, all->piece[i].out, k);
            double want = due(all->dtype, all->wire, value, factor);
            CHECK(got == want || (isnan(want) && (isnan(got) || all->op == HVD_OP_min)),
                  "dtype %d as %d, tensor %u, %d: %a became %a, not %a", all->dtype, all->wire, i, (int)k, value, got,
                  want);
            infinite += isinf(want) && !isinf(value);
            tiny += want != 0 && fabs(want) < value_of(all->wire, all->wire == HVD_DTYPE_float16 ? 0x400 : 0x80);
        }
        while (end < all->memory + (i + 1) * each)
            CHECK(*end++ == 0, "behind tensor %u", i);
    }
    CHECK(tiny > 0 && (infinite > 0 || all->wire == HVD_DTYPE_bfloat16), "all sorts of values were there");
}

static void one_bucket(const struct gpus_seat *seat, struct tensors all)
{
    struct hvd_error error = {0};
    lay_out(&all, seat->arg.rank);
    struct hvd_work work = {.kind = HVD_ALLREDUCE,
                            .op = all.op,
                            .dtype = all.dtype,
                            .wire = all.wire + 1,
                            .divide_by = all.divide,
                            .active = 2,
                            .prescale = 1,
                            .postscale = 1,
                            .piece = all.piece,
                            .pieces = all.pieces,
                            .count = all.count};
    CHECK(gpus_do(seat, &work, &error) == HVD_OK, "%s", error.text);
    if (seat->arg.rank <= ZEROS)
        compare(&all);
    free(all.memory);
}

static const int wide[] = {HVD_DTYPE_float32, HVD_DTYPE_float64}, wires[] = {HVD_DTYPE_float16, HVD_DTYPE_bfloat16};

/* One call of NCCL, in 16 bits, and one launch for 128 tensors each way; nothing else touches them. */
static void casts(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    int works = 0;
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    int calls = gpus_calls("ncclAllReduce"), launches = gpus_calls("cuLaunchKernel");
    hvd_world_meet(world);
    for (size_t i = 0; i < HVD_COUNT_OF(wide); i++)
        for (size_t k = 0; k < HVD_COUNT_OF(wires); k++)
            for (int divide = 1; divide <= 3; divide += 2, works++)
                one_bucket(&seat, (struct tensors){wide[i], wires[k], HVD_OP_average, divide, .pieces = TENSORS});
    hvd_world_meet(world);
    int both = world->size > 2 ? 2 * 2 : 2 * world->size; /* who has joined has nothing to cast */
    CHECK(gpus_calls("ncclAllReduce") - calls == works * world->size, "one call each");
    CHECK(gpus_calls("cuLaunchKernel") - launches == works * both * LAUNCHES, "%d launches",
          gpus_calls("cuLaunchKernel") - launches);
    CHECK(gpus_calls("cuMemcpyDtoD") == 0 && gpus_calls("ncclRedOpCreatePreMulSum") == 0, "no copies, a plain sum");
    hvd_world_meet(world);
    one_bucket(&seat, (struct tensors){HVD_DTYPE_float32, HVD_DTYPE_float16, HVD_OP_min, 1, .pieces = TENSORS});
    hvd_world_meet(world);
    launches = gpus_calls("cuLaunchKernel"); /* a large one that would not be packed */
    hvd_world_meet(world);
    one_bucket(&seat, (struct tensors){HVD_DTYPE_float32, HVD_DTYPE_bfloat16, HVD_OP_sum, 1, .pieces = 1});
    hvd_world_meet(world);
    CHECK(gpus_calls("cuLaunchKernel") - launches == both, "a launch each way");
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* Where one rank's driver does not take the kernels, all reduce what they have. So does a rank alone. */
static void as_it_is(const struct hvd_plane_arg *world, void *more)
{
    enum { COUNT = 50 };
    struct gpus_seat seat;
    struct hvd_error error = {0};
    float value[COUNT];
    (void)more;
    if (world->rank == 0 && world->size > 1)
        gpus_fail("cuModuleLoadData", 1, 218);
    hvd_world_meet(world);
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    CHECK(seat.nccl->all_scale == (world->size == 1), "agreed");
    struct hvd_piece piece[2] = {{value, value, COUNT / 2}, {value + COUNT / 2, value + COUNT / 2, COUNT / 2}};
    struct hvd_work work = {.kind = HVD_ALLREDUCE,
                            .op = HVD_OP_sum,
                            .dtype = HVD_DTYPE_float32,
                            .wire = HVD_DTYPE_float16 + 1,
                            .divide_by = world->size,
                            .prescale = 1,
                            .postscale = 1,
                            .piece = piece,
                            .pieces = 2,
                            .count = COUNT};
    for (int i = 0; i < COUNT; i++)
        value[i] = 65537 + (float)i;
    CHECK(gpus_do(&seat, &work, &error) == HVD_OK, "%s", error.text);
    for (int i = 0; i < COUNT; i++)
        CHECK(value[i] == (float)(65537 + i) * (float)world->size, "%d", i);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

int main(void)
{
    plane = gpus_plane();
    gpus_find();
    gpus_threads(2, casts);
    gpus_threads(3, casts);
    gpus_threads(1, as_it_is);
    gpus_threads(2, as_it_is);
    return 0;
}
