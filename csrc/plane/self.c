/* self.c - the plane of a world of one rank.
 *
 * What does a collective mean when nobody else is there? An allreduce and a reducescatter apply their factor (a
 * sum with prescale is still a multiplication), a broadcast, an allgather and an alltoall copy when the output is
 * another buffer, a barrier does nothing. All of it happens in `start`: there is nobody to wait for, so poll only says
 * "done", no thread is woken and no memory is shared. The kernel does the arithmetic, with one source, so that a script
 * gives the same bits on one rank here as every other plane would give.
 */
#include "plane.h"

#include "../kernel/kernel.h"

#include <string.h>

static int self_open(const struct hvd_plane_arg *arg, void **plane, struct hvd_error *error)
{
    if (arg->size != 1)
        return hvd_fail(error, HVD_EINIT, HVD670 "plane self serves one rank, this set has %d", arg->size);
    *plane = NULL;
    return HVD_OK;
}

static int self_start(void *plane, struct hvd_work *work, struct hvd_error *error)
{
    (void)plane;
    (void)error;
    if (work->kind == HVD_BARRIER)
        return HVD_OK;
    struct hvd_scale scale = {0};
    bool reduces = work->kind == HVD_ALLREDUCE || work->kind == HVD_REDUCESCATTER;
    if (reduces)
        scale = hvd_scale_fold(work->op, work->dtype, 1, work->divide_by, work->prescale, work->postscale);
    for (uint32_t i = 0; i < work->pieces; i++) {
        const struct hvd_piece *piece = &work->piece[i];
        if (!piece->in || !piece->out || piece->count == 0)
            continue;
        if (reduces)
            hvd_reduce(work->dtype, &scale, piece->out, &piece->in, 1, piece->count);
        else if (piece->out != piece->in)
            memmove(piece->out, piece->in, piece->count * (size_t)hvd_dtype_bytes(work->dtype));
    }
    return HVD_OK;
}

static int self_poll(void *plane, struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    (void)plane;
    (void)work;
    (void)error;
    *progress = true;
    return HVD_OK;
}

static void self_close(void *plane)
{
    (void)plane;
}

const struct hvd_plane hvd_plane_self = {
    .name = "self",
    .preference = 1000,
    .order = HVD_ORDER_SET,
    .open = self_open,
    .can = hvd_plane_can_all,
    .start = self_start,
    .poll = self_poll,
    .close = self_close,
};
