/* work_queue.c - what was agreed and is not yet done, in plan order.
 *
 * A ring that grows and never shrinks: after the first steps nothing is allocated. Plans come in at the end, bucket by
 * bucket; execute.c takes from the head. Beside each item stand its bucket, the date of its plan and how many ranks
 * were active when it was planned, which is agreed and may have changed by the time it is done.
 */
#include "../engine.h"

#include <stdlib.h>
#include <string.h>

/* Grow the ring so that it holds `more` further items. */
static void reserve(struct hvd_agenda *agenda, uint32_t more)
{
    uint32_t room = agenda->room ? agenda->room : 64;
    while (room < agenda->count + more)
        room *= 2;
    if (room == agenda->room)
        return;
    struct hvd_plan_item *item = malloc(sizeof *item * room);
    uint64_t *bucket = malloc(sizeof *bucket * room);
    uint32_t *active = malloc(sizeof *active * room);
    uint64_t *date = malloc(sizeof *date * room);
    HVD_ASSERT(item && bucket && active && date);
    for (uint32_t i = 0; i < agenda->count; i++) {
        uint32_t from = (agenda->head + i) & (agenda->room - 1);
        item[i] = agenda->item[from];
        bucket[i] = agenda->bucket[from];
        active[i] = agenda->active[from];
        date[i] = agenda->date[from];
    }
    free(agenda->item);
    free(agenda->bucket);
    free(agenda->active);
    free(agenda->date);
    agenda->item = item;
    agenda->bucket = bucket;
    agenda->active = active;
    agenda->date = date;
    agenda->head = 0;
    agenda->room = room;
}

/* Append the plan, bucket by bucket (fuse may have put a later item into an earlier bucket). */
void hvd_agenda_append(struct hvd_agenda *agenda, const struct hvd_plan *plan, uint64_t number)
{
    reserve(agenda, plan->items);
    uint32_t first = agenda->head + agenda->count, placed = 0;
    for (uint32_t bucket = 0; bucket < plan->buckets; bucket++)
        for (uint32_t i = 0; i < plan->items; i++)
            if (plan->item[i].bucket == bucket) {
                uint32_t at = (first + placed++) & (agenda->room - 1);
                agenda->item[at] = plan->item[i];
                agenda->bucket[at] = number << 32 | bucket;
                agenda->active[at] = plan->active;
                agenda->date[at] = plan->date;
            }
    HVD_ASSERT(placed == plan->items);
    agenda->count += placed;
}

void hvd_agenda_close(struct hvd_agenda *agenda)
{
    free(agenda->item);
    free(agenda->bucket);
    free(agenda->active);
    free(agenda->date);
    memset(agenda, 0, sizeof *agenda);
}

struct hvd_plan_item *hvd_work_item(struct hvd_set *set, uint32_t i)
{
    return &set->agenda.item[(set->agenda.head + i) & (set->agenda.room - 1)];
}

uint64_t hvd_work_bucket(const struct hvd_set *set, uint32_t i)
{
    return set->agenda.bucket[(set->agenda.head + i) & (set->agenda.room - 1)];
}

struct hvd_slot *hvd_work_slot(struct hvd_engine *engine, const struct hvd_plan_item *item)
{
    return item->ticket == HVD_TICKET_NONE ? NULL : &engine->handles.slot[item->ticket];
}
