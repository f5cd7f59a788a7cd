/* neighbor.c - a neighbour in the tree of hosts: the frames that go to it and come from it.
 *
 * What is there to decide? What may come, and when. A frame is read into one block, mostly by one call, and looked at
 * when all of it is there; its head is looked at before, so that nobody waits for the rest of what is no frame. A
 * vote is laid where its round belongs, with what rides with it behind the room for the vote.
 *
 * At most two votes of a neighbour wait here: it can give that of round r + 1 when it has mine of r, and that of r + 2
 * only when it has mine of r + 1. So two places, by even and odd rounds, are enough, as boards are; a third is an
 * error.
 *
 * What comes from a stream is not believed: lengths, rounds and lives are checked at the head, what rides with a vote
 * at once, and votes by vote_tree.c when their round has come.
 */
#include "vote_tree.h"

#include "../engine.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC        0x65746f76u /* "vote" */
#define FAREWELL_MAX 1200        /* bytes of an abort's body */

struct farewell {
    int32_t culprit, code;
    char text[];
};

/* A vote, and behind it room for what rides with it. */
bool hvd_neighbor_vote_room(struct hvd_vote **vote, struct hvd_eager **ride, size_t vote_bytes)
{
    char *block = malloc(vote_bytes + HVD_EAGER_ROOM);
    *vote = (struct hvd_vote *)(void *)block;
    *ride = block ? (struct hvd_eager *)(void *)(block + vote_bytes) : NULL;
    if (block)
        memset(*ride, 0, sizeof **ride);
    return block != NULL;
}

bool hvd_neighbor_room(struct hvd_neighbor *near, size_t vote_bytes)
{
    near->in_room = sizeof(struct hvd_frame) + vote_bytes + HVD_EAGER_ROOM + FAREWELL_MAX + HVD_STALL_BODY_MAX;
    near->out_room = 2 * near->in_room;
    near->out = malloc(near->out_room);
    near->in = malloc(near->in_room);
    bool all = near->out && near->in;
    for (int i = 0; i < 2; i++)
        all &= hvd_neighbor_vote_room(&near->vote[i], &near->ride[i], vote_bytes);
    return all;
}

/* The stream has ended. Who has left may do that, and who has closed a set, which nobody has a round of then; else
 * somebody may be about to say why. */
void hvd_neighbor_lost(struct hvd_engine *engine, const struct hvd_set *set, const struct hvd_neighbor *near)
{
    char text[320];
    if (set->left || (set->number != 0 && !set->entered))
        return;
    if (near->parted)
        hvd_text_write(
            text, sizeof text,
            HVD451 "%s left the job (its script ended, or it called shutdown), and not all ranks had agreed within its "
                   "HVDLITE_LEAVE_TIMEOUT: is one of them stopped, or its host too busy?",
            near->link->called);
    else
        hvd_text_write(text, sizeof text, HVD450 "%s is lost: its connection has ended", near->link->called);
    hvd_abort_suspect(engine, set, set->member[near->rank], false, text);
}

void hvd_neighbor_flush(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_neighbor *near)
{
    struct hvd_error error;
    hvd_error_none(&error);
    size_t moved;
    while (near->out_count && !near->link->over) {
        if (near->link->kind->send(near->link, near->out, near->out_count, &moved, &error) != HVD_OK) {
            hvd_neighbor_lost(engine, set, near);
            near->out_count = 0;
            return;
        }
        if (moved == 0)
            return;
        near->out_count -= moved;
        memmove(near->out, near->out + moved, near->out_count);
    }
}

/* There is room for all that may wait for a neighbour that reads. */
static void deaf(struct hvd_engine *engine, const struct hvd_set *set, const struct hvd_neighbor *near)
{
    char text[320];
    hvd_text_write(text, sizeof text,
                   HVD450 "%s is lost: it does not read from its connection, and %zu bytes of votes wait for it",
                   near->link->called, near->out_count);
    hvd_abort_suspect(engine, set, set->member[near->rank], false, text);
}

void hvd_neighbor_say(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_neighbor *near, uint32_t type,
                      uint64_t round, const void *body, size_t bytes, const struct hvd_eager *ride)
{
    size_t rides = ride && ride->mark ? hvd_eager_bytes(ride) : 0;
    struct hvd_frame head = {MAGIC, type, (uint32_t)(bytes + rides), set->life, round};
    if (near->link->over || (type == HVD_FRAME_ALIVE && near->out_count))
        return; /* whatever waits there says that this side lives, once it is read */
    if (near->out_count + sizeof head + head.bytes > near->out_room) {
        if (type != HVD_FRAME_ABORT) /* a vote that is dropped would be waited for, for ever */
            deaf(engine, set, near);
        return;
    }
    char *to = near->out + near->out_count;
    memcpy(to, &head, sizeof head);
    if (bytes)
        memcpy(to + sizeof head, body, bytes);
    if (rides)
        memcpy(to + sizeof head + bytes, ride, rides);
    near->out_count += sizeof head + head.bytes;
    near->link->counts.messages_out++;
    hvd_neighbor_flush(engine, set, near);
}

/* Is this the head of a frame that may come now? */
static bool may_come(const struct hvd_engine *engine, const struct hvd_set *set, const struct hvd_neighbor *near,
                     const struct hvd_frame *head)
{
    uint64_t round = hvd_coord_round(set->coord);
    if (head->magic != MAGIC || head->life != set->life)
        return false;
    switch (head->type) {
    case HVD_FRAME_OPEN:
    case HVD_FRAME_ALIVE:
    case HVD_FRAME_PART:
        return head->bytes == 0 && head->round <= round + 1;
    case HVD_FRAME_ABORT:
        return head->bytes >= sizeof(struct farewell) && head->bytes < FAREWELL_MAX;
    case HVD_FRAME_VOTE:
        return (head->round == round || head->round == round + 1) && near->has[head->round & 1] != head->round &&
               head->bytes >= sizeof(struct hvd_vote) && head->bytes <= set->vote_bytes + HVD_EAGER_ROOM;
    default:
        return engine->stall.may_come && engine->stall.may_come(set, head);
    }
}

