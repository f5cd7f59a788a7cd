/* state.h - what plane mpi knows of itself and of the work under way, for its files.
 *
 * Private to plane mpi. mpi.c is the plug-in and does all that MPI computes or only carries; ordered.c does what has to
 * be combined in rank order by our own kernels.
 */
#ifndef HVD_PLANE_MPI_STATE_H
#define HVD_PLANE_MPI_STATE_H

#include "../../kernel/kernel.h"
#include "../plane.h"
#include "post.h"

enum hvd_mpi_way { HVD_MPI_NATIVE, HVD_MPI_WHOLE, HVD_MPI_SLICES, HVD_MPI_MOVE };

struct hvd_mpi_plane {
    struct hvd_mpi_posts posts;
    bool any_order;
    struct hvd_error failed;
    int lingered;                 /* how often */
    unsigned char *buffer, *kept; /* packed tensors; contributions of all ranks */
    size_t buffer_bytes, kept_bytes;
    uint64_t *gives, *gets; /* bytes, by rank */
    /* of the work under way */
    enum hvd_mpi_way way;
    unsigned char *values; /* the buffer, or the only tensor's memory */
    struct hvd_scale scale;
    size_t element_bytes;
    const unsigned char *source;       /* what this rank gives, as long as the values */
    uint64_t segment;                  /* elements that are cut into slices at a time */
    uint64_t asked, done;              /* elements whose contributions were asked for, and were combined */
    size_t half_bytes;                 /* of what is kept: one segment's */
    struct hvd_mpi_plane *left_before; /* of those that are closed and not over */
};

/* values.c. Room for so many bytes; what was there is lost. */
int hvd_mpi_reserve(struct hvd_mpi_plane *plane, unsigned char **area, size_t *has, uint64_t bytes,
                    struct hvd_error *error);
/* Values are worked on in the buffer; the only tensor's own memory will do where its result is wanted. */
int hvd_mpi_choose_values(struct hvd_mpi_plane *plane, const struct hvd_work *work, uint64_t bytes,
                          struct hvd_error *error);
/* This rank's tensors one after the other, or what stands for them where it has joined. */
void hvd_mpi_pack(const struct hvd_mpi_plane *plane, const struct hvd_work *work, unsigned char *to);

/* ordered.c: an allreduce by WHOLE or SLICES, from its first calls; what to do when the calls that were posted are
 * over: HVD_AGAIN, others are posted, or HVD_OK, the values are the results. */
int hvd_mpi_ordered_begin(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error);
int hvd_mpi_ordered_go_on(struct hvd_mpi_plane *plane, const struct hvd_work *work, struct hvd_error *error);
/* `count` elements of each rank lie one after the other, in rank order: their combination. own: where this rank's lie,
 * if they do not lie among them. */
void hvd_mpi_combine(const struct hvd_mpi_plane *plane, const struct hvd_work *work, void *to,
                     const unsigned char *from, const void *own, uint64_t count);

#endif
