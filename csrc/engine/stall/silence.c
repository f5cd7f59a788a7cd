/* silence.c - a rank that neither ends nor answers, on a job of several hosts: who is it, and when is it lost?
 *
 * A process that is stopped, a host that is cut off without a word: no stream ends, no pidfd speaks. Silence counts
 * only while something waits, since a rank whose user computes for an hour is silent rightfully. But a round that is
 * open is entered by engines without user code; so whoever waits for one, and hears nothing, knows. That is the only
 * measure: where a bucket stands still, here or on a device, or a request waits for that of others, a round is opened
 * to find out (`probing`), and if all answer it, all live, however slow they are.
 *
 * Time comes in ticks of the engine thread, eight to the timeout (HVDLITE_PEER_TIMEOUT). A set that has waited for two
 * of them without any progress sends a sign of life over its tree of hosts, with every tick, and opens a round. A
 * leader blames the rank of its own host that does not enter, or the neighbour that has been mute for six ticks; its
 * neighbour that waits itself sends signs of life, so it is not blamed for another's silence. A rank that waits for its
 * leader gives it two ticks more, since the leader knows better who it is.
 *
 * Who finds a rank silent leaves, and its streams end. A rank that cannot be told why, since the silent one is between
 * the two, would blame the rank that left. So where a set had waited for two ticks before the stream ended, and not for
 * that rank, its end proves nothing, and who is lost is decided here.
 *
 * Once a rank has left there are no rounds any more, and the tree may be in pieces. What was agreed before may still
 * move; where none of it does for several times as long, whom this rank waits for is told as lost. That may be a rank
 * that waits itself: nobody can be asked. Better a name that leads there than to wait for ever.
 *
 * Two hosts may lose each other alone, while votes still cross by way of a third. So each tick asks the streams of
 * tensors, too, whether the peer's machine has answered (link/tcp.c says what that means): none in all ticks of the
 * timeout, and what moves there will never be done. TCP itself is told the timeout for idle lines.
 */
#include "../engine.h"

#define TICKS_WAITED 2
#define TICKS_MUTE   6
#define TICKS        (TICKS_WAITED + TICKS_MUTE)
#define TICKS_ALONE  (4 * TICKS)
/* From the end of a stream until its peer is blamed nevertheless: in that time a rank has waited for its leader. */
#define TICKS_SUSPECTED (TICKS + 3)

uint64_t hvd_silence_progress(const struct hvd_set *set)
{
    uint64_t sum = hvd_coord_round(set->coord) + set->plans + set->agenda.head;
    for (int peer = 0; set->wires && peer < set->size; peer++)
        sum += set->wires->of[peer].counts.bytes_in + set->wires->of[peer].counts.bytes_out;
    return sum;
}

static void blame(struct hvd_engine *engine, const struct hvd_set *set, int rank)
{
    char text[256];
    hvd_text_write(
        text, sizeof text,
        HVD453 "%s is silent: it has not answered for %d s (HVDLITE_PEER_TIMEOUT) while rank %d waits for it; is its "
               "process stopped, or its host not reachable?",
        engine->who[set->member[rank]].called, (engine->options.peer_timeout_ms + 500) / 1000, engine->options.rank);
    hvd_engine_abort(engine, set->member[rank], HVD_EPEER, text);
}

/* Is a peer's machine lost, though votes go on? While nothing moves between the two, nobody minds. */
static void look_at_links(struct hvd_engine *engine, struct hvd_set *set)
{
    for (int peer = 0; set->wires && peer < set->size; peer++) {
        struct hvd_link *link = set->wires->link[peer];
        if (!link || link->over)
            continue;
        link->unheard = link->kind->unheard(link, hvd_silence_tick_ms(engine)) ? link->unheard + 1 : 0;
        if (link->unheard < TICKS || !set->moving.busy)
            continue;
        char text[256];
        hvd_text_write(text, sizeof text,
                       HVD454 "%s is lost: its host has acknowledged no data of rank %d for %d s "
                              "(HVDLITE_PEER_TIMEOUT); is it down, or not reachable?",
                       link->called, engine->options.rank, (engine->options.peer_timeout_ms + 500) / 1000);
        hvd_engine_abort(engine, set->member[peer], HVD_EPEER, text);
        return;
    }
}

