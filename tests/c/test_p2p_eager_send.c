/* test_p2p_eager_send.c - a message that leaves before its work is agreed on: it spares the sending later if the guess
 * was right, and nobody takes it for anything else if it was wrong. (That engines guess is test_speculation.c's.)
 */
#include "bucket.h"
#include "plane/p2p/run.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { COUNT = 2000 };

static uint64_t messages_out(const struct hvd_plane_arg *arg)
{
    uint64_t sum = 0;
    for (int rank = 0; rank < arg->size; rank++)
        sum += rank == arg->rank ? 0 : arg->link[rank]->counts.messages_out;
    return sum;
}

static void fill(float *values, int rank, int step)
{
    for (int i = 0; i < COUNT; i++)
        values[i] = (float)(rank * 3 + step + i % 7);
}

static void check(const float *values, int size, int step)
{
    for (int i = 0; i < COUNT; i++) {
        float wanted = (float)(3 * size * (size - 1) / 2 + size * (step + i % 7));
        CHECK(values[i] == wanted, "step %d, element %d: %g, not %g", step, i, (double)values[i], (double)wanted);
    }
}

static void do_step(struct hvd_seat *seat, uint64_t tag, int step)
{
    static _Thread_local float values[COUNT];
    struct hvd_piece piece;
    fill(values, seat->arg.rank, step);
    struct hvd_work work = hvd_bucket_sum(&piece, values, COUNT);
    work.tag = tag;
    hvd_seat_done(seat, &work);
    check(values, seat->arg.size, step);
}

/* This rank guesses tensor `tag`, and what it holds; how many messages left. */
static uint64_t guess(struct hvd_seat *seat, uint64_t tag, int step)
{
    static _Thread_local float values[COUNT];
    struct hvd_piece piece;
    uint64_t before = messages_out(&seat->arg);
    fill(values, seat->arg.rank, step);
    struct hvd_work work = hvd_bucket_sum(&piece, values, COUNT);
    work.tag = tag;
    seat->plane->foresee(seat->opened, &work);
    memset(values, 0x7f, sizeof values); /* it may not hold on to them */
    return messages_out(&seat->arg) - before;
}

static void right_and_wrong(struct hvd_seat *seat)
{
    const struct hvd_plane_arg *arg = &seat->arg;
    uint64_t others = (uint64_t)arg->size - 1, before = messages_out(arg), tag = 1;
    for (int step = 0; step < 5; step++, tag++) {
        CHECK(guess(seat, tag, step) == others, "rank %d: nothing leaves early", arg->rank);
        CHECK(guess(seat, tag, step) == 0, "rank %d: it leaves twice", arg->rank);
        do_step(seat, tag, step);
    }
    CHECK(messages_out(arg) - before == 5 * others, "rank %d: a right guess spares nothing", arg->rank);
    for (int step = 5; step < 200; step++, tag++) { /* one guesses wrong, others right, or not at all */
        if (arg->rank == step % arg->size)
            guess(seat, UINT64_C(1) << 40, step + 1000);
        else if (arg->rank % 2)
            guess(seat, tag, step);
        do_step(seat, tag, step);
    }
}

/* Who guesses wrong is quiet for a while, and longer each time; who was right once is not. */
static void wrong_guesses_become_rare(struct hvd_seat *seat)
{
    const struct hvd_plane_arg *arg = &seat->arg;
    int left = 0;
    for (int step = 0; step < 100; step++) {
        left += guess(seat, (uint64_t)step + 1000, step) > 0;
        do_step(seat, (uint64_t)step, step);
    }
    CHECK(left >= 3 && left <= 8, "%d of 100 wrong guesses left", left);
    while (guess(seat, 5000, 7) == 0) {
    }
    do_step(seat, 5000, 7);
    CHECK(guess(seat, 5001, 8) > 0, "rank %d: quiet after a right guess", arg->rank);
    do_step(seat, 5001, 8);
}

