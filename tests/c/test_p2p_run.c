/* test_p2p_run.c - the interpreter's rules where no algorithm of ours needs them, with an algorithm made for it.
 *
 * Step 0: rank 0 sends its buffer to rank 1. Step 1: rank 2 sends its own to rank 0, over the same range. Nothing but
 * the rule keeps rank 0 from taking that in before rank 1 has all of what was there: rank 1 does not read for a long
 * time.
 *
 * And two ranks that exchange a large buffer over signed links, whose sockets hold less than a record.
 */
#include "check.h"
#include "plane/p2p/run.h"

#include <string.h>
#include <sys/socket.h>

enum { RANKS = 3, COUNT = 1 << 20 };

static bool can(int kind, int size)
{
    return kind == HVD_BROADCAST && size == RANKS;
}

static int steps(struct hvd_shape *shape)
{
    return 2;
}

static void step(const struct hvd_shape *shape, int i, struct hvd_step *step)
{
    int sender = i == 0 ? 0 : 2, receiver = i == 0 ? 1 : 0;
    if (shape->rank == sender) {
        step->to = receiver;
        step->send_count = shape->count;
    } else if (shape->rank == receiver) {
        step->from = sender;
        step->recv_count = shape->count;
    }
}

static const struct hvd_algo replaces = {"replaces", true, can, steps, step, false, 0};

static struct hvd_link end[RANKS][RANKS], *link_of[RANKS][RANKS];
static struct hvd_p2p_run run[RANKS];
static int32_t values[RANKS][COUNT];
static unsigned char block[RANKS][HVD_P2P_BLOCK];

static void connect_all(void)
{
    for (int a = 0; a < RANKS; a++)
        for (int b = 0; b < a; b++) {
            int pair[2];
            struct hvd_error error = {0};
            CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "a pair");
            CHECK(hvd_link_tcp.open(&end[a][b], pair[0], b, &error) == HVD_OK, "%s", error.text);
            CHECK(hvd_link_tcp.open(&end[b][a], pair[1], a, &error) == HVD_OK, "%s", error.text);
            link_of[a][b] = &end[a][b];
            link_of[b][a] = &end[b][a];
        }
}

static int go_on(int rank)
{
    struct hvd_error error = {0};
    bool progress = false;
    int code = hvd_p2p_step(&run[rank], &progress, &error);
    CHECK(code >= 0, "rank %d: %s", rank, error.text);
    return code;
}

static void exchange_over(int rank, int fd)
{
    static const unsigned char keys[HVD_KEY_PAIR_BYTES];
    struct hvd_error error = {0};
    struct hvd_link_signing signing = {keys, "tensors"};
    struct hvd_link *link = &end[rank][1 - rank];
    *link = (struct hvd_link){.self = &signing};
    CHECK(hvd_link_signed.open(link, fd, 1 - rank, &error) == HVD_OK, "%s", error.text);
    for (int i = 0; i < COUNT; i++)
        values[rank][i] = rank + i;
    run[rank] = (struct hvd_p2p_run){
        .algo = hvd_algo_named("exchange"),
        .shape = {.kind = HVD_ALLREDUCE, .rank = rank, .size = 2, .count = COUNT, .grain = COUNT},
        .dtype = HVD_DTYPE_int32,
        .element_bytes = sizeof(int32_t),
        .fold = {.op = HVD_OP_sum, .divide = 1, .factor = 1.0, .first = 1.0},
        .link = link_of[rank],
        .source = (const unsigned char *)values[rank],
        .buffer = (unsigned char *)values[rank],
        .block = block[rank],
    };
    hvd_p2p_begin(&run[rank]);
}

/* Rank 1 gets nothing through for a while, and so may combine a block at most: then nothing that comes is news. */
static void a_record_is_larger_than_its_way(int buffer, int other)
{
    int pair[2];
    struct pollfd news[RANKS];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "a pair");
    CHECK(setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer) == 0, "%d bytes", buffer);
    CHECK(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &other, sizeof other) == 0, "%d bytes", other);
    for (int rank = 0; rank < 2; rank++)
        exchange_over(rank, pair[rank]);
    go_on(0);
    for (int polls = 0; polls < 100; polls++)
        go_on(1);
    CHECK(run[1].out.at == sizeof run[1].head_out && values[1][0] == 1, "combined before it was sent");
    CHECK(hvd_p2p_watch(&run[1], news) == 1 && news[0].events & POLLOUT, "it sleeps until it can send");
    CHECK(other < (int)HVD_P2P_BLOCK || (run[1].block_fill == HVD_P2P_BLOCK && !(news[0].events & POLLIN)),
          "%zu bytes wait, and more would be news", run[1].block_fill);
    for (int polls = 0; go_on(0) + go_on(1) != 2 * HVD_OK; polls++)
        CHECK(polls < 100000, "%zu and %zu bytes are sent", run[0].out.at, run[1].out.at);
    for (int i = 0; i < COUNT; i++)
        CHECK(values[0][i] == 2 * i + 1 && values[1][i] == 2 * i + 1, "element %d", i);
    for (int rank = 0; rank < 2; rank++)
        hvd_link_signed.close(&end[rank][1 - rank]);
}

int main(void)
{
    connect_all();
    for (int rank = 0; rank < RANKS; rank++) {
        for (int i = 0; i < COUNT; i++)
            values[rank][i] = rank * COUNT + i;
        run[rank] = (struct hvd_p2p_run){
            .algo = &replaces,
            .shape = {.kind = HVD_BROADCAST, .rank = rank, .size = RANKS, .count = COUNT, .grain = COUNT},
            .dtype = HVD_DTYPE_int32,
            .element_bytes = sizeof(int32_t),
            .link = link_of[rank],
            .source = (const unsigned char *)values[rank],
            .buffer = (unsigned char *)values[rank],
            .block = block[rank],
        };
        hvd_p2p_begin(&run[rank]);
    }
    for (int polls = 0; polls < 100; polls++) { /* rank 1 does not read yet */
        CHECK(go_on(0) == HVD_AGAIN, "rank 0 cannot be done: nobody reads what it sends");
        go_on(2);
    }
    CHECK(run[0].in.at == 0, "rank 0 took in %zu bytes over what it has yet to send", run[0].in.at);
    for (int done = 0, polls = 0; done < RANKS; polls++) {
        done = 0;
        for (int rank = 0; rank < RANKS; rank++)
            done += go_on(rank) == HVD_OK;
        CHECK(polls < 100000, "%d of %d ranks are done", done, RANKS);
    }
    for (int i = 0; i < COUNT; i++)
        CHECK(values[1][i] == i && values[0][i] == 2 * COUNT + i, "element %d: %d and %d", i, values[1][i],
              values[0][i]);
    for (int a = 0; a < RANKS; a++)
        for (int b = 0; b < RANKS; b++)
            if (a != b)
                hvd_link_tcp.close(&end[a][b]);
    a_record_is_larger_than_its_way(4096, 1 << 18);
    a_record_is_larger_than_its_way(4096, 4096);
    return 0;
}
