/* count_plane.c - instructions of moving 1 MB through the plane, on one of two ranks.
 *
 * 16 pieces of 64 KB in private memory: staging them (pack), summing, and writing results back (unpack); beside it one
 * piece in memory of the plane's alloc. This thread polls for both ranks alternately, so nobody waits and the count is
 * the same in every run. Loops run in the variant that valgrind can run on every processor with AVX2.
 */
#include "count.h"
#include "kernel/kernel.h"
#include "world.h"

#include <string.h>

enum { PIECES = 16, ELEMENTS = 16 << 10, TIMES = 4 };

struct side {
    const struct hvd_plane *plane;
    void *opened;
    struct hvd_work work;
    struct hvd_piece piece[PIECES];
    float *memory;
};

static struct side both[2];

static void prepare(struct side *side, float *memory, uint32_t pieces, uint32_t flags)
{
    side->memory = memory;
    side->work = (struct hvd_work){.kind = HVD_ALLREDUCE,
                                   .op = HVD_OP_sum,
                                   .dtype = HVD_DTYPE_float32,
                                   .flags = flags,
                                   .divide_by = 2,
                                   .prescale = 1,
                                   .postscale = 1,
                                   .piece = side->piece,
                                   .pieces = pieces,
                                   .count = (uint64_t)PIECES * ELEMENTS};
    uint64_t each = side->work.count / pieces;
    for (uint32_t i = 0; i < pieces; i++)
        side->piece[i] = (struct hvd_piece){memory + i * each, memory + i * each, each};
}

static void once(void)
{
    struct hvd_error error = {0};
    int code[2];
    for (int rank = 0; rank < 2; rank++) {
        struct side *side = &both[rank];
        for (int i = 0; i < PIECES * ELEMENTS; i += ELEMENTS / 4)
            side->memory[i] = (float)rank + 1;
        code[rank] = side->plane->start(side->opened, &side->work, &error);
        CHECK(code[rank] == HVD_OK, "%s", error.text);
        code[rank] = HVD_AGAIN;
    }
    while (code[0] == HVD_AGAIN || code[1] == HVD_AGAIN)
        for (int rank = 0; rank < 2; rank++)
            if (code[rank] == HVD_AGAIN) {
                bool progress = false;
                code[rank] = both[rank].plane->poll(both[rank].opened, &both[rank].work, &progress, &error);
            }
    CHECK(code[0] == HVD_OK && code[1] == HVD_OK, "%s", error.text);
    for (int rank = 0; rank < 2; rank++)
        CHECK(both[rank].memory[ELEMENTS] == 3 && both[rank].memory[(PIECES - 1) * ELEMENTS] == 3, "a wrong sum");
}

static void count(const char *name)
{
    once();
    count_begin();
    for (int i = 0; i < TIMES; i++)
        once();
    count_end(name, 2 * TIMES);
}

static void rank_main(const struct hvd_plane_arg *arg, void *more)
{
    size_t bytes = sizeof(float) * PIECES * ELEMENTS;
    struct side *side = &both[arg->rank];
    side->plane = hvd_world_open(arg, "shm", &side->opened);
    float *private_memory = aligned_alloc(HVD_PAGE, bytes), *plane_memory = side->plane->alloc(side->opened, bytes);
    CHECK(private_memory && plane_memory, "no memory for %zu bytes", bytes);
    memset(private_memory, 0, bytes);
    memset(plane_memory, 0, bytes);

    prepare(side, private_memory, PIECES, 0);
    hvd_world_meet(arg);
    if (arg->rank == 0)
        count("pack-reduce-unpack-of-1MB");
    hvd_world_meet(arg);
    prepare(side, plane_memory, 1, HVD_WORK_IN_PLANE);
    hvd_world_meet(arg);
    if (arg->rank == 0)
        count("1MB-in-plane-memory");
    hvd_world_meet(arg);

    free(private_memory);
    side->plane->release(plane_memory);
    side->plane->close(side->opened);
}

int main(void)
{
    CHECK(hvd_kernel_use("avx2") == HVD_OK || hvd_kernel_use("portable") == HVD_OK, "no variant of the loops");
    hvd_world_run(HVD_WORLD_THREADS, 2, 120, rank_main, NULL);
    return 0;
}
