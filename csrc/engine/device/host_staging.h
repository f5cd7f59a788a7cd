/* host_staging.h - a work on devices, done by a plane that moves the CPU's memory: down, across, up again.
 *
 * Called by execute.c, in the turn. begin turns a work on a device into the same work on memory of the stage's own, and
 * copies what this rank gives; when poll has come to HVD_STAGE_HERE, a plane does the work; return_ copies what it
 * brought, and poll tells when that is there. Nothing here blocks.
 */
#ifndef HVD_ENGINE_DEVICE_HOST_STAGING_H
#define HVD_ENGINE_DEVICE_HOST_STAGING_H

#include "../../cuda/cuda.h"
#include "../../cuda/pinned.h"
#include "../../plane/plane.h"

enum hvd_stage_phase { HVD_STAGE_NONE, HVD_STAGE_DOWN, HVD_STAGE_HERE, HVD_STAGE_UP };

struct hvd_stage_device {
    int device, handle; /* device: counted from 1 */
    void *ctx, *stream, *done;
    struct hvd_stage_device *next;
};

struct hvd_stage {
    enum hvd_stage_phase phase;
    const struct hvd_cuda *cuda;           /* NULL: no tensor of this rank has come by yet */
    struct hvd_stage_device *devices, *on; /* that tensors have lain on; those of the work at hand */
    int mode;                              /* of enter, for leave */
    struct hvd_pinned memory;              /* the tensors of the work at hand */
    struct hvd_piece *piece;               /* what the plane gets */
    uint32_t pieces, room;
    const struct hvd_piece *away; /* the tensors themselves; NULL: this rank has none in this work */
    size_t *out_bytes;            /* of each piece, that go back */
};

/* HVD_OK: the work has other pieces now, and poll is next. */
int hvd_stage_begin(struct hvd_stage *stage, struct hvd_work *work, int rank, int size, struct hvd_error *error);
/* HVD_AGAIN: a copy is under way. HVD_OK: see phase; NONE: all is done. */
int hvd_stage_poll(struct hvd_stage *stage, bool *progress, struct hvd_error *error);
/* The plane has done the work: HVD_AGAIN, copies are under way; HVD_OK: there is nothing to copy. */
int hvd_stage_return(struct hvd_stage *stage, struct hvd_error *error);
void hvd_stage_close(struct hvd_stage *stage);

#endif
