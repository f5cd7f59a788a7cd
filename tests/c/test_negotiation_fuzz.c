/* test_negotiation_fuzz.c - votes are hostile bytes: whatever hvd_vote_check accepts, merge and decide survive.
 *
 * A world of three ranks lives through random requests, joins and mismatches. In every round one rank's vote is
 * damaged: bits flip, words become extremes, pieces move, fields that readers trust are replaced. A refused
 * vote is replaced by the true one. An accepted one is merged and decided by all ranks, in their turn, for the
 * rest of the history: the state that comes of it is nonsense, but agreed nonsense, and stays within bounds
 * (the sanitizers look, and the asserts of the core). Ranks still have equal plans, because they decide on
 * equal bytes.
 */
#include "check.h"
#include "negotiation/state.h"
#include "ranks.h"

#if defined(__SANITIZE_THREAD__)
#define HISTORIES 300
#else
#define HISTORIES 3000
#endif
#define SIZE    3
#define TICKETS 40
#define NAMES   12

struct history {
    struct ranks ranks;
    bool taken[SIZE][TICKETS];
    uint32_t orderly;    /* allreduces of so many names come in order, 0: anything comes */
    uint32_t next[SIZE]; /* of them */
    uint64_t seed;
    uint64_t accepted, refused, learned, lists_damaged;
};

static uint32_t below(struct history *history, uint32_t bound)
{
    return ranks_below(&history->seed, bound);
}

static const char *const name[NAMES] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"};

static uint32_t free_ticket(const struct history *history, int rank)
{
    uint32_t ticket = 0;
    while (ticket < TICKETS && history->taken[rank][ticket])
        ticket++;
    return ticket;
}

/* What can be learned, step after step; now and then a rank forgets one. */
static void submit_in_order(struct history *history, int rank)
{
    struct hvd_signature signature = ranks_signature(3);
    for (uint32_t i = below(history, 5), ticket; i > 0 && (ticket = free_ticket(history, rank)) < TICKETS; i--) {
        history->next[rank] += below(history, 100) == 0;
        int code = hvd_coord_submit(history->ranks.coord[rank], ticket, name[history->next[rank] % history->orderly],
                                    &signature, 0);
        history->taken[rank][ticket] = code == HVD_OK;
        history->next[rank] += code == HVD_OK;
    }
}

static void submit_some(struct history *history, int rank)
{
    for (uint32_t i = below(history, 5); i > 0; i--) {
        struct hvd_signature signature = ranks_signature(1 + below(history, 20) / 18);
        uint32_t which = below(history, NAMES + 4), ticket = free_ticket(history, rank);
        signature.kind = (int32_t)(which % 4);
        signature.group = which % 3;
        signature.group_count = signature.group ? 2 : 0;
        if (which == 5 || which == 6) { /* rank 2 may not: that is refused */
            signature.kind = HVD_SEND;
            signature.group = signature.group_count = 0;
            signature.root = which == 5;
            signature.peer = which == 6;
        }
        if (ticket == TICKETS)
            return;
        int code = hvd_coord_submit(history->ranks.coord[rank], ticket, which < NAMES ? name[which] : NULL, &signature,
                                    below(history, 2) * HVD_FRESH_IN_PLANE);
        history->taken[rank][ticket] = code == HVD_OK;
    }
}

/* One act of damage to `bytes` at 8-byte aligned memory; the length field may be changed too. */
static void damage(struct history *history, char *vote, uint32_t bytes)
{
    static const uint64_t extreme[] = {0, 1, 2, 3, 4, 63, 64, 255, 256, UINT32_MAX, INT64_MAX, UINT64_MAX};
    uint64_t value = extreme[below(history, HVD_COUNT_OF(extreme))];
    /* Half of the damage hits the header and the first words behind it, where it matters most. */
    uint32_t reach = below(history, 2) && bytes > 160 ? 160 : bytes;
    uint32_t at = below(history, reach / 4) * 4;
    switch (below(history, 5)) {
    case 0:
        vote[below(history, reach)] ^= (char)(1 << below(history, 8));
        break;
    case 1:
        memcpy(vote + at, &value, 4);
        break;
    case 2:
        memcpy(vote + at / 8 * 8, &value, 8);
        break;
    case 3: { /* a neighbour's value, off by one */
        uint32_t word;
        memcpy(&word, vote + at, 4);
        word += below(history, 3) - 1;
        memcpy(vote + at, &word, 4);
        break;
    }
    default: {
        uint32_t from = below(history, bytes / 8) * 8, count = 8 * (1 + below(history, 20));
        at = at / 8 * 8;
        if (from + count <= bytes && at + count <= bytes)
            memmove(vote + at, vote + from, count);
    }
    }
}

