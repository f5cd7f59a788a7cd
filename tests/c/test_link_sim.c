/* test_link_sim.c - the simulated network keeps the promises that tests build on: streams stay ordered and whole, links
 * overtake each other, time is the formula, an end is seen when it must be, a seed runs the same way again, and ranks
 * that wait for each other are found out.
 */
#include "bucket.h"
#include "check.h"
#include "netsim.h"
#include "world.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 10000 };

static const struct hvd_sim_line rough = {
    .delay_ns = 1000, .jitter_ns = 50000, .byte_ps = 1000, .room = 3000, .piece = 700, .ragged = true};

static struct hvd_link end[3][3];

static struct hvd_sim_net *network(int size, uint64_t seed, const struct hvd_sim_line *line)
{
    struct hvd_sim_net *net = hvd_sim_open(size, seed, line);
    CHECK(net, "no memory");
    for (int a = 0; a < size; a++)
        for (int b = 0; b < size; b++)
            if (a != b)
                hvd_sim_link(net, a, b, &end[a][b]);
    return net;
}

static size_t put(struct hvd_link *link, const void *bytes, size_t count)
{
    struct hvd_error error = {0};
    size_t moved;
    CHECK(link->kind->send(link, bytes, count, &moved, &error) == HVD_OK, "%s", error.text);
    return moved;
}

static size_t get(struct hvd_link *link, void *bytes, size_t count)
{
    struct hvd_error error = {0};
    size_t moved;
    CHECK(link->kind->recv(link, bytes, count, &moved, &error) == HVD_OK, "%s", error.text);
    return moved;
}

/* Rank 0 sends to 1 and 2 at once; returns in how many steps of the clock 2 had more than 1. */
static int exchange(uint64_t seed, uint64_t *digest)
{
    static unsigned char sent[3][COUNT], got[3][COUNT];
    struct hvd_sim_net *net = network(3, seed, &rough);
    size_t out[3] = {0}, in[3] = {0};
    int overtaken = 0;
    for (int i = 0; i < COUNT; i++)
        for (int to = 1; to < 3; to++)
            sent[to][i] = (unsigned char)(i * 31 + i / 251 + to);
    while (in[1] < COUNT || in[2] < COUNT) {
        size_t moved = 0;
        for (int to = 1; to < 3; to++) {
            moved += put(&end[0][to], sent[to] + out[to], COUNT - out[to]);
            out[to] = end[0][to].counts.bytes_out;
            moved += get(&end[to][0], got[to] + in[to], COUNT - in[to]);
            in[to] = end[to][0].counts.bytes_in;
            CHECK(out[to] - in[to] <= rough.room, "%zu bytes are under way", out[to] - in[to]);
            CHECK(end[0][to].wants_out == (out[to] < COUNT), "a send that was cut short says so");
        }
        if (moved == 0)
            CHECK(hvd_sim_advance(net), "nothing is on its way, %zu and %zu have come", in[1], in[2]);
        overtaken += in[2] > in[1] ? 1 : -1;
    }
    CHECK(memcmp(sent[1], got[1], COUNT) == 0 && memcmp(sent[2], got[2], COUNT) == 0, "other bytes came");
    CHECK(!hvd_sim_advance(net), "all has come, and time goes on");
    *digest = net->digest;
    hvd_sim_close(net);
    return overtaken;
}

static void streams_stay_ordered_and_links_overtake_each_other(void)
{
    int first = 0, second = 0;
    for (uint64_t seed = 0; seed < 50; seed++) {
        uint64_t digest, again, other;
        int overtaken = exchange(seed, &digest);
        first += overtaken < 0;
        second += overtaken > 0;
        exchange(seed, &again);
        exchange(seed + 1000, &other);
        CHECK(digest == again && digest != other, "seed %d", (int)seed);
    }
    CHECK(first > 10 && second > 10, "%d times the first was ahead, %d times the second", first, second);
}

/* Two links of one rank share its port: each byte leaves after all before it. */
static void time_is_the_formula(void)
{
    const struct hvd_sim_line line = {.delay_ns = 5000, .byte_ps = 8000, .room = 1 << 20, .piece = 1 << 20};
    struct hvd_sim_net *net = network(3, 1, &line);
    static unsigned char bytes[COUNT], got[COUNT];
    CHECK(put(&end[0][1], bytes, COUNT) == COUNT && put(&end[0][2], bytes, COUNT) == COUNT, "room for all");
    CHECK(get(&end[1][0], got, COUNT) == 0, "it takes time");
    CHECK(hvd_sim_advance(net) && net->now_ns == COUNT * 8 + 5000, "%llu ns", (unsigned long long)net->now_ns);
    CHECK(get(&end[1][0], got, COUNT) == COUNT && get(&end[2][0], got, COUNT) == 0, "one after the other");
    CHECK(hvd_sim_advance(net) && net->now_ns == 2 * COUNT * 8 + 5000, "%llu ns", (unsigned long long)net->now_ns);
    CHECK(get(&end[2][0], got, COUNT) == COUNT && !hvd_sim_advance(net), "that is all");
    hvd_sim_close(net);
}

