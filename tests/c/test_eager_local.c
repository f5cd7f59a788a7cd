/* test_eager_local.c - small tensors that travel with the votes of one host have the bits of the shared-memory plane.
 *
 * Every dtype and op, around the sizes where a tensor no longer fits a round line and a board. Each tensor is reduced
 * twice: with the votes, and by the plane while all ranks sit out. Ranks that do not offer the same spoil it for all,
 * and lose nothing.
 */
#include "crew.h"

enum { ROOM = 2 * HVD_EAGER_BYTES, SIT_OUT = 1000000 };

static unsigned char by_votes[HVD_LOCAL_MAX][ROOM], by_plane[HVD_LOCAL_MAX][ROOM], other[HVD_LOCAL_MAX][64];

static void fill(unsigned char *memory, int rank, int dtype)
{
    uint32_t bits = (uint32_t)rank * 2654435761u + 12345;
    for (size_t i = 0; i < ROOM; i++) {
        bits = bits * 1664525u + 1013904223u;
        memory[i] = dtype == HVD_DTYPE_bool ? bits >> 31 : (unsigned char)(bits >> 24);
    }
}

/* With all ranks' votes from here on, or with none's. */
static void travel(struct hvd_engine *engine, bool travels)
{
    crew_meet();
    while (!hvd_turn_take(engine))
        ;
    engine->global->riders->resting = travels ? 0 : SIT_OUT;
    atomic_store(&engine->turn, 0);
    crew_meet();
}

static int64_t travelled(const struct hvd_engine *engine)
{
    return atomic_load(&engine->counter[HVD_COUNT_rides]);
}

/* False: there is no such op of this dtype. */
static bool reduce(struct hvd_engine *engine, unsigned char *memory, int op, int dtype, size_t bytes)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    int64_t count = (int64_t)(bytes / hvd_dtype_bytes(dtype));
    int64_t handle = crew_submit(engine, HVD_ALLREDUCE, "x", op, dtype, memory, memory, count, &error);
    if (handle > 0)
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    return handle > 0;
}

static void same_bits(struct hvd_engine *engine, int rank, int size)
{
    static const int ops[] = {HVD_OP_sum, HVD_OP_average, HVD_OP_min, HVD_OP_product};
    static const size_t sizes[] = {8, HVD_LINE_BYTES, HVD_LINE_BYTES + 8, HVD_EAGER_BYTES, HVD_EAGER_BYTES + 8};
    for (int dtype = 0; dtype <= HVD_DTYPE_float8_e5m2; dtype++)
        for (size_t op = 0; op < HVD_COUNT_OF(ops); op++)
            for (size_t i = 0; i < HVD_COUNT_OF(sizes); i++) {
                fill(by_votes[rank], rank, dtype);
                fill(by_plane[rank], rank, dtype);
                travel(engine, true);
                int64_t before = travelled(engine);
                bool can = reduce(engine, by_votes[rank], ops[op], dtype, sizes[i]);
                CHECK(travelled(engine) - before == (can && sizes[i] <= HVD_EAGER_BYTES));
                travel(engine, false);
                reduce(engine, by_plane[rank], ops[op], dtype, sizes[i]);
                CHECK(memcmp(by_votes[rank], by_plane[rank], sizes[i]) == 0);
            }
    CHECK(size > 1);
}

/* One rank has a second tensor in flight, and offers nothing; then others wait for that rank in vain, and all rest. */
static void spoilt(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    travel(engine, true);
    for (int i = 0; i < 300; i++) {
        float mine = (float)(rank + 1), *more = (float *)(void *)other[rank];
        struct hvd_request late = crew_sum("late", more, 1), first = crew_sum("first", &mine, 1);
        int64_t handle = 0;
        *more = (float)rank;
        if (rank == i % size)
            handle = crew_begin(engine, &late);
        CHECK_CODE(crew_wait(engine, crew_begin(engine, &first), text), HVD_OK, text);
        if (rank != i % size)
            handle = crew_begin(engine, &late);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
        CHECK(mine == (float)(size * (size + 1) / 2) && *more == (float)(size * (size - 1) / 2));
    }
}

int main(void)
{
    crew_deadline(300);
    for (int size = 2; size <= 4; size += 2) {
        crew_threads(size, same_bits);
        crew_threads(size, spoilt);
    }
    return 0;
}
