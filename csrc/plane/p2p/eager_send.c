/* eager_send.c - guesses in flight: see eager_send.h.
 *
 * The message is copied before it leaves: the tensor is the caller's again as soon as its request fails, and a part of
 * the message may have to follow later, because half a message would spoil the stream. What is left for a peer goes
 * before the next bytes to that peer, whichever plane sends them (link.h, `rest`); only a work that needs it waits for
 * it.
 */
#include "eager_send.h"

#include "../plane.h"

#include <string.h>

#define REST_MAX 255u

uint64_t hvd_p2p_mark(const struct hvd_work *work, uint64_t number, uint64_t count, bool whole)
{
    const uint64_t odd = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t what[] = {number, (uint64_t)work->kind, (uint64_t)work->op, (uint64_t)work->dtype, count, work->tag,
                       whole},
             mark = odd;
    for (size_t i = 0; i < HVD_COUNT_OF(what); i++)
        mark = (mark ^ what[i]) * odd;
    return mark;
}

/* The step in which a peer is sent to, see algo/whole.c. */
static uint32_t step_of(int rank, int peer, int size)
{
    return (uint32_t)((peer - rank + size) % size - 1);
}

/* What is left for this peer. */
static int send_rest(struct hvd_link *link, struct hvd_error *error)
{
    struct hvd_p2p_early *early = link->rest_of;
    uint16_t *sent = &early->sent[link->peer];
    size_t moved;
    uint32_t step = step_of(early->rank, link->peer, early->size);
    memcpy(early->message + offsetof(struct hvd_p2p_head, step), &step, sizeof step);
    int code = link->kind->send(link, early->message + *sent, early->bytes - *sent, &moved, error);
    if (code != HVD_OK)
        return code;
    *sent = (uint16_t)(*sent + moved);
    if (*sent < early->bytes)
        return HVD_AGAIN;
    link->counts.messages_out++;
    link->rest = NULL;
    return HVD_OK;
}

/* Who was wrong is quiet for a while, and longer each time. */
static void judge(struct hvd_p2p_early *early, bool right)
{
    early->rest = right ? 0 : early->rest < REST_MAX ? 2 * early->rest + 1 : REST_MAX;
    early->resting = early->rest;
    early->mark = 0;
}

void hvd_p2p_early_send(struct hvd_p2p_early *early, struct hvd_link *const *link, int rank, int size, uint64_t mark,
                        const void *buffer, size_t bytes)
{
    struct hvd_error error;
    struct hvd_p2p_head head = {mark, 0, 1, bytes};
    hvd_error_none(&error);
    if (bytes > HVD_EARLY_BYTES || mark == early->mark)
        return;
    if (early->mark) /* another plane did what came, or nothing came of it */
        judge(early, false);
    if (early->resting > 0) {
        early->resting--;
        return;
    }
    for (int peer = 0; peer < size; peer++)
        if (peer != rank && (link[peer]->over || link[peer]->rest))
            return;
    early->mark = mark;
    early->rank = rank;
    early->size = size;
    early->bytes = sizeof head + bytes;
    for (int peer = 0; peer < size; peer++) /* send_rest knows a peer by its rank in the set */
        HVD_ASSERT(peer == rank || link[peer]->peer == peer);
    memcpy(early->message, &head, sizeof head);
    memcpy(early->message + sizeof head, buffer, bytes);
    for (int i = 1; i < size; i++) {
        int peer = (rank + i) % size;
        early->sent[peer] = 0;
        link[peer]->rest = send_rest;
        link[peer]->rest_of = early;
        hvd_link_send_rest(link[peer], &error); /* what fails is told when the work needs it */
    }
}

bool hvd_p2p_early_was(struct hvd_p2p_early *early, uint64_t mark)
{
    if (early->mark == 0)
        return false;
    bool was = early->mark == mark;
    judge(early, was);
    return was;
}

void hvd_p2p_early_close(const struct hvd_p2p_early *early, struct hvd_link *const *link, int rank, int size)
{
    for (int peer = 0; peer < size; peer++)
        if (peer != rank && link[peer]->rest_of == early)
            link[peer]->rest = NULL;
}
