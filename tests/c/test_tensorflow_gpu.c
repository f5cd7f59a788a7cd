/* test_tensorflow_gpu.c - TensorFlow's tensors on GPUs that are none: they are reduced there, what is not ready is
 * waited for, and nobody is told of an end before the device has come to it.
 *
 * TensorFlow is that of tests/stub/tensorflow, CUDA and NCCL are those of tests/stub: a stream is a thread, so what is
 * touched too early is seen. See tfgpu.h for the rest of the scenery.
 */
#include "tfgpu.h"

#include <signal.h>
#include <sys/wait.h>

int hvd_tf_asynchronous(int block);
int64_t hvd_tf_count(int which);

/* ---- tests ---- */

static void what_is_where(void)
{
    static const char *const ops[] = {"HvdStart", "HvdFinish", "HvdGate"};
    for (int i = 0; i < 3; i++) {
        const struct tf_kernel_builder *floats = framework_kernel_for(ops[i], "GPU", TF_FLOAT),
                                       *ints = framework_kernel_for(ops[i], "GPU", TF_INT32);
        CHECK(!framework_on_host(floats, i ? "y" : "x") && framework_on_host(ints, i ? "y" : "x"));
        CHECK(framework_on_host(floats, "handle") && framework_on_host(ints, "handle"));
        CHECK(framework_on_host(floats, i ? "rows" : "splits") && framework_on_host(ints, i ? "rows" : "splits"));
    }
    CHECK(framework_on_host(framework_kernel("HvdAsk", "GPU"), "answer"));
}

/* The kernel that makes the input, and one that uses the output's memory, are still under way when Start is called. */
static void a_sum(bool blocks)
{
    const float *values = produced((float)my_rank), *garbage = produced(-9);
    int copies = gpus_calls("cuMemcpyDtoH"), calls = gpus_calls("ncclAllReduce"), launched = gpus_calls("ncclGroupEnd");
    struct tf_tensor *input = on_gpu(TF_FLOAT, COUNT, sizeof(float)), *old = on_gpu(TF_FLOAT, COUNT, sizeof(float));
    const void *memory = old->data;
    void *gate = closed();
    launch(input->data, values, input->bytes);
    launch(old->data, garbage, old->bytes);
    TF_DeleteTensor(old);
    struct tf_run start = started(HVD_ALLREDUCE, HVD_OP_sum, 0, "sum", input, -1), end;
    int before = atomic_load(&dones);
    if (blocks) {
        until(has_launched, launched);
        open(gate);
        finish(&end, &start, TF_FLOAT, "GPU");
        CHECK(is_done(before));
    } else {
        finish(&end, &start, TF_FLOAT, "GPU");
        until(has_launched, launched);
        usleep(20000); /* what is wrong shows with time: it lies on the stream, where hvd_wait is over */
        CHECK(!is_done(before));
        open(gate);
    }
    until(is_done, before);
    CHECK_CODE(end.failed, 0, end.message);
    CHECK(end.output[0]->data == memory);
    const float *sum = end.output[0]->data;
    for (int i = 0; i < COUNT; i++)
        CHECK(sum[i] == (float)(ranks * i + ranks * (ranks - 1) / 2));
    CHECK(gpus_calls("cuMemcpyDtoH") == copies && (ranks == 1 || gpus_calls("ncclAllReduce") > calls));
    let_go_of(&end);
    take((void *)(uintptr_t)values, 2 * COUNT * sizeof(float));
    take((void *)(uintptr_t)garbage, 2 * COUNT * sizeof(float));
}

