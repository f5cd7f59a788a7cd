/* device_agreement.c - the ranks of a set that have tensors on devices greet each other, once, and know who does their
 * works.
 *
 * A plane for devices is open everywhere and has loaded nothing. When the first work on a device of a set has come to
 * the head of the agenda, at the same place in the order of all its ranks, each says hello: an allgather of some bytes
 * over the planes that move the CPU's memory. From what all have said the plane decides, the same on all ranks, whether
 * it is for this set. If it is not, the set's works on devices go by way of the CPU (host_staging.c) from then on, and
 * a notice on the set's first rank says why; it is for whoever asks, since the core prints nothing. While a rank that
 * has joined had no tensor on a device yet, works go by way of the CPU one by one, and the ranks greet each other again
 * before the next.
 *
 * A rank may use several devices. Which one a tensor lies on is nobody's business but its own, yet a communicator joins
 * one device of each rank: that is a *lineup*. Where the first tensor of a set lay is a rank's usual device, and nearly
 * all jobs know no other; with its vote a rank says of each tensor whether it lies there (the flag that tells of memory
 * in the plane for tensors of the CPU, with the same rules). Are all ranks' on their usual one, then that is the
 * lineup. If not, the items of the bucket are asked for: each rank says on which device it has them, over the planes
 * that move the CPU's memory, and items that lie alike go together, by a plane of that lineup, whose ranks have greeted
 * each other likewise. Works of all lineups begin in plan order, and so on every device in one order (order.c).
 *
 * Nothing is freed while the job runs: that waits for all that runs on the device, also for kernels of others that wait
 * for a peer, and the engine of this rank is what the peer may wait for. It is done when a set, or the engine, closes.
 *
 * When a job fails, what runs on devices is ended at once: a collective that waits there for a lost rank would keep the
 * user's own work on that device waiting, too. All sets' ends are begun before any is waited for, here and when an
 * engine ends in peace: they share a stream, and ranks may close their sets in different orders.
 */
#include "../engine.h"

#include "../../kernel/kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ENDING_NS 10000000000u /* for what all have put on their streams, and will end unless somebody dies */

static struct hvd_open_plane *for_devices(struct hvd_set *set)
{
    for (int i = 0; i < set->planes_count; i++)
        if (set->planes[i].plane->device)
            return &set->planes[i];
    return NULL;
}

uint32_t hvd_device_usual(struct hvd_set *set, const struct hvd_request *request)
{
    set->usual = set->usual ? set->usual : request->device;
    return request->device == set->usual ? HVD_FRESH_IN_PLANE : 0;
}

static bool is_usual(const struct hvd_plan_item *item)
{
    return item->flags & HVD_FRESH_IN_PLANE;
}

/* The usual one has the plane that was opened with the set. */
static struct hvd_lineup *new_lineup(struct hvd_engine *engine, struct hvd_set *set, const int64_t *device)
{
    struct hvd_lineup *lineup = calloc(1, sizeof *lineup), **last = &set->lineup;
    struct hvd_open_plane *first = for_devices(set);
    struct hvd_error error = {0};
    HVD_ASSERT(lineup && first);
    lineup->open = *first;
    if (device) {
        struct hvd_plane_arg arg = hvd_set_plane_arg(engine, set);
        arg.arena_bytes = HVD_ARENA_NONE;
        arg.comm = NULL;
        lineup->device = malloc(sizeof *device * (size_t)set->size);
        HVD_ASSERT(lineup->device);
        memcpy(lineup->device, device, sizeof *device * (size_t)set->size);
        int code = first->plane->open(&arg, &lineup->open.self, &error);
        HVD_ASSERT(code == HVD_OK);
    }
    while (*last)
        last = &(*last)->next;
    *last = lineup;
    return lineup;
}

/* Of the i-th item that was asked for. */
static void where(const struct hvd_set *set, uint32_t i, int64_t *device)
{
    for (int rank = 0; rank < set->size; rank++)
        device[rank] = set->moving.devices[(size_t)rank * set->moving.asked + i];
}

