/* gpus.h - a plane nccl for tests, over the GPU that is none (tests/stub), and the greeting that an engine arranges. */
#ifndef HVD_TEST_GPUS_H
#define HVD_TEST_GPUS_H

#include "cuda/cuda.h"
#include "nccl/nccl.h"
#include "plane/nccl/state.h"
#include "plane/plane.h"

/* The stub's own; NULL before gpus_find, from which on the core takes the stub. */
extern void (*gpus_fail)(const char *name, int nth, int code);
extern int (*gpus_calls)(const char *name);
extern void *(*gpus_gate)(void);
extern void (*gpus_open_gate)(void *event);
void gpus_find(void);
void *gpus_symbol(const char *name); /* of the stub's */
/* `size` ranks, each a thread of this process: they share the stub's counts and errors. */
void gpus_threads(int size, void (*body)(const struct hvd_plane_arg *arg, void *more));

/* A stream that stands in for the framework's, with its device current until it ends; the stub then works off what
 * lies there. */
void *gpus_stream(int device);
void gpus_stream_end(void *stream);

struct gpus_seat {
    struct hvd_plane_arg arg;
    const struct hvd_plane *plane;
    struct hvd_nccl_plane *nccl;
    unsigned char all[HVD_LOCAL_MAX * HVD_HELLO_BYTES];
};

const struct hvd_plane *gpus_plane(void);
/* Opens, and lets the ranks greet each other; of a work whose tensors lie on `device`. */
int gpus_greet(const struct hvd_plane_arg *world, int device, struct gpus_seat *seat, struct hvd_error *error);
/* The same seat once more; a device of -1: its rank knows none. */
int gpus_greet_again(struct gpus_seat *seat, int device, struct hvd_error *error);
int gpus_finish(const struct gpus_seat *seat, struct hvd_work *work, struct hvd_error *error);
int gpus_do(const struct gpus_seat *seat, struct hvd_work *work, struct hvd_error *error);

#endif
