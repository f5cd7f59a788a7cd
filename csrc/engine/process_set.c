/* process_set.c - process sets are opened and closed; the global one, whose planes are opened by all ranks together,
 * first.
 *
 * Opening a set talks to nobody. Its number and its life come from the caller, who agrees on them with the members: a
 * number that is free on all of them, a life greater than all that they have used. Sets without a common rank may have
 * the same, for a place in the set space (set_space.h) belongs to a rank and a number. A member lays out a coordinator,
 * takes its place, opens the planes on it and hands the set to the turn by the submission queue, to vote there. A rank
 * that is no member need not know of the set; if told, it writes down the number and the ranks.
 *
 * What makes it safe: the caller lets the members exchange something before anybody submits to the new set, so that
 * every member has zeroed its place; until then peers may find an earlier set's words there, dated by its life and not
 * believed. Before a close the caller makes sure in the same way that the last collective is over everywhere. Who
 * closes while something is outstanding gets it back as failed.
 * Two locks, which the turn never takes: `opening` makes opens and closes follow each other, `records` guards look-ups,
 * also of a thread that writes a flight record.
 */
#include "engine.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* The planes of a set that is not the global one ask for this; the engine's places are their segments. */
struct places {
    struct hvd_engine *engine;
    struct hvd_set *set;
};

static int no_allgather(void *self, const void *mine, size_t bytes, void *all, struct hvd_error *error)
{
    (void)self, (void)mine, (void)bytes, (void)all;
    return hvd_fail(error, HVD_EINTERNAL, HVD901 "a plane wants to exchange bytes while a process set is opened");
}

static void free_share(struct hvd_share *share)
{
    free(share);
}

static struct hvd_share *share_places(void *self, size_t bytes, struct hvd_error *error)
{
    struct places *places = self;
    struct hvd_set *set = places->set;
    if (set->alone)
        hvd_fail(error, HVD_EINIT, HVD901 "a process set of one rank shares nothing");
    if (set->alone || hvd_space_take_share(&places->engine->space, set->number, bytes, error) != HVD_OK)
        return NULL;
    struct hvd_share *share = calloc(1, sizeof *share);
    HVD_ASSERT(share);
    share->bytes = bytes;
    share->size = set->locals;
    share->unmap = free_share;
    atomic_store(&share->references, 1);
    for (int i = 0; i < set->locals; i++)
        share->map[i] = set->place[i].share;
    return share;
}

/* The one that was asked for is the best. */
static int preference(const struct hvd_engine *engine, const struct hvd_plane *plane)
{
    return plane == engine->wanted && !plane->device ? INT_MAX : plane->preference;
}

void hvd_set_insert_plane(struct hvd_engine *engine, struct hvd_set *set, struct hvd_open_plane open)
{
    int at = set->planes_count++;
    for (; at > 0 && preference(engine, set->planes[at - 1].plane) < preference(engine, open.plane); at--)
        set->planes[at] = set->planes[at - 1];
    set->planes[at] = open;
    if (open.plane->silent && !open.plane->device) /* those for devices: when there is one */
        atomic_store(&engine->silent, true);
}

/* Local, so all ranks must come to the same: what opens here for a set of this size opens everywhere. */
static int open_planes(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error)
{
    struct places places = {engine, set};
    struct hvd_plane_arg arg = hvd_set_plane_arg(engine, set);
    arg.arena_bytes = HVD_ARENA_NONE;
    arg.self = &places;
    arg.allgather = no_allgather;
    arg.share = share_places;
    struct hvd_error why = {0};
    for (int i = 0; hvd_planes[i] && set->planes_count < HVD_PLANES_MAX; i++) {
        struct hvd_open_plane open = {.plane = hvd_planes[i], .carrier = i};
        struct hvd_error mine = {0};
        /* The global set's planes are those that work on all ranks; a set on one of several hosts may have others. */
        bool fits = open.plane->fits && open.plane->fits(&arg), serves = fits && engine->hosts > 1 && arg.one_host;
        for (int k = 0; k < engine->global->planes_count; k++)
            serves |= engine->global->planes[k].plane == open.plane;
        if (!serves && !set->alone)
            continue;
        int code = open.plane->open(&arg, &open.self, &mine);
        if (code == HVD_OK)
            hvd_set_insert_plane(engine, set, open);
        else if (fits) /* on the others it may work */
            return hvd_fail(error, code, "%s", mine.text);
        else
            hvd_fail(&why, mine.code, "%s", mine.text);
    }
    return set->planes_count ? HVD_OK : hvd_fail(error, why.code ? why.code : HVD_EINTERNAL, "%s", why.text);
}

