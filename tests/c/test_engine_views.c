/* test_engine_views.c - gradients that are views of one memory, as engines see them, over a GPU that is none
 * (tests/stub): from the second step on nobody copies them, also when the plan is learned and when a rank has joined;
 * and where one rank's lie elsewhere all agree on that, too.
 *
 * As in a backward pass the last tensor in memory is submitted first.
 */
#include "crew.h"
#include "gpus.h"

enum { TENSORS = 12, COUNT = 50, ROOM = TENSORS * (COUNT + TENSORS) };

struct step {
    bool grouped; /* as one bucket; else as they come */
    bool apart;   /* this rank has one of them elsewhere */
    int missing;  /* ranks that give nothing, the last ones */
};

static void step(struct hvd_engine *engine, int rank, int size, struct step how)
{
    static _Thread_local float flat[ROOM], elsewhere[2 * COUNT];
    float *at[TENSORS], *next = flat;
    int64_t handle[TENSORS];
    struct hvd_error error = {0};
    char name[16], text[HVD_TEXT_MAX] = "";
    for (int i = 0; i < TENSORS; i++) {
        at[i] = how.apart && i == 4 ? elsewhere : next;
        next += COUNT + i;
        for (int k = 0; k < COUNT + i; k++)
            at[i][k] = (float)(rank + 1) * (float)(i + k);
    }
    for (int i = TENSORS - 1; i >= 0; i--) {
        snprintf(name, sizeof name, "%c%d", how.grouped ? 'g' : 'w', i);
        struct hvd_request request = crew_sum(name, at[i], COUNT + i);
        request.device = rank + 1;
        request.prescale = 2;
        request.quiet = i > 0;
        request.group = how.grouped;
        request.group_count = how.grouped ? TENSORS : 0;
        handle[i] = hvd_engine_submit(engine, &request, &error);
        CHECK_CODE(handle[i] > 0, 1, error.text);
    }
    int gives = size - how.missing, sum = gives * (gives + 1); /* twice that */
    for (int i = 0; i < TENSORS; i++) {
        CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        for (int k = 0; k < COUNT + i; k++)
            CHECK(at[i][k] == (float)(sum * (i + k)));
    }
}

/* Launches of all ranks since the last time that all met here. */
static int launches(int rank)
{
    static int before, since;
    crew_meet();
    if (rank == 0) {
        since = gpus_calls("cuLaunchKernel") - before;
        before += since;
    }
    crew_meet();
    return since;
}

static void one_bucket_in_each_step(struct hvd_engine *engine, int rank, int size)
{
    struct step all = {.grouped = true}, one = {.grouped = true, .apart = rank == 0};
    launches(rank);
    step(engine, rank, size, all);
    CHECK(launches(rank) == 2 * size); /* nobody has seen one yet */
    int given = gpus_calls("ncclCommRegister") + gpus_calls("cuMemAlloc");
    for (int i = 0; i < 3; i++)
        step(engine, rank, size, all);
    CHECK(launches(rank) == 0 && gpus_calls("ncclCommRegister") + gpus_calls("cuMemAlloc") == given);
    for (int i = 0; i < 4; i++) {
        step(engine, rank, size, one);
        CHECK(launches(rank) == 2); /* of that rank, and nobody else needs to know */
    }
    step(engine, rank, size, one);
    CHECK(launches(rank) == 2 * size); /* it has been so for some time */
    step(engine, rank, size, all);
    CHECK(launches(rank) == 2 * size);
    step(engine, rank, size, all);
    CHECK(launches(rank) == 0);
}

static void join(struct hvd_engine *engine)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    int64_t handle = crew_submit(engine, HVD_JOIN, NULL, 0, 0, NULL, NULL, 0, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
}

static void as_they_come(struct hvd_engine *engine, int rank, int size)
{
    for (int i = 0; i < 6; i++)
        step(engine, rank, size, (struct step){0});
    launches(rank);
    int calls = gpus_calls("ncclAllReduce"), copies = gpus_calls("cuMemcpyDtoD");
    for (int i = 0; i < 6; i++)
        step(engine, rank, size, (struct step){0});
    CHECK(launches(rank) == 0 && gpus_calls("ncclAllReduce") > calls);
    CHECK(atomic_load(&engine->counter[HVD_COUNT_learned]) > 0);
    for (int i = 0; i < 4 && rank < size - 1; i++)
        step(engine, rank, size, (struct step){.missing = 1});
    join(engine);
    CHECK(launches(rank) == 0 && gpus_calls("cuMemcpyDtoD") == copies);
    for (int i = 0; i < 4; i++)
        step(engine, rank, size, (struct step){0});
    CHECK(launches(rank) == 0);
}

int main(void)
{
    crew_deadline(300);
    gpus_find();
    crew_threads(2, one_bucket_in_each_step);
    crew_threads(3, one_bucket_in_each_step);
    crew_threads(2, as_they_come);
    crew_threads(3, as_they_come);
    return 0;
}
