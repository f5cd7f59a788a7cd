/* baton.c - see baton.h. One mutex, a condition for each rank, and who has moved nothing since somebody last did.
 *
 * Who has moved something often goes on: a change of threads is what costs. A rank that could not is asked again only
 * after somebody has moved something. A lost peer is looked for one link a poll, though, so
 * before time goes on every rank is asked as often as there are ranks once any of them is gone.
 */
#include "baton.h"

#include "check.h"

#include <pthread.h>
#include <string.h>

struct hvd_baton {
    pthread_mutex_t lock;
    pthread_cond_t turn[HVD_RANKS_MAX];
    struct hvd_sim_net *net;
    uint64_t seed;
    int size, holder;
    int vain[HVD_RANKS_MAX]; /* times that a rank has looked since something last moved */
    bool ended[HVD_RANKS_MAX];
    bool meets[HVD_RANKS_MAX];
};

struct hvd_baton *hvd_baton_new(int size, uint64_t seed, const struct hvd_sim_line *line)
{
    struct hvd_baton *baton = calloc(1, sizeof *baton);
    CHECK(baton && (baton->net = hvd_sim_open(size, seed, line)), "no memory");
    pthread_mutex_init(&baton->lock, NULL);
    for (int rank = 0; rank < size; rank++)
        pthread_cond_init(&baton->turn[rank], NULL);
    baton->size = size;
    baton->seed = seed;
    return baton;
}

struct hvd_sim_net *hvd_baton_net(struct hvd_baton *baton)
{
    return baton->net;
}

uint64_t hvd_baton_free(struct hvd_baton *baton)
{
    uint64_t now_ns = baton->net->now_ns;
    for (int rank = 0; rank < baton->size; rank++)
        pthread_cond_destroy(&baton->turn[rank]);
    pthread_mutex_destroy(&baton->lock);
    hvd_sim_close(baton->net);
    free(baton);
    return now_ns;
}

/* Something has changed. */
static void all_may_look(struct hvd_baton *baton)
{
    memset(baton->vain, 0, (size_t)baton->size * sizeof baton->vain[0]);
}

/* How often a rank must have looked in vain before time may go on. */
static int patience(const struct hvd_baton *baton)
{
    for (int rank = 0; rank < baton->size; rank++)
        if (baton->net->gone_ns[rank] <= baton->net->now_ns)
            return baton->size + 1;
    return 1;
}

static void stuck(const struct hvd_baton *baton)
{
    char who[1024] = "";
    for (int rank = 0; rank < baton->size; rank++)
        snprintf(who + strlen(who), sizeof who - strlen(who), " %d %s,", rank,
                 baton->ended[rank]   ? "is done"
                 : baton->meets[rank] ? "waits for all"
                                      : "works");
    CHECK(false, "at %llu ns nothing moves and nothing is on its way: rank%s and that for ever",
          (unsigned long long)baton->net->now_ns, who);
}

/* Under the lock: choose who is next. */
static void choose(struct hvd_baton *baton)
{
    for (;;) {
        int ready[HVD_RANKS_MAX], count = 0, alive = 0, most = patience(baton);
        for (int rank = 0; rank < baton->size; rank++) {
            alive += !baton->ended[rank];
            if (!baton->ended[rank] && !baton->meets[rank] && baton->vain[rank] < most)
                ready[count++] = rank;
        }
        if (alive == 0)
            return;
        if (count > 0) {
            baton->holder = ready[hvd_sim_below(&baton->seed, (uint64_t)count)];
            pthread_cond_signal(&baton->turn[baton->holder]);
            return;
        }
        if (!hvd_sim_advance(baton->net))
            stuck(baton);
        all_may_look(baton);
    }
}

static void wait_for_it(struct hvd_baton *baton, int rank)
{
    while (baton->holder != rank)
        pthread_cond_wait(&baton->turn[rank], &baton->lock);
}

void hvd_baton_begin(struct hvd_baton *baton, int rank)
{
    pthread_mutex_lock(&baton->lock);
    wait_for_it(baton, rank); /* rank 0 has it from the start; a signal before this is not missed: holder tells */
    pthread_mutex_unlock(&baton->lock);
}

/* All who are left have come. */
static void meet_if_all(struct hvd_baton *baton)
{
    bool any = false;
    for (int rank = 0; rank < baton->size; rank++) {
        if (!baton->ended[rank] && !baton->meets[rank])
            return;
        any |= baton->meets[rank];
    }
    if (!any)
        return;
    memset(baton->meets, 0, (size_t)baton->size * sizeof baton->meets[0]);
    all_may_look(baton);
}

void hvd_baton_end(struct hvd_baton *baton, int rank)
{
    pthread_mutex_lock(&baton->lock);
    baton->ended[rank] = true;
    all_may_look(baton);
    meet_if_all(baton);
    choose(baton);
    pthread_mutex_unlock(&baton->lock);
}

void hvd_baton_pass(struct hvd_baton *baton, int rank, bool moved)
{
    pthread_mutex_lock(&baton->lock);
    if (moved)
        all_may_look(baton);
    else
        baton->vain[rank]++;
    if (!moved || hvd_sim_below(&baton->seed, 4) == 0) {
        choose(baton);
        wait_for_it(baton, rank);
    }
    pthread_mutex_unlock(&baton->lock);
}

void hvd_baton_meet(struct hvd_baton *baton, int rank)
{
    pthread_mutex_lock(&baton->lock);
    baton->meets[rank] = true;
    all_may_look(baton);
    meet_if_all(baton);
    choose(baton);
    wait_for_it(baton, rank);
    pthread_mutex_unlock(&baton->lock);
}
