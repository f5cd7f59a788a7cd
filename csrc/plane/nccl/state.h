/* state.h - what plane nccl knows of its device, its communicator and the work under way, for its files.
 *
 * Private to plane nccl. nccl.c is the plug-in; device.c has the devices of this process, comm.c how ranks come to a
 * communicator and what is said when that fails, calls.c what a work becomes, memory.c the plane's own memory, end.c
 * how a communicator ends. Everything but device.c is called by the turn of one engine only.
 */
#ifndef HVD_PLANE_NCCL_STATE_H
#define HVD_PLANE_NCCL_STATE_H

#include "../../cuda/cuda.h"
#include "../../cuda/pinned.h"
#include "../../kernel/kernel.h"
#include "../../nccl/nccl.h"
#include "../plane.h"

/* A device that sets of this process use. There is one stream for all of them. */
struct hvd_nccl_device {
    int ordinal, users;          /* sets, and marks that somebody holds */
    struct hvd_gpu_event *marks; /* that nobody holds */
    int handle;
    void *ctx, *stream;
    struct hvd_cuda_uuid uuid;
    char pci[20];
    struct hvd_nccl_device *next;
};

/* What a rank says before the first work. */
struct hvd_nccl_hello {
    int32_t code, ordinal, version; /* ordinal: of its device; -1: it knows none yet */
    int32_t shares;                 /* it lets ranks share a device */
    int32_t adds_float8;            /* its NCCL does, on its device */
    struct hvd_cuda_uuid uuid;
    char pci[20];
    struct hvd_nccl_id id; /* of a communicator's first rank */
    char text[200];        /* why it cannot; code is not HVD_OK */
};
_Static_assert(sizeof(struct hvd_nccl_hello) <= HVD_HELLO_BYTES, "a hello must fit");

/* Memory on the device, of the plane's own. */
struct hvd_nccl_memory {
    uintptr_t at; /* 0: none */
    size_t bytes;
};

#define HVD_NCCL_RETIRED_MAX 64 /* each is larger than the one before by half at least */

enum hvd_nccl_stage { HVD_NCCL_IDLE, HVD_NCCL_STARTED, HVD_NCCL_LAUNCHING };

struct hvd_nccl_plane {
    int rank, size;
    int *host_of; /* of each rank; NULL: all are on one */
    bool any_order, shares_gpus, nccl_blocks;
    uint64_t timeout_ns;
    struct hvd_error failed;
    const struct hvd_cuda *cuda;
    const struct hvd_nccl *nccl;
    struct hvd_nccl_device *device;
    int mode; /* of enter, for leave */
    void *comm;
    struct hvd_nccl_end *end;   /* of the communicator, which somebody is at; NULL: there is none to end, or not yet */
    bool parted, aborted;       /* what is on devices ends; by force */
    uint64_t part_until_ns;     /* who is not done by then is left behind */
    struct hvd_gpu_event *last; /* behind the latest work on the stream; NULL: all are done */
    struct hvd_gpu_event
        *before;           /* of the work that is being launched: behind what it waits for; NULL: not there yet */
    struct hvd_nccl_id id; /* of the communicator; numbered: this rank, its first, has got it */
    bool numbered, connected;
    uint64_t since_ns; /* since when NCCL goes on in the background; 0: it does not, as far as is known */
    enum hvd_nccl_stage stage;
    struct hvd_nccl_memory retired[HVD_NCCL_RETIRED_MAX]; /* was too small; kept until the plane closes */
    int retired_count;
    struct hvd_nccl_memory scratch; /* its first half stands in for the tensors of who has none, the second for results
                                       that nobody wants */
    bool adds_float8;               /* agreed: every rank's NCCL does */
    int multiplied; /* NCCL's number of a sum of values times `factor`, of `factor_dtype`; -1: none is made */
    int factor_dtype;
    double factor;
};

/* device.c. Any thread. NULL: error says why. */
struct hvd_nccl_device *hvd_nccl_device_take(int ordinal, struct hvd_error *error);
void hvd_nccl_device_drop(struct hvd_nccl_device *device);
/* A mark at this point of its stream. With the device current. NULL: error says why. */
struct hvd_gpu_event *hvd_nccl_device_mark(struct hvd_nccl_device *device, struct hvd_error *error);
/* The device is the current one of this thread, until leave. */
int hvd_nccl_enter(struct hvd_nccl_plane *plane, struct hvd_error *error);
void hvd_nccl_leave(struct hvd_nccl_plane *plane);

/* comm.c */
void hvd_nccl_say_hello(struct hvd_nccl_plane *plane, const struct hvd_work *first, void *mine);
/* What all have said. HVD_AGAIN: somebody knows no device yet, and they say hello again. */
int hvd_nccl_hear(struct hvd_nccl_plane *plane, const void *all, struct hvd_error *error);
/* Begins the communicator, once; with the device current, and by the first work, when nothing else is begun. */
int hvd_nccl_connect(struct hvd_nccl_plane *plane, struct hvd_error *error);
/* HVD_OK: nothing is wrong and nothing goes on in the background. HVD_AGAIN: something does. */
int hvd_nccl_settled(struct hvd_nccl_plane *plane, const char *what, struct hvd_error *error);
/* This rank, its device and its NCCL, for texts. */
void hvd_nccl_where(const struct hvd_nccl_plane *plane, char *text, size_t text_bytes);
/* A code of NCCL as an error that names this rank and its device. */
int hvd_nccl_refused(const struct hvd_nccl_plane *plane, int result, const char *what, struct hvd_error *error);
/* Is everything on the stream done? HVD_OK, HVD_AGAIN, or what has gone wrong there. With the device current. */
int hvd_nccl_settle(struct hvd_nccl_plane *plane, struct hvd_error *error);

/* end.c. part: begins to end what the plane has on devices, waits for nothing, and is done once; abort: by force.
 * disconnect: waits until that is over, for a limited time, and gives back what can be given back. recovered: has
 * what was left behind come to its end since, so that no device hangs? patient: waits for an event, too. */
void hvd_nccl_part(struct hvd_nccl_plane *plane, bool abort);
void hvd_nccl_disconnect(struct hvd_nccl_plane *plane);
bool hvd_nccl_recovered(bool patient);

/* memory.c. With the device current. At least so many bytes of scratch; what was there before is kept. */
int hvd_nccl_reserve(struct hvd_nccl_plane *plane, size_t bytes, struct hvd_error *error);
/* After the communicator has ended. */
void hvd_nccl_free_memory(struct hvd_nccl_plane *plane);
/* So many elements that change nothing when this work's op combines them. */
int hvd_nccl_fill(struct hvd_nccl_plane *plane, const struct hvd_work *work, uintptr_t at, uint64_t count,
                  struct hvd_error *error);
uint64_t hvd_nccl_memory_bytes(void); /* on devices, of all planes of this process. Any thread */

/* calls.c. Does NCCL compute this as we do? From agreed fields only. */
bool hvd_nccl_computes(const struct hvd_nccl_plane *plane, const struct hvd_work *work);
/* The work's calls, as one group on the device's stream. HVD_OK, or HVD_AGAIN: NCCL is still at it (hvd_nccl_settled
 * tells) if the stage is LAUNCHING, else to be launched again. */
int hvd_nccl_launch(struct hvd_nccl_plane *plane, const struct hvd_work *work, struct hvd_error *error);

#endif
