/* levels.c - a set on several hosts on two levels: NCCL inside each host, streams of our own or an MPI between hosts.
 *
 * NCCL carries across hosts by itself and is the best where it knows the network. Where it does not (no route that it
 * finds, another NCCL on another host, a host whose only rank has none at all), two levels may be asked for: with plane
 * hier, or by naming what is to join the hosts (HVD_HOSTS_*). It is hier's division of the work, of which the part
 * inside a host is NCCL's. Ranks with the same number on
 * their hosts are a *lane* (plane/hier/lanes.c), and there are as many as the host with the fewest ranks has. A bucket:
 *
 *   inside   packed into the plane's own memory, and reduced so that each lane's rank of this host has its share of the
 *            host's sum: a reduce-scatter, or where a host has more ranks than there are lanes, a reduce to each.
 *   down     that share is copied into pinned memory of the CPU.
 *   across   plane p2p adds up the lane's shares, over the links of the set: 2 (n - 1) / n of a bucket leave each of n
 *            hosts, whatever its ranks are. Or plane mpi does, over a communicator of the lane, which was made before
 *            the set was opened. It moves nothing unless it is polled, and may have memory of the share for ever when
 *            a job has failed.
 *   up       the sum goes back to the device, and inside the host to all: an allgather, or a broadcast from each.
 *
 * The factor of an average is multiplied before anything is added up, as ever on devices (calls.c); a rank that is
 * alone on its host, and has no kernel for it, does that itself before its share crosses.
 *
 * A work is over when all of this lies on the stream; until then none of another set gets there (order.c counts what
 * an agenda still holds), or else two ranks could put the second half of one and the whole of another in different
 * orders. Deliberately not here: segments that cross while others are reduced (bucket after bucket is enough to keep a
 * slow wire busy), and other kinds than allreduce, which go by way of the CPU.
 */
#include "state.h"

#include <stdlib.h>
#include <string.h>

extern const struct hvd_plane hvd_plane_hier, hvd_plane_mpi, hvd_plane_p2p;

bool hvd_nccl_levels_fit(const struct hvd_plane_arg *arg)
{
    if (arg->device_hosts == HVD_HOSTS_BY_MPI) {
        struct hvd_plane_arg linked = *arg;
        struct hvd_link *none = NULL;
        linked.link = &none; /* it has no use for any, and asks of hosts alone then */
        return hvd_plane_hier.fits(&linked);
    }
    bool asked = arg->device_hosts == HVD_HOSTS_BY_STREAMS ||
                 (arg->device_hosts == HVD_HOSTS_AUTO && arg->wanted == &hvd_plane_hier);
    return asked && hvd_plane_hier.fits(arg);
}

struct hvd_nccl_levels *hvd_nccl_levels_open(const struct hvd_plane_arg *arg)
{
    struct hvd_nccl_levels *levels = calloc(1, sizeof *levels);
    HVD_ASSERT(levels);
    struct hvd_hier_place *place = &levels->place;
    hvd_hier_lay_out(arg->host_of, arg->size, arg->rank, place);
    levels->by = arg->device_hosts == HVD_HOSTS_BY_MPI ? &hvd_plane_mpi : &hvd_plane_p2p;
    if (place->number >= place->lanes)
        return levels;
    struct hvd_plane_arg across = *arg;
    across.rank = place->host;
    across.size = place->hosts;
    across.bells = NULL;
    across.host_of = NULL;
    across.comm = arg->lane_comm;
    across.link = levels->link;
    for (int host = 0; host < place->hosts && levels->by == &hvd_plane_p2p; host++)
        levels->link[host] = arg->link[place->across[host]];
    if (levels->by->open(&across, &levels->across, &levels->refused) != HVD_OK)
        levels->across = NULL;
    return levels;
}

void hvd_nccl_levels_close(struct hvd_nccl_levels *levels)
{
    if (levels->across)
        levels->by->close(levels->across);
    free(levels);
}

void hvd_nccl_levels_free(struct hvd_nccl_plane *plane)
{
    struct hvd_nccl_levels *levels = plane->levels;
    if (!levels)
        return;
    if (!hvd_nccl_levels_polls(levels)) /* what MPI has it does not give back */
        hvd_pinned_free(plane->cuda, &levels->pinned);
    if (levels->copied)
        plane->cuda->EventDestroy(levels->copied);
    levels->copied = NULL;
}

bool hvd_nccl_levels_can(const struct hvd_nccl_plane *plane, const struct hvd_work *work)
{
    return !plane->levels || work->kind == HVD_ALLREDUCE;
}

