/* test_choice.c - a plane and an algorithm asked for by name: taken, unknown, or not to be had. */
#include "crew.h"

#include "boot_memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

struct asked {
    struct hvd_boot_seat seat;
    const char *plane, *algo, *used; /* used NULL: refused, with `says` in the text */
    const char *says;
    int fd; /* to the other rank; -1: none */
};

static void *ask(void *self)
{
    struct asked *asked = self;
    int row[2] = {-1, -1}, size = asked->seat.memory->size;
    struct hvd_options options = crew_options(asked->seat.rank, size);
    options.plane = asked->plane;
    options.algo = asked->algo;
    if (asked->fd >= 0) {
        row[1 - asked->seat.rank] = asked->fd;
        options.tensor_fd = row;
    }
    struct hvd_error error = {0};
    struct hvd_engine *engine;
    int code = hvd_engine_open(&options, hvd_boot_memory_allgather, &asked->seat, true, 1, &engine, &error);
    CHECK_CODE(code, asked->used ? HVD_OK : HVD_EINIT, error.text);
    if (asked->used) {
        CHECK_CODE(strcmp(engine->global->planes[0].plane->name, asked->used), 0, asked->used);
        crew_barrier(engine);
        hvd_engine_leave(engine, hvd_engine_leave_until(engine));
        hvd_engine_stop(engine);
        hvd_engine_free(engine);
    } else {
        CHECK_CODE(strstr(error.text, asked->says) != NULL, 1, error.text);
    }
    return NULL;
}

/* Both ranks ask the same. The streams are the engine's, whatever becomes of it. */
static void both_ask(int size, const char *plane, const char *algo, bool linked, const char *used, const char *says)
{
    struct hvd_boot_memory memory;
    struct asked asked[2];
    pthread_t thread[2];
    int pair[2] = {-1, -1};
    CHECK(!linked || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    hvd_boot_memory_open(&memory, size);
    for (int rank = 0; rank < size; rank++) {
        asked[rank] = (struct asked){{&memory, rank}, plane, algo, used, says, pair[rank]};
        CHECK(pthread_create(&thread[rank], NULL, ask, &asked[rank]) == 0);
    }
    for (int rank = 0; rank < size; rank++)
        pthread_join(thread[rank], NULL);
    for (int end = 0; end < 2; end++)
        CHECK(!linked || fcntl(pair[end], F_GETFD) < 0);
    hvd_boot_memory_close(&memory);
}

int main(void)
{
    crew_deadline(60);
    both_ask(2, NULL, NULL, false, "shm", NULL);
    both_ask(2, NULL, NULL, true, "shm", NULL);
    both_ask(2, "shm", NULL, true, "shm", NULL);
    both_ask(2, "p2p", NULL, true, "p2p", NULL);
    both_ask(2, "p2p", "ring", true, "p2p", NULL);
    both_ask(1, "p2p", NULL, false, "self", NULL); /* nobody to talk to */
    both_ask(2, "p2p", NULL, false, NULL, "plane p2p, which HVDLITE_PLANE names, does not work here: plane p2p needs");
    both_ask(2, "self", NULL, true, NULL, "plane self serves one rank");
    both_ask(2, "infiniband", NULL, true, NULL, "there is no plane 'infiniband' (HVDLITE_PLANE): this build has ");
    both_ask(2, "", NULL, true, NULL, "there is no plane ''");
    both_ask(2, NULL, "bubble", true, NULL, "there is no algorithm 'bubble' (HVDLITE_ALGO): this build has binomial, ");
    return 0;
}
