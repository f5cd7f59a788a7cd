/* virtual_ranks.h - what programs in virtual time share: ranks that are threads, how they meet, and what is measured.
 *
 * A program is a function of a seed: it chooses everything by it, begins virtual time and runs its ranks. It returns
 * if all went well, and otherwise ends the process.
 */
#ifndef HVD_TESTS_VIRTUAL_RANKS_H
#define HVD_TESTS_VIRTUAL_RANKS_H

#include "crew.h"
#include "virtual.h"

enum { VIRTUAL_RANKS = 8, VIRTUAL_MS = 1000000 };

/* X(name): virtual_NAME, the programs. */
#define VIRTUAL_PROGRAMS(X) \
    X(engine)               \
    X(death)                \
    X(streams)              \
    X(stall)                \
    X(interrupt)            \
    X(life)                 \
    X(fork)                 \
    X(idle)

#define X(name) void virtual_##name(uint64_t seed, bool weak);
VIRTUAL_PROGRAMS(X)
#undef X

/* A random number below n, of a program's own choice: the same on all ranks if `choice` is. */
unsigned virtual_below(uint64_t *choice, unsigned n);
/* Chooses what each program may vary: the world (crew.h), the plan; `choice` goes on. describe: what was chosen. */
struct virtual_plan virtual_choose(uint64_t seed, bool weak, uint64_t *choice, int *size, int *world);
void virtual_describe(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The job's store, as far as the core needs it: it passes on why a rank has aborted, and tells that one is lost. In a
 * real job it is the launcher's, or a thread in the process of rank 0. */
extern enum virtual_store { VIRTUAL_NO_STORE, VIRTUAL_STORE, VIRTUAL_STORE_IN_RANK_0 } virtual_store;
/* Runs body(rank, size) on a thread for each rank, and joins those that are not stopped. */
void virtual_run(int size, void (*body)(int rank, int size));
/* A rank's engine; the boot allgather ends with an error when a rank has ended. */
int virtual_open(int rank, int size, int life, bool in_process, struct hvd_engine **engine, struct hvd_error *error);
void virtual_close(struct hvd_engine *engine); /* leaves, stops, frees */
/* A collective was over so long after all ranks had submitted it. The longest is shown. */
void virtual_waited(uint64_t ns);
/* Memory of a caller: virtual_poison makes each later access by anybody end the process. */
void *virtual_memory(size_t bytes);
void virtual_poison(void *memory, size_t bytes);

#endif