/* Places and bells of the members on this host. */
void hvd_set_meet(struct hvd_engine *engine, struct hvd_set *set)
{
    set->bells.rank = set->here;
    set->bells.size = set->locals;
    for (int i = 0; i < set->locals; i++) {
        int local = engine->who[set->member[set->local[i]]].local;
        struct hvd_seat *seat = &engine->host.control->seat[local];
        set->bells.asleep[i] = engine->host.bells.asleep[local];
        set->bells.eventfd[i] = engine->host.bells.eventfd[local];
        if (set->number == 0)
            set->place[i] = (struct hvd_place){
                .line = seat->line, .posted = &seat->posted, .boards = hvd_host_boards(&engine->host, local)};
        else
            set->place[i] = hvd_space_place(&engine->space, local, set->number);
    }
}

static struct hvd_set *new_set(const struct hvd_engine *engine, int number, uint32_t life, const int *ranks, int count,
                               int rank)
{
    struct hvd_set *set = aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(sizeof *set, (size_t)HVD_CACHE_LINE));
    if (!set)
        return NULL;
    memset(set, 0, sizeof *set);
    set->member = calloc(2 * (size_t)count, sizeof *set->member);
    if (!set->member) {
        free(set);
        return NULL;
    }
    set->host_of = set->member + count;
    set->number = number;
    set->life = life;
    set->rank = rank;
    set->size = count;
    set->alone = count == 1;
    set->join_slot = HVD_SLOT_NONE;
    for (int i = 0; i < count; i++) {
        set->member[i] = ranks ? ranks[i] : i;
        set->host_of[i] = engine->who[set->member[i]].host;
    }
    for (int i = 0; i < count; i++)
        if (set->host_of[i] == set->host_of[rank]) {
            set->here = i == rank ? set->locals : set->here;
            set->local[set->locals++] = i;
        }
    return set;
}

static void free_set(struct hvd_engine *engine, struct hvd_set *set)
{
    hvd_device_close(set);
    for (int i = 0; i < set->planes_count; i++)
        set->planes[i].plane->close(set->planes[i].self);
    hvd_tree_close(set);
    hvd_stream_close(engine, set->wires);
    hvd_stream_close(engine, set->vote_wires);
    hvd_work_close(set);
    hvd_votes_close(set);
    free(set->member);
    free(set);
}

/* For a set that all members close. At the engine's end places stay as they are: others may still read there. */
static void free_and_clear(struct hvd_engine *engine, struct hvd_set *set)
{
    int number = set->alone || !engine->space.share ? 0 : set->number;
    free_set(engine, set);
    if (number > 0)
        hvd_space_clear(&engine->space, number);
}

/* All of them, also where it fails. */
static int take_streams(struct hvd_engine *engine, struct hvd_set *set, const struct hvd_streams *streams,
                        struct hvd_error *error)
{
    int votes = hvd_stream_open(engine, streams, true, set->member, set->size, &set->vote_wires, error);
    int tensors = hvd_stream_open(engine, streams, false, set->member, set->size, &set->wires, error);
    return votes != HVD_OK ? votes : tensors;
}

