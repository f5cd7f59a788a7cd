/* test_engine_rows.c - allgathers and alltoalls of tensors on devices, whose sizes nobody knows before they are agreed,
 * over a GPU that is none (tests/stub): that NCCL does them, with rows that differ and none at all, beside sums in sets
 * that overlap, and in groups; that no thread waits for a device; and that memory for results is given again, but never
 * too early.
 */
#define _GNU_SOURCE
#include "crew.h"
#include "gpus.h"

#include <unistd.h>

enum { WIDTH = 3, MOST = 4000 };

static int shared_device = -1; /* that all ranks use; -1: each its own */

static struct hvd_request rows_of(int kind, const char *name, const float *in, int64_t rows, const int64_t *splits,
                                  int size, int rank)
{
    struct hvd_request request = crew_sum(name, NULL, rows);
    request.kind = kind;
    request.op = 0;
    request.ndim = 2;
    request.dims[1] = WIDTH;
    request.input = in;
    request.splits = splits;
    request.splits_count = splits ? size : 0;
    request.device = (shared_device < 0 ? rank : shared_device) + 1;
    return request;
}

/* Waits, has the result copied on a stream, and forgets the handle at once. How many rows came. */
static int64_t fetched(struct hvd_engine *engine, int64_t handle, float *to, int64_t *from_each, void *stream)
{
    struct hvd_error error = {0};
    struct hvd_output output;
    char text[HVD_TEXT_MAX] = "";
    CHECK_CODE(crew_wait_only(engine, handle, text), HVD_OK, text);
    CHECK(hvd_engine_result(engine, handle, &output) == HVD_OK && output.bytes <= MOST * (int64_t)sizeof *to);
    CHECK(output.bytes == output.rows * WIDTH * (int64_t)sizeof *to);
    if (from_each)
        memcpy(from_each, output.rows_of, sizeof *from_each * (size_t)output.size);
    CHECK_CODE(hvd_engine_fetch(engine, handle, (uintptr_t)to, stream, &error), HVD_OK, error.text);
    CHECK(hvd_engine_forget(engine, handle) == HVD_OK);
    return output.rows;
}

static int64_t rows_at(int step, int rank) /* that a rank gives */
{
    return (step + 2 * rank) % 4 == 0 ? 0 : 5 * step + rank;
}

static int64_t goes(int step, int from, int to)
{
    return (step + from + to) % 3 * (from + 2);
}

static void gather_and_exchange(struct hvd_engine *engine, int rank, int size, int step, void *stream)
{
    float in[MOST], out[MOST], all[MOST];
    int64_t splits[HVD_LOCAL_MAX], from_each[HVD_LOCAL_MAX], given = 0, got, at = 0;
    for (int i = 0; i < MOST; i++)
        in[i] = (float)(10000 * rank + i);
    struct hvd_request request = rows_of(HVD_ALLGATHER, "gather", in, rows_at(step, rank), NULL, size, rank);
    int64_t gather = crew_begin(engine, &request);
    for (int to = 0; to < size; to++)
        given += splits[to] = goes(step, rank, to);
    request = rows_of(HVD_ALLTOALL, "exchange", in, given, splits, size, rank);
    int64_t exchange = crew_begin(engine, &request);
    got = fetched(engine, gather, all, from_each, stream);
    int64_t came = fetched(engine, exchange, out, from_each, stream);
    gpus_stream_end(stream);
    for (int from = 0; from < size; from++)
        for (int64_t i = 0; i < rows_at(step, from) * WIDTH; i++)
            CHECK(all[at++] == (float)(10000 * from + i));
    CHECK(at == got * WIDTH);
    at = 0;
    for (int from = 0; from < size; from++) {
        int64_t before = 0;
        CHECK(from_each[from] == goes(step, from, rank));
        for (int to = 0; to < rank; to++)
            before += goes(step, from, to) * WIDTH;
        for (int64_t i = 0; i < goes(step, from, rank) * WIDTH; i++)
            CHECK(out[at++] == (float)(10000 * from + before + i));
    }
    CHECK(at == came * WIDTH);
}

static void ragged(struct hvd_engine *engine, int rank, int size)
{
    for (int step = 0; step < 12; step++)
        gather_and_exchange(engine, rank, size, step, gpus_stream(shared_device < 0 ? rank : shared_device));
}

/* The same sizes again and again take no memory but in the first step; of growing ones what is outgrown is kept, and
 * all of it is at most three times the largest. */
