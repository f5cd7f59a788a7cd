/* test_plane_nccl_pack.c - plane nccl over a GPU that is none (tests/stub): is a bucket of many tensors one call, does
 * what is packed come back right, and what does its way of scaling round?
 */
#include "bucket.h"
#include "gpus.h"
#include "kernel/kernel.h"
#include "world.h"

#include <stdlib.h>
#include <string.h>

static const struct hvd_plane *plane; /* nccl */
static const int floats[] = {HVD_DTYPE_float16, HVD_DTYPE_bfloat16, HVD_DTYPE_float32, HVD_DTYPE_float64};

/* A small whole number, exact in every dtype. */
static void put_number(int dtype, double value, void *to)
{
    float single = (float)value;
    _Float16 half = (_Float16)value;
    unsigned char byte = (unsigned char)value;
    const void *from = dtype == HVD_DTYPE_float16    ? (const void *)&half
                       : dtype == HVD_DTYPE_bfloat16 ? (const char *)&single + 2
                       : dtype == HVD_DTYPE_float32  ? (const void *)&single
                       : dtype == HVD_DTYPE_float64  ? (const void *)&value
                                                     : &byte;
    memcpy(to, from, (size_t)hvd_dtype_bytes(dtype));
}

enum { THIRDS = 5 * 40 };

/* An average of three ranks, in one tensor (NCCL multiplies) or in five (so does the kernel, on the way in). Either
 * way every rank's value is multiplied by a rounded third and rounded itself before the sum, where the CPU's planes
 * round once. Multiples of 3 show none of that, in no dtype: 3 k times that third is nearer to k than to any other
 * number. Others may be off by what three roundings come to, and not by more. */
static void thirds(const struct gpus_seat *seat, int dtype, uint32_t pieces, bool exact)
{
    struct hvd_error error = {0};
    struct hvd_piece piece[5];
    _Alignas(8) unsigned char memory[THIRDS * 8], due[8];
    size_t bytes = (size_t)hvd_dtype_bytes(dtype);
    for (int i = 0; i < THIRDS; i++)
        put_number(dtype, exact ? 3 * ((i + 5 * seat->arg.rank) % 20) : i * 37 + 1 + seat->arg.rank,
                   memory + (size_t)i * bytes);
    for (uint32_t k = 0; k < pieces; k++) {
        piece[k].in = piece[k].out = memory + k * (THIRDS / pieces) * bytes;
        piece[k].count = THIRDS / pieces;
    }
    struct hvd_work work = {.kind = HVD_ALLREDUCE,
                            .op = HVD_OP_average,
                            .dtype = dtype,
                            .divide_by = 3,
                            .prescale = 1,
                            .postscale = 1,
                            .piece = piece,
                            .pieces = pieces,
                            .count = THIRDS};
    CHECK(gpus_do(seat, &work, &error) == HVD_OK, "%s", error.text);
    for (int i = 0; i < THIRDS; i++) {
        double whole = exact ? i % 20 + (i + 5) % 20 + (i + 10) % 20 : i * 37 + 2;
        put_number(dtype, whole, due);
        float got = exact ? 0 : ((float *)(void *)memory)[i];
        double off = exact         ? memcmp(due, memory + (size_t)i * bytes, bytes) != 0
                     : got > whole ? got - whole
                                   : whole - got;
        CHECK(off <= (exact ? 0 : whole * 2.5 / (1 << 24)), "dtype %d, %u pieces, %d", dtype, pieces, i);
    }
}

enum { TENSORS = 300, LAUNCHES = 3 }; /* of tables with 128 rows */

