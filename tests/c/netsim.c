/* netsim.c - the clock of the simulated network, and what happens at which time.
 *
 * The question is only ever "what happens next?": a piece arrives, the end of a stream arrives, a rank is gone. All are
 * known when they are caused, since a piece's time of arrival is drawn when it is sent; so the network needs no queue
 * of events, it looks at the ways.
 *
 *     leaves   when the port of its host has sent everything before it, byte by byte
 *     arrives  a line's delay and some jitter later, never before the piece in front of it on the same way
 *
 * A rank that is gone takes with it what would have arrived after its end: the stream is cut, at any byte.
 */
#include "netsim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t hvd_sim_below(uint64_t *seed, uint64_t bound)
{
    uint64_t z = *seed += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    z ^= z >> 31;
    return bound ? z % bound : 0;
}

struct hvd_sim_net *hvd_sim_open(int size, uint64_t seed, const struct hvd_sim_line *line)
{
    HVD_ASSERT(size > 0 && size <= HVD_RANKS_MAX && line->room > 0 && line->piece > 0);
    size_t ways = (size_t)size * (size_t)size;
    struct hvd_sim_net *net = calloc(1, sizeof *net + ways * sizeof net->way[0]);
    if (!net)
        return NULL;
    net->size = size;
    net->line = *line;
    net->seed = seed;
    for (int rank = 0; rank < size; rank++)
        net->gone_ns[rank] = HVD_SIM_NEVER;
    bool all = true;
    for (size_t i = 0; i < ways; i++) {
        struct hvd_sim_way *way = &net->way[i];
        way->net = net;
        way->from = (int)i / size;
        way->to = (int)i % size;
        way->end_ns = HVD_SIM_NEVER;
        way->bytes = way->from == way->to ? NULL : malloc(line->room);
        all &= way->from == way->to || way->bytes;
    }
    if (!all) {
        hvd_sim_close(net);
        return NULL;
    }
    return net;
}

void hvd_sim_close(struct hvd_sim_net *net)
{
    if (!net)
        return;
    for (int i = 0; i < net->size * net->size; i++)
        free(net->way[i].bytes);
    free(net);
}

void hvd_sim_link(struct hvd_sim_net *net, int from, int to, struct hvd_link *link)
{
    *link = (struct hvd_link){.kind = &hvd_link_sim, .self = &net->way[from * net->size + to], .peer = to, .fd = -1};
    snprintf(link->called, sizeof link->called, "rank %d", to);
}

void hvd_sim_drop(struct hvd_sim_net *net, int rank, uint64_t at_ns)
{
    net->gone_ns[rank] = at_ns;
}

uint64_t hvd_sim_end_ns(const struct hvd_sim_way *way)
{
    uint64_t gone = way->net->gone_ns[way->from];
    uint64_t end = gone == HVD_SIM_NEVER ? HVD_SIM_NEVER : gone + way->net->line.delay_ns;
    return way->end_ns < end ? way->end_ns : end;
}

uint64_t hvd_sim_arrived(const struct hvd_sim_way *way)
{
    uint64_t end_ns = hvd_sim_end_ns(way), until = way->net->now_ns < end_ns ? way->net->now_ns : end_ns,
             end = way->read;
    for (uint32_t i = 0; i < way->pieces; i++) {
        const struct hvd_sim_piece *piece = &way->piece[(way->first + i) % HVD_SIM_PIECES];
        if (piece->at_ns > until)
            break;
        end = piece->end;
    }
    return end - way->read;
}

/* The first event on this way that is still to come. */
static uint64_t next_on(const struct hvd_sim_way *way)
{
    uint64_t now = way->net->now_ns, end = hvd_sim_end_ns(way);
    if (end <= now)
        return HVD_SIM_NEVER;
    for (uint32_t i = 0; i < way->pieces; i++) {
        uint64_t at = way->piece[(way->first + i) % HVD_SIM_PIECES].at_ns;
        if (at > now)
            return at < end ? at : end;
    }
    return end;
}

bool hvd_sim_advance(struct hvd_sim_net *net)
{
    uint64_t next = HVD_SIM_NEVER;
    for (int i = 0; i < net->size * net->size; i++) {
        uint64_t at = next_on(&net->way[i]);
        next = at < next ? at : next;
    }
    for (int rank = 0; rank < net->size; rank++)
        if (net->gone_ns[rank] > net->now_ns && net->gone_ns[rank] < next)
            next = net->gone_ns[rank];
    if (next == HVD_SIM_NEVER)
        return false;
    net->now_ns = next;
    return true;
}
