/* test_plane_nccl_views.c - plane nccl over a GPU that is none (tests/stub): is a bucket of views of one memory left
 * where it lies, on one rank as on all, and is what one rank copies after all the same sum?
 */
#include "bucket.h"
#include "gpus.h"
#include "world.h"

#include <string.h>

static const struct hvd_plane *plane; /* nccl */

enum { VIEWS = 5, VIEW = 60, FLAT = VIEWS * (VIEW + VIEWS) + 8 }; /* elements; of the i-th tensor VIEW + i */

/* Five tensors, and an empty one in their midst, that lie in `flat` as `lies` says, of rank r with r + 1 times the
 * numbers. `apart`: with a gap before one of them. */
static struct hvd_work views(const struct gpus_seat *seat, struct hvd_piece *piece, float *flat, uint32_t lies)
{
    static const float nothing = 0;
    struct hvd_work work = hvd_bucket_sum(piece, flat, 1);
    float *at = flat;
    work.pieces = VIEWS + 1;
    work.count = 0;
    for (int k = 0; k <= VIEWS; k++) {
        int i = lies == HVD_LAY_DOWN ? VIEWS - k : k, number = i > 2 ? i - 1 : i;
        uint64_t count = i == 2 ? 0 : (uint64_t)(VIEW + number);
        at += lies == HVD_LAY_APART && i == 3 ? 1 : 0;
        piece[i] = (struct hvd_piece){.in = i == 2 ? (void *)(uintptr_t)&nothing : (void *)at,
                                      .out = i == 2 ? (void *)(uintptr_t)&nothing : (void *)at,
                                      count};
        for (uint64_t n = 0; n < count; n++)
            at[n] = (float)((100 * number + (int)n) * (seat->arg.rank + 1));
        at += count;
        work.count += count;
    }
    return work;
}

/* Of what `views` has made: summed and multiplied, and nothing else was written. */
static void check_views(const struct hvd_work *work, const float *flat, int sum)
{
    double all = 0, due = 0;
    for (uint32_t i = 0; i < work->pieces; i++)
        for (uint64_t n = 0; n < work->piece[i].count; n++) {
            uint32_t number = i > 2 ? i - 1 : i;
            float wanted = (float)((100 * (int)number + (int)n) * sum);
            float got = ((const float *)work->piece[i].out)[n];
            CHECK(got == wanted, "tensor %u, %d: %f instead of %f", i, (int)n, got, wanted);
            due += wanted;
        }
    for (int i = 0; i < FLAT; i++)
        all += flat[i];
    CHECK(all == due, "between them");
}

static struct {
    int launches, copies, registered, allocated, made, calls;
} counted;

static void count(void)
{
    counted.launches = gpus_calls("cuLaunchKernel") - counted.launches;
    counted.copies = gpus_calls("cuMemcpyDtoD") - counted.copies;
    counted.registered = gpus_calls("ncclCommRegister") - counted.registered;
    counted.allocated = gpus_calls("ncclMemAlloc") + gpus_calls("cuMemAlloc") - counted.allocated;
    counted.made = gpus_calls("ncclRedOpCreatePreMulSum") - counted.made;
    counted.calls = gpus_calls("ncclAllReduce") - counted.calls;
}

/* One bucket, of which it is agreed how earlier ones lay; this rank's lies as `lies` says. The difference of what is
 * counted, of all ranks, is in `counted` then. times: what the sum is multiplied with. joined: the last rank has. */
static void one_bucket(const struct gpus_seat *seat, uint32_t agreed, uint32_t lies, int times, bool joined)
{
    struct hvd_error error = {0};
    struct hvd_piece piece[VIEWS + 1];
    _Alignas(16) float flat[FLAT] = {0};
    int size = seat->arg.size, sum = size * (size + 1) / 2;
    struct hvd_work work = views(seat, piece, flat, lies);
    work.lay = agreed;
    work.prescale = times;
    work.active = joined ? size - 1 : size;
    bool gone = joined && seat->arg.rank == size - 1;
    for (uint32_t i = 0; gone && i < work.pieces; i++)
        piece[i].in = piece[i].out = NULL;
    hvd_world_meet(&seat->arg);
    if (seat->arg.rank == 0) {
        memset(&counted, 0, sizeof counted);
        count();
    }
    hvd_world_meet(&seat->arg);
    CHECK(gpus_do(seat, &work, &error) == HVD_OK, "%s", error.text);
    if (!gone)
        check_views(&work, flat, times * (joined ? sum - size : sum));
    bool doubted = agreed % HVD_LAY_APART && lies != agreed; /* it is told when it has come again and again */
    CHECK(work.lies == (gone || doubted ? 0 : lies), "it lies %u", work.lies);
    hvd_world_meet(&seat->arg);
    if (seat->arg.rank == 0)
        count();
    hvd_world_meet(&seat->arg);
    CHECK(counted.calls == size && counted.copies == 0, "one call of each rank, and no copies");
}