static struct hvd_lineup *lineup_of_head(struct hvd_engine *engine, struct hvd_set *set)
{
    int64_t device[set->size];
    if (!set->lineup)
        new_lineup(engine, set, NULL);
    if (is_usual(hvd_work_item(set, 0)))
        return set->lineup;
    where(set, set->moving.asked - set->moving.asked_for, device);
    struct hvd_lineup *lineup = set->lineup->next;
    while (lineup && memcmp(lineup->device, device, sizeof device) != 0)
        lineup = lineup->next;
    return lineup ? lineup : new_lineup(engine, set, device);
}

uint32_t hvd_device_together(const struct hvd_set *set, uint32_t items)
{
    const struct hvd_moving *moving = &set->moving;
    uint32_t alike = 1;
    if (!moving->lineup || !moving->lineup->device)
        return items;
    int64_t device[set->size];
    for (; alike < items && alike < moving->asked_for; alike++) {
        where(set, moving->asked - moving->asked_for + alike, device);
        if (memcmp(moving->lineup->device, device, sizeof device) != 0)
            break;
    }
    return alike;
}

/* Each rank says `count` elements to all others. */
static void start_exchange(struct hvd_engine *engine, struct hvd_set *set, int dtype, const void *mine, void *all,
                           uint64_t count)
{
    struct hvd_moving *moving = &set->moving;
    hvd_ragged_counts(set);
    hvd_work_pieces(moving, 1);
    for (int rank = 0; rank < set->size; rank++)
        moving->count_of[rank] = count;
    memset(&moving->work, 0, sizeof moving->work);
    moving->work.kind = HVD_ALLGATHER;
    moving->work.dtype = dtype;
    moving->work.piece = moving->piece;
    moving->work.pieces = 1;
    moving->work.count = count;
    moving->work.count_of = moving->count_of;
    moving->piece[0] = (struct hvd_piece){mine, all, count};
    moving->items = 0;
    moving->sizes = false;
    hvd_work_start(engine, set);
}

/* On which devices do the ranks have the items of this bucket? */
static void ask(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    uint32_t items = 1;
    while (items < set->agenda.count && hvd_work_bucket(set, items) == hvd_work_bucket(set, 0))
        items++;
    free(moving->devices);
    moving->devices = malloc(sizeof *moving->devices * items * ((size_t)set->size + 1));
    HVD_ASSERT(moving->devices);
    int64_t *mine = moving->devices + (size_t)items * (size_t)set->size;
    for (uint32_t i = 0; i < items; i++) {
        const struct hvd_slot *slot = hvd_work_slot(engine, hvd_work_item(set, i));
        mine[i] = slot && slot->request.device ? slot->request.device : set->usual;
    }
    moving->asked = moving->asked_for = items;
    start_exchange(engine, set, HVD_DTYPE_int64, mine, moving->devices, items);
}

static void notice(struct hvd_engine *engine, const struct hvd_set *set)
{
    if (set->rank != 0 || atomic_load(&engine->noticed)) /* the first of those whom it concerns tells */
        return;
    char why[HVD_TEXT_MAX];
    hvd_text_copy(why, sizeof why, set->refusal);
    hvd_text_bare(why);
    hvd_text_write(engine->notice, sizeof engine->notice,
                   HVD673 "GPU tensors go through host memory in process set %d, which is slow: %s", set->number, why);
    atomic_store(&engine->noticed, 1);
}

static void say_hello(struct hvd_engine *engine, struct hvd_set *set)
{
    unsigned char *mine = set->hello + (size_t)set->size * HVD_HELLO_BYTES;
    set->moving.greeting = true;
    start_exchange(engine, set, HVD_DTYPE_uint8, mine, set->hello, HVD_HELLO_BYTES);
}

