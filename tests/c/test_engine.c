/* test_engine.c - engines as threads of one process: collectives, errors, leaving. */
#include "crew.h"

#include <pthread.h>

static void reduce_one(struct hvd_engine *engine, int rank, int size, const char *name, int64_t count)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    float *memory = malloc(sizeof *memory * (size_t)(count + 1));
    for (int64_t i = 0; i < count; i++)
        memory[i] = (float)(rank + i % 17);
    int64_t handle =
        crew_submit(engine, HVD_ALLREDUCE, name, HVD_OP_sum, HVD_DTYPE_float32, memory, memory, count, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    for (int64_t i = 0; i < count; i++)
        CHECK(memory[i] == (float)(size * (size - 1) / 2) + (float)size * (float)(i % 17));
    free(memory);
}

static void sums_of_all_counts(struct hvd_engine *engine, int rank, int size)
{
    static const int64_t counts[] = {0, 1, 7, 15, 1000, 70000, 600001};
    for (int step = 0; step < 3; step++)
        for (size_t i = 0; i < HVD_COUNT_OF(counts); i++) {
            char name[32];
            snprintf(name, sizeof name, "tensor.%zu", i);
            reduce_one(engine, rank, size, step == 1 ? NULL : name, counts[i]);
        }
}

enum { MANY = 200 };

static void many_in_any_order(struct hvd_engine *engine, int rank, int size)
{
    static const int64_t count = 33;
    struct hvd_error error;
    float *memory = malloc(sizeof *memory * MANY * (size_t)count);
    int64_t handle[MANY];
    for (int step = 0; step < 5; step++) {
        unsigned seed = (unsigned)(rank * 977 + step * 31 + 1);
        int order[MANY];
        for (int i = 0; i < MANY; i++)
            order[i] = i;
        for (int i = MANY - 1; i > 0; i--) {
            int j = (int)((seed = seed * 1103515245u + 12345u) >> 8) % (i + 1), swap = order[i];
            order[i] = order[j];
            order[j] = swap;
        }
        for (int i = 0; i < MANY; i++) {
            char name[32];
            snprintf(name, sizeof name, "grad.%d", order[i]);
            float *tensor = memory + order[i] * count;
            for (int64_t k = 0; k < count; k++)
                tensor[k] = (float)(order[i] + rank);
            handle[order[i]] = crew_submit(engine, HVD_ALLREDUCE, name, HVD_OP_average, HVD_DTYPE_float32, tensor,
                                           tensor, count, &error);
            CHECK_CODE(handle[order[i]] > 0, 1, error.text);
        }
        for (int i = 0; i < MANY; i++) {
            char text[HVD_TEXT_MAX] = "";
            CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
            for (int64_t k = 0; k < count; k++)
                CHECK(memory[i * count + k] ==
                      ((float)(i * size) + (float)(size * (size - 1) / 2)) * (float)(1.0 / size));
        }
    }
    free(memory);
}

static void gathers_broadcasts_barriers(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    for (int step = 0; step < 4; step++) {
        /* rank r gives r + step rows; rank 0 gives none in the first step */
        int32_t mine[64], root[3] = {0};
        int64_t rows = rank + step, handles[3];
        struct hvd_request request = {.name = "gathered",
                                      .kind = HVD_ALLGATHER,
                                      .dtype = HVD_DTYPE_int32,
                                      .ndim = 2,
                                      .dims = {rows, 2},
                                      .input = mine};
        for (int64_t i = 0; i < rows * 2; i++)
            mine[i] = rank * 100 + (int)i;
        for (int i = 0; i < 3; i++) {
            char name[32];
            snprintf(name, sizeof name, "gathered.%d", i);
            request.name = name;
            memset(&error, 0, sizeof error);
            handles[i] = crew_begin(engine, &request);
        }
        for (int i = 0; i < 3; i++) {
            int code = HVD_AGAIN;
            while (code == HVD_AGAIN)
                code = hvd_engine_wait(engine, handles[i], 50, text, sizeof text);
            CHECK_CODE(code, HVD_OK, text);
            struct hvd_output output;
            CHECK(hvd_engine_result(engine, handles[i], &output) == HVD_OK);
            int64_t total = 0, at = 0;
            for (int peer = 0; peer < size; peer++) {
                CHECK(output.rows_of[peer] == peer + step);
                for (int64_t k = 0; k < (peer + step) * 2; k++)
                    CHECK(((int32_t *)output.data)[at++] == peer * 100 + (int)k);
                total += peer + step;
            }
            CHECK(output.rows == total && output.bytes == total * 8);
            CHECK(hvd_engine_forget(engine, handles[i]) == HVD_OK);
        }
        int from = step % size;
        if (rank == from)
            root[0] = root[1] = root[2] = 7 + step;
        request = (struct hvd_request){.name = "root",
                                       .kind = HVD_BROADCAST,
                                       .dtype = HVD_DTYPE_int32,
                                       .ndim = 1,
                                       .dims = {3},
                                       .root = from,
                                       .input = root,
                                       .output = root};
        request.name = step % 2 ? NULL : "other root"; /* the root may change: it is part of the signature */
        int64_t handle = hvd_engine_submit(engine, &request, &error);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
        CHECK(root[0] == 7 + step && root[2] == 7 + step);
        request = (struct hvd_request){.kind = HVD_BARRIER};
        handle = hvd_engine_submit(engine, &request, &error);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    }
}

