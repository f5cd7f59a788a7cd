/* stall_check.c - the stall check: a collective waits and waits: for whom, and what do they do instead?
 *
 * Votes cannot tell: no round completes without a rank that is stopped, and they know how many are ready, not who. So
 * this is asked apart, and only when something has waited for too long. Nothing of it costs a submission anything: the
 * engine thread looks at what is pending a few times in the least limit, and notes when it has first seen a request.
 *
 *   1. a rank that sees a request too old wants an inquiry: a bit in its host's desk, in shared memory; its leader
 *      passes it up the tree of hosts (frame WANT);
 *   2. rank 0 opens one: a number in the desk of its host, and down the tree (ASK). Engine threads do all that, so it
 *      needs no user code, and no lock of Python's;
 *   3. each rank writes an account into its host's desk (rank_status.c). Who has not within a second is looked at from
 *      outside. Leaders send accounts up (ACCOUNT), one at a time, when the stream is free;
 *   4. rank 0 makes a report of them (missing_ranks.c): it tells the user, or ends the job with that text, and what it
 * has found goes down to all (FINDING), for callers whose own patience is over.
 *
 * Ranks may leave, and process sets without them go on. The desk says who is gone: who has stopped its engine says so
 * itself, with its turn taken for good, and who has taken its leave and ends otherwise is seen to. So a host has one
 * leader at any time, the first rank that is not gone, and that asks anew what the one before has not brought to an
 * end.
 *
 * The user is told after stall_warn_ms, and again when that time has passed once more, or twice as long each time that
 * nothing has changed. After collective_timeout_ms the job ends. Should rank 0 not answer, or its host, then the rank
 * that waits ends the job by itself a little later, with what it knows. Later by its own looks: a machine that was
 * stopped for a while (a laptop's lid, a virtual machine that moves) has let nobody answer meanwhile.
 *
 * What was launched on a device and does not end there is no request any more, and waits, too (device_watch.c).
 *
 * A request that all have submitted waits, too, while nothing of its set moves. Who has joined waits rightly while the
 * others carry out collectives of its set: it has waited for too long when they have not, for that time.
 */
#define _GNU_SOURCE
#include "../stall/stall.h"

#include "../engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TICKS       8
#define TICK_MAX_NS 5000000000u
#define TICK_MIN_NS 10000000u
#define SOON_NS     5000000u    /* until the turn is free, an account is there */
#define LATE_NS     6000000000u /* then a rank ends the job by itself: an inquiry takes 2 s if a host is silent */

int hvd_stall_open(struct hvd_engine *engine, struct hvd_error *error)
{
    struct hvd_stall *stall = &engine->stall;
    uint64_t least_ms = UINT64_MAX;
    if (engine->alone)
        return HVD_OK;
    stall->led = engine->host.rank == 0;
    stall->stack_handler = hvd_account_handler(engine->options.stack_signal);
    if (engine->options.stall_warn_ms > 0)
        least_ms = (uint64_t)engine->options.stall_warn_ms;
    if (engine->options.collective_timeout_ms > 0 && (uint64_t)engine->options.collective_timeout_ms < least_ms)
        least_ms = (uint64_t)engine->options.collective_timeout_ms;
    uint64_t tick_ns = least_ms == UINT64_MAX ? TICK_MAX_NS : least_ms * 1000000u / TICKS;
    stall->tick_ns = tick_ns < TICK_MIN_NS ? TICK_MIN_NS : tick_ns > TICK_MAX_NS ? TICK_MAX_NS : tick_ns;
    stall->next_ns = least_ms == UINT64_MAX ? UINT64_MAX : hvd_now_ns() + stall->tick_ns;
    stall->repeat_ns = (uint64_t)engine->options.stall_warn_ms * 1000000u;
    return hvd_inquiry_open(engine, error);
}

/* ---- by the turn ---- */