/* A bucket of 300 tensors of all sizes and alignments; of rank r, r + 1 times the numbers. `twice`: scaled by 2. */
static void many_tensors(const struct gpus_seat *seat, int dtype, bool twice)
{
    struct hvd_error error = {0};
    struct hvd_piece piece[TENSORS];
    size_t bytes = (size_t)hvd_dtype_bytes(dtype), each = 4200 * bytes + 64, at = 0;
    unsigned char *memory = calloc(TENSORS, each);
    uint64_t sum = (uint64_t)(seat->arg.size * (seat->arg.size + 1) / 2) * (twice ? 2 : 1), total = 0;
    CHECK(memory, "no memory");
    for (uint64_t i = 0; i < TENSORS; i++, at += each) {
        uint64_t count = i % 50 == 7 ? 4200 : i % 13;
        void *begin = memory + at + i % 17 * bytes;
        for (uint64_t k = 0; k < count; k++)
            put_number(dtype, (double)((i + k) % 5 * (uint64_t)(seat->arg.rank + 1)), (char *)begin + k * bytes);
        piece[i] = (struct hvd_piece){.in = begin, .out = begin, .count = count};
        total += count;
    }
    struct hvd_work work = {.kind = HVD_ALLREDUCE,
                            .op = HVD_OP_sum,
                            .dtype = dtype,
                            .divide_by = seat->arg.size,
                            .prescale = twice ? 2 : 1,
                            .postscale = 1,
                            .piece = piece,
                            .pieces = TENSORS,
                            .count = total};
    CHECK(gpus_do(seat, &work, &error) == HVD_OK, "%s", error.text);
    for (uint64_t i = 0; i < TENSORS; i++) {
        for (uint64_t k = 0; k < piece[i].count; k++) {
            unsigned char due[8];
            put_number(dtype, (double)((i + k) % 5 * sum), due);
            CHECK(memcmp(due, (char *)piece[i].out + k * bytes, bytes) == 0, "dtype %d, tensor %d", dtype, (int)i);
        }
        size_t end = (size_t)((unsigned char *)piece[i].out - memory) + piece[i].count * bytes;
        CHECK(end == (i + 1) * each || memory[end] == 0, "behind tensor %d", (int)i);
    }
    free(memory);
}

/* A bucket of many tensors is one call of NCCL, and a launch for 128 tensors each way, multiplied on the way in. */
static void packs(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    int calls = gpus_calls("ncclAllReduce"), launches = gpus_calls("cuLaunchKernel"),
        ops = gpus_calls("ncclRedOpCreatePreMulSum");
    hvd_world_meet(world);
    for (size_t i = 0; i < HVD_COUNT_OF(floats); i++)
        many_tensors(&seat, floats[i], i % 2);
    many_tensors(&seat, HVD_DTYPE_float32, true);
    many_tensors(&seat, HVD_DTYPE_uint8, false);
    hvd_world_meet(world);
    int size = world->size, works = 6 * size;
    CHECK(gpus_calls("ncclAllReduce") - calls == works &&
              gpus_calls("cuLaunchKernel") - launches == 2 * LAUNCHES * works,
          "%d calls, %d launches", gpus_calls("ncclAllReduce") - calls, gpus_calls("cuLaunchKernel") - launches);
    CHECK(gpus_calls("ncclRedOpCreatePreMulSum") == ops && gpus_calls("cuMemcpyDtoD") == 0, "a plain sum, no copies");
    CHECK(gpus_calls("ncclCommRegister") > 0 && hvd_nccl_memory_bytes() >= (size_t)2 << 20, "registered, counted");
    hvd_world_meet(world);
    plane->close(seat.nccl);
    hvd_world_meet(world);
    CHECK(hvd_nccl_memory_bytes() == 0 && gpus_calls("ncclMemFree") == gpus_calls("ncclMemAlloc") &&
              gpus_calls("ncclCommDeregister") == gpus_calls("ncclCommRegister"),
          "all of it is given back");
}

/* Where one rank's driver does not take the kernels, it copies, and all leave the factor to NCCL. */
static void packs_without_kernels(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    (void)more;
    if (world->rank == 0)
        gpus_fail("cuModuleLoadData", 1, 218);
    hvd_world_meet(world);
    int ops = gpus_calls("ncclRedOpCreatePreMulSum"), copies = gpus_calls("cuMemcpyDtoD");
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    CHECK(!seat.nccl->all_scale, "agreed");
    many_tensors(&seat, HVD_DTYPE_float32, true);
    hvd_world_meet(world);
    CHECK(gpus_calls("ncclRedOpCreatePreMulSum") > ops && gpus_calls("cuMemcpyDtoD") > copies, "by copies");
    plane->close(seat.nccl);
}

static void thirds_are_rounded(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    for (uint32_t pieces = 1; pieces <= 5; pieces += 4) {
        for (size_t i = 0; i < HVD_COUNT_OF(floats); i++)
            thirds(&seat, floats[i], pieces, true);
        thirds(&seat, HVD_DTYPE_float32, pieces, false);
    }
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

int main(void)
{
    plane = gpus_plane();
    gpus_find();
    gpus_threads(2, packs);
    gpus_threads(3, thirds_are_rounded);
    gpus_threads(3, packs_without_kernels);
    return 0;
}