static void memory_is_given_again(struct hvd_engine *engine, int rank, int size)
{
    static float in[MOST], out[2][MOST];
    uint64_t most = 0;
    int before = gpus_calls("cuMemAlloc"), made = 0, freed = gpus_calls("cuMemFree");
    crew_meet();
    for (int step = 0; step < 20; step++) {
        void *stream = gpus_stream(rank);
        struct hvd_request request = rows_of(HVD_ALLGATHER, "same", in, 10 + step % 3, NULL, size, rank);
        fetched(engine, crew_begin(engine, &request), out[rank], NULL, stream);
        gpus_stream_end(stream);
        crew_meet();
        if (step == 4)
            made = gpus_calls("cuMemAlloc");
        crew_meet();
    }
    CHECK(gpus_calls("cuMemAlloc") == made && made - before <= 2 * size);
    crew_meet();
    for (int rows = 20; rows < MOST / WIDTH / size; rows = rows * 3 / 2) {
        void *stream = gpus_stream(rank);
        struct hvd_request request = rows_of(HVD_ALLGATHER, "grows", in, rows, NULL, size, rank);
        fetched(engine, crew_begin(engine, &request), out[rank], NULL, stream);
        gpus_stream_end(stream);
        most = (uint64_t)(rows * size * WIDTH) * sizeof(float);
    }
    crew_meet();
    /* all ranks' lie there, and a block is larger than was asked for by half, and an eighth, at most */
    CHECK(hvd_block_bytes() >= most && hvd_block_bytes() <= (uint64_t)size * 3 * (most * 7 / 4 + 4096));
    CHECK(gpus_calls("cuMemFree") == freed);
    CHECK(hvd_engine_usage(engine, HVD_USAGE_devices) >= (int64_t)most);
    crew_meet(); /* an engine that ends frees what nobody has, of the other threads, too */
}

/* A result is on its way to a stream that is held up; the next one of that size must not be written over it. */
static void not_too_early(struct hvd_engine *engine, int rank, int size)
{
    enum { ROWS = 50 };
    float in[2][ROWS * WIDTH], out[2][8 * ROWS * WIDTH];
    const struct hvd_cuda *cuda = hvd_cuda_load(NULL);
    void *held = gpus_gate(), *stream = gpus_stream(rank);
    CHECK(cuda->StreamWaitEvent(stream, held, 0) == 0);
    struct hvd_output output;
    char text[HVD_TEXT_MAX] = "";
    int64_t handle[2];
    uintptr_t block[2];
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < ROWS * WIDTH; k++)
            in[i][k] = (float)(100 * i + rank);
        struct hvd_request request = rows_of(HVD_ALLGATHER, "rows", in[i], ROWS, NULL, size, rank);
        handle[i] = crew_begin(engine, &request);
        CHECK_CODE(crew_wait_only(engine, handle[i], text), HVD_OK, text); /* which no device holds up */
        CHECK(hvd_engine_result(engine, handle[i], &output) == HVD_OK);
        block[i] = (uintptr_t)output.data;
        if (i == 0)
            fetched(engine, handle[0], out[0], NULL, stream);
        crew_meet();
    }
    CHECK(block[0] == block[1]);
    usleep(20000);
    CHECK(hvd_engine_poll(engine, handle[1]) == HVD_AGAIN); /* it waits for the copy of the first */
    fetched(engine, handle[1], out[1], NULL, stream);
    crew_meet();
    gpus_open_gate(held);
    gpus_stream_end(stream);
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < size * ROWS * WIDTH; k++)
            CHECK(out[i][k] == (float)(100 * i + k / (ROWS * WIDTH)));
    cuda->EventDestroy(held);
}

/* Nobody fetches it, and it is forgotten before its tensor is ready. */
static void nobody_fetches(struct hvd_engine *engine, int rank, int size)
{
    static float in[4][WIDTH];
    float out[MOST];
    char text[HVD_TEXT_MAX] = "";
    void *gate = gpus_gate(), *stream = gpus_stream(rank);
    struct hvd_request request = rows_of(HVD_ALLGATHER, "dropped", in[rank], 1, NULL, size, rank);
    in[rank][0] = 7;
    request.ready = gate;
    int64_t handle = crew_begin(engine, &request);
    CHECK_CODE(crew_wait_only(engine, handle, text), HVD_OK, text);
    CHECK(hvd_engine_forget(engine, handle) == HVD_OK);
    crew_meet();
    gpus_open_gate(gate);
    request.ready = NULL;
    request.name = "kept";
    CHECK(fetched(engine, crew_begin(engine, &request), out, NULL, stream) == size);
    gpus_stream_end(stream);
    CHECK(out[0] == 7 && out[(size - 1) * WIDTH] == 7);
    CHECK(hvd_cuda_load(NULL)->EventDestroy(gate) == 0);
}