int hvd_set_open_global(struct hvd_engine *engine, const struct hvd_options *options, struct hvd_error *error)
{
    struct hvd_set *set = new_set(engine, 0, 0, NULL, options->size, options->rank);
    const struct hvd_streams streams = hvd_stream_of(options);
    if (!set) {
        hvd_stream_drop(&streams, options->size);
        return hvd_fail(error, HVD_ENOMEM, HVD951 "out of memory during init");
    }
    engine->global = engine->set[0] = engine->by_number[0] = set;
    engine->sets = 1;
    int code = take_streams(engine, set, &streams, error);
    if (code == HVD_OK)
        code = hvd_votes_open(engine, set, error);
    return code == HVD_OK ? hvd_tree_open(engine, set, error) : code;
}

void hvd_set_close_all(struct hvd_engine *engine)
{
    while (engine->sets > 0)
        free_set(engine, engine->set[--engine->sets]);
    engine->global = NULL;
}

static int check_ranks(const struct hvd_engine *engine, const int *ranks, int count, struct hvd_error *error)
{
    int size = engine->options.size;
    if (count < 1 || !ranks)
        return hvd_fail(error, HVD_EINVAL, HVD215 "a process set needs at least one rank");
    for (int i = 0; i < count; i++) {
        if (ranks[i] < 0 || ranks[i] >= size)
            return hvd_fail(error, HVD_EINVAL, HVD215 "process set: rank %d is not one of 0 to %d", ranks[i], size - 1);
        if (i > 0 && ranks[i] == ranks[i - 1])
            return hvd_fail(error, HVD_EINVAL, HVD215 "process set: rank %d is named twice", ranks[i]);
        if (i > 0 && ranks[i] < ranks[i - 1])
            return hvd_fail(error, HVD_EINVAL, HVD215 "process set: ranks must ascend, but %d comes after %d", ranks[i],
                            ranks[i - 1]);
    }
    return HVD_OK;
}

/* A request to the turn, and what became of it. */
static int ask_turn(struct hvd_engine *engine, int kind, struct hvd_set *set, int64_t value, struct hvd_error *error)
{
    struct hvd_request request = {.kind = kind, .process_set = set->number, .input = set, .dims = {value}, .quiet = 1};
    char text[HVD_TEXT_MAX] = "";
    int64_t handle = hvd_engine_push(engine, &request, &(struct hvd_membership){.life = set->life}, error);
    if (handle < 0)
        return (int)handle;
    int code = HVD_AGAIN;
    for (int late = 0; code == HVD_AGAIN && late < 3; late += atomic_load(&engine->stopped) != 0)
        code = hvd_engine_wait(engine, handle, 50, text, sizeof text);
    if (code == HVD_AGAIN) /* it came when the turn had ended; the set stays with the slot */
        return hvd_fail(error, HVD_ESTATE, HVD457 "hvdlite was shut down on rank %d", engine->options.rank);
    hvd_engine_forget(engine, handle);
    return code == HVD_OK ? code : hvd_fail(error, code, "%s", text);
}

static int open_member(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error)
{
    int code = HVD_OK;
    if (!set->alone) {
        code = hvd_space_take(&engine->space, set->number, error);
        if (code == HVD_OK) {
            hvd_set_meet(engine, set);
            hvd_place_begin(&set->place[set->here], set->life);
        }
    }
    if (code == HVD_OK)
        code = hvd_votes_open(engine, set, error);
    if (code == HVD_OK)
        code = hvd_tree_open(engine, set, error);
    if (code == HVD_OK)
        code = open_planes(engine, set, error);
    if (code == HVD_EINIT) /* so say those that lack shared memory, whom init calls otherwise */
        code = error->code = HVD_ENOMEM;
    return code == HVD_OK ? ask_turn(engine, HVD_ENGINE_SET_OPEN, set, 0, error) : code;
}

