/* test_ranges.c - collectives as ranges in a profiler's picture, with a library of NVTX that is none (tests/stub): off
 * until it is opened, each begun once and ended once, and named after what it is.
 */
#define _GNU_SOURCE
#include "crew.h"
#include "gpus.h"
#include "trace/nvtx.h"

#include <dlfcn.h>

static void some(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float value[2000] = {0}, rows[3] = {1, 2, 3};
    struct hvd_request request = crew_sum("first", value, 2000);
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
    request = (struct hvd_request){
        .kind = HVD_ALLGATHER, .name = "rows", .dtype = HVD_DTYPE_float32, .ndim = 1, .dims = {3}, .input = rows};
    request.prescale = request.postscale = 1;
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
    (void)rank, (void)size;
}

static void on_a_device(struct hvd_engine *engine, int rank, int size)
{
    struct hvd_error error = {0};
    char text[HVD_TEXT_MAX] = "";
    float value[2] = {1, 1};
    struct hvd_request request = crew_sum("there", value, 2);
    request.device = rank + 1;
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
    CHECK(value[0] == (float)size);
}

/* How many ranges have this in their names. */
static int named(const char *(*range)(int i), const char *what)
{
    int found = 0;
    for (int i = 0; *range(i); i++)
        found += strstr(range(i), what) != NULL;
    return found;
}

int main(void)
{
    struct hvd_error error = {0};
    crew_deadline(200);
    gpus_find();
    void *stub = dlopen(hvd_cuda_load(&error)->path, RTLD_NOW);
    const char *(*range)(int i);
    *(void **)(void *)&range = dlsym(stub, "stub_range");
    CHECK(range);
    crew_threads(2, some);
    CHECK(gpus_calls("nvtxRangeStartA") == 0);
    CHECK(hvd_nvtx_open("libno-such-thing.so.1", &error) == HVD_EINIT && strstr(error.text, "libno-such-thing"));
    error = (struct hvd_error){0};
    CHECK(hvd_nvtx_open("libc.so.6", &error) == HVD_EINIT && strstr(error.text, "nvtxRangeStartA"));
    error = (struct hvd_error){0};
    CHECK(!hvd_nvtx_on && hvd_nvtx_open(hvd_cuda_load(&error)->path, &error) == HVD_OK && hvd_nvtx_on);
    crew_threads(2, some);
    crew_threads(2, on_a_device);
    CHECK(named(range, "hvdlite allreduce first, 0.0 MB, shm") == 2);
    CHECK(named(range, "hvdlite sizes of allgather rows") == 2 && named(range, "hvdlite allgather rows, 0.0 MB") == 2);
    CHECK(named(range, "greet each other") == 2 && named(range, "hvdlite allreduce there, 0.0 MB, nccl") == 2);
    CHECK(gpus_calls("nvtxRangeStartA") == 10 && gpus_calls("nvtxRangeEnd") == 10);
    return 0;
}