enum { OVERLAP_STEPS = 25, OVERLAP_FEW = 4, OVERLAP_MANY = 300 }; /* whole 16 bytes: a bucket has no gaps */
enum { SETS = 4, EACH = 6, MANY = SETS * EACH };
static const int set_ranks[SETS][4] = {{0, 1, 2, 3}, {0, 1, 3, -1}, {1, 2, -1, -1}, {0, 2, 3, -1}};
static const int set_members[SETS] = {4, 3, 2, 3}, set_sum[SETS] = {6, 4, 3, 5};

/* The i-th of a step: of each set three sums, the second one of the CPU, and three gathers, two of them a group. */
static struct hvd_request overlapping(int i, const char *name, float *value, int set, int rank, int step)
{
    int which = i / EACH, kind = i % EACH;
    struct hvd_request request = crew_sum(name, value, which % 2 ? OVERLAP_FEW : OVERLAP_MANY);
    if (kind > 2)
        request = rows_of(HVD_ALLGATHER, name, value, (i + rank + step) % 4, NULL, set_members[which], rank);
    request.device = kind == 1 ? 0 : rank + 1;
    request.process_set = set;
    request.group = kind > 3 ? (uint64_t)(100 + which) : 0;
    request.group_count = kind > 3 ? 2 : 0;
    return request;
}

static void overlapped(struct hvd_engine *engine, int i, int64_t handle, const float *value, int rank, int step)
{
    int set = i / EACH;
    char text[HVD_TEXT_MAX] = "";
    float out[MOST];
    int64_t at = 0;
    if (i % EACH < 3) {
        CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
        CHECK(value[0] == (float)(set_sum[set] + set_members[set] * (i + step)));
        return;
    }
    void *stream = gpus_stream(rank);
    int64_t rows = fetched(engine, handle, out, NULL, stream);
    gpus_stream_end(stream);
    for (int from = 0; from < set_members[set]; from++)
        for (int row = 0; row < (i + set_ranks[set][from] + step) % 4; row++, at++)
            CHECK(out[at * WIDTH] == (float)(set_ranks[set][from] + i + step));
    CHECK(at == rows);
}

/* Sets that overlap in every way, and the global one: each rank gives what it has to give in an order and at times of
 * its own. A device works off one after the other, so two orders would end in a deadlock, here as on a GPU. */
static void sets_overlap(struct hvd_engine *engine, int rank, int size)
{
    static _Thread_local float value[MANY][OVERLAP_MANY];
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "", name[16];
    int number[SETS] = {0}, order[MANY];
    unsigned seed = (unsigned)rank * 77 + 1;
    for (int i = 1; i < SETS; i++)
        CHECK_CODE((number[i] = crew_set_open(engine, set_ranks[i], set_members[i], &error)) > 0, 1, error.text);
    crew_barrier(engine);
    for (int step = 0; step < OVERLAP_STEPS; step++) {
        int64_t handle[MANY] = {0};
        for (int k = 0; k < MANY; k++) {
            int other = rand_r(&seed) % (k + 1);
            order[k] = order[other];
            order[other] = k;
        }
        for (int k = 0; k < MANY; k++) {
            int i = order[k], set = i / EACH;
            bool member = false;
            for (int at = 0; at < set_members[set]; at++)
                member |= set_ranks[set][at] == rank;
            for (int at = 0; at < OVERLAP_MANY; at++)
                value[i][at] = (float)(rank + i + step);
            snprintf(name, sizeof name, "t%d", i);
            struct hvd_request request = overlapping(i, name, value[i], number[set], rank, step);
            handle[i] = member ? crew_begin(engine, &request) : 0;
            if (rand_r(&seed) % 4 == 0)
                usleep(rand_r(&seed) % 300);
        }
        for (int k = 0; k < MANY; k++) {
            int i = order[(k + step) % MANY];
            if (handle[i])
                overlapped(engine, i, handle[i], value[i], rank, step);
        }
    }
    CHECK(size == 4 && hvd_engine_notice(engine, text, sizeof text) == 0);
    crew_barrier(engine);
    for (int i = 1; i < SETS; i++)
        CHECK_CODE(hvd_engine_set_close(engine, number[i], &error), HVD_OK, error.text);
}

