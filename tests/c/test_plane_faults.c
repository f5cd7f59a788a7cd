/* test_plane_faults.c - a peer that runs other works, or writes nonsense, is named; nothing outside is touched. */
#include "bucket.h"
#include "kernel/kernel.h"
#include "plane/shm/lane.h"

#include <string.h>

static void expect_culprit(int code, const struct hvd_error *error, int culprit)
{
    char name[32];
    snprintf(name, sizeof name, "rank %d", culprit);
    CHECK(code == HVD_EINTERNAL && error->culprit == culprit && strstr(error->text, name), "%d, %d: %s", code,
          error->culprit, error->text);
}

static void ranks_that_start_different_works_both_say_so(struct hvd_seat *seat)
{
    float memory[100] = {0};
    struct hvd_piece piece;
    struct hvd_error again = {0};
    struct hvd_work work = hvd_bucket_sum(&piece, memory, seat->arg.rank == 0 ? 10 : 11);
    expect_culprit(hvd_seat_do(seat, &work), &seat->error, 1 - seat->arg.rank);
    expect_culprit(seat->plane->start(seat->opened, &work, &again), &again, 1 - seat->arg.rank);
}

/* Rank 1 does not work; it writes what it likes into its own lane. */
static void a_peer_far_ahead_is_named(struct hvd_seat *seat)
{
    struct hvd_shm *shm = seat->opened;
    if (seat->arg.rank == 1)
        hvd_shm_publish(shm, &shm->lane[1]->in[0], 5);
    hvd_world_meet(&seat->arg);
    if (seat->arg.rank == 0) {
        float memory[1] = {0};
        struct hvd_piece piece;
        struct hvd_work work = hvd_bucket_sum(&piece, memory, 1);
        expect_culprit(hvd_seat_do(seat, &work), &seat->error, 1);
    }
}

static void an_offset_outside_of_the_arena_is_refused(struct hvd_seat *seat)
{
    enum { COUNT = 4096 };
    const uint64_t *offset = seat->more;
    struct hvd_shm *shm = seat->opened;
    float *memory = seat->plane->alloc(seat->opened, COUNT * sizeof *memory);
    struct hvd_piece piece;
    struct hvd_work work = hvd_bucket_sum(&piece, memory, COUNT);
    work.flags = HVD_WORK_IN_PLANE;
    memset(memory, 0, COUNT * sizeof *memory);
    /* Rank 1 starts honestly, then changes what it said before rank 0 looks. */
    if (seat->arg.rank == 1) {
        CHECK(seat->plane->start(seat->opened, &work, &seat->error) == HVD_OK, "%s", seat->error.text);
        memcpy(shm->lane[1]->in[0].tiny, offset, sizeof *offset);
    }
    hvd_world_meet(&seat->arg);
    if (seat->arg.rank == 0)
        expect_culprit(hvd_seat_do(seat, &work), &seat->error, 1);
    hvd_world_meet(&seat->arg);
    seat->plane->release(memory);
}

static void a_world_too_large_or_apart_is_refused(const struct hvd_plane_arg *arg, void *more)
{
    for (int i = 0; hvd_planes[i]; i++) {
        bool self = strcmp(hvd_planes[i]->name, "self") == 0;
        if (!self && strcmp(hvd_planes[i]->name, "shm") != 0)
            continue;
        struct hvd_plane_arg other = *arg;
        struct hvd_error error = {0};
        void *opened;
        other.size = self ? 2 : HVD_LOCAL_MAX + 1;
        CHECK(hvd_planes[i]->open(&other, &opened, &error) == HVD_EINIT && error.text[0], "%s", error.text);
        other.size = 2;
        other.one_host = false;
        error = (struct hvd_error){0};
        CHECK(hvd_planes[i]->open(&other, &opened, &error) == HVD_EINIT && error.text[0], "%s", error.text);
    }
}

static struct hvd_share *no_share(void *self, size_t bytes, struct hvd_error *error)
{
    hvd_fail(error, HVD_ENOMEM, "no shared memory today");
    return NULL;
}

static void without_shared_memory_open_says_so(const struct hvd_plane_arg *arg, void *more)
{
    for (int i = 0; hvd_planes[i]; i++) {
        struct hvd_plane_arg other = *arg;
        struct hvd_error error = {0};
        void *opened;
        other.share = no_share;
        if (strcmp(hvd_planes[i]->name, "shm") == 0)
            CHECK(hvd_planes[i]->open(&other, &opened, &error) == HVD_ENOMEM && strstr(error.text, "today"), "%s",
                  error.text);
    }
}

int main(void)
{
    static uint64_t offsets[] = {UINT64_MAX, UINT64_MAX - 3, (uint64_t)64 << 20, ((uint64_t)64 << 20) - 4, 2, 1u << 31};
    hvd_world_seats(HVD_WORLD_THREADS, 2, "shm", NULL, ranks_that_start_different_works_both_say_so, NULL);
    hvd_world_seats(HVD_WORLD_THREADS, 2, "shm", NULL, a_peer_far_ahead_is_named, NULL);
    for (size_t i = 0; i < HVD_COUNT_OF(offsets); i++)
        hvd_world_seats(HVD_WORLD_THREADS, 2, "shm", NULL, an_offset_outside_of_the_arena_is_refused, &offsets[i]);
    hvd_world_run(HVD_WORLD_THREADS, 1, 30, a_world_too_large_or_apart_is_refused, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 2, 30, without_shared_memory_open_says_so, NULL);
    return 0;
}
