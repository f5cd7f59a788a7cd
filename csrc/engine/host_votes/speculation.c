/* speculation.c - what this rank thinks will be agreed next, told to the plane before it is agreed.
 *
 * Between hosts a small collective costs two ways of the network one after the other: the votes, then the tensor. Yet
 * mostly a rank knows at once what will be agreed: it has one tensor in flight and waits for it, and so do the others.
 * So it describes the work that would be. The tensor then rides in its vote (eager.c), or, if it cannot, the plane
 * sends of it, when the vote has left, what no rank needs to agree on first (plane.h, `foresee`): vote and tensor
 * travel at the same time.
 *
 * Nothing is agreed by this, and a wrong guess costs bytes, no more: whoever reads them knows a work by its number, its
 * tensors and the number of its plan (`tag`), all of which are agreed when a work starts. So what was sent for one
 * submission is never taken for a later one: every plan, and every refusal, has a number of its own.
 */
#include "../engine.h"

#include "../../kernel/kernel.h"

uint64_t hvd_speculate_tag(uint64_t tag, struct hvd_key key, uint64_t bucket)
{
    const uint64_t odd = UINT64_C(0x9e3779b97f4a7c15);
    return ((((tag ^ key.high) * odd) ^ key.low) * odd ^ bucket) * odd;
}

const struct hvd_open_plane *hvd_speculate_plane(const struct hvd_set *set, const struct hvd_work *work)
{
    for (int i = 0; i < set->planes_count; i++) {
        const struct hvd_open_plane *open = &set->planes[i];
        if (!open->plane->device && open->plane->can(open->self, work))
            return open->plane->foresee ? open : NULL;
    }
    return NULL;
}

bool hvd_speculate_work(struct hvd_engine *engine, struct hvd_set *set, struct hvd_work *work, struct hvd_piece *piece)
{
    struct hvd_signature signature;
    struct hvd_key key;
    uint32_t ticket = engine->newest;
    if (!hvd_work_empty(set) || engine->handles.with_turn != 1 ||
        !hvd_coord_only(set->coord, ticket, &key, &signature)) /* its slot is the turn's only while it is outstanding */
        return false;
    if (signature.kind != HVD_ALLREDUCE || signature.dtype >= HVD_SIGNED_ON_DEVICE || signature.op == HVD_OP_adasum ||
        signature.group || signature.not_finite)
        return false;
    const struct hvd_request *request = &engine->handles.slot[ticket].request;
    *piece = (struct hvd_piece){.in = request->input, .out = request->output, .count = 1};
    for (int i = 0; i < signature.ndim; i++)
        piece->count *= (uint64_t)signature.dims[i];
    *work = (struct hvd_work){.kind = signature.kind,
                              .op = signature.op,
                              .dtype = signature.dtype,
                              .divide_by = set->size,
                              .prescale = signature.prescale,
                              .postscale = signature.postscale,
                              .tag = hvd_speculate_tag(0, key, (set->plans + 1) << 32),
                              .piece = piece,
                              .pieces = 1,
                              .count = piece->count};
    return true;
}

void hvd_speculate(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_work work;
    struct hvd_piece piece;
    const struct hvd_open_plane *open =
        hvd_speculate_work(engine, set, &work, &piece) ? hvd_speculate_plane(set, &work) : NULL;
    if (open)
        open->plane->foresee(open->self, &work);
}
