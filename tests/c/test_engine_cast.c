/* test_engine_cast.c - tensors on devices that may travel in 16 bits, as an engine sees them, over a GPU that is none
 * (tests/stub): they do by NCCL and between hosts, they never share a bucket with others, ranks have to agree on it,
 * and what may not be cast is refused.
 */
#include "crew.h"
#include "gpus.h"

enum { COUNT = 40, HALF = HVD_DTYPE_float16 + 1, BRAIN = HVD_DTYPE_bfloat16 + 1 };
static bool one_device; /* that all ranks use: NCCL is not for them */
static bool narrows;    /* 16 bits are really used */

static struct hvd_request sum_of(const char *name, float *memory, int64_t count, int wire, int rank)
{
    return (struct hvd_request){.kind = HVD_ALLREDUCE,
                                .name = name,
                                .op = HVD_OP_sum,
                                .dtype = HVD_DTYPE_float32,
                                .wire = wire,
                                .ndim = 1,
                                .dims = {count},
                                .prescale = 1,
                                .postscale = 1,
                                .input = memory,
                                .output = memory,
                                .device = one_device ? 1 : rank + 1};
}

static int64_t submit(struct hvd_engine *engine, const struct hvd_request *request)
{
    struct hvd_error error = {0};
    int64_t handle = hvd_engine_submit(engine, request, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    return handle;
}

/* A value that 16 bits cannot hold tells how its tensor has travelled. Twelve tensors of three kinds take turns; from
 * step 6 on, when their order was learned, they change their kinds. */
static void mixed(struct hvd_engine *engine, int rank, int size)
{
    enum { TENSORS = 12, STEPS = 12 };
    static const int kinds[] = {0, HALF, BRAIN};
    const float given = 1 + 1.0f / 4096, cast = 1;
    for (int step = 0; step < STEPS; step++) {
        static _Thread_local float memory[TENSORS][COUNT];
        int64_t handle[TENSORS];
        char text[HVD_TEXT_MAX] = "", name[8];
        for (int i = 0; i < TENSORS; i++) {
            for (int k = 0; k < COUNT; k++)
                memory[i][k] = given;
            snprintf(name, sizeof name, "t%d", i);
            struct hvd_request request = sum_of(name, memory[i], COUNT - i, kinds[(i + step / 6) % 3], rank);
            handle[i] = submit(engine, &request);
        }
        for (int i = 0; i < TENSORS; i++) {
            bool small = kinds[(i + step / 6) % 3] && narrows && size > 1;
            CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
            for (int k = 0; k < COUNT; k++)
                CHECK(memory[i][k] == (k < COUNT - i ? (float)size * (small ? cast : given) : given));
        }
    }
}

static void ranks_disagree(struct hvd_engine *engine, int rank, int size)
{
    float value[2] = {1, 2};
    char text[HVD_TEXT_MAX] = "";
    struct hvd_request request = sum_of("mixed", value, 2, rank == 1 ? HALF : 0, rank);
    CHECK_CODE(crew_wait(engine, submit(engine, &request), text), HVD_EMISMATCH, text);
    CHECK(strstr(text, "'mixed': ranks disagree on the dtype") && strstr(text, "rank 1") &&
          strstr(text, "said float32 compressed to float16") && strstr(text, "Submit the same dtype on all ranks"));
    mixed(engine, rank, size);
}

/* Who has joined gives nothing, in 16 bits. */
static void one_has_joined(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float value[2] = {(float)rank, 1 + 1.0f / 4096}, first = 1;
    struct hvd_request known = sum_of("first", &first, 1, HALF, rank); /* else it would have no device yet */
    CHECK_CODE(crew_wait(engine, submit(engine, &known), text), HVD_OK, text);
    if (rank > 0) {
        struct hvd_request request = sum_of("sum", value, 2, HALF, rank);
        CHECK_CODE(crew_wait(engine, submit(engine, &request), text), HVD_OK, text);
        CHECK(value[0] == (float)(size * (size - 1) / 2));
        CHECK(value[1] == (float)(size - 1));
    }
    int64_t handle = crew_submit(engine, HVD_JOIN, NULL, 0, 0, NULL, NULL, 0, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
}

static void refused(struct hvd_engine *engine, int rank, int size)
{
    float value = 1;
    struct hvd_error error = {0};
    (void)size;
    struct hvd_request right = sum_of("a", &value, 1, HALF, rank),
                       wrong[6] = {right, right, right, right, right, right};
    wrong[0].device = 0;
    wrong[1].kind = HVD_BROADCAST;
    wrong[2].dtype = HVD_DTYPE_float16;
    wrong[3].wire = HVD_DTYPE_float32 + 1;
    wrong[4].wire = -3;
    wrong[5].op = HVD_OP_adasum;
    for (size_t i = 0; i < HVD_COUNT_OF(wrong); i++)
        CHECK(hvd_engine_submit(engine, &wrong[i], &error) == HVD_EINVAL && strstr(error.text, "cannot travel as"));
}

int main(void)
{
    crew_deadline(500);
    gpus_find();
    crew_threads(1, refused);
    narrows = true;
    crew_threads(1, mixed);
    crew_threads(2, ranks_disagree);
    crew_threads(3, one_has_joined);
    one_device = true;
    crew_world(CREW_HOSTS); /* by way of the CPU, between hosts */
    int calls = gpus_calls("ncclAllReduce");
    crew_threads(2, mixed);
    crew_world(0); /* and on one, where nothing would be gained */
    narrows = false;
    crew_threads(2, mixed);
    CHECK(gpus_calls("ncclAllReduce") == calls);
    return 0;
}
