/* test_guess.c - engines of several hosts that guess the next work: what left early for a work that was not agreed on,
 * or for one that was refused, is in no result. (What the plane makes of a guess is test_p2p_early.c's.)
 */
#include "crew.h"

static int64_t submit(struct hvd_engine *engine, const char *name, int dtype, void *memory)
{
    struct hvd_error error;
    int64_t handle = crew_submit(engine, HVD_ALLREDUCE, name, HVD_OP_sum, dtype, memory, memory, 3, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    return handle;
}

static void one_by_one(struct hvd_engine *engine, int rank, int size, int step)
{
    char text[HVD_TEXT_MAX] = "";
    double values[3] = {rank + step, 2 * step, 3 * rank};
    CHECK_CODE(crew_wait(engine, submit(engine, "x", HVD_DTYPE_float64, values), text), HVD_OK, text);
    double ranks = size * (size - 1) / 2;
    CHECK(values[0] == ranks + size * step && values[1] == 2.0 * size * step && values[2] == 3 * ranks);
}

/* Rank 0's first tensor of the name leaves early and is refused; the second one has the same shape and other values. */
static void what_was_refused_is_never_used(struct hvd_engine *engine, int rank, int size)
{
    for (int step = 0; step < 40; step++) {
        char text[HVD_TEXT_MAX] = "";
        double values[3] = {-1, -1, -1};
        for (int times = 0; times < 3; times++)
            one_by_one(engine, rank, size, step + 100 * times);
        int dtype = rank == 0 ? HVD_DTYPE_float64 : HVD_DTYPE_int64;
        CHECK_CODE(crew_wait(engine, submit(engine, "x", dtype, values), text), HVD_EMISMATCH, text);
        one_by_one(engine, rank, size, step + 1000);
    }
}

/* Two tensors that the ranks submit in other orders: at first each has one in flight. */
static void orders_may_differ(struct hvd_engine *engine, int rank, int size)
{
    for (int step = 0; step < 200; step++) {
        char text[HVD_TEXT_MAX] = "";
        double values[2][3] = {{step + rank, step, rank}, {-step, rank, 1}}, ranks = size * (size - 1) / 2;
        int first = (rank + step) % 2;
        int64_t handle[2];
        handle[first] = submit(engine, first ? "y" : "x", HVD_DTYPE_float64, values[first]);
        handle[!first] = submit(engine, first ? "x" : "y", HVD_DTYPE_float64, values[!first]);
        for (int i = 0; i < 2; i++)
            CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        CHECK(values[0][0] == ranks + size * step && values[0][1] == size * step && values[0][2] == ranks);
        CHECK(values[1][0] == -size * step && values[1][1] == ranks && values[1][2] == size);
    }
}

int main(void)
{
    crew_deadline(400);
    for (int w = CREW_HOSTS; crew_world(w); w++)
        for (int size = 2; size <= 4; size++) {
            crew_threads(size, what_was_refused_is_never_used);
            crew_threads(size, orders_may_differ);
        }
    return 0;
}
