/* drain.c - the turn passes requests from the submission queue to the coordinators of their sets.
 *
 * All sets share one queue. A request names its set by number. If that set does not exist any more, if a member has
 * left it, or if the job has failed, the request finishes here with the reason. The engine's own requests (open a
 * set, close it, tune a size) use the same queue, so a request that was submitted after its set was opened finds the
 * set.
 */
#include "engine.h"

#include "../kernel/kernel.h"

void hvd_set_turn(struct hvd_engine *engine, uint32_t index)
{
    const struct hvd_request *request = &engine->handles.slot[index].request;
    struct hvd_set *set = (struct hvd_set *)(uintptr_t)request->input;
    if (request->kind == HVD_ENGINE_SET_OPEN) {
        engine->by_number[set->number] = engine->set[engine->sets++] = set;
        if (atomic_load(&engine->leave_wanted))
            hvd_coord_leave(set->coord);
    } else if (request->kind == HVD_ENGINE_TUNE) {
        hvd_coord_tune(set->coord, request->dims[0]);
    } else {
        char why[128];
        hvd_text_write(why, sizeof why, HVD213 "process set %d was removed while this was pending", set->number);
        hvd_abort_handles(engine, set, HVD_EINVAL, why);
        engine->by_number[set->number] = NULL;
        int at = 0;
        while (engine->set[at] != set)
            at++;
        engine->set[at] = engine->set[--engine->sets];
        if (!set->alone) /* entered nothing: whoever still looks there finds that this rank has gone */
            hvd_place_begin(&set->place[set->here], set->life);
    }
    hvd_handles_finish(&engine->handles, index, HVD_OK, NULL);
}

/* Does all memory of this request lie in the plane, so that it need not be copied? Or on the usual device? */
static uint32_t in_plane(struct hvd_set *set, const struct hvd_request *request)
{
    const struct hvd_open_plane *first = &set->planes[0];
    if (request->kind != HVD_ALLREDUCE || request->device || !first->plane->owns)
        return request->device ? hvd_device_usual(set, request) : 0;
    size_t bytes = (size_t)hvd_dtype_bytes(request->dtype);
    for (int i = 0; i < request->ndim; i++)
        bytes *= (size_t)request->dims[i];
    return first->plane->owns(first->self, request->input, bytes) &&
                   first->plane->owns(first->self, request->output, bytes)
               ? HVD_FRESH_IN_PLANE
               : 0;
}

static void refuse(struct hvd_engine *engine, uint32_t index, int code, const char *why)
{
    char text[HVD_TEXT_MAX];
    hvd_abort_text(engine, index, why, text, sizeof text);
    hvd_flight_end(engine, index, code, text);
}

/* The set of a request, if it can still be done there; else the request is finished. */
static struct hvd_set *set_for(struct hvd_engine *engine, uint32_t index)
{
    const struct hvd_slot *slot = &engine->handles.slot[index];
    struct hvd_set *set = engine->by_number[slot->request.process_set];
    char why[HVD_TEXT_MAX];
    if (atomic_load_explicit(&engine->failed, memory_order_relaxed)) {
        hvd_text_copy(why, sizeof why, engine->failure.text);
        refuse(engine, index, engine->failure.code, why);
    } else if (!set || set->life != slot->life) {
        hvd_text_write(why, sizeof why, HVD213 "process set %d does not exist any more", slot->request.process_set);
        refuse(engine, index, HVD_EINVAL, why);
    } else if (set->left) {
        hvd_abort_left_text(set->leaver, why, sizeof why);
        refuse(engine, index, HVD_EPEER, why);
    } else {
        return set;
    }
    return NULL;
}

static void join(struct hvd_engine *engine, struct hvd_set *set, uint32_t index)
{
    if (set->join_slot != HVD_SLOT_NONE) {
        refuse(engine, index, HVD_EDUP, "this rank has joined already; wait for that first" HVD_ENDS(267));
        return;
    }
    set->join_slot = index;
    hvd_coord_join(set->coord);
}

static void submit_one(struct hvd_engine *engine, uint32_t index)
{
    const struct hvd_request *request = &engine->handles.slot[index].request;
    engine->handles.slot[index].with_turn = true;
    engine->newest = index;
    engine->handles.with_turn++;
    if (request->kind < 0) {
        hvd_set_turn(engine, index);
        return;
    }
    hvd_account_submitted(engine, &engine->handles.slot[index]);
    struct hvd_set *set = set_for(engine, index);
    if (!set)
        return;
    if (request->kind == HVD_JOIN) {
        join(engine, set, index);
        return;
    }
    struct hvd_signature signature = hvd_set_sign(request);
    int code = hvd_coord_submit(set->coord, index, request->name, &signature, in_plane(set, request));
    if (code != HVD_OK)
        refuse(engine, index, code,
               code == HVD_EINVAL ? "the coordinator refused it (a group with more members than the cache "
                                    "capacity, or more than 2^63 elements)" HVD_ENDS(259)
               : code == HVD_EDUP ? "a tensor of this name is still in flight on this rank: wait for it first, or "
                                    "give the second one another name" HVD_ENDS(205)
                                  : "the coordinator refused it" HVD_ENDS(901));
}

bool hvd_votes_submit_queued(struct hvd_engine *engine)
{
    uint32_t index = hvd_handles_drain(&engine->handles), next;
    bool any = index != HVD_SLOT_NONE;
    for (; index != HVD_SLOT_NONE; index = next) {
        next = hvd_handles_next(&engine->handles, index);
        submit_one(engine, index);
    }
    return any;
}
