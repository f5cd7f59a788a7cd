/* step_costs.c - counting what a training step costs, on the way of every tensor.
 *
 * What is counted here must cost next to nothing: a few additions for a bucket, a store for a submission, and no look
 * at the clock where somebody has looked a moment ago (the trace does, for each of its events). Rows are made by who
 * says that a step is over, never by the turn.
 *
 * NEGOTIATION is the time in which something of this rank's was submitted and not yet agreed: of each plan from its
 * tensor that had waited longest, and no time twice. Where plans overlap it may be a little less than that.
 *
 * ARRIVED is when this rank had submitted what the others wait for: the last submission of the step, unless who submits
 * says when that is (hvd_arrived, once a step); what comes after, such as the average of a loss, would hide who was
 * late.
 *
 * What the job gathers about itself (names that begin with "hvdlite.", all alltoalls) is nobody's step, and is left out
 * of both. What it gathers beside the training, every few seconds, is left out of all counts.
 */
#include "step_costs.h"

#include "../../kernel/kernel.h"
#include "../engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SMALLEST_BITS 10 /* the first size is of buckets up to 1 KB, each further one up to four times that */

int hvd_steps_open(struct hvd_steps *steps, struct hvd_error *error)
{
    int planes = 0;
    while (hvd_planes[planes])
        planes++;
    HVD_ASSERT(planes < HVD_CARRIERS_MAX);
    steps->carriers = planes + 1;
    steps->width = HVD_STEP_NUMBERS_MAX + HVD_COUNTERS_MAX + steps->carriers * HVD_PLANE_NUMBERS_MAX + HVD_SIZES;
    pthread_mutex_init(&steps->lock, NULL);
    steps->row = calloc((size_t)HVD_STEPS_KEPT * (size_t)steps->width, sizeof *steps->row);
    atomic_store(&steps->ended_ns, hvd_now_ns());
    return steps->row ? HVD_OK : hvd_fail(error, HVD_ENOMEM, HVD951 "no memory for the counts of training steps");
}

void hvd_steps_close(struct hvd_steps *steps)
{
    if (!steps->carriers)
        return;
    free(steps->row);
    free(steps->bucket);
    steps->row = NULL;
    steps->bucket = NULL;
    pthread_mutex_destroy(&steps->lock);
}

size_t hvd_steps_bytes(const struct hvd_steps *steps)
{
    int64_t rows = atomic_load(&steps->count), kept = rows < HVD_STEPS_KEPT ? rows : HVD_STEPS_KEPT;
    size_t looked = atomic_load(&steps->every) ? HVD_BUCKETS_KEPT * sizeof(struct hvd_bucket_seen) : 0;
    return (size_t)kept * (size_t)steps->width * sizeof *steps->row + looked;
}

uint32_t hvd_steps_agreed(struct hvd_engine *engine, const struct hvd_plan *plan, uint64_t now_ns)
{
    uint64_t since_ns = now_ns;
    uint32_t aside = 0;
    for (uint32_t i = 0; i < plan->items; i++) {
        if (plan->item[i].ticket == HVD_TICKET_NONE)
            continue;
        const struct hvd_slot *slot = &engine->handles.slot[plan->item[i].ticket];
        uint64_t submitted_ns = atomic_load_explicit(&slot->submitted_ns, memory_order_relaxed);
        aside += hvd_steps_aside(slot);
        if (submitted_ns < since_ns && !hvd_steps_ours(&slot->request))
            since_ns = submitted_ns;
    }
    if (since_ns < engine->steps.agreed_ns)
        since_ns = engine->steps.agreed_ns;
    engine->steps.agreed_ns = now_ns;
    hvd_count(engine, HVD_COUNT_negotiation_ns, (int64_t)(now_ns - since_ns));
    return aside;
}

/* Counts that only the turn changes. */
static void add(_Atomic int64_t *count, int64_t by)
{
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + by, memory_order_relaxed);
}

static int size_class(uint64_t bytes)
{
    int bits = 64 - __builtin_clzll((bytes - (bytes > 0)) | 1); /* of the least power of two that is not smaller */
    int class = (bits - SMALLEST_BITS + 1) / 2;
    return bits <= SMALLEST_BITS ? 0 : class < HVD_SIZES ? class : HVD_SIZES - 1;
}

/* Is what moves a request that is aside, which is alone in its bucket, or the exchange of its sizes? */
static bool is_aside(struct hvd_engine *engine, struct hvd_set *set)
{
    return set->aside && (set->moving.items == 1 || set->moving.sizes) && set->agenda.count &&
           hvd_steps_aside(hvd_work_slot(engine, hvd_work_item(set, 0)));
}

void hvd_steps_begun(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    moving->begun_ns = hvd_now_ns();
    if (is_aside(engine, set))
        return;
    hvd_count(engine, HVD_COUNT_buckets, 1);
    hvd_count(engine, HVD_COUNT_elements, (int64_t)moving->work.count);
}

