/* test_p2p_run.c - the interpreter's rules where no algorithm of ours needs them, with an algorithm made for it.
 *
 * Step 0: rank 0 sends its buffer to rank 1. Step 1: rank 2 sends its own to rank 0, over the same range. Nothing but
 * the rule keeps rank 0 from taking that in before rank 1 has all of what was there: rank 1 does not read for a long
 * time.
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
    return 0;
}
