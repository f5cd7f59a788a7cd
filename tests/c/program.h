/* program.h - what the ranks of a simulation want to do: steps of operations, random but the same for all.
 *
 * An operation is one tensor in one step. All ranks that reach the step submit it, in any order but for two
 * rules that a user's program follows too: the same name again only when the earlier one is finished on this
 * rank (of a group: when all its members are), and unnamed ones in the program's order. Some operations are
 * spoiled: ranks submit different variants of the signature.
 */
#ifndef HVD_TESTS_PROGRAM_H
#define HVD_TESTS_PROGRAM_H

#include "negotiation/negotiation.h"

#define PROGRAM_NAMES 48
#define PROGRAM_STEPS 6
#define PROGRAM_OPS   (PROGRAM_NAMES * PROGRAM_STEPS)

struct op {
    int name; /* -1: unnamed */
    int step;
    int previous;   /* the op of the same name one use earlier, -1: none */
    int group;      /* -1, or the first op of its group */
    int group_last; /* of the first: the last member */
    int variants;   /* 1: all ranks say the same */
    struct hvd_signature signature;
};

struct program {
    int ops, steps;
    int unnamed_ops; /* in op order */
    struct op op[PROGRAM_OPS];
    char name[PROGRAM_NAMES][24];
};

/* How much of everything. Chances are in percent. */
struct recipe {
    int names, steps, unnamed;
    int group_max;
    int spoiled, reshaped, skipped;
    int size; /* of the set, for sends between its ranks; below 2: none */
};

struct recipe recipe_random(uint64_t *seed, bool small, int group_max);
void program_make(struct program *program, const struct recipe *recipe, uint64_t *seed);
/* Has this rank a part in it? Of a send only two have. */
bool program_concerns(const struct program *program, int op, int rank);
/* What this rank says of an op. */
struct hvd_signature program_signature(const struct program *program, int op, int rank);

#endif
