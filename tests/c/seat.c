/* seat.c - see seat.h. */
#include "seat.h"

void hvd_seat_open(struct hvd_seat *seat, const struct hvd_plane_arg *arg, const char *plane)
{
    *seat = (struct hvd_seat){.arg = *arg};
    seat->plane = hvd_world_open(arg, plane, &seat->opened);
}

void hvd_seat_close(struct hvd_seat *seat)
{
    hvd_world_meet(&seat->arg);
    seat->plane->close(seat->opened);
}

int hvd_seat_do(struct hvd_seat *seat, struct hvd_work *work)
{
    hvd_error_none(&seat->error);
    return seat->run ? seat->run(seat, work) : hvd_world_do(&seat->arg, seat->plane, seat->opened, work, &seat->error);
}

void hvd_seat_done(struct hvd_seat *seat, struct hvd_work *work)
{
    int code = hvd_seat_do(seat, work);
    CHECK(code == HVD_OK, "plane %s, rank %d: %d %s", seat->plane->name, seat->arg.rank, code, seat->error.text);
}

struct seated {
    const char *plane;
    const struct hvd_plane_arg *how;
    void (*body)(struct hvd_seat *seat);
    void *more;
};

static void sit(const struct hvd_plane_arg *world, void *of)
{
    const struct seated *seated = of;
    struct hvd_plane_arg arg = *world;
    struct hvd_seat seat;
    if (seated->how) {
        arg.algo = seated->how->algo;
        arg.any_order = seated->how->any_order;
        arg.comm = seated->how->comm ? (char *)seated->how->comm + arg.rank : NULL;
    }
    hvd_seat_open(&seat, &arg, seated->plane);
    seat.more = seated->more;
    seated->body(&seat);
    hvd_seat_close(&seat);
}

void hvd_world_seats(enum hvd_world_kind kind, int size, const char *plane, const struct hvd_plane_arg *how,
                     void (*body)(struct hvd_seat *seat), void *more)
{
    struct seated seated = {plane, how, body, more};
    hvd_world_run(kind, size, 200, sit, &seated);
}
