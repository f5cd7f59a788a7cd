/* open.c - an engine begins and ends.
 *
 * Open: place the ranks on their hosts, take the streams over, lay out the coordinator, meet the local ranks, measure
 * links between hosts, open every plane this build carries and keep those that opened on all ranks (one rank without it
 * must not split the job), then start the thread. Every step is collective and fails on all ranks with the same words.
 *
 * Stop: vote leave and wait, bounded, until the others have acknowledged and own agreed work is done (peers may
 * still need it); take leave in the seat; stop the thread; finish whatever is left; wait, bounded again, until what was
 * sent has arrived; close planes and host.
 */
#include "../engine.h"
#include "../../cuda/cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAREWELL_MS 200

static int plane_allgather(void *self, const void *mine, size_t bytes, void *all, struct hvd_error *error)
{
    return hvd_host_exchange(self, mine, bytes, all, -1, NULL, error);
}

static struct hvd_share *plane_share(void *self, size_t bytes, struct hvd_error *error)
{
    return hvd_host_share(self, bytes, error);
}

/* Did all ranks open it? `why` collects the first reason why not. */
static int plane_agreed(struct hvd_engine *engine, bool opened, const struct hvd_error *mine, bool *all_opened,
                        char *why, size_t why_bytes, struct hvd_error *error)
{
    struct said {
        uint32_t opened;
        char text[252];
    } said = {.opened = opened}, *all = calloc((size_t)engine->options.size, sizeof *all);
    char text[HVD_TEXT_MAX] = "";
    struct hvd_host *host = &engine->host;
    hvd_text_copy(said.text, sizeof said.text, mine->text);
    int code;
    if (!all) {
        code = hvd_fail(error, HVD_ENOMEM, HVD951 "out of memory during init");
    } else if (engine->hosts == 1) {
        code = hvd_host_exchange(host, &said, sizeof said, all, -1, NULL, error);
    } else {
        code = host->allgather(host->allgather_self, &said, sizeof said, all, text, sizeof text);
        if (code != HVD_OK)
            hvd_fail(error, code, "%s", text);
    }
    *all_opened = code == HVD_OK;
    for (int rank = 0; code == HVD_OK && rank < engine->options.size; rank++)
        if (!all[rank].opened && *all_opened) {
            *all_opened = false;
            hvd_text_write(why, why_bytes, HVD670 "%.251s (rank %d)", all[rank].text, rank);
        }
    free(all);
    return code;
}

static int open_planes(struct hvd_engine *engine, struct hvd_error *error)
{
    struct hvd_set *set = engine->global;
    struct hvd_plane_arg arg = hvd_set_plane_arg(engine, set);
    /* memory of /dev/shm is not sparse: no more of it than planes need to work */
    arg.arena_bytes = engine->host.source == HVD_MEMORY_DEV_SHM ? 1 : 0;
    arg.self = &engine->host;
    arg.allgather = plane_allgather;
    arg.share = plane_share;
    char why[HVD_TEXT_MAX] = "", wanted[320] = "";
    bool carries = false; /* tensors of the CPU, that is; planes of devices open on every machine, see nccl.c */
    for (int i = 0; hvd_planes[i] && set->planes_count < HVD_PLANES_MAX; i++) {
        struct hvd_open_plane open = {.plane = hvd_planes[i], .carrier = i};
        struct hvd_error mine = {0};
        bool opened = open.plane->open(&arg, &open.self, &mine) == HVD_OK, all = opened;
        char reason[320] = "";
        hvd_text_copy(reason, sizeof reason, mine.text);
        bool asks = !engine->alone && !open.plane->device;
        int code = !asks ? HVD_OK : plane_agreed(engine, opened, &mine, &all, reason, sizeof reason, error);
        if (opened && !all)
            open.plane->close(open.self);
        if (code != HVD_OK)
            return code;
        if (!all && open.plane == engine->wanted)
            hvd_text_copy(wanted, sizeof wanted, reason);
        if (!all) {
            size_t length = strlen(why);
            hvd_text_bare(reason);
            snprintf(why + length, sizeof why - length, "%s%s: %s", length ? "; " : "", open.plane->name, reason);
            continue;
        }
        hvd_set_insert_plane(engine, set, open);
        engine->bound |= open.plane->bound;
        carries |= !open.plane->device;
    }
    if (engine->wanted && !engine->wanted->device && !engine->alone && carries &&
        set->planes[0].plane != engine->wanted)
        return hvd_fail(error, HVD_EINIT, HVD651 "plane %s, which HVDLITE_PLANE names, does not work here: %s",
                        engine->wanted->name, wanted);
    return carries ? HVD_OK : hvd_fail(error, HVD_EINIT, HVD650 "no plane works for these ranks: %s", why);
}

