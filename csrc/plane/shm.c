/* shm.c - the plane of one host: ranks move bytes through memory they all map.
 *
 * What does a work become here? A number of segments and a way (shm/lane.h), chosen from agreed fields only, so
 * that every rank chooses the same:
 *
 *   up to 48 bytes        the value rides in the cache line of the word that announces it
 *   flat                  under 32 KB: copy in, one word, everybody sums everything
 *   halves                reduce-scatter and allgather through a ring of slots
 *   direct                all tensors in plane memory: each rank reduces its slice in place, for all
 *   allgather, barrier, broadcast: allgather.c, broadcast.c; alltoall, reducescatter: exchange.c
 *
 * Reading order: lane.h (the shared words and the rule of flow), pipeline.c, allreduce.c, then the rest. All
 * sums are taken in rank order, so every way gives the same bits. Memory: two shares of the host, opened here
 * once: the lanes, 1 MB per rank, and the arena, sparse. Nothing is allocated afterwards but blocks of alloc.
 *
 * After a failure the words of this rank stand still and every later call repeats the failure: a peer's
 * memory cannot be trusted again.
 */
#include "plane/shm/lane.h"

#include "../base/shared_memory.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As large as the machine: no wish for plane memory can exceed it, and sparse pages are free. */
static size_t arena_bytes(const struct hvd_plane_arg *arg)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    size_t bytes = pages > 0 && page > 0 ? (size_t)pages * (size_t)page : (size_t)1 << 30;
    if (arg->arena_bytes)
        bytes = arg->arena_bytes;
    return HVD_ALIGN_UP(bytes, (size_t)2 << 20);
}

/* Plane memory is a gift, not a need: whatever fails on any rank, all go on without. */
static int open_arena(struct hvd_shm *shm, const struct hvd_plane_arg *arg, struct hvd_error *error)
{
    uint64_t mine = arena_bytes(arg), all[HVD_LOCAL_MAX];
    int code = arg->allgather(arg->self, &mine, sizeof mine, all, error);
    if (code)
        return code;
    for (int rank = 0; rank < arg->size; rank++)
        mine = all[rank] < mine ? all[rank] : mine;
    struct hvd_error ignored = {0};
    struct hvd_share *share = arg->share(arg->self, mine, &ignored);
    shm->arena = share ? hvd_shm_arena_new(share, arg->rank) : NULL;
    mine = shm->arena != NULL;
    code = arg->allgather(arg->self, &mine, sizeof mine, all, error);
    for (int rank = 0; rank < arg->size; rank++)
        mine = mine && (code || all[rank]);
    if (shm->arena && !mine) {
        hvd_shm_arena_close(shm->arena);
        shm->arena = NULL;
    }
    return code;
}

/* What this rank owns lies on its node, if it has one; a lane is written by its owner first. The arena may have huge
 * pages. */
static void place_memory(struct hvd_shm *shm)
{
    int node = hvd_memory_node();
    if (node >= 0)
        (void)hvd_memory_prefer(shm->share->map[shm->rank], shm->share->bytes, node);
    if (shm->arena && node >= 0)
        (void)hvd_memory_prefer(hvd_shm_arena_map(shm->arena, shm->rank), hvd_shm_arena_bytes(shm->arena), node);
    for (int rank = 0; shm->arena && rank < shm->size; rank++)
        hvd_memory_huge(hvd_shm_arena_map(shm->arena, rank), hvd_shm_arena_bytes(shm->arena));
}

static void shm_close(void *plane)
{
    struct hvd_shm *shm = plane;
    if (shm->arena)
        hvd_shm_arena_close(shm->arena);
    if (shm->share)
        hvd_share_drop(shm->share);
    free(shm);
}

static bool shm_fits(const struct hvd_plane_arg *arg)
{
    return arg->one_host && arg->size > 1 && arg->size <= HVD_LOCAL_MAX;
}

static int shm_open(const struct hvd_plane_arg *arg, void **plane, struct hvd_error *error)
{
    if (!arg->one_host)
        return hvd_fail(error, HVD_EINIT, HVD670 "plane shm needs all ranks on one host");
    if (arg->size > HVD_LOCAL_MAX)
        return hvd_fail(error, HVD_EINIT, HVD670 "plane shm serves up to %d ranks, this set has %d", HVD_LOCAL_MAX,
                        arg->size);
    struct hvd_shm *shm = calloc(1, sizeof *shm);
    if (!shm) /* the others wait in share: fail there, too */
        return hvd_fail_rank(error, HVD_ENOMEM, arg->rank, HVD951 "rank %d: no memory for plane shm", arg->rank);
    shm->rank = arg->rank;
    shm->size = arg->size;
    shm->bells = arg->bells;
    shm->share = arg->share(arg->self, sizeof(struct hvd_shm_lane), error);
    int code = shm->share ? HVD_OK : hvd_fail(error, HVD_ENOMEM, HVD652 "no shared memory for plane shm");
    for (int rank = 0; !code && rank < arg->size; rank++)
        shm->lane[rank] = shm->share->map[rank];
    if (!code && arg->arena_bytes != HVD_ARENA_NONE)
        code = open_arena(shm, arg, error);
    if (code) {
        shm_close(shm);
        return code;
    }
    place_memory(shm);
    *plane = shm;
    return HVD_OK;
}