/* Rows differ, and rank 1 has none, hence no address; the copy waits for who uses its memory. */
static void rows(bool blocks)
{
    const float *garbage = produced(-9);
    int64_t count = my_rank == 1 ? 0 : my_rank + 2, all = 0;
    struct tf_tensor *input = on_gpu(TF_FLOAT, count, sizeof(float)), *old;
    for (int64_t i = 0; i < count; i++)
        ((float *)input->data)[i] = (float)(my_rank * 10 + i);
    struct tf_run start = started(HVD_ALLGATHER, 0, 0, "rows", input, -1), end;
    for (int rank = 0; rank < ranks; rank++)
        all += rank == 1 ? 0 : rank + 2;
    old = on_gpu(TF_FLOAT, all, sizeof(float));
    const void *memory = old->data;
    CHECK_CODE(start.failed, 0, start.message);
    until(all_is_let_go_of, 2); /* handle and old: it lies in the core's memory */
    void *gate = blocks ? NULL : closed();
    launch(old->data, garbage, old->bytes);
    TF_DeleteTensor(old);
    int before = atomic_load(&dones), recorded = gpus_calls("cuCtxRecordEvent");
    finish(&end, &start, TF_FLOAT, "GPU");
    if (!blocks) {
        until(has_recorded, recorded);
        usleep(20000);
        CHECK(!is_done(before));
        open(gate);
    }
    until(is_done, before);
    CHECK_CODE(end.failed, 0, end.message);
    CHECK(end.output[0]->data == memory && end.output[0]->dim[0] == all && end.output[1]->dim[0] == ranks);
    const float *got = end.output[0]->data;
    for (int rank = 0; rank < ranks; rank++)
        for (int i = 0; i < (rank == 1 ? 0 : rank + 2); i++)
            CHECK(*got++ == (float)(rank * 10 + i));
    let_go_of(&end);
    take((void *)(uintptr_t)garbage, 2 * COUNT * sizeof(float));
}

/* The copy of a result was begun, and then the driver takes no event for its end (the nth): the node fails, and the
 * output is let go of only when the device has done with it. */
static void a_copy_that_fails(int nth)
{
    struct tf_tensor *input = on_gpu(TF_FLOAT, 2, sizeof(float));
    ((float *)input->data)[1] = (float)(my_rank + 7);
    struct tf_run start = started(HVD_ALLGATHER, 0, 0, "fails", input, -1), end;
    CHECK_CODE(start.failed, 0, start.message);
    until(all_is_let_go_of, 1); /* the handle */
    void *gate = closed();
    int before = atomic_load(&dones);
    gpus_fail("cuEventRecord", nth, 700);
    finish(&end, &start, TF_FLOAT, "GPU");
    usleep(20000);
    CHECK(!is_done(before) && end.failed && strstr(end.message, "record an event"));
    ((float *)end.output[0]->data)[1] = -1;
    open(gate);
    until(is_done, before);
    CHECK(((const float *)end.output[0]->data)[1] == 7);
    let_go_of(&end);
    crew_meet();
}

/* The result of one, which may be looked at. */
static struct tf_run one(int kind, int op, int64_t root, const char *key, struct tf_tensor *input, int64_t split)
{
    int before = atomic_load(&dones), dtype = input->dtype;
    struct tf_run start = started(kind, op, root, key, input, split), *end = malloc(sizeof *end), copy;
    finish(end, &start, dtype, "GPU");
    until(is_done, before);
    copy = *end;
    free(end);
    CHECK_CODE(copy.failed, 0, copy.message);
    return copy;
}

static void the_other_kinds(void)
{
    struct tf_tensor *input = on_gpu(TF_FLOAT, 4, sizeof(float));
    ((float *)input->data)[3] = (float)(my_rank + 5);
    struct tf_run end = one(HVD_BROADCAST, 0, ranks - 1, "same", input, -1);
    CHECK(((float *)end.output[0]->data)[3] == (float)(ranks + 4));
    let_go_of(&end);
    input = on_gpu(TF_FLOAT, 2 * ranks, sizeof(float));
    for (int i = 0; i < 2 * ranks; i++)
        ((float *)input->data)[i] = (float)i;
    end = one(HVD_REDUCESCATTER, HVD_OP_sum, 0, "part", input, -1);
    CHECK(end.output[0]->dim[0] == 2 && ((float *)end.output[0]->data)[1] == (float)(ranks * (2 * my_rank + 1)));
    let_go_of(&end);
    input = on_gpu(TF_FLOAT, 2 * ranks, sizeof(float));
    for (int i = 0; i < 2 * ranks; i++)
        ((float *)input->data)[i] = (float)(10 * my_rank + i);
    end = one(HVD_ALLTOALL, 0, 0, "swap", input, 2);
    for (int rank = 0; rank < ranks; rank++)
        CHECK(((float *)end.output[0]->data)[2 * rank + 1] == (float)(10 * rank + 2 * my_rank + 1));
    let_go_of(&end);
    input = on_gpu(TF_FLOAT, 1, sizeof(float));
    end = one(HVD_BARRIER, 0, 0, "none", input, -1);
    let_go_of(&end);
}

