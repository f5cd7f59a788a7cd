/* step_costs.h - what has a training step cost? The engine counts all the time, and keeps the counts of the last steps.
 *
 * All counts only grow, so a step is a row of them at its end, and what it cost is that less the row before. A row is
 * some numbers about the step itself (HVD_STEP_NUMBERS), then the engine's counters, then those of each plane
 * (HVD_PLANE_NUMBERS), then how many buckets there were of which size. hvd_step_name tells them in this order, so
 * nobody else needs to know it.
 *
 * Whoever trains says when a step is over; the engine knows no steps. Any thread may say so and any thread may read: a
 * row is written over HVD_STEPS_KEPT steps later, and who reads it meanwhile notices and passes it over.
 *
 * Of the steps that are looked at closely (hvd_look_closely) each bucket is kept as well: when it began and ended, how
 * much it was, and the names of its first tensors.
 */
#ifndef HVD_ENGINE_FLIGHT_RECORDER_STEP_COSTS_H
#define HVD_ENGINE_FLIGHT_RECORDER_STEP_COSTS_H

#include "../../base/base.h"
#include "engine/state/handle.h"

#include <pthread.h>
#include <stdatomic.h>

#define HVD_STEPS_KEPT   512
#define HVD_BUCKETS_KEPT 512
#define HVD_SIZES        12 /* up to 1 KB, 4 KB, 16 KB, ..., 1 GB, and larger */

struct hvd_engine;
struct hvd_moving;
struct hvd_plan;
struct hvd_set;

/* X(name): of the step itself; times by CLOCK_MONOTONIC. arrived_ns: when this rank had submitted what the step needs,
 * 0: nothing was. */
#define HVD_STEP_NUMBERS(X) \
    X(number)               \
    X(begin_ns)             \
    X(end_ns)               \
    X(arrived_ns)

/* X(name): of each plane and, behind them, of the votes, which carry small tensors between hosts. bytes: of this rank's
 * tensors; messages: works, so a fused bucket is one; busy_ns: time in which one was under way; timed_bytes: of those
 * works whose time is known (a work on a device goes on behind the engine's back). */
#define HVD_PLANE_NUMBERS(X) \
    X(bytes)                 \
    X(messages)              \
    X(busy_ns)               \
    X(timed_bytes)

enum {
#define X(name) HVD_STEP_##name,
    HVD_STEP_NUMBERS(X)
#undef X
        HVD_STEP_NUMBERS_MAX
};

enum {
#define X(name) HVD_PLANE_NUMBER_##name,
    HVD_PLANE_NUMBERS(X)
#undef X
        HVD_PLANE_NUMBERS_MAX
};

/* More planes than the table has, with the votes. */
#define HVD_CARRIERS_MAX 12

struct hvd_steps {
    int carriers, width;   /* planes and votes; numbers of a row */
    _Atomic int64_t *row;  /* HVD_STEPS_KEPT of them */
    _Atomic int64_t count; /* steps so far */
    _Atomic uint64_t ended_ns, arrived_ns;
    _Atomic bool arrived;   /* it was said, so later submissions do not count */
    _Atomic bool by_script; /* steps are not those that graphs find */
    _Atomic int64_t of[HVD_CARRIERS_MAX][HVD_PLANE_NUMBERS_MAX];
    _Atomic int64_t sizes[HVD_SIZES];
    _Atomic int64_t every; /* of so many steps one is looked at closely; 0: none */
    pthread_mutex_t lock;  /* of what follows */
    struct hvd_bucket_seen *bucket;
    int64_t buckets; /* ever kept */

    /* The turn's. */
    uint64_t agreed_ns; /* the time before has been counted as negotiation, where it was */
};

int hvd_steps_open(struct hvd_steps *steps, struct hvd_error *error);
void hvd_steps_close(struct hvd_steps *steps);
size_t hvd_steps_bytes(const struct hvd_steps *steps); /* that cost memory */

/* engine.c, any thread: a request was submitted at this time. ours: it is of what the job gathers about itself. */
static inline bool hvd_steps_ours(const struct hvd_request *request)
{
    return request->kind == HVD_ALLTOALL && request->name && __builtin_strncmp(request->name, "hvdlite.", 8) == 0;
}
/* What it gathers while it trains, and nobody waits for. It is in no count, no bucket and no trace, but in those of
 * rounds and of bytes between hosts, which are shared. */
static inline bool hvd_steps_aside(const struct hvd_slot *slot)
{
    return slot && slot->request.quiet == HVD_ASIDE;
}
static inline void hvd_steps_submitted(struct hvd_steps *steps, const struct hvd_request *request, uint64_t now_ns)
{
    if (!atomic_load_explicit(&steps->arrived, memory_order_relaxed) && !hvd_steps_ours(request))
        atomic_store_explicit(&steps->arrived_ns, now_ns, memory_order_relaxed);
}
/* By the turn: this plan is agreed (how many of its items are aside); a bucket begins; the work that moves is done, and
 * its handles are not finished yet. */
uint32_t hvd_steps_agreed(struct hvd_engine *engine, const struct hvd_plan *plan, uint64_t now_ns);
void hvd_steps_begun(struct hvd_engine *engine, struct hvd_set *set);
void hvd_steps_moved(struct hvd_engine *engine, struct hvd_set *set, uint64_t now_ns);

/* Any thread: as hvd_step, hvd_arrived, hvd_step_row, hvd_look_closely and hvd_buckets say. number 0: the counts now.
 */
int64_t hvd_engine_step(struct hvd_engine *engine, int found, int64_t optimizer_ns);
void hvd_engine_arrived(struct hvd_engine *engine);
bool hvd_engine_step_row(struct hvd_engine *engine, int64_t number, int64_t *values);
int hvd_engine_look_closely(struct hvd_engine *engine, int64_t every, struct hvd_error *error);
int hvd_engine_buckets(struct hvd_engine *engine, int64_t first, struct hvd_bucket_seen *buckets, int count);
int hvd_steps_name(int i, char *text, size_t text_bytes); /* as hvd_step_name */

#endif
