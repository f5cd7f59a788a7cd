/* streams.h - the streams of a process set: taken over, watched while the engine sleeps, closed.
 *
 * Streams come connected from Python (hvd_options, hvd_set_open) and are the core's from then on. Each belongs to one
 * set and one peer. Used by the turn only, but for what is said otherwise.
 */
#ifndef HVD_ENGINE_STATE_STREAMS_H
#define HVD_ENGINE_STATE_STREAMS_H

#include "../../base/base.h"
#include "../../link/link.h"

#include <stdatomic.h>

struct hvd_engine;

#define HVD_WIRES_MAX 65536 /* greatest descriptor + 1 */
#define HVD_WIRE_OURS 0x80  /* of wire_byte: a stream of ours */
struct hvd_set;

/* What Python has connected for a set, by rank in the set, -1: none; its keys, as hvd_options has them. */
struct hvd_streams {
    const int *vote_fd, *tensor_fd;
    const unsigned char *vote_keys, *tensor_keys;
};

/* Of one set, by rank in the set. */
struct hvd_stream_table {
    int size;
    struct hvd_link *of;
    struct hvd_link **link; /* NULL: none */
};

static inline struct hvd_streams hvd_stream_of(const struct hvd_options *options)
{
    return (struct hvd_streams){options->vote_fd, options->tensor_fd, options->vote_keys, options->tensor_keys};
}

/* Framework thread, before anybody uses the set. Where there are no streams, *wires == NULL. member: what the ranks are
 * called in the job. votes: those for votes, which are read at all times; else those for tensors. Takes all descriptors
 * over, also where it fails. */
int hvd_stream_open(struct hvd_engine *engine, const struct hvd_streams *streams, bool votes, const int *member,
                    int size, struct hvd_stream_table **wires, struct hvd_error *error);
/* The same over MPI, for votes to `count` ranks of the set: comm is the communicator of its members, in their order. */
int hvd_stream_open_mpi(struct hvd_engine *engine, uintptr_t comm, const int *member, int size, const int *peers,
                        int count, struct hvd_stream_table **wires, struct hvd_error *error);
void hvd_stream_close(struct hvd_engine *engine, struct hvd_stream_table *wires); /* NULL is fine */
/* Any thread: close what was given to a call that came to nothing. */
void hvd_stream_drop(const struct hvd_streams *streams, int count);

/* By a holder who is about to leave the turn: the engine thread shall wake up when a stream has news for any set. */
void hvd_stream_watch(struct hvd_engine *engine);
/* One breath of a holder that cannot get on, at *since_ns for the first time (0: now): looks again at once, or, asleep,
 * sleeps until a stream or a peer on this host has news. False: give the turn back. */
bool hvd_stream_listen(struct hvd_engine *engine, bool asleep, uint64_t *since_ns,
                       bool (*look)(struct hvd_engine *engine));
/* wake.c. Any thread, before it rings, or leaves the turn so as to be rung: the engine thread hears its bell again.
 * mask: does it hear it? asleep_word: on which this rank's sleepers wait. */
void hvd_stream_give_bell(struct hvd_engine *engine);
void hvd_mask_bell(struct hvd_engine *engine, bool masked);
_Atomic uint32_t *hvd_asleep_word(struct hvd_engine *engine);
/* By the turn: add to the engine's counters what has crossed the set's links since the last time. */
void hvd_stream_count(struct hvd_engine *engine, struct hvd_set *set);
/* Any thread: what has crossed between this rank and that one, in the set of this number: tensors and votes. 1, 0: no
 * stream of this rank leads there, or HVD_ESTATE: the engine has stopped. */
int hvd_stream_counts(struct hvd_engine *engine, int number, int peer, struct hvd_link_counts *counts);
/* By the engine thread: epoll has spoken for this descriptor, once. */
void hvd_stream_heard(struct hvd_engine *engine, int fd);
/* By the engine thread, which has found the turn held: its holder, if it sleeps, or is about to, looks again. */
void hvd_stream_tell_listener(struct hvd_engine *engine);
/* By a rank that ends, before its streams are closed: returns when all that it has sent has arrived, or after the
 * time for leaving. */
void hvd_stream_settle(struct hvd_engine *engine, int timeout_ms);
/* At the engine's end, when all streams are closed. */
void hvd_stream_end(struct hvd_engine *engine);
/* In a forked child. Async-signal-safe. */
void hvd_stream_close_in_child(struct hvd_engine *engine);

#endif