/* int32 is the CPU's; what NCCL does not add goes by way of the CPU, in the core. */
static void dtypes(void)
{
    int64_t two = 2;
    int calls = gpus_calls("ncclAllReduce"), copies = gpus_calls("cuMemcpyDtoH"),
        points = gpus_calls("cuCtxRecordEvent");
    struct tf_tensor *input = framework_tensor(TF_INT32, 1, &two, sizeof(int32_t));
    ((int32_t *)input->data)[1] = 7;
    struct tf_run end = one(HVD_ALLREDUCE, HVD_OP_sum, 0, "ints", input, -1);
    CHECK(((int32_t *)end.output[0]->data)[1] == 7 * ranks);
    CHECK(gpus_calls("ncclAllReduce") == calls && gpus_calls("cuCtxRecordEvent") == points);
    let_go_of(&end);
    input = on_gpu(TF_UINT16, 3, sizeof(uint16_t));
    ((uint16_t *)input->data)[2] = 300;
    end = one(HVD_ALLREDUCE, HVD_OP_sum, 0, "short", input, -1);
    CHECK(((uint16_t *)end.output[0]->data)[2] == 300 * ranks && gpus_calls("ncclAllReduce") == calls);
    CHECK(ranks == 1 || gpus_calls("cuMemcpyDtoH") > copies);
    let_go_of(&end);
}

/* What fails before anybody else hears of it. */
static void refusals(void)
{
    static const struct {
        const char *function, *says;
    } cases[] = {{"cuCtxRecordEvent", "could not record what a device has been given"},
                 {"cuPointerGetAttribute", "is on no GPU"}};
    for (size_t i = 0; i < HVD_COUNT_OF(cases); i++) {
        gpus_fail(cases[i].function, 1, 900);
        struct tf_run run = started(HVD_ALLREDUCE, HVD_OP_sum, 0, "bad", on_gpu(TF_FLOAT, 4, sizeof(float)), -1);
        CHECK(run.failed == TF_FAILED_PRECONDITION && strstr(run.message, cases[i].says));
    }
    char text[HVD_TEXT_MAX] = "";
    void *point;
    CHECK(hvd_point(text, &point, text, sizeof text) == HVD_EINVAL && strstr(text, "is on no GPU") && !point);
    int retained = gpus_calls("cuDevicePrimaryCtxRetain");
    gpus_fail("cuPointerGetAttribute", 1, 201); /* no context: it is asked again in one that is there */
    struct tf_run asked = one(HVD_ALLREDUCE, HVD_OP_sum, 0, "asked", on_gpu(TF_FLOAT, 4, sizeof(float)), -1);
    CHECK(gpus_calls("cuDevicePrimaryCtxRetain") == retained + 1);
    let_go_of(&asked);
    framework_refuse("TF_AllocateTemp", 0);
    struct tf_run run = started(HVD_ALLGATHER, 0, 0, "none", on_gpu(TF_FLOAT, 0, sizeof(float)), -1), end;
    CHECK(run.failed == TF_EXHAUSTED);
    framework_refuse(NULL, 0);
    int before = atomic_load(&dones);
    run = started(HVD_ALLREDUCE, HVD_OP_sum, 0, "apart", on_gpu(TF_FLOAT, 4, sizeof(float)), -1);
    finish(&end, &run, TF_FLOAT, "CPU");
    until(is_done, before);
    CHECK(end.failed == TF_FAILED_PRECONDITION && strstr(end.message, "HVDLITE_TENSORFLOW_GPU=host"));
    let_go_of(&end);
    crew_meet();
}

static void nothing_is_left(void)
{
    until(all_is_let_go_of, 0);
    CHECK(hvd_tf_count(0) == 0);
}

/* As where one rank's driver is too old: all ranks hear who has what where, and what to do. */
static void ranks_disagree(void)
{
    int before = atomic_load(&dones);
    bool here = my_rank == ranks - 1;
    int64_t four = 4;
    struct tf_tensor *input = here ? framework_tensor(TF_FLOAT, 1, &four, 4) : on_gpu(TF_FLOAT, 4, sizeof(float));
    placed_on = here ? "CPU" : "GPU";
    struct tf_run start = started(HVD_ALLREDUCE, HVD_OP_sum, 0, "split", input, -1), end;
    finish(&end, &start, TF_FLOAT, placed_on);
    placed_on = "GPU";
    until(is_done, before);
    CHECK(end.failed == TF_FAILED_PRECONDITION && strstr(end.message, "ranks disagree on the device: rank"));
    CHECK(strstr(end.message, "said the CPU") && strstr(end.message, "set HVDLITE_TENSORFLOW_GPU=host"));
    let_go_of(&end);
}

