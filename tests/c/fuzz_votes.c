/* fuzz_votes.c - votes on boards: whatever hvd_vote_check accepts, merge and decide survive.
 *
 * Two or three coordinators submit, join, leave and vote as the input says. Votes that it damages are checked in memory
 * of exactly their length; the refused are replaced by the true ones, the accepted are merged, and decided by all ranks
 * on the same bytes. The state that comes of it is nonsense, but agreed nonsense (ranks_decide compares), within its
 * bounds, and every ticket ends once.
 */
#include "check.h"
#include "negotiation/state.h"
#include "fuzz.h"
#include "ranks.h"

#define RANKS_MAX 3
#define TICKETS   16
#define ROUNDS    24

struct scene {
    struct fuzz_input input;
    struct ranks ranks;
    bool taken[RANKS_MAX][TICKETS];
};

static const char *const name[] = {"a", "b", "c", "d", "e", "f"};

static void submit(struct scene *scene, int rank)
{
    uint32_t which = fuzz_below(&scene->input, 16), how = fuzz_byte(&scene->input), ticket = 0;
    struct hvd_signature signature = ranks_signature(1 + (how >> 7));
    while (ticket < TICKETS && scene->taken[rank][ticket])
        ticket++;
    if (ticket == TICKETS)
        return;
    if (which >= 8) { /* else what may be learned */
        signature.kind = (int32_t)(how & 3);
        signature.group = how >> 2 & 1;
        signature.group_count = signature.group ? 2 : 0;
        signature.priority = (int32_t)(how >> 3 & 3) - 1;
    }
    if (which == 15) {
        signature.kind = HVD_SEND;
        signature.group = signature.group_count = 0;
        signature.root = (int32_t)(how & 1);
        signature.peer = !signature.root;
    }
    const char *called = which == 14 ? NULL : name[which % HVD_COUNT_OF(name)];
    int code =
        hvd_coord_submit(scene->ranks.coord[rank], ticket, called, &signature, how & 64 ? HVD_FRESH_IN_PLANE : 0);
    scene->taken[rank][ticket] = code == HVD_OK;
}

/* Is it a vote, in memory of its own that ends where it does? */
static bool believed(const struct scene *scene, const struct hvd_vote *vote, size_t bytes)
{
    struct hvd_vote *exact = malloc(bytes);
    memcpy(exact, vote, bytes);
    bool is = hvd_vote_check(scene->ranks.coord[0], exact, bytes) == HVD_OK;
    free(exact);
    return is;
}

static void take_plan(struct scene *scene, int rank)
{
    struct hvd_plan *plan = &scene->ranks.plan[rank];
    static const uint8_t bytes_of[] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2};
    CHECK(plan->items <= plan->items_max, "%u items", plan->items);
    for (uint32_t i = 0; i < plan->items; i++)
        if (plan->item[i].ticket != HVD_TICKET_NONE) {
            CHECK(scene->taken[rank][plan->item[i].ticket], "ticket %u ends twice", plan->item[i].ticket);
            scene->taken[rank][plan->item[i].ticket] = false;
        }
    if (plan->failed_ticket != HVD_TICKET_NONE)
        scene->taken[rank][plan->failed_ticket] = false;
    hvd_plan_fuse(plan, 1 << 20, bytes_of);
    CHECK(plan->buckets <= plan->items, "%u buckets of %u items", plan->buckets, plan->items);
    CHECK(strlen(plan->text) < sizeof plan->text, "text");
}

/* True when nothing more is planned. */
static bool hold_round(struct scene *scene)
{
    struct ranks *ranks = &scene->ranks;
    for (int rank = 0; rank < ranks->size; rank++) {
        ranks_vote(ranks, rank);
        struct hvd_vote *vote = ranks->vote[rank];
        size_t bytes = vote->bytes;
        memcpy(ranks->again, vote, bytes);
        if (fuzz_damage(&scene->input, vote, bytes) && !believed(scene, vote, bytes))
            memcpy(vote, ranks->again, bytes);
    }
    memcpy(ranks->agreed, ranks->vote[0], ranks->vote[0]->bytes);
    for (int rank = 1; rank < ranks->size; rank++)
        hvd_vote_merge(ranks->coord[0], ranks->agreed, ranks->vote[rank]);
    for (int rank = 0; rank < ranks->size; rank++) {
        ranks_decide(ranks, rank);
        take_plan(scene, rank);
    }
    return ranks->plan[0].left >= 0;
}

void fuzz_votes(struct fuzz_input input)
{
    struct scene scene = {.input = input};
    struct ranks *ranks = &scene.ranks;
    uint32_t form = fuzz_byte(&scene.input);
    int size = 2 + (int)(form & 1), rounds = 0;
    ranks_open(ranks, size, 2 + (form >> 1 & 7), 1 + (form >> 4 & 7), TICKETS, 1);
    while (scene.input.left && rounds < ROUNDS) {
        uint32_t what = fuzz_byte(&scene.input);
        struct hvd_coord *coord = ranks->coord[what / 64 % (uint32_t)size];
        switch (what % 64) {
        case 0:
            if (!coord->joined)
                hvd_coord_join(coord);
            break;
        case 1:
            hvd_coord_leave(coord);
            break;
        case 2:
            hvd_coord_tune(coord, fuzz_below(&scene.input, 65536));
            break;
        default:
            if (what % 64 < 20) {
                rounds = hold_round(&scene) ? ROUNDS : rounds + 1;
            } else if (what % 64 < 40) { /* all ranks alike */
                struct fuzz_input here = scene.input;
                for (int rank = 0; rank < size; rank++) {
                    scene.input = here;
                    submit(&scene, rank);
                }
            } else {
                submit(&scene, (int)(what / 64) % size);
            }
        }
    }
    ranks_close(ranks);
}
