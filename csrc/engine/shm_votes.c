/* shm_votes.c - votes travel over boards in shared memory; out comes the same plan on every rank.
 *
 * Each rank has two boards, for rounds of even and odd number. To enter round r a rank writes its vote on the
 * board of r's parity and then stores r in its seat (release). When all seats say r or more, everyone reads
 * all boards, merges and decides, each for itself: there is no root and no second message. Two boards are
 * enough: a rank writes r + 2 only after everyone has voted r + 1, and a rank votes r + 1 only after it has
 * read all votes of r.
 *
 * Rounds are driven by events. A rank enters the next round when it has news, or when it sees that a peer has entered
 * it; it never waits for user code to do so (but for a moment where hosts are far: about_to_speak). While a bucket is
 * moving and another one is already agreed, own news are held back: what becomes ready meanwhile travels together in
 * the next bucket. That is all there is of a "cycle time".
 *
 * What is said in most rounds of a training job is short: so many tensors of the learned list are ready. Such a vote
 * stands in the line of the round word, too, and a small tensor beside it (eager.c). If all votes of this host are
 * short, nobody fetches a board, whose lines would travel one after the other.
 *
 * A set on several hosts agrees in the same rounds: boards inside a host, and a tree of streams between the first
 * members of each (vote_tree.c), of whom each posts what is agreed on its own board.
 * A vote read from a board was written by another process: it is copied, checked, and only then believed.
 * Each process set has rounds of its own; only the queue, which is drained into all coordinators, is everybody's.
 */
#include "engine.h"

#include <string.h>

#define FRESH_MAX   256   /* descriptors in one vote; more ride in the next round */
#define SMALL_BYTES 65536 /* moved within microseconds */
#define FAR_NS      200000u
#define GRACE_NS    1000000u

static size_t round_up(size_t bytes)
{
    return HVD_ALIGN_UP(bytes, (size_t)HVD_CACHE_LINE);
}

int hvd_votes_open(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error)
{
    const struct hvd_coord_limits limits = {
        .rank = set->rank,
        .size = set->size,
        .slots = (uint32_t)engine->options.slots_max,
        .tickets = HVD_HANDLES_MAX,
        .fresh = FRESH_MAX,
        .set = (uint64_t)set->number,
        .names = &hvd_engine_names,
        .called = set->member,
        .forgives = engine->options.nan_guard == HVD_GUARD_WARN,
        .zeroed = true,
    };
    set->vote_bytes = round_up(hvd_vote_bytes_max(&limits));
    size_t coord_bytes = round_up(hvd_coord_bytes(&limits));
    set->plan.items_max = limits.slots + limits.fresh;
    size_t items_bytes = round_up(sizeof *set->plan.item * set->plan.items_max);
    set->coord_block_bytes = coord_bytes + 2 * set->vote_bytes + items_bytes;
    char *block = hvd_memory_private(set->coord_block_bytes, error);
    if (!block)
        return HVD_ENOMEM;
    set->coord_block = block;
    set->coord = hvd_coord_open(block, &limits);
    set->agreed = (struct hvd_vote *)(block + coord_bytes);
    set->seen = (struct hvd_vote *)(block + coord_bytes + set->vote_bytes);
    set->plan.item = (struct hvd_plan_item *)(block + coord_bytes + 2 * set->vote_bytes);
    return hvd_eager_open(engine, set, error);
}

void hvd_votes_close(struct hvd_set *set)
{
    hvd_memory_unmap(set->coord_block, set->coord_block_bytes);
    set->coord_block = NULL;
    hvd_eager_close(set);
    hvd_agenda_close(&set->agenda);
}

/* Has a peer entered the round that I have not? */
static bool peer_entered(const struct hvd_set *set, uint64_t round)
{
    for (int i = 0; i < set->locals; i++)
        if (hvd_place_entered(&set->place[i], set->life, round))
            return true;
    return set->tree && hvd_tree_heard(set->tree, round);
}

/* Have all on this host? */
static bool all_entered(const struct hvd_set *set, uint64_t round)
{
    for (int i = 0; i < set->locals; i++)
        if (!hvd_place_entered(&set->place[i], set->life, round))
            return false;
    return true;
}

