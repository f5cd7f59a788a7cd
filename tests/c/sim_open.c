/* sim_open.c - see sim_state.h: how large and how unruly a simulation is. */
#include "sim_state.h"

/* The dimensions of this run: most are small and crowded, a few large. */
void sim_open(struct sim *sim)
{
    static const int sizes[] = {1, 2, 2, 2, 3, 3, 4, 5, 7, 8, 13, 16, 33, 64, 130, 300};
    int size = sizes[below(sim, HVD_COUNT_OF(sizes))];
    bool large = size > 40;
    sim->ample = chance(sim, 60);
    sim->recipe = recipe_random(&sim->seed, large, sim->ample ? 8 : 2);
    sim->settled = chance(sim, 60);
    sim->orderly = chance(sim, 60) ? 95 + below(sim, 6) : 0;
    if (sim->orderly && chance(sim, 80)) { /* steps enough to learn them */
        sim->recipe.names = 1 + (int)below(sim, 7);
        sim->recipe.steps = 6 + (int)below(sim, PROGRAM_OPS / 7 - 6);
        sim->recipe.unnamed = chance(sim, 30);
        sim->recipe.skipped = chance(sim, 40);
        sim->recipe.reshaped = chance(sim, 20);
        sim->recipe.spoiled = chance(sim, 10);
        sim->recipe.group_max = chance(sim, 30) ? sim->recipe.group_max : 0;
    }
    sim->recipe.size = sim->first_seed % 2 ? size : 0;
    uint32_t slots = sim->ample ? 3 * PROGRAM_NAMES + 2 * PROGRAM_OPS : 4 + below(sim, 20);
    uint32_t fresh = sim->ample ? 2 * PROGRAM_OPS : 1 + below(sim, 6);
    sim->window = (int)below(sim, 3);
    sim->epochs = 1 + (int)below(sim, 4);
    sim->joins = chance(sim, 50);
    sim->leaves = chance(sim, 10);
    sim->eagerness = 2 + (int)below(sim, 60);
    sim->tickets = PROGRAM_OPS, sim->left = -1, sim->result.size = size;
    ranks_open(&sim->ranks, size, slots, fresh, sim->tickets, ranks_random(&sim->seed));
    sim->rank = calloc((size_t)size, sizeof *sim->rank);
    for (int r = 0; r < size; r++) {
        struct rank_state *rank = &sim->rank[r];
        rank->state = calloc(PROGRAM_OPS, 1);
        rank->plane = calloc(PROGRAM_OPS, 1);
        rank->op_of = malloc(sizeof *rank->op_of * sim->tickets);
        rank->tickets = malloc(sizeof *rank->tickets * sim->tickets);
        rank->tickets_left = sim->tickets;
        for (uint32_t i = 0; i < sim->tickets; i++) {
            rank->tickets[i] = sim->tickets - 1 - i;
            rank->op_of[i] = -1;
        }
    }
}

void sim_close(struct sim *sim)
{
    for (int r = 0; r < sim->ranks.size; r++) {
        free(sim->rank[r].state), free(sim->rank[r].plane);
        free(sim->rank[r].op_of), free(sim->rank[r].tickets);
    }
    free(sim->rank);
    ranks_close(&sim->ranks);
}

/* A new program; with joins each rank does only so many of its steps. */
void sim_begin_epoch(struct sim *sim)
{
    program_make(&sim->program, &sim->recipe, &sim->seed);
    for (int r = 0; r < sim->ranks.size; r++) {
        struct rank_state *rank = &sim->rank[r];
        rank->steps = sim->joins ? (int)below(sim, (uint32_t)sim->program.steps + 1) : sim->program.steps;
        rank->first = rank->unnamed_first = 0;
        rank->joined = rank->finished = false;
        for (int op = 0; op < sim->program.ops; op++)
            rank->state[op] = program_concerns(&sim->program, op, r) ? WAITING : DONE;
    }
    for (int op = 0; op < sim->program.ops; op++) {
        sim->outcome[op] = OPEN;
        sim->submitted[op] = sim->participants[op] = 0;
        sim->complete_since[op] = NEVER;
        sim->plane_all[op] = true;
        sim->mixed[op] = false;
        struct hvd_signature first;
        for (int r = 0; r < sim->ranks.size; r++) {
            if (sim->rank[r].steps <= sim->program.op[op].step || !program_concerns(&sim->program, op, r))
                continue;
            struct hvd_signature signature = program_signature(&sim->program, op, r);
            if (sim->participants[op]++ == 0)
                first = signature;
            else if (!hvd_signature_same(&first, &signature))
                sim->mixed[op] = true;
        }
        if (!sim->mixed[op])
            sim->program.op[op].variants = 1; /* else all may have left the group by chance */
    }
}
