/* tree.c - one round of votes between hosts: every edge of the tree carries one vote each way.
 *
 * To a neighbour goes the merge of everything on this side of the edge: the vote of this host and what has come from
 * the other neighbours. It leaves as soon as that is there. When votes have come over all edges, their merge with this
 * host's is the vote of all, the same bytes everywhere, since merging is associative and commutative. So there is no
 * root and no way down: 2 (h - 1) messages for h hosts, and as many steps one after the other as the tree is wide;
 * between two hosts a round is one message each way, both at once.
 *
 *     OPEN   "round r is open here": a host without news enters it, too. A vote says so as well.
 *     VOTE   the merge of one side
 *     ABORT  why the job ends; goes on to all neighbours
 *     ALIVE  "I wait, too": see silence.c
 *
 * At most two votes of a neighbour wait here: it can give that of round r + 1 when it has mine of r, and that of r + 2
 * only when it has mine of r + 1. So two places, by even and odd rounds, are enough, as boards are; a third is an
 * error.
 *
 * What comes from a stream is not believed: lengths, rounds and lives are checked at the head, votes by hvd_vote_check
 * when their round has come, and each must speak for exactly the ranks on its side.
 */
#include "tree.h"

#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC 0x65746f76u /* "vote" */
enum { TYPE_OPEN = 1, TYPE_VOTE, TYPE_ABORT, TYPE_ALIVE };

struct farewell {
    int32_t culprit, code;
    char text[];
};

static bool near_open(struct hvd_near *near, size_t vote_bytes)
{
    near->out_room = 2 * (sizeof near->head + vote_bytes) + 2 * sizeof near->body;
    near->out = malloc(near->out_room);
    near->vote[0] = malloc(vote_bytes);
    near->vote[1] = malloc(vote_bytes);
    return near->out && near->vote[0] && near->vote[1];
}

int hvd_tree_open(struct hvd_engine *engine, struct hvd_set *set, struct hvd_error *error)
{
    int host_of[HVD_LOCAL_MAX], leader[HVD_LOCAL_MAX], index_of[HVD_LOCAL_MAX], near[HVD_NEAR_MAX];
    if (set->locals == set->size || set->here > 0)
        return HVD_OK;
    for (int rank = 0; rank < set->size; rank++)
        host_of[rank] = engine->who[set->member[rank]].host;
    int hosts = hvd_tree_leaders(host_of, set->size, leader, index_of), at = index_of[set->rank];
    struct hvd_tree *tree = calloc(1, sizeof *tree);
    if (!tree)
        return hvd_fail(error, HVD_ENOMEM, "rank %d: no memory for votes", engine->options.rank);
    set->tree = tree;
    tree->count = hvd_tree_neighbours(at, hosts, near);
    tree->vote_bytes = set->vote_bytes;
    tree->mine = malloc(set->vote_bytes);
    tree->part = malloc(set->vote_bytes);
    bool all = tree->mine && tree->part;
    for (int i = 0; i < tree->count; i++) {
        struct hvd_near *one = &tree->near[i];
        one->rank = leader[near[i]];
        one->behind = hvd_tree_behind(index_of, set->size, at, near[i]);
        one->link = set->vote_wires ? set->vote_wires->link[one->rank] : NULL;
        if (!one->link)
            return hvd_fail(error, HVD_EINIT, "rank %d has no stream for votes to %s", engine->options.rank,
                            engine->who[set->member[one->rank]].called);
        all &= near_open(one, set->vote_bytes);
    }
    return all ? HVD_OK : hvd_fail(error, HVD_ENOMEM, "rank %d: no memory for votes", engine->options.rank);
}

void hvd_tree_close(struct hvd_set *set)
{
    struct hvd_tree *tree = set->tree;
    if (!tree)
        return;
    for (int i = 0; i < tree->count; i++) {
        free(tree->near[i].out);
        free(tree->near[i].vote[0]);
        free(tree->near[i].vote[1]);
    }
    free(tree->mine);
    free(tree->part);
    free(tree);
    set->tree = NULL;
}

/* The stream has ended. Who has left may do that, and who has closed a set, which nobody has a round of then; else
 * somebody may be about to say why. */
static void near_lost(struct hvd_engine *engine, const struct hvd_set *set, const struct hvd_near *near)
{
    char text[256];
    if (set->left || (set->number != 0 && !set->entered))
        return;
    snprintf(text, sizeof text, "%s is lost: its connection has ended", near->link->called);
    hvd_abort_suspect(engine, set, set->member[near->rank], false, text);
}

