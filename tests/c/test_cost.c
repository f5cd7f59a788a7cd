/* test_cost.c - what a message between hosts costs is measured within bounds, leaves nothing on the streams, is the
 * same on all ranks, and fails with a name when somebody is silent, gone or babbling.
 */
#include "crew.h"

#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LEADERS_MAX = 3 };
#define DELAY_NS UINT64_C(3000000)
#define BYTE_NS  UINT64_C(40)

struct leader {
    int rank, leaders;
    struct hvd_link link[LEADERS_MAX];
    struct hvd_cost cost;
    uint64_t deadline_ns;
    struct hvd_error error;
    int code;
};

static void *lead(void *self)
{
    struct leader *leader = self;
    int n = leader->leaders;
    leader->code = hvd_cost_probe(&leader->link[(leader->rank + 1) % n], &leader->link[(leader->rank + n - 1) % n],
                                  leader->deadline_ns, &leader->cost, &leader->error);
    return NULL;
}

static void open_link(struct leader *leader, int fd, int peer)
{
    struct hvd_error error = {0};
    CHECK_CODE(hvd_link_tcp.open(&leader->link[peer], fd, peer, &error), HVD_OK, error.text);
}

static void prepare(struct leader *leader, int leaders, uint64_t seconds)
{
    for (int rank = 0; rank < leaders; rank++)
        leader[rank] = (struct leader){
            .rank = rank, .leaders = leaders, .deadline_ns = hvd_now_ns() + seconds * UINT64_C(1000000000)};
}

static void check_clean(struct leader *leader)
{
    for (int peer = 0; peer < leader->leaders; peer++) {
        int unread = -1;
        if (peer == leader->rank)
            continue;
        CHECK(ioctl(leader->link[peer].fd, FIONREAD, &unread) == 0 && unread == 0);
        CHECK(leader->link[peer].counts.bytes_out == 0 && leader->link[peer].counts.bytes_in == 0);
    }
}

static void leaders_in_a_ring(int leaders)
{
    struct leader leader[LEADERS_MAX];
    pthread_t thread[LEADERS_MAX];
    prepare(leader, leaders, 60);
    for (int a = 0; a < leaders; a++)
        for (int b = 0; b < a; b++) {
            int pair[2];
            CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
            open_link(&leader[a], pair[0], b);
            open_link(&leader[b], pair[1], a);
        }
    for (int rank = 0; rank < leaders; rank++)
        CHECK(pthread_create(&thread[rank], NULL, lead, &leader[rank]) == 0);
    for (int rank = 0; rank < leaders; rank++)
        pthread_join(thread[rank], NULL);
    for (int rank = 0; rank < leaders; rank++) {
        CHECK_CODE(leader[rank].code, HVD_OK, leader[rank].error.text);
        CHECK(leader[rank].cost.alpha_ns > 0 && leader[rank].cost.beta_ps > 0);
        check_clean(&leader[rank]);
        for (int peer = 0; peer < leaders; peer++)
            if (peer != rank)
                hvd_link_tcp.close(&leader[rank].link[peer]);
    }
}

/* One direction of a line on which everything comes DELAY_NS later, and BYTE_NS for each byte. */
struct line {
    int from, to;
};

static void *carry(void *self)
{
    struct line *line = self;
    unsigned char bytes[64 << 10];
    for (;;) {
        ssize_t got = read(line->from, bytes, sizeof bytes);
        if (got <= 0)
            return NULL;
        struct timespec rest = {.tv_nsec = (long)(DELAY_NS + (uint64_t)got * BYTE_NS)};
        nanosleep(&rest, NULL);
        for (ssize_t sent = 0, part; sent < got; sent += part)
            if ((part = write(line->to, bytes + sent, (size_t)(got - sent))) < 0)
                return NULL;
    }
}

