/* test_submit_batch.c - many requests in one call: all arrive, one wake-up; what is refused; what fails among those
 * that do not; and what memory the engine says it uses. */
#include "crew.h"
#include "gpus.h"

#define MANY 300

struct many {
    float memory[MANY];
    char name[MANY][16];
    struct hvd_request request[MANY];
    const struct hvd_request *given[MANY];
    struct hvd_owner handle[MANY];
};

static struct many *prepare(int rank)
{
    struct many *many = calloc(1, sizeof *many);
    CHECK(many);
    for (int i = 0; i < MANY; i++) {
        snprintf(many->name[i], sizeof many->name[i], "tensor %d", i);
        many->memory[i] = (float)(i + rank);
        many->request[i] = crew_sum(many->name[i], &many->memory[i], 1);
        many->given[i] = &many->request[i];
    }
    return many;
}

static int wait_all(struct hvd_engine *engine, struct hvd_owner *handles, int count, char *text)
{
    int code = HVD_AGAIN;
    for (int tries = 0; code == HVD_AGAIN && tries < 400; tries++)
        code = hvd_engine_wait_many(engine, handles, count, 50, text, HVD_TEXT_MAX);
    return code;
}

static void all_arrive(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    for (int step = 0; step < 6; step++) {
        struct many *many = prepare(rank);
        int first = step % 2 ? MANY / 3 : 0; /* in one call or two */
        CHECK_CODE(hvd_engine_submit_many(engine, many->given, first, many->handle, &error), first, error.text);
        CHECK_CODE(hvd_engine_submit_many(engine, many->given + first, MANY - first, many->handle + first, &error),
                   MANY - first, error.text);
        int64_t one = many->handle[7].handle;
        CHECK_CODE(wait_all(engine, many->handle, MANY, text), HVD_OK, text);
        for (int i = 0; i < MANY; i++)
            CHECK(many->memory[i] == (float)(size * i + size * (size - 1) / 2));
        CHECK(hvd_engine_poll(engine, one) == HVD_EHANDLE); /* forgotten */
        free(many);
    }
    CHECK_CODE(hvd_engine_wait_many(engine, (struct hvd_owner[]){{0, 0}, {0, 0}}, 2, 0, text, sizeof text), HVD_OK,
               text);
}

static void a_wait_ends_in_time(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    struct many *many = prepare(rank);
    int late = rank == size - 1 ? 5 : 0; /* the last rank gives the first five later */
    CHECK(hvd_engine_submit_many(engine, many->given + late, 10 - late, many->handle + late, &error) == 10 - late);
    if (rank == 0)
        CHECK_CODE(hvd_engine_wait_many(engine, many->handle, 10, 20, text, sizeof text), HVD_AGAIN, text);
    int64_t meet = crew_submit(engine, HVD_BARRIER, NULL, 0, 0, NULL, NULL, 0, &error);
    CHECK_CODE(crew_wait(engine, meet, text), HVD_OK, text);
    CHECK(hvd_engine_submit_many(engine, many->given, late, many->handle, &error) == late);
    CHECK_CODE(wait_all(engine, many->handle, 10, text), HVD_OK, text);
    CHECK(many->memory[0] == (float)(size * (size - 1) / 2));
    free(many);
}

static void a_refusal_tells_how_many_are_on_their_way(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    struct many *many = prepare(rank);
    many->request[4].dtype = 99;
    CHECK_CODE(hvd_engine_submit_many(engine, many->given, 9, many->handle, &error), 4, error.text);
    CHECK_CODE(error.code, HVD_ETYPE, error.text);
    CHECK_CODE(wait_all(engine, many->handle, 4, text), HVD_OK, text);
    CHECK(many->memory[3] == (float)(size * 3 + size * (size - 1) / 2));
    free(many);
}

static void one_that_fails_is_told_when_all_have_ended(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    struct many *many = prepare(rank);
    many->request[2].op = rank ? HVD_OP_max : HVD_OP_sum;
    CHECK(hvd_engine_submit_many(engine, many->given, 6, many->handle, &error) == 6);
    CHECK_CODE(wait_all(engine, many->handle, 6, text), HVD_EMISMATCH, text);
    CHECK(strstr(text, "tensor 2"));
    CHECK_CODE(wait_all(engine, many->handle, 6, text), HVD_EMISMATCH, text); /* as who was interrupted asks again */
    CHECK(many->memory[5] == (float)(size * 5 + size * (size - 1) / 2));
    free(many);
}

