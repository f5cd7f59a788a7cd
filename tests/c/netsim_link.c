/* netsim_link.c - a link through a network that exists in memory only (netsim.h): what tests run planes over.
 *
 * It keeps every promise of link.h and uses every freedom: a call moves less than it could, bytes come when the seed
 * says so, and a peer's end may arrive at any byte. What is under way or unread is bounded, so that a sender whose peer
 * does not read is held up, as by a socket. Nobody is ever silent here: a rank that is gone ends its streams, so there
 * is nothing to give up after.
 */
#include "netsim.h"

#include <string.h>

static struct hvd_sim_way *back(const struct hvd_sim_way *way)
{
    return &way->net->way[way->to * way->net->size + way->from];
}

static int lost(struct hvd_link *link, const char *how, struct hvd_error *error)
{
    link->over = true;
    return hvd_fail_rank(error, HVD_EPEER, link->peer, HVD450 "the connection to %s has ended (%s)", link->called, how);
}

static bool gone(const struct hvd_sim_net *net, int rank)
{
    return net->gone_ns[rank] <= net->now_ns;
}

static void note(struct hvd_sim_net *net, const struct hvd_sim_way *way, size_t moved, uint64_t what)
{
    const uint64_t odd = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t all[] = {net->now_ns, (uint64_t)(way->from * net->size + way->to), moved, what};
    for (size_t i = 0; i < HVD_COUNT_OF(all); i++)
        net->digest = (net->digest ^ all[i]) * odd;
}

/* How many of the bytes that could be moved are moved by this call. */
static size_t share_of(struct hvd_sim_net *net, size_t most)
{
    most = most < net->line.piece ? most : net->line.piece;
    return net->line.ragged && most ? 1 + hvd_sim_below(&net->seed, most) : most;
}

/* When the last of so many bytes is there, but for jitter; their port is busy until they have left. */
static uint64_t there_ns(struct hvd_sim_net *net, const struct hvd_sim_way *way, size_t bytes)
{
    const int *host_of = net->line.host_of;
    if (host_of && host_of[way->from] == host_of[way->to])
        return net->now_ns + 1; /* an event, as every arrival */
    uint64_t *port = &net->port_ps[host_of ? host_of[way->from] : way->from], now_ps = net->now_ns * 1000;
    *port = (*port > now_ps ? *port : now_ps) + bytes * net->line.byte_ps;
    return (*port + 999) / 1000 + net->line.delay_ns;
}

static int sim_send(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct hvd_sim_way *way = link->self;
    struct hvd_sim_net *net = way->net;
    const struct hvd_sim_line *line = &net->line;
    size_t room = line->room - (size_t)(way->sent - way->read), most = count < room ? count : room;
    *moved = 0;
    if (gone(net, way->from))
        return lost(link, "this rank is gone", error);
    if (hvd_sim_end_ns(back(way)) <= net->now_ns)
        return lost(link, "nobody is there", error);
    most = way->pieces < HVD_SIM_PIECES ? share_of(net, most) : 0;
    link->wants_out = most < count;
    if (most == 0)
        return HVD_OK;
    for (size_t i = 0, left; i < most; i += left) {
        size_t at = (size_t)((way->sent + i) % line->room);
        left = most - i < line->room - at ? most - i : line->room - at;
        memcpy(way->bytes + at, (const unsigned char *)bytes + i, left);
    }
    uint64_t at_ns = there_ns(net, way, most) + hvd_sim_below(&net->seed, line->jitter_ns + 1);
    way->last_ns = at_ns > way->last_ns ? at_ns : way->last_ns;
    way->sent += most;
    way->piece[(way->first + way->pieces++) % HVD_SIM_PIECES] = (struct hvd_sim_piece){way->sent, way->last_ns};
    link->counts.bytes_out += most;
    *moved = most;
    note(net, way, most, 1);
    return HVD_OK;
}

static int sim_recv(struct hvd_link *link, void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct hvd_sim_way *way = back(link->self);
    struct hvd_sim_net *net = way->net;
    size_t there = (size_t)hvd_sim_arrived(way), most = share_of(net, count < there ? count : there);
    *moved = 0;
    if (gone(net, way->to))
        return lost(link, "this rank is gone", error);
    if (there == 0 && count > 0 && hvd_sim_end_ns(way) <= net->now_ns)
        return lost(link, "end of file", error);
    for (size_t i = 0, left; i < most; i += left) {
        size_t at = (size_t)((way->read + i) % net->line.room);
        left = most - i < net->line.room - at ? most - i : net->line.room - at;
        memcpy((unsigned char *)bytes + i, way->bytes + at, left);
    }
    way->read += most;
    while (way->pieces && way->piece[way->first].end <= way->read) {
        way->first = (way->first + 1) % HVD_SIM_PIECES;
        way->pieces--;
    }
    link->counts.bytes_in += most;
    *moved = most;
    if (most)
        note(net, way, most, 2);
    return HVD_OK;
}

static int sim_ended(struct hvd_link *link, struct hvd_error *error)
{
    struct hvd_sim_way *way = link->self;
    if (gone(way->net, way->from))
        return lost(link, "this rank is gone", error);
    return hvd_sim_end_ns(back(way)) <= way->net->now_ns ? lost(link, "closed by the peer", error) : HVD_OK;
}

static void sim_give_up_after(struct hvd_link *link, int ms, bool unread) {}

static bool sim_unheard(struct hvd_link *link, int ms)
{
    return false;
}

static bool sim_settle(struct hvd_link *link)
{
    return true;
}

/* The end of the stream comes behind all that was sent. */
static void sim_close(struct hvd_link *link)
{
    struct hvd_sim_way *way = link->self;
    uint64_t soonest = way->net->now_ns + way->net->line.delay_ns;
    if (way->end_ns == HVD_SIM_NEVER)
        way->end_ns = soonest > way->last_ns ? soonest : way->last_ns;
}

const struct hvd_link_kind hvd_link_sim = {"sim",       NULL,       sim_send, sim_recv, sim_ended, sim_give_up_after,
                                           sim_unheard, sim_settle, sim_close};
