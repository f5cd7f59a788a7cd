/* count_negotiation.c - instructions of one vote: what a rank does to agree that 161 known tensors are ready.
 *
 * Two coordinators without a wire. Counted on one of them: writing its vote, checking and merging the other's, decide
 * and fuse; submitting is counted apart, per tensor.
 */
#include "check.h"
#include "count.h"
#include "ranks.h"

#include <string.h>

enum { TENSORS = 161, ROOM = 256, KNOWN_AFTER = 100 };

struct side {
    struct hvd_coord *coord;
    struct hvd_vote *vote, *merged;
    struct hvd_plan plan;
};

static char name[TENSORS][48];
static size_t vote_bytes;

static void *take(size_t bytes)
{
    void *memory = aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(bytes, (size_t)HVD_CACHE_LINE));
    CHECK(memory, "%zu bytes", bytes);
    return memory;
}

static void open_side(struct side *side, int rank)
{
    struct hvd_coord_limits limits = {
        .rank = rank, .size = 2, .slots = ROOM, .tickets = ROOM, .fresh = ROOM, .names = &ranks_names};
    side->coord = hvd_coord_open(take(hvd_coord_bytes(&limits)), &limits);
    vote_bytes = hvd_vote_bytes_max(&limits);
    side->vote = take(vote_bytes);
    side->merged = take(vote_bytes);
    side->plan.items_max = 2 * ROOM;
    side->plan.item = take(sizeof *side->plan.item * side->plan.items_max);
}

static void submit_all(struct side *side)
{
    struct hvd_signature signature = ranks_signature(1000);
    for (int i = 0; i < TENSORS; i++) {
        signature.dims[0] = 1000 + i;
        CHECK(hvd_coord_submit(side->coord, (uint32_t)i, name[i], &signature, 0) == HVD_OK, "tensor %d", i);
    }
}

static void agree(struct side *mine, const struct side *other)
{
    static const uint8_t bytes_of[] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2};
    memcpy(mine->merged, mine->vote, mine->vote->bytes);
    CHECK(hvd_vote_check(mine->coord, other->vote, vote_bytes) == HVD_OK, "a vote is malformed");
    hvd_vote_merge(mine->coord, mine->merged, other->vote);
    hvd_coord_decide(mine->coord, mine->merged, &mine->plan);
    hvd_plan_fuse(&mine->plan, 64 << 20, bytes_of);
    CHECK(mine->plan.items == TENSORS, "%u items", mine->plan.items);
}

static void one_round(struct side *mine, struct side *other, const char *counted)
{
    int submitted = counted && strcmp(counted, "submit") == 0;
    if (submitted)
        count_begin();
    submit_all(mine);
    if (submitted)
        count_end("submit-in-coordinator", TENSORS);
    submit_all(other);
    hvd_coord_vote(other->coord, other->vote, vote_bytes);
    if (counted && !submitted)
        count_begin();
    hvd_coord_vote(mine->coord, mine->vote, vote_bytes);
    agree(mine, other);
    if (counted && !submitted)
        count_end("vote-of-161", 1);
    agree(other, mine);
}

int main(void)
{
    struct side side[2] = {{0}};
    for (int i = 0; i < TENSORS; i++)
        snprintf(name[i], sizeof name[i], "layer%d.%d.conv%d.weight", 1 + i / 40, i / 6, i % 6);
    for (int rank = 0; rank < 2; rank++)
        open_side(&side[rank], rank);
    for (int i = 0; i < KNOWN_AFTER; i++)
        one_round(&side[0], &side[1], NULL);
    one_round(&side[0], &side[1], "submit");
    one_round(&side[0], &side[1], "vote");
    for (int rank = 0; rank < 2; rank++) {
        free(side[rank].coord);
        free(side[rank].vote);
        free(side[rank].merged);
        free(side[rank].plan.item);
    }
    return 0;
}