/* Of a request's set, who is on this host, and can be seen not to come; -1: nobody. */
static int who_stands(const struct hvd_engine *engine, const struct hvd_slot *slot, struct hvd_account *account)
{
    const struct hvd_set *set = engine->by_number[slot->request.process_set];
    const struct hvd_account stuck = {.state = HVD_RANK_STUCK};
    for (int i = 0; set && i < set->locals; i++) {
        int rank = set->member[set->local[i]];
        if (rank == engine->options.rank || hvd_abort_has_left(engine, rank))
            continue;
        hvd_account_other(engine, engine->who[rank].local, account);
        if (hvd_account_weight(account) >= hvd_account_weight(&stuck))
            return rank;
    }
    return -1;
}

/* Who should have told who is missing: the leader of this host, whose state can be seen, or rank 0, or who is on the
 * way to that. -1: nobody is left who should have. */
static int who_is_silent(const struct hvd_engine *engine, struct hvd_account *account)
{
    int leader = hvd_stall_leader(engine), rank = engine->host.member[leader];
    if (leader != engine->host.rank && !hvd_abort_has_left(engine, rank)) {
        hvd_account_other(engine, leader, account);
        if (engine->hosts == 1 || account->state != HVD_RANK_MUTE)
            return rank;
    }
    const struct hvd_tree *tree = engine->global->tree;
    account->state = HVD_RANK_MUTE;
    rank = !hvd_abort_has_left(engine, 0) ? 0 : tree ? tree->near[0].rank : -1;
    return rank == engine->options.rank || (rank >= 0 && hvd_abort_has_left(engine, rank)) ? -1 : rank;
}

/* Nobody has answered. */
static void end_by_itself(struct hvd_engine *engine, const struct hvd_slot *slot)
{
    char text[640], why[240] = "no rank is left that could report the missing ranks";
    const char *name = slot->request.name;
    struct hvd_account account;
    int mute = who_stands(engine, slot, &account);
    if (mute < 0)
        mute = who_is_silent(engine, &account);
    if (mute >= 0)
        snprintf(why, sizeof why, "%s %s, and cannot report which other ranks are missing", engine->who[mute].called,
                 hvd_state_words(account.state));
    hvd_text_write(text, sizeof text,
                   HVD551 "rank %d has waited %g s for %s%.255s%s, which not all ranks have submitted or finished "
                          "(HVDLITE_COLLECTIVE_TIMEOUT sets the limit); %s",
                   engine->options.rank, engine->options.collective_timeout_ms / 1000.0,
                   name ? "tensor '" : "a collective", name ? HVD_SHOWN(name) : "", name ? "'" : "", why);
    hvd_engine_abort(engine, mute, HVD_ETIMEOUT, text);
}

/* As above, of what this rank has on a device. */
static void end_on_device(struct hvd_engine *engine, const struct hvd_set *set)
{
    char text[900], where[240];
    const struct hvd_watched *first = hvd_watch_first(set);
    const char *name = first->name[0] ? first->name : NULL;
    hvd_watch_where(set, where, sizeof where);
    hvd_text_write(text, sizeof text,
                   HVD553 "%s%.255s%s (%s) was launched on %s of rank %d and has not ended there for %g s "
                          "(HVDLITE_COLLECTIVE_TIMEOUT sets the limit); the rank that would report the missing ranks "
                          "does not answer",
                   name ? "'" : "", name ? HVD_SHOWN(name) : "a collective", name ? "'" : "",
                   hvd_engine_kind(first->kind), where, engine->options.rank,
                   engine->options.collective_timeout_ms / 1000.0);
    hvd_engine_abort(engine, engine->options.rank, HVD_ETIMEOUT, text);
}

