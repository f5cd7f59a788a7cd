/* test_nan_guard.c - the NaN guard through the engine: who had it is known to all ranks before the sum has spread it.
 */
#include "crew.h"

#include <math.h>

#define COUNT 300

static void fill(float *memory, int rank)
{
    for (int i = 0; i < COUNT; i++)
        memory[i] = (float)(rank + i);
}

static void has(const char *text, const char *words)
{
    CHECK_CODE(strstr(text, words) != NULL, 1, text);
}

/* What one sum comes to; `bad` of this rank's elements are `value`. */
static int sum_with(struct hvd_engine *engine, const char *name, int rank, int bad, float value, float *memory,
                    char *text)
{
    fill(memory, rank);
    for (int i = 0; i < bad; i++)
        memory[COUNT - 1 - 7 * i] = value;
    struct hvd_request request = crew_sum(name, memory, COUNT);
    int64_t handle = crew_begin(engine, &request);
    return crew_wait(engine, handle, text);
}

static void raises(struct hvd_engine *engine, int rank, int size)
{
    static char said[HVD_LOCAL_MAX][HVD_TEXT_MAX];
    char text[HVD_TEXT_MAX] = "", want[128];
    float memory[COUNT];
    int culprit = size - 1;
    for (int step = 0; step < 8; step++) {
        bool sick = step == 1 || step == 5;
        int code = sum_with(engine, "w", rank, sick && rank == culprit ? 3 : 0, NAN, memory, text);
        CHECK_CODE(code, sick ? HVD_ENAN : HVD_OK, text);
        if (sick)
            memcpy(said[rank], text, sizeof text);
        CHECK(sick || memory[1] == (float)(size + size * (size - 1) / 2));
    }
    snprintf(want, sizeof want, "tensor 'w', before its allreduce: rank %d had 3 NaN in 300 elements", culprit);
    has(said[rank], want);
    CHECK(size == 1 || strstr(said[rank], "the other ranks had none"));
    crew_meet();
    CHECK(strcmp(said[rank], said[0]) == 0);
    int infinite = sum_with(engine, "x", rank, 1, rank == 0 ? -INFINITY : 1, memory, text);
    CHECK_CODE(infinite, crew_nan_guard == HVD_GUARD_NAN ? HVD_OK : HVD_ENAN, text);
    CHECK(hvd_engine_guarded(engine, text, sizeof text) == 0); /* it has nothing to warn of */
}

/* Of many at once the sick one fails alone; and of what is not combined nothing is said. */
static void looks_where_it_matters(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    enum { MANY = 20 };
    static float memory[HVD_LOCAL_MAX][MANY][4];
    struct hvd_request request[MANY];
    const struct hvd_request *given[MANY];
    struct hvd_owner handle[MANY];
    char name[MANY][16];
    for (int i = 0; i < MANY; i++) {
        snprintf(name[i], sizeof name[i], "g%d", i);
        for (int k = 0; k < 4; k++)
            memory[rank][i][k] = i == 11 && rank == 0 ? NAN : 1;
        request[i] = crew_sum(name[i], memory[rank][i], 4);
        given[i] = &request[i];
    }
    CHECK_CODE(hvd_engine_submit_many(engine, given, MANY, handle, &error), MANY, error.text);
    for (int i = 0; i < MANY; i++) {
        CHECK_CODE(crew_wait(engine, handle[i].handle, text), i == 11 ? HVD_ENAN : HVD_OK, text);
        CHECK(i == 11 || memory[rank][i][3] == (float)size);
        if (i == 11)
            has(text, "'g11', before its allreduce: rank 0 had 4 NaN in 4 elements");
    }
    uint16_t half[4] = {0x3c00, 0xfc00, 0x7e00, 0x3c00}, got[4]; /* 1, -infinity, NaN, 1 */
    static const int kinds[] = {HVD_REDUCESCATTER, HVD_REDUCE, HVD_BROADCAST};
    for (int k = 0; k < 3; k++) {
        int64_t one = crew_submit(engine, kinds[k], "half", HVD_OP_max, HVD_DTYPE_float16, half, got, 4, &error);
        CHECK_CODE(crew_wait(engine, one, text), kinds[k] == HVD_BROADCAST ? HVD_OK : HVD_ENAN, text);
    }
    has(text, "1 NaN and 1 infinity in 4 elements");
    int64_t wide[2] = {-1, INT64_MAX};
    int64_t whole = crew_submit(engine, HVD_ALLREDUCE, "whole", HVD_OP_max, HVD_DTYPE_int64, wide, wide, 2, &error);
    CHECK_CODE(crew_wait(engine, whole, text), HVD_OK, text);
    int64_t empty = crew_submit(engine, HVD_ALLREDUCE, "empty", HVD_OP_sum, HVD_DTYPE_float32, NULL, NULL, 0, &error);
    CHECK_CODE(crew_wait(engine, empty, text), HVD_OK, text);
    int64_t unnamed = crew_submit(engine, HVD_ALLREDUCE, NULL, HVD_OP_sum, HVD_DTYPE_float16, half, got, 4, &error);
    CHECK_CODE(crew_wait(engine, unnamed, text), HVD_ENAN, text);
    has(text, "(unnamed), before its allreduce: rank");
}

