/* nccl.c - the plane of tensors on GPUs: works become NCCL's collectives on a stream of our own.
 *
 * The engine hands over works whose tensors lie on devices. Opening costs nothing and loads nothing, for most jobs have
 * none: before the first such work of a set its ranks greet each other (plane/nccl/comm.c), and that is where CUDA's
 * driver and NCCL are found, or where all agree to do without.
 *
 * A work goes through stages, none of which blocks: the communicator is connected (the first one only), the calls are
 * launched behind the events after which the tensors are ready (calls.c), and a mark is put behind them. That is all:
 * the next work may be launched at once, and whoever wants the result lets his own stream wait for the mark. So no
 * thread waits for a device. What is under way there is looked at until it is done (settle), for errors come late;
 * nobody rings for that, so the plane is `silent`: the engine comes again by itself. All works of a device, of
 * whichever set, run on one stream (device.c).
 *
 * NCCL cannot lose a peer and go on: when the job has failed, the communicator is aborted, which ends what runs on the
 * device; so no stream of the user waits for a dead rank (end.c). After a failure every later call repeats it.
 */
#include "plane.h"

#include "plane/nccl/state.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CLOSING_NS 10000000000u /* for what all have put on their streams, and will end unless somebody dies */

static int open_plane(const struct hvd_plane_arg *arg, void **self, struct hvd_error *error)
{
    struct hvd_nccl_plane *plane = calloc(1, sizeof *plane);
    if (!plane)
        return hvd_fail(error, HVD_ENOMEM, HVD951 "rank %d: no memory for plane nccl", arg->rank);
    plane->rank = arg->rank;
    plane->size = arg->size;
    plane->any_order = arg->any_order;
    plane->shares_gpus = arg->shares_gpus;
    plane->nccl_blocks = arg->nccl_blocks;
    plane->timeout_ns = (uint64_t)arg->start_timeout_ms * 1000000u;
    plane->multiplied = -1;
    if (arg->host_of && (plane->host_of = malloc((size_t)arg->size * sizeof *plane->host_of)))
        memcpy(plane->host_of, arg->host_of, (size_t)arg->size * sizeof *plane->host_of);
    *self = plane;
    return HVD_OK;
}

static bool can(void *self, const struct hvd_work *work)
{
    return work->flags & HVD_WORK_ON_DEVICE && work->kind != HVD_BARRIER && hvd_plane_can_all(self, work) &&
           hvd_nccl_computes(self, work);
}

static void hello(void *self, const struct hvd_work *first, void *mine)
{
    hvd_nccl_say_hello(self, first, mine);
}

static int met(void *self, const void *all, struct hvd_error *error)
{
    return hvd_nccl_hear(self, all, error);
}

static int start(void *self, struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_nccl_plane *plane = self;
    (void)error;
    if (!plane->failed.code && work->device && work->device - 1 != plane->device->ordinal)
        hvd_fail(&plane->failed, HVD_EINTERNAL,
                 HVD664
                 "a tensor of this rank lies on device %d, and its communicator is of device %d; please report this",
                 work->device - 1, plane->device->ordinal);
    plane->stage = HVD_NCCL_STARTED;
    return HVD_OK; /* others may have started: poll tells of a failure */
}

/* One step, with the device current. HVD_AGAIN: not yet; *progress: the next one may be possible at once. */
static int go_on(struct hvd_nccl_plane *plane, struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    int code = hvd_nccl_connect(plane, error);
    if (code == HVD_OK)
        code = hvd_nccl_settled(plane, plane->connected ? "do a collective" : "connect the ranks", error);
    if (code != HVD_OK)
        return code;
    plane->connected = true;
    if (plane->stage == HVD_NCCL_STARTED) {
        code = hvd_nccl_launch(plane, work, error);
        *progress |= plane->stage == HVD_NCCL_LAUNCHING;
        if (code != HVD_OK)
            return code;
    }
    struct hvd_gpu_event *mark = hvd_nccl_device_mark(plane->device, error);
    if (!mark)
        return error->code;
    if (plane->last)
        hvd_gpu_event_drop(plane->last);
    plane->last = mark;
    hvd_gpu_event_keep(mark);
    mark->before = plane->before;
    plane->before = NULL;
    work->behind = mark;
    *progress = true;
    plane->stage = HVD_NCCL_IDLE;
    return HVD_OK;
}

static int settle(void *self, struct hvd_error *error)
{
    struct hvd_nccl_plane *plane = self;
    int code = plane->failed.code;
    if (code == HVD_OK && plane->last)
        code = hvd_nccl_enter(plane, &plane->failed);
    if (code == HVD_OK && plane->last) {
        code = hvd_nccl_settle(plane, &plane->failed);
        hvd_nccl_leave(plane);
    }
    if (code < 0) {
        *error = plane->failed;
        error->culprit = plane->rank;
    }
    return code;
}

static int poll_plane(void *self, struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct hvd_nccl_plane *plane = self;
    int code = plane->failed.code;
    if (code == HVD_OK)
        code = hvd_nccl_enter(plane, &plane->failed);
    if (code == HVD_OK) {
        code = go_on(plane, work, progress, &plane->failed);
        hvd_nccl_leave(plane);
    }
    if (code < 0) {
        *error = plane->failed;
        error->culprit = plane->rank;
    }
    return code;
}

static void part(void *self, bool abort)
{
    struct hvd_nccl_plane *plane = self;
    if (abort)
        hvd_fail(&plane->failed, HVD_EPEER, HVD456 "the job has failed");
    hvd_nccl_part(plane, abort || plane->failed.code != HVD_OK || plane->last || plane->stage != HVD_NCCL_IDLE);
}

static void usage(void *self, uint64_t *resident, uint64_t *handed_out)
{
    (void)self, (void)handed_out;
    *resident += hvd_nccl_memory_bytes();
}

static void where(void *self, char *text, size_t text_bytes)
{
    hvd_nccl_where(self, text, text_bytes);
}

static void close_plane(void *self)
{
    struct hvd_nccl_plane *plane = self;
    struct hvd_error error = {0};
    uint64_t until_ns = hvd_now_ns() + CLOSING_NS;
    while (!plane->parted && settle(self, &error) == HVD_AGAIN && hvd_now_ns() < until_ns)
        usleep(50);
    part(self, false);
    if (plane->before)
        hvd_gpu_event_drop(plane->before);
    hvd_nccl_disconnect(plane);
    free(plane->host_of);
    free(plane);
}

const struct hvd_plane hvd_plane_nccl = {
    .name = "nccl",
    .preference = 0, /* of tensors in the CPU's memory it does none */
    .order = HVD_ORDER_DEVICE,
    .silent = true,
    .device = true,
    .open = open_plane,
    .can = can,
    .start = start,
    .poll = poll_plane,
    .close = close_plane,
    .hello = hello,
    .met = met,
    .part = part,
    .settle = settle,
    .usage = usage,
    .where = where,
};