static void mismatches(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    float memory[64] = {0};
    char text[HVD_TEXT_MAX] = "";
    for (int step = 0; step < 3; step++) {
        int64_t count = rank == size - 1 ? 5 : 4;
        uint64_t begun = hvd_now_ns();
        int64_t handle = crew_submit(engine, HVD_ALLREDUCE, "conv1.weight", HVD_OP_sum, HVD_DTYPE_float32, memory,
                                     memory, count, &error);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_EMISMATCH, text);
        CHECK(hvd_now_ns() - begun < 1000000000u * (uint64_t)(size > 4 ? 10 : 1));
        CHECK(strstr(text, "conv1.weight") && strstr(text, "[5]") && strstr(text, "[4]"));
        reduce_one(engine, rank, size, "conv1.weight", 12); /* the engine goes on */
    }
}

static void duplicate_name(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    float memory[4] = {0};
    char text[HVD_TEXT_MAX] = "";
    if (rank == 0) {
        int64_t first =
            crew_submit(engine, HVD_ALLREDUCE, "twice", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error);
        int64_t second =
            crew_submit(engine, HVD_ALLREDUCE, "twice", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error);
        CHECK_CODE(crew_wait(engine, second, text), HVD_EDUP, text);
        CHECK(strstr(text, "twice"));
        reduce_one(engine, rank, size, "gate", 1);
        CHECK_CODE(crew_wait(engine, first, text), HVD_OK, text);
    } else {
        reduce_one(engine, rank, size, "gate", 1); /* only now does the first get its partner */
        int64_t handle =
            crew_submit(engine, HVD_ALLREDUCE, "twice", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
    }
}

static void leaving_is_named(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    float memory[4] = {0};
    char text[HVD_TEXT_MAX] = "";
    reduce_one(engine, rank, size, "before", 3);
    if (rank == 1)
        return; /* leaves first: what the others have pending can never be done */
    int64_t handle =
        crew_submit(engine, HVD_ALLREDUCE, "after", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_EPEER, text);
    CHECK(strstr(text, "rank 1 left") && strstr(text, "after"));
    handle = crew_submit(engine, HVD_ALLREDUCE, "later", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_EPEER, text);
    CHECK(strstr(text, "rank 1 left"));
}

static void aborting_reaches_all(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    float memory[4] = {0};
    char text[HVD_TEXT_MAX] = "";
    if (rank == size - 1) {
        char reason[2 * HVD_TEXT_MAX]; /* too long for a seat and for a frame: its code goes everywhere */
        hvd_text_write(reason, sizeof reason, HVD456 "ValueError: boom%3000s", "");
        hvd_engine_abort(engine, rank, HVD_EPEER, reason);
        return;
    }
    int64_t handle =
        crew_submit(engine, HVD_ALLREDUCE, "after", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_EPEER, text);
    CHECK_CODE(strstr(text, "boom") && !strcmp(text + strlen(text) - 9, " [HVD456]"), 1, text);
    CHECK(engine->failure.culprit == size - 1);
}

static void local_mistakes(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    float memory[4] = {0};
    char text[HVD_TEXT_MAX];
    CHECK(crew_submit(engine, HVD_ALLREDUCE, "x", HVD_OP_sum, 99, memory, memory, 4, &error) == HVD_ETYPE);
    CHECK(crew_submit(engine, HVD_ALLREDUCE, "x", 6, HVD_DTYPE_float32, memory, memory, 4, &error) == HVD_EINVAL);
    CHECK(crew_submit(engine, HVD_ALLREDUCE, "x", HVD_OP_average, HVD_DTYPE_bool, memory, memory, 4, &error) ==
          HVD_EINVAL);
    CHECK(crew_submit(engine, HVD_ALLREDUCE, "x", HVD_OP_sum, HVD_DTYPE_float32, NULL, memory, 4, &error) ==
          HVD_EINVAL);
    CHECK(crew_submit(engine, HVD_ALLREDUCE, "x", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, -4, &error) ==
          HVD_EINVAL);
    CHECK(crew_submit(engine, 99, "x", HVD_OP_sum, HVD_DTYPE_float32, memory, memory, 4, &error) == HVD_EINVAL);
    struct hvd_request request = {.name = "x",
                                  .kind = HVD_BROADCAST,
                                  .dtype = HVD_DTYPE_int8,
                                  .ndim = 1,
                                  .dims = {1},
                                  .root = size,
                                  .input = memory,
                                  .output = memory};
    memset(&error, 0, sizeof error);
    CHECK(hvd_engine_submit(engine, &request, &error) == HVD_EINVAL && strstr(error.text, "root rank"));
    CHECK(hvd_engine_wait(engine, 12345, 0, text, sizeof text) == HVD_EHANDLE);
    CHECK(hvd_engine_wait(engine, -1, 0, text, sizeof text) == HVD_EHANDLE);
    CHECK(hvd_engine_forget(engine, 1 << 16) == HVD_EHANDLE);
    reduce_one(engine, rank, size, "x", 4);
}

static void joining(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    /* rank r makes r + 1 steps, then joins; the sum is over those that are still there */
    for (int step = 0; step <= rank; step++) {
        float value = (float)(rank + 1), want = 0;
        int64_t handle =
            crew_submit(engine, HVD_ALLREDUCE, "step", HVD_OP_sum, HVD_DTYPE_float32, &value, &value, 1, &error);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
        for (int peer = step; peer < size; peer++)
            want += (float)(peer + 1);
        CHECK(value == want);
    }
    struct hvd_request request = {.kind = HVD_JOIN};
    struct hvd_output output;
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    int code;
    while ((code = hvd_engine_wait(engine, handle, 50, text, sizeof text)) == HVD_AGAIN)
        ;
    CHECK_CODE(code, HVD_OK, text);
    CHECK(hvd_engine_result(engine, handle, &output) == HVD_OK && output.rows == size - 1);
    CHECK(hvd_engine_forget(engine, handle) == HVD_OK);
    reduce_one(engine, rank, size, "step", 8);
}

/* Memory from alloc is summed where it lies; mixed with private memory it still is right. */
static void plane_memory(struct hvd_engine *engine, int rank, int size)
{
    enum { COUNT = 50000 };
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    float *shared = hvd_engine_alloc(engine, COUNT * sizeof *shared), *own = malloc(COUNT * sizeof *own);
    CHECK(shared);
    for (int step = 0; step < 4; step++) {
        /* all in the plane; one rank not; none; all again (the flag of a known tensor may change) */
        float *memory = step == 2 || (step == 1 && rank == 0) ? own : shared;
        for (int i = 0; i < COUNT; i++)
            memory[i] = (float)(rank * 3 + i % 11 + step);
        int64_t handle = crew_submit(engine, HVD_ALLREDUCE, "lies there", HVD_OP_sum, HVD_DTYPE_float32, memory, memory,
                                     COUNT, &error);
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
        for (int i = 0; i < COUNT; i++)
            CHECK(memory[i] == (float)(3 * size * (size - 1) / 2 + size * (i % 11 + step)));
    }
    hvd_free(shared);
    free(own);
}

/* Several threads per rank, each with its own names, in an order of its own. */
struct thread_of_rank {
    struct hvd_engine *engine;
    int rank, size, number;
};

static void *thread_steps(void *self)
{
    struct thread_of_rank *mine = self;
    for (int step = 0; step < 20; step++) {
        char name[32];
        snprintf(name, sizeof name, "thread.%d", mine->number);
        reduce_one(mine->engine, mine->rank, mine->size, name, 40 + mine->number);
    }
    return NULL;
}

static void several_threads(struct hvd_engine *engine, int rank, int size)
{
    pthread_t thread[4];
    struct thread_of_rank mine[4];
    for (int i = 0; i < 4; i++) {
        mine[i] = (struct thread_of_rank){engine, rank, size, i};
        CHECK(pthread_create(&thread[i], NULL, thread_steps, &mine[i]) == 0);
    }
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
}

int main(void)
{
    static const int sizes[] = {1, 2, 3, 4, 7};
    static const struct {
        const char *name;
        crew_body *body;
        int least;
    } tests[] = {
        {"sums of all counts", sums_of_all_counts, 1},
        {"many in any order", many_in_any_order, 1},
        {"gathers, broadcasts, barriers", gathers_broadcasts_barriers, 1},
        {"mismatches name the tensor and both sayings", mismatches, 2},
        {"a duplicate name is refused, the first goes on", duplicate_name, 2},
        {"a rank that left is named", leaving_is_named, 2},
        {"an abort reaches all", aborting_reaches_all, 2},
        {"local mistakes disturb nobody", local_mistakes, 1},
        {"joined ranks give zeros", joining, 1},
        {"memory of the plane is summed where it lies", plane_memory, 2},
        {"several threads per rank", several_threads, 1},
    };
    crew_deadline(300);
    const char *world;
    for (int w = 0; (world = crew_world(w)); w++)
        for (size_t i = 0; i < HVD_COUNT_OF(tests); i++)
            for (size_t k = 0; k < HVD_COUNT_OF(sizes); k++)
                if ((w == 0 || (sizes[k] < 5 && tests[i].body != plane_memory)) && sizes[k] >= tests[i].least) {
                    uint64_t begun = hvd_now_ns();
                    crew_threads(sizes[k], tests[i].body);
                    printf("%s: %s, %d ranks: %.0f ms\n", world, tests[i].name, sizes[k],
                           (double)(hvd_now_ns() - begun) / 1e6);
                    fflush(stdout);
                }
    crew_world(0);
    return 0;
}
