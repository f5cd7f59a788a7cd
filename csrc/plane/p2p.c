/* p2p.c - the plane that needs nothing but links: every rank talks to ranks, over TCP or whatever a link is.
 *
 * What does a work become here? A buffer, an algorithm and a run (p2p/run.h). The bucket's pieces are packed into one
 * buffer (p2p/pack.h), unless it is one tensor that can be worked on where the result goes; the algorithm is the
 * cheapest for the agreed cost of the links, or the one that was asked for; when its steps are done, or on the way, the
 * pieces are filled.
 *
 * IN RANK ORDER OR NOT. Algorithms that combine all contributions at once, in rank order, give the same bits as shared
 * memory does, with one rounding: they are the rule for floats. The others combine on the way: in many ranks fewer
 * steps, but bits depend on where in the bucket a value lies. They are used where that cannot be seen (integers) and
 * where it was allowed (any_order); never for scaled integers, which would truncate at every hop, and for 16-bit
 * floats, which would round there, only if asked for by name. Floats that such a run leaves unscaled are scaled once,
 * when the pieces are filled.
 *
 * A rank that has joined gives the identity of the op. Like every plane's, each choice is made from agreed fields only.
 * Memory: one buffer, one area for what is kept, as large as the largest work seen; a block of 64 KB. After a failure
 * every later call repeats it: a stream that lost its place cannot be trusted again. The end of a stream is told as
 * long as it is missed; no other work can begin before this one is done.
 */
#include "plane.h"

#include "plane/p2p/pack.h"

#include <stdlib.h>
#include <string.h>

#define GRAIN_BYTES ((uint64_t)128 << 10) /* of a pipelined algorithm's segments */
#define KINDS       16

struct p2p {
    int rank, size;
    int *host_of; /* of each rank; NULL: all are on one */
    struct hvd_link *const *link;
    struct hvd_cost cost;
    bool any_order;
    const bool *leaving;
    const struct hvd_algo *forced;
    const struct hvd_algo *choice[KINDS][64][2]; /* by kind, bits of the bytes, ordered; NULL: not asked yet */
    struct hvd_error failed;
    struct hvd_p2p_run run;
    struct hvd_p2p_bucket bucket;
    unsigned char *buffer, *kept, *block;
    size_t buffer_bytes, kept_bytes;
    struct hvd_p2p_early early;
    uint64_t *chunk; /* allgather: elements of each rank, over all pieces */
    uint64_t works;
};

static void p2p_close(void *plane)
{
    struct p2p *p2p = plane;
    hvd_p2p_early_close(&p2p->early, p2p->link, p2p->rank, p2p->size);
    free(p2p->buffer);
    free(p2p->kept);
    free(p2p->block);
    free(p2p->chunk);
    free(p2p->host_of);
    free(p2p);
}

static bool p2p_fits(const struct hvd_plane_arg *arg)
{
    return arg->link && arg->size > 1 && arg->size <= HVD_RANKS_MAX;
}

static int p2p_open(const struct hvd_plane_arg *arg, void **plane, struct hvd_error *error)
{
    if (!p2p_fits(arg))
        return hvd_fail(error, HVD_EINIT, HVD670 "plane p2p needs links between 2 to %d ranks; this set has %d%s",
                        HVD_RANKS_MAX, arg->size, arg->link ? "" : " and no links");
    const struct hvd_algo *forced = arg->algo ? hvd_algo_named(arg->algo) : NULL;
    if (arg->algo && !forced)
        return hvd_fail(error, HVD_EINVAL, HVD850 "there is no algorithm %s", arg->algo);
    if (forced && !forced->ordered && !arg->any_order)
        return hvd_fail(error, HVD_EINVAL,
                        HVD851
                        "algorithm %s adds floats in an order that depends on where in a bucket a tensor lies, which "
                        "deterministic mode does not allow: name another algorithm, or unset HVDLITE_ALGO",
                        arg->algo);
    struct p2p *p2p = calloc(1, sizeof *p2p);
    if (!p2p)
        return hvd_fail_rank(error, HVD_ENOMEM, arg->rank, HVD951 "rank %d: no memory for plane p2p", arg->rank);
    bool known = arg->link_cost.alpha_ns || arg->link_cost.beta_ps;
    p2p->rank = arg->rank;
    p2p->size = arg->size;
    p2p->link = arg->link;
    p2p->forced = forced;
    p2p->any_order = arg->any_order;
    p2p->leaving = arg->leaving;
    p2p->cost = known ? arg->link_cost : (struct hvd_cost){.alpha_ns = 50000, .beta_ps = 1000};
    p2p->block = malloc(HVD_P2P_BLOCK);
    p2p->chunk = calloc((size_t)arg->size, sizeof *p2p->chunk);
    if (arg->host_of && (p2p->host_of = malloc((size_t)arg->size * sizeof *p2p->host_of)))
        memcpy(p2p->host_of, arg->host_of, (size_t)arg->size * sizeof *p2p->host_of);
    if (!p2p->block || !p2p->chunk || (arg->host_of && !p2p->host_of)) {
        p2p_close(p2p);
        return hvd_fail_rank(error, HVD_ENOMEM, arg->rank, HVD951 "rank %d: no memory for plane p2p", arg->rank);
    }
    *plane = p2p;
    return HVD_OK;
}

