/* virtual_ranks.c - see virtual_ranks.h. */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include "streams.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BLOCK = 8192 };
static struct meeting {
    int size, arrived;
    uint64_t generation;
    char part[2][VIRTUAL_RANKS][BLOCK]; /* a rank may write its next part while another still reads this one */
} meeting;
static void (*rank_body)(int rank, int size);

unsigned virtual_below(uint64_t *choice, unsigned n)
{
    *choice = *choice * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(*choice >> 33) % n;
}

struct virtual_plan virtual_choose(uint64_t seed, bool weak, uint64_t *choice, int *size, int *world)
{
    static const int cpus[] = {1, 2, 4, 8};
    *choice = seed * 0x9E3779B97F4A7C15u + 1;
    *size = 2 + (int)virtual_below(choice, 3);
    *world = (int)virtual_below(choice, 5);
    const char *called = crew_world(*world);
    struct virtual_plan plan = {.seed = seed, .weak = weak, .cpus = cpus[virtual_below(choice, 4)]};
    plan.priorities = virtual_below(choice, 2);
    virtual_describe("%d ranks, %s, %s, %d CPUs%s", *size, called, plan.priorities ? "priorities" : "random", plan.cpus,
                     weak ? ", weak memory" : "");
    return plan;
}

struct met {
    uint64_t generation;
    int gone; /* a rank that has ended; -1: none */
};

static int gone(void)
{
    int gone = -1;
    for (int rank = 0; rank < meeting.size; rank++)
        gone = virtual_stopped(rank) ? rank : gone;
    return gone;
}

static bool met(void *self)
{
    struct met *met = self;
    met->gone = gone();
    return meeting.generation > met->generation || met->gone >= 0;
}

static int gather(void *self, const void *mine, size_t bytes, void *all, char *text, size_t text_bytes)
{
    struct met met_at = {meeting.generation, -1};
    int rank = *(int *)self;
    char(*part)[BLOCK] = meeting.part[meeting.generation % 2];
    CHECK(bytes <= BLOCK);
    memcpy(part[rank], mine, bytes);
    if (++meeting.arrived == meeting.size && gone() < 0) /* one that has ended fails it for all */
        meeting.arrived = 0, meeting.generation++;
    virtual_news();
    virtual_wait(met, &met_at, "the other ranks at init");
    if (meeting.generation == met_at.generation) {
        hvd_text_write(text, text_bytes, HVD121 "rank %d ended during init", met_at.gone);
        return HVD_EPEER;
    }
    for (int other = 0; other < meeting.size; other++)
        memcpy((char *)all + bytes * (size_t)other, part[other], bytes);
    return HVD_OK;
}

int virtual_open(int rank, int size, int life, bool in_process, struct hvd_engine **engine, struct hvd_error *error)
{
    memset(error, 0, sizeof *error);
    return crew_open(rank, size, life, gather, &rank, in_process, engine, error);
}

void virtual_close(struct hvd_engine *engine)
{
    hvd_engine_leave(engine, hvd_engine_leave_until(engine));
    hvd_engine_stop(engine);
    hvd_engine_free(engine);
}

/* The store. */
enum { FRAME_HEAD = 13, FRAME_MAX = 2048, TYPE_ABORT = 5, TYPE_LOST = 6 }; /* length, type, culprit, code; text */
enum virtual_store virtual_store;
static int store_end[VIRTUAL_RANKS][2]; /* the rank's, the store's */
static bool left[VIRTUAL_RANKS];

static bool take(int fd, uint8_t *bytes, size_t count)
{
    for (size_t done = 0; done < count;) {
        poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1);
        ssize_t got = recv(fd, bytes + done, count - done, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN))
            return false;
        done += got > 0 ? (size_t)got : 0;
    }
    return true;
}

static void tell(int from, const uint8_t *frame, size_t bytes)
{
    for (int rank = 0; rank < meeting.size; rank++)
        if (rank != from && store_end[rank][1])
            send(store_end[rank][1], frame, bytes, MSG_NOSIGNAL);
}

static void *run_store(void *self)
{
    (void)self;
    for (int open = meeting.size; open > 0;) {
        struct pollfd fds[VIRTUAL_RANKS];
        for (int rank = 0; rank < meeting.size; rank++)
            fds[rank] = (struct pollfd){.fd = store_end[rank][1] ? store_end[rank][1] : -1, .events = POLLIN};
        poll(fds, (nfds_t)meeting.size, -1);
        for (int rank = 0; rank < meeting.size; rank++) {
            uint8_t frame[FRAME_MAX];
            uint32_t length = 0, number;
            if (fds[rank].fd < 0 || !fds[rank].revents)
                continue;
            if (take(fds[rank].fd, frame, 4)) {
                memcpy(&length, frame, 4);
                length = ntohl(length);
                CHECK(length <= FRAME_MAX - 4 && take(fds[rank].fd, frame + 4, length));
                frame[4] = frame[4] == TYPE_ABORT ? TYPE_LOST : 0;
            } else {
                close(fds[rank].fd);
                store_end[rank][1] = 0, open--;
                length = FRAME_HEAD - 4 + (uint32_t)sprintf((char *)frame + FRAME_HEAD, "rank %d is lost", rank);
                frame[4] = left[rank] ? 0 : TYPE_LOST;
                number = htonl(length), memcpy(frame, &number, 4);
                number = htonl((uint32_t)rank), memcpy(frame + 5, &number, 4);
                number = htonl((uint32_t)HVD_EPEER), memcpy(frame + 9, &number, 4);
            }
            if (frame[4])
                tell(rank, frame, 4 + length);
        }
    }
    return NULL;
}

static void *run_rank(void *self)
{
    int rank = (int)(intptr_t)self;
    pthread_t store;
    if (virtual_store) { /* a descriptor of this rank's, for its end */
        crew_store_fd[rank] = dup(store_end[rank][0]);
        close(store_end[rank][0]);
    }
    bool keeps = virtual_store == VIRTUAL_STORE_IN_RANK_0 && rank == 0;
    if (keeps)
        pthread_create(&store, NULL, run_store, NULL);
    rank_body(rank, meeting.size);
    left[rank] = true;
    if (virtual_store)
        close(crew_store_fd[rank]);
    if (keeps && !virtual_stopped_ns())
        pthread_join(store, NULL);
    return NULL;
}

void virtual_run(int size, void (*body)(int rank, int size))
{
    pthread_t thread[VIRTUAL_RANKS], store;
    meeting.size = size;
    rank_body = body;
    streams_open(size, 0);
    for (int rank = 0; rank < size && virtual_store; rank++)
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, store_end[rank]) == 0);
    for (int rank = 0; rank < size; rank++)
        pthread_create(&thread[rank], NULL, run_rank, (void *)(intptr_t)rank);
    if (virtual_store == VIRTUAL_STORE)
        pthread_create(&store, NULL, run_store, NULL);
    for (int rank = 0; rank < size; rank++)
        pthread_join(thread[rank], NULL);
    if (virtual_store == VIRTUAL_STORE && !virtual_stopped_ns()) /* a frozen rank does not close its connection */
        pthread_join(store, NULL);
    streams_close();
}

void *virtual_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

void virtual_poison(void *memory, size_t bytes)
{
    mprotect(memory, bytes, PROT_NONE);
}
