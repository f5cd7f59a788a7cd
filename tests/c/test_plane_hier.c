/* test_plane_hier.c - what only plane hier promises: bytes cross between hosts once and not inside, 16-bit floats are
 * rounded once, what it leaves to others, and who is named when a peer in a lane is lost or babbles. (That it does what
 * a plane does is test_plane.c's.)
 */
#include "bucket.h"
#include "kernel/kernel.h"
#include "plane/hier/state.h"

#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const struct hvd_plane_arg any_order = {.any_order = true};
/* between more than two hosts another algorithm may be cheaper that sends more */
static const struct hvd_plane_arg by_ring = {.any_order = true, .algo = "ring"};

static const struct hvd_plane *open_hier(struct hvd_plane_arg *arg, void **opened)
{
    arg->any_order = true;
    return hvd_world_open(arg, "hier", opened);
}

static void hosts_and_lanes_are_found(void)
{
    static const int host_of[] = {7, 3, 7, 3, 3, 9, 9, 9, 9};
    struct hvd_hier_place place;
    hvd_hier_lay_out(host_of, 9, 4, &place);
    CHECK(place.hosts == 3 && place.lanes == 2 && place.host == 1 && place.number == 2 && place.locals == 3, "rank 4");
    CHECK(place.local[0] == 1 && place.local[1] == 3 && place.local[2] == 4, "its host");
    hvd_hier_lay_out(host_of, 9, 6, &place);
    CHECK(place.host == 2 && place.number == 1 && place.across[0] == 2 && place.across[1] == 3 && place.across[2] == 6,
          "rank 6");
}

/* Sent over links so far, to ranks of other hosts or of this one. */
static uint64_t sent(const struct hvd_plane_arg *arg, bool away)
{
    uint64_t bytes = 0;
    for (int rank = 0; rank < arg->size; rank++)
        if (rank != arg->rank && (arg->host_of[rank] != arg->host_of[arg->rank]) == away)
            bytes += arg->link[rank]->counts.bytes_out;
    return bytes;
}

/* With h hosts and l lanes each of the lanes sends 2 (h - 1) / h of its share, and heads, and nobody else anything. Two
 * hosts exchange it in one message. */
static void bytes_cross_once(struct hvd_seat *seat)
{
    enum { SHARE = 64 * 360 }; /* divides evenly by hosts; more than `whole` is for */
    static _Thread_local float values[SHARE * 4];
    struct hvd_hier_place place;
    struct hvd_piece piece;
    hvd_hier_lay_out(seat->arg.host_of, seat->arg.size, seat->arg.rank, &place);
    uint64_t count = (uint64_t)SHARE * (uint64_t)place.lanes, h = (uint64_t)place.hosts, head = 24;
    for (uint64_t i = 0; i < count; i++)
        values[i] = (float)seat->arg.rank;
    struct hvd_work work = hvd_bucket_sum(&piece, values, count);
    uint64_t before = sent(&seat->arg, true);
    CHECK(seat->plane->can(seat->opened, &work), "asked for by name, it does this");
    hvd_seat_done(seat, &work);
    for (uint64_t i = 0; i < count; i++)
        CHECK(values[i] == (float)(seat->arg.size * (seat->arg.size - 1) / 2), "element %llu is %g",
              (unsigned long long)i, (double)values[i]);
    uint64_t messages = seat->arg.algo ? 2 * (h - 1) : 1, all = 2 * (h - 1) * SHARE / h * sizeof(float);
    uint64_t due = place.number < place.lanes ? all + messages * head : 0;
    CHECK(sent(&seat->arg, true) - before == due, "rank %d sent %llu bytes away, not %llu", seat->arg.rank,
          (unsigned long long)(sent(&seat->arg, true) - before), (unsigned long long)due);
    CHECK(sent(&seat->arg, false) == 0, "rank %d sent over a link to its own host", seat->arg.rank);
}