static void take_plan(struct history *history, int rank)
{
    const struct hvd_plan *plan = &history->ranks.plan[rank];
    CHECK(plan->items <= plan->items_max, "%u items", plan->items);
    for (uint32_t i = 0; i < plan->items; i++)
        if (plan->item[i].ticket != HVD_TICKET_NONE) {
            CHECK(history->taken[rank][plan->item[i].ticket], "ticket %u ends twice", plan->item[i].ticket);
            history->taken[rank][plan->item[i].ticket] = false;
        }
    if (plan->failed_ticket != HVD_TICKET_NONE)
        history->taken[rank][plan->failed_ticket] = false;
    uint8_t bytes_of[11] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2};
    hvd_plan_fuse(&history->ranks.plan[rank], 1 << 20, bytes_of);
    CHECK(plan->buckets <= plan->items, "%u buckets of %u items", plan->buckets, plan->items);
    CHECK(strlen(plan->text) < sizeof plan->text, "text");
}

static void play(struct history *history, uint64_t seed)
{
    struct ranks *ranks = &history->ranks;
    bool left = false;
    memset(history->taken, 0, sizeof history->taken);
    memset(history->next, 0, sizeof history->next);
    history->seed = seed;
    history->orderly = seed % 2 ? 1 + below(history, 5) : 0;
    ranks_open(ranks, SIZE, 2 + below(history, 9), 1 + below(history, 8), TICKETS, seed);
    char *copy = aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(ranks->vote_bytes, (size_t)HVD_CACHE_LINE));
    for (int round = 0; round < 30 && !left; round++) {
        for (int rank = 0; rank < SIZE; rank++) {
            if (history->orderly && below(history, 20))
                submit_in_order(history, rank);
            else
                submit_some(history, rank);
            if (below(history, history->orderly ? 400 : 40) == 0 && !ranks->coord[rank]->joined)
                hvd_coord_join(ranks->coord[rank]);
            ranks_vote(ranks, rank);
        }
        struct hvd_vote *victim = ranks->vote[below(history, SIZE)];
        if (history->orderly && ranks->vote[0]->list && below(history, 2))
            victim = ranks->vote[0];
        uint32_t bytes = victim->bytes;
        memcpy(copy, victim, bytes);
        for (uint32_t times = 1 + below(history, 3) / 2; times > 0; times--)
            damage(history, (char *)victim, bytes);
        bool believed = hvd_vote_check(ranks->coord[0], victim, bytes) == HVD_OK;
        history->accepted += believed;
        history->lists_damaged += believed && victim->list;
        history->refused += !believed;
        if (!believed)
            memcpy(victim, copy, bytes);
        /* Ranks of damaged votes need not add up, so this does not compare trees of merges. */
        memcpy(ranks->agreed, ranks->vote[0], ranks->vote[0]->bytes);
        for (int rank = 1; rank < SIZE; rank++)
            hvd_vote_merge(ranks->coord[0], ranks->agreed, ranks->vote[rank]);
        for (int rank = 0; rank < SIZE; rank++) {
            ranks_decide(ranks, rank);
            take_plan(history, rank);
        }
        history->learned += ranks->plan[0].learned > 0;
        left = ranks->plan[0].left >= 0;
    }
    free(copy);
    ranks_close(ranks);
}

/* A length that says more than there is must be refused before anything behind it is read. */
static void short_votes_are_refused(void)
{
    struct ranks ranks;
    ranks_open(&ranks, 2, 100, 8, 8, 1);
    struct hvd_signature signature = ranks_signature(4);
    hvd_coord_submit(ranks.coord[0], 0, "w", &signature, 0);
    size_t bytes = hvd_coord_vote(ranks.coord[0], ranks.vote[0], ranks.vote_bytes);
    for (size_t room = 0; room < bytes; room++) {
        char *exact = malloc(room ? room : 1); /* so that the sanitizer sees a step beyond */
        memcpy(exact, ranks.vote[0], room);
        CHECK(hvd_vote_check(ranks.coord[0], (struct hvd_vote *)exact, room) == HVD_EINVAL, "room %zu", room);
        free(exact);
    }
    CHECK(hvd_vote_check(ranks.coord[0], ranks.vote[0], bytes) == HVD_OK, "%zu bytes", bytes);
    ranks_close(&ranks);
}

/*     test_coord_fuzz [--seed N | --verbose]      --verbose says each seed before it is played */
int main(int argc, char **argv)
{
    struct history history = {0};
    bool one = argc > 2 && strcmp(argv[1], "--seed") == 0, verbose = argc > 1 && strcmp(argv[1], "--verbose") == 0;
    uint64_t from = one ? strtoull(argv[2], NULL, 10) : 1, count = one ? 1 : HISTORIES;
    short_votes_are_refused();
    for (uint64_t seed = from; seed < from + count; seed++) {
        if (verbose)
            fprintf(stderr, "--seed %llu\n", (unsigned long long)seed);
        play(&history, seed);
    }
    CHECK(one || (history.accepted > count && history.refused > count && history.learned > count / 3 &&
                  history.lists_damaged > count / 20),
          "%llu accepted, %llu refused, %llu learned, %llu lists damaged", (unsigned long long)history.accepted,
          (unsigned long long)history.refused, (unsigned long long)history.learned,
          (unsigned long long)history.lists_damaged);
    return 0;
}
