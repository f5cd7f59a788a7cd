/* hier.c - the plane of a set on several hosts, of which some have several ranks: shared memory inside, links across.
 *
 * What is slow is the wire, and a host has one. Algorithms that see ranks only send every byte over it as often as
 * there are ranks to hear it, or in a ring as if each neighbour were far away. Here values are added up inside the host
 * before they cross, and handed out inside after: with n hosts 2 (n - 1) / n S bytes leave each of them, whatever its
 * ranks; a flat ring of n hosts with m ranks sends 2 (nm - 1) / (nm) S. All local ranks cross at once, each with its
 * share (hier/lanes.c), so that no single process has to feed the wire.
 *
 * It is put together from two planes that are opened on a part of the set each, shm on the ranks of this host and p2p
 * on those of this rank's lane: hier/reduce.c and broadcast.c say which works in which order, segment after segment, so
 * that both sides work at the same time. What each of them needs to agree on, its own ranks agree on: a lane's works
 * are the same on all its ranks, and those inside on all of a host.
 *
 * `can` is said of what gets the same result so as on any other plane. Not of scaled integers, which would be truncated
 * twice; nor of floats in deterministic mode, since their bits would tell which ranks share a host (p2p adds them in
 * rank order). Small buckets are left to p2p, too (hier/choice.c). Links are shared with plane p2p of the set: works
 * follow one another, and each takes from a link what belongs to it.
 *
 * A lost peer is told with its rank in the set; who sees it is the rank in its lane, or, inside, the engine. After a
 * failure every later call repeats it.
 */
#include "plane/hier/state.h"

#include <stdlib.h>
#include <string.h>

#define SMALL_BYTES_TO                                                                             \
    ((uint64_t)256 << 10) /* of a broadcast that p2p does faster: in its tree most cross once, too \
                           */
#define PASSES 4          /* so that a poll stays short */

static const struct hvd_cost not_known = {.alpha_ns = 50000, .beta_ps = 1000};

extern const struct hvd_plane hvd_plane_hier, hvd_plane_shm, hvd_plane_p2p;

static bool fits(const struct hvd_plane_arg *arg)
{
    struct hvd_hier_place place;
    if (!arg->host_of || !arg->link || arg->size < 3 || arg->size > HVD_RANKS_MAX)
        return false;
    hvd_hier_lay_out(arg->host_of, arg->size, arg->rank, &place);
    return place.hosts > 1 && place.hosts < arg->size;
}

static void close_plane(void *plane)
{
    struct hvd_hier *hier = plane;
    if (hier->across.self)
        hier->across.plane->close(hier->across.self);
    if (hier->inside.self)
        hier->inside.plane->close(hier->inside.self);
    for (int i = 0; i < HVD_HIER_SLOTS; i++) {
        free(hier->slot[i].packed);
        free(hier->slot[i].slice);
    }
    free(hier);
}

static int open_side(struct hvd_hier_side *side, const struct hvd_plane *plane, const struct hvd_plane_arg *arg,
                     struct hvd_error *error)
{
    side->plane = plane;
    return plane->open(arg, &side->self, error);
}

static int open_plane(const struct hvd_plane_arg *arg, void **plane, struct hvd_error *error)
{
    if (!fits(arg))
        return hvd_fail(error, HVD_EINIT,
                        HVD670
                        "plane hier needs several hosts, one of them with several ranks, and links between all of up "
                        "to %d ranks",
                        HVD_RANKS_MAX);
    struct hvd_hier *hier = calloc(1, sizeof *hier);
    if (!hier)
        return hvd_fail_rank(error, HVD_ENOMEM, arg->rank, HVD951 "rank %d: no memory for plane hier", arg->rank);
    struct hvd_hier_place *place = &hier->place;
    hvd_hier_lay_out(arg->host_of, arg->size, arg->rank, place);
    hier->rank = arg->rank;
    hier->size = arg->size;
    hier->any_order = arg->any_order;
    hier->always = arg->wanted == &hvd_plane_hier;
    hier->cost = arg->link_cost.alpha_ns || arg->link_cost.beta_ps ? arg->link_cost : not_known;
    hier->least_bytes = hier->always ? 0 : hvd_hier_least_bytes(place, arg->size, arg->any_order, hier->cost);
    struct hvd_plane_arg inside = *arg, across = *arg;
    inside.rank = place->number;
    inside.size = place->locals;
    inside.one_host = true;
    inside.arena_bytes = HVD_ARENA_NONE;
    inside.link = NULL;
    across.rank = place->host;
    across.size = place->hosts;
    across.bells = NULL;
    across.link = hier->link;
    inside.host_of = across.host_of = NULL;
    across.link_cost = hier->cost;
    across.link_cost.beta_ps *= (uint64_t)place->lanes; /* all lanes cross at once */
    int code = open_side(&hier->inside, &hvd_plane_shm, &inside, error);
    if (code == HVD_OK && place->number < place->lanes) {
        for (int host = 0; host < place->hosts; host++)
            hier->link[host] = arg->link[place->across[host]];
        code = open_side(&hier->across, &hvd_plane_p2p, &across, error);
    }
    if (code != HVD_OK) {
        close_plane(hier);
        return code;
    }
    *plane = hier;
    return HVD_OK;
}

static struct hvd_scale scale_of(const struct hvd_hier *hier, const struct hvd_work *work)
{
    return hvd_scale_fold(work->op, work->dtype, work->active ? work->active : hier->size, work->divide_by,
                          work->prescale, work->postscale);
}