/* Note when requests were first seen, and whether one is too old. */
static void look_at_requests(struct hvd_engine *engine, uint64_t now)
{
    uint64_t warn_ns = (uint64_t)engine->options.stall_warn_ms * 1000000u, oldest = 0;
    uint64_t end_ns = (uint64_t)engine->options.collective_timeout_ms * 1000000u;
    const struct hvd_slot *first = NULL;
    const struct hvd_set *on_device = NULL;
    struct hvd_stall *stall = &engine->stall;
    for (int i = 0; i < engine->sets; i++) {
        struct hvd_set *set = engine->set[i];
        uint64_t progress = hvd_silence_progress(set);
        if (progress != set->moved || !set->moved_ns)
            set->moved_ns = now;
        set->moved = progress;
        if (set->plans != set->planned || !set->planned_ns)
            set->planned_ns = now;
        set->planned = set->plans;
        hvd_watch_look(set, now);
        if (set->watch.stands_ns && now - set->watch.stands_ns > oldest) {
            oldest = now - set->watch.stands_ns;
            on_device = set;
        }
    }
    uint32_t high = atomic_load(&engine->handles.high);
    for (uint32_t i = 0; i < high; i++) {
        struct hvd_slot *slot = &engine->handles.slot[i];
        if (!slot->with_turn || slot->request.kind < 0 || slot->request.quiet == HVD_ASIDE)
            continue;
        uint32_t word = atomic_load(&slot->word);
        if (slot->since_word != word || !slot->since_ns) {
            slot->since_word = word;
            slot->since_ns = now;
            continue;
        }
        uint64_t since = hvd_stall_since(engine, slot);
        if (now - since > oldest && atomic_load(&slot->excused) != word) {
            oldest = now - since;
            first = slot;
        }
    }
    if (warn_ns && oldest >= warn_ns && now - stall->asked_ns >= warn_ns / 2) {
        stall->asked_ns = now;
        hvd_inbox_want(engine, HVD_WANT_REPORT);
    }
    uint64_t step_ns = now - stall->looked_ns;
    stall->looked_ns = now;
    if (!end_ns || oldest < end_ns)
        stall->late_ns = 0;
    else
        stall->late_ns += step_ns < 2 * stall->tick_ns ? step_ns : 2 * stall->tick_ns;
    if (stall->late_ns >= LATE_NS + end_ns / 8)
        first ? end_by_itself(engine, first) : end_on_device(engine, on_device);
    else if (stall->late_ns)
        hvd_inbox_want(engine, HVD_WANT_END);
}

/* ---- the engine thread ---- */

void hvd_stall_look(struct hvd_engine *engine)
{
    struct hvd_stall *stall = &engine->stall;
    struct hvd_inbox *desk = hvd_inbox(engine);
    uint64_t now = hvd_now_ns(), inquiry = atomic_load(&desk->inquiry);
    bool answers = inquiry != atomic_load(&desk->answered[engine->host.rank]);
    bool leader = hvd_inbox_leads(engine),
         open = leader && (stall->number || atomic_load(&stall->news) || atomic_load(&desk->wanted) || !stall->led);
    if ((!answers && !open && now < stall->next_ns) || atomic_load(&engine->failed))
        return;
    if (answers && stall->asked != inquiry) {
        stall->asked = inquiry;
        hvd_account_ask_stack(engine);
    }
    bool taken = (!answers || hvd_account_has_stack(engine, now)) && hvd_turn_take(engine);
    atomic_store(&engine->tick_due, !taken);
    if (!taken) {
        stall->next_ns = now + SOON_NS;
        return;
    }
    atomic_store(&stall->news, false);
    hvd_votes_submit_queued(engine); /* who asks for what is missing must find his own request there */
    look_at_requests(engine, now);
    if (answers)
        hvd_inquiry_answer(engine, inquiry, now);
    bool told = leader && hvd_inquiry_lead(engine, now);
    bool watches = engine->options.stall_warn_ms > 0 || engine->options.collective_timeout_ms > 0;
    bool more = stall->number || (leader && atomic_load(&desk->wanted)); /* nobody rings again for what is wanted */
    stall->next_ns = more ? now + SOON_NS : watches ? now + stall->tick_ns : UINT64_MAX;
    bool report = told && stall->why & HVD_WANT_REPORT && !atomic_load(&engine->failed);
    hvd_turn_run(engine);
    if (report)
        hvd_inquiry_tell(engine, now);
}

/* ---- any thread ---- */