/* The mark's low bits: has this rank joined, so that all its inputs are missing? Does it want no result? */
static uint64_t part_of(const struct hvd_work *work)
{
    bool joined = false, gives = false, takes = false;
    for (uint32_t i = 0; work->kind == HVD_ALLREDUCE && i < work->pieces; i++) {
        joined |= work->piece[i].count > 0 && !work->piece[i].in;
        gives |= work->piece[i].count > 0 && work->piece[i].in;
        takes |= work->piece[i].count > 0 && work->piece[i].out;
    }
    HVD_ASSERT(!(joined && gives));
    return (joined ? HVD_SHM_JOINED : 0) | (takes ? 0 : HVD_SHM_TAKES_NOTHING);
}

/* What all ranks must believe of a work alike, in the bits above the lowest two. */
static uint64_t mark_of(const struct hvd_work *work, int size)
{
    const uint64_t odd = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t what = (uint64_t)work->kind | (uint64_t)(work->flags & HVD_WORK_IN_PLANE) << 4;
    if (work->kind != HVD_BARRIER)
        what |= (uint64_t)work->dtype << 8;
    if (work->kind == HVD_ALLGATHER || work->flags & HVD_WORK_IN_PLANE)
        what |= (uint64_t)work->pieces << 32;
    if (work->kind == HVD_ALLREDUCE || work->kind == HVD_REDUCESCATTER)
        what |= (uint64_t)work->op << 16;
    if (work->kind == HVD_BROADCAST)
        what |= (uint64_t)work->root << 16;
    if (work->kind == HVD_ALLREDUCE || work->kind == HVD_BROADCAST)
        what ^= work->count * odd;
    int counts = work->kind == HVD_ALLTOALL ? size * size : work->kind == HVD_REDUCESCATTER ? size : 0;
    for (int i = 0; i < counts; i++)
        what = (what ^ work->count_of[i]) * odd;
    return what << HVD_SHM_PART_BITS;
}

/* Some steps; the first failure is kept. */
static int advance(struct hvd_shm *shm, const struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct hvd_shm_now *now = &shm->now;
    if (now->finished)
        return HVD_OK;
    bool moved = false, exchange = work->kind == HVD_ALLTOALL || work->kind == HVD_REDUCESCATTER;
    int code = work->kind == HVD_BROADCAST ? hvd_shm_broadcast(shm, work, &moved, &shm->failed)
               : exchange                  ? hvd_shm_exchange(shm, work, &moved, &shm->failed)
                                           : hvd_shm_pipeline(shm, work, &moved, &shm->failed);
    now->finished = code == HVD_OK;
    if (code != HVD_AGAIN || !moved)
        hvd_shm_ring(shm);
    *progress |= moved;
    if (code < 0 && error && error->code == HVD_OK)
        *error = shm->failed;
    return code;
}

static int shm_start(void *plane, struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_shm *shm = plane;
    struct hvd_shm_now *now = &shm->now;
    if (shm->failed.code) {
        *error = shm->failed;
        return shm->failed.code;
    }
    memset(now, 0, sizeof *now);
    now->base = shm->next;
    now->element_bytes = work->kind == HVD_BARRIER ? 1 : (size_t)hvd_dtype_bytes(work->dtype);
    now->mark = mark_of(work, shm->size) | part_of(work);
    switch (work->kind) {
    case HVD_ALLREDUCE:
        hvd_shm_plan_allreduce(shm, work);
        break;
    case HVD_ALLGATHER:
        hvd_shm_plan_allgather(shm, work);
        break;
    case HVD_ALLTOALL:
    case HVD_REDUCESCATTER:
        hvd_shm_plan_exchange(shm, work);
        break;
    case HVD_BROADCAST:
        now->tiny = work->count * now->element_bytes <= HVD_SHM_TINY_BYTES;
        now->segment_count = HVD_SHM_SLOT_BYTES / now->element_bytes;
        now->segments = (work->count + now->segment_count - 1) / now->segment_count;
        break;
    default:
        now->way = &hvd_shm_barrier;
        now->segments = 1;
    }
    shm->next += now->segments;
    now->finished = now->segments == 0;
    bool progress = false;
    (void)advance(shm, work, &progress, NULL); /* a failure is kept for poll: others may have started */
    return HVD_OK;
}

static int shm_poll(void *plane, struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct hvd_shm *shm = plane;
    if (shm->failed.code) {
        *error = shm->failed;
        return shm->failed.code;
    }
    return advance(shm, work, progress, error);
}

static void *shm_alloc(void *plane, size_t bytes)
{
    struct hvd_shm *shm = plane;
    return shm->arena ? hvd_shm_arena_alloc(shm->arena, bytes) : NULL;
}

static bool shm_owns(void *plane, const void *memory, size_t bytes)
{
    struct hvd_shm *shm = plane;
    return shm->arena && hvd_shm_arena_owns(shm->arena, memory, bytes);
}

static void shm_usage(void *plane, uint64_t *resident, uint64_t *handed_out)
{
    struct hvd_shm *shm = plane;
    *resident += hvd_memory_resident(shm->lane[shm->rank], sizeof *shm->lane[shm->rank]);
    *handed_out += shm->arena ? hvd_shm_arena_used(shm->arena) : 0;
}

const struct hvd_plane hvd_plane_shm = {
    .name = "shm",
    .preference = 100,
    .order = HVD_ORDER_SET,
    .fits = shm_fits,
    .open = shm_open,
    .can = hvd_plane_can_all,
    .start = shm_start,
    .poll = shm_poll,
    .close = shm_close,
    .alloc = shm_alloc,
    .release = hvd_shm_arena_release,
    .owns = shm_owns,
    .usage = shm_usage,
};