/* When the engine is gone. */
static void no_event_is_left(void)
{
    CHECK(gpus_calls("cuEventCreate") == gpus_calls("cuEventDestroy"));
}

static void collectives(struct hvd_engine *engine, int rank, int size)
{
    begin(engine, rank, size);
    atexit(no_event_is_left);
    what_is_where();
    for (int blocks = 0; blocks < 2; blocks++) {
        for (int i = 0; i < 3; i++) {
            a_sum(blocks);
            rows(blocks);
        }
        for (int nth = 1; nth <= 2 && !blocks; nth++)
            a_copy_that_fails(nth);
        the_other_kinds();
        dtypes();
        if (size > 1)
            ranks_disagree();
        refusals();
        hvd_tf_asynchronous(1);
    }
    nothing_is_left();
    crew_meet();
}

/* Rank 1 dies when all have launched it: the others hear why, and their memory is kept until the device has let go. */
static void one_dies(struct hvd_engine *engine, int rank, int size)
{
    begin(engine, rank, size);
    a_sum(false);
    struct tf_tensor *input = on_gpu(TF_FLOAT, COUNT, sizeof(float));
    void *gate = rank == 0 ? closed() : NULL; /* a kernel in front of the sum, of which NCCL knows nothing */
    int launched = gpus_calls("ncclGroupEnd"), before = atomic_load(&dones);
    struct tf_run start = started(HVD_ALLREDUCE, HVD_OP_sum, 0, "last", input, -1), end;
    until(has_launched, launched);
    crew_meet();
    if (rank == 1)
        kill(getpid(), SIGKILL);
    finish(&end, &start, TF_FLOAT, "GPU");
    until(is_done, before);
    CHECK(end.failed == TF_UNKNOWN && strstr(end.message, "rank 1"));
    let_go_of(&end);
    if (gate) {
        usleep(250000);                  /* longer than between two looks */
        CHECK(framework_tensors() == 2); /* input and output */
        open(gate);
    }
    nothing_is_left();
}

/* What lies on a device and does not end there is waited for as long as anything. */
static void one_takes_too_long(struct hvd_engine *engine, int rank, int size)
{
    begin(engine, rank, size);
    a_sum(false);
    void *gate = rank == 0 ? closed() : NULL;
    int launched = gpus_calls("ncclGroupEnd"), before = atomic_load(&dones);
    struct tf_run start = started(HVD_ALLREDUCE, HVD_OP_sum, 0, "long", on_gpu(TF_FLOAT, 4, sizeof(float)), -1), end;
    until(has_launched, launched);
    crew_meet();
    hvd_tf_flights_bound(rank == 0 ? 0.05 : 100);
    finish(&end, &start, TF_FLOAT, "GPU");
    until(is_done, before);
    CHECK(end.failed == TF_DEADLINE && strstr(end.message, "rank 0 has waited 0.05 s for tensor 'long'"));
    let_go_of(&end);
    if (gate)
        open(gate);
    nothing_is_left();
    crew_meet();
}

static void ends_well(int size, crew_body *body)
{
    int status[4];
    crew_processes(size, body, NULL, status);
    for (int rank = 0; rank < size; rank++)
        CHECK((body == one_dies && rank == 1) || (WIFEXITED(status[rank]) && WEXITSTATUS(status[rank]) == 0));
}

int main(void)
{
    crew_deadline(300);
    char text[HVD_TEXT_MAX] = "", here;
    void *point = &here;
    hvd_cuda_prefer("libc.so.6"); /* as a driver that lacks it */
    CHECK(hvd_gpu_version(2) == 0 && hvd_point(&here, &point, text, sizeof text) == HVD_EINIT && !point);
    CHECK(strstr(text, "libc.so.6 has no cu"));
    CHECK(hvd_point_fetch(1, 0, &point, text, sizeof text) == HVD_ESTATE && strstr(text, "has not been initialized"));
    hvd_point_drop(NULL);
    ends_well(1, collectives);
    ends_well(2, collectives);
    ends_well(3, collectives);
    ends_well(3, one_dies);
    ends_well(2, one_takes_too_long);
    return 0;
}
