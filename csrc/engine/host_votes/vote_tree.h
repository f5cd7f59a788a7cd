/* vote_tree.h - how the votes of a set cross from host to host.
 *
 * The hosts of a set, in the order of their first members, form a binary tree; the first member on each host, its
 * leader, holds a stream to the leaders of the hosts above and below. Only the turn of a leader calls anything here but
 * open and close. Inside a host votes lie on boards (shm_votes.c).
 */
#ifndef HVD_ENGINE_HOST_VOTES_VOTE_TREE_H
#define HVD_ENGINE_HOST_VOTES_VOTE_TREE_H

#include "../../negotiation/negotiation.h"
#include "../../link/link.h"

#include <poll.h>

#define HVD_NEAR_MAX 3 /* neighbours: one above, two below */

struct hvd_engine;
struct hvd_set;

/* All that crosses: a head, then `bytes` of a body; a vote's is the vote and then what rides with it (eager.h). Both
 * ends have the same byte order, or init would have refused. */
struct hvd_frame {
    uint32_t magic, type;
    uint32_t bytes, life; /* life: of the set */
    uint64_t round;
};

/* A neighbour. */
struct hvd_neighbor {
    struct hvd_link *link;
    int rank;                  /* in the set */
    int behind;                /* members of the set on its side of the edge */
    uint64_t heard;            /* newest round that it has entered, as far as it has told */
    uint64_t told;             /* newest round that it was told of, by a vote or without one */
    uint64_t voted;            /* newest round whose vote was given to it */
    struct hvd_vote *vote[2];  /* that came, by even and odd round */
    struct hvd_eager *ride[2]; /* and what rode with them */
    uint64_t has[2];           /* the round that lies there whole, 0: none */
    uint64_t sound;            /* newest round whose vote from there was looked at and is one */
    char *in;                  /* what has come and is no whole frame yet */
    size_t in_count, in_room;
    bool deaf;   /* nothing more comes from it, or nothing that can be believed */
    bool parted; /* it has said that it leaves though not all have agreed */
    char *out;   /* what has yet to leave */
    size_t out_count, out_room;
    uint64_t frames; /* that had come when the clock last ticked */
    int mute;        /* ticks without one */
};

struct hvd_tree {
    int count;
    size_t vote_bytes;
    bool polled; /* over MPI: nobody rings when a neighbour has spoken */
    struct hvd_neighbor near[HVD_NEAR_MAX];
    struct hvd_vote *mine, *part;              /* of this host; room for what goes out */
    struct hvd_eager *mine_rides, *part_rides; /* with them */
    uint64_t merged;                           /* newest round whose vote of this host lies in `mine` */
};

/* neighbor.c: frames to and from one neighbour. room: memory for them. read: as much as has come; true: something has.
 * say: leaves as far as it can, `flush` lets the rest follow. lost: its stream has ended. babbles: this is no frame
 * that may come now, and the job ends. */
enum {
    HVD_FRAME_OPEN = 1,
    HVD_FRAME_VOTE,
    HVD_FRAME_ABORT,
    HVD_FRAME_ALIVE,
    HVD_FRAME_PART,
    HVD_FRAME_WANT,
    HVD_FRAME_ASK,
    HVD_FRAME_ACCOUNT,
    HVD_FRAME_FINDING
};
bool hvd_neighbor_room(struct hvd_neighbor *near, size_t vote_bytes);
bool hvd_neighbor_vote_room(struct hvd_vote **vote, struct hvd_eager **ride, size_t vote_bytes);
bool hvd_neighbor_read(struct hvd_engine *engine, struct hvd_set *set, struct hvd_neighbor *near);
void hvd_neighbor_say(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_neighbor *near, uint32_t type,
                      uint64_t round, const void *body, size_t bytes, const struct hvd_eager *ride);
void hvd_neighbor_flush(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_neighbor *near);
void hvd_neighbor_lost(struct hvd_engine *engine, const struct hvd_set *set, const struct hvd_neighbor *near);
void hvd_neighbor_babbles(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_neighbor *near,
                          const struct hvd_frame *head);

/* tree_edges.c. leaders: leader[i] is the first rank of the i-th host, index_of[rank] the number of rank's host;
 * returns how many hosts. neighbours: of host `at`. toward: the one by which `to` is reached. behind: ranks on the
 * other side of the edge from host `at` to host `near`. */
int hvd_tree_leaders(const int *host_of, int size, int *leader, int *index_of);
int hvd_tree_neighbours(int at, int hosts, int *near);
int hvd_tree_toward(int at, int to);
int hvd_tree_behind(const int *index_of, int size, int at, int near);

/* Framework thread. The set is known but for its tree; only a leader of a set on several hosts gets one. */
int hvd_tree_open(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error);
void hvd_tree_close(struct hvd_set *set);
/* Its parts: memory for frames to and from the neighbours that it counts. */
bool hvd_tree_room(struct hvd_tree *tree, size_t vote_bytes);
void hvd_tree_free_room(struct hvd_tree *tree);

/* Read what has come and send what goes; true if anything moved. What is no frame, or the end of a stream, is a reason
 * to end the job. */
bool hvd_tree_pump(struct hvd_engine *engine, struct hvd_set *set);
/* Has a neighbour entered this round? */
bool hvd_tree_heard(const struct hvd_tree *tree, uint64_t round);
/* This rank has entered the round; `whole`: the vote of this host lies in `mine`. HVD_OK: set->agreed is everyone's.
 * HVD_AGAIN; HVD_EINVAL: a neighbour's vote is not one (the job ends). */
int hvd_tree_round(struct hvd_engine *engine, struct hvd_set *set, uint64_t round, bool whole, bool *moved);
/* Tell the neighbours why the job ends. */
void hvd_tree_flood(struct hvd_engine *engine, struct hvd_set *set, const struct hvd_error *failure);
/* Tell them that this rank leaves, although its time was up before all had agreed to that. */
void hvd_tree_part(struct hvd_engine *engine, struct hvd_set *set);
/* The clock ticks (silence.c). waits: the set waits for something, and says so. mute: a neighbour, by its rank in the
 * set, whose vote of this round is missing and of whom nothing has been heard for so many ticks; -1: none. */
void hvd_tree_tick(struct hvd_engine *engine, struct hvd_set *set, bool waits);
int hvd_tree_mute(const struct hvd_tree *tree, uint64_t round, int ticks);
bool hvd_tree_is_mute(const struct hvd_tree *tree, int rank, uint64_t round, int ticks); /* false: no neighbour */
/* Has all that was to be said left? */
bool hvd_tree_idle(const struct hvd_tree *tree);
/* In the global set. above: the neighbour on the way to rank 0; NULL: there is none, or it has left. reaches: does the
 * neighbour by which that rank's host is reached still speak? Of this host: yes. */
struct hvd_neighbor *hvd_tree_above(const struct hvd_engine *engine);
bool hvd_tree_reaches(const struct hvd_engine *engine, int rank);
int hvd_tree_watch(const struct hvd_tree *tree, struct pollfd *news);

#endif