int hvd_engine_find_named(const char *plane, const char *algo, const struct hvd_plane **wanted,
                          const struct hvd_algo **forced, struct hvd_error *error)
{
    char names[256] = "";
    *wanted = NULL;
    *forced = NULL;
    if (plane) {
        for (int i = 0; hvd_planes[i]; i++) {
            size_t length = strlen(names);
            snprintf(names + length, sizeof names - length, "%s%s", length ? ", " : "", hvd_planes[i]->name);
            if (strcmp(hvd_planes[i]->name, plane) == 0)
                *wanted = hvd_planes[i];
        }
        if (!*wanted)
            return hvd_fail(error, HVD_EINIT, HVD850 "there is no plane '%.64s' (HVDLITE_PLANE): this build has %s",
                            plane, names);
    }
    if (algo) {
        names[0] = '\0';
        for (int i = 0; hvd_algos[i]; i++) {
            size_t length = strlen(names);
            snprintf(names + length, sizeof names - length, "%s%s", length ? ", " : "", hvd_algos[i]->name);
        }
        *forced = hvd_algo_named(algo);
        if (!*forced)
            return hvd_fail(error, HVD_EINIT, HVD850 "there is no algorithm '%.64s' (HVDLITE_ALGO): this build has %s",
                            algo, names);
    }
    return HVD_OK;
}

/* Where each rank is. */
static void place_ranks(struct hvd_engine *engine, const struct hvd_options *options)
{
    for (int rank = 0; rank < options->size; rank++) {
        struct hvd_who *who = &engine->who[rank];
        who->host = engine->hosts;
        for (int other = 0; other < rank && options->host_of; other++)
            if (options->host_of[other] == options->host_of[rank]) {
                who->host = engine->who[other].host;
                who->local++;
            }
        if (!options->host_of) {
            who->host = 0;
            who->local = rank;
        }
        engine->hosts = who->host < engine->hosts ? engine->hosts : who->host + 1;
        if (options->host_name)
            snprintf(who->called, sizeof who->called, "rank %d (host %.70s)", rank, options->host_name[rank]);
        else
            snprintf(who->called, sizeof who->called, "rank %d", rank);
    }
}

/* A rank whose host has more of them than shared memory serves; -1: there is none. */
static int crowded_out(const struct hvd_options *options)
{
    for (int rank = HVD_LOCAL_MAX; rank < options->size; rank++) {
        int before = options->host_of ? 0 : rank;
        for (int other = 0; other < rank && options->host_of; other++)
            before += options->host_of[other] == options->host_of[rank];
        if (before >= HVD_LOCAL_MAX)
            return rank;
    }
    return -1;
}

static int check_options(const struct hvd_options *options, bool in_process, struct hvd_error *error)
{
    if (options->size < 1 || options->rank < 0 || options->rank >= options->size)
        return hvd_fail(error, HVD_EINIT, HVD105 "rank %d is invalid in a job of %d ranks", options->rank,
                        options->size);
    if (options->local_size != options->size && !in_process && !options->host_of)
        return hvd_fail(error, HVD_EINIT, HVD105 "%d ranks, %d per host: no option says which ranks share a host",
                        options->size, options->local_size);
    if (options->size > HVD_RANKS_MAX)
        return hvd_fail(error, HVD_EINIT, HVD710 "a job of %d ranks: this version of hvdlite supports at most %d",
                        options->size, HVD_RANKS_MAX);
    int crowded = crowded_out(options);
    if (crowded >= 0)
        return hvd_fail_rank(error, HVD_EINIT, crowded,
                             HVD710
                             "rank %d is one too many on its host%s%.70s: this version of hvdlite supports at most %d "
                             "ranks on one host; spread the %d ranks of the job over more hosts",
                             crowded, options->host_name ? " " : "",
                             options->host_name ? options->host_name[crowded] : "", HVD_LOCAL_MAX, options->size);
    if (options->slots_max < 1 || options->fusion_bytes < 0)
        return hvd_fail(error, HVD_EINIT,
                        HVD802 "cache capacity %d and fusion threshold %lld must not be negative or zero",
                        options->slots_max, (long long)options->fusion_bytes);
    return HVD_OK;
}