/* `local`: of those on this host. */
static struct hvd_vote *board(const struct hvd_engine *engine, const struct hvd_set *set, int local, uint64_t round)
{
    return (struct hvd_vote *)(void *)(set->place[local].boards + engine->host.board_bytes * (size_t)(round & 1));
}

/* What rides with that vote; not believed either. */
static struct hvd_eager *ride_on(const struct hvd_engine *engine, const struct hvd_set *set, int local, uint64_t round)
{
    return (struct hvd_eager *)(void *)((char *)board(engine, set, local, round) + set->vote_bytes);
}

static void damaged(struct hvd_engine *engine, const struct hvd_set *set, int local, uint64_t round)
{
    atomic_thread_fence(memory_order_acquire);
    if (!hvd_place_entered(&set->place[local], set->life, round))
        return; /* it has closed the set meanwhile, as this rank is about to */
    int rank = set->member[set->local[local]];
    char text[160];
    hvd_text_write(text, sizeof text,
                   HVD901 "rank %d wrote a vote that is not valid (%u bytes in round %llu); its memory is damaged",
                   rank, board(engine, set, local, round)->bytes, (unsigned long long)round);
    hvd_engine_abort(engine, rank, HVD_EINTERNAL, text);
}

/* Copy a peer's vote off its board and merge it; false (and an abort that names the rank) if it is not one. */
static bool merge_board(struct hvd_engine *engine, struct hvd_set *set, int local, uint64_t round)
{
    const struct hvd_vote *from = board(engine, set, local, round);
    uint32_t bytes = from->bytes;
    struct hvd_vote *into = local == 0 ? set->agreed : set->seen;
    if (bytes >= sizeof *from && bytes <= set->vote_bytes) {
        memcpy(into, from, bytes);
        into->bytes = bytes;
        if (hvd_vote_check(set->coord, into, bytes) == HVD_OK && into->round == round) {
            if (local > 0)
                hvd_vote_merge(set->coord, set->agreed, set->seen);
            return true;
        }
    }
    damaged(engine, set, local, round);
    return false;
}

/* The plan is agreed: what fails, fails; what is to be done goes on the agenda. */
static void take_plan(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_plan *plan = &set->plan;
    if (plan->failed_ticket != HVD_TICKET_NONE)
        hvd_flight_end(engine, plan->failed_ticket, plan->failed_code, plan->text);
    else if (plan->not_finite)
        hvd_guard_tell(engine, plan->text);
    if (plan->tuned >= 0 && set->number == 0)
        atomic_store(&engine->fusion_bytes, plan->tuned);
    set->plans += plan->items || plan->text[0];
    if (plan->items) {
        int64_t bucket_bytes = set->number == 0 ? atomic_load(&engine->fusion_bytes) : engine->options.fusion_bytes;
        hvd_plan_fuse(plan, (uint64_t)bucket_bytes, hvd_engine_bytes_of);
        hvd_order_plan(engine, plan);
        uint64_t now_ns = hvd_now_ns();
        hvd_flight_round(engine, set, hvd_steps_agreed(engine, plan, now_ns), now_ns);
        hvd_agenda_append(&set->agenda, plan, set->plans);
    }
    if (plan->joined >= 0 && set->join_slot != HVD_SLOT_NONE) {
        engine->handles.slot[set->join_slot].rows = plan->joined;
        hvd_flight_end(engine, set->join_slot, HVD_OK, NULL);
        set->join_slot = HVD_SLOT_NONE;
    }
    if (plan->left >= 0)
        hvd_abort_left(engine, set, plan->left);
}

static void decide(struct hvd_engine *engine, struct hvd_set *set)
{
    hvd_coord_decide(set->coord, set->agreed, &set->plan);
    set->entered = set->probing = false;
    if (set->riders)
        hvd_eager_agreed(set);
    hvd_count(engine, HVD_COUNT_rounds, 1);
    if (set->tree)
        hvd_stream_count(engine, set);
    if (set->plan.learned)
        hvd_count(engine, HVD_COUNT_learned, 1);
    if (set->plan.deviated)
        hvd_count(engine, HVD_COUNT_deviations, 1);
    take_plan(engine, set);
}