static bool p2p_can(void *plane, const struct hvd_work *work)
{
    return work->kind != HVD_BARRIER && hvd_plane_can_all(plane, work);
}

static bool reduces(const struct hvd_work *work)
{
    return work->kind == HVD_ALLREDUCE || work->kind == HVD_REDUCESCATTER;
}

enum order { ANY_ORDER, BETTER_ORDERED, MUST_BE_ORDERED };

/* Must values meet all at once, with one rounding? */
static enum order needs_order(const struct p2p *p2p, const struct hvd_work *work, const struct hvd_scale *scale)
{
    if (!reduces(work))
        return ANY_ORDER;
    switch (work->dtype) {
    case HVD_DTYPE_float32:
    case HVD_DTYPE_float64:
        return p2p->any_order ? ANY_ORDER : MUST_BE_ORDERED;
    case HVD_DTYPE_float16:
    case HVD_DTYPE_bfloat16:
        return p2p->any_order ? BETTER_ORDERED : MUST_BE_ORDERED;
    case HVD_DTYPE_float8_e4m3fn:
    case HVD_DTYPE_float8_e5m2:
        return MUST_BE_ORDERED; /* of two or three bits, a rounding at every hop would leave little */
    default:
        return scale->divide != 1 || scale->factor != 1.0 || scale->first != 1.0 ? MUST_BE_ORDERED : ANY_ORDER;
    }
}

static int bits(uint64_t value)
{
    int bits = value ? 64 - __builtin_clzll(value) : 0;
    return bits < 63 ? bits : 63;
}

/* The same on all ranks, for a rank's own guess, too: from kind, bytes to a power of two, and agreed costs only. */
static const struct hvd_algo *choose(struct p2p *p2p, const struct hvd_shape *shape, size_t element_bytes,
                                     enum order order)
{
    const struct hvd_algo *forced = p2p->forced;
    if (forced && forced->can(shape->kind, shape->size) && (forced->ordered || order != MUST_BE_ORDERED))
        return forced;
    bool ordered = order != ANY_ORDER;
    int scale = bits(shape->count * element_bytes);
    const struct hvd_algo **known = &p2p->choice[shape->kind][scale][ordered];
    if (!*known) {
        struct hvd_shape typical = *shape;
        if (typical.kind != HVD_ALLTOALL) { /* as if elements were bytes: what is chosen is kept for all dtypes */
            typical.count_of = NULL;
            typical.grain = GRAIN_BYTES;
            element_bytes = 1;
        }
        typical.count = ((uint64_t)1 << scale) / element_bytes;
        *known = hvd_algo_choose(&typical, element_bytes, p2p->cost, ordered);
    }
    HVD_ASSERT(*known);
    return *known;
}

static int reserve(struct p2p *p2p, unsigned char **area, size_t *has, size_t bytes, struct hvd_error *error)
{
    if (bytes <= *has)
        return HVD_OK;
    free(*area);
    *has = 0;
    *area = aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(bytes, (size_t)HVD_PAGE));
    if (!*area)
        return hvd_fail_rank(error, HVD_ENOMEM, p2p->rank, HVD951 "rank %d: no memory for %zu bytes of a bucket",
                             p2p->rank, bytes);
    *has = bytes;
    return HVD_OK;
}

/* Alltoall works on the caller's memory; what a rank gives to itself does not travel. */
static void keep_own(const struct p2p *p2p, const struct hvd_work *work)
{
    size_t size = (size_t)p2p->size, rank = (size_t)p2p->rank, bytes = p2p->run.element_bytes;
    uint64_t from = 0, to = 0;
    for (size_t r = 0; r < rank; r++) {
        from += work->count_of[rank * size + r];
        to += work->count_of[r * size + rank];
    }
    if (work->count_of[rank * size + rank])
        memcpy((unsigned char *)work->piece[0].out + to * bytes,
               (const unsigned char *)work->piece[0].in + from * bytes, work->count_of[rank * size + rank] * bytes);
}

static void shape_of(struct p2p *p2p, const struct hvd_work *work, struct hvd_shape *shape, size_t element_bytes)
{
    *shape = (struct hvd_shape){.kind = work->kind,
                                .rank = p2p->rank,
                                .size = p2p->size,
                                .root = work->root,
                                .count = work->count,
                                .grain = GRAIN_BYTES / element_bytes,
                                .host_of = p2p->host_of};
    if (work->kind == HVD_ALLGATHER) {
        shape->count = 0;
        for (int rank = 0; rank < p2p->size; rank++) {
            p2p->chunk[rank] = 0;
            for (uint32_t i = 0; i < work->pieces; i++)
                p2p->chunk[rank] += work->count_of[(size_t)i * (size_t)p2p->size + (size_t)rank];
            shape->count += p2p->chunk[rank];
        }
        shape->count_of = p2p->chunk;
    } else if (work->kind == HVD_REDUCESCATTER || work->kind == HVD_ALLTOALL) {
        shape->count_of = work->count_of;
    }
    if (work->kind == HVD_ALLTOALL)
        shape->count = 0; /* ranks have different ones */
}

