/* test_shelf.c - ranks of one GPU that is none (tests/stub) read each other's memory: are sums there the CPU's bits, do
 * ranks agree where one of them cannot, does it end when one dies, and is nothing freed that another may be reading?
 *
 * The same works are done once over shelves and once by way of the CPU; what comes out is compared byte by byte.
 */
#include "crew.h"
#include "gpus.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 5003 };

static const int dtypes[] = {HVD_DTYPE_float16, HVD_DTYPE_bfloat16, HVD_DTYPE_float32,    HVD_DTYPE_float64,
                             HVD_DTYPE_int32,   HVD_DTYPE_bool,     HVD_DTYPE_float8_e5m2};

static struct hvd_request on_device(int kind, const char *name, int op, int dtype, void *memory, int64_t count)
{
    return (struct hvd_request){.name = name,
                                .kind = kind,
                                .op = op,
                                .dtype = dtype,
                                .ndim = 1,
                                .dims = {count},
                                .prescale = 1,
                                .postscale = 1,
                                .input = memory,
                                .output = memory,
                                .device = 3};
}

static void done(struct hvd_engine *engine, const struct hvd_request *request)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    int64_t handle = hvd_engine_submit(engine, request, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
}

static void fill(unsigned char *memory, size_t bytes, int rank, int dtype)
{
    uint64_t state = (uint64_t)(rank + 1) * 88172645463325252u + (uint64_t)dtype;
    for (size_t i = 0; i < bytes; i++) {
        state = state * UINT64_C(6364136223846793005) + 1;
        memory[i] = dtype == HVD_DTYPE_bool ? state >> 63 : (unsigned char)(state >> 56);
    }
}

static unsigned char *results; /* of the first pass over the works, by rank */
static size_t results_bytes;
static bool comparing;

/* Sums of random bits, NaN and infinities among them: scaled and not, of all dtypes, of one tensor and of many. */
static void every_work(struct hvd_engine *engine, int rank, int size)
{
    static const double scales[] = {1, 0.3};
    size_t at = (size_t)rank * results_bytes;
    _Alignas(16) unsigned char memory[COUNT * 8 + 16];
    char name[32], text[HVD_TEXT_MAX] = "";
    for (size_t d = 0; d < HVD_COUNT_OF(dtypes); d++)
        for (size_t k = 0; k < 6; k++) {
            size_t element = (size_t)hvd_dtype_bytes(dtypes[d]), bytes = COUNT * element;
            unsigned char *mine = memory + (k % 2 ? element : 0); /* off the 16 bytes */
            int op = k < 2 ? HVD_OP_sum : k < 4 ? HVD_OP_average : HVD_OP_max;
            fill(mine, bytes, rank, dtypes[d]);
            snprintf(name, sizeof name, "t%zu.%zu", d, k);
            struct hvd_request request = on_device(HVD_ALLREDUCE, name, op, dtypes[d], mine, COUNT);
            request.kind = k == 5 ? HVD_BROADCAST : HVD_ALLREDUCE;
            request.op = k == 5 ? 0 : op;
            request.root = k == 5 ? size - 1 : 0;
            request.prescale = k == 5 || dtypes[d] == HVD_DTYPE_bool ? 1 : scales[k / 2 % 2];
            if (dtypes[d] == HVD_DTYPE_bool && op == HVD_OP_average)
                request.op = HVD_OP_product;
            done(engine, &request);
            CHECK(at + bytes <= (size_t)(rank + 1) * results_bytes);
            if (comparing)
                CHECK(memcmp(results + at, mine, bytes) == 0);
            else
                memcpy(results + at, mine, bytes);
            at += bytes;
        }
    enum { MANY = 150, EACH = 301 };
    static _Thread_local float values[MANY][EACH];
    int64_t handle[MANY];
    struct hvd_error error = {0};
    for (int i = 0; i < MANY; i++) {
        for (int k = 0; k < EACH; k++)
            values[i][k] = (float)(i + k + rank);
        snprintf(name, sizeof name, "many%d", i);
        struct hvd_request request =
            on_device(HVD_ALLREDUCE, name, HVD_OP_sum, HVD_DTYPE_float32, values[i], EACH - i % 3);
        request.quiet = i + 1 < MANY;
        handle[i] = hvd_engine_submit(engine, &request, &error);
        CHECK_CODE(handle[i] > 0, 1, error.text);
    }
    for (int i = 0; i < MANY; i++) {
        CHECK_CODE(crew_wait(engine, handle[i], text), HVD_OK, text);
        for (int k = 0; k < EACH - i % 3; k++)
            CHECK(values[i][k] == (float)((i + k) * size + size * (size - 1) / 2));
        CHECK(values[i][EACH - 1] == (float)(EACH - 1 + i + rank) || i % 3 == 0);
    }
}