/* In a set errors name ranks as the job does. */
static void in_a_set(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "", want[64];
    const int members[] = {0, size - 1};
    int number = crew_set_open(engine, members, 2, &error);
    CHECK_CODE(number > 0, 1, error.text);
    crew_barrier(engine);
    if (rank == 0 || rank == size - 1) {
        double value = rank ? NAN : 0;
        struct hvd_request request = {.name = "w",
                                      .op = HVD_OP_sum,
                                      .dtype = HVD_DTYPE_float64,
                                      .ndim = 1,
                                      .dims = {1},
                                      .prescale = 1,
                                      .postscale = 1,
                                      .input = &value,
                                      .output = &value,
                                      .process_set = number};
        CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_ENAN, text);
        snprintf(want, sizeof want, "rank %d had 1 NaN in 1 element", size - 1);
        has(text, want);
    }
    crew_barrier(engine);
    CHECK_CODE(hvd_engine_set_close(engine, number, &error), HVD_OK, error.text);
}

static void warns(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "", words[HVD_TEXT_MAX] = "", want[64];
    float memory[COUNT];
    for (int step = 0; step < 12; step++) {
        bool sick = step == 2 || step > 7;
        CHECK_CODE(sum_with(engine, "w", rank, sick && rank == size - 1, INFINITY, memory, text), HVD_OK, text);
        CHECK(memory[0] == (float)(size * (size - 1) / 2));
        CHECK(sick ? isinf(memory[COUNT - 1]) : !isinf(memory[COUNT - 1]));
        CHECK_CODE(hvd_engine_guarded(engine, words, sizeof words), sick, words);
    }
    snprintf(want, sizeof want, "rank %d had 1 infinity in 300 elements", size - 1);
    has(words, want);
}

static void warnings_are_counted(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "", words[HVD_TEXT_MAX] = "";
    float memory[COUNT];
    static const char *const name[] = {"first", "second", "third"};
    for (int i = 0; i < 3; i++)
        CHECK_CODE(sum_with(engine, name[i], rank, 1, rank == 0 ? NAN : 2, memory, text), HVD_OK, text);
    CHECK_CODE(hvd_engine_guarded(engine, words, sizeof words), 3, words);
    has(words, "'first', before its allreduce: rank 0 had 1 NaN in 300 elements");
    CHECK(size == 1 || strstr(words, "the other ranks had none"));
    CHECK(hvd_engine_guarded(engine, words, sizeof words) == 0);
    CHECK_CODE(sum_with(engine, "fourth", rank, 1, rank == 0 ? NAN : 2, memory, text), HVD_OK, text);
    CHECK_CODE(hvd_engine_guarded(engine, words, sizeof words), 1, words);
    has(words, "'fourth'");
}

static void off(struct hvd_engine *engine, int rank, int size)
{
    char text[HVD_TEXT_MAX] = "";
    float memory[COUNT];
    CHECK_CODE(sum_with(engine, "w", rank, 1, NAN, memory, text), HVD_OK, text);
    CHECK(isnan(memory[COUNT - 1]) && hvd_engine_guarded(engine, text, sizeof text) == 0);
}

int main(void)
{
    static const int sizes[] = {1, 2, 3};
    static const struct {
        int mode, least;
        crew_body *body;
    } tests[] = {
        {HVD_GUARD_RAISE, 1, raises},   {HVD_GUARD_NAN, 1, raises}, {HVD_GUARD_RAISE, 1, looks_where_it_matters},
        {HVD_GUARD_RAISE, 2, in_a_set}, {HVD_GUARD_WARN, 1, warns}, {HVD_GUARD_WARN, 1, warnings_are_counted},
        {HVD_GUARD_OFF, 1, off},
    };
    crew_deadline(200);
    for (int w = 0; crew_world(w); w++)
        for (size_t i = 0; i < HVD_COUNT_OF(tests); i++)
            for (size_t k = 0; k < HVD_COUNT_OF(sizes); k++)
                if (sizes[k] >= tests[i].least) {
                    crew_nan_guard = tests[i].mode;
                    crew_threads(sizes[k], tests[i].body);
                }
    return 0;
}