static void near_flush(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_near *near)
{
    struct hvd_error error = {0};
    size_t moved;
    while (near->out_count && !near->link->over) {
        if (near->link->kind->send(near->link, near->out, near->out_count, &moved, &error) != HVD_OK) {
            near_lost(engine, set, near);
            near->out_count = 0;
            return;
        }
        if (moved == 0)
            return;
        near->out_count -= moved;
        memmove(near->out, near->out + moved, near->out_count);
    }
}

static void say(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_near *near, uint32_t type,
                uint64_t round, const void *body, size_t bytes)
{
    struct hvd_frame head = {MAGIC, type, (uint32_t)bytes, set->life, round};
    if (near->link->over || near->out_count + sizeof head + bytes > near->out_room)
        return; /* there is room for all that may wait; an abort that finds none has a mute neighbour */
    memcpy(near->out + near->out_count, &head, sizeof head);
    if (bytes)
        memcpy(near->out + near->out_count + sizeof head, body, bytes);
    near->out_count += sizeof head + bytes;
    near->link->counts.messages_out++;
    near_flush(engine, set, near);
}

/* Is this a frame that may come now? Sets where its body goes. */
static bool may_come(const struct hvd_set *set, struct hvd_near *near, char **body)
{
    const struct hvd_frame *head = &near->head;
    uint64_t round = hvd_coord_round(set->coord);
    *body = near->body;
    if (head->magic != MAGIC || head->life != set->life)
        return false;
    switch (head->type) {
    case TYPE_OPEN:
    case TYPE_ALIVE:
        return head->bytes == 0 && head->round <= round + 1;
    case TYPE_ABORT:
        return head->bytes >= sizeof(struct farewell) && head->bytes < sizeof near->body;
    case TYPE_VOTE:
        *body = (char *)near->vote[head->round & 1];
        return (head->round == round || head->round == round + 1) && near->has[head->round & 1] != head->round &&
               head->bytes >= sizeof(struct hvd_vote) && head->bytes <= set->vote_bytes;
    default:
        return false;
    }
}

static void babbles(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_near *near)
{
    char text[256];
    snprintf(text, sizeof text,
             "%s sent %u bytes of type %u for round %llu where a vote of round %llu was due; please report this",
             near->link->called, near->head.bytes, near->head.type, (unsigned long long)near->head.round,
             (unsigned long long)hvd_coord_round(set->coord));
    near->deaf = true;
    hvd_engine_abort(engine, set->member[near->rank], HVD_EINTERNAL, text);
}

static void take_frame(struct hvd_engine *engine, const struct hvd_set *set, struct hvd_near *near)
{
    const struct hvd_frame *head = &near->head;
    near->link->counts.messages_in++;
    if (head->type == TYPE_ABORT) {
        struct farewell last;
        memcpy(&last, near->body, sizeof last);
        near->body[head->bytes] = '\0';
        bool known = last.culprit >= 0 && last.culprit < engine->options.size;
        hvd_engine_abort(engine, known ? last.culprit : -1, last.code < 0 && last.code > -128 ? last.code : HVD_EPEER,
                         near->body + sizeof last);
        return;
    }
    if (head->round > near->heard)
        near->heard = head->round;
    if (head->type == TYPE_VOTE && near->vote[head->round & 1]->bytes == head->bytes)
        near->has[head->round & 1] = head->round;
    else if (head->type == TYPE_VOTE)
        babbles(engine, set, near);
}

/* As much as has come. */
static bool near_read(struct hvd_engine *engine, struct hvd_set *set, struct hvd_near *near)
{
    struct hvd_error error = {0};
    const size_t head = sizeof near->head;
    bool moved_any = false;
    while (!near->deaf) { /* also when nothing can be sent any more: its last words may lie here */
        char *body = NULL;
        size_t moved;
        if (near->at >= head && !may_come(set, near, &body)) {
            babbles(engine, set, near);
            return true;
        }
        char *to = near->at < head ? (char *)&near->head + near->at : body + (near->at - head);
        size_t room = near->at < head ? head - near->at : head + near->head.bytes - near->at;
        if (room && near->link->kind->recv(near->link, to, room, &moved, &error) != HVD_OK) {
            near->deaf = true;
            near_lost(engine, set, near);
            return true;
        }
        if (room && moved == 0)
            break;
        near->at += room ? moved : 0;
        moved_any = true;
        if (near->at >= head && near->at == head + near->head.bytes && may_come(set, near, &body)) {
            take_frame(engine, set, near);
            near->at = 0;
        }
    }
    return moved_any;
}

bool hvd_tree_pump(struct hvd_engine *engine, struct hvd_set *set)
{
    bool moved = false;
    for (int i = 0; i < set->tree->count; i++) {
        near_flush(engine, set, &set->tree->near[i]);
        moved |= near_read(engine, set, &set->tree->near[i]);
    }
    return moved;
}

