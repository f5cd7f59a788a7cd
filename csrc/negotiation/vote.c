/* vote.c - one rank's saying: written from what it has, checked before it is believed.
 *
 * A vote is a snapshot, not a difference: ready bits are cumulative, and every request that has no slot yet is
 * in it as a descriptor. Writing it twice is therefore harmless, and nothing has to be remembered about what
 * was said, except for `news`.
 *
 * Where more requests are fresh than a vote can carry, the ones that come first in the round's order of keys
 * are kept. Merging keeps the first of the union in the same way; a key that is kept there was kept by every
 * rank that had it, so its count is exact. The order is shuffled in every round, by a hash of key and round
 * number. A fixed one would keep the last keys out as long as earlier ones come back from a crowded table, and
 * one that is only turned round can keep two members of a group out of each other's sight for ever.
 *
 * A joined rank says the identity of merge: all bits 1. Only where it has itself an outstanding request that
 * contradicts a slot is its bit 0, so that nothing is decided before the contradiction is seen.
 *
 * Votes come from other processes through shared memory or sockets. hvd_vote_check accepts exactly the votes
 * that merge and decide can read without looking again; tests/c/test_negotiation_fuzz.c holds it to that.
 */
#include "state.h"

static uint32_t say_fresh(struct hvd_coord *coord, struct hvd_fresh *fresh)
{
    struct hvd_sortable *order = coord->order;
    uint32_t count = 0;
    for (uint32_t i = 0; i < coord->fresh_count; i++) {
        struct hvd_key key = coord->mine[coord->fresh[i]].key;
        struct hvd_sortable item = {hvd_key_place(key, coord->round), key.high, key.low, coord->fresh[i], 0};
        hvd_sort_keep(order, &count, coord->limits.fresh, item);
    }
    hvd_sort(order, count);
    for (uint32_t i = 0; i < count; i++) {
        const struct hvd_mine *mine = &coord->mine[order[i].id];
        fresh[i] = (struct hvd_fresh){
            .key = mine->key,
            .signature = mine->signature,
            .order = mine->order,
            .count = !coord->joined,
            .flags = mine->flags | (mine->signature.not_finite ? HVD_FRESH_MISMATCH : 0),
        };
    }
    return count;
}

/* The identity, less the slots that contradict a request of mine. */
static void say_joined(const struct hvd_coord *coord, uint64_t *ready, uint64_t *plane)
{
    uint32_t words = hvd_words(coord->high);
    for (uint32_t i = 0; i < words; i++) {
        uint64_t ones = i + 1 < words || coord->high % 64 == 0 ? ~(uint64_t)0 : ((uint64_t)1 << coord->high % 64) - 1;
        plane[i] = (plane[i] | ~ready[i]) & ones;
        ready[i] = ones;
    }
    for (uint32_t i = 0; i < coord->fresh_count; i++) {
        uint32_t slot = hvd_map_find(&coord->slot_of, coord->mine[coord->fresh[i]].key);
        if (slot != HVD_NONE)
            hvd_bit_set(ready, slot, false);
    }
}

/* While a list is learned usually nothing else is outstanding, and then there is nothing to say in bits. */
static bool has_bits(const struct hvd_coord *coord)
{
    uint64_t any = coord->joined || coord->learn.count == 0;
    for (uint32_t i = 0; i < hvd_words(coord->high); i++)
        any |= coord->ready[i];
    return any != 0;
}

