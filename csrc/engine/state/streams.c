/* streams.c - the streams of process sets: open, count, close. stream_watch.c has how the engine sleeps on them.
 *
 * Python connects the streams. The core owns their descriptors from the call that passes them in, and closes them
 * even if that call fails: one by one if a link cannot be made, else together with the set. A byte per descriptor
 * marks a stream of the core, so that a forked child can close its copies.
 */
#include "../engine.h"

#include "../../base/shared_memory.h"

#include <stdlib.h>
#include <unistd.h>

static void drop(const int *fd, int count)
{
    for (int i = 0; fd && i < count; i++)
        if (fd[i] >= 0)
            close(fd[i]);
}

void hvd_stream_drop(const struct hvd_streams *streams, int count)
{
    drop(streams->vote_fd, count);
    drop(streams->tensor_fd, count);
}

static int note(struct hvd_engine *engine, int fd, struct hvd_error *error)
{
    if (fd >= HVD_WIRES_MAX)
        return hvd_fail(error, HVD_EINIT, HVD120 "rank %d: descriptor %d is beyond %d, the greatest for a stream",
                        engine->options.rank, fd, HVD_WIRES_MAX - 1);
    if (!engine->wire_byte)
        engine->wire_byte = hvd_memory_private(HVD_WIRES_MAX, error);
    if (!engine->wire_byte)
        return HVD_ENOMEM;
    atomic_store(&engine->wire_byte[fd], HVD_WIRE_OURS);
    if (fd >= atomic_load(&engine->wire_high))
        atomic_store(&engine->wire_high, fd + 1);
    return HVD_OK;
}

static struct hvd_stream_table *new_wires(struct hvd_engine *engine, int size, struct hvd_error *error)
{
    struct hvd_stream_table *wires =
        calloc(1, sizeof *wires + (size_t)size * (sizeof wires->of[0] + sizeof wires->link[0]));
    if (!wires) {
        hvd_fail(error, HVD_ENOMEM, HVD951 "rank %d: no memory for streams", engine->options.rank);
        return NULL;
    }
    wires->size = size;
    wires->of = (struct hvd_link *)(wires + 1);
    wires->link = (struct hvd_link **)(wires->of + size);
    return wires;
}

/* Over the stream, or over it and signed. */
static int open_link(struct hvd_link *link, int fd, int peer, const unsigned char *keys, const char *what,
                     struct hvd_error *error)
{
    struct hvd_link_signing signing = {keys, what};
    link->self = &signing;
    return keys ? hvd_link_signed.open(link, fd, peer, error) : hvd_link_tcp.open(link, fd, peer, error);
}

int hvd_stream_open(struct hvd_engine *engine, const struct hvd_streams *streams, bool votes, const int *member,
                    int size, struct hvd_stream_table **wires, struct hvd_error *error)
{
    const int *fd = votes ? streams->vote_fd : streams->tensor_fd;
    const unsigned char *keys = votes ? streams->vote_keys : streams->tensor_keys;
    *wires = NULL;
    if (!fd)
        return HVD_OK;
    struct hvd_stream_table *mine = new_wires(engine, size, error);
    int code = mine ? HVD_OK : HVD_ENOMEM;
    for (int peer = 0; peer < size; peer++) {
        if (fd[peer] < 0)
            continue;
        if (code == HVD_OK)
            code = note(engine, fd[peer], error);
        if (code == HVD_OK)
            code = open_link(&mine->of[peer], fd[peer], peer, keys ? keys + (size_t)peer * HVD_KEY_PAIR_BYTES : NULL,
                             votes ? "votes" : "tensors", error);
        if (code != HVD_OK) {
            if (engine->wire_byte && fd[peer] < HVD_WIRES_MAX)
                atomic_store(&engine->wire_byte[fd[peer]], 0);
            close(fd[peer]);
            continue;
        }
        hvd_text_copy(mine->of[peer].called, sizeof mine->of[peer].called, engine->who[member[peer]].called);
        mine->of[peer].kind->give_up_after(&mine->of[peer], engine->options.peer_timeout_ms, votes);
        mine->link[peer] = &mine->of[peer];
    }
    if (code != HVD_OK && mine) {
        hvd_stream_close(engine, mine);
        mine = NULL;
    }
    *wires = mine;
    return code;
}

int hvd_stream_open_mpi(struct hvd_engine *engine, uintptr_t comm, const int *member, int size, const int *peers,
                        int count, struct hvd_stream_table **wires, struct hvd_error *error)
{
    struct hvd_stream_table *mine = *wires = new_wires(engine, size, error);
    for (int i = 0; mine && i < count; i++) {
        struct hvd_link *link = &mine->of[peers[i]];
        link->self = (void *)comm;
        int code = hvd_link_mpi.open(link, -1, peers[i], error);
        if (code != HVD_OK)
            return code; /* what is there is closed with the set */
        hvd_text_copy(link->called, sizeof link->called, engine->who[member[peers[i]]].called);
        mine->link[peers[i]] = link;
    }
    return mine ? HVD_OK : HVD_ENOMEM;
}

void hvd_stream_close(struct hvd_engine *engine, struct hvd_stream_table *wires)
{
    if (!wires)
        return;
    for (int peer = 0; peer < wires->size; peer++)
        if (wires->link[peer]) {
            if (wires->of[peer].fd >= 0)
                atomic_store(&engine->wire_byte[wires->of[peer].fd], 0); /* epoll forgets what is closed */
            wires->of[peer].kind->close(&wires->of[peer]);
        }
    free(wires);
}

static void add(struct hvd_link_counts *sum, const struct hvd_stream_table *wires)
{
    for (int peer = 0; wires && peer < wires->size; peer++) {
        const struct hvd_link_counts *counts = &wires->of[peer].counts;
        sum->bytes_out += counts->bytes_out;
        sum->bytes_in += counts->bytes_in;
        sum->messages_out += counts->messages_out;
        sum->messages_in += counts->messages_in;
    }
}

void hvd_stream_count(struct hvd_engine *engine, struct hvd_set *set)
{
    struct hvd_link_counts now = {0}, *before = &set->crossed;
    add(&now, set->wires);
    add(&now, set->vote_wires);
    hvd_count(engine, HVD_COUNT_link_bytes_out, (int64_t)(now.bytes_out - before->bytes_out));
    hvd_count(engine, HVD_COUNT_link_bytes_in, (int64_t)(now.bytes_in - before->bytes_in));
    hvd_count(engine, HVD_COUNT_link_messages_out, (int64_t)(now.messages_out - before->messages_out));
    hvd_count(engine, HVD_COUNT_link_messages_in, (int64_t)(now.messages_in - before->messages_in));
    *before = now;
}
