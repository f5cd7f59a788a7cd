/* test_kinds.c - alltoall, reducescatter, reduce, send and groups of ragged kinds through the engine; wrong arguments.
 */
#include "crew.h"

static int64_t submit(struct hvd_engine *engine, struct hvd_request request, struct hvd_error *error)
{
    request.dtype = request.dtype ? request.dtype : HVD_DTYPE_int32;
    request.op = request.op ? request.op : HVD_OP_sum;
    request.prescale = request.prescale != 0 ? request.prescale : 1.0;
    request.postscale = request.postscale != 0 ? request.postscale : 1.0;
    memset(error, 0, sizeof *error);
    return hvd_engine_submit(engine, &request, error);
}

static int value_of(int from, int to, int64_t i)
{
    return from * 1000000 + to * 10000 + (int)(i % 9999);
}

/* Rank r sends (r + to + step) % 4 times 3 rows to each; several at once, of which one is empty everywhere. */
static void alltoalls(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    for (int step = 0; step < 6; step++) {
        enum { AT_ONCE = 3 };
        int64_t handle[AT_ONCE], splits[AT_ONCE][HVD_LOCAL_MAX];
        int32_t *memory[AT_ONCE];
        for (int k = 0; k < AT_ONCE; k++) {
            int64_t rows = 0, at = 0, unit = k == 2 ? 0 : k == 1 && step > 3 ? 5000 : 3;
            for (int to = 0; to < size; to++)
                rows += splits[k][to] = (rank + to + step) % 4 * unit;
            memory[k] = malloc(sizeof(int32_t) * (size_t)(rows * 2 + 4));
            for (int to = 0; to < size; to++)
                for (int64_t i = 0; i < splits[k][to] * 2; i++)
                    memory[k][at++] = value_of(rank, to, i);
            char name[32];
            snprintf(name, sizeof name, "exchange.%d", k);
            handle[k] = submit(engine,
                               (struct hvd_request){.name = step % 2 ? name : NULL,
                                                    .kind = HVD_ALLTOALL,
                                                    .ndim = 2,
                                                    .dims = {rows + 1, 2}, /* the last row goes nowhere */
                                                    .input = memory[k],
                                                    .splits = splits[k],
                                                    .splits_count = size},
                               &error);
            CHECK_CODE(handle[k] > 0, 1, error.text);
        }
        for (int k = AT_ONCE - 1; k >= 0; k--) {
            CHECK_CODE(crew_wait_only(engine, handle[k], text), HVD_OK, text);
            struct hvd_output output;
            CHECK(hvd_engine_result(engine, handle[k], &output) == HVD_OK && output.size == size);
            int64_t at = 0, unit = k == 2 ? 0 : k == 1 && step > 3 ? 5000 : 3;
            for (int from = 0; from < size; from++) {
                CHECK(output.rows_of[from] == (from + rank + step) % 4 * unit);
                for (int64_t i = 0; i < output.rows_of[from] * 2; i++)
                    CHECK(((int32_t *)output.data)[at++] == value_of(from, rank, i));
            }
            CHECK(output.bytes == at * 4 && output.rows * 2 == at);
            CHECK(hvd_engine_forget(engine, handle[k]) == HVD_OK);
            free(memory[k]);
        }
    }
}

static void alltoall_in_equal_parts(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    int32_t mine[2 * HVD_LOCAL_MAX];
    for (int i = 0; i < 2 * size; i++)
        mine[i] = rank * 1000 + i;
    int64_t handle = submit(
        engine, (struct hvd_request){.kind = HVD_ALLTOALL, .ndim = 1, .dims = {2 * size}, .input = mine}, &error);
    CHECK_CODE(crew_wait_only(engine, handle, text), HVD_OK, text);
    struct hvd_output output;
    CHECK(hvd_engine_result(engine, handle, &output) == HVD_OK && output.rows == 2 * size);
    for (int i = 0; i < 2 * size; i++)
        CHECK(((int32_t *)output.data)[i] == i / 2 * 1000 + rank * 2 + i % 2);
    CHECK(hvd_engine_forget(engine, handle) == HVD_OK);
}