/* The ranks of a lineup say hello. True: that is under way. */
static bool greet(struct hvd_engine *engine, struct hvd_set *set, struct hvd_lineup *lineup)
{
    struct hvd_work first = {.kind = HVD_BARRIER};
    size_t all = (size_t)set->size * HVD_HELLO_BYTES;
    first.device = lineup->device ? (int)lineup->device[set->rank] : set->usual;
    atomic_store(&engine->silent, true);
    set->hello = calloc((size_t)set->size + 1, HVD_HELLO_BYTES);
    HVD_ASSERT(set->hello);
    lineup->open.plane->hello(lineup->open.self, &first, set->hello + (set->alone ? 0 : all));
    if (set->alone) {
        hvd_device_met(engine, set);
        return false;
    }
    say_hello(engine, set);
    return true;
}

bool hvd_device_greets(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_moving *moving = &set->moving;
    const struct hvd_plan_item *head = hvd_work_item(set, 0);
    moving->lineup = NULL;
    if (!hvd_item_on_device(head))
        return false;
    if (!is_usual(head) && !moving->asked_for) {
        ask(engine, set);
        return true;
    }
    moving->lineup = lineup_of_head(engine, set);
    if (moving->unmet || moving->lineup->greeted) {
        moving->unmet = false;
        return false;
    }
    return greet(engine, set, moving->lineup);
}

void hvd_device_met(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_lineup *lineup = set->moving.lineup;
    struct hvd_open_plane *open = &lineup->open;
    struct hvd_error error = {0};
    int code = open->plane->met(open->self, set->hello, &error);
    set->moving.greeting = false;
    set->moving.unmet = code == HVD_AGAIN;
    open->refused = code != HVD_OK;
    lineup->greeted = code != HVD_AGAIN;
    hvd_text_copy(set->refusal, sizeof set->refusal, error.text);
    free(set->hello);
    set->hello = NULL;
    if (open->refused && lineup->greeted)
        notice(engine, set);
}

/* Of all lineups. The first error, or HVD_AGAIN: one is at it, or HVD_OK. */
static int settle(const struct hvd_set *set, struct hvd_error *error)
{
    int all = HVD_OK;
    for (struct hvd_lineup *lineup = set->lineup; lineup && all >= 0; lineup = lineup->next) {
        int code = lineup->greeted ? lineup->open.plane->settle(lineup->open.self, error) : HVD_OK;
        all = code < 0 || all == HVD_OK ? code : all;
    }
    return all;
}

bool hvd_device_settle(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_error error;
    hvd_error_none(&error);
    int code = settle(set, &error);
    if (code == HVD_AGAIN)
        return false;
    set->on_stream = false;
    if (code == HVD_OK)
        hvd_watch_clear(set);
    if (code != HVD_OK)
        hvd_engine_abort(engine, engine->options.rank, code, error.text);
    return true;
}

void hvd_device_close(struct hvd_set *set)
{
    hvd_watch_close(set);
    while (set->lineup) {
        struct hvd_lineup *lineup = set->lineup;
        set->lineup = lineup->next;
        if (lineup->device) /* else it is closed with the set's */
            lineup->open.plane->close(lineup->open.self);
        free(lineup->device);
        free(lineup);
    }
}

void hvd_device_part(struct hvd_engine *engine, bool abort)
{
    struct hvd_error ignored = {0};
    uint64_t until_ns = hvd_now_ns() + (abort ? 0 : ENDING_NS);
    for (int i = 0; i < engine->sets; i++)
        while (engine->set[i]->on_stream && hvd_now_ns() < until_ns && settle(engine->set[i], &ignored) == HVD_AGAIN)
            usleep(50);
    for (int i = 0; i < engine->sets; i++)
        for (struct hvd_lineup *lineup = engine->set[i]->lineup; lineup; lineup = lineup->next)
            if (lineup->greeted)
                lineup->open.plane->part(lineup->open.self, abort);
}

int hvd_engine_notice(struct hvd_engine *engine, char *text, size_t text_bytes)
{
    uint32_t fresh = 1;
    if (!atomic_compare_exchange_strong(&engine->noticed, &fresh, 2))
        return 0;
    hvd_text_copy(text, text_bytes, engine->notice);
    return 1;
}
