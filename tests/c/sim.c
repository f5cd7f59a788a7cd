/* sim.c - see sim.h. */
#include "sim_state.h"

/* May this rank submit this op now? */
static bool may_submit(const struct sim *sim, int r, int at)
{
    const struct rank_state *rank = &sim->rank[r];
    const struct op *op = &sim->program.op[at];
    if (rank->state[at] != WAITING || op->step >= rank->steps)
        return false;
    if (rank->first < sim->program.ops && op->step > sim->program.op[rank->first].step + sim->window)
        return false;
    if (op->name < 0) {
        for (int before = rank->unnamed_first; before < at; before++)
            if (sim->program.op[before].name < 0 && rank->state[before] == WAITING)
                return false;
        return true;
    }
    if (op->previous < 0)
        return true;
    if (rank->state[op->previous] != DONE)
        return false;
    int group = sim->program.op[op->previous].group;
    for (int member = group; group >= 0 && member <= sim->program.op[group].group_last; member++)
        if (rank->state[member] != DONE)
            return false;
    return true;
}

static void submit(struct sim *sim, int r, int at)
{
    struct rank_state *rank = &sim->rank[r];
    const struct op *op = &sim->program.op[at];
    struct hvd_signature signature = program_signature(&sim->program, at, r);
    uint32_t ticket = rank->tickets[--rank->tickets_left];
    rank->plane[at] = sim->settled ? (op->name + r) % 5 != 0 : chance(sim, 80);
    int code = hvd_coord_submit(sim->ranks.coord[r], ticket, op->name < 0 ? NULL : sim->program.name[op->name],
                                &signature, rank->plane[at] ? HVD_FRESH_IN_PLANE : 0);
    if (rank->left) {
        SIM_CHECK(sim, code == HVD_ESTATE, "%d after a rank has left", code);
        rank->tickets_left++;
        return;
    }
    SIM_CHECK(sim, code == HVD_OK, "rank %d, op %d: %d", r, at, code);
    rank->op_of[ticket] = at;
    rank->state[at] = FLYING;
    sim->submitted[at]++;
    sim->plane_all[at] = sim->plane_all[at] && rank->plane[at];
    sim->result.submissions++;
}

/* Let a rank submit up to `most` ops, picked at random; false if there was none. */
static bool act(struct sim *sim, int r, int most)
{
    struct rank_state *rank = &sim->rank[r];
    bool acted = false;
    while (rank->first < sim->program.ops && rank->state[rank->first] == DONE)
        rank->first++;
    for (; most > 0 && !rank->finished; most--) {
        int may[PROGRAM_OPS], count = 0, left = 0;
        for (int at = rank->first; at < sim->program.ops && sim->program.op[at].step < rank->steps; at++) {
            left += rank->state[at] != DONE;
            if (rank->state[at] == WAITING && may_submit(sim, r, at))
                may[count++] = at;
        }
        if (count) {
            submit(sim, r, may[chance(sim, sim->orderly) ? 0 : below(sim, (uint32_t)count)]);
            acted = true;
            continue;
        }
        bool said_all = true;
        for (int at = rank->first; at < sim->program.ops && sim->program.op[at].step < rank->steps; at++)
            said_all = said_all && rank->state[at] != WAITING;
        if (sim->joins && !rank->joined && said_all && (left == 0 || chance(sim, 50))) {
            hvd_coord_join(sim->ranks.coord[r]);
            rank->joined = acted = true;
        } else if (!sim->joins && left == 0) {
            rank->finished = true;
        }
        break;
    }
    return acted;
}

static void finish(struct sim *sim, int r, uint32_t ticket, int outcome)
{
    struct rank_state *rank = &sim->rank[r];
    SIM_CHECK(sim, ticket < sim->tickets && rank->op_of[ticket] >= 0, "rank %d: ticket %u is not in flight", r, ticket);
    int at = rank->op_of[ticket];
    rank->op_of[ticket] = -1;
    rank->tickets[rank->tickets_left++] = ticket;
    SIM_CHECK(sim, rank->state[at] == FLYING, "rank %d: op %d ends twice", r, at);
    rank->state[at] = DONE;
    SIM_CHECK(sim, sim->outcome[at] == OPEN || sim->outcome[at] == outcome, "op %d: %d and %d", at, sim->outcome[at],
              outcome);
    SIM_CHECK(sim, (outcome == MISMATCH) == sim->mixed[at], "op %d ends with %d", at, outcome);
    SIM_CHECK(sim, sim->submitted[at] == sim->participants[at], "op %d ends early", at);
    sim->outcome[at] = outcome;
}