static void reducescatters(struct hvd_engine *engine, int rank, int size)
{
    static const int64_t rows_of[] = {0, 1, 2, 7, 64, 5000};
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    for (size_t k = 0; k < HVD_COUNT_OF(rows_of); k++) {
        int64_t rows = rows_of[k], first = 0, share = rows / size + (rank < rows % size), columns = 3;
        for (int r = 0; r < rank; r++)
            first += rows / size + (r < rows % size);
        float *in = malloc(sizeof *in * (size_t)(rows * columns + 1));
        float *out = malloc(sizeof *out * (size_t)(share * columns + 1));
        for (int64_t i = 0; i < rows * columns; i++)
            in[i] = (float)(rank + i % 101);
        for (int op = 0; op < 2; op++) {
            int64_t handle = submit(engine,
                                    (struct hvd_request){.name = "scattered",
                                                         .kind = HVD_REDUCESCATTER,
                                                         .op = op ? HVD_OP_max : HVD_OP_sum,
                                                         .dtype = HVD_DTYPE_float32,
                                                         .ndim = 2,
                                                         .dims = {rows, columns},
                                                         .prescale = 2.0,
                                                         .input = in,
                                                         .output = share ? out : NULL},
                                    &error);
            CHECK_CODE(handle > 0, 1, error.text);
            CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
            for (int64_t i = 0; i < share * columns; i++) {
                float each = (float)((first * columns + i) % 101), ranks = (float)(size * (size - 1) / 2);
                CHECK(out[i] == 2 * (op ? (float)(size - 1) + each : ranks + (float)size * each));
            }
        }
        free(in);
        free(out);
    }
}

static void reduces(struct hvd_engine *engine, int rank, int size)
{
    static const int64_t counts[] = {0, 1, 1000, 100000};
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    for (size_t k = 0; k < HVD_COUNT_OF(counts); k++)
        for (int root = 0; root < size; root++) {
            int32_t *in = malloc(sizeof *in * (size_t)(counts[k] + 1)),
                    *out = malloc(sizeof *out * (size_t)(counts[k] + 1));
            for (int64_t i = 0; i < counts[k]; i++)
                in[i] = rank + (int)i;
            int64_t handle = submit(engine,
                                    (struct hvd_request){.name = "to the root",
                                                         .kind = HVD_REDUCE,
                                                         .root = root,
                                                         .ndim = 1,
                                                         .dims = {counts[k]},
                                                         .input = in,
                                                         .output = rank == root ? out : NULL},
                                    &error);
            CHECK_CODE(handle > 0, 1, error.text);
            CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
            for (int64_t i = 0; i < counts[k]; i++)
                CHECK(in[i] == rank + (int)i && (rank != root || out[i] == size * (size - 1) / 2 + size * (int)i));
            free(in);
            free(out);
        }
}

static void misjudged(struct hvd_engine *engine, int rank)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    int32_t memory[8] = {0};
    struct hvd_request request = {.name = "letter", .kind = HVD_SEND, .peer = 1, .ndim = 1, .dims = {rank ? 5 : 4}};
    request.input = request.output = memory;
    CHECK_CODE(crew_wait(engine, submit(engine, request, &error), text), HVD_EMISMATCH, text);
    CHECK_CODE(strstr(text, "rank 0 said [4], rank 1 said [5]") && strstr(text, "letter"), 1, text);
}

/* Round a ring, to both sides at once and under one name. Then one whose shape is misjudged. */
static void sends(struct hvd_engine *engine, int rank, int size)
{
    static const int64_t counts[] = {0, 1, 500, 200000};
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    for (int step = 0; step < 3; step++)
        for (size_t k = 0; k < HVD_COUNT_OF(counts); k++) {
            int right = (rank + 1) % size, left = (rank + size - 1) % size;
            int32_t *out = malloc(sizeof *out * (size_t)(counts[k] + 1)),
                    *in = malloc(sizeof *in * (size_t)(counts[k] + 1));
            for (int64_t i = 0; i < counts[k]; i++)
                out[i] = value_of(rank, right, i);
            struct hvd_request request = {.name = "ring", .kind = HVD_SEND, .ndim = 1, .dims = {counts[k]}};
            request.root = rank, request.peer = right, request.input = out;
            int64_t to = submit(engine, request, &error);
            CHECK_CODE(to > 0, 1, error.text);
            request.root = left, request.peer = rank, request.input = NULL, request.output = in;
            int64_t from = submit(engine, request, &error);
            CHECK_CODE(from > 0, 1, error.text);
            CHECK_CODE(crew_wait(engine, from, text), HVD_OK, text);
            CHECK_CODE(crew_wait(engine, to, text), HVD_OK, text);
            for (int64_t i = 0; i < counts[k]; i++)
                CHECK(in[i] == value_of(left, rank, i));
            free(in);
            free(out);
        }
    if (rank < 2)
        misjudged(engine, rank);
    crew_barrier(engine);
}