bool hvd_tree_heard(const struct hvd_tree *tree, uint64_t round)
{
    for (int i = 0; i < tree->count; i++)
        if (tree->near[i].heard >= round)
            return true;
    return false;
}

/* Is it a vote of this round, for exactly the ranks on that side? */
static bool sound(const struct hvd_set *set, const struct hvd_near *near, uint64_t round)
{
    struct hvd_vote *vote = near->vote[round & 1];
    return vote->bytes <= set->vote_bytes && hvd_vote_check(set->coord, vote, vote->bytes) == HVD_OK &&
           vote->round == round && vote->ranks == (uint32_t)near->behind;
}

/* into := mine (+) what came from all neighbours but `without`. */
static void merge_all(const struct hvd_set *set, struct hvd_vote *into, uint64_t round, int without)
{
    const struct hvd_tree *tree = set->tree;
    memcpy(into, tree->mine, tree->mine->bytes);
    for (int i = 0; i < tree->count; i++)
        if (i != without)
            hvd_vote_merge(set->coord, into, tree->near[i].vote[round & 1]);
}

int hvd_tree_round(struct hvd_engine *engine, struct hvd_set *set, uint64_t round, bool whole, bool *moved)
{
    struct hvd_tree *tree = set->tree;
    int missing = 0, silent = -1;
    for (int i = 0; i < tree->count; i++) {
        if (tree->near[i].has[round & 1] == round)
            continue;
        missing++;
        silent = i;
        if (tree->near[i].link->over)
            near_lost(engine, set, &tree->near[i]);
    }
    for (int i = 0; i < tree->count; i++) {
        struct hvd_near *near = &tree->near[i];
        if (near->has[round & 1] != round || near->sound == round)
            continue;
        if (!sound(set, near, round)) {
            near->head = (struct hvd_frame){MAGIC, TYPE_VOTE, near->vote[round & 1]->bytes, set->life, round};
            babbles(engine, set, near);
            return HVD_EINVAL;
        }
        near->sound = round;
    }
    for (int i = 0; i < tree->count; i++) {
        struct hvd_near *near = &tree->near[i];
        bool ready = whole && (missing == 0 || (missing == 1 && silent == i));
        if (ready && near->voted < round) {
            merge_all(set, tree->part, round, i);
            near->voted = near->told = round;
            say(engine, set, near, TYPE_VOTE, round, tree->part, tree->part->bytes);
            *moved = true;
        } else if (near->told < round && near->heard < round) {
            near->told = round;
            say(engine, set, near, TYPE_OPEN, round, NULL, 0);
            *moved = true;
        }
    }
    if (!whole || missing)
        return HVD_AGAIN;
    merge_all(set, set->agreed, round, -1);
    return HVD_OK;
}

void hvd_tree_flood(struct hvd_engine *engine, struct hvd_set *set, const struct hvd_error *failure)
{
    char body[sizeof set->tree->near->body - 1];
    struct farewell last = {failure->culprit, failure->code};
    size_t length = strlen(failure->text), room = sizeof body - sizeof last;
    length = length < room ? length : room;
    memcpy(body, &last, sizeof last);
    memcpy(body + sizeof last, failure->text, length);
    for (int i = 0; i < set->tree->count; i++)
        say(engine, set, &set->tree->near[i], TYPE_ABORT, 0, body, sizeof last + length);
}

void hvd_tree_tick(struct hvd_engine *engine, struct hvd_set *set, bool waits)
{
    for (int i = 0; i < set->tree->count; i++) {
        struct hvd_near *near = &set->tree->near[i];
        bool heard = near->frames != near->link->counts.messages_in;
        near->mute = heard || !waits ? 0 : near->mute + 1;
        near->frames = near->link->counts.messages_in;
        if (waits && near->out_count == 0)
            say(engine, set, near, TYPE_ALIVE, 0, NULL, 0);
    }
}

int hvd_tree_mute(const struct hvd_tree *tree, uint64_t round, int ticks)
{
    for (int i = 0; i < tree->count; i++)
        if (tree->near[i].has[round & 1] != round && tree->near[i].mute >= ticks)
            return tree->near[i].rank;
    return -1;
}

bool hvd_tree_idle(const struct hvd_tree *tree)
{
    for (int i = 0; i < tree->count; i++)
        if (tree->near[i].out_count && !tree->near[i].link->over)
            return false;
    return true;
}

int hvd_tree_watch(const struct hvd_tree *tree, struct pollfd *news)
{
    int count = 0;
    for (int i = 0; i < tree->count; i++) {
        const struct hvd_near *near = &tree->near[i];
        if (!near->deaf)
            news[count++] = (struct pollfd){.fd = near->link->fd,
                                            .events = POLLIN | (near->out_count && !near->link->over ? POLLOUT : 0)};
    }
    return count;
}
