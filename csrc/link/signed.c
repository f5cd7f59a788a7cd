/* signed.c - a link over a stream socket on which a stranger may sit: what he changes is seen before anybody reads it.
 *
 * The bytes of each call of `send` leave as records of at most RECORD bytes:
 *
 *     u32 length, big-endian | 4 bytes of its tag | so many bytes | tag of all before it
 *
 * Tags are keyed BLAKE2b over the number of the record in its direction and what they are for (base/blake2b.h), so a
 * record that was changed, made up, repeated, left out, moved or sent back does not carry them, and nothing that comes
 * is believed any more. Bytes are given out when the tag of their record has held. The length has one of its own: one
 * that was made longer would be waited for, in silence. Who holds bytes back is not told from a peer that is slow, and
 * nothing is hidden: who listens on the way reads everything.
 *
 * SENDING. A record is copied, tagged and sent; the caller hears that its bytes have moved when all of it has left. So
 * nothing is left here that nobody would send on, and who was told "not yet" comes again with the same bytes (link.h).
 *
 * RECEIVING. A call reads to the end of a record, and of the next one not more than its head. So what waits for its
 * caller waits in the socket, where sleepers see it, but for what the caller has no room for: a call that gives less
 * than was asked for leaves no byte here that could be given out. No record holds parts of two messages of a plane,
 * since no call of `send` does: who reads its message to the end leaves nothing here either.
 *
 * All else is the socket's (tcp.c). Costs: some 3 cycles a byte and a copy on each side, 24 bytes a record, and memory:
 * as much of two records as has been used, a page each where only votes cross, 128 KB where large tensors do.
 */
#include "link.h"

#include "../base/blake2b.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define RECORD   ((size_t)64 << 10)
#define LENGTH   sizeof(uint32_t)
#define CHECK    ((size_t)4) /* bytes of the length's tag */
#define HEAD     (LENGTH + CHECK)
#define MOVE_MAX ((size_t)1 << 20) /* by one call, and the rest of a record */

_Static_assert(HVD_KEY_PAIR_BYTES == 2 * HVD_KEY_BYTES, "one for each direction");

struct way {
    unsigned char key[HVD_KEY_BYTES];
    uint64_t number; /* of the record here; from 0 */
    size_t bytes;    /* in it, head and tag not counted; 0: there is none, or its head has not come */
    size_t at;       /* what has left or come: of the record, head and tag included; in: and of the next one's head */
    size_t told;     /* of `bytes`: that the caller was given, or knows to have moved */
    bool open;       /* in: its tag has held */
    unsigned char record[HEAD + RECORD + HVD_TAG_BYTES + HEAD];
};

struct signing {
    const char *what;
    struct hvd_error end; /* why nothing more comes; the socket says it once */
    struct way out, in;
};

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t all_of(const struct way *way)
{
    return HEAD + way->bytes + HVD_TAG_BYTES;
}

static void put_length(unsigned char *at, size_t length)
{
    for (size_t i = 0; i < LENGTH; i++)
        at[i] = (unsigned char)(length >> 8 * (LENGTH - 1 - i));
}

static size_t length_of(const unsigned char *at)
{
    size_t length = 0;
    for (size_t i = 0; i < LENGTH; i++)
        length = length << 8 | at[i];
    return length;
}

static int signed_open(struct hvd_link *link, int fd, int peer, struct hvd_error *error)
{
    const struct hvd_link_signing given = *(const struct hvd_link_signing *)link->self;
    struct signing *mine = malloc(sizeof *mine);
    if (!mine)
        return hvd_fail_rank(error, HVD_ENOMEM, peer, HVD951 "no memory for the signed stream to rank %d", peer);
    int code = hvd_link_tcp.open(link, fd, peer, error);
    if (code != HVD_OK) {
        free(mine);
        return code;
    }
    struct way *way[] = {&mine->out, &mine->in};
    for (int i = 0; i < 2; i++) { /* but for the records: what is not touched costs nothing */
        memset(way[i], 0, offsetof(struct way, record));
        memcpy(way[i]->key, given.keys + i * HVD_KEY_BYTES, HVD_KEY_BYTES);
    }
    hvd_error_none(&mine->end);
    mine->what = given.what;
    link->self = mine;
    link->kind = &hvd_link_signed;
    return HVD_OK;
}

static void begin_record(struct way *out, const void *bytes, size_t count)
{
    unsigned char tag[HVD_TAG_BYTES];
    put_length(out->record, count);
    hvd_mac_tag(out->key, out->number, out->record, LENGTH, tag);
    memcpy(out->record + LENGTH, tag, CHECK);
    memcpy(out->record + HEAD, bytes, count);
    hvd_mac_tag(out->key, out->number, out->record, HEAD + count, out->record + HEAD + count);
    out->bytes = count;
    out->at = out->told = 0;
}

