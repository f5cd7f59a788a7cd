/* report.c - the frames between engine and store.
 *
 * Reading: a frame is short and the store sends it whole, so it is peeked at until it is all there and then
 * taken in one go; nothing is kept between calls, and the socket is never read past a frame, because after
 * shutdown it is Python's again.
 */
#define _GNU_SOURCE
#include "report.h"

#include <arpa/inet.h>
#include <errno.h>
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

void hvd_report_abort(int store_fd, int culprit, int code, const char *text)
{
    if (store_fd < 0)
        return;
    uint8_t frame[HEAD + HVD_REPORT_TEXT_MAX + 1];
    hvd_text_copy((char *)frame + HEAD, HVD_REPORT_TEXT_MAX + 1, text);
    size_t length = strlen((const char *)frame + HEAD);
    put(frame, (uint32_t)(HEAD - 4 + length));
    frame[4] = TYPE_ABORT;
    put(frame + 5, (uint32_t)culprit);
    put(frame + 9, (uint32_t)code);
    ssize_t sent = send(store_fd, frame, HEAD + length, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)sent; /* the launcher sees processes end as well */
}

static int store_ended(struct hvd_error *error)
{
    return hvd_fail(error, HVD_EPEER, HVD455 "the launcher of this job has ended (its store closed the connection)");
}

int hvd_report_read(int store_fd, struct hvd_error *error)
{
    uint8_t frame[HEAD + HVD_REPORT_TEXT_MAX];
    ssize_t got = recv(store_fd, frame, sizeof frame, MSG_PEEK | MSG_DONTWAIT);
    if (got < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? HVD_AGAIN : store_ended(error);
    if (got == 0)
        return store_ended(error);
    if (got < HEAD)
        return HVD_AGAIN;
    uint32_t length = get(frame);
    if (frame[4] != TYPE_LOST || length < HEAD - 4 || length > sizeof frame - 4)
        return hvd_fail(error, HVD_EINTERNAL,
                        HVD901 "the store sent a frame of type %d and %u bytes where only a lost rank is news",
                        frame[4], length);
    if ((size_t)got < 4 + (size_t)length)
        return HVD_AGAIN;
    got = recv(store_fd, frame, 4 + (size_t)length, MSG_DONTWAIT);
    if (got != (ssize_t)(4 + length))
        return store_ended(error);
    int culprit = (int)get(frame + 5);
    /* Of the reasons of another rank the one that all ranks raise as what it is, however they hear of it. */
    int code = (int)get(frame + 9) == HVD_ETIMEOUT ? HVD_ETIMEOUT : HVD_EPEER;
    return hvd_fail_rank(error, code, culprit, "%.*s", (int)(length - (HEAD - 4)), (const char *)frame + HEAD);
}
