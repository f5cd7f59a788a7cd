/* vote_tree.c - one round of votes between hosts: every edge of the tree carries one vote each way.
 *
 * To a neighbour goes the merge of everything on this side of the edge: the vote of this host and what has come from
 * the other neighbours. It leaves as soon as that is there. When votes have come over all edges, their merge with this
 * host's is the vote of all, the same bytes everywhere, since merging is associative and commutative. So there is no
 * root and no way down: 2 (h - 1) messages for h hosts, and as many steps one after the other as the tree is wide;
 * between two hosts a round is one message each way, both at once.
 *
 *     OPEN   "round r is open here": a host without news enters it, too. A vote says so as well; this is for whom none
 *            can be given yet. Not before all ranks of this host have voted: that takes them no user code
 *     VOTE   the merge of one side, and what rides with it (eager.c)
 *     ABORT  why the job ends; goes on to all neighbours
 *     ALIVE  "I wait, too": see silence.c
 *
 * COST. A round of learned tensors takes 120 bytes on each edge and direction, and 24 to open it, with two ranks as
 * with 10,000. On 1,250 hosts, at 25 us for a message, the plan arrives after 0.48 ms. Only a mismatch carries a bit
 * for each rank: 39 KB at the busiest host. examples/benchmarks/votes_tree.py simulates this with the code of this
 * file.
 *
 * A vote from a neighbour is checked by hvd_vote_check when its round has come, and must speak for exactly the ranks on
 * its side; frames are neighbor.c's.
 */
#include "vote_tree.h"

#include "../engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool hvd_tree_room(struct hvd_tree *tree, size_t vote_bytes)
{
    bool all = hvd_neighbor_vote_room(&tree->mine, &tree->mine_rides, vote_bytes);
    all &= hvd_neighbor_vote_room(&tree->part, &tree->part_rides, vote_bytes);
    for (int i = 0; i < tree->count; i++)
        all &= hvd_neighbor_room(&tree->near[i], vote_bytes);
    return all;
}

void hvd_tree_free_room(struct hvd_tree *tree)
{
    for (int i = 0; i < tree->count; i++) {
        free(tree->near[i].out);
        free(tree->near[i].in);
        free(tree->near[i].vote[0]);
        free(tree->near[i].vote[1]);
    }
    free(tree->mine);
    free(tree->part);
}

int hvd_tree_open(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error)
{
    int leader[HVD_RANKS_MAX], index_of[HVD_RANKS_MAX], near[HVD_NEAR_MAX], peer[HVD_NEAR_MAX];
    if (set->locals == set->size || set->here > 0)
        return HVD_OK;
    int hosts = hvd_tree_leaders(set->host_of, set->size, leader, index_of), at = index_of[set->rank];
    struct hvd_tree *tree = calloc(1, sizeof *tree);
    if (!tree)
        return hvd_fail(error, HVD_ENOMEM, HVD951 "rank %d: no memory for votes", engine->options.rank);
    set->tree = tree;
    tree->count = hvd_tree_neighbours(at, hosts, near);
    tree->vote_bytes = set->vote_bytes;
    for (int i = 0; i < tree->count; i++) {
        struct hvd_neighbor *one = &tree->near[i];
        one->rank = leader[near[i]];
        one->behind = hvd_tree_behind(index_of, set->size, at, near[i]);
        peer[i] = one->rank;
    }
    int code = HVD_OK;
    if (!set->vote_wires && engine->comm) {
        tree->polled = true;
        atomic_store(&engine->silent, true);
        atomic_store(&engine->polled, true);
        code = hvd_stream_open_mpi(engine, engine->comm, set->member, set->size, peer, tree->count, &set->vote_wires,
                                   error);
    }
    for (int i = 0; i < tree->count && code == HVD_OK; i++) {
        struct hvd_neighbor *one = &tree->near[i];
        one->link = set->vote_wires ? set->vote_wires->link[one->rank] : NULL;
        if (!one->link)
            return hvd_fail(error, HVD_EINIT, HVD115 "rank %d has no stream for votes to %s", engine->options.rank,
                            engine->who[set->member[one->rank]].called);
    }
    if (code != HVD_OK)
        return code;
    bool all = hvd_tree_room(tree, set->vote_bytes);
    return all ? HVD_OK : hvd_fail(error, HVD_ENOMEM, HVD951 "rank %d: no memory for votes", engine->options.rank);
}

void hvd_tree_close(struct hvd_set *set)
{
    struct hvd_tree *tree = set->tree;
    if (!tree)
        return;
    hvd_tree_free_room(tree);
    free(tree);
    set->tree = NULL;
}

bool hvd_tree_pump(struct hvd_engine *engine, struct hvd_set *set)
{
    bool moved = false;
    for (int i = 0; i < set->tree->count; i++) {
        hvd_neighbor_flush(engine, set, &set->tree->near[i]);
        moved |= hvd_neighbor_read(engine, set, &set->tree->near[i]);
    }
    return moved;
}

bool hvd_tree_heard(const struct hvd_tree *tree, uint64_t round)
{
    for (int i = 0; i < tree->count; i++)
        if (tree->near[i].heard >= round)
            return true;
    return false;
}

/* Is it a vote of this round, for exactly the ranks on that side? */
static bool sound(const struct hvd_set *set, const struct hvd_neighbor *near, uint64_t round)
{
    struct hvd_vote *vote = near->vote[round & 1];
    return vote->bytes <= set->vote_bytes && hvd_vote_check(set->coord, vote, vote->bytes) == HVD_OK &&
           vote->round == round && vote->ranks == (uint32_t)near->behind;
}

