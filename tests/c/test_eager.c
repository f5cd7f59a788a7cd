/* test_eager.c - who sits out after a ride: rounds that agree on nothing are no reason, rides in vain are.
 *
 * hvd_eager_agreed needs a set with riders and what its round has decided, no more. Ranks on hosts that do not come
 * together spoil each other's rides in round after round, until all have come; if that counted, no small tensor of
 * theirs would ever ride again.
 */
#include "check.h"
#include "engine/process_set.h"

static struct hvd_eager agreed;
static struct hvd_eager_room riders;
static struct hvd_set set;

static void begin(void)
{
    riders = (struct hvd_eager_room){.agreed = &agreed, .expected = 2};
    set = (struct hvd_set){.riders = &riders};
}

static void round_of(uint64_t mark, uint32_t parts, uint32_t items)
{
    agreed = (struct hvd_eager){.mark = mark, .parts = parts};
    set.plan.items = items;
    hvd_eager_agreed(&set);
}

static void early_ranks_spoil_nothing_while_nothing_is_agreed(void)
{
    begin();
    for (int i = 0; i < 100; i++) {
        round_of(HVD_EAGER_SPOILT, 0, 0);
        CHECK(riders.resting == 0 && riders.wrong == 0, "round %d: %u rounds to sit out", i, riders.resting);
    }
    riders.offered = 99;
    riders.offered_tag = 5;
    round_of(99, 2, 1);
    CHECK(riders.waits_for == 5, "a whole ride is not waited for");
}

static void rides_in_vain_are_made_ever_less_often(void)
{
    begin();
    int tried = 0;
    for (int i = 0; i < 2000; i++) {
        tried += riders.resting == 0;
        round_of(riders.resting == 0 ? HVD_EAGER_SPOILT : 0, 0, 1);
    }
    CHECK(tried > 8 && tried < 30, "%d of 2000", tried);
    CHECK(riders.wrong == 8, "%u", riders.wrong);
}

static void a_whole_ride_that_is_not_taken_is_one_in_vain(void)
{
    begin();
    riders.offered = 99;
    riders.offered_tag = 5;
    round_of(99, 2, 1);
    CHECK(riders.waits_for == 5 && riders.wrong == 0, "%u", riders.wrong);
    round_of(0, 0, 0);
    CHECK(riders.waits_for == 0 && riders.wrong == 1, "%u", riders.wrong);
}

int main(void)
{
    early_ranks_spoil_nothing_while_nothing_is_agreed();
    rides_in_vain_are_made_ever_less_often();
    a_whole_ride_that_is_not_taken_is_one_in_vain();
    return 0;
}