static void take_item(struct sim *sim, int r, const struct hvd_plan_item *item)
{
    if (item->ticket == HVD_TICKET_NONE) {
        const struct hvd_signature *said = &item->signature;
        bool passes_by = said->kind == HVD_SEND && said->root != r && said->peer != r;
        SIM_CHECK(sim, sim->rank[r].joined || passes_by, "rank %d has no request for a planned item", r);
        sim->result.sends += passes_by;
        return;
    }
    SIM_CHECK(sim, item->ticket < sim->tickets && sim->rank[r].op_of[item->ticket] >= 0, "ticket %u", item->ticket);
    int at = sim->rank[r].op_of[item->ticket];
    struct hvd_signature signature = program_signature(&sim->program, at, r);
    SIM_CHECK(sim, hvd_signature_same(&signature, &item->signature), "op %d is planned with another signature", at);
    SIM_CHECK(sim, !!(item->flags & HVD_FRESH_IN_PLANE) == sim->plane_all[at], "op %d: plane flag", at);
    bool may_refuse = sim->joins && signature.kind != HVD_ALLREDUCE && signature.kind != HVD_BARRIER;
    SIM_CHECK(sim, item->code == HVD_OK || (item->code == HVD_EINVAL && may_refuse), "op %d: code %d", at, item->code);
    finish(sim, r, item->ticket, item->code == HVD_OK ? PLANNED : REFUSED);
}

static void count_pending(void *self, uint32_t ticket)
{
    ++*(uint32_t *)self;
}

static void take_plan(struct sim *sim, int r)
{
    const struct hvd_plan *plan = &sim->ranks.plan[r];
    for (uint32_t i = 0; i < plan->items; i++)
        take_item(sim, r, &plan->item[i]);
    if (plan->failed_ticket != HVD_TICKET_NONE) {
        SIM_CHECK(sim, strstr(plan->text, "disagree"), "text: %s", plan->text);
        finish(sim, r, plan->failed_ticket, MISMATCH);
    }
    if (plan->joined >= 0) {
        SIM_CHECK(sim, sim->rank[r].joined, "rank %d has not joined", r);
        sim->rank[r].finished = true;
    }
    if (plan->left >= 0) {
        SIM_CHECK(sim, sim->left < 0 || sim->left == plan->left, "left %d, then %d", sim->left, plan->left);
        sim->rank[r].left = true;
        SIM_CHECK(sim, plan->items == 0, "planned after a rank has left");
    }
    if (!chance(sim, 20))
        return;
    uint32_t pending = 0;
    hvd_coord_pending(sim->ranks.coord[r], count_pending, &pending);
    SIM_CHECK(sim, pending == sim->tickets - sim->rank[r].tickets_left, "%u pending, %u in flight", pending,
              sim->tickets - sim->rank[r].tickets_left);
}

/* Has every rank submitted this op, or joined instead? */
static bool complete(const struct sim *sim, int at)
{
    if (sim->submitted[at] < sim->participants[at])
        return false;
    for (int r = 0; r < sim->ranks.size; r++)
        if (program_concerns(&sim->program, at, r) && sim->rank[r].steps <= sim->program.op[at].step &&
            !sim->rank[r].joined)
            return false;
    return true;
}

/* Nothing that all have submitted may linger; a member of a group waits for the last one. */
static void check_progress(struct sim *sim, uint64_t round)
{
    uint64_t mixed = 0;
    for (int at = 0; at < sim->program.ops; at++) {
        mixed += sim->mixed[at];
        if (complete(sim, at) && sim->complete_since[at] == NEVER)
            sim->complete_since[at] = round + 1; /* perhaps submitted after the vote */
    }
    for (int at = 0; at < sim->program.ops && sim->ample; at++) {
        int first = sim->program.op[at].group < 0 ? at : sim->program.op[at].group;
        int last = sim->program.op[at].group < 0 ? at : sim->program.op[first].group_last;
        uint64_t since = 0, patience = 2;
        for (int member = first; member <= last; member++) {
            since = sim->complete_since[member] > since ? sim->complete_since[member] : since;
            patience = sim->mixed[member] ? 3 + mixed : patience;
        }
        SIM_CHECK(sim, sim->outcome[at] != OPEN || !sim->participants[at] || since == NEVER || round < since + patience,
                  "op %d lingers since round %llu", at, (unsigned long long)since);
    }
}

