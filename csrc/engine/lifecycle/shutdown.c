/* shutdown.c - a rank leaves the job: agreed by votes and bounded in time.
 *
 * A leaving rank votes to leave in each of its sets and finishes its part of all work that was agreed before. It is
 * done when every set has agreed and all messages to other hosts have been sent. If the time ends first, the rank
 * leaves anyway. If agreed work is then unfinished on this rank, the other ranks can never finish it, so the rank
 * aborts the job. abort.c handles the leave of another rank.
 */
#include "../engine.h"

#define NAP_NS     1000000u
#define NAP_MAX_NS 8000000u
#define TURN_NS    1000000000u /* far more than a waiter holds the turn for */

/* Whatever was agreed is done here; with `agreed`, in all sets that others are in a leave is agreed too. */
static bool over(const struct hvd_engine *engine, bool agreed)
{
    for (int i = 0; i < engine->sets; i++) {
        const struct hvd_set *set = engine->set[i];
        if (agreed && set->tree && !hvd_tree_idle(set->tree))
            return false;
        if (!hvd_work_empty(set) || (agreed && !set->left && !set->alone))
            return false;
    }
    return true;
}

static bool has_failed(void *self)
{
    return atomic_load(&((struct hvd_engine *)self)->failed);
}

static bool own_part_done(void *self)
{
    struct hvd_engine *engine = self;
    return atomic_load(&engine->failed) || over(engine, false);
}

static bool leave_done(void *self)
{
    struct hvd_engine *engine = self;
    return atomic_load(&engine->failed) || over(engine, true);
}

/* The time is up. Others may never finish what was agreed without this rank: then its end is no leave. */
static void give_up_unfinished(struct hvd_engine *engine)
{
    bool taken;
    uint64_t until_ns = hvd_now_ns() + TURN_NS;
    while (!(taken = hvd_turn_take_over(engine, has_failed, engine)) && !has_failed(engine) && hvd_now_ns() < until_ns)
        ; /* a waiter still drives */
    if (taken ? hvd_turn_drive(engine, own_part_done, engine, 0) : has_failed(engine))
        return;
    char text[320];
    hvd_text_write(
        text, sizeof text,
        HVD452 "rank %d ends before collectives that all ranks agreed on are finished: another rank did not take "
               "part in them within %d ms of its shutdown (HVDLITE_LEAVE_TIMEOUT); synchronize before the script ends",
        engine->options.rank, engine->options.leave_timeout_ms);
    hvd_engine_abort(engine, engine->options.rank, HVD_EPEER, text);
}

bool hvd_engine_leaving(struct hvd_engine *engine, uint64_t until_ns)
{
    bool done = engine->alone;
    if (!done && !atomic_exchange(&engine->leave_wanted, 1))
        hvd_turn_kick(engine);
    for (uint64_t nap_ns = NAP_NS; !done && hvd_now_ns() < until_ns;) {
        if (hvd_turn_take(engine))
            done = hvd_turn_drive(engine, leave_done, engine, until_ns);
        uint32_t left = atomic_load(&engine->left);
        if (!done) /* the turn is elsewhere, or others are late; a drive costs up to two milliseconds of CPU */
            hvd_futex_wait(&engine->left, left, nap_ns);
        nap_ns = left ? NAP_NS : nap_ns < NAP_MAX_NS ? 2 * nap_ns : nap_ns; /* once agreed it is soon over */
    }
    return done;
}

void hvd_engine_leave(struct hvd_engine *engine, uint64_t until_ns)
{
    if (!hvd_engine_leaving(engine, until_ns))
        give_up_unfinished(engine);
    if (!engine->alone)
        atomic_store_explicit(&engine->host.control->seat[engine->host.rank].left, 1, memory_order_release);
}

uint64_t hvd_engine_leave_until(const struct hvd_engine *engine)
{
    return hvd_now_ns() + (uint64_t)engine->options.leave_timeout_ms * 1000000u;
}