/* All of them by NCCL, and each element once. How many calls that is hangs on timing: two tensors of a set that were
 * agreed in one round travel in one bucket, which is one call since buckets are packed. So elements are counted: in
 * sets of 4, 3, 2 and 3 ranks, two tensors each on devices; the 1st and 3rd set's are the long ones. */
static void by_nccl_in_overlapping_sets(void)
{
    enum { LONG = 2 * OVERLAP_STEPS * (4 + 2), SHORT = 2 * OVERLAP_STEPS * (3 + 3) };
    int calls = gpus_calls("ncclAllReduce"), elements = gpus_calls("elements of ncclAllReduce");
    crew_threads(4, sets_overlap);
    calls = gpus_calls("ncclAllReduce") - calls;
    CHECK(gpus_calls("elements of ncclAllReduce") - elements == LONG * OVERLAP_MANY + SHORT * OVERLAP_FEW);
    CHECK(calls <= LONG + SHORT && calls >= (LONG + SHORT) / 2);
}

/* The device has no memory left: what lies idle is freed, and that may do; if not, the job ends with words. */
static void no_memory(struct hvd_engine *engine, int rank, int size)
{
    static float in[MOST], out[MOST];
    char text[HVD_TEXT_MAX] = "";
    void *stream = gpus_stream(rank);
    struct hvd_request request = rows_of(HVD_ALLGATHER, "small", in, 10, NULL, size, rank);
    fetched(engine, crew_begin(engine, &request), out, NULL, stream);
    gpus_stream_end(stream);
    int freed = gpus_calls("cuMemFree");
    gpus_fail("cuMemAlloc", 1, 2);
    request = rows_of(HVD_ALLGATHER, "large", in, 400, NULL, size, rank);
    stream = gpus_stream(rank);
    CHECK(fetched(engine, crew_begin(engine, &request), out, NULL, stream) == 400);
    gpus_stream_end(stream);
    CHECK(gpus_calls("cuMemFree") > freed);
    gpus_fail("cuMemAlloc", 0, 2);
    request = rows_of(HVD_ALLGATHER, "larger", in, 1000, NULL, size, rank);
    CHECK_CODE(crew_wait(engine, crew_begin(engine, &request), text), HVD_ENOMEM, text);
    CHECK(strstr(text, "'larger'") && strstr(text, "MB on device 0") && strstr(text, "empty_cache"));
    gpus_fail("cuMemAlloc", 0, 0);
}

/* A kernel of the script's has gone wrong, and the next call hears of it: that is no lack of memory. */
static void faulted(struct hvd_engine *engine, int rank, int size)
{
    static float in[10];
    char text[HVD_TEXT_MAX] = "";
    gpus_fail("cuMemAlloc", 1, 700);
    struct hvd_request request = rows_of(HVD_ALLGATHER, "rows", in, 10, NULL, size, rank);
    CHECK_CODE(crew_wait(engine, crew_begin(engine, &request), text), HVD_EINTERNAL, text);
    CHECK(strstr(text, "'rows'") && strstr(text, "(error 700") && !strstr(text, "empty_cache"));
}

int main(void)
{
    crew_deadline(500);
    gpus_find();
    for (int size = 1; size <= 4; size++)
        crew_threads(size, ragged);
    CHECK(gpus_calls("ncclAllGather") > 0 && gpus_calls("ncclBroadcast") > 0 && gpus_calls("ncclSend") > 0);
    CHECK(gpus_calls("cuMemcpyDtoH") == 0 && gpus_calls("cuMemcpyHtoD") == 0); /* nothing came by the CPU */
    by_nccl_in_overlapping_sets();
    crew_threads(1, not_too_early);
    crew_threads(3, not_too_early);
    crew_threads(3, nobody_fetches);
    CHECK(gpus_calls("cuMemcpyDtoH") == 0 && hvd_block_bytes() == 0);
    crew_threads(2, memory_is_given_again);
    CHECK(hvd_block_bytes() == 0); /* all of it is given back with the last engine */
    shared_device = 2;
    int calls = gpus_calls("ncclGroupStart");
    crew_threads(3, ragged);
    CHECK(gpus_calls("ncclGroupStart") == calls && gpus_calls("cuMemcpyDtoH") > 0);
    shared_device = -1;
    crew_threads(1, no_memory);
    crew_threads(1, faulted);
    return 0;
}