static void must_be_lost(int code, const struct hvd_error *error, int culprit)
{
    char name[16];
    snprintf(name, sizeof name, "rank %d", culprit);
    CHECK(code == HVD_EPEER && error->culprit == culprit && strstr(error->text, name), "%d: %s", code, error->text);
}

/* Rank 1 sends and is gone: what had arrived by then is read first, and the rest is cut off at some byte. */
static void a_rank_that_is_gone_ends_its_streams(void)
{
    const struct hvd_sim_line line = {.delay_ns = 100, .byte_ps = 1000, .room = 1 << 20, .piece = 10};
    struct hvd_sim_net *net = network(2, 1, &line);
    struct hvd_error error = {0}, own = {0}, late = {0};
    unsigned char bytes[100] = {0};
    size_t moved, come = 0;
    for (int i = 0; i < 10; i++)
        put(&end[1][0], bytes, 10); /* each takes 10 ns */
    hvd_sim_drop(net, 1, 45);
    CHECK(end[0][1].kind->ended(&end[0][1], &error) == HVD_OK, "it is there yet");
    while (hvd_sim_advance(net) && net->now_ns < 145)
        ;
    CHECK(net->now_ns == 145, "the end comes after %llu ns", (unsigned long long)net->now_ns);
    must_be_lost(end[0][1].kind->ended(&end[0][1], &error), &error, 1);
    CHECK(end[1][0].kind->send(&end[1][0], bytes, 1, &moved, &own) == HVD_EPEER, "it sends no more");
    CHECK(end[0][1].kind->send(&end[0][1], bytes, 1, &moved, &late) == HVD_EPEER, "it gets no more");
    error = (struct hvd_error){0};
    while ((moved = 0, end[0][1].kind->recv(&end[0][1], bytes, 100, &moved, &error)) == HVD_OK)
        come += moved;
    CHECK(come == 40 && end[0][1].over, "%zu bytes came", come);
    must_be_lost(HVD_EPEER, &error, 1);
    CHECK(!hvd_sim_advance(net), "nothing is to come");
    hvd_sim_close(net);
}

static void a_link_that_is_closed_ends_behind_its_bytes(void)
{
    struct hvd_sim_net *net = network(2, 7, &rough);
    struct hvd_error error = {0};
    unsigned char bytes[2000] = {0};
    size_t sent = 0, come = 0, moved;
    while (sent < sizeof bytes)
        sent += put(&end[1][0], bytes, sizeof bytes - sent);
    end[1][0].kind->close(&end[1][0]);
    for (;;) {
        int code = end[0][1].kind->recv(&end[0][1], bytes, sizeof bytes, &moved, &error);
        if (code != HVD_OK)
            break;
        come += moved;
        if (moved == 0)
            CHECK(hvd_sim_advance(net), "the end never comes");
    }
    CHECK(come == sent, "%zu of %zu bytes", come, sent);
    must_be_lost(HVD_EPEER, &error, 1);
    hvd_sim_close(net);
}

static void wait_for_nothing(const struct hvd_plane_arg *arg, void *more)
{
    void *opened;
    float value = 1;
    struct hvd_piece piece;
    struct hvd_error error = {0};
    struct hvd_work work = hvd_bucket_sum(&piece, &value, 1);
    const struct hvd_plane *plane = hvd_world_open(arg, "p2p", &opened);
    if (arg->rank > 0)
        hvd_world_do(arg, plane, opened, &work, &error);
    hvd_world_meet(arg);
    plane->close(opened);
}

/* In a process of its own, since that ends the test. */
static void ranks_that_wait_for_each_other_are_found_out(void)
{
    int says[2], status;
    char text[500] = "";
    fflush(NULL);
    CHECK(pipe(says) == 0, "a pipe");
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
        dup2(says[1], 2);
        hvd_world_sim(3, 1, &rough, 60, wait_for_nothing, NULL);
        _exit(0);
    }
    close(says[1]);
    for (size_t at = 0, got; at < sizeof text - 1; at += got)
        if ((ssize_t)(got = (size_t)read(says[0], text + at, sizeof text - 1 - at)) <= 0)
            break;
    close(says[0]);
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1, "status %d", status);
    CHECK(strstr(text, "nothing is on its way: rank 0 waits for all, 1 works, 2 works"), "it said: %s", text);
}

int main(void)
{
    ranks_that_wait_for_each_other_are_found_out();
    streams_stay_ordered_and_links_overtake_each_other();
    time_is_the_formula();
    a_rank_that_is_gone_ends_its_streams();
    a_link_that_is_closed_ends_behind_its_bytes();
    return 0;
}