/* 1 + 1/256 + 1/256: added up on one host first and rounded there, the second number is lost, and the third. */
static void halves_are_rounded_once(struct hvd_seat *seat)
{
    static const double of_rank[] = {1, 1.0 / 256, 1.0 / 256, 0};
    static const uint16_t bits[] = {0x3f80, 0x3b80, 0x3b80, 0};
    uint16_t values[700];
    float floats[700];
    for (int i = 0; i < 700; i++)
        values[i] = bits[seat->arg.rank];
    struct hvd_piece pieces[] = {{values, values, 100}, {values + 100, values + 100, 600}};
    struct hvd_work work = hvd_bucket_sum(pieces, values, 700);
    work.dtype = HVD_DTYPE_bfloat16;
    work.op = HVD_OP_average;
    work.divide_by = 2;
    work.prescale = 4;
    work.piece = pieces;
    pieces[0].count = 100;
    work.pieces = 2;
    hvd_seat_done(seat, &work);
    for (int i = 0; i < 700; i++) {
        floats[i] = 0;
        uint32_t wide = (uint32_t)values[i] << 16;
        memcpy(&floats[i], &wide, sizeof wide);
        CHECK(floats[i] == (float)(2 * (of_rank[0] + of_rank[1] + of_rank[2])), "element %d is %g", i,
              (double)floats[i]);
    }
}

static void what_is_left_to_others(const struct hvd_plane_arg *world, void *more)
{
    struct hvd_plane_arg arg = *world;
    struct hvd_piece piece;
    float memory[1];
    void *opened;
    arg.wanted = NULL;
    const struct hvd_plane *plane = open_hier(&arg, &opened);
    struct hvd_work work = hvd_bucket_sum(&piece, memory, 1000);
    CHECK(!plane->can(opened, &work), "small buckets");
    work.count = 100000;
    CHECK(plane->can(opened, &work), "large ones it does");
    work.kind = HVD_BROADCAST;
    CHECK(plane->can(opened, &work), "large broadcasts, too");
    work.kind = HVD_ALLGATHER;
    CHECK(!plane->can(opened, &work), "an allgather");
    work.kind = HVD_ALLREDUCE;
    work.dtype = HVD_DTYPE_int32;
    CHECK(plane->can(opened, &work), "sums of integers");
    work.op = HVD_OP_average;
    work.divide_by = arg.size;
    CHECK(!plane->can(opened, &work), "averages of integers, which are truncated once");
    hvd_world_meet(&arg);
    plane->close(opened);
    arg.any_order = false;
    plane = hvd_world_open(&arg, "hier", &opened);
    CHECK(!plane->can(opened, &work), "still not");
    work.op = HVD_OP_sum;
    CHECK(plane->can(opened, &work), "integers have the same sum in any order");
    work.dtype = HVD_DTYPE_float32;
    CHECK(!plane->can(opened, &work), "floats have not");
    hvd_world_meet(&arg);
    plane->close(opened);
}

static int refused(const struct hvd_plane_arg *arg)
{
    struct hvd_error error = {0};
    void *opened;
    for (int i = 0; hvd_planes[i]; i++)
        if (strcmp(hvd_planes[i]->name, "hier") == 0)
            return hvd_planes[i]->fits(arg) ? HVD_OK : hvd_planes[i]->open(arg, &opened, &error);
    return HVD_EINTERNAL;
}

static void it_fits_where_hosts_have_several_ranks(const struct hvd_plane_arg *world, void *more)
{
    static const int one[] = {5, 5, 5, 5}, each[] = {0, 1, 2, 3};
    struct hvd_plane_arg arg = *world;
    CHECK(refused(&arg) == HVD_OK, "it fits here");
    arg.host_of = one;
    CHECK(refused(&arg) == HVD_EINIT, "one host");
    arg.host_of = each;
    CHECK(refused(&arg) == HVD_EINIT, "one rank on each");
    arg.host_of = NULL;
    CHECK(refused(&arg) == HVD_EINIT, "nobody has said");
    arg = *world;
    arg.link = NULL;
    CHECK(refused(&arg) == HVD_EINIT, "no links");
}