/* Elements of a lane's share, with what makes all shares equal; and what of it is there. */
static uint64_t room_of(const struct hvd_nccl_levels *levels, uint64_t count)
{
    uint64_t lanes = (uint64_t)levels->place.lanes;
    return HVD_ALIGN_UP((count + lanes - 1) / lanes, HVD_CACHE_LINE);
}

static uint64_t share_of(const struct hvd_nccl_plane *plane, int lane)
{
    const struct hvd_hier_place *place = &plane->levels->place;
    uint64_t count = plane->bucket.count;
    return hvd_hier_share(count, place->lanes, lane + 1) - hvd_hier_share(count, place->lanes, lane);
}

size_t hvd_nccl_levels_padding(const struct hvd_nccl_plane *plane, int dtype, uint64_t count)
{
    if (!plane->levels)
        return 0;
    uint64_t all = room_of(plane->levels, count) * (uint64_t)plane->levels->place.lanes;
    return (size_t)(all - count) * (size_t)hvd_dtype_bytes(dtype);
}

static void *lane_at(const struct hvd_nccl_plane *plane, const struct hvd_work *work, int lane)
{
    size_t each = room_of(plane->levels, plane->bucket.count) * (size_t)hvd_dtype_bytes(hvd_nccl_dtype(plane, work));
    return (void *)(plane->bucket.out + each * (size_t)lane);
}

static int reduce_inside(struct hvd_nccl_plane *plane, const struct hvd_work *work, int op)
{
    const struct hvd_hier_place *place = &plane->levels->place;
    void *all = (void *)plane->bucket.out, *stream = plane->device->stream;
    int type = hvd_nccl_type(hvd_nccl_dtype(plane, work)), result = HVD_NCCL_SUCCESS;
    if (place->locals == place->lanes)
        return plane->nccl->ReduceScatter(all, lane_at(plane, work, place->number),
                                          room_of(plane->levels, plane->bucket.count), type, op, plane->comm, stream);
    for (int lane = 0; lane < place->lanes && hvd_nccl_going(result); lane++) {
        void *at = lane_at(plane, work, lane);
        if (share_of(plane, lane))
            result = plane->nccl->Reduce(at, at, share_of(plane, lane), type, op, lane, plane->comm, stream);
    }
    return result;
}

static int hand_out(struct hvd_nccl_plane *plane, const struct hvd_work *work, int op)
{
    const struct hvd_hier_place *place = &plane->levels->place;
    size_t bytes = (size_t)hvd_dtype_bytes(hvd_nccl_dtype(plane, work));
    void *all = (void *)plane->bucket.out, *stream = plane->device->stream;
    int result = HVD_NCCL_SUCCESS;
    (void)op;
    if (place->locals == place->lanes)
        return plane->nccl->AllGather(lane_at(plane, work, place->number), all,
                                      room_of(plane->levels, plane->bucket.count) * bytes, HVD_NCCL_UINT8, plane->comm,
                                      stream);
    for (int lane = 0; lane < place->lanes && hvd_nccl_going(result); lane++) {
        void *at = lane_at(plane, work, lane);
        if (share_of(plane, lane))
            result = plane->nccl->Broadcast(at, at, share_of(plane, lane) * bytes, HVD_NCCL_UINT8, lane, plane->comm,
                                            stream);
    }
    return result;
}

int hvd_nccl_levels_reduce(struct hvd_nccl_plane *plane, const struct hvd_work *work, int op, struct hvd_scale scale,
                           struct hvd_error *error)
{
    struct hvd_nccl_levels *levels = plane->levels;
    levels->scale = scale;
    levels->phase = plane->bucket.count ? HVD_NCCL_INSIDE : HVD_NCCL_ALL;
    if (plane->lonely || !plane->bucket.count)
        return HVD_OK;
    return hvd_nccl_group(plane, work, op, reduce_inside, error);
}

static int cuda_call(int code, const char *what, struct hvd_error *error)
{
    return code == 0 ? HVD_OK : hvd_cuda_failed(code, what, error);
}

/* Pinned memory for a share, and an event. The sum before may still be on its way up to the device from there. */
static int reserve(struct hvd_nccl_plane *plane, size_t bytes, struct hvd_error *error)
{
    enum { NO_TIMING = 2 };
    struct hvd_nccl_levels *levels = plane->levels;
    int code = HVD_OK;
    if (!levels->copied)
        code = cuda_call(plane->cuda->EventCreate(&levels->copied, NO_TIMING), "make an event", error);
    return code == HVD_OK ? hvd_pinned_reserve(plane->cuda, &levels->pinned, bytes, error) : code;
}