/* Alone: the vote is the agreement. */
static bool agree_alone(struct hvd_engine *engine, struct hvd_set *set)
{
    if (!hvd_coord_news(set->coord))
        return false;
    hvd_order_vote(engine, set);
    hvd_coord_vote(set->coord, set->agreed, set->vote_bytes);
    decide(engine, set);
    return true;
}

/* A small bucket is moving. Without news of its own a rank does not enter the next round before that is over: who
 * waited for it is about to say more, and a round of its own would be wasted. */
static bool soon_over(const struct hvd_set *set)
{
    const struct hvd_work *work = &set->moving.work;
    return set->moving.busy && work->count * (uint64_t)hvd_dtype_bytes(work->dtype) <= SMALL_BYTES;
}

/* The vote on this rank's board, before its round word: whether it is short, and then what it says. */
static void write_line(struct hvd_round_line *line, const struct hvd_vote *vote)
{
    bool is_short = vote->bytes == sizeof *vote && !vote->slots && !vote->joined && !vote->leaving && !vote->tune &&
                    vote->detail_slot == UINT32_MAX && !vote->fresh && !vote->list && !vote->deviates;
    atomic_store_explicit(&line->ahead, is_short ? HVD_SHORT_VOTE | vote->ahead : 0, memory_order_relaxed);
    atomic_store_explicit(&line->date, vote->date, memory_order_relaxed);
}

/* All on this host have voted. False: one of the votes is not short. */
static bool merge_lines(const struct hvd_engine *engine, struct hvd_set *set, uint64_t round)
{
    const struct hvd_vote *mine = board(engine, set, set->here, round);
    uint64_t ahead = UINT64_MAX, date = 0;
    for (int local = 0; local < set->locals; local++) {
        const struct hvd_round_line *line = &set->place[local].line[round & 1];
        uint64_t its_ahead = atomic_load_explicit(&line->ahead, memory_order_relaxed);
        uint64_t its_date = atomic_load_explicit(&line->date, memory_order_relaxed);
        if (!(its_ahead & HVD_SHORT_VOTE))
            return false;
        ahead = its_ahead < ahead ? its_ahead : ahead;
        date = its_date > date ? its_date : date;
    }
    memcpy(set->agreed, mine, sizeof *mine);
    set->agreed->ranks = (uint32_t)set->locals;
    set->agreed->ahead = (uint32_t)(ahead & ~HVD_SHORT_VOTE);
    set->agreed->date = date;
    return hvd_vote_check(set->coord, set->agreed, sizeof *mine) == HVD_OK;
}

/* What came with the votes of a set on one host. */
static void merge_tensors(const struct hvd_engine *engine, struct hvd_set *set, uint64_t round)
{
    struct hvd_round_line *line[HVD_LOCAL_MAX];
    void *room[HVD_LOCAL_MAX];
    for (int local = 0; local < set->locals; local++) {
        line[local] = &set->place[local].line[round & 1];
        room[local] = ride_on(engine, set, local, round);
    }
    hvd_eager_merge_local(set, line, room);
}

/* All votes of this host, merged into set->agreed; false: not all have voted, or one of them is no vote. */
static bool merge_votes(struct hvd_engine *engine, struct hvd_set *set, uint64_t round)
{
    if (!all_entered(set, round))
        return false;
    for (int local = merge_lines(engine, set, round) ? set->locals : 0; local < set->locals; local++)
        if (!merge_board(engine, set, local, round))
            return false;
    return true;
}

/* A leader: the votes of this host go to the others, and what is agreed is posted on its own board, which nobody else
 * reads before that. */
static bool agree_with_hosts(struct hvd_engine *engine, struct hvd_set *set, uint64_t round, bool moved)
{
    struct hvd_tree *tree = set->tree;
    if (tree->merged < round && merge_votes(engine, set, round)) {
        struct hvd_eager *ride[HVD_LOCAL_MAX];
        for (int local = 0; local < set->locals; local++)
            ride[local] = ride_on(engine, set, local, round);
        hvd_eager_of_host(set, ride, tree->mine_rides);
        memcpy(tree->mine, set->agreed, set->agreed->bytes);
        tree->merged = round;
        moved = true;
    }
    if (hvd_tree_round(engine, set, round, tree->merged == round, &moved) != HVD_OK)
        return moved;
    if (set->locals > 1) {
        memcpy(board(engine, set, 0, round), set->agreed, set->agreed->bytes);
        hvd_eager_copy(ride_on(engine, set, 0, round), set->riders->agreed);
        hvd_place_say(set->place[0].posted, set->life, round);
        hvd_bells_ring_all(&set->bells);
    }
    decide(engine, set);
    return true;
}