/* Somebody looks closely: the bucket at the head is kept, unless a reader is at it right now. */
static void keep(struct hvd_engine *engine, struct hvd_set *set, int carrier, int64_t step, uint64_t now_ns)
{
    struct hvd_steps *steps = &engine->steps;
    const struct hvd_moving *moving = &set->moving;
    if (pthread_mutex_trylock(&steps->lock) != 0)
        return;
    struct hvd_bucket_seen *bucket = &steps->bucket[steps->buckets++ % HVD_BUCKETS_KEPT];
    memset(bucket, 0, sizeof *bucket);
    bucket->number = steps->buckets;
    bucket->step = step;
    bucket->begin_ns = (int64_t)moving->begun_ns;
    bucket->end_ns = (int64_t)now_ns;
    bucket->bytes = (int64_t)hvd_work_bytes(&moving->work);
    bucket->tensors = (int)moving->items;
    bucket->carrier = carrier;
    bucket->process_set = set->number;
    for (uint32_t i = 0, named = 0; i < moving->items && named < HVD_BUCKET_NAMES; i++) {
        const struct hvd_slot *slot = hvd_work_slot(engine, hvd_work_item(set, i));
        if (slot && slot->request.name)
            snprintf(bucket->name[named++], sizeof bucket->name[0], "%s", slot->request.name);
    }
    pthread_mutex_unlock(&steps->lock);
}

void hvd_steps_moved(struct hvd_engine *engine, struct hvd_set *set, uint64_t now_ns)
{
    struct hvd_steps *steps = &engine->steps;
    const struct hvd_moving *moving = &set->moving;
    if ((!moving->by && !moving->rode) || is_aside(engine, set))
        return;
    int carrier = moving->rode && hvd_set_spans_hosts(set) ? steps->carriers - 1 : moving->by->carrier;
    int64_t bytes = (int64_t)hvd_work_bytes(&moving->work);
    _Atomic int64_t *of = steps->of[carrier];
    add(&of[HVD_PLANE_NUMBER_bytes], bytes);
    add(&of[HVD_PLANE_NUMBER_messages], 1);
    if ((!moving->rode || !hvd_set_spans_hosts(set)) && !moving->work.behind) {
        add(&of[HVD_PLANE_NUMBER_busy_ns], (int64_t)(now_ns - moving->begun_ns));
        add(&of[HVD_PLANE_NUMBER_timed_bytes], bytes);
    }
    if (!moving->sizes)
        add(&steps->sizes[size_class((uint64_t)bytes)], 1);
    int64_t every = atomic_load_explicit(&steps->every, memory_order_acquire);
    if (every) {
        int64_t step = atomic_load_explicit(&steps->count, memory_order_relaxed) + 1;
        if (step % every == 0 && !moving->sizes)
            keep(engine, set, carrier, step, now_ns);
    }
}

/* All counts, as they stand. */
static void fill(struct hvd_engine *engine, _Atomic int64_t *row)
{
    struct hvd_steps *steps = &engine->steps;
    _Atomic int64_t *next = row + HVD_STEP_NUMBERS_MAX;
#define COPY(from) atomic_store_explicit(next++, atomic_load_explicit(from, memory_order_relaxed), memory_order_relaxed)
    for (int i = 0; i < HVD_COUNTERS_MAX; i++)
        COPY(&engine->counter[i]);
    for (int carrier = 0; carrier < steps->carriers; carrier++)
        for (int i = 0; i < HVD_PLANE_NUMBERS_MAX; i++)
            COPY(&steps->of[carrier][i]);
    for (int i = 0; i < HVD_SIZES; i++)
        COPY(&steps->sizes[i]);
#undef COPY
}

static void put(_Atomic int64_t *row, int which, int64_t value)
{
    atomic_store_explicit(&row[which], value, memory_order_relaxed);
}

int64_t hvd_engine_step(struct hvd_engine *engine, int found, int64_t optimizer_ns)
{
    struct hvd_steps *steps = &engine->steps;
    if (!found)
        atomic_store_explicit(&steps->by_script, true, memory_order_relaxed);
    else if (atomic_load_explicit(&steps->by_script, memory_order_relaxed))
        return 0;
    if (optimizer_ns > 0)
        hvd_count(engine, HVD_COUNT_optimizer_ns, optimizer_ns);
    uint64_t now_ns = hvd_now_ns();
    int64_t number = atomic_fetch_add(&steps->count, 1) + 1;
    _Atomic int64_t *row = steps->row + (number % HVD_STEPS_KEPT) * steps->width;
    put(row, HVD_STEP_number, 0);
    atomic_thread_fence(memory_order_release); /* who finds one of the new numbers finds that the row has none */
    put(row, HVD_STEP_begin_ns, (int64_t)atomic_exchange(&steps->ended_ns, now_ns));
    put(row, HVD_STEP_end_ns, (int64_t)now_ns);
    put(row, HVD_STEP_arrived_ns, (int64_t)atomic_exchange(&steps->arrived_ns, 0));
    atomic_store_explicit(&steps->arrived, false, memory_order_relaxed);
    fill(engine, row);
    atomic_store_explicit(&row[HVD_STEP_number], number, memory_order_release);
    return number;
}

