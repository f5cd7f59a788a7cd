/* virtual.h - threads of one program that run one at a time, in an order that a seed gives, on a clock of their own.
 *
 * A program first calls virtual_begin, then starts its ranks as threads; all of it is a function of the plan. Nothing
 * of csrc/ knows. The program ends by itself, with a message, where all threads wait for ever.
 */
#ifndef HVD_TESTS_VIRTUAL_H
#define HVD_TESTS_VIRTUAL_H

#include <stdbool.h>
#include <stdint.h>

struct virtual_plan {
    uint64_t seed;
    bool priorities; /* the thread of the highest priority runs, and three times it changes; else a random one */
    bool weak;       /* a store is seen by others later, unless a fence or an operation that reads and writes follows */
    int cpus;        /* that the ranks may believe to have */
    int preempted;   /* at one in so many places a thread has no CPU for a while; 0: never */
    int interrupted; /* one in so many waits of the ranks' own threads is ended by a signal; 0: none */
    int part;        /* one in so many sends and receives moves a part of its bytes, or nothing; 0: none */
    uint64_t delay_ns; /* bytes between ranks are on their way for this long at most */
};

/* The calling thread becomes the first of them, and no rank. */
void virtual_begin(const struct virtual_plan *plan);
uint64_t virtual_random(void);
uint64_t virtual_now(void); /* ns; it begins at a second */
uint64_t virtual_switches(void);
/* From that switch on no thread of this rank runs. end: its process ends, too: its descriptors are closed, and its
 * pidfd becomes readable. Ranks are numbered as the first thread starts their threads; what a thread starts belongs to
 * its rank. */
void virtual_stop(int rank, uint64_t at_switch, bool end);
bool virtual_stopped(int rank);
uint64_t virtual_stopped_ns(void); /* when; 0: not yet */
/* Wait until done(self), which another thread brings about, and then calls virtual_news. */
void virtual_wait(bool (*done)(void *self), void *self, const char *what);
void virtual_news(void);

#endif
