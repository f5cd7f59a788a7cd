/* test_landing.c - where do the results of allgathers and alltoalls lie when the caller gives memory for them?
 *
 * There, if they have just the size that it said, and the input lies beside them or in its place; else in the engine's
 * memory, with the same values. In every kind of world, with several at once, without rows on some ranks or on all, and
 * with counts that all ranks know (even).
 */
#include "crew.h"

enum { APART, OWN, OVER, WRONG, NONE, WAYS, AT_ONCE = 3, STEPS = 6, MOST = 400000 };

struct asked {
    float *out; /* a block: the result's place, then one that the input may have */
    int64_t splits[HVD_LOCAL_MAX], total, handle;
    bool lands;
};

static bool is_even(int step, int k)
{
    return (step + k) % 3 == 2;
}

static int64_t rows_of(int kind, int from, int to, int step, int k)
{
    static const int64_t unit[AT_ONCE] = {0, 5, 20000};
    if (is_even(step, k))
        return unit[k];
    return (from + (kind == HVD_ALLTOALL ? to : 0) + step) % 3 * unit[k];
}

static void ask(struct hvd_engine *engine, int kind, int rank, int size, int step, int k, struct asked *asked)
{
    int64_t before = 0, given = 0, way = (step + k + rank) % WAYS;
    *asked = (struct asked){.out = calloc(2 * MOST, sizeof *asked->out)};
    for (int r = 0; r < size; r++) {
        before += r < rank ? rows_of(kind, r, rank, step, k) : 0;
        asked->total += rows_of(kind, r, rank, step, k);
        asked->splits[r] = kind == HVD_ALLTOALL || r == rank ? rows_of(kind, rank, r, step, k) : 0;
        given += asked->splits[r];
    }
    int64_t at = way == OVER ? asked->total / 2 : way == OWN && kind == HVD_ALLGATHER ? before : MOST;
    asked->lands = way < WRONG && (at == MOST || given == 0 || (kind == HVD_ALLGATHER && at == before));
    struct hvd_request request = crew_sum(NULL, NULL, given);
    request.kind = kind;
    request.input = asked->out + at;
    request.output = way == NONE ? NULL : asked->out;
    request.output_bytes = (asked->total + (way == WRONG)) * (int64_t)sizeof *asked->out;
    request.even = is_even(step, k);
    request.splits = kind == HVD_ALLTOALL && !request.even ? asked->splits : NULL, request.splits_count = size;
    for (int to = 0; to < size; to++)
        for (int64_t i = 0; i < asked->splits[to]; i++)
            asked->out[at++] = (float)(rank * 1000000 + i);
    asked->handle = crew_begin(engine, &request);
}

static void lands(struct hvd_engine *engine, int rank, int size)
{
    for (int step = 0; step < 2 * STEPS; step++) {
        int kind = step < STEPS ? HVD_ALLGATHER : HVD_ALLTOALL;
        struct asked asked[AT_ONCE];
        struct hvd_output got;
        char text[HVD_TEXT_MAX] = "";
        for (int k = 0; k < AT_ONCE; k++)
            ask(engine, kind, rank, size, step, k, &asked[k]);
        for (int k = 0; k < AT_ONCE; k++) {
            CHECK_CODE(crew_wait_only(engine, asked[k].handle, text), HVD_OK, text);
            CHECK(hvd_engine_result(engine, asked[k].handle, &got) == HVD_OK && got.rows == asked[k].total);
            CHECK((got.data == asked[k].out) == asked[k].lands);
            for (int from = 0, at = 0; from < size; from++)
                for (int64_t i = 0; i < rows_of(kind, from, rank, step, k); i++)
                    CHECK(((float *)got.data)[at++] == (float)(from * 1000000 + i));
            CHECK(hvd_engine_forget(engine, asked[k].handle) == HVD_OK);
            free(asked[k].out);
        }
    }
    CHECK(hvd_engine_usage(engine, HVD_USAGE_results) == 0);
}

int main(void)
{
    crew_deadline(200);
    for (int i = 0; crew_world(i / 4); i++)
        crew_threads(i % 4 + 1, lands);
    return 0;
}
