/* post.h - non-blocking calls of MPI under way for one work, and how they are posted.
 *
 * Private to plane mpi. All sizes are in bytes and 64 bits wide: what MPI's int counts cannot say goes in parts, or
 * rank by rank. Which of these it is follows from agreed numbers alone, so that all ranks post the same calls in the
 * same order. After a post_ that returned HVD_OK, settle until it returns HVD_OK, before the next one (of messages any
 * number may be posted before). Memory that was given to a post_ is MPI's until then.
 */
#ifndef HVD_PLANE_MPI_POST_H
#define HVD_PLANE_MPI_POST_H

#include "../../mpi/mpi.h"

struct hvd_mpi_posts {
    const struct hvd_mpi *mpi;
    uintptr_t comm;
    int rank, size;
    uint64_t most;      /* what one call may count; INT_MAX but in tests */
    uintptr_t *request; /* under way */
    int requests, room;
    int *gives, *from, *gets, *at; /* of each rank, for the call under way */
};

int hvd_mpi_posts_open(struct hvd_mpi_posts *posts, uintptr_t comm, int rank, int size, struct hvd_error *error);
void hvd_mpi_posts_close(struct hvd_mpi_posts *posts); /* nothing is under way */

/* out may be in. */
int hvd_mpi_post_allreduce(struct hvd_mpi_posts *posts, const void *in, void *out, uint64_t count, size_t element_bytes,
                           uintptr_t type, uintptr_t op, struct hvd_error *error);
int hvd_mpi_post_broadcast(struct hvd_mpi_posts *posts, void *values, uint64_t bytes, int root,
                           struct hvd_error *error);
/* values holds bytes[rank] of each rank in order, and of this rank they are there. */
int hvd_mpi_post_allgather(struct hvd_mpi_posts *posts, void *values, const uint64_t *bytes, struct hvd_error *error);
/* To each rank gives[rank] bytes of in, from each gets[rank] into out, both in order. longest: the most that any rank
 * gives or gets in all, the same number on all ranks. */
int hvd_mpi_post_alltoall(struct hvd_mpi_posts *posts, const void *in, const uint64_t *gives, void *out,
                          const uint64_t *gets, uint64_t longest, struct hvd_error *error);
/* One message to or from another rank, of any length. Both sides post the same ones in the same order; several may be
 * under way at a time. */
int hvd_mpi_post_send(struct hvd_mpi_posts *posts, const void *values, uint64_t bytes, int peer,
                      struct hvd_error *error);
int hvd_mpi_post_receive(struct hvd_mpi_posts *posts, void *values, uint64_t bytes, int peer, struct hvd_error *error);
/* HVD_OK: all are done. HVD_AGAIN; *progress if one was. */
int hvd_mpi_settle(struct hvd_mpi_posts *posts, bool *progress, struct hvd_error *error);

#endif
