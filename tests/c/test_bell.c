/* test_bell.c - a waiting thread takes the bell from the engine thread and others give it back, again and again: what
 * epoll has heard last is what the engine remembers. Else an engine thread would sleep while its host rings.
 */
#define _GNU_SOURCE
#include "crew.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { TURNS = 30000, LOOKS = 300 };

static _Atomic bool over;

/* What epoll has of the bell, as the kernel tells. */
static unsigned watched(const struct hvd_engine *engine)
{
    char path[64], line[256];
    unsigned fd, events, found = 0;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", engine->epoll);
    FILE *file = fopen(path, "re");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "tfd: %u events: %x", &fd, &events) == 2 && (int)fd == engine->bell)
            found = events;
    fclose(file);
    CHECK(found); /* errors are watched in any case */
    return found;
}

static void *ring(void *self)
{
    struct hvd_engine *engine = self;
    int taken = 0;
    for (int i = 0; i < TURNS || taken < LOOKS; i++) {
        taken += atomic_load(&engine->bell_masked);
        hvd_turn_ring(engine);
        if (i % (TURNS / LOOKS))
            continue;
        pthread_mutex_lock(&engine->bell_lock);
        bool masked = atomic_load(&engine->bell_masked);
        unsigned events = watched(engine);
        pthread_mutex_unlock(&engine->bell_lock);
        CHECK(masked ? !(events & EPOLLIN) : (events & EPOLLIN) && (events & EPOLLET));
    }
    atomic_store(&over, true);
    return NULL;
}

static void one_waits_while_another_rings(struct hvd_engine *engine, int rank, int size)
{
    float memory = 1;
    char text[HVD_TEXT_MAX] = "";
    struct hvd_error error = {0};
    pthread_t ringer;
    CHECK_CODE(engine != NULL && size == 2, 1, crew_open_error.text);
    struct hvd_request request = crew_sum("late", &memory, 1);
    if (rank == 0)
        CHECK(pthread_create(&ringer, NULL, ring, engine) == 0);
    while (rank == 1 && !atomic_load(&over))
        usleep(1000);
    CHECK_CODE(crew_wait(engine, hvd_engine_submit(engine, &request, &error), text), HVD_OK, text);
    CHECK(memory == 2);
    if (rank == 0)
        CHECK(pthread_join(ringer, NULL) == 0);
}

int main(void)
{
    crew_deadline(120);
    CHECK(strstr(crew_world(1), "p2p")); /* where a waiter listens to streams itself */
    crew_threads(2, one_waits_while_another_rings);
    return 0;
}
