/* seat.h - a rank of a world that has one plane open: opened before a test's body and closed after it. */
#ifndef HVD_TEST_SEAT_H
#define HVD_TEST_SEAT_H

#include "world.h"

/* A rank with one opened plane, and what its last work said. */
struct hvd_seat {
    struct hvd_plane_arg arg;
    const struct hvd_plane *plane;
    void *opened, *more;
    struct hvd_error error;
    struct hvd_seat *rest; /* over the same links, for what this plane leaves to others; NULL: nothing may be left */
    int (*run)(struct hvd_seat *seat, struct hvd_work *work); /* a work, to its end; NULL: hvd_world_do */
};

void hvd_seat_open(struct hvd_seat *seat, const struct hvd_plane_arg *arg, const char *plane);
void hvd_seat_close(struct hvd_seat *seat); /* when all have come */
int hvd_seat_do(struct hvd_seat *seat, struct hvd_work *work);
void hvd_seat_done(struct hvd_seat *seat, struct hvd_work *work); /* the same; ends the test if that fails */

/* hvd_world_run with a seat on this plane for each rank. Of `how` (NULL: nothing) are algo, any_order and comm, rank
 * 0's, which those of the others follow. */
void hvd_world_seats(enum hvd_world_kind kind, int size, const char *plane, const struct hvd_plane_arg *how,
                     void (*body)(struct hvd_seat *seat), void *more);

#endif
