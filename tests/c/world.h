/* world.h - ranks for tests: threads of one process, or processes, with what a plane is opened with.
 *
 * A thread world shares one plain mapping per segment, so that ThreadSanitizer sees every access under one address.
 * A process world maps memfds, at other addresses in each process, so that nothing can rely on one address space.
 * Every world has a deadline; when it passes, the test process ends with a message and no rank is left.
 */
#ifndef HVD_TEST_WORLD_H
#define HVD_TEST_WORLD_H

#include "check.h"
#include "netsim.h"
#include "plane/plane.h"

enum hvd_world_kind { HVD_WORLD_THREADS, HVD_WORLD_PROCESSES };

/* The number of each rank's host in the worlds that follow: what is shared, and bells, are of one host, and plane hier
 * is asked for, so that it does whatever it can. NULL: all are on one. */
extern const int *hvd_world_host_of;

/* Run body as every rank of a world; returns when all have returned. A rank that fails ends the test. */
void hvd_world_run(enum hvd_world_kind kind, int size, int seconds,
                   void (*body)(const struct hvd_plane_arg *arg, void *more), void *more);

/* The same on threads of which one runs at a time, in the order and over the network that `seed` gives (baton.h); links
 * are all there is between them, as between hosts. Ends the test if ranks wait for each other. Returns the time, in ns
 * of the network's clock, when all are done. */
uint64_t hvd_world_sim(int size, uint64_t seed, const struct hvd_sim_line *line, int seconds,
                       void (*body)(const struct hvd_plane_arg *arg, void *more), void *more);
/* That network, NULL in other worlds. For ranks and while they run. */
struct hvd_sim_net *hvd_world_net(const struct hvd_plane_arg *arg);

/* All ranks of the world meet. */
void hvd_world_meet(const struct hvd_plane_arg *arg);

/* Poll a started work to its end as an engine would: spin, yield, then sleep on the bell. A bell that is not rung
 * although there is news ends the test. hvd_world_do also starts it. Returns what start or poll returned. */
int hvd_world_finish(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened,
                     struct hvd_work *work, struct hvd_error *error);
int hvd_world_do(const struct hvd_plane_arg *arg, const struct hvd_plane *plane, void *opened, struct hvd_work *work,
                 struct hvd_error *error);

/* The plane of this name, opened; ends the test if that fails. */
const struct hvd_plane *hvd_world_open(const struct hvd_plane_arg *arg, const char *name, void **opened);

#endif