static struct hvd_scale scale_of(const struct p2p *p2p, const struct hvd_work *work)
{
    return hvd_scale_fold(work->op, work->dtype, work->active ? work->active : p2p->size, work->divide_by,
                          work->prescale, work->postscale);
}

static void p2p_foresee(void *plane, const struct hvd_work *work)
{
    struct p2p *p2p = plane;
    size_t element_bytes = (size_t)hvd_dtype_bytes(work->dtype), bytes = work->count * element_bytes;
    if (p2p->failed.code || work->kind != HVD_ALLREDUCE || work->pieces != 1 || !work->piece[0].in || bytes == 0 ||
        bytes > HVD_EARLY_BYTES)
        return;
    struct hvd_shape shape;
    struct hvd_scale scale = scale_of(p2p, work);
    shape_of(p2p, work, &shape, element_bytes);
    if (choose(p2p, &shape, element_bytes, needs_order(p2p, work, &scale))->whole)
        hvd_p2p_early_send(&p2p->early, p2p->link, p2p->rank, p2p->size,
                           hvd_p2p_mark(work, p2p->works + 1, work->count, true), work->piece[0].in, bytes);
}

static int p2p_start(void *plane, struct hvd_work *work, struct hvd_error *error)
{
    struct p2p *p2p = plane;
    struct hvd_p2p_run *run = &p2p->run;
    if (p2p->failed.code) {
        *error = p2p->failed;
        return p2p->failed.code;
    }
    p2p->works++;
    run->dtype = work->dtype;
    run->element_bytes = (size_t)hvd_dtype_bytes(work->dtype);
    shape_of(p2p, work, &run->shape, run->element_bytes);
    if (reduces(work))
        run->fold = scale_of(p2p, work);
    run->hop = (struct hvd_scale){.op = run->fold.op, .divide = 1, .factor = 1.0, .first = 1.0};
    run->algo = choose(p2p, &run->shape, run->element_bytes, needs_order(p2p, work, &run->fold));
    bool scaled = reduces(work) && !run->algo->ordered && (run->fold.factor != 1.0 || run->fold.divide != 1);
    p2p->bucket = (struct hvd_p2p_bucket){.work = work, .run = run, .scale = run->fold, .scaled = scaled};
    run->bucket = &p2p->bucket;
    run->link = p2p->link;
    run->leaving = p2p->leaving;
    run->mark = hvd_p2p_mark(work, p2p->works, run->shape.count, run->algo->whole);
    run->early = &p2p->early;
    run->block = p2p->block;
    bool direct = work->pieces == 1 && work->piece[0].out && work->kind != HVD_REDUCESCATTER;
    size_t kept = hvd_p2p_kept_bytes(run->algo, &run->shape, run->element_bytes);
    int code = reserve(p2p, &p2p->kept, &p2p->kept_bytes, kept, &p2p->failed);
    if (!code && !direct)
        code = reserve(p2p, &p2p->buffer, &p2p->buffer_bytes, run->shape.count * run->element_bytes, &p2p->failed);
    if (code)
        return HVD_OK; /* others may have started: poll tells */
    run->kept = p2p->kept;
    run->buffer = direct ? work->piece[0].out : p2p->buffer;
    run->source = work->kind == HVD_ALLTOALL ? work->piece[0].in : run->buffer;
    hvd_p2p_begin(run);
    if (work->kind == HVD_ALLTOALL)
        keep_own(p2p, work);
    else if (!run->in_order)
        hvd_p2p_pack(&p2p->bucket);
    return HVD_OK;
}

static int p2p_poll(void *plane, struct hvd_work *work, bool *progress, struct hvd_error *error)
{
    struct p2p *p2p = plane;
    (void)work;
    int code = p2p->failed.code;
    if (!code || code == HVD_EPEER) {
        p2p->failed.code = HVD_OK; /* a peer that has left may be missed no more */
        code = hvd_p2p_step(&p2p->run, progress, &p2p->failed);
    }
    if (code < 0)
        *error = p2p->failed;
    if (code == HVD_OK && !p2p->run.in_order)
        hvd_p2p_unpack(&p2p->bucket);
    return code;
}

static int p2p_watch(void *plane, struct pollfd *news)
{
    struct p2p *p2p = plane;
    return hvd_p2p_watch(&p2p->run, news);
}

const struct hvd_plane hvd_plane_p2p = {
    .name = "p2p",
    .preference = 50,
    .order = HVD_ORDER_SET,
    .fits = p2p_fits,
    .open = p2p_open,
    .can = p2p_can,
    .start = p2p_start,
    .poll = p2p_poll,
    .close = p2p_close,
    .watch = p2p_watch,
    .foresee = p2p_foresee,
};
