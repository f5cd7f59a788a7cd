/* tcp.c - a link over a connected stream socket: TCP between hosts, or a unix socket in tests.
 *
 * What is there to decide? That small writes leave at once (no delay: steps wait for each other, and a message is
 * written in few calls), that nothing blocks, and what an end means: any end of the stream, by end of file or by error,
 * is the loss of the peer, because ranks take their leave by votes before they close. Buffers are left to the kernel,
 * which sizes them to the way's delay by itself.
 *
 * When is a peer lost that says nothing? When its machine answers nothing. Not when its process reads nothing: in a
 * collective with one slow host, others wait for it with their windows closed, for as long as it takes.
 * TCP_USER_TIMEOUT would end such a stream, so it is for streams that are read at all times (votes). On the others TCP
 * is asked: bytes that were sent again, or probes of a closed window, and no answer. Who only receives sends
 * keep-alives.
 *
 * LEAVING. To close a socket while anything lies in it unread, a guess of somebody's, resets the connection, and what
 * this rank has sent and the network has not yet delivered is thrown away. So a rank that leaves first says that it
 * sends no more, and waits, bounded, until the other end's TCP has acknowledged that. What has arrived there survives a
 * reset.
 *
 * ONE STREAM joins two ranks. At 1 Gbit/s and a round trip of 4 ms one stream carries an allreduce of 16 MB in 147 ms,
 * of which the line alone takes 134 ms: several streams would save a tenth at most. Faster lines, and lines that lose
 * packets, were not measured.
 *
 * A call moves at most MOVE_MAX bytes, so that a turn stays short however much waits.
 */
#define _GNU_SOURCE /* POLLRDHUP */
#include "link.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOVE_MAX ((size_t)1 << 20)

static int tcp_open(struct hvd_link *link, int fd, int peer, struct hvd_error *error)
{
    int on = 1, kind = 0;
    socklen_t bytes = sizeof kind;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &bytes) || kind != SOCK_STREAM)
        return hvd_fail_rank(error, HVD_EINIT, peer, HVD115 "descriptor %d, for rank %d, is no stream socket", fd,
                             peer);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK))
        return hvd_fail_rank(error, HVD_EINIT, peer, HVD115 "the socket for rank %d cannot be made non-blocking (%s)",
                             peer, strerror(errno));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* a unix socket has none, and no delay */
    *link = (struct hvd_link){.kind = &hvd_link_tcp, .peer = peer, .fd = fd};
    snprintf(link->called, sizeof link->called, "rank %d", peer);
    return HVD_OK;
}

static bool comes_later(int number)
{
    return number == EAGAIN || number == EWOULDBLOCK || number == EINTR;
}

static int lost(struct hvd_link *link, const char *how, struct hvd_error *error)
{
    link->over = true;
    return hvd_fail_rank(error, HVD_EPEER, link->peer, HVD450 "the connection to %s has ended (%s)", link->called, how);
}

static const char *text_of(int number)
{
    return number == ETIMEDOUT
               ? "its host has not answered in time, see HVDLITE_PEER_TIMEOUT; is it down, or not reachable?"
               : strerror(number);
}

static int tcp_send(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    *moved = 0;
    size_t most = count < MOVE_MAX ? count : MOVE_MAX;
    ssize_t taken = send(link->fd, bytes, most, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (taken < 0 && !comes_later(errno))
        return lost(link, text_of(errno), error);
    *moved = taken < 0 ? 0 : (size_t)taken;
    link->counts.bytes_out += *moved;
    link->wants_out = *moved < most;
    return HVD_OK;
}

static int tcp_recv(struct hvd_link *link, void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    *moved = 0;
    size_t most = count < MOVE_MAX ? count : MOVE_MAX;
    ssize_t got = recv(link->fd, bytes, most, MSG_DONTWAIT);
    if (got == 0 && most > 0)
        return lost(link, "end of file", error);
    if (got < 0 && !comes_later(errno))
        return lost(link, text_of(errno), error);
    *moved = got < 0 ? 0 : (size_t)got;
    link->counts.bytes_in += *moved;
    return HVD_OK;
}

static int tcp_ended(struct hvd_link *link, struct hvd_error *error)
{
    struct pollfd news = {.fd = link->fd, .events = POLLRDHUP};
    bool end = poll(&news, 1, 0) > 0 && (news.revents & (POLLRDHUP | POLLHUP | POLLERR));
    return end ? lost(link, "closed by the peer", error) : HVD_OK;
}

/* A unix socket has no use for any of it, and says so. */
static void tcp_give_up_after(struct hvd_link *link, int ms, bool unread)
{
    int on = 1, probes = 4, every_s = ms / 1000 / 8 > 0 ? ms / 1000 / 8 : 1, idle_s = ms / 2000 > 0 ? ms / 2000 : 1;
    if (unread)
        (void)setsockopt(link->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
    (void)setsockopt(link->fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)setsockopt(link->fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)setsockopt(link->fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof every_s);
    (void)setsockopt(link->fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

static bool tcp_unheard(struct hvd_link *link, int ms)
{
    struct tcp_info now;
    socklen_t bytes = sizeof now;
    if (getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, &now, &bytes))
        return false;
    bool asked = (now.tcpi_unacked && now.tcpi_retransmits) || now.tcpi_probes;
    return asked && now.tcpi_last_ack_recv >= (uint32_t)ms;
}

static bool tcp_settle(struct hvd_link *link)
{
    char unwanted[4096];
    struct tcp_info now;
    socklen_t bytes = sizeof now;
    for (size_t thrown = 0; thrown < MOVE_MAX; thrown += sizeof unwanted)
        if (recv(link->fd, unwanted, sizeof unwanted, MSG_DONTWAIT) <= 0)
            break;
    if (getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, &now, &bytes))
        return true; /* a unix socket: what was sent is there */
    (void)shutdown(link->fd, SHUT_WR);
    return getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, &now, &bytes) || now.tcpi_state == TCP_CLOSE ||
           now.tcpi_state == TCP_FIN_WAIT2 || now.tcpi_state == TCP_TIME_WAIT;
}

static void tcp_close(struct hvd_link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
}

const struct hvd_link_kind hvd_link_tcp = {"tcp",       tcp_open,   tcp_send, tcp_recv, tcp_ended, tcp_give_up_after,
                                           tcp_unheard, tcp_settle, tcp_close};