static void usage(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    struct hvd_error error = {0};
    for (int kind = 0; kind < HVD_USAGES_MAX; kind++)
        CHECK(hvd_engine_usage(engine, kind) >= 0);
    int64_t arena = hvd_engine_usage(engine, HVD_USAGE_arena), results = hvd_engine_usage(engine, HVD_USAGE_results);
    void *block = hvd_engine_alloc(engine, 100000);
    CHECK(block && hvd_engine_usage(engine, HVD_USAGE_arena) >= arena + 100000);
    int plane = 0;
    while (!hvd_planes[plane]->release)
        plane++;
    hvd_planes[plane]->release(block);
    CHECK(hvd_engine_usage(engine, HVD_USAGE_arena) == arena);
    float mine[1000] = {0};
    int64_t handle = crew_submit(engine, HVD_ALLGATHER, "rows", 0, HVD_DTYPE_float32, mine, NULL, 1000, &error);
    int code = HVD_AGAIN;
    while (code == HVD_AGAIN)
        code = hvd_engine_wait(engine, handle, 50, text, sizeof text);
    CHECK_CODE(code, HVD_OK, text);
    CHECK(hvd_engine_usage(engine, HVD_USAGE_results) == results + 4000 * size);
    hvd_engine_forget(engine, handle);
    CHECK(hvd_engine_usage(engine, HVD_USAGE_results) == results);
}

/* Who waits for many handles gets no marks, so what they stand for is done on the device. */
static void waits_for_devices_too(struct hvd_engine *engine, int rank, int size)
{
    enum { FEW = 5 };
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float value[FEW];
    void *gate = gpus_gate();
    for (int step = 0; step < 2; step++) {
        struct hvd_request request[FEW];
        const struct hvd_request *given[FEW];
        char name[FEW][8];
        struct hvd_owner handle[FEW];
        int64_t number[FEW];
        for (int i = 0; i < FEW; i++) {
            value[i] = (float)(rank + i);
            snprintf(name[i], sizeof name[i], "m%d", i);
            request[i] = crew_sum(name[i], &value[i], 1);
            request[i].ready = step == 0 && i == 2 ? gate : NULL;
            request[i].device = i == 3 ? 0 : rank + 1;
            given[i] = &request[i];
        }
        CHECK(hvd_engine_submit_many(engine, given, FEW, handle, &error) == FEW);
        for (int i = 0; i < FEW; i++)
            number[i] = handle[i].handle;
        int code = HVD_AGAIN;
        for (int i = 0, k = 0; i < FEW && step == 0 && k < 400; k++) {
            code = hvd_engine_wait(engine, handle[i].handle, 50, text, sizeof text);
            i += code == HVD_OK; /* it lies on the stream */
        }
        if (step == 0) {
            CHECK_CODE(hvd_engine_wait_many(engine, handle, FEW, 20, text, sizeof text), HVD_AGAIN, text);
            CHECK(value[2] == (float)(rank + 2));
            crew_meet();
            gpus_open_gate(gate);
        }
        code = HVD_AGAIN;
        for (int k = 0; k < 400 && code == HVD_AGAIN; k++)
            code = hvd_engine_wait_many(engine, handle, FEW, 50, text, sizeof text);
        CHECK_CODE(code, HVD_OK, text);
        for (int i = 0; i < FEW; i++)
            CHECK(value[i] == (float)(size * i + size * (size - 1) / 2) && handle[i].handle == 0 &&
                  hvd_engine_poll(engine, number[i]) == HVD_EHANDLE);
    }
    hvd_cuda_load(&error)->EventDestroy(gate);
}

int main(void)
{
    crew_deadline(60);
    gpus_find();
    for (int size = 1; size <= 4; size = size * 2) {
        crew_threads(size, all_arrive);
        crew_threads(size, a_refusal_tells_how_many_are_on_their_way);
        if (size > 1) {
            crew_threads(size, a_wait_ends_in_time);
            crew_threads(size, one_that_fails_is_told_when_all_have_ended);
            crew_threads(size, usage);
        }
        crew_threads(size, waits_for_devices_too);
    }
    return 0;
}
