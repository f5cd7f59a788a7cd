/* store_frames.c - the frames between engine and store.
 *
 * Reading: a frame is short and the store sends it whole, so it is peeked at until it is all there and then
 * taken in one go; nothing is kept between calls, and the socket is never read past a frame, because after
 * shutdown it is Python's again. Nothing of a signed frame is looked at before its tag holds, and of its length, which
 * has one of its own, before anything more is waited for.
 *
 * A part of a frame that nothing follows any more is the store's end, which a peek alone would never show. While more
 * may follow, the part stays readable: who sleeps on the socket waits for edges (thread.c), or for little at a time.
 */
#define _GNU_SOURCE
#include "store_frames.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

enum {
    TYPE_ABORT = 5,
    TYPE_LOST = 6,
    TYPE_LEAVING = 14,
    LENGTH = 4,
    CHECK = 4, /* bytes of the length's tag */
    BODY = 1 + 4 + 4
};

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

/* Before the type. */
static size_t head_bytes(const struct hvd_report_line *store)
{
    return LENGTH + (store->is_signed ? CHECK : 0);
}

static atomic_flag saying = ATOMIC_FLAG_INIT; /* the engine's thread may abort while the main thread leaves */

static void say(const struct hvd_report_line *store, int type, int culprit, int code, const char *text)
{
    if (store->fd < 0)
        return;
    while (atomic_flag_test_and_set(&saying))
        sched_yield();
    uint8_t frame[LENGTH + CHECK + BODY + HVD_REPORT_TEXT_MAX + 1 + HVD_TAG_BYTES], tag[HVD_TAG_BYTES];
    uint8_t *body = frame + head_bytes(store);
    hvd_text_copy((char *)body + BODY, HVD_REPORT_TEXT_MAX + 1, text);
    size_t length = BODY + strlen((const char *)body + BODY) + tag_bytes(store), all = head_bytes(store) + length;
    put(frame, (uint32_t)length);
    body[0] = (uint8_t)type;
    put(body + 1, (uint32_t)culprit);
    put(body + 5, (uint32_t)code);
    if (store->is_signed) {
        hvd_mac_tag(store->keys, store->counters[0], frame, LENGTH, tag);
        memcpy(frame + LENGTH, tag, CHECK);
        hvd_mac_tag(store->keys, store->counters[0], frame, all - HVD_TAG_BYTES, frame + all - HVD_TAG_BYTES);
    }
    ssize_t sent = send(store->fd, frame, all, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0 && (size_t)sent < all)
        shutdown(store->fd, SHUT_WR); /* what Python sent next would be taken for the rest of it */
    if (store->is_signed && sent > 0) /* else the launcher sees processes end as well */
        store->counters[0]++;
    atomic_flag_clear(&saying);
}

void hvd_report_abort(const struct hvd_report_line *store, int culprit, int code, const char *text)
{
    say(store, TYPE_ABORT, culprit, code, text);
}

void hvd_report_leaving(const struct hvd_report_line *store)
{
    say(store, TYPE_LEAVING, -1, 0, "");
}

static int store_ended(struct hvd_error *error)
{
    return hvd_fail(error, HVD_EPEER, HVD455 "the launcher of this job has ended (its store closed the connection)");
}

static int not_from_store(const struct hvd_report_line *store, struct hvd_error *error)
{
    return hvd_fail(error, HVD_EPEER,
                    HVD458 "data from this job's store was changed in transit or is forged: frame %" PRIu64
                           " does not carry its tag",
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
    const unsigned char *key = store->keys + HVD_KEY_BYTES;
    uint8_t frame[LENGTH + CHECK + BODY + HVD_REPORT_TEXT_MAX + HVD_TAG_BYTES], tag[HVD_TAG_BYTES];
    size_t head = head_bytes(store), tagged = tag_bytes(store);
    size_t least = BODY + tagged, most = BODY + HVD_REPORT_TEXT_MAX + tagged;
    bool ended = has_ended(store->fd); /* asked first: what comes between the two is looked at the next time */
    ssize_t got = recv(store->fd, frame, head + most, MSG_PEEK | MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? HVD_AGAIN : store_ended(error);
    if (got == 0)
        return store_ended(error);
    if ((size_t)got < head)
        return ended ? store_ended(error) : HVD_AGAIN;
    if (store->is_signed) {
        hvd_mac_tag(key, store->counters[1], frame, LENGTH, tag);
        if (memcmp(tag, frame + LENGTH, CHECK) != 0) /* a guess has one try */
            return not_from_store(store, error);
    }
    size_t length = get(frame), all = head + length;
    bool fits = length >= least && length <= most;
    if (store->is_signed && !fits)
        return not_from_store(store, error);
    if ((size_t)got < (fits ? all : head + BODY))
        return ended ? store_ended(error) : HVD_AGAIN;
    if (store->is_signed) {
        hvd_mac_tag(key, store->counters[1], frame, all - tagged, tag);
        if (!hvd_mac_same(tag, frame + all - tagged))
            return not_from_store(store, error);
    }
    const uint8_t *body = frame + head;
    if (body[0] != TYPE_LOST || !fits)
        return hvd_fail(error, HVD_EINTERNAL,
                        HVD901 "the store sent a frame of type %d and %zu bytes where only the loss of a rank is "
                               "expected",
                        body[0], length);
    got = recv(store->fd, frame, all, MSG_DONTWAIT);
    if (got != (ssize_t)all)
        return store_ended(error);
    if (store->is_signed)
        store->counters[1]++;
    int culprit = (int)get(body + 1);
    /* Of the reasons of another rank the one that all ranks raise as what it is, however they hear of it. */
    int code = (int)get(body + 5) == HVD_ETIMEOUT ? HVD_ETIMEOUT : HVD_EPEER;
    return hvd_fail_rank(error, code, culprit, "%.*s", (int)(length - least), (const char *)body + BODY);
}