/* The round is entered here: who is missing? */
static void look_for_missing(struct hvd_engine *engine, struct hvd_set *set)
{
    uint64_t round = hvd_coord_round(set->coord);
    if (!set->tree) {
        if (set->waited >= TICKS + 2)
            blame(engine, set, set->local[0]);
        return;
    }
    for (int i = 1; i < set->locals; i++)
        if (!hvd_place_entered(&set->place[i], set->life, round) && set->waited >= TICKS) {
            blame(engine, set, set->local[i]);
            return;
        }
    int mute = hvd_tree_mute(set->tree, round, TICKS_MUTE);
    if (mute >= 0)
        blame(engine, set, mute);
}

/* The peer whose bytes, or whose room for bytes, the moving work needs next; -1: none that a stream leads to. */
static int needed(const struct hvd_set *set)
{
    struct pollfd news[HVD_RANKS_MAX];
    const struct hvd_open_plane *by = set->moving.by;
    int count = by && by->plane->watch && set->wires ? by->plane->watch(by->self, news) : 0;
    for (int i = 0; i < count; i++)
        for (int peer = 0; news[i].events & (POLLIN | POLLOUT) && peer < set->size; peer++)
            if (set->wires->link[peer] && set->wires->link[peer]->fd == news[i].fd)
                return peer;
    return -1;
}

static void look_at_rest(struct hvd_engine *engine, struct hvd_set *set)
{
    uint64_t progress = hvd_silence_progress(set);
    set->waited = set->moving.busy && progress == set->progress ? set->waited + 1 : 0;
    set->progress = progress;
    int peer = set->waited < TICKS_ALONE ? -1 : needed(set);
    if (peer < 0)
        return;
    char text[320];
    hvd_text_write(text, sizeof text,
                   HVD453 "%s is silent: rank %d has waited %d s for its part of the last collectives, four times "
                          "HVDLITE_PEER_TIMEOUT (rank %d has left); is it, or a rank that it waits for, stopped or "
                          "not reachable?",
                   set->wires->link[peer]->called, engine->options.rank,
                   (4 * engine->options.peer_timeout_ms + 500) / 1000, set->leaver);
    hvd_engine_abort(engine, set->member[peer], HVD_EPEER, text);
}

static void look_at(struct hvd_engine *engine, struct hvd_set *set)
{
    uint64_t progress = hvd_silence_progress(set);
    bool waits = set->entered || set->moving.busy || set->on_stream || engine->handles.with_turn;
    set->waited = waits && progress == set->progress ? set->waited + 1 : 0;
    set->progress = progress;
    if (set->waited < TICKS_WAITED) {
        if (set->tree)
            hvd_tree_tick(engine, set, false);
        return;
    }
    set->probing = true;
    if (set->tree)
        hvd_tree_tick(engine, set, true);
    if (set->entered)
        look_for_missing(engine, set);
}

void hvd_silence_tick(struct hvd_engine *engine)
{
    if (atomic_load(&engine->failed))
        return;
    for (int i = 0; i < engine->sets; i++)
        if (engine->set[i]->locals < engine->set[i]->size) {
            (engine->set[i]->left ? look_at_rest : look_at)(engine, engine->set[i]);
            look_at_links(engine, engine->set[i]);
        }
}

/* Is it this rank, by its number in the job, that the set waits for in silence? */
static bool is_awaited(const struct hvd_set *set, int rank)
{
    uint64_t round = hvd_coord_round(set->coord);
    if (!set->tree)
        return rank == set->member[set->local[0]];
    for (int peer = 0; peer < set->size; peer++)
        if (set->member[peer] == rank)
            return hvd_tree_is_mute(set->tree, peer, round, 1);
    return false;
}

bool hvd_silence_decides(const struct hvd_engine *engine, uint64_t now)
{
    const struct hvd_suspicion *suspicion = &engine->suspicion;
    const struct hvd_set *set = engine->by_number[suspicion->set];
    bool waits = set && set->waited >= TICKS_WAITED && hvd_silence_progress(set) == set->progress;
    return suspicion->waited >= TICKS_WAITED && waits && !is_awaited(set, suspicion->culprit) &&
           now - suspicion->since_ns < (uint64_t)TICKS_SUSPECTED * (uint64_t)hvd_silence_tick_ms(engine) * 1000000u;
}

int hvd_silence_tick_ms(const struct hvd_engine *engine)
{
    int ms = engine->options.peer_timeout_ms / TICKS;
    return engine->hosts < 2 ? -1 : ms > 0 ? ms : 1;
}
