/* sim_state.h - what a simulation knows: of the program, of each rank, of what became of each operation. */
#ifndef HVD_TESTS_SIM_STATE_H
#define HVD_TESTS_SIM_STATE_H

#include "sim.h"

#include "check.h"
#include "negotiation/state.h"
#include "program.h"
#include "ranks.h"

enum { WAITING, FLYING, DONE };            /* an op on a rank */
enum { OPEN, PLANNED, REFUSED, MISMATCH }; /* what became of an op */

#define NEVER UINT64_MAX

struct rank_state {
    int steps;         /* of this epoch's program that this rank does */
    int first;         /* ops before it are all done here */
    int unnamed_first; /* unnamed ops before it are submitted here */
    bool joined, left;
    bool finished; /* all done (and joined, where the epoch has joins) */
    uint8_t *state, *plane;
    int *op_of; /* by ticket */
    uint32_t *tickets;
    uint32_t tickets_left;
};

struct sim {
    uint64_t seed;
    uint64_t first_seed;
    struct ranks ranks;
    struct program program;
    struct recipe recipe;
    struct rank_state *rank;
    uint32_t tickets;
    int window, epochs, eagerness;
    bool joins, ample, leaves, settled; /* settled: a tensor's memory lies always in the plane, or never */
    uint32_t orderly;                   /* how often a rank takes the next op, in percent; else any */
    int outcome[PROGRAM_OPS], participants[PROGRAM_OPS], submitted[PROGRAM_OPS];
    uint64_t complete_since[PROGRAM_OPS]; /* round whose votes had it from all */
    bool plane_all[PROGRAM_OPS], mixed[PROGRAM_OPS];
    int left;
    struct sim_result result;
};

#define SIM_CHECK(sim, condition, ...)                                             \
    do {                                                                           \
        if (!(condition))                                                          \
            fprintf(stderr, "seed %llu: ", (unsigned long long)(sim)->first_seed); \
        CHECK(condition, __VA_ARGS__);                                             \
    } while (0)

static inline uint32_t below(struct sim *sim, uint32_t bound)
{
    return ranks_below(&sim->seed, bound);
}
static inline bool chance(struct sim *sim, uint32_t percent)
{
    return below(sim, 100) < percent;
}

/* sim_open.c: the dimensions of a run, from its seed; a new program; the end. */
void sim_open(struct sim *sim);
void sim_begin_epoch(struct sim *sim);
void sim_close(struct sim *sim);

#endif
