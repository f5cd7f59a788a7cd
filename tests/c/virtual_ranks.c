/* virtual_ranks.c - see virtual_ranks.h. */
#define _GNU_SOURCE
#include "virtual_ranks.h"

#include "streams.h"

#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>

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

struct virtual_plan virtual_choose(uint64_t seed, bool weak, uint64_t *choice, int *size)
{
    static const int cpus[] = {1, 2, 4, 8};
    *choice = seed * 0x9E3779B97F4A7C15u + 1;
    *size = 2 + (int)virtual_below(choice, 3);
    const char *world = crew_world((int)virtual_below(choice, 5));
    struct virtual_plan plan = {.seed = seed, .weak = weak, .cpus = cpus[virtual_below(choice, 4)]};
    plan.priorities = virtual_below(choice, 2);
    virtual_describe("%d ranks, %s, %s, %d CPUs%s", *size, world, plan.priorities ? "priorities" : "random", plan.cpus,
                     weak ? ", weak memory" : "");
    return plan;
}

struct met {
    uint64_t generation;
    int gone; /* a rank that has ended; -1: none */
};

static bool met(void *self)
{
    struct met *met = self;
    for (int rank = 0; rank < meeting.size; rank++)
        met->gone = virtual_stopped(rank) ? rank : met->gone;
    return meeting.generation > met->generation || met->gone >= 0;
}

static int gather(void *self, const void *mine, size_t bytes, void *all, char *text, size_t text_bytes)
{
    struct met met_at = {meeting.generation, -1};
    int rank = *(int *)self;
    char(*part)[BLOCK] = meeting.part[meeting.generation % 2];
    CHECK(bytes <= BLOCK);
    memcpy(part[rank], mine, bytes);
    if (++meeting.arrived == meeting.size)
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

static void *run_rank(void *self)
{
    int rank = (int)(intptr_t)self;
    rank_body(rank, meeting.size);
    return NULL;
}

void virtual_run(int size, void (*body)(int rank, int size))
{
    pthread_t thread[VIRTUAL_RANKS];
    meeting.size = size;
    rank_body = body;
    streams_open(size, 0);
    for (int rank = 0; rank < size; rank++)
        pthread_create(&thread[rank], NULL, run_rank, (void *)(intptr_t)rank);
    for (int rank = 0; rank < size; rank++)
        if (!virtual_stopped(rank))
            pthread_join(thread[rank], NULL);
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
