/* order.c - collectives on devices of sets that overlap begin in one order on all ranks.
 *
 * A device does what was put on its stream one after the other, and a collective there ends when all its ranks have got
 * to it. So two ranks that begin those of two sets in different orders wait for each other for ever. Sets vote for
 * themselves, each in its own time, and know nothing of each other; what they lack is an order of their plans.
 *
 * It comes from a clock, as Lamport's. Every rank has one for all its sets. A vote says what it shows, a round's plan
 * is dated one later than the greatest that was said, and whoever takes a plan that has works on devices sets its clock
 * to its date if it was behind. Works are ordered by (date, number of the set, place in the set's plans): of agreed
 * numbers only, hence the same wherever two ranks have two works in common. (Sets without a common rank may have one
 * number; no rank has works of both.) A rank BEGINS (puts on its stream) a work w dated t of set S when no lesser one
 * can come any more or is waiting:
 *
 *     1. in none of its other sets has it voted in a round that is not decided yet and may be dated so that (date, set)
 *        is less than (t, S); it knows what it has said there, and the date is later than that;
 *     2. in none of its other sets is a lesser work on a device agreed and not begun.
 *
 * Nothing lesser comes later: a vote that this rank gives from now on says its clock, which shows at least t since it
 * has taken the plan of w, so what comes of it is dated later than t. Within a set dates grow for the same reason. So
 * every rank begins its works in ascending order.
 *
 * Nothing waits for ever. Let w be the least work on a device, of all ranks, that some rank r has not begun though a
 * member has agreed on it. All lesser ones are begun by all their members, in ascending order on each stream, so they
 * end, the least first. Before w in its own set's agenda there is only what moves through the CPU's memory, which waits
 * for nothing but the same place in that agenda elsewhere, and lesser works on devices; so w comes to the head. Rule 2
 * holds. For rule 1 let r have voted in set T, with an undecided round that may be dated before w. Its members enter it
 * without user code, once what T moves at that time is done; that is agreed before, hence dated no later than what r
 * has said in this round, hence lesser than w and begun everywhere. So the round is decided, r's clock has passed, and
 * r begins w. (User code has its part: what it put on its own stream before a tensor is ready ends by itself, since a
 * stream that waits for a collective waits for one that was begun before.)
 *
 * A work that goes by way of the CPU is no different: once begun it ends, and is waited for until then.
 *
 * It needs no message and no byte more than before, and a rank that is in one set only never waits here. A set of one
 * rank has no place in the order: nobody waits for it. But it begins nothing, and nothing of the others begins, while a
 * work is between its beginning and its end, for NCCL has room for one thing in the background (plane/nccl/comm.c).
 * Begun works end by themselves, and between two works of a set all others are looked at, so it waits for a while only.
 */
#include "../engine.h"

static bool less(uint64_t date, int number, uint64_t than_date, int than_number)
{
    return date != than_date ? date < than_date : number < than_number;
}

void hvd_order_vote(struct hvd_engine *engine, struct hvd_set *set)
{
    set->said_clock = engine->clock;
    hvd_coord_date(set->coord, engine->clock);
}

void hvd_order_plan(struct hvd_engine *engine, const struct hvd_plan *plan)
{
    for (uint32_t i = 0; i < plan->items; i++)
        if (hvd_item_on_device(&plan->item[i]) && engine->clock < plan->date)
            engine->clock = plan->date;
}

/* Is a lesser work on a device agreed here? Its agenda begins with what is not begun, in ascending order. */
static bool has_lesser(struct hvd_set *set, uint64_t date, int number)
{
    for (uint32_t i = 0; i < set->agenda.count; i++) {
        uint64_t its = set->agenda.date[(set->agenda.head + i) & (set->agenda.room - 1)];
        if (!less(its, set->number, date, number))
            return false;
        if (hvd_item_on_device(hvd_work_item(set, i)))
            return true;
    }
    return false;
}

static bool is_at_it(const struct hvd_set *set)
{
    const struct hvd_moving *moving = &set->moving;
    return moving->busy && !moving->waits && moving->lineup && moving->by == &moving->lineup->open;
}

bool hvd_order_turn(struct hvd_engine *engine, const struct hvd_set *set)
{
    uint64_t date = set->agenda.date[set->agenda.head];
    for (int i = 0; i < engine->sets; i++) {
        struct hvd_set *other = engine->set[i];
        if (other == set)
            continue;
        if (is_at_it(other))
            return false;
        if (set->alone || other->alone)
            continue;
        if (other->entered && less(other->said_clock + 1, other->number, date, set->number))
            return false;
        if (has_lesser(other, date, set->number))
            return false;
    }
    return true;
}