/* Where buckets lay as views of one memory on all ranks, up or down, they are left there: nothing is launched, copied,
 * given or registered. A rank whose tensors lie otherwise after all packs them for itself, and memory that is
 * registered meets no other (the stub refuses that). */
static void leaves_views(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    int size = world->size, rank = world->rank;
    (void)more;
    CHECK(gpus_greet(world, rank, &seat, &error) == HVD_OK, "%s", error.text);
    for (uint32_t lay = HVD_LAY_UP; lay <= HVD_LAY_DOWN; lay++) {
        one_bucket(&seat, lay, lay, 1, false);
        CHECK(counted.launches == 0 && counted.allocated == 0, "%d launches", counted.launches);
        one_bucket(&seat, lay, lay, 2, false); /* NCCL multiplies, as it does one tensor */
        CHECK(counted.launches == 0 && counted.allocated == 0, "%d launches", counted.launches);
        CHECK((counted.made > 0) == (lay == HVD_LAY_UP), "made once, %d", counted.made);
    }
    for (uint32_t lay = HVD_LAY_UP; lay <= HVD_LAY_DOWN; lay++) {
        one_bucket(&seat, lay, rank ? lay : HVD_LAY_APART, 2, false);
        CHECK(counted.launches == 2, "one rank's way in and out, %d", counted.launches);
        one_bucket(&seat, lay, rank ? lay : HVD_LAY_APART - lay, 1, false);
        CHECK(counted.launches == 2, "the other way round, %d", counted.launches);
        one_bucket(&seat, lay, lay, 2, true);
        CHECK(counted.launches == 0, "who has joined gives what changes nothing, %d", counted.launches);
    }
    CHECK(seat.nccl->fusion.at == 0 && counted.registered == 0, "nothing was registered");
    CHECK(seat.nccl->bucket.doubts == 0, "they did not come in a row");
    one_bucket(&seat, HVD_LAY_APART, HVD_LAY_UP, 2, false);
    CHECK(counted.launches == 2 * size && counted.registered == size && counted.made == 0, "packed by all");
    one_bucket(&seat, 0, HVD_LAY_DOWN, 1, false);
    CHECK(counted.launches == 2 * size && counted.registered == 0, "packed by all, %d", counted.launches);
    one_bucket(&seat, HVD_LAY_UP, HVD_LAY_UP, 1, false);
    CHECK(counted.launches == 0, "and left again");
    hvd_world_meet(world);
    plane->close(seat.nccl);
    hvd_world_meet(world);
    CHECK(hvd_nccl_memory_bytes() == 0, "all of it is given back");
}