size_t hvd_coord_vote(struct hvd_coord *coord, struct hvd_vote *vote, size_t room)
{
    bool stopped = coord->left >= 0;
    uint32_t slots = has_bits(coord) ? coord->high : 0, words = hvd_words(slots);
    memset(vote, 0, sizeof *vote);
    vote->wire = HVD_WIRE_VERSION;
    vote->round = coord->round;
    vote->ranks = 1;
    vote->slots = slots;
    vote->detail_slot = stopped ? HVD_NONE : coord->details.head;
    vote->leaving = coord->leave;
    vote->leave_rank = coord->leave ? (uint32_t)coord->limits.rank : HVD_NONE;
    if (coord->joined) {
        coord->join_round = coord->join_round ? coord->join_round : coord->round;
        vote->joined = 1;
        vote->join_round = coord->join_round;
        vote->join_rank = (uint32_t)coord->limits.rank;
        vote->busy = coord->outstanding > 0;
    }
    vote->tune = coord->tune;
    vote->date = coord->date;
    HVD_ASSERT(room >= hvd_vote_bytes(coord, vote) + (stopped ? 0 : hvd_room_of_fresh(coord)) +
                           8 * hvd_list_words(coord->learn.length));
    memcpy(vote->body, coord->ready, 8 * (size_t)words);
    memcpy(vote->body + words, coord->plane, 8 * (size_t)words);
    if (coord->joined)
        say_joined(coord, vote->body, vote->body + words);
    if (vote->detail_slot != HVD_NONE)
        hvd_detail_write(coord, vote);
    if (!stopped) {
        hvd_pattern_say(coord, vote);
        hvd_pattern_propose(coord, vote);
        vote->fresh = say_fresh(coord, (struct hvd_fresh *)(vote->body + hvd_vote_fresh_at(coord, vote)));
    }
    vote->bytes = (uint32_t)hvd_vote_bytes(coord, vote);
    coord->news = false;
    coord->said_busy = vote->busy;
    coord->said_leave = coord->leave;
    coord->said_tune = coord->tune;
    return vote->bytes;
}

size_t hvd_vote_bytes_max(const struct hvd_coord_limits *limits)
{
    return sizeof(struct hvd_vote) +
           8 * (hvd_vote_detail_at(limits->slots) + hvd_detail_words(limits->size) + hvd_list_words(limits->slots)) +
           sizeof(struct hvd_fresh) * limits->fresh;
}

static bool bits_sane(const uint64_t *bits, uint32_t count)
{
    return count % 64 == 0 || bits[count / 64] >> (count % 64) == 0;
}

static bool header_sane(const struct hvd_coord *coord, const struct hvd_vote *vote)
{
    uint32_t size = (uint32_t)coord->limits.size;
    uint32_t detail_slot = coord->left >= 0 ? HVD_NONE : coord->details.head;
    if (vote->wire != HVD_WIRE_VERSION || vote->round != coord->round)
        return false;
    if (vote->ranks < 1 || vote->ranks > size || vote->joined > vote->ranks || vote->busy > vote->joined)
        return false;
    if (vote->joined ? vote->join_rank >= size || vote->join_round < 1 || vote->join_round > vote->round
                     : vote->join_rank || vote->join_round)
        return false;
    if (vote->leaving > vote->ranks || (vote->leaving ? vote->leave_rank >= size : vote->leave_rank != HVD_NONE))
        return false;
    if (vote->tune > (uint64_t)INT64_MAX + 1 || vote->date > HVD_DATE_MAX)
        return false;
    if (vote->slots != coord->high && (vote->slots || coord->learn.count == 0))
        return false;
    return vote->list <= coord->high && vote->detail_slot == detail_slot && vote->fresh <= coord->limits.fresh;
}

static bool fresh_sane(const struct hvd_coord *coord, const struct hvd_vote *vote)
{
    const struct hvd_fresh *fresh = (const struct hvd_fresh *)(vote->body + hvd_vote_fresh_at(coord, vote));
    uint64_t before = 0;
    for (uint32_t i = 0; i < vote->fresh; i++) {
        if (fresh[i].count > vote->ranks - vote->joined ||
            fresh[i].flags & ~(uint32_t)(HVD_FRESH_MISMATCH | HVD_FRESH_IN_PLANE) ||
            (fresh[i].signature.not_finite && !(fresh[i].flags & HVD_FRESH_MISMATCH)) ||
            !hvd_signature_sane(&coord->limits, &fresh[i].signature))
            return false;
        uint64_t place = hvd_key_place(fresh[i].key, vote->round);
        if (i > 0 && (before > place || (before == place && !hvd_key_below(fresh[i - 1].key, fresh[i].key))))
            return false;
        before = place;
    }
    return true;
}

int hvd_vote_check(const struct hvd_coord *coord, const struct hvd_vote *vote, size_t room)
{
    if (room < sizeof *vote || vote->bytes > room || !header_sane(coord, vote))
        return HVD_EINVAL;
    if (vote->bytes != hvd_vote_bytes(coord, vote))
        return HVD_EINVAL;
    if (!bits_sane(vote->body, vote->slots) || !bits_sane(vote->body + hvd_words(vote->slots), vote->slots))
        return HVD_EINVAL;
    return hvd_detail_check(coord, vote) && hvd_pattern_check(coord, vote) && fresh_sane(coord, vote) ? HVD_OK
                                                                                                      : HVD_EINVAL;
}