enum how { ENDS, BABBLES };
static _Atomic int told;

/* Ranks 2 and 3 are a lane. Each hears of the other, by its rank in the set; 0 and 1 wait for them in their hosts until
 * the engine ends that. */
static void a_lane_is_lost(struct hvd_seat *seat)
{
    const enum how how = *(enum how *)seat->more;
    static _Thread_local float values[20000];
    struct hvd_error again = {0};
    struct hvd_piece piece;
    struct hvd_work work = hvd_bucket_sum(&piece, values, 20000);
    char junk[64], name[32];
    int other = 5 - seat->arg.rank, due = how == ENDS ? HVD_EPEER : HVD_EINTERNAL;
    memset(junk, 0x5a, sizeof junk);
    if (seat->arg.rank >= 2 && how == BABBLES)
        CHECK(write(seat->arg.link[other]->fd, junk, sizeof junk) == sizeof junk, "written");
    else if (seat->arg.rank == 3)
        shutdown(seat->arg.link[other]->fd, SHUT_RDWR);
    hvd_world_meet(&seat->arg);
    if (seat->arg.rank >= 2) {
        int code = hvd_seat_do(seat, &work);
        snprintf(name, sizeof name, "rank %d", other);
        CHECK(code == due && seat->error.culprit == other && strstr(seat->error.text, name),
              "rank %d: %d, culprit %d: %s", seat->arg.rank, code, seat->error.culprit, seat->error.text);
        CHECK(seat->plane->start(seat->opened, &work, &again) == code && strcmp(again.text, seat->error.text) == 0,
              "%s", again.text);
        atomic_fetch_add(&told, 1);
    } else {
        CHECK(seat->plane->start(seat->opened, &work, &seat->error) == HVD_OK, "%s", seat->error.text);
        while (atomic_load(&told) < 2) {
            bool progress;
            CHECK(seat->plane->poll(seat->opened, &work, &progress, &seat->error) == HVD_AGAIN,
                  "without the others: %s", seat->error.text);
            sched_yield();
        }
    }
}

int main(void)
{
    static const int three[] = {0, 0, 1}, four[] = {0, 1, 0, 1}, pairs[] = {0, 0, 1, 1},
                     ragged[] = {0, 0, 0, 1, 1, 2, 2, 2}, wide[] = {0, 0, 0, 0, 1, 1, 1, 1};
    static enum how ways[] = {ENDS, BABBLES};
    static const struct {
        int size;
        const int *host_of;
    } worlds[] = {{3, three}, {4, four}, {8, ragged}, {8, wide}};
    hosts_and_lanes_are_found();
    for (size_t i = 0; i < HVD_COUNT_OF(worlds); i++) {
        hvd_world_host_of = worlds[i].host_of;
        hvd_world_seats(HVD_WORLD_THREADS, worlds[i].size, "hier", &by_ring, bytes_cross_once, NULL);
    }
    hvd_world_host_of = wide;
    hvd_world_seats(HVD_WORLD_THREADS, 8, "hier", &any_order, bytes_cross_once, NULL);
    hvd_world_host_of = pairs;
    hvd_world_seats(HVD_WORLD_THREADS, 4, "hier", &any_order, halves_are_rounded_once, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, what_is_left_to_others, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 4, 100, it_fits_where_hosts_have_several_ranks, NULL);
    hvd_world_host_of = four;
    for (size_t i = 0; i < HVD_COUNT_OF(ways); i++) {
        atomic_store(&told, 0);
        hvd_world_seats(HVD_WORLD_THREADS, 4, "hier", &any_order, a_lane_is_lost, &ways[i]);
    }
    return 0;
}
