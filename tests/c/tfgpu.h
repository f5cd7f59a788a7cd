/* tfgpu.h - a TensorFlow that is none, with tensors on GPUs that are none, for one test.
 *
 * The device's allocator gives out what was freed last, at once, as TensorFlow's may: memory that kernels launched
 * before still use. Each rank is a process, for the library has one core; the core's functions are those of an engine.
 */
#ifndef HVD_TEST_TFGPU_H
#define HVD_TEST_TFGPU_H

#include "../stub/tensorflow/framework.h"
#include "crew.h"
#include "cuda/begun.h"
#include "gpus.h"

#include <unistd.h>

enum { TF_FLOAT = 1, COUNT = 1000, DEVICE = 1, FREED = 8 };

const char *hvd_tf_attach(void *const *functions, int count, const int *dtypes, int dtypes_count, int on_device);
/* As the core's own, which need an engine of the process. */
int hvd_point(const void *memory, void **point, char *text, size_t text_bytes);

static struct hvd_engine *mine;
static const struct hvd_cuda *cuda;
static void *stream, *ctx; /* TensorFlow's */
static int my_rank, ranks;
static const char *placed_on = "GPU"; /* starts */

#define ERROR_TO(text, room) hvd_text_copy(text, room, error.text)

static inline int64_t core_submit(const struct hvd_request *request, char *text, size_t room)
{
    struct hvd_error error = {0};
    int64_t handle = hvd_engine_submit(mine, request, &error);
    ERROR_TO(text, room);
    return handle;
}
static inline int core_wait(int64_t handle, int timeout_ms, char *text, size_t room)
{
    return hvd_engine_wait(mine, handle, timeout_ms, text, room);
}
static inline int core_poll(int64_t handle)
{
    return hvd_engine_poll(mine, handle);
}
static inline int core_result(int64_t handle, struct hvd_output *output)
{
    return hvd_engine_result(mine, handle, output);
}
static inline int core_forget(int64_t handle)
{
    return hvd_engine_forget(mine, handle);
}
static inline int core_rank(void)
{
    return my_rank;
}
static inline int core_size(void)
{
    return ranks;
}
static inline int core_abort(int culprit, int code, const char *reason)
{
    hvd_engine_abort(mine, culprit, code, reason);
    return HVD_OK;
}
static inline int core_finish(struct hvd_owner *owner, int timeout_ms, char *text, size_t room)
{
    return hvd_engine_finish(mine, owner->handle, timeout_ms, text, room);
}
static inline int core_failure(int *culprit, int *code, char *text, size_t room)
{
    if (!atomic_load(&mine->failed))
        return 0;
    *culprit = mine->failure.culprit;
    *code = mine->failure.code;
    hvd_text_copy(text, room, mine->failure.text);
    return 1;
}
static inline int core_fetch(int64_t handle, uintptr_t to, void **point, char *text, size_t room)
{
    struct hvd_error error = {0};
    struct hvd_mark *there;
    int code = hvd_engine_bring(mine, handle, to, &there, &error);
    *point = there;
    ERROR_TO(text, room);
    return code;
}
static const struct hvd_tf_core core = {.submit = core_submit,
                                        .wait = core_wait,
                                        .poll = core_poll,
                                        .result = core_result,
                                        .forget = core_forget,
                                        .rank = core_rank,
                                        .size = core_size,
                                        .abort = core_abort,
                                        .finish = core_finish,
                                        .failure = core_failure,
                                        .point = hvd_point,
                                        .point_fetch = core_fetch,
                                        .point_event = hvd_point_event,
                                        .point_reached = hvd_point_reached,
                                        .point_drop = hvd_point_drop};

/* ---- TensorFlow's side of a GPU ---- */

static struct {
    void *memory;
    size_t bytes;
} freed[FREED];
static pthread_mutex_t freed_lock = PTHREAD_MUTEX_INITIALIZER;

static inline void *give(size_t bytes)
{
    void *memory = NULL;
    pthread_mutex_lock(&freed_lock);
    for (int i = FREED - 1; i >= 0 && !memory; i--)
        if (freed[i].memory && freed[i].bytes == bytes) {
            memory = freed[i].memory;
            freed[i].memory = NULL;
        }
    pthread_mutex_unlock(&freed_lock);
    uintptr_t fresh = 0;
    if (!memory) {
        CHECK(cuda->CtxPushCurrent(ctx) == 0 && cuda->MemAlloc(&fresh, bytes) == 0);
        cuda->CtxPopCurrent(&(void *){NULL});
    }
    return memory ? memory : (void *)fresh;
}

static inline void take(void *memory, size_t bytes)
{
    int i = 0;
    pthread_mutex_lock(&freed_lock);
    while (i < FREED - 1 && freed[i].memory)
        i++;
    freed[i].memory = memory; /* what was there is lost, as memory that TensorFlow never gives back */
    freed[i].bytes = bytes;
    pthread_mutex_unlock(&freed_lock);
}

/* What the host asks for there is done before it goes on: the launch of a kernel that copies. */
static inline void launch(void *to, const void *from, size_t bytes)
{
    CHECK(cuda->CtxPushCurrent(ctx) == 0 && cuda->MemcpyDtoDAsync((uintptr_t)to, (uintptr_t)from, bytes, stream) == 0);
    cuda->CtxPopCurrent(&(void *){NULL});
}