/* Allgathers and reducescatters of one group, members in different orders on the ranks. */
static void groups(struct hvd_engine *engine, int rank, int size)
{
    enum { MEMBERS = 4 };
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    for (int step = 0; step < 4; step++) {
        int64_t gather[MEMBERS], scatter[MEMBERS];
        int32_t mine[HVD_LOCAL_MAX * MEMBERS], in[HVD_LOCAL_MAX], out[MEMBERS];
        for (int i = 0; i < HVD_LOCAL_MAX * MEMBERS; i++)
            mine[i] = rank;
        for (int i = 0; i < size; i++)
            in[i] = rank + i;
        for (int i = 0; i < MEMBERS; i++) {
            int m = (i + rank) % MEMBERS;
            char name[32];
            snprintf(name, sizeof name, "gathered.%d", m);
            struct hvd_request request = {.name = name, .kind = HVD_ALLGATHER, .ndim = 1, .dims = {rank * m}};
            request.input = mine, request.group = 77, request.group_count = MEMBERS;
            CHECK_CODE((gather[m] = submit(engine, request, &error)) > 0, 1, error.text);
            snprintf(name, sizeof name, "scattered.%d", m);
            request = (struct hvd_request){.name = name, .kind = HVD_REDUCESCATTER, .ndim = 1, .dims = {size}};
            request.input = in, request.output = &out[m], request.group = 78, request.group_count = MEMBERS;
            CHECK_CODE((scatter[m] = submit(engine, request, &error)) > 0, 1, error.text);
        }
        for (int m = 0; m < MEMBERS; m++) {
            struct hvd_output output;
            CHECK_CODE(crew_wait(engine, scatter[m], text), HVD_OK, text);
            CHECK(out[m] == size * (size - 1) / 2 + size * rank);
            CHECK_CODE(crew_wait_only(engine, gather[m], text), HVD_OK, text);
            CHECK(hvd_engine_result(engine, gather[m], &output) == HVD_OK);
            CHECK(output.rows == m * size * (size - 1) / 2);
            CHECK(output.rows == 0 || ((int32_t *)output.data)[output.rows - 1] == size - 1);
            CHECK(hvd_engine_forget(engine, gather[m]) == HVD_OK);
        }
    }
}

static void expect(struct hvd_engine *engine, struct hvd_request request, const char *words)
{
    struct hvd_error error;
    CHECK_CODE(submit(engine, request, &error), HVD_EINVAL, error.text);
    CHECK_CODE(strstr(error.text, words) != NULL, 1, error.text);
}

static void wrong_arguments(struct hvd_engine *engine, int rank, int size)
{
    int32_t memory[64] = {0};
    int64_t splits[HVD_LOCAL_MAX] = {0};
    struct hvd_request all = {.name = "x", .kind = HVD_ALLTOALL, .ndim = 1, .dims = {size}, .input = memory};
    struct hvd_request bad = all;
    bad.ndim = 0;
    expect(engine, bad, "a scalar has no first dimension");
    bad = all, bad.dims[0] = size + 1;
    if (size > 1)
        expect(engine, bad, "splits not provided, but first dimension");
    bad = all, bad.splits = splits, bad.splits_count = size + 1;
    expect(engine, bad, "Number of entries in splits does not equal number of workers");
    bad.splits_count = size, splits[0] = -1;
    expect(engine, bad, "must not be negative");
    splits[0] = size + 1;
    expect(engine, bad, "Sum of splits entries is greater than the first dimension of tensor");
    splits[0] = INT64_MAX, splits[size - 1] = INT64_MAX;
    expect(engine, bad, "Sum of splits entries is greater");
    bad = all, bad.input = NULL;
    expect(engine, bad, "has no memory");
    bad = (struct hvd_request){.name = "x", .kind = HVD_REDUCESCATTER, .input = memory, .output = memory};
    expect(engine, bad, "a scalar has no first dimension");
    bad = (struct hvd_request){.name = "x", .kind = HVD_REDUCE, .root = size, .input = memory, .output = memory};
    expect(engine, bad, "root rank");
    bad.root = rank, bad.output = NULL;
    expect(engine, bad, "has no memory");
    bad = (struct hvd_request){.name = "x", .kind = HVD_SEND, .root = rank, .peer = rank, .input = memory};
    expect(engine, bad, "to itself");
    bad.peer = size;
    expect(engine, bad, "the receiver's rank");
    bad.root = -1;
    expect(engine, bad, "the sender's rank");
    if (size < 2)
        return;
    bad.root = rank, bad.peer = (rank + 1) % size, bad.name = NULL;
    expect(engine, bad, "a send needs a name");
    bad.name = "x", bad.group = 3, bad.group_count = 2;
    expect(engine, bad, "cannot be in a group");
    bad.group = 0, bad.input = NULL;
    expect(engine, bad, "has no memory");
    bad.root = (rank + 1) % size, bad.peer = (rank + 2) % size;
    if (size > 2)
        expect(engine, bad, "cannot take part");
}