static void joins(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float value[4] = {1, 2, 3, (float)rank};
    struct hvd_request request = on_device(HVD_ALLREDUCE, "first", HVD_OP_sum, HVD_DTYPE_float32, value, 4);
    done(engine, &request);
    struct hvd_request join = {.kind = HVD_JOIN};
    for (int left = size - 1; left > rank; left--) { /* the last ranks have no more */
        snprintf(text, sizeof text, "then%d", left);
        value[0] = (float)rank;
        request = on_device(HVD_ALLREDUCE, text, left % 2 ? HVD_OP_sum : HVD_OP_average, HVD_DTYPE_float32, value, 4);
        done(engine, &request);
        CHECK(value[0] == (float)(left * (left - 1) / 2) / (float)(left % 2 ? 1 : size));
    }
    int64_t handle = hvd_engine_submit(engine, &join, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    CHECK_CODE(crew_wait(engine, handle, text), HVD_OK, text);
}

static const char *wanted_notice, *failing;

static void says_how(struct hvd_engine *engine, int rank, int size)
{
    char notice[HVD_TEXT_MAX] = "";
    float value[2] = {1, (float)rank};
    if (failing && rank == size - 1)
        gpus_fail(failing, 1, 201);
    crew_meet();
    int launches = gpus_calls("cuLaunchKernel");
    struct hvd_request request = on_device(HVD_ALLREDUCE, "a", HVD_OP_sum, HVD_DTYPE_float32, value, 2);
    done(engine, &request);
    CHECK(value[0] == (float)size && value[1] == (float)(size * (size - 1) / 2));
    CHECK(hvd_engine_notice(engine, notice, sizeof notice) == (rank == 0));
    if (rank == 0 && !strstr(notice, wanted_notice))
        fprintf(stderr, "with %s: %s\n", failing ? failing : "nothing failing", notice);
    CHECK(rank || (strstr(notice, wanted_notice) && strstr(notice, "use the same GPU")));
    CHECK(failing || gpus_calls("cuLaunchKernel") > launches);
    crew_meet();
}

/* Each rank uses two devices in turn: both lineups have shelves, and their bytes are counted. */
static void two_devices(struct hvd_engine *engine, int rank, int size)
{
    float value[2];
    char name[16];
    for (int i = 0; i < 6; i++) {
        value[0] = 1, value[1] = (float)(rank * i);
        snprintf(name, sizeof name, "of%d", i);
        struct hvd_request request = on_device(HVD_ALLREDUCE, name, HVD_OP_sum, HVD_DTYPE_float32, value, 2);
        request.device = 3 + i % 2;
        done(engine, &request);
        CHECK(value[0] == (float)size && value[1] == (float)(i * size * (size - 1) / 2));
    }
    CHECK(hvd_engine_usage(engine, HVD_USAGE_devices) >= (int64_t)2 * size * (64 << 20));
    crew_meet();
}

/* While rank 0 captures a graph in the global mode, the ranks greet each other and sum; that spoils nothing. */
static void beside_a_capture(struct hvd_engine *engine, int rank, int size)
{
    int (*begin)(void *, int), (*end)(void *, void **);
    *(void **)(void *)&begin = gpus_symbol("cuStreamBeginCapture_v2");
    *(void **)(void *)&end = gpus_symbol("cuStreamEndCapture");
    void *graph, *stream = &graph; /* never used */
    float value[2] = {1, 2};
    CHECK(rank || begin(stream, 0) == 0);
    crew_meet();
    struct hvd_request request = on_device(HVD_ALLREDUCE, "a", HVD_OP_sum, HVD_DTYPE_float32, value, 2);
    done(engine, &request);
    CHECK(value[0] == (float)size && value[1] == (float)(2 * size));
    crew_meet();
    CHECK(rank || end(stream, &graph) == 0);
    crew_meet();
}

/* A launch fails on one rank while others may be reading: the job ends, and shelves stay. */
static void one_fails(struct hvd_engine *engine, int rank, int size)
{
    float value[2] = {1, 2};
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    struct hvd_request request = on_device(HVD_ALLREDUCE, "a", HVD_OP_sum, HVD_DTYPE_float32, value, 2);
    done(engine, &request);
    CHECK(value[0] == (float)size);
    crew_meet();
    if (rank == 0)
        gpus_fail("cuLaunchKernel", 1, 700);
    crew_meet();
    request.name = "b";
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    CHECK(crew_wait(engine, handle, text) < 0 && strstr(text, "add up shelves"));
}

static struct {
    void *gate;
    int asked;
    pthread_t thread;
} late;

/* When the engine that closes has asked for it some times; or when it plainly does not. */
static void *opens(void *unused)
{
    uint64_t until = hvd_now_ns() + 20000000000u;
    while (gpus_calls("cuEventQuery") < late.asked + 10 && hvd_now_ns() < until)
        usleep(1000);
    gpus_open_gate(late.gate);
    return unused;
}

/* The job fails while a copy onto a shelf waits for its tensor: an engine that has closed has nothing more there. */
static void fails_behind_a_copy(struct hvd_engine *engine, int rank, int size)
{
    static float values[2][2]; /* the copy is late */
    float *value = values[rank];
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    value[0] = 1;
    struct hvd_request request = on_device(HVD_ALLREDUCE, "a", HVD_OP_sum, HVD_DTYPE_float32, value, 2);
    done(engine, &request);
    CHECK(value[0] == (float)size);
    crew_meet();
    int copies = gpus_calls("cuMemcpyDtoD");
    crew_meet();
    request.name = "b";
    if (rank == 0)
        request.ready = late.gate = gpus_gate();
    int64_t handle = hvd_engine_submit(engine, &request, &error);
    CHECK_CODE(handle > 0, 1, error.text);
    while (gpus_calls("cuMemcpyDtoD") < copies + size)
        usleep(1000);
    crew_meet();
    if (rank == 1)
        hvd_engine_abort(engine, 1, HVD_EINTERNAL, "it is enough");
    CHECK(crew_wait(engine, handle, text) < 0 && strstr(text, "it is enough"));
    crew_meet();
    if (rank == 0) {
        late.asked = gpus_calls("cuEventQuery");
        CHECK(pthread_create(&late.thread, NULL, opens, NULL) == 0);
    }
}

static int opened_before;

static void one_dies(struct hvd_engine *engine, int rank, int size)
{
    float value[2] = {1, 2};
    struct hvd_request request = on_device(HVD_ALLREDUCE, "a", HVD_OP_sum, HVD_DTYPE_float32, value, 2);
    done(engine, &request);
    CHECK(value[0] == (float)size && gpus_calls("cuIpcOpenMemHandle") - opened_before == size - 1);
    crew_meet();
    if (rank == 1)
        kill(getpid(), SIGKILL);
    char text[HVD_TEXT_MAX] = "", name[16];
    int code = HVD_OK;
    for (int i = 0; code == HVD_OK && i < 1000; i++) {
        struct hvd_error error = {0};
        snprintf(name, sizeof name, "more%d", i);
        request.name = name;
        int64_t handle = hvd_engine_submit(engine, &request, &error);
        code = handle > 0 ? crew_wait(engine, handle, text) : error.code;
        hvd_text_copy(text, sizeof text, handle > 0 ? text : error.text);
    }
    CHECK_CODE(code, HVD_EPEER, text);
    CHECK(strstr(text, "rank 1"));
}

int main(void)
{
    crew_deadline(500);
    gpus_find();
    results_bytes = 6 * COUNT * 8 * HVD_COUNT_OF(dtypes);
    results = malloc(3 * results_bytes);
    CHECK(results);
    /* first: later there is memory to be had without asking */
    wanted_notice = "which is slow";
    crew_cuda_ipc = 1;
    failing = "cuMemAlloc";
    crew_threads(3, says_how);
    failing = NULL;
    for (int size = 2; size <= 3; size++)
        for (int pass = 0; pass < 2; pass++) {
            int opened = gpus_calls("cuIpcOpenMemHandle");
            crew_cuda_ipc = pass;
            comparing = pass == 1;
            crew_threads(size, every_work);
            CHECK(gpus_calls("cuIpcOpenMemHandle") - opened == pass * size * (size - 1));
        }
    CHECK(gpus_calls("cuIpcCloseMemHandle") == gpus_calls("cuIpcOpenMemHandle"));
    crew_threads(3, joins);
    wanted_notice = "but for sums and broadcasts, which go by CUDA IPC";
    crew_threads(2, says_how);
    static const char *const calls[] = {"cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuLaunchKernel"};
    wanted_notice = "which is slow";
    int copies = gpus_calls("cuMemcpyDtoH");
    for (size_t i = 0; i < HVD_COUNT_OF(calls); i++) {
        failing = calls[i];
        crew_threads(3, says_how);
    }
    CHECK(gpus_calls("cuMemcpyDtoH") > copies);
    failing = NULL;
    const struct hvd_cuda *found = hvd_cuda_load(&(struct hvd_error){0});
    struct hvd_cuda *cuda, whole = *found;
    memcpy(&cuda, &found, sizeof cuda); /* of an old driver */
    cuda->IpcGetMemHandle = NULL;
    failing = "a driver without it";
    wanted_notice = "its driver has no CUDA IPC";
    crew_threads(2, says_how);
    *cuda = whole;
    int kept = gpus_calls("cuMemAlloc");
    int open = gpus_calls("cuIpcOpenMemHandle") - gpus_calls("cuIpcCloseMemHandle"); /* could not be opened */
    crew_threads(2, two_devices);
    crew_threads(3, beside_a_capture);
    CHECK(gpus_calls("cuMemAlloc") - kept <= 2); /* what was lent is lent again: one device's is there already */
    CHECK(gpus_calls("cuIpcOpenMemHandle") - gpus_calls("cuIpcCloseMemHandle") == open);
    int closed = gpus_calls("cuIpcCloseMemHandle");
    crew_threads(3, one_fails);
    CHECK(gpus_calls("cuIpcCloseMemHandle") == closed);
    int busy = gpus_calls("streams that were busy when destroyed");
    crew_threads(2, fails_behind_a_copy);
    pthread_join(late.thread, NULL);
    CHECK(gpus_calls("streams that were busy when destroyed") == busy && !hvd_cuda_hangs());
    int status[3];
    opened_before = gpus_calls("cuIpcOpenMemHandle");
    crew_processes(3, one_dies, NULL, status);
    CHECK(gpus_calls("cuMemFree") == 0); /* of what another process may have open */
    CHECK(WIFSIGNALED(status[1]) && WIFEXITED(status[0]) && WEXITSTATUS(status[0]) == 0 && WEXITSTATUS(status[2]) == 0);
    free(results);
    return 0;
}
