/* matrix.h - what every plane is asked: kinds x dtypes x ops x counts x shapes x places, in worlds of every size, of
 * threads, processes and over the simulated network.
 *
 * The thread sanitizer takes minutes for what is seconds without it, so there a part stands for all: races do not
 * depend on the dtype, and between processes it sees none. */
#ifndef HVD_TEST_MATRIX_H
#define HVD_TEST_MATRIX_H

#include "bucket.h"

#define HVD_MATRIX_ABOVE (256u << 10) /* bytes of the largest segment of any plane: one element more needs two */

/* Is a choice (a shape, a pattern) met beside these other values of a matrix, which `others` adds up? One is, in turn,
 * so that each meets each value of the others; with TESTS_EVERYTHING set all are. */
bool hvd_picked(int choice, int choices, int others);

/* Too few works end the test, so that a matrix cannot become empty. */
void hvd_every_size(void (*body)(const struct hvd_plane_arg *arg, void *more));
/* With each plane that opens in this world; ends the test if that one does not which has to. `body` gets a seat on it;
 * where a plane was asked for by name, p2p has the rest. */
void hvd_every_plane(const struct hvd_plane_arg *arg, void (*body)(struct hvd_seat *seat));

/* Is a plane asked about this dtype? It sees no difference between the two floats of 8 bits. */
bool hvd_dtype_asked(int dtype);

/* All of `kinds`, a bit for each. `thin`: few counts, a rank that has joined at times, and not what `can` denies. */
void hvd_matrix(struct hvd_seat *seat, uint32_t kinds, bool thin);

/* A world of processes, but under the thread sanitizer. */
void hvd_world_processes(int size, int seconds, void (*body)(const struct hvd_plane_arg *arg, void *more), void *more);

#endif