/* Where the results are wanted elsewhere, only they are copied. */
static void takes_views_and_gives_copies(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece[VIEWS + 1];
    _Alignas(16) float flat[FLAT] = {0}, other[VIEWS + 1][2 * VIEW] = {{0}};
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = views(&seat, piece, flat, HVD_LAY_DOWN);
    work.lay = HVD_LAY_DOWN;
    for (uint32_t i = 0; i < work.pieces; i++)
        piece[i].out = other[i];
    int launches = gpus_calls("cuLaunchKernel");
    hvd_world_meet(world);
    CHECK(gpus_do(&seat, &work, &error) == HVD_OK, "%s", error.text);
    for (uint32_t i = 0; i < work.pieces; i++)
        for (uint64_t n = 0; n < piece[i].count; n++)
            CHECK(other[i][n] == ((const float *)piece[i].in)[n] / (float)(world->rank + 1) * 3, "tensor %u", i);
    hvd_world_meet(world);
    CHECK(gpus_calls("cuLaunchKernel") - launches == world->size, "the way out");
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* What must not be: one rank registers, the other does not. NCCL says nothing of it; the stub does. */
static void the_stub_sees_what_is_mixed(const struct hvd_plane_arg *world, void *more)
{
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece[2];
    _Alignas(16) float flat[64] = {0};
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    struct hvd_work work = hvd_bucket_sum(piece, flat, 32);
    piece[1] = (struct hvd_piece){.in = flat + 32, .out = flat + 32, .count = 32};
    work.pieces = 2;
    work.count = 64;
    work.lay = world->rank ? HVD_LAY_UP : 0;
    CHECK(gpus_do(&seat, &work, &error) == HVD_EINTERNAL && strstr(error.text, "could not do a collective"), "%s",
          error.text);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* With an NCCL that registers nothing, whoever's tensors lie as in a bucket need not be agreed: he does not copy. */
static void leaves_views_alone(const struct hvd_plane_arg *world, void *more)
{
    enum { EACH = 64 };
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece[VIEWS];
    _Alignas(16) float value[VIEWS * EACH + 8];
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    for (int gap = 0; gap < 2; gap++) { /* with one before the last view, on rank 0 */
        struct hvd_work work = hvd_bucket_sum(piece, value, 1);
        work.pieces = VIEWS;
        work.count = VIEWS * EACH;
        for (int i = 0; i < VIEWS; i++) {
            float *at = value + i * EACH + (gap && world->rank == 0 && i == VIEWS - 1 ? 8 : 0);
            for (int k = 0; k < EACH; k++)
                at[k] = (float)k;
            piece[i] = (struct hvd_piece){.in = at, .out = at, .count = EACH};
        }
        int launches = gpus_calls("cuLaunchKernel");
        hvd_world_meet(world);
        CHECK(gpus_do(&seat, &work, &error) == HVD_OK, "%s", error.text);
        for (int i = 0; i < VIEWS * EACH; i++)
            CHECK(((const float *)piece[i / EACH].out)[i % EACH] == (float)(i % EACH * world->size), "%d", i);
        hvd_world_meet(world);
        CHECK(gpus_calls("cuLaunchKernel") - launches == 2 * gap, "%d launches",
              gpus_calls("cuLaunchKernel") - launches);
        hvd_world_meet(world);
    }
    CHECK(seat.nccl->fusion.by_nccl == false, "NCCL has none to give");
    one_bucket(&seat, HVD_LAY_DOWN, HVD_LAY_DOWN, 2, false);
    CHECK(counted.launches == 0, "%d launches", counted.launches);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

/* NCCL's factor is one of the values' dtype, which is no half or quarter, but a third only about, in 16 bits. */
static void packs_what_nccl_would_spoil(const struct hvd_plane_arg *world, void *more)
{
    enum { EACH = 64 };
    struct gpus_seat seat;
    struct hvd_error error = {0};
    struct hvd_piece piece[2];
    _Alignas(16) uint16_t flat[2 * EACH];
    (void)more;
    CHECK(gpus_greet(world, world->rank, &seat, &error) == HVD_OK, "%s", error.text);
    for (int i = 0; i < 2 * EACH; i++)
        flat[i] = 0x4040; /* 3 as a bfloat16, a third of which is 1 again */
    struct hvd_work work = hvd_bucket_sum(piece, flat, EACH);
    piece[1] = (struct hvd_piece){.in = flat + EACH, .out = flat + EACH, .count = EACH};
    work.pieces = 2;
    work.count = 2 * EACH;
    work.dtype = HVD_DTYPE_bfloat16;
    work.op = HVD_OP_average;
    work.divide_by = work.active = world->size;
    work.lay = HVD_LAY_UP;
    int launches = gpus_calls("cuLaunchKernel");
    hvd_world_meet(world);
    CHECK(gpus_do(&seat, &work, &error) == HVD_OK, "%s", error.text);
    for (int i = 0; i < 2 * EACH; i++)
        CHECK(flat[i] == 0x4040, "%d: %04x", i, flat[i]);
    hvd_world_meet(world);
    int wanted = world->size == 2 ? 0 : 2 * world->size;
    CHECK(gpus_calls("cuLaunchKernel") - launches == wanted, "%d launches", gpus_calls("cuLaunchKernel") - launches);
    hvd_world_meet(world);
    plane->close(seat.nccl);
}

int main(void)
{
    plane = gpus_plane();
    gpus_find();
    gpus_threads(2, leaves_views);
    gpus_threads(3, leaves_views);
    gpus_threads(2, packs_what_nccl_would_spoil);
    gpus_threads(3, packs_what_nccl_would_spoil);
    gpus_threads(2, takes_views_and_gives_copies);
    gpus_threads(2, the_stub_sees_what_is_mixed);
    struct hvd_nccl *older = (struct hvd_nccl *)(uintptr_t)hvd_nccl_load(NULL);
    older->MemAlloc = NULL;
    older->CommRegister = NULL;
    gpus_threads(2, leaves_views_alone);
    return 0;
}