void hvd_neighbor_babbles(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_neighbor *near,
                          const struct hvd_frame *head)
{
    char text[256];
    hvd_text_write(text, sizeof text,
                   HVD901
                   "%s sent %u bytes of type %u for round %llu where a vote of round %llu was due; please report this",
                   near->link->called, head->bytes, head->type, (unsigned long long)head->round,
                   (unsigned long long)hvd_coord_round(set->coord));
    near->deaf = true;
    hvd_engine_abort(engine, set->member[near->rank], HVD_EINTERNAL, text);
}

/* A vote, and what rides with it; false: it is none. */
static bool take_vote(const struct hvd_set *set, struct hvd_neighbor *near, const struct hvd_frame *head,
                      const char *body)
{
    int place = head->round & 1;
    uint32_t bytes;
    memcpy(&bytes, body + offsetof(struct hvd_vote, bytes), sizeof bytes);
    if (bytes < sizeof(struct hvd_vote) || bytes > head->bytes || bytes > set->vote_bytes ||
        head->bytes - bytes > HVD_EAGER_ROOM)
        return false;
    memcpy(near->vote[place], body, bytes);
    memset(near->ride[place], 0, sizeof *near->ride[place]);
    memcpy(near->ride[place], body + bytes, head->bytes - bytes);
    if (head->bytes > bytes && !hvd_eager_check(near->ride[place], head->bytes - bytes, set->size))
        return false;
    near->has[place] = head->round;
    return true;
}

static void take_frame(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_neighbor *near,
                       const struct hvd_frame *head, const char *body)
{
    near->link->counts.messages_in++;
    if (head->type == HVD_FRAME_ABORT) {
        struct farewell last;
        char text[FAREWELL_MAX];
        memcpy(&last, body, sizeof last);
        memcpy(text, body + sizeof last, head->bytes - sizeof last);
        text[head->bytes - sizeof last] = '\0';
        bool known = last.culprit >= 0 && last.culprit < engine->options.size;
        hvd_engine_abort(engine, known ? last.culprit : -1, last.code < 0 && last.code > -128 ? last.code : HVD_EPEER,
                         text);
        return;
    }
    if (head->type > HVD_FRAME_PART) {
        if (!engine->stall.take(engine, set, near, head, body))
            hvd_neighbor_babbles(engine, set, near, head);
        return;
    }
    near->parted |= head->type == HVD_FRAME_PART;
    if (head->round > near->heard)
        near->heard = head->round;
    if (head->type == HVD_FRAME_VOTE && !take_vote(set, near, head, body))
        hvd_neighbor_babbles(engine, set, near, head);
}

/* The frames that have come whole. */
static void take_frames(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_neighbor *near)
{
    struct hvd_frame head;
    size_t at = 0;
    while (!near->deaf && near->in_count - at >= sizeof head) {
        memcpy(&head, near->in + at, sizeof head);
        if (!may_come(engine, set, near, &head))
            hvd_neighbor_babbles(engine, set, near, &head);
        else if (near->in_count - at < sizeof head + head.bytes)
            break;
        else
            take_frame(engine, set, near, &head, near->in + at + sizeof head);
        at += sizeof head + head.bytes;
    }
    near->in_count = near->deaf ? 0 : near->in_count - at;
    at = near->deaf ? 0 : at;
    memmove(near->in, near->in + at, near->in_count);
}

/* As much as has come; mostly all of it by one call. */
bool hvd_neighbor_read(struct hvd_engine *engine, struct hvd_set *set, struct hvd_neighbor *near)
{
    struct hvd_error error;
    hvd_error_none(&error);
    bool moved_any = false, more = true;
    while (more && !near->deaf) { /* also when nothing can be sent any more: its last words may lie here */
        size_t room = near->in_room - near->in_count, moved;
        if (near->link->kind->recv(near->link, near->in + near->in_count, room, &moved, &error) != HVD_OK) {
            near->deaf = true;
            if (near->link->forged)
                hvd_engine_abort(engine, set->member[near->rank], error.code, error.text);
            else
                hvd_neighbor_lost(engine, set, near);
            return true;
        }
        near->in_count += moved;
        moved_any |= moved > 0;
        more = moved == room || near->link->forged; /* a short one has taken all there was */
        take_frames(engine, set, near);
    }
    return moved_any;
}

void hvd_tree_flood(struct hvd_engine *engine, struct hvd_set *set, const struct hvd_error *failure)
{
    char body[FAREWELL_MAX - 1];
    struct farewell last = {failure->culprit, failure->code};
    memcpy(body, &last, sizeof last);
    hvd_text_copy(body + sizeof last, sizeof body - sizeof last, failure->text);
    size_t length = strlen(body + sizeof last);
    for (int i = 0; i < set->tree->count; i++)
        hvd_neighbor_say(engine, set, &set->tree->near[i], HVD_FRAME_ABORT, 0, body, sizeof last + length, NULL);
}

void hvd_tree_part(struct hvd_engine *engine, struct hvd_set *set)
{
    for (int i = 0; i < set->tree->count; i++)
        hvd_neighbor_say(engine, set, &set->tree->near[i], HVD_FRAME_PART, 0, NULL, 0, NULL);
}
