/* state.h - what plane nccl knows of its device, its communicator and the work under way, for its files.
 *
 * Private to plane nccl. nccl.c is the plug-in; device.c has the devices of this process, comm.c how ranks come to a
 * communicator and what is said when that fails, calls.c what a work becomes. Everything but device.c is called by the
 * turn of one engine only.
 */
#ifndef HVD_PLANE_NCCL_STATE_H
#define HVD_PLANE_NCCL_STATE_H

#include "../../cuda/cuda.h"
#include "../../kernel/kernel.h"
#include "../../nccl/nccl.h"
#include "../plane.h"

/* A device that sets of this process use. There is one stream for all of them. */
struct hvd_nccl_device {
    int ordinal, users;     /* sets, and marks that somebody holds */
    struct hvd_mark *marks; /* that nobody holds */
    int handle;
    void *ctx, *stream;
    struct hvd_cuda_uuid uuid;
    char pci[20];
    struct hvd_nccl_device *next;
};

/* What a rank says before the first work. */
struct hvd_nccl_hello {
    int32_t code, ordinal, version;
    struct hvd_cuda_uuid uuid;
    char pci[20];
    struct hvd_nccl_id id; /* of rank 0 */
    char text[200];        /* why it cannot; code is not HVD_OK */
};
_Static_assert(sizeof(struct hvd_nccl_hello) <= HVD_HELLO_BYTES, "a hello must fit");

#define HVD_NCCL_RETIRED_MAX 64 /* each is larger than the one before by half at least */

enum hvd_nccl_stage { HVD_NCCL_IDLE, HVD_NCCL_STARTED, HVD_NCCL_LAUNCHING };

struct hvd_nccl_plane {
    int rank, size;
    bool any_order;
    uint64_t timeout_ns;
    struct hvd_error failed;
    const struct hvd_cuda *cuda;
    const struct hvd_nccl *nccl;
    struct hvd_nccl_device *device;
    void *comm;
    struct hvd_mark *last; /* behind the latest work on the stream; NULL: all are done */
    bool connected;
    uint64_t since_ns; /* when the communicator was begun */
    enum hvd_nccl_stage stage;
    uintptr_t retired[HVD_NCCL_RETIRED_MAX]; /* memory that was too small, and may be in use */
    int retired_count;
    uintptr_t scratch; /* scratch_bytes that stand in for the tensors of who has none, and as many for results that
                          nobody wants */
    size_t scratch_bytes;
    int multiplied; /* NCCL's number of a sum of values times `factor`, of `factor_dtype`; -1: none is made */
    int factor_dtype;
    double factor;
};

/* device.c. Any thread. NULL: error says why. */
struct hvd_nccl_device *hvd_nccl_device_take(int ordinal, struct hvd_error *error);
void hvd_nccl_device_drop(struct hvd_nccl_device *device);
/* A mark at this point of its stream. With the device current. NULL: error says why. */
struct hvd_mark *hvd_nccl_device_mark(struct hvd_nccl_device *device, struct hvd_error *error);
/* The device is the current one of this thread, until leave. */
int hvd_nccl_enter(const struct hvd_nccl_plane *plane, struct hvd_error *error);
void hvd_nccl_leave(const struct hvd_nccl_plane *plane);

/* comm.c */
void hvd_nccl_say_hello(struct hvd_nccl_plane *plane, const struct hvd_work *first, void *mine);
int hvd_nccl_connect(struct hvd_nccl_plane *plane, const void *all, struct hvd_error *error);
/* HVD_OK: nothing is wrong and nothing goes on in the background. HVD_AGAIN: something does. */
int hvd_nccl_settled(struct hvd_nccl_plane *plane, const char *what, struct hvd_error *error);
/* A code of NCCL as an error that names this rank and its device. */
int hvd_nccl_refused(const struct hvd_nccl_plane *plane, int result, const char *what, struct hvd_error *error);
void hvd_nccl_disconnect(struct hvd_nccl_plane *plane, bool abort);
/* Is everything on the stream done? HVD_OK, HVD_AGAIN, or what has gone wrong there. With the device current. */
int hvd_nccl_settle(struct hvd_nccl_plane *plane, struct hvd_error *error);

/* calls.c. Does NCCL compute this as we do? From agreed fields only. */
bool hvd_nccl_computes(const struct hvd_nccl_plane *plane, const struct hvd_work *work);
/* The work's calls, on the device's stream. HVD_OK, or HVD_AGAIN: NCCL is still at it (hvd_nccl_settled tells). */
int hvd_nccl_launch(struct hvd_nccl_plane *plane, const struct hvd_work *work, struct hvd_error *error);

#endif