static void run_round(struct sim *sim)
{
    struct ranks *ranks = &sim->ranks;
    uint64_t round = hvd_coord_round(ranks->coord[0]);
    for (int r = 0; r < ranks->size; r++) {
        if (chance(sim, (uint32_t)sim->eagerness))
            act(sim, r, 1 + (int)below(sim, 4));
        ranks_vote(ranks, r);
    }
    for (int r = 0; r < ranks->size; r++)
        if (chance(sim, (uint32_t)sim->eagerness) && act(sim, r, 3) && chance(sim, 30))
            ranks_vote(ranks, r);
    ranks_agree(ranks, ranks->size > 40 ? 2 : 3);
    int start = (int)below(sim, (uint32_t)ranks->size);
    for (int i = 0; i < ranks->size; i++) {
        int r = (start + i) % ranks->size;
        ranks_decide(ranks, r);
        take_plan(sim, r);
        if (chance(sim, (uint32_t)sim->eagerness) && i + 1 < ranks->size)
            act(sim, r, 1 + (int)below(sim, 2));
    }
    const struct hvd_plan *plan = &ranks->plan[0];
    sim->result.rounds++;
    sim->result.mismatches += plan->text[0] != 0;
    sim->result.joins += plan->joined >= 0;
    sim->result.learned += plan->learned > 0;
    sim->result.deviations += plan->deviated;
    sim->result.ahead += ranks->agreed->ahead;
    if (plan->left >= 0)
        sim->left = plan->left;
    for (uint32_t i = 0; i < plan->items; i++) {
        sim->result.planned += plan->item[i].code == HVD_OK;
        sim->result.refused += plan->item[i].code != HVD_OK;
        sim->result.slotless += plan->item[i].slot == HVD_SLOTLESS;
    }
    check_progress(sim, round);
}

static bool epoch_done(const struct sim *sim)
{
    bool done = true;
    for (int r = 0; r < sim->ranks.size; r++)
        done = done && sim->rank[r].finished;
    return done;
}

/* No news anywhere: somebody has to act, in random order; nobody can: deadlock. */
static void nudge(struct sim *sim)
{
    int start = (int)below(sim, (uint32_t)sim->ranks.size);
    for (int i = 0; i < sim->ranks.size; i++) {
        int r = (start + i) % sim->ranks.size;
        if (act(sim, r, 1 + (int)below(sim, 6)) || epoch_done(sim))
            return;
    }
    SIM_CHECK(sim, epoch_done(sim), "deadlock after %llu rounds", (unsigned long long)sim->result.rounds);
}

struct sim_result sim_run(uint64_t seed)
{
    struct sim *sim = calloc(1, sizeof *sim);
    sim->seed = sim->first_seed = seed;
    sim_open(sim);
    for (int epoch = 0; epoch < sim->epochs && sim->left < 0; epoch++) {
        sim_begin_epoch(sim);
        uint64_t limit = sim->result.rounds + 300 + 40 * (uint64_t)sim->program.ops;
        while (!epoch_done(sim) && sim->left < 0) {
            if (sim->leaves && chance(sim, 2))
                hvd_coord_leave(sim->ranks.coord[below(sim, (uint32_t)sim->ranks.size)]);
            if (ranks_news(&sim->ranks))
                run_round(sim);
            else
                nudge(sim);
            SIM_CHECK(sim, sim->result.rounds < limit, "%llu rounds for %d ops", (unsigned long long)sim->result.rounds,
                      sim->program.ops);
        }
        for (int at = 0; at < sim->program.ops && sim->left < 0; at++)
            SIM_CHECK(sim, sim->participants[at] == 0 || sim->outcome[at] != OPEN, "op %d has no end", at);
    }
    struct sim_result result = sim->result;
    result.left = sim->left >= 0;
    sim_close(sim);
    free(sim);
    return result;
}