/* into := mine (+) what came from all neighbours but `without`; rides likewise. */
static void merge_all(const struct hvd_set *set, struct hvd_vote *into, struct hvd_eager *rides, uint64_t round,
                      int without)
{
    const struct hvd_tree *tree = set->tree;
    memcpy(into, tree->mine, tree->mine->bytes);
    hvd_eager_copy(rides, tree->mine_rides);
    for (int i = 0; i < tree->count; i++)
        if (i != without) {
            hvd_vote_merge(set->coord, into, tree->near[i].vote[round & 1]);
            hvd_eager_join(rides, tree->near[i].ride[round & 1]);
        }
}

int hvd_tree_round(struct hvd_engine *engine, struct hvd_set *set, uint64_t round, bool whole, bool *moved)
{
    struct hvd_tree *tree = set->tree;
    int missing = 0, silent = -1;
    for (int i = 0; i < tree->count; i++) {
        if (tree->near[i].has[round & 1] == round)
            continue;
        missing++;
        silent = i;
        if (tree->near[i].link->over)
            hvd_neighbor_lost(engine, set, &tree->near[i]);
    }
    for (int i = 0; i < tree->count; i++) {
        struct hvd_neighbor *near = &tree->near[i];
        if (near->has[round & 1] != round || near->sound == round)
            continue;
        if (!sound(set, near, round)) {
            const struct hvd_frame head = {0, HVD_FRAME_VOTE, near->vote[round & 1]->bytes, set->life, round};
            hvd_neighbor_babbles(engine, set, near, &head);
            return HVD_EINVAL;
        }
        near->sound = round;
    }
    for (int i = 0; i < tree->count; i++) {
        struct hvd_neighbor *near = &tree->near[i];
        bool ready = whole && (missing == 0 || (missing == 1 && silent == i));
        if (ready && near->voted < round) {
            merge_all(set, tree->part, tree->part_rides, round, i);
            near->voted = near->told = round;
            hvd_neighbor_say(engine, set, near, HVD_FRAME_VOTE, round, tree->part, tree->part->bytes, tree->part_rides);
            *moved = true;
        } else if (whole && near->told < round && near->heard < round) {
            near->told = round;
            hvd_neighbor_say(engine, set, near, HVD_FRAME_OPEN, round, NULL, 0, NULL);
            *moved = true;
        }
    }
    if (!whole || missing)
        return HVD_AGAIN;
    merge_all(set, set->agreed, set->riders->agreed, round, -1);
    return HVD_OK;
}

void hvd_tree_tick(struct hvd_engine *engine, struct hvd_set *set, bool waits)
{
    for (int i = 0; i < set->tree->count; i++) {
        struct hvd_neighbor *near = &set->tree->near[i];
        bool heard = near->frames != near->link->counts.messages_in;
        near->mute = heard || !waits ? 0 : near->mute + 1;
        near->frames = near->link->counts.messages_in;
        if (waits && near->out_count == 0)
            hvd_neighbor_say(engine, set, near, HVD_FRAME_ALIVE, 0, NULL, 0, NULL);
    }
}

static bool is_mute(const struct hvd_neighbor *near, uint64_t round, int ticks)
{
    return near->has[round & 1] != round && near->mute >= ticks;
}

int hvd_tree_mute(const struct hvd_tree *tree, uint64_t round, int ticks)
{
    for (int i = 0; i < tree->count; i++)
        if (is_mute(&tree->near[i], round, ticks))
            return tree->near[i].rank;
    return -1;
}

bool hvd_tree_is_mute(const struct hvd_tree *tree, int rank, uint64_t round, int ticks)
{
    for (int i = 0; i < tree->count; i++)
        if (tree->near[i].rank == rank)
            return is_mute(&tree->near[i], round, ticks);
    return false;
}

/* May a neighbour still speak? Before anybody has left, the end of its stream is the job's. */
static bool speaks(const struct hvd_engine *engine, const struct hvd_neighbor *near)
{
    const struct hvd_set *set = engine->global;
    return !set->left || !(near->deaf || near->link->over || hvd_abort_has_left(engine, set->member[near->rank]));
}

struct hvd_neighbor *hvd_tree_above(const struct hvd_engine *engine)
{
    struct hvd_tree *tree = engine->global->tree;
    return tree && engine->options.rank != 0 && speaks(engine, &tree->near[0]) ? &tree->near[0] : NULL;
}

bool hvd_tree_reaches(const struct hvd_engine *engine, int rank)
{
    const struct hvd_tree *tree = engine->global->tree;
    int here = engine->who[engine->options.rank].host, host = engine->who[rank].host;
    for (int i = 0; tree && host != here && i < tree->count; i++)
        if (engine->who[tree->near[i].rank].host == hvd_tree_toward(here, host))
            return speaks(engine, &tree->near[i]);
    return host == here;
}

bool hvd_tree_idle(const struct hvd_tree *tree)
{
    for (int i = 0; i < tree->count; i++)
        if (tree->near[i].out_count && !tree->near[i].link->over)
            return false;
    return true;
}

int hvd_tree_watch(const struct hvd_tree *tree, struct pollfd *news)
{
    int count = 0;
    for (int i = 0; i < tree->count; i++) {
        const struct hvd_neighbor *near = &tree->near[i];
        if (!near->deaf && near->link->fd >= 0)
            news[count++] = (struct pollfd){.fd = near->link->fd,
                                            .events = POLLIN | (near->out_count && !near->link->over ? POLLOUT : 0)};
    }
    return count;
}