/* Reduces go on without a joined rank, other kinds are refused on every rank that asks. */
static void while_a_rank_has_joined(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error;
    char text[HVD_TEXT_MAX] = "";
    int32_t in = rank + 1, out = 0, rows[HVD_LOCAL_MAX] = {0};
    struct hvd_request join = {.kind = HVD_JOIN}, again = join;
    int64_t joined = -1;
    if (rank == size - 1) {
        joined = submit(engine, join, &error);
        CHECK_CODE(crew_wait(engine, submit(engine, again, &error), text), HVD_EDUP, text);
    } else {
        struct hvd_request request = {.name = "r", .kind = HVD_REDUCE, .input = &in, .output = rank ? NULL : &out};
        CHECK_CODE(crew_wait(engine, submit(engine, request, &error), text), HVD_OK, text);
        CHECK(rank || out == size * (size - 1) / 2);
        for (int kind = HVD_ALLTOALL; kind <= HVD_REDUCESCATTER; kind++) {
            request =
                (struct hvd_request){.name = kind == HVD_ALLTOALL ? "a" : "s", .kind = kind, .ndim = 1, .dims = {size}};
            request.input = rows, request.output = &out;
            CHECK_CODE(crew_wait(engine, submit(engine, request, &error), text), HVD_EINVAL, text);
            CHECK_CODE(strstr(text, "while another rank has joined") != NULL, 1, text);
        }
        request = (struct hvd_request){.name = "p", .kind = HVD_SEND, .root = rank, .peer = size - 1, .input = &in};
        CHECK_CODE(crew_wait(engine, submit(engine, request, &error), text), HVD_EINVAL, text);
        CHECK_CODE(strstr(text, "while another rank has joined") != NULL, 1, text);
        joined = submit(engine, join, &error);
    }
    CHECK_CODE(crew_wait(engine, joined, text), HVD_OK, text);
}

static int status[HVD_LOCAL_MAX];

static void as_processes(struct hvd_engine *engine, int rank, int size)
{
    CHECK_CODE(engine != NULL, 1, crew_open_error.text);
    alltoalls(engine, rank, size);
    reducescatters(engine, rank, size);
    sends(engine, rank, size);
}

int main(void)
{
    static const int sizes[] = {1, 2, 3, 4, 7};
    static const struct {
        const char *name;
        crew_body *body;
        int least;
    } tests[] = {
        {"alltoalls", alltoalls, 1},
        {"alltoall in equal parts", alltoall_in_equal_parts, 1},
        {"reducescatters", reducescatters, 1},
        {"reduces", reduces, 1},
        {"sends", sends, 2},
        {"groups", groups, 1},
        {"wrong arguments", wrong_arguments, 1},
        {"while a rank has joined", while_a_rank_has_joined, 2},
    };
    crew_deadline(300);
    const char *world;
    for (int w = 0; (world = crew_world(w)); w++)
        for (size_t i = 0; i < HVD_COUNT_OF(tests); i++)
            for (size_t k = 0; k < HVD_COUNT_OF(sizes); k++)
                if ((w == 0 || sizes[k] < 5) && sizes[k] >= tests[i].least) {
                    uint64_t begun = hvd_now_ns();
                    crew_threads(sizes[k], tests[i].body);
                    printf("%s: %s, %d ranks: %.0f ms\n", world, tests[i].name, sizes[k],
                           (double)(hvd_now_ns() - begun) / 1e6);
                    fflush(stdout);
                }
    crew_world(0);
    crew_processes(3, as_processes, NULL, status);
    for (int rank = 0; rank < 3; rank++)
        CHECK_CODE(status[rank], 0, "a rank failed");
    return 0;
}