void hvd_engine_arrived(struct hvd_engine *engine)
{
    if (atomic_exchange_explicit(&engine->steps.arrived, true, memory_order_relaxed))
        return; /* since then it may have waited for others */
    atomic_store_explicit(&engine->steps.arrived_ns, hvd_now_ns(), memory_order_relaxed);
}

bool hvd_engine_step_row(struct hvd_engine *engine, int64_t number, int64_t *values)
{
    struct hvd_steps *steps = &engine->steps;
    if (number == 0) {
        _Atomic int64_t
            now[HVD_STEP_NUMBERS_MAX + HVD_COUNTERS_MAX + HVD_CARRIERS_MAX * HVD_PLANE_NUMBERS_MAX + HVD_SIZES] = {0};
        fill(engine, now);
        put(now, HVD_STEP_number, atomic_load(&steps->count));
        put(now, HVD_STEP_begin_ns, (int64_t)atomic_load(&steps->ended_ns));
        put(now, HVD_STEP_end_ns, (int64_t)hvd_now_ns());
        put(now, HVD_STEP_arrived_ns, (int64_t)atomic_load(&steps->arrived_ns));
        for (int i = 0; i < steps->width; i++)
            values[i] = atomic_load_explicit(&now[i], memory_order_relaxed);
        return true;
    }
    if (number < 1 || number > atomic_load(&steps->count))
        return false;
    _Atomic int64_t *row = steps->row + (number % HVD_STEPS_KEPT) * steps->width;
    if (atomic_load_explicit(&row[HVD_STEP_number], memory_order_acquire) != number)
        return false;
    for (int i = 0; i < steps->width; i++)
        values[i] = atomic_load_explicit(&row[i], memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&row[HVD_STEP_number], memory_order_relaxed) == number;
}

int hvd_engine_look_closely(struct hvd_engine *engine, int64_t every, struct hvd_error *error)
{
    struct hvd_steps *steps = &engine->steps;
    if (every < 0)
        return hvd_fail(error, HVD_EINVAL, HVD802 "every %lld steps: must be at least 1, or 0 for none",
                        (long long)every);
    pthread_mutex_lock(&steps->lock);
    if (every && !steps->bucket)
        steps->bucket = calloc(HVD_BUCKETS_KEPT, sizeof *steps->bucket);
    bool there = steps->bucket || !every;
    if (there)
        atomic_store_explicit(&steps->every, every, memory_order_release);
    pthread_mutex_unlock(&steps->lock);
    return there ? HVD_OK : hvd_fail(error, HVD_ENOMEM, HVD951 "no memory to keep %d buckets", HVD_BUCKETS_KEPT);
}

int hvd_engine_buckets(struct hvd_engine *engine, int64_t first, struct hvd_bucket_seen *buckets, int count)
{
    struct hvd_steps *steps = &engine->steps;
    int copied = 0;
    pthread_mutex_lock(&steps->lock);
    int64_t oldest = steps->buckets > HVD_BUCKETS_KEPT ? steps->buckets - HVD_BUCKETS_KEPT + 1 : 1;
    for (int64_t number = first > oldest ? first : oldest; number <= steps->buckets && copied < count; number++)
        buckets[copied++] = steps->bucket[(number - 1) % HVD_BUCKETS_KEPT];
    pthread_mutex_unlock(&steps->lock);
    return copied;
}

int hvd_steps_name(int i, char *text, size_t text_bytes)
{
    static const char *const names[] = {
#define X(name) #name,
        HVD_STEP_NUMBERS(X) HVD_COUNTERS(X)
    };
    static const char *const of_plane[] = { HVD_PLANE_NUMBERS(X) };
#undef X
    int planes = 0, simple = (int)HVD_COUNT_OF(names);
    while (hvd_planes[planes])
        planes++;
    int of_planes = (planes + 1) * HVD_PLANE_NUMBERS_MAX;
    if (i < 0 || i >= simple + of_planes + HVD_SIZES)
        return 0;
    int place = i - simple, carrier = place / HVD_PLANE_NUMBERS_MAX;
    if (place < 0)
        snprintf(text, text_bytes, "%s", names[i]);
    else if (place < of_planes)
        snprintf(text, text_bytes, "%s.%s", of_plane[place % HVD_PLANE_NUMBERS_MAX],
                 carrier < planes ? hvd_planes[carrier]->name : "votes");
    else if (place < of_planes + HVD_SIZES - 1)
        snprintf(text, text_bytes, "size.%llu", 1ull << (SMALLEST_BITS + 2 * (place - of_planes)));
    else
        snprintf(text, text_bytes, "size.larger");
    return 1;
}
