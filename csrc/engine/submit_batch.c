/* submit_batch.c - hundreds of requests in one call: the gradients of a model.
 *
 * What is saved is not the engine's work but the way to it: one call from Python instead of one per gradient, one
 * wake-up per call, one look at the clock. A request that is refused ends the call; those before it are on their way,
 * since a submission cannot be taken back, and the caller is told how many.
 *
 * Waiting goes through the handles in order. Whoever finished before costs a look; the caller sleeps, or drives the
 * engine, on the first that has not. Failures are looked at when all have finished: the memory of every tensor is the
 * caller's again then, also of those that went well. For the same reason it is waited for until what lies on a
 * device's stream is done there: the handles are forgotten, and nobody could ask for their marks.
 */
#include "engine.h"

int hvd_engine_submit_many(struct hvd_engine *engine, const struct hvd_request *const *requests, int count,
                           struct hvd_owner *owners, struct hvd_error *error)
{
    int taken = 0;
    for (; taken < count; taken++) {
        struct hvd_request request = *requests[taken];
        if (taken + 1 < count && request.quiet == HVD_NOW)
            request.quiet = HVD_QUIET;
        int64_t handle = hvd_engine_submit(engine, &request, error);
        owners[taken] = handle > 0 ? (struct hvd_owner){handle, HVD_AGAIN} : (struct hvd_owner){0, (int)handle};
        if (handle < 0)
            break;
    }
    if (taken < count)
        hvd_engine_kick(engine); /* the last one taken was quiet, and there is none to come */
    return taken;
}

struct waited {
    struct hvd_engine *engine;
    const struct hvd_owner *owners;
    int count, first; /* all before first are finished */
};

/* For whoever drives the engine: it is asked again and again. */
static bool all_done(void *self)
{
    struct waited *waited = self;
    for (; waited->first < waited->count; waited->first++) {
        int64_t handle = waited->owners[waited->first].handle;
        struct hvd_slot *slot = handle ? hvd_handles_find(&waited->engine->handles, handle) : NULL;
        if (slot && hvd_slot_state(slot) != HVD_SLOT_DONE)
            return false;
    }
    return true;
}

/* All are finished: is all of it done on devices, too? As hvd_engine_reached. */
static int reach_many(const struct waited *waited, uint64_t until_ns, char *text, size_t text_bytes)
{
    int code = HVD_OK;
    for (int i = 0; i < waited->count && code == HVD_OK; i++) {
        int64_t handle = waited->owners[i].handle;
        struct hvd_slot *slot = handle ? hvd_handles_find(&waited->engine->handles, handle) : NULL;
        if (slot && slot->code == HVD_OK)
            code = hvd_engine_reached(waited->engine, slot, until_ns, text, text_bytes);
    }
    return code;
}

/* All are finished: the first failure's code and text, and nothing is left of them. Whoever asks again, as an exception
 * has come between the answer and him, finds the codes in the owners. */
static int forget_many(struct hvd_engine *engine, struct hvd_owner *owners, int count, char *text, size_t text_bytes)
{
    int code = HVD_OK;
    for (int i = 0; i < count; i++) {
        int64_t handle = owners[i].handle;
        if (!handle && owners[i].code < 0 && code == HVD_OK) {
            code = owners[i].code;
            hvd_text_copy(text, text_bytes, HVD_TOLD_NOBODY);
        }
        if (!handle)
            continue;
        struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
        if (code == HVD_OK && (!slot || slot->code != HVD_OK)) {
            code = slot ? slot->code : HVD_EHANDLE;
            hvd_text_copy(text, text_bytes, slot && slot->text ? slot->text : "this handle is unknown" HVD_ENDS(218));
        }
        owners[i] = (struct hvd_owner){0, slot ? slot->code : HVD_EHANDLE};
        hvd_handles_forget(&engine->handles, handle);
    }
    return code;
}

int hvd_engine_wait_many(struct hvd_engine *engine, struct hvd_owner *owners, int count, int timeout_ms, char *text,
                         size_t text_bytes)
{
    uint64_t until_ns = hvd_now_ns() + (uint64_t)(timeout_ms > 0 ? timeout_ms : 0) * 1000000u;
    struct waited waited = {engine, owners, count, 0};
    uint64_t now_ns;
    bool patient = true, done;
    atomic_fetch_add(&engine->waiters, 1);
    while (!(done = all_done(&waited)) && (now_ns = hvd_now_ns()) < until_ns)
        if (hvd_engine_take_part(engine, all_done, &waited, until_ns, &patient)) {
            hvd_count(engine, HVD_COUNT_exposed_ns, (int64_t)(hvd_now_ns() - now_ns));
        } else {
            /* Sleep on one of them. all_done may have gone on: then `first` is finished, and that is over at once. */
            now_ns = hvd_now_ns();
            int left_ms = now_ns < until_ns ? (int)((until_ns - now_ns + 999999u) / 1000000u) : 0;
            if (waited.first < count)
                hvd_engine_wait(engine, owners[waited.first].handle, left_ms, NULL, 0);
        }
    atomic_fetch_sub(&engine->waiters, 1);
    int reached = done ? reach_many(&waited, until_ns, text, text_bytes) : HVD_AGAIN;
    if (reached == HVD_AGAIN)
        return HVD_AGAIN;
    int code = forget_many(engine, owners, count, text, text_bytes);
    return code == HVD_OK ? reached : code;
}