static int copy_down(struct hvd_nccl_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_nccl_levels *levels = plane->levels;
    void *stream = plane->device->stream;
    size_t bytes = share_of(plane, levels->place.number) * (size_t)hvd_dtype_bytes(hvd_nccl_dtype(plane, work));
    int code = reserve(plane, bytes ? bytes : 1, error);
    if (code == HVD_OK && bytes)
        code = cuda_call(plane->cuda->MemcpyDtoHAsync(
                             levels->pinned.at, (uintptr_t)lane_at(plane, work, levels->place.number), bytes, stream),
                         "copy a host's sum from a device", error);
    return code == HVD_OK ? cuda_call(plane->cuda->EventRecord(levels->copied, stream), "record an event", error)
                          : code;
}

static int start_across(struct hvd_nccl_plane *plane, const struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_nccl_levels *levels = plane->levels;
    uint64_t count = share_of(plane, levels->place.number);
    int asked = plane->cuda->EventQuery(levels->copied);
    if (asked == HVD_CUDA_NOT_READY)
        return HVD_AGAIN;
    const void *source = levels->pinned.at;
    if (asked == 0 && plane->lonely && !hvd_nccl_packs_scaled(plane, work) && levels->scale.factor != 1.0)
        hvd_reduce(hvd_nccl_dtype(plane, work), &levels->scale, levels->pinned.at, &source, 1, count);
    levels->piece = (struct hvd_piece){levels->pinned.at, levels->pinned.at, count};
    levels->work = hvd_hier_unscaled(HVD_ALLREDUCE, levels->scale.op, hvd_nccl_dtype(plane, work), count);
    levels->work.piece = &levels->piece;
    levels->work.pieces = 1;
    return asked == 0 ? levels->by->start(levels->across, &levels->work, error)
                      : hvd_cuda_failed(asked, "copy a host's sum", error);
}

static int finish_across(struct hvd_nccl_plane *plane, const struct hvd_work *work, bool *progress,
                         struct hvd_error *error)
{
    struct hvd_nccl_levels *levels = plane->levels;
    struct hvd_error mine = {0};
    int code = levels->by->poll(levels->across, &levels->work, progress, &mine);
    if (code < 0) /* links name a peer by its rank in the set, MPI names none */
        return hvd_fail_rank(error, code, mine.culprit < 0 ? plane->rank : mine.culprit, "%s", mine.text);
    if (code == HVD_AGAIN || levels->piece.count == 0)
        return code;
    return cuda_call(
        plane->cuda->MemcpyHtoDAsync((uintptr_t)lane_at(plane, work, levels->place.number), levels->pinned.at,
                                     levels->piece.count * (size_t)hvd_dtype_bytes(hvd_nccl_dtype(plane, work)),
                                     plane->device->stream),
        "copy the hosts' sum to a device", error);
}

int hvd_nccl_levels_step(struct hvd_nccl_plane *plane, const struct hvd_work *work, bool *progress,
                         struct hvd_error *error)
{
    struct hvd_nccl_levels *levels = plane->levels;
    bool has_lane = levels->place.number < levels->place.lanes;
    int code = HVD_OK;
    while (code == HVD_OK && levels->phase != HVD_NCCL_ALL) {
        enum hvd_nccl_phase phase = levels->phase++;
        if (phase == HVD_NCCL_UP) {
            code = plane->lonely ? HVD_OK : hvd_nccl_group(plane, work, HVD_NCCL_SUM, hand_out, error);
            *progress = true;
            break; /* HVD_AGAIN: it is under way, and hvd_nccl_settled tells when it is on the stream */
        }
        if (has_lane)
            code = phase == HVD_NCCL_INSIDE ? copy_down(plane, work, error)
                   : phase == HVD_NCCL_DOWN ? start_across(plane, work, error)
                                            : finish_across(plane, work, progress, error);
        levels->phase = code == HVD_OK ? levels->phase : phase; /* the same again */
        *progress |= code == HVD_OK;
    }
    return code;
}

bool hvd_nccl_levels_polls(const struct hvd_nccl_levels *levels)
{
    return levels->by->polled && levels->phase == HVD_NCCL_ACROSS;
}

int hvd_nccl_levels_watch(const struct hvd_nccl_levels *levels, struct pollfd *news)
{
    return levels->phase == HVD_NCCL_ACROSS && levels->by->watch ? levels->by->watch(levels->across, news) : 0;
}