static int open_record(struct hvd_engine *engine, int number, uint32_t life, const int *ranks, int count,
                       const struct hvd_streams *streams, struct hvd_error *error)
{
    struct hvd_set_record record = {.open = true, .life = life, .count = count, .rank = -1};
    record.ranks = calloc((size_t)count, sizeof *record.ranks);
    HVD_ASSERT(record.ranks);
    engine->lives = life;
    for (int i = 0; i < count; i++) {
        record.ranks[i] = (int16_t)ranks[i];
        if (ranks[i] == engine->options.rank)
            record.rank = i;
    }
    int code = HVD_OK;
    if (record.rank >= 0) {
        record.set = new_set(engine, number, record.life, ranks, count, record.rank);
        if (!record.set)
            hvd_stream_drop(streams, count);
        code = record.set ? take_streams(engine, record.set, streams, error) : HVD_ENOMEM;
        if (code == HVD_OK)
            code = open_member(engine, record.set, error);
        if (code != HVD_OK && record.set && code != HVD_ESTATE)
            free_and_clear(engine, record.set);
    }
    if (code != HVD_OK) {
        free(record.ranks);
        return hvd_fail(error, code, HVD951 "rank %d has no memory for a process set", engine->options.rank);
    }
    pthread_mutex_lock(&engine->records_lock);
    engine->record[number] = record;
    pthread_mutex_unlock(&engine->records_lock);
    return HVD_OK;
}

/* Under opening_lock. */
static int check_number(const struct hvd_engine *engine, int number, uint32_t life, struct hvd_error *error)
{
    if (number >= HVD_SETS_MAX)
        return hvd_fail(error, HVD_EINVAL, HVD263 "%d process sets are open, and no more fit: remove some",
                        HVD_SETS_MAX - 1);
    if (number < 1 || engine->record[number].open)
        return hvd_fail(error, HVD_EINVAL, HVD213 "process set %d is open here already", number);
    if (life <= engine->lives)
        return hvd_fail(error, HVD_EINVAL, HVD901 "process set %d has life %u, and %u was used here before", number,
                        life, engine->lives);
    return HVD_OK;
}

int hvd_engine_set_open(struct hvd_engine *engine, int number, uint32_t life, const int *ranks, int count,
                        const struct hvd_streams *streams, struct hvd_error *error)
{
    pthread_mutex_lock(&engine->opening_lock);
    int code = check_ranks(engine, ranks, count, error);
    if (code == HVD_OK)
        code = check_number(engine, number, life, error);
    if (code == HVD_OK)
        code = open_record(engine, number, life, ranks, count, streams, error);
    else
        hvd_stream_drop(streams, count);
    pthread_mutex_unlock(&engine->opening_lock);
    return code;
}

int hvd_engine_set_close(struct hvd_engine *engine, int number, struct hvd_error *error)
{
    if (number == 0)
        return hvd_fail(error, HVD_EINVAL, HVD264 "the global process set cannot be removed");
    pthread_mutex_lock(&engine->opening_lock);
    struct hvd_set *set = NULL;
    int code = HVD_OK;
    if (number < 0 || number >= HVD_SETS_MAX || !engine->record[number].open) {
        code = hvd_fail(error, HVD_EINVAL, HVD213 "process set %d does not exist", number);
    } else {
        pthread_mutex_lock(&engine->records_lock);
        set = engine->record[number].set;
        free(engine->record[number].ranks);
        engine->record[number] = (struct hvd_set_record){.open = false};
        pthread_mutex_unlock(&engine->records_lock);
    }
    if (set) {
        code = ask_turn(engine, HVD_ENGINE_SET_CLOSE, set, 0, error);
        if (code == HVD_OK)
            free_and_clear(engine, set);
    }
    pthread_mutex_unlock(&engine->opening_lock);
    return code;
}

int hvd_engine_tune(struct hvd_engine *engine, int64_t fusion_bytes, struct hvd_error *error)
{
    if (fusion_bytes < 0)
        return hvd_fail(error, HVD_EINVAL,
                        HVD802 "the size of a bucket must not be negative, and rank %d proposes %lld bytes",
                        engine->options.rank, (long long)fusion_bytes);
    if (atomic_load(&engine->failed))
        return hvd_fail(error, engine->failure.code, "%s", engine->failure.text);
    return ask_turn(engine, HVD_ENGINE_TUNE, engine->global, fusion_bytes, error);
}
