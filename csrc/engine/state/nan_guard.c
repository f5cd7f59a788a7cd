/* nan_guard.c - the NaN guard: which rank had the first value that is no number?
 *
 * One NaN on one rank is NaN on all after a sum, and then nobody can tell where it came from. So each rank looks at its
 * own contribution when it is submitted, in the caller's thread, before the turn sees it. What it finds is said where
 * ranks say what they have, in the signature: a request that has found something is announced with it, ranks that say
 * different things about one tensor tell each other who said what (negotiation/, the detail round), and so all ranks
 * hear of it in the same words, before anything is combined. Nothing is found: nothing is said, and no round, no byte
 * and no branch beyond the one at submit is spent.
 *
 * Raising, the tensor's collective fails on all ranks, and the job goes on, as after a mismatch. Warning, all forget
 * what was found when it has been told, and the collective goes on; the words wait here until somebody asks for them.
 * Only the first are kept until then, and the rest is counted, since a model that is lost has NaN everywhere.
 *
 * Tensors on devices are looked at by the framework, which has said what it found in the request.
 */
#include "../engine.h"

#include "../../kernel/kernel.h"

enum { EMPTY, FULL, LENT };

static uint64_t at_most_32_bits(uint64_t count)
{
    return count < UINT32_MAX ? count : UINT32_MAX;
}

uint64_t hvd_guard_look(int mode, const struct hvd_request *request)
{
    bool reduces = request->kind == HVD_ALLREDUCE || request->kind == HVD_REDUCE || request->kind == HVD_REDUCESCATTER;
    uint64_t nans = request->not_finite >> 32, infinities = request->not_finite & UINT32_MAX;
    if (reduces && !request->device) {
        size_t count = 1;
        for (int i = 0; i < request->ndim; i++)
            count *= (size_t)request->dims[i];
        hvd_count_not_finite(request->dtype, request->input, count, &nans, &infinities);
    }
    if (mode == HVD_GUARD_NAN)
        infinities = 0;
    return reduces ? at_most_32_bits(nans) << 32 | at_most_32_bits(infinities) : 0;
}

void hvd_guard_tell(struct hvd_engine *engine, const char *text)
{
    if (engine->options.nan_guard != HVD_GUARD_WARN)
        return; /* raised where this rank takes part, which it does not after it has joined */
    atomic_fetch_add(&engine->guarded, 1);
    if (atomic_load(&engine->guard_word) != EMPTY)
        return;
    hvd_text_copy(engine->guard_text, sizeof engine->guard_text, text);
    atomic_store(&engine->guard_word, FULL);
}

int hvd_engine_guarded(struct hvd_engine *engine, char *text, size_t text_bytes)
{
    uint32_t full = FULL;
    if (!atomic_compare_exchange_strong(&engine->guard_word, &full, LENT))
        return 0;
    hvd_text_copy(text, text_bytes, engine->guard_text);
    int count = (int)atomic_exchange(&engine->guarded, 0);
    atomic_store(&engine->guard_word, EMPTY);
    return count;
}
