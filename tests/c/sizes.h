/* sizes.h - one body in worlds of every size that tests ask for, of threads and over the simulated network. */
#ifndef HVD_TEST_SIZES_H
#define HVD_TEST_SIZES_H

#include "world.h"

/* `works` counts what the ranks' bodies have done; too little ends the test, so that a matrix cannot become empty. */
void hvd_every_size(void (*body)(const struct hvd_plane_arg *arg, void *more), const _Atomic long *works);

#endif
