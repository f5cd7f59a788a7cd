/* virtual_parts.h - what the three files of virtual time share: virtual.c (threads and the clock), virtual_calls.c
 * (descriptors and what crosses them) and virtual_atomic.c (atomic accesses, weak memory).
 */
#ifndef HVD_TESTS_VIRTUAL_PARTS_H
#define HVD_TESTS_VIRTUAL_PARTS_H

#include "virtual.h"

#include <stddef.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

enum { VIRTUAL_THREADS = 192 };
#define VIRTUAL_NEVER UINT64_MAX

#define CHANCE(one_in) ((one_in) && virtual_random() % (uint64_t)(one_in) == 0)
/* Declares the function of the system, and begins ours in its place. */
#define WRAP(type, name, args) \
    type __real_##name args;   \
    type __wrap_##name args

extern struct virtual_plan virtual_plan;
extern int virtual_me; /* the thread that runs; -1 before virtual_begin */
extern uint64_t virtual_clock, virtual_next_event;

/* virtual.c */
__attribute__((noreturn)) void virtual_give_up(const char *why);
void virtual_point(void); /* another thread may go on */
void virtual_call(void);  /* a call of the system: the thread's stores are seen, and another may go on */
/* Until somebody wakes who waits on that (NULL: for descriptors, until there is news of them), or the deadline. */
void virtual_block(const void *on, uint64_t deadline, const char *what);
int virtual_wake(const void *on, int most);
uint64_t virtual_after(const struct timespec *time); /* NULL: never */
bool virtual_interrupted(void); /* a signal's handler has run: what the thread waits in returns, errno is set */
int virtual_rank(void);         /* of the thread that runs */
/* virtual_calls.c */
void virtual_happen(void); /* what is due by the clock */
void virtual_end_descriptors(int rank);
/* virtual_atomic.c */
void virtual_write_out(int thread); /* others see its stores */

#endif
