/* start.c - describe a work, choose a plane for it, start it.
 *
 * This file is below execute.c, ragged.c and device_agreement.c, which all start works. It starts a work on the first
 * plane of the set that can do it. A work on devices that no plane can do goes through host memory. If that is
 * impossible or a plane fails to start, the job ends.
 */
#include "../engine.h"

#include "../../kernel/kernel.h"

#include <stdlib.h>
#include <string.h>

void hvd_work_pieces(struct hvd_moving *moving, uint32_t pieces)
{
    if (moving->piece_room >= pieces)
        return;
    uint32_t room = moving->piece_room ? moving->piece_room : 64;
    while (room < pieces)
        room *= 2;
    free(moving->piece);
    free(moving->ready);
    moving->piece = malloc(sizeof *moving->piece * room);
    moving->ready = malloc(sizeof *moving->ready * room);
    HVD_ASSERT(moving->piece && moving->ready);
    moving->piece_room = room;
}

/* A work on devices that no plane for devices does, or none can: it goes by way of the CPU, or the job ends. */
void hvd_work_by_the_cpu(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error)
{
    struct hvd_moving *moving = &set->moving;
    moving->by = NULL;
    moving->begun_ns = hvd_now_ns();
    moving->busy = error->code == HVD_OK && moving->work.flags & HVD_WORK_ON_DEVICE &&
                   hvd_stage_begin(&moving->stage, &moving->work, set->rank, set->size, error) == HVD_OK;
    if (moving->busy)
        return;
    if (error->code == HVD_OK)
        hvd_fail(error, HVD_EINTERNAL, HVD671 "no plane can do this %s", hvd_engine_kind(moving->work.kind));
    hvd_engine_abort(engine, engine->options.rank, error->code, error->text);
}

/* Choose the plane and start; a refusal by all ends the job (it cannot happen: some plane can do everything). */
void hvd_work_start(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    struct hvd_error error;
    hvd_error_none(&error);
    bool on_device = moving->work.flags & HVD_WORK_ON_DEVICE;
    for (int i = 0; i < set->planes_count; i++) {
        const struct hvd_open_plane *open = on_device ? &moving->lineup->open : &set->planes[i];
        if (set->planes[i].plane->device != on_device || open->refused || !open->plane->can(open->self, &moving->work))
            continue;
        moving->by = open;
        moving->busy = true;
        moving->waits = open->plane->order == HVD_ORDER_DEVICE;
        hvd_steps_begun(engine, set);
        if (open->plane->start(open->self, &moving->work, &error) == HVD_OK)
            return;
        break;
    }
    hvd_work_by_the_cpu(engine, set, &error);
}

void hvd_work_describe(struct hvd_set *set, const struct hvd_plan_item *item)
{
    struct hvd_work *work = &set->moving.work;
    memset(work, 0, sizeof *work);
    work->kind = item->signature.kind == HVD_REDUCE ? HVD_ALLREDUCE : item->signature.kind;
    work->op = item->signature.op;
    work->dtype = hvd_item_dtype(item);
    work->root = item->signature.kind == HVD_BROADCAST ? item->signature.root : 0;
    work->rooted = item->signature.kind == HVD_REDUCE ? item->signature.root + 1 : 0;
    work->divide_by = set->size;
    work->active = (int)set->agenda.active[set->agenda.head];
    work->prescale = item->signature.prescale;
    work->postscale = item->signature.postscale;
    work->piece = set->moving.piece;
    if (hvd_item_on_device(item)) {
        work->flags = HVD_WORK_ON_DEVICE;
        work->ready = set->moving.ready;
    } else if (item->flags & HVD_FRESH_IN_PLANE) {
        work->flags = HVD_WORK_IN_PLANE;
    }
}

void hvd_work_place(struct hvd_set *set, uint32_t i, const struct hvd_slot *slot)
{
    set->moving.ready[i] = slot ? slot->request.ready : NULL;
    if (slot && slot->request.device)
        set->moving.work.device = slot->request.device;
}

struct hvd_plane_arg hvd_set_plane_arg(struct hvd_engine *engine, struct hvd_set *set)
{
    return (struct hvd_plane_arg){.rank = set->rank,
                                  .size = set->size,
                                  .local_rank = engine->options.local_rank,
                                  .one_host = set->locals == set->size,
                                  .host_of = engine->hosts > 1 ? set->host_of : NULL,
                                  .cpus = engine->cpus,
                                  .bells = set->alone ? NULL : &set->bells,
                                  .link = set->wires ? set->wires->link : NULL,
                                  .comm = (void *)engine->comm,
                                  .any_order = !engine->options.deterministic,
                                  .leaving = &set->left,
                                  .algo = engine->algo,
                                  .shares_gpus = engine->options.shares_gpus,
                                  .nccl_blocks = engine->options.nccl_blocks,
                                  .start_timeout_ms = engine->options.start_timeout_ms,
                                  .link_cost = engine->link_cost,
                                  .wanted = engine->wanted};
}