static int open_host(struct hvd_engine *engine, hvd_boot_allgather *allgather, void *self, struct hvd_error *error)
{
    struct hvd_host *host = &engine->host;
    int here = engine->who[engine->options.rank].host;
    for (int rank = 0; rank < engine->options.size; rank++)
        if (engine->who[rank].host == here)
            host->member[host->size++] = rank;
    host->rank = engine->who[engine->options.rank].local;
    host->job_size = engine->options.size;
    host->in_process = engine->in_process;
    host->job = engine->options.job;
    host->epoch = engine->options.epoch;
    memcpy(host->secret, engine->options.secret, sizeof host->secret);
    host->store = (struct hvd_report_line){.fd = engine->options.store_fd, .counters = engine->options.store_counters};
    host->store.is_signed = engine->options.store_keys != NULL;
    HVD_ASSERT(host->store.counters || !host->store.is_signed);
    if (host->store.is_signed)
        memcpy(host->store.keys, engine->options.store_keys, sizeof host->store.keys);
    engine->options.store_keys = NULL; /* they were lent */
    host->source = engine->options.shared_memory || !hvd_memory_has_memfd() ? HVD_MEMORY_DEV_SHM : HVD_MEMORY_BEST;
    host->deadline_ns = hvd_now_ns() + (uint64_t)engine->options.start_timeout_ms * 1000000u;
    host->allgather = allgather;
    host->allgather_self = self;
    if (engine->alone)
        return HVD_OK;
    size_t rides = engine->hosts > 1 ? HVD_EAGER_ROOM : HVD_EAGER_BYTES;
    int code = hvd_host_open(host, engine->global->vote_bytes + rides, error);
    if (code == HVD_OK)
        hvd_set_meet(engine, engine->global);
    return code == HVD_OK ? hvd_space_open(&engine->space, host, host->board_bytes, error) : code;
}

static void decide_spinning(struct hvd_engine *engine)
{
    int locals = 0;
    for (int rank = 0; rank < engine->options.size; rank++)
        locals += engine->who[rank].host == engine->who[engine->options.rank].host;
    engine->cpus = hvd_cpus_usable();
    bool fits = locals <= engine->cpus;
    engine->cpu_each = locals == engine->cpus && !engine->alone && hvd_cuda_version() == 0;
    engine->spins = engine->options.spin_us < 0 ? fits : engine->options.spin_us > 0;
    engine->spin_ns = engine->options.spin_us > 0 ? (uint64_t)engine->options.spin_us * 1000u
                      : fits                      ? 500000u
                                                  : 2000000u; /* others run while it yields */
}

int hvd_engine_open(const struct hvd_options *options, hvd_boot_allgather *allgather, void *self, bool in_process,
                    uint32_t first_generation, struct hvd_engine **engine_out, struct hvd_error *error)
{
    *engine_out = NULL;
    int code = check_options(options, in_process, error);
    struct hvd_engine *engine =
        code ? NULL : aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(sizeof *engine, (size_t)HVD_CACHE_LINE));
    struct hvd_who *who = engine ? calloc((size_t)options->size, sizeof *who) : NULL;
    if (!who) {
        free(engine);
        const struct hvd_streams streams = hvd_stream_of(options);
        hvd_stream_drop(&streams, options->size);
        return code ? code : hvd_fail(error, HVD_ENOMEM, HVD951 "out of memory during init");
    }
    memset(engine, 0, sizeof *engine);
    engine->options = *options;
    engine->who = who;
    atomic_store(&engine->fusion_bytes, options->fusion_bytes);
    engine->options.peer_timeout_ms = options->peer_timeout_ms > 0 ? options->peer_timeout_ms : 30000;
    engine->ticked_ns = hvd_now_ns();
    engine->in_process = in_process;
    engine->comm = options->mpi_comm;
    engine->alone = options->size == 1;
    engine->epoll = engine->call = engine->space.fd = engine->soon.timer = engine->flight.asked = -1;
    pthread_mutex_init(&engine->opening_lock, NULL);
    pthread_mutex_init(&engine->records_lock, NULL);
    pthread_mutex_init(&engine->bell_lock, NULL);
    place_ranks(engine, options);
    decide_spinning(engine);
    const struct hvd_algo *forced = NULL;
    code = hvd_set_open_global(engine, options, error); /* first: it takes the streams over */
    if (code == HVD_OK)
        code = hvd_engine_find_named(options->plane, options->algo, &engine->wanted, &forced, error);
    engine->algo = forced ? forced->name : NULL;
    if (code == HVD_OK)
        code = hvd_handles_open(&engine->handles, first_generation, error);
    if (code == HVD_OK)
        code = hvd_trace_open(&engine->trace, options->trace_events > 0 ? options->trace_events : 4096);
    if (code == HVD_OK)
        code = hvd_flight_open(engine, error);
    if (code == HVD_OK)
        code = hvd_steps_open(&engine->steps, error);
    if (code == HVD_OK)
        code = open_host(engine, allgather, self, error);
    if (code == HVD_OK)
        code = hvd_cost_agree(engine, options, error);
    if (code == HVD_OK)
        code = open_planes(engine, error);
    if (code == HVD_OK)
        code = hvd_stall_open(engine, error);
    if (code == HVD_OK && !engine->alone)
        code = hvd_turn_thread_start(engine, error);
    engine->options.tensor_fd = engine->options.vote_fd = engine->options.host_of = NULL; /* they were lent */
    engine->options.vote_keys = engine->options.tensor_keys = NULL;
    engine->options.host_name = NULL;
    engine->options.plane = engine->options.algo = engine->options.trace_dir = NULL;
    if (code == HVD_OK) {
        atomic_store(&engine->asleep_alone, 1);
        *engine_out = engine;
    } else {
        hvd_engine_free(engine);
    }
    return code;
}