/* What is launched from now on waits until the gate is opened. */
static inline void *closed(void)
{
    void *gate = gpus_gate();
    CHECK(cuda->CtxPushCurrent(ctx) == 0 && cuda->StreamWaitEvent(stream, gate, 0) == 0);
    cuda->CtxPopCurrent(&(void *){NULL});
    return gate;
}

static inline void open(void *gate)
{
    gpus_open_gate(gate);
    cuda->EventDestroy(gate);
}

static inline struct tf_tensor *on_gpu(int dtype, int64_t rows, size_t element)
{
    return framework_gpu_tensor(dtype, 1, &rows, element);
}

/* ---- nodes ---- */

static inline void *kernel_of(int kind, int op, int64_t root, const char *key, int dtype)
{
    double one = 1;
    int64_t bits;
    memcpy(&bits, &one, sizeof bits);
    const struct framework_attribute all[] = {
        {"kind", NULL, kind},      {"op", NULL, op},         {"root", NULL, root}, {"prescale", NULL, bits},
        {"postscale", NULL, bits}, {"process_set", NULL, 0}, {"group", NULL, 0},   {"members", NULL, 0},
        {"place", NULL, 0},        {"places", NULL, 1},      {"peer", NULL, 0},    {"order", NULL, 0},
        {"key", key, 0},           {"list", "", 0}};
    struct tf_construction node = {all, (int)HVD_COUNT_OF(all), 0, ""};
    return framework_kernel_for("HvdStart", placed_on, dtype)->create(&node);
}

static inline struct tf_run started(int kind, int op, int64_t root, const char *key, struct tf_tensor *input,
                                    int64_t split)
{
    const struct tf_kernel_builder *builder = framework_kernel_for("HvdStart", placed_on, input->dtype);
    int64_t parts = split >= 0 ? ranks : 0;
    struct tf_tensor *splits = framework_tensor(TF_INT64, 1, &parts, sizeof(int64_t));
    for (int64_t i = 0; i < parts; i++)
        ((int64_t *)splits->data)[i] = split;
    struct tf_run run = {.input = {input, splits}, .step = 1, .kernel = builder, .expects = input->dtype};
    void *kernel = kernel_of(kind, op, root, key, input->dtype);
    builder->compute(kernel, &run);
    builder->destroy(kernel);
    TF_DeleteTensor(input); /* TensorFlow is done with it */
    TF_DeleteTensor(splits);
    return run;
}

static _Atomic int dones;
static inline void done_is_called(unsigned char *functor)
{
    (void)functor;
    atomic_fetch_add(&dones, 1);
}

static inline void finish(struct tf_run *run, struct tf_run *start, int dtype, const char *device)
{
    struct hvd_tf_done done = {{0}, NULL, NULL};
    void (*invoke)(unsigned char *) = done_is_called;
    const struct tf_kernel_builder *builder = framework_kernel_for("HvdFinish", device, dtype);
    CHECK_CODE(start->failed, 0, start->message);
    memcpy(&done.invoke, &invoke, sizeof invoke);
    *run = (struct tf_run){.input = {start->output[0]}, .expects = dtype, .kernel = builder};
    builder->compute_async(builder->create ? builder->create(NULL) : NULL, run, (struct tf_done *)&done);
}

static inline void until(bool (*reached)(int than), int than)
{
    for (int i = 0; !reached(than); i++) {
        CHECK(i < 600000);
        usleep(100);
    }
}
static inline bool is_done(int than)
{
    return atomic_load(&dones) > than;
}
static inline bool has_launched(int than)
{
    return gpus_calls("ncclGroupEnd") > than;
}
static inline bool has_recorded(int than)
{
    return gpus_calls("cuCtxRecordEvent") > than;
}
static inline bool all_is_let_go_of(int than)
{
    return framework_tensors() <= than;
}

static inline void let_go_of(struct tf_run *run)
{
    for (int i = 0; i < 2; i++)
        if (run->output[i])
            TF_DeleteTensor(run->output[i]);
    TF_DeleteTensor(run->input[0]); /* the handle */
}

/* Where values are ready on the device, whoever asks. */
static inline const float *produced(float first)
{
    float *values = give(sizeof(float) * 2 * COUNT);
    for (int i = 0; i < 2 * COUNT; i++)
        values[i] = first + (float)i;
    return values;
}

static inline void begin(struct hvd_engine *engine, int rank, int size)
{
    int dtype[TF_DTYPES];
    void *functions[sizeof core / sizeof(void *)];
    struct hvd_error error = {0};
    mine = engine;
    my_rank = rank;
    ranks = size;
    gpus_find();
    cuda = hvd_cuda_load(&error);
    CHECK(cuda && hvd_begun_can() && cuda->DevicePrimaryCtxRetain(&ctx, rank + DEVICE) == 0);
    CHECK(cuda->CtxPushCurrent(ctx) == 0 && cuda->StreamCreateWithPriority(&stream, 1, -5) == 0);
    cuda->CtxPopCurrent(&(void *){NULL});
    for (int i = 0; i < TF_DTYPES; i++)
        dtype[i] = i == TF_FLOAT    ? HVD_DTYPE_float32
                   : i == TF_INT32  ? HVD_DTYPE_int32
                   : i == TF_UINT16 ? HVD_DTYPE_uint16
                                    : -1;
    memcpy(functions, &core, sizeof core);
    CHECK(hvd_tf_attach(functions, (int)HVD_COUNT_OF(functions), dtype, TF_DTYPES, 1) == NULL);
    framework_gpu(give, take);
}

#endif