/* Another rank of a host of several: what the leader has posted. */
static bool agree_as_posted(struct hvd_engine *engine, struct hvd_set *set, uint64_t round, bool moved)
{
    if (!hvd_place_says(set->place[0].posted, set->life, round))
        return moved;
    if (!merge_board(engine, set, 0, round))
        return moved;
    if (!hvd_eager_check(ride_on(engine, set, 0, round), HVD_EAGER_ROOM, set->size)) {
        damaged(engine, set, 0, round);
        return moved;
    }
    hvd_eager_copy(set->riders->agreed, ride_on(engine, set, 0, round));
    decide(engine, set);
    return true;
}

/* Who is to know that this rank has voted? Who is to enter, too, and, from the last one to enter, who waits for all
 * votes of this host: on one host all, on several the leader, for others wait for what that posts. */
static void tell_entered(const struct hvd_set *set, uint64_t round)
{
    atomic_thread_fence(memory_order_seq_cst); /* who enters at the same time sees this vote, or is seen */
    bool all = all_entered(set, round);
    for (int i = 0; i < set->locals; i++)
        if (i != set->here &&
            (all ? i == 0 || !hvd_set_spans_hosts(set) : !hvd_place_entered(&set->place[i], set->life, round)))
            hvd_bells_ring(&set->bells, i);
}

/* Hosts are far from each other, and this rank's caller has just got what he waited for: he is about to say more, and a
 * round without it would cost a way between hosts. The alarm clock sees to it that the round is not forgotten. */
static bool about_to_speak(struct hvd_engine *engine, const struct hvd_set *set)
{
    uint64_t grace_ns = engine->link_cost.alpha_ns / 4;
    if (!hvd_set_spans_hosts(set) || engine->handles.with_turn || engine->link_cost.alpha_ns < FAR_NS ||
        hvd_now_ns() - set->served_ns >= (grace_ns < GRACE_NS ? grace_ns : GRACE_NS))
        return false;
    hvd_alarm_arm(&engine->soon);
    return true;
}

bool hvd_votes_step(struct hvd_engine *engine, struct hvd_set *set)
{
    bool moved = set->tree && hvd_tree_pump(engine, set);
    if (set->left)
        return moved;
    if (set->alone)
        return agree_alone(engine, set);
    uint64_t round = hvd_coord_round(set->coord);
    bool enters = !set->entered, rides = false;
    if (enters) {
        bool hold = set->moving.busy && set->agenda.count > set->moving.items;
        if ((hold || !hvd_coord_news(set->coord)) && !set->probing)
            if (soon_over(set) || !peer_entered(set, round) || about_to_speak(engine, set))
                return moved;
        hvd_order_vote(engine, set);
        hvd_coord_vote(set->coord, board(engine, set, set->here, round), set->vote_bytes);
        struct hvd_round_line *line = &set->place[set->here].line[round & 1];
        write_line(line, board(engine, set, set->here, round));
        if (hvd_set_spans_hosts(set))
            rides = hvd_eager_offer(engine, set, ride_on(engine, set, set->here, round));
        else
            hvd_eager_offer_local(engine, set, line, ride_on(engine, set, set->here, round));
        hvd_place_enter(&set->place[set->here], set->life, round);
        set->entered = moved = true;
        tell_entered(set, round);
    }
    if (hvd_set_spans_hosts(set)) {
        moved = set->tree ? agree_with_hosts(engine, set, round, moved) : agree_as_posted(engine, set, round, moved);
    } else if (merge_votes(engine, set, round)) {
        merge_tensors(engine, set, round);
        decide(engine, set);
        moved = true;
    }
    if (enters && set->entered && set->wires && !rides)
        hvd_speculate(engine, set);
    return moved;
}
