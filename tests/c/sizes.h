/* sizes.h - one body in worlds of every size that tests ask for, of threads, processes and over the simulated network.
 *
 * The thread sanitizer takes minutes for what is seconds without it, so there a part stands for all: races do not
 * depend on the dtype, and between processes it sees none. */
#ifndef HVD_TEST_SIZES_H
#define HVD_TEST_SIZES_H

#include "world.h"

/* Is a choice (a shape, a pattern) met beside these other values of a matrix, which `others` adds up? One is, in turn,
 * so that each meets each value of the others; with TESTS_EVERYTHING set all are. */
bool hvd_picked(int choice, int choices, int others);

/* `works` counts what the ranks' bodies have done; too little ends the test, so that a matrix cannot become empty. */
void hvd_every_size(void (*body)(const struct hvd_plane_arg *arg, void *more), const _Atomic long *works);

/* Is a plane asked about this dtype? It sees no difference between the two floats of 8 bits. */
bool hvd_dtype_asked(int dtype);

/* A world of processes, but under the thread sanitizer. */
void hvd_world_processes(int size, int seconds, void (*body)(const struct hvd_plane_arg *arg, void *more), void *more);

#endif