/* Is the time of a byte seen, too? A moment in which the machine does something else may hide it. */
static bool a_slow_line_is_seen(void)
{
    struct leader leader[2];
    struct line line[2];
    pthread_t thread[2], carrier[2];
    int end[2][2];
    prepare(leader, 2, 60);
    for (int rank = 0; rank < 2; rank++) {
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, end[rank]) == 0);
        open_link(&leader[rank], end[rank][0], 1 - rank);
    }
    for (int rank = 0; rank < 2; rank++) {
        line[rank] = (struct line){end[rank][1], end[1 - rank][1]};
        CHECK(pthread_create(&carrier[rank], NULL, carry, &line[rank]) == 0);
        CHECK(pthread_create(&thread[rank], NULL, lead, &leader[rank]) == 0);
    }
    for (int rank = 0; rank < 2; rank++)
        pthread_join(thread[rank], NULL);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_CODE(leader[rank].code, HVD_OK, leader[rank].error.text);
        CHECK(leader[rank].cost.alpha_ns >= DELAY_NS / 2);
        check_clean(&leader[rank]);
    }
    for (int rank = 0; rank < 2; rank++)
        hvd_link_tcp.close(&leader[rank].link[1 - rank]);
    for (int rank = 0; rank < 2; rank++)
        shutdown(end[rank][1], SHUT_RDWR);
    for (int rank = 0; rank < 2; rank++)
        pthread_join(carrier[rank], NULL);
    for (int rank = 0; rank < 2; rank++)
        close(end[rank][1]);
    return leader[0].cost.beta_ps + leader[1].cost.beta_ps >= BYTE_NS * 1000;
}

enum how { SILENT, GONE, BABBLES, BOASTS };

static void a_peer_that_does_not_answer(enum how how)
{
    static const int due[] = {HVD_EINIT, HVD_EPEER, HVD_EINTERNAL, HVD_EINTERNAL};
    struct leader leader[2];
    uint32_t boast[2] = {0x50, 1u << 20};
    unsigned char junk[64];
    int pair[2];
    prepare(leader, 2, 60);
    leader[0].deadline_ns = hvd_now_ns() + (how == SILENT ? UINT64_C(30000000) : UINT64_C(60000000000));
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    open_link(&leader[0], pair[0], 1);
    memset(junk, 0x11, sizeof junk);
    if (how == BABBLES)
        CHECK(write(pair[1], junk, sizeof junk) == sizeof junk);
    if (how == BOASTS)
        CHECK(write(pair[1], boast, sizeof boast) == sizeof boast);
    if (how == GONE)
        close(pair[1]);
    lead(&leader[0]);
    CHECK_CODE(leader[0].code, due[how], leader[0].error.text);
    CHECK(leader[0].error.culprit == 1 && strstr(leader[0].error.text, "rank 1"));
    hvd_link_tcp.close(&leader[0].link[1]);
    if (how != GONE)
        close(pair[1]);
}

static struct hvd_cost seen[8];

static void all_have_the_same(struct hvd_engine *engine, int rank, int size)
{
    seen[rank] = engine->link_cost;
    crew_barrier(engine);
    for (int other = 0; other < size; other++)
        CHECK(memcmp(&seen[other], &seen[rank], sizeof seen[rank]) == 0);
    CHECK((seen[rank].alpha_ns > 0 && seen[rank].beta_ps > 0) == (engine->hosts > 1));
    crew_barrier(engine);
}

int main(void)
{
    crew_deadline(200);
    for (int leaders = 2; leaders <= LEADERS_MAX; leaders++)
        leaders_in_a_ring(leaders);
    int times = 0;
    while (!a_slow_line_is_seen())
        CHECK(++times < 50);
    for (int how = SILENT; how <= BOASTS; how++)
        a_peer_that_does_not_answer((enum how)how);
    for (int w = 0; crew_world(w); w++)
        for (int size = 2; size <= 4; size++)
            crew_threads(size, all_have_the_same);
    return 0;
}
