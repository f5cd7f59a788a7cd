/* test_engine_adasum.c - Adasum through engines: many tensors at once, ranks that join, a set of some ranks, and what
 * is refused. */
#include "crew.h"
#include "slow_adasum.h"

#include <math.h>

/* The thread sanitizer takes minutes for what is seconds without it. */
#if defined(__SANITIZE_THREAD__)
enum { TENSORS = 12, RANKS_MAX = 3 };
#else
enum { TENSORS = 40, RANKS_MAX = 7 };
#endif

static int64_t count_of(int tensor)
{
    return tensor == 7 ? 400001 : tensor == 8 ? 0 : 3 + 37 * tensor % 5000;
}

static void fill(double *to, int rank, int tensor)
{
    uint64_t own = 88172645463325252u + 977u * (uint64_t)rank + 31u * (uint64_t)tensor, common = 77u + (uint64_t)tensor;
    for (int warm = 0; warm < 20; warm++)
        slow_random(&own);
    for (int64_t i = 0; i < count_of(tensor); i++)
        to[i] = slow_random(&own) + 0.5 * slow_random(&common);
}

/* One tensor of float64 against the tree over ranks 0 to size - 1; those from `joined` on give nothing. */
static void check(const double *found, int tensor, int size, int joined)
{
    double *a[HVD_LOCAL_MAX];
    for (int rank = 0; rank < size; rank++) {
        a[rank] = calloc((size_t)count_of(tensor) + 1, sizeof *a[rank]);
        if (rank < joined)
            fill(a[rank], rank, tensor);
    }
    slow_adasum(a, size, (size_t)count_of(tensor));
    for (int64_t i = 0; i < count_of(tensor); i++)
        if (!(fabs(found[i] - a[0][i]) < 1e-11 * size)) {
            fprintf(stderr, "%d ranks, %d joined: element %lld of tensor %d is %.17g, not %.17g\n", size, size - joined,
                    (long long)i, tensor, found[i], a[0][i]);
            abort();
        }
    for (int rank = 0; rank < size; rank++)
        free(a[rank]);
}

static void tensors(struct hvd_engine *engine, int rank, int size, int joined)
{
    double *memory[TENSORS];
    int64_t handle[TENSORS];
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "", name[32];
    for (int k = 0; k < TENSORS; k++) {
        int tensor = (k + rank * 11) % TENSORS; /* in another order on every rank */
        memory[tensor] = malloc((size_t)(count_of(tensor) + 1) * sizeof *memory[tensor]);
        fill(memory[tensor], rank, tensor);
        snprintf(name, sizeof name, "delta.%d", tensor);
        handle[tensor] = crew_submit(engine, HVD_ALLREDUCE, name, HVD_OP_adasum, HVD_DTYPE_float64, memory[tensor],
                                     memory[tensor], count_of(tensor), &error);
        CHECK_CODE(handle[tensor] > 0, 1, error.text);
    }
    for (int k = 0; k < TENSORS; k++) {
        CHECK_CODE(crew_wait(engine, handle[k], text), HVD_OK, text);
        check(memory[k], k, size, joined);
        free(memory[k]);
    }
}

static void all_then_without_the_last(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    struct hvd_error error;
    for (int step = 0; step < 2; step++)
        tensors(engine, rank, size, size);
    if (rank != size - 1)
        tensors(engine, rank, size, size - 1);
    struct hvd_request request = {.kind = HVD_JOIN};
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
    tensors(engine, rank, size, size);
}

static void a_set_of_some_ranks(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    struct hvd_request barrier = {.kind = HVD_BARRIER};
    const int members[] = {0, size - 1};
    int number = crew_set_open(engine, members, 2, &error);
    CHECK_CODE(number > 0, 1, error.text);
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &barrier, &error), text), HVD_OK, text);
    if (rank == 0 || rank == size - 1) {
        float value[2] = {rank == 0, rank != 0}, both[2];
        struct hvd_request request = {.kind = HVD_ALLREDUCE,
                                      .name = "orthogonal",
                                      .op = HVD_OP_adasum,
                                      .dtype = HVD_DTYPE_float32,
                                      .ndim = 1,
                                      .dims = {2},
                                      .prescale = 2,
                                      .postscale = 3,
                                      .input = value,
                                      .output = both,
                                      .process_set = number};
        CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
        CHECK(both[0] == 6 && both[1] == 6);
    }
    tensors(engine, rank, size, size); /* and the global set goes on */
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &barrier, &error), text), HVD_OK, text);
    CHECK_CODE(hvd_engine_set_close(engine, number, &error), HVD_OK, error.text);
}

static void what_is_no_float_is_refused(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    double memory[4] = {0};
    for (int dtype = 0; dtype < HVD_DTYPES_MAX; dtype++)
        if (!strstr(hvd_dtype_name(dtype), "float")) {
            CHECK(crew_submit(engine, HVD_ALLREDUCE, "counter", HVD_OP_adasum, dtype, memory, memory, 4, &error) ==
                  HVD_EINVAL);
            CHECK(strstr(error.text, "counter") && strstr(error.text, "Adasum") && strstr(error.text, "cast"));
        }
}

int main(void)
{
    crew_deadline(200);
    for (int size = 1; size <= RANKS_MAX; size = size < 4 ? size + 1 : 2 * size - 1)
        crew_threads(size, all_then_without_the_last);
    crew_threads(2, what_is_no_float_is_refused);
    crew_threads(3, a_set_of_some_ranks);
    return 0;
}
