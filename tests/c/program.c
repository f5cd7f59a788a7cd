/* program.c - see program.h. */
#include "program.h"

#include "ranks.h"

#include <stdio.h>
#include <string.h>

static bool chance(uint64_t *seed, int percent)
{
    return (int)ranks_below(seed, 100) < percent;
}

struct recipe recipe_random(uint64_t *seed, bool small, int group_max)
{
    struct recipe recipe = {
        .names = 1 + (int)ranks_below(seed, small ? 16 : PROGRAM_NAMES),
        .steps = 1 + (int)ranks_below(seed, small ? 3 : PROGRAM_STEPS),
        .group_max = chance(seed, 50) ? group_max : 0,
        .spoiled = chance(seed, 50) ? (int)ranks_below(seed, 15) : 0,
        .reshaped = chance(seed, 60) ? (int)ranks_below(seed, 30) : 0,
        .skipped = chance(seed, 30) ? 30 : 0,
    };
    recipe.unnamed = chance(seed, 60) ? (int)ranks_below(seed, (uint32_t)recipe.names + 1) : 0;
    return recipe;
}

/* Of a name: always the same. Version: the shape changes with it. */
static struct hvd_signature signature_of(int name, int version, int size)
{
    struct hvd_signature signature = ranks_signature(8 + version);
    signature.kind = name % 11 == 7 ? HVD_BROADCAST : name % 11 == 5 ? HVD_ALLGATHER : HVD_ALLREDUCE;
    signature.dtype = name % 3 == 0 ? 10 : 7;
    signature.ndim = 2;
    signature.priority = name % 4 == 2 ? name - 20 : 0;
    signature.dims[1] = 1 + name % 5;
    if (signature.kind != HVD_ALLREDUCE)
        signature.op = 0;
    if (signature.kind == HVD_ALLGATHER) {
        signature.dims[0] = 0;
        signature.dims[1] += 8 * version;
    }
    if (name % 5 == 3 && size > 1) {
        signature.kind = HVD_SEND;
        signature.op = 0;
        signature.root = name % size;
        signature.peer = (signature.root + 1 + name % (size - 1)) % size;
    }
    return signature;
}

static void add_groups(struct program *program, int first, int group_max, uint64_t *seed)
{
    for (int at = first; at < program->ops && group_max > 1;) {
        int members = 1 + (int)ranks_below(seed, (uint32_t)group_max);
        bool same = at + members <= program->ops && members > 1;
        for (int i = at; same && i < at + members; i++)
            same = program->op[i].name >= 0 && program->op[i].signature.kind != HVD_SEND;
        if (!same || !chance(seed, 30)) {
            at++;
            continue;
        }
        uint64_t id = 1; /* the same members are the same group in every step */
        for (int i = at; i < at + members; i++)
            id = id * PROGRAM_NAMES + (uint64_t)program->op[i].name;
        for (int i = at; i < at + members; i++) {
            program->op[i].group = at;
            program->op[i].signature.group = id;
            program->op[i].signature.group_count = (uint32_t)members;
        }
        program->op[at].group_last = at + members - 1;
        at += members;
    }
}

void program_make(struct program *program, const struct recipe *recipe, uint64_t *seed)
{
    int version[PROGRAM_NAMES] = {0}, last[PROGRAM_NAMES];
    memset(program, 0, sizeof *program);
    memset(last, -1, sizeof last);
    program->steps = recipe->steps;
    for (int name = 0; name < recipe->names; name++)
        snprintf(program->name[name], sizeof program->name[name], "layer.%d.weight", name);
    for (int step = 0; step < recipe->steps; step++) {
        int first = program->ops;
        for (int name = 0; name < recipe->names; name++) {
            if (chance(seed, recipe->skipped))
                continue;
            bool unnamed = name < recipe->unnamed;
            version[name] += chance(seed, recipe->reshaped);
            struct op *op = &program->op[program->ops];
            *op = (struct op){
                .name = unnamed ? -1 : name,
                .step = step,
                .previous = last[name],
                .group = -1,
                .variants = chance(seed, recipe->spoiled) ? 2 + (int)ranks_below(seed, 6) : 1,
                .signature = signature_of(name, version[name], unnamed ? 0 : recipe->size),
            };
            if (!unnamed)
                last[name] = program->ops;
            program->ops++;
            program->unnamed_ops += unnamed;
        }
        add_groups(program, first, recipe->group_max, seed);
    }
}

bool program_concerns(const struct program *program, int op, int rank)
{
    const struct hvd_signature *signature = &program->op[op].signature;
    return signature->kind != HVD_SEND || signature->root == rank || signature->peer == rank;
}

struct hvd_signature program_signature(const struct program *program, int op, int rank)
{
    struct hvd_signature signature = program->op[op].signature;
    if (program->op[op].variants == 1)
        return signature;
    uint64_t seed = (uint64_t)op << 32 | (uint32_t)rank;
    uint32_t variant = ranks_below(&seed, (uint32_t)program->op[op].variants);
    if (signature.kind == HVD_SEND && variant > 2) /* who sends to whom is what makes it this send */
        variant = 1;
    switch (variant) {
    case 1:
        signature.dims[1] += 100;
        break;
    case 2:
        signature.dtype = 8;
        break;
    case 3:
        signature.kind = signature.kind == HVD_ALLREDUCE ? HVD_BROADCAST : HVD_ALLREDUCE;
        break;
    case 4:
        signature.prescale = 0.5;
        break;
    case 5:
        signature.group = 0;
        signature.group_count = 0;
        break;
    case 6:
        signature.root = 1;
        break;
    }
    return signature;
}
