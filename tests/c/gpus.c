/* gpus.c - see gpus.h. */
#define _GNU_SOURCE
#include "gpus.h"
#include "world.h"

#include <dlfcn.h>
#include <sched.h>
#include <string.h>

void (*gpus_fail)(const char *name, int nth, int code);
int (*gpus_calls)(const char *name);
void *(*gpus_gate)(void);
void (*gpus_open_gate)(void *event);

void *gpus_symbol(const char *name)
{
    void *library = dlopen(TESTS_STUB, RTLD_NOW);
    CHECK(library, "%s", dlerror());
    return dlsym(library, name);
}

void gpus_find(void)
{
    *(void **)(void *)&gpus_fail = gpus_symbol("stub_fail");
    *(void **)(void *)&gpus_calls = gpus_symbol("stub_calls");
    *(void **)(void *)&gpus_gate = gpus_symbol("stub_gate");
    *(void **)(void *)&gpus_open_gate = gpus_symbol("stub_open_gate");
    hvd_cuda_prefer(TESTS_STUB);
    hvd_nccl_prefer(TESTS_STUB);
}

void gpus_threads(int size, void (*body)(const struct hvd_plane_arg *arg, void *more))
{
    hvd_world_run(HVD_WORLD_THREADS, size, 300, body, NULL);
}

const struct hvd_plane *gpus_plane(void)
{
    int i = 0;
    while (hvd_planes[i] && strcmp(hvd_planes[i]->name, "nccl") != 0)
        i++;
    CHECK(hvd_planes[i], "no plane nccl");
    return hvd_planes[i];
}

int gpus_greet(const struct hvd_plane_arg *world, int device, struct gpus_seat *seat, struct hvd_error *error)
{
    void *opened;
    seat->plane = gpus_plane();
    seat->arg = *world;
    seat->arg.any_order = true;
    seat->arg.start_timeout_ms = seat->arg.start_timeout_ms ? seat->arg.start_timeout_ms : 60000;
    CHECK(seat->plane->open(&seat->arg, &opened, error) == HVD_OK, "%s", error->text);
    seat->nccl = opened;
    return gpus_greet_again(seat, device, error);
}

int gpus_greet_again(struct gpus_seat *seat, int device, struct hvd_error *error)
{
    unsigned char mine[HVD_HELLO_BYTES];
    struct hvd_work first = {.kind = HVD_ALLREDUCE, .flags = HVD_WORK_ON_DEVICE, .device = device + 1};
    seat->plane->hello(seat->nccl, &first, mine);
    CHECK(seat->arg.allgather(seat->arg.self, mine, sizeof mine, seat->all, error) == HVD_OK, "%s", error->text);
    return seat->plane->met(seat->nccl, seat->all, error);
}

int gpus_finish(const struct gpus_seat *seat, struct hvd_work *work, struct hvd_error *error)
{
    bool progress = false;
    int code;
    while ((code = seat->plane->poll(seat->nccl, work, &progress, error)) == HVD_AGAIN)
        sched_yield();
    if (code != HVD_OK)
        return code;
    while ((code = seat->plane->settle(seat->nccl, error)) == HVD_AGAIN)
        sched_yield();
    CHECK(code != HVD_OK || hvd_gpu_event_reached(work->behind, error) == HVD_OK, "%s", error->text);
    hvd_gpu_event_drop(work->behind);
    return code;
}

int gpus_do(const struct gpus_seat *seat, struct hvd_work *work, struct hvd_error *error)
{
    work->flags |= HVD_WORK_ON_DEVICE;
    work->device = seat->nccl->device->ordinal + 1;
    CHECK(seat->plane->start(seat->nccl, work, error) == HVD_OK, "start never refuses");
    return gpus_finish(seat, work, error);
}

void *gpus_stream(int device)
{
    void *ctx, *stream;
    const struct hvd_cuda *cuda = hvd_cuda_load(NULL);
    CHECK(cuda->DevicePrimaryCtxRetain(&ctx, device) == 0 && cuda->CtxPushCurrent(ctx) == 0 &&
              cuda->StreamCreateWithPriority(&stream, 1, -5) == 0,
          "no stream on device %d", device);
    return stream;
}

void gpus_stream_end(void *stream)
{
    void *ctx;
    CHECK(hvd_cuda_load(NULL)->StreamDestroy(stream) == 0, "the stream does not end");
    hvd_cuda_load(NULL)->CtxPopCurrent(&ctx);
}