static int signed_send(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct way *out = &((struct signing *)link->self)->out;
    size_t most = least(count, MOVE_MAX);
    *moved = 0;
    while (*moved < most) {
        if (!out->bytes)
            begin_record(out, (const unsigned char *)bytes + *moved, least(most - *moved, RECORD));
        size_t left = 0;
        int code = out->at < all_of(out)
                       ? hvd_link_tcp.send(link, out->record + out->at, all_of(out) - out->at, &left, error)
                       : HVD_OK;
        if (code != HVD_OK)
            return code;
        out->at += left;
        if (out->at < all_of(out))
            break;
        size_t told = least(out->bytes - out->told, most - *moved);
        *moved += told;
        out->told += told;
        if (out->told == out->bytes) {
            out->bytes = 0;
            out->number++;
        }
    }
    link->wants_out = *moved < most;
    return HVD_OK;
}

static int forged(struct hvd_link *link, struct hvd_error *error)
{
    const struct signing *mine = link->self;
    link->forged = true;
    return hvd_fail_rank(error, HVD_EPEER, link->peer,
                         HVD458 "the %s from %s were changed in transit or are forged: record %" PRIu64
                                " does not carry its tag",
                         mine->what, link->called, mine->in.number);
}

static int read_to(struct hvd_link *link, struct way *in, size_t end, struct hvd_error *error)
{
    size_t got;
    int code = hvd_link_tcp.recv(link, in->record + in->at, end - in->at, &got, error);
    in->at += got;
    return code;
}

/* More of the record, and as much as the head of the next one. HVD_OK: it is open; HVD_AGAIN: the rest is yet to come,
 * and the socket has been read empty. */
static int fill(struct hvd_link *link, struct way *in, struct hvd_error *error)
{
    unsigned char tag[HVD_TAG_BYTES];
    int code = in->at < HEAD ? read_to(link, in, HEAD, error) : HVD_OK;
    if (code != HVD_OK || in->at < HEAD)
        return code == HVD_OK ? HVD_AGAIN : code;
    if (!in->bytes) {
        hvd_mac_tag(in->key, in->number, in->record, LENGTH, tag);
        size_t bytes = length_of(in->record);
        if (memcmp(tag, in->record + LENGTH, CHECK) != 0 || bytes == 0 || bytes > RECORD) /* a guess has one try */
            return forged(link, error);
        in->bytes = bytes;
    }
    code = read_to(link, in, all_of(in) + HEAD, error);
    if (code != HVD_OK || in->at < all_of(in))
        return code == HVD_OK ? HVD_AGAIN : code;
    hvd_mac_tag(in->key, in->number, in->record, HEAD + in->bytes, tag);
    in->open = hvd_mac_same(tag, in->record + HEAD + in->bytes);
    return in->open ? HVD_OK : forged(link, error);
}

/* All of the record has been given out. */
static void next_record(struct way *in)
{
    size_t end = all_of(in);
    in->at -= end;
    memmove(in->record, in->record + end, in->at);
    in->open = false;
    in->bytes = in->told = 0;
    in->number++;
}

static int signed_recv(struct hvd_link *link, void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct signing *mine = link->self;
    struct way *in = &mine->in;
    bool over = link->over;
    *moved = 0;
    while (*moved < count && !mine->end.code && (in->open || *moved < MOVE_MAX)) {
        if (!in->open && *moved > 0 && in->at < HEAD)
            break; /* the socket was empty behind the last one */
        if (!in->open && fill(link, in, &mine->end) != HVD_OK)
            break;
        size_t part = least(in->bytes - in->told, count - *moved);
        memcpy((unsigned char *)bytes + *moved, in->record + HEAD + in->told, part);
        *moved += part;
        in->told += part;
        if (in->told == in->bytes)
            next_record(in);
    }
    if (!mine->end.code || *moved > 0) { /* an end is told when it is asked for again: so the link must be watched */
        link->over = over;
        return HVD_OK;
    }
    link->over |= !link->forged;
    return hvd_fail_rank(error, mine->end.code, mine->end.culprit, "%s", mine->end.text);
}

static int signed_ended(struct hvd_link *link, struct hvd_error *error)
{
    return hvd_link_tcp.ended(link, error);
}

static void signed_give_up_after(struct hvd_link *link, int ms, bool unread)
{
    hvd_link_tcp.give_up_after(link, ms, unread);
}

static bool signed_unheard(struct hvd_link *link, int ms)
{
    return hvd_link_tcp.unheard(link, ms);
}

static bool signed_settle(struct hvd_link *link)
{
    return hvd_link_tcp.settle(link);
}

static void signed_close(struct hvd_link *link)
{
    hvd_link_tcp.close(link);
    free(link->self);
    link->self = NULL;
}

const struct hvd_link_kind hvd_link_signed = {"signed",       signed_open,   signed_send,
                                              signed_recv,    signed_ended,  signed_give_up_after,
                                              signed_unheard, signed_settle, signed_close};