void hvd_engine_stop(struct hvd_engine *engine)
{
    bool failed = atomic_load(&engine->failed);
    hvd_turn_thread_stop(engine);
    hvd_flight_due(engine);
    while (!hvd_turn_take(engine))
        hvd_pause(); /* a waiter still drives; it comes back within its patience */
    atomic_store(&engine->stop, 1);
    if (!failed && !engine->alone)
        hvd_stall_gone(engine, engine->host.rank);
    hvd_fail(&engine->failure, HVD_ESTATE, HVD457 "hvdlite was shut down on rank %d while this was pending",
             engine->options.rank);
    atomic_store(&engine->failed, 1);
    hvd_votes_submit_queued(engine);
    hvd_abort_handles(engine, NULL, engine->failure.code, engine->failure.text);
    for (int i = 0; i < engine->sets && !failed; i++) /* or its end would be taken for a death */
        if (engine->set[i]->tree && !engine->set[i]->left)
            hvd_tree_part(engine, engine->set[i]);
    atomic_store(&engine->stopped, 1);
    /* After a failure, why it is; a peer that is lost will not take it. */
    hvd_stream_settle(engine, failed ? FAREWELL_MS : engine->options.leave_timeout_ms);
    /* The turn is never given back: late waiters find their handles done. */
}

/* Sets that were to be opened when the turn had ended: they are closed with the others. */
static void take_late_sets(struct hvd_engine *engine)
{
    uint32_t next;
    for (uint32_t index = hvd_handles_drain(&engine->handles); index != HVD_SLOT_NONE; index = next) {
        next = hvd_handles_next(&engine->handles, index);
        if (engine->handles.slot[index].request.kind == HVD_ENGINE_SET_OPEN)
            hvd_set_turn(engine, index);
    }
}

void hvd_engine_free(struct hvd_engine *engine)
{
    hvd_turn_thread_stop(engine);
    hvd_inquiry_close(engine);
    hvd_alarm_close(&engine->soon);
    hvd_device_part(engine, false);
    if (engine->handles.slot)
        take_late_sets(engine);
    hvd_set_close_all(engine);
    hvd_space_close(&engine->space);
    if (!engine->alone && engine->host.size)
        hvd_host_close(&engine->host);
    pthread_mutex_destroy(&engine->opening_lock);
    pthread_mutex_destroy(&engine->records_lock);
    pthread_mutex_destroy(&engine->bell_lock);
    hvd_stream_end(engine);
    hvd_handles_close(&engine->handles);
    hvd_block_free();
    hvd_flight_close(engine);
    hvd_trace_close(&engine->trace);
    hvd_steps_close(&engine->steps);
    for (int number = 0; number < HVD_SETS_MAX; number++)
        free(engine->record[number].ranks);
    free(engine->who);
    free(engine);
}
