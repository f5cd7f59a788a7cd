/* merge.c - two sayings become one.
 *
 * Every field has its own little operator, each associative and commutative with an identity: counts add, bits
 * AND, ranks and rounds take an extreme, descriptors are united by key. So ranks may be merged in any tree
 * shape and the bytes come out the same; the simulator compares them. Cost: linear in the two votes, in place.
 *
 * Descriptors are united from behind: the union is counted first, then written from its last place downwards,
 * and a place is never written before what lay there has been read. What does not fit is left out at the end
 * of the order (see vote.c why counts stay exact).
 */
#include "state.h"

static int key_compare(struct hvd_key a, struct hvd_key b, uint64_t round)
{
    if (a.high == b.high && a.low == b.low)
        return 0;
    uint64_t x = hvd_key_place(a, round), y = hvd_key_place(b, round);
    if (x != y)
        return x < y ? -1 : 1;
    return hvd_key_below(a, b) ? -1 : 1;
}

static void join_fresh(struct hvd_fresh *into, const struct hvd_fresh *from)
{
    int order = memcmp(&into->signature, &from->signature, sizeof into->signature);
    uint32_t plane = into->flags & from->flags & HVD_FRESH_IN_PLANE;
    uint32_t mismatch = (into->flags | from->flags) & HVD_FRESH_MISMATCH;
    if (order > 0)
        into->signature = from->signature;
    into->flags = plane | mismatch | (order ? HVD_FRESH_MISMATCH : 0);
    into->order = from->order < into->order ? from->order : into->order;
    into->count += from->count;
}

static uint32_t union_count(const struct hvd_fresh *a, uint32_t as, const struct hvd_fresh *b, uint32_t bs,
                            uint64_t round)
{
    uint32_t i = 0, j = 0, count = 0;
    while (i < as && j < bs) {
        int order = key_compare(a[i].key, b[j].key, round);
        i += order <= 0;
        j += order >= 0;
        count++;
    }
    return count + (as - i) + (bs - j);
}

static uint32_t merge_fresh(struct hvd_fresh *into, uint32_t as, const struct hvd_fresh *from, uint32_t bs,
                            uint32_t max, uint64_t round)
{
    uint32_t total = union_count(into, as, from, bs, round);
    for (uint32_t i = as, j = bs, at = total; j > 0;) {
        int order = i == 0 ? -1 : key_compare(into[i - 1].key, from[j - 1].key, round);
        at--;
        if (order > 0) {
            i--;
            if (at < max && at != i)
                into[at] = into[i];
            continue;
        }
        j--;
        if (order == 0) {
            i--;
            join_fresh(&into[i], &from[j]);
            if (at < max && at != i)
                into[at] = into[i];
        } else if (at < max) {
            into[at] = from[j];
        }
    }
    return total < max ? total : max;
}

/* Bits are left out by who has none to set: then all are 0. */
static void join_bits(struct hvd_vote *into, size_t words, const struct hvd_vote *from)
{
    size_t bits = hvd_vote_detail_at(into->slots);
    if (from->slots) {
        for (size_t i = 0; i < bits; i++)
            into->body[i] &= from->body[i];
    } else if (bits) {
        memmove(into->body, into->body + bits, 8 * (words - bits));
        into->slots = 0;
    }
}

/* One rank proposes, so one of two votes has a list at most; of two the first is kept. */
static void join_list(const struct hvd_coord *coord, struct hvd_vote *into, const struct hvd_vote *from)
{
    if (from->list == 0 || into->list)
        return;
    size_t at = hvd_vote_list_at(coord, into), words = hvd_list_words(from->list);
    memmove(into->body + at + words, into->body + at, into->fresh * sizeof(struct hvd_fresh));
    memcpy(into->body + at, from->body + hvd_vote_list_at(coord, from), 8 * words);
    into->list = from->list;
    into->list_at = from->list_at;
}

void hvd_vote_merge(const struct hvd_coord *coord, struct hvd_vote *into, const struct hvd_vote *from)
{
    into->ranks += from->ranks;
    into->joined += from->joined;
    into->busy += from->busy;
    into->leaving += from->leaving;
    if (from->join_round > into->join_round ||
        (from->join_round == into->join_round && from->join_rank > into->join_rank)) {
        into->join_round = from->join_round;
        into->join_rank = from->join_rank;
    }
    if (from->leave_rank < into->leave_rank)
        into->leave_rank = from->leave_rank;
    if (from->tune > into->tune)
        into->tune = from->tune;
    if (from->date > into->date)
        into->date = from->date;
    into->ahead = from->ahead < into->ahead ? from->ahead : into->ahead;
    into->deviates |= from->deviates;
    join_bits(into, (into->bytes - sizeof *into) / 8, from);
    join_list(coord, into, from);
    if (into->detail_slot != HVD_NONE)
        hvd_detail_merge(coord, into, from);
    if (from->fresh) {
        struct hvd_fresh *to = (struct hvd_fresh *)(into->body + hvd_vote_fresh_at(coord, into));
        const struct hvd_fresh *other = (const struct hvd_fresh *)(from->body + hvd_vote_fresh_at(coord, from));
        into->fresh = merge_fresh(to, into->fresh, other, from->fresh, coord->limits.fresh, into->round);
    }
    into->bytes = (uint32_t)hvd_vote_bytes(coord, into);
}
