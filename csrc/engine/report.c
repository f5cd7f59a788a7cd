/* report.c - the frames between engine and store.
 *
 * Reading: a frame is short and the store sends it whole, so it is peeked at until it is all there and then
 * taken in one go; nothing is kept between calls, and the socket is never read past a frame, because after
 * shutdown it is Python's again. Nothing of a signed frame but its length is looked at before its tag holds.
 *
 * A part of a frame that nothing follows any more is the store's end, which a peek alone would never show. While more
 * may follow, the part stays readable: who sleeps on the socket waits for edges (thread.c), or for little at a time.
 */
#define _GNU_SOURCE
#include "report.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

enum { TYPE_ABORT = 5, TYPE_LOST = 6, HEAD = 4 + 1 + 4 + 4 };

static void put(uint8_t *at, uint32_t value)
{
    value = htonl(value);
    memcpy(at, &value, sizeof value);
}

static uint32_t get(const uint8_t *at)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return ntohl(value);
}

static size_t tag_bytes(const struct hvd_report_line *store)
{
    return store->is_signed ? HVD_TAG_BYTES : 0;
}

void hvd_report_abort(const struct hvd_report_line *store, int culprit, int code, const char *text)
{
    if (store->fd < 0)
        return;
    uint8_t frame[HEAD + HVD_REPORT_TEXT_MAX + 1 + HVD_TAG_BYTES];
    hvd_text_copy((char *)frame + HEAD, HVD_REPORT_TEXT_MAX + 1, text);
    size_t length = HEAD + strlen((const char *)frame + HEAD);
    put(frame, (uint32_t)(length - 4 + tag_bytes(store)));
    frame[4] = TYPE_ABORT;
    put(frame + 5, (uint32_t)culprit);
    put(frame + 9, (uint32_t)code);
    if (store->is_signed)
        hvd_mac_tag(store->keys, store->counters[0], frame, length, frame + length);
    ssize_t sent = send(store->fd, frame, length + tag_bytes(store), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0 && (size_t)sent < length + tag_bytes(store))
        shutdown(store->fd, SHUT_WR); /* what Python sent next would be taken for the rest of it */
    if (store->is_signed && sent > 0) /* else the launcher sees processes end as well */
        store->counters[0]++;
}

static int store_ended(struct hvd_error *error)
{
    return hvd_fail(error, HVD_EPEER, HVD455 "the launcher of this job has ended (its store closed the connection)");
}

static int not_from_store(const struct hvd_report_line *store, struct hvd_error *error)
{
    return hvd_fail(error, HVD_EPEER,
                    HVD458
                    "what came over the connection to this job's store was changed on its way, or is not the store's: "
                    "frame %" PRIu64 " does not carry its tag",
                    store->counters[1]);
}

/* Has the store closed the connection? Then all that it has sent is there to be read. */
static bool has_ended(int fd)
{
    struct pollfd news = {.fd = fd, .events = POLLRDHUP};
    return poll(&news, 1, 0) > 0 && (news.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

int hvd_report_read(const struct hvd_report_line *store, struct hvd_error *error)
{
    uint8_t frame[HEAD + HVD_REPORT_TEXT_MAX + HVD_TAG_BYTES], tag[HVD_TAG_BYTES];
    size_t tagged = tag_bytes(store), most = HEAD + HVD_REPORT_TEXT_MAX + tagged;
    bool ended = has_ended(store->fd); /* asked first: what comes between the two is looked at the next time */
    ssize_t got = recv(store->fd, frame, most, MSG_PEEK | MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? HVD_AGAIN : store_ended(error);
    if (got == 0)
        return store_ended(error);
    if (got < HEAD)
        return ended ? store_ended(error) : HVD_AGAIN;
    size_t length = (size_t)4 + get(frame); /* of the whole frame */
    bool fits = length >= HEAD + tagged && length <= most;
    if (store->is_signed && !fits)
        return not_from_store(store, error);
    if (fits && (size_t)got < length)
        return ended ? store_ended(error) : HVD_AGAIN;
    if (store->is_signed) {
        hvd_mac_tag(store->keys + HVD_KEY_BYTES, store->counters[1], frame, length - tagged, tag);
        if (!hvd_mac_same(tag, frame + length - tagged))
            return not_from_store(store, error);
    }
    if (frame[4] != TYPE_LOST || !fits)
        return hvd_fail(error, HVD_EINTERNAL,
                        HVD901 "the store sent a frame of type %d and %zu bytes where only a lost rank is news",
                        frame[4], length - 4);
    got = recv(store->fd, frame, length, MSG_DONTWAIT);
    if (got != (ssize_t)length)
        return store_ended(error);
    if (store->is_signed)
        store->counters[1]++;
    int culprit = (int)get(frame + 5);
    /* Of the reasons of another rank the one that all ranks raise as what it is, however they hear of it. */
    int code = (int)get(frame + 9) == HVD_ETIMEOUT ? HVD_ETIMEOUT : HVD_EPEER;
    return hvd_fail_rank(error, code, culprit, "%.*s", (int)(length - tagged - HEAD), (const char *)frame + HEAD);
}