static bool can(void *plane, const struct hvd_work *work)
{
    const struct hvd_hier *hier = plane;
    uint64_t bytes = work->count * (uint64_t)(work->kind == HVD_BARRIER ? 0 : hvd_dtype_bytes(work->dtype));
    if (work->kind == HVD_BROADCAST)
        return hier->always || bytes >= SMALL_BYTES_TO;
    if (work->kind != HVD_ALLREDUCE || bytes < hier->least_bytes || !hvd_plane_can_all(NULL, work))
        return false;
    if (hvd_is_float(work->dtype))
        return hier->any_order;
    struct hvd_scale scale = scale_of(hier, work);
    return scale.divide == 1 && scale.factor == 1.0 && scale.first == 1.0;
}

static const struct hvd_hier_way *way_of(const struct hvd_work *work)
{
    return work->kind == HVD_BROADCAST ? &hvd_hier_broadcast : &hvd_hier_reduce;
}

static int start(void *plane, struct hvd_work *work, struct hvd_error *error)
{
    struct hvd_hier *hier = plane;
    struct hvd_hier_now *now = &hier->now;
    if (hier->failed.code) {
        *error = hier->failed;
        return hier->failed.code;
    }
    memset(now, 0, sizeof *now);
    now->sum_dtype = work->dtype;
    now->bytes = now->sum_bytes = (size_t)hvd_dtype_bytes(work->dtype);
    now->lands_there = now->gives_there = work->pieces == 1 && work->piece[0].out;
    if (work->kind == HVD_ALLREDUCE) {
        now->wide = hvd_is_narrow(work->dtype);
        now->sum_dtype = now->wide ? HVD_DTYPE_float32 : work->dtype;
        now->sum_bytes = now->wide ? sizeof(float) : now->bytes;
        now->scale = scale_of(hier, work);
        now->scaled = now->scale.factor != 1.0;
        now->gives_there = work->pieces == 1 && work->piece[0].in && !now->wide;
    }
    now->parts = now->wide ? 2 : 1;
    hier->inside.done = hier->across.done = 0;
    hier->inside.busy = hier->across.busy = false;
    if (hvd_hier_cut(hier, work, &hier->failed) == HVD_OK)
        way_of(work)->begin(hier, work);
    return HVD_OK; /* others may have started: poll tells */
}

/* Errors of a side count ranks as it does. */
static int told(struct hvd_hier *hier, const struct hvd_hier_side *side, int code, const struct hvd_error *mine)
{
    int culprit = mine->culprit;
    if (code == HVD_ENOMEM || culprit < 0)
        culprit = hier->rank;
    else if (side == &hier->inside)
        culprit = hier->place.local[culprit % hier->place.locals];
    return hvd_fail_rank(&hier->failed, code, culprit, "%s%s",
                         side == &hier->inside ? "inside the host, counted there: " : "", mine->text);
}

/* One side: HVD_OK: moved; HVD_AGAIN: cannot now. */
static int step(struct hvd_hier *hier, const struct hvd_work *work, struct hvd_hier_side *side,
                bool (*next)(struct hvd_hier *hier, const struct hvd_work *work),
                void (*done)(struct hvd_hier *hier, const struct hvd_work *work))
{
    struct hvd_error error;
    bool moved = false;
    hvd_error_none(&error);
    if (side->done == side->total)
        return HVD_AGAIN;
    if (!side->busy) {
        if (!next(hier, work))
            return HVD_AGAIN;
        side->work.piece = &side->piece;
        side->work.pieces = 1;
        int code = side->plane->start(side->self, &side->work, &error);
        if (code != HVD_OK)
            return told(hier, side, code, &error);
        moved = side->busy = true;
    }
    int code = side->plane->poll(side->self, &side->work, &moved, &error);
    if (code < 0)
        return told(hier, side, code, &error);
    if (code == HVD_AGAIN)
        return moved ? HVD_OK : HVD_AGAIN;
    done(hier, work);
    side->done++;
    side->busy = false;
    return HVD_OK;
}

static int poll_plane(void *plane, struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct hvd_hier *hier = plane;
    const struct hvd_hier_way *way = way_of(work);
    int code = hier->failed.code == HVD_EPEER ? HVD_OK : hier->failed.code; /* it may be missed no more */
    for (int pass = 0; pass < PASSES && code >= 0; pass++) {
        hier->failed.code = HVD_OK;
        int across = step(hier, work, &hier->across, way->next_across, way->done_across);
        int inside = across < 0 ? across : step(hier, work, &hier->inside, way->next_inside, way->done_inside);
        code = inside < 0 ? inside : HVD_AGAIN;
        if (code < 0)
            break;
        bool moved = across == HVD_OK || inside == HVD_OK;
        if (hier->across.done == hier->across.total && hier->inside.done == hier->inside.total) {
            *progress = true;
            return HVD_OK;
        }
        if (!moved)
            break;
        *progress = true;
    }
    if (code < 0)
        *error = hier->failed;
    return code;
}

static int watch(void *plane, struct pollfd *news)
{
    struct hvd_hier *hier = plane;
    return hier->across.busy ? hier->across.plane->watch(hier->across.self, news) : 0;
}

static void usage(void *plane, uint64_t *resident, uint64_t *handed_out)
{
    struct hvd_hier *hier = plane;
    hier->inside.plane->usage(hier->inside.self, resident, handed_out);
}

const struct hvd_plane hvd_plane_hier = {
    .name = "hier",
    .preference = 60, /* above p2p, which does the rest */
    .order = HVD_ORDER_SET,
    .fits = fits,
    .open = open_plane,
    .can = can,
    .start = start,
    .poll = poll_plane,
    .close = close_plane,
    .watch = watch,
    .usage = usage,
};