/* The kernel takes a part of the message only. */
static void parts_leave_later(struct hvd_seat *seat)
{
    const struct hvd_plane_arg *arg = &seat->arg;
    int small = 1;
    for (int rank = 0; rank < arg->size; rank++)
        if (rank != arg->rank)
            setsockopt(arg->link[rank]->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    CHECK(guess(seat, 1, 1) == 0, "rank %d: all of it left at once", arg->rank);
    hvd_world_meet(arg);
    do_step(seat, 1, 1);
    guess(seat, 99, 1000); /* wrong, and a part of it is here when the next one leaves */
    hvd_world_meet(arg);
    for (int step = 2; step < 20; step++)
        do_step(seat, (uint64_t)step, step);
}

static void sum_numbers(struct hvd_seat *seat)
{
    const struct hvd_plane_arg *arg = &seat->arg;
    int32_t values[200];
    struct hvd_piece piece;
    for (int i = 0; i < 200; i++)
        values[i] = arg->rank + i;
    struct hvd_work work = hvd_bucket_sum(&piece, values, HVD_COUNT_OF(values));
    work.dtype = HVD_DTYPE_int32;
    hvd_seat_done(seat, &work);
    for (int i = 0; i < 200; i++)
        CHECK(values[i] == arg->size * (arg->size - 1) / 2 + arg->size * i, "element %d: %d", i, values[i]);
}

/* At this cost algorithms are about as good for so many bytes, and which is better may hang on the size of elements. */
static void a_guess_chooses_for_nobody(const struct hvd_plane_arg *world, void *more)
{
    struct hvd_plane_arg arg = *world;
    struct hvd_seat seat;
    signed char bytes[600] = {0};
    struct hvd_piece piece;
    arg.link_cost = (struct hvd_cost){.alpha_ns = 10000, .beta_ps = 8000};
    hvd_seat_open(&seat, &arg, "p2p");
    struct hvd_work work = hvd_bucket_sum(&piece, bytes, HVD_COUNT_OF(bytes));
    work.dtype = HVD_DTYPE_int8;
    if (arg.rank == 0)
        seat.plane->foresee(seat.opened, &work);
    sum_numbers(&seat);
    hvd_seat_close(&seat);
}

/* An early message of more bytes than any has. */
static void a_boundless_one_is_refused(struct hvd_seat *seat)
{
    const struct hvd_plane_arg *arg = &seat->arg;
    if (arg->rank == 1) {
        struct hvd_p2p_head head = {123, 0, 1, HVD_EARLY_BYTES + 1};
        CHECK(write(arg->link[0]->fd, &head, sizeof head) == sizeof head, "written");
    } else {
        static _Thread_local float values[COUNT];
        struct hvd_piece piece;
        struct hvd_work work = hvd_bucket_sum(&piece, values, COUNT);
        int code = hvd_seat_do(seat, &work);
        CHECK(code == HVD_EINTERNAL && seat->error.culprit == 1 && strstr(seat->error.text, "please report"), "%d: %s",
              code, seat->error.text);
    }
}

int main(void)
{
    for (int size = 2; size <= 4; size++) {
        hvd_world_seats(HVD_WORLD_THREADS, size, "p2p", NULL, right_and_wrong, NULL);
        hvd_world_seats(HVD_WORLD_THREADS, size, "p2p", NULL, parts_leave_later, NULL);
    }
    hvd_world_seats(HVD_WORLD_PROCESSES, 2, "p2p", NULL, right_and_wrong, NULL);
    hvd_world_seats(HVD_WORLD_THREADS, 2, "p2p", NULL, wrong_guesses_become_rare, NULL);
    hvd_world_run(HVD_WORLD_THREADS, 7, 100, a_guess_chooses_for_nobody, NULL);
    hvd_world_seats(HVD_WORLD_THREADS, 2, "p2p", NULL, a_boundless_one_is_refused, NULL);
    return 0;
}
