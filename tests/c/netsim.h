/* netsim.h - a network that exists in memory only: seeded, with a clock that is moved by hand.
 *
 * All ranks are in one process and take turns: nothing here locks. Time stands still until hvd_sim_advance moves it to
 * the next event; if there is none although somebody waits, the ranks wait for each other, and a test has found a
 * deadlock instead of a hang. The same seed and the same calls give the same bytes at the same times.
 *
 * What a network may do to streams it does: pieces of different links overtake each other, calls move less than they
 * were asked to, a rank is gone in the middle of a message. Each link itself stays ordered and loses nothing but its
 * end.
 */
#ifndef HVD_SIM_NET_H
#define HVD_SIM_NET_H

#include "link/link.h"

#define HVD_SIM_PIECES 64 /* pieces under way or unread, of one way */
#define HVD_SIM_NEVER  UINT64_MAX

/* What every link is like, in each direction. */
struct hvd_sim_line {
    const int *host_of; /* by rank: ranks of a host share its port, and what they send each other takes 1 ns; lent.
                           NULL: each rank is a host */
    uint64_t delay_ns, jitter_ns; /* a piece arrives after delay_ns and up to jitter_ns more */
    uint64_t byte_ps;             /* a host needs this long to send a byte, all its links together */
    size_t room;                  /* bytes that may be under way or unread */
    size_t piece;                 /* bytes that one call moves at most */
    bool ragged;                  /* it moves any number of them */
};

struct hvd_sim_piece {
    uint64_t end, at_ns; /* it ends before this byte of the stream; when it arrives */
};

/* From one rank to another. */
struct hvd_sim_way {
    struct hvd_sim_net *net;
    int from, to;
    unsigned char *bytes; /* a ring of `room` */
    uint64_t sent, read;  /* bytes, without end */
    struct hvd_sim_piece piece[HVD_SIM_PIECES];
    uint32_t first, pieces;
    uint64_t last_ns; /* when the newest piece arrives */
    uint64_t end_ns;  /* when the end of the stream arrives */
};

struct hvd_sim_net {
    int size;
    struct hvd_sim_line line;
    uint64_t seed, now_ns;
    uint64_t digest;                 /* of all that was moved, from where, when */
    uint64_t port_ps[HVD_RANKS_MAX]; /* when a host can send the next byte */
    uint64_t gone_ns[HVD_RANKS_MAX];
    struct hvd_sim_way way[]; /* from * size + to */
};

/* NULL: no memory. */
struct hvd_sim_net *hvd_sim_open(int size, uint64_t seed, const struct hvd_sim_line *line);
void hvd_sim_close(struct hvd_sim_net *net);
/* The end, at rank `from`, of the link between two ranks. */
void hvd_sim_link(struct hvd_sim_net *net, int from, int to, struct hvd_link *link);
/* At that time this rank ends without a word: its streams end for all others as fast as a line is, and what arrives
 * later than that is lost; its own calls fail. */
void hvd_sim_drop(struct hvd_sim_net *net, int rank, uint64_t at_ns);
/* Move the clock to the next event; false: there is none. */
bool hvd_sim_advance(struct hvd_sim_net *net);

/* 0 <= result < bound, 0 for 0: the next of the seed's numbers. */
uint64_t hvd_sim_below(uint64_t *seed, uint64_t bound);
/* For sim.c: when the end of the stream on this way is seen, HVD_SIM_NEVER: it has none yet. */
uint64_t hvd_sim_end_ns(const struct hvd_sim_way *way);
/* Bytes that have arrived and were not read. */
uint64_t hvd_sim_arrived(const struct hvd_sim_way *way);

extern const struct hvd_link_kind hvd_link_sim;

#endif
