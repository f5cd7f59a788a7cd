/* world.h - MPI as the place where ranks meet: started or found running, communicators, the bootstrap's allgather.
 *
 * For the thread that calls init, one at a time; hvd_mpi_load comes first. What may wait for others takes timeout_ms
 * and returns HVD_AGAIN when that is over: then the same call is to be made again, with the same arguments, until it
 * says something else. A caller who gives up instead calls none of these again.
 */
#ifndef HVD_MPI_WORLD_H
#define HVD_MPI_WORLD_H

#include "mpi.h"

/* The library of this name, or the one that is linked with what has this name. Loading a second time does nothing. */
int hvd_mpi_load(const char *path, struct hvd_error *error);
/* MPI is initialized afterwards, by whoever was first, with MPI_THREAD_MULTIPLE; else HVD_EINIT with the remedy. */
int hvd_mpi_start(struct hvd_error *error);
bool hvd_mpi_ours(void); /* hvd_mpi_start had initialized it */
/* MPI_Finalize, if hvd_mpi_start had initialized MPI and nobody has finalized it. */
void hvd_mpi_finish(void);

/* *made: a duplicate of `from` (0: MPI_COMM_WORLD), or with `ranks` a communicator of those of its ranks, in that
 * order, which only they call for and wait for without limit. Errors of calls on it are returned. */
int hvd_mpi_comm_open(uintptr_t from, const int *ranks, int count, int timeout_ms, uintptr_t *made,
                      struct hvd_error *error);
/* Frees it, unless it is to be kept. */
void hvd_mpi_comm_close(uintptr_t comm);
/* A peer's message may still come on this one, which is never to be freed then: the number of a freed communicator is
 * the next one's, and so would be the message. From any thread, before hvd_mpi_comm_close. */
void hvd_mpi_comm_keep(uintptr_t comm);
/* MPI is called for nothing but to be called, unless it is finalized: what is over here may owe others bytes that leave
 * then. peer: a rank of comm, best another one each time. Any thread. */
void hvd_mpi_linger(uintptr_t comm, int peer);
/* all[rank * bytes] gets every rank's bytes. */
int hvd_mpi_allgather(uintptr_t comm, const void *mine, size_t bytes, void *all, int timeout_ms,
                      struct hvd_error *error);

#endif
