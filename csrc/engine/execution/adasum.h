/* adasum.h - Adasum of a bucket, composed of works that every plane can do.
 *
 * Called by execute.c, in the turn: open with the bucket as a plane would get it, then next until it says that all is
 * done. Nothing here blocks, and one struct serves one bucket after the other; its memory is kept until close.
 */
#ifndef HVD_ENGINE_EXECUTION_ADASUM_H
#define HVD_ENGINE_EXECUTION_ADASUM_H

#include "../../plane/plane.h"

struct hvd_adasum {
    struct hvd_work bucket;
    int rank, size, stage;
    uint32_t batch, batch_end;    /* tensors whose coefficients are found together */
    uint32_t tensor, parts;       /* of the chunk under way: its first tensor, and how many */
    uint64_t from, elements;      /* where it begins in that tensor, and its elements in all */
    uint64_t load[HVD_LOCAL_MAX]; /* what each rank takes of everybody's chunk */
    struct hvd_piece *piece;      /* what a work is given; room for all tensors of the bucket */
    double *factor;               /* of each tensor */
    int *owner;                   /* of a small tensor: who takes its dots */
    double *gram;
    uint64_t *count_of;
    void *mine, *theirs; /* scratch: what this rank gives, or its floats; what it got from all */
    size_t room, piece_room, gram_room, count_room, mine_room, theirs_room;
};

/* The bucket's pieces stay the caller's and must live until the last next; in NULL: this rank has joined. */
void hvd_adasum_open(struct hvd_adasum *adasum, const struct hvd_work *bucket, int rank, int size);
/* HVD_AGAIN: `work` is the next to be done; call again when this rank is through with it. HVD_OK: the results lie in
 * the outputs. The first call fills `work` in any case. All ranks get the same works. */
int hvd_adasum_next(struct hvd_adasum *adasum, struct hvd_work *work);
void hvd_adasum_close(struct hvd_adasum *adasum);

#endif
