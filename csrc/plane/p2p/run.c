/* run.c - the interpreter of algorithms: see run.h for its rules.
 *
 * The question at each poll: may the next bytes of the next send leave, and may the next bytes of the next receive come
 * in? Both are answered by ranges. Elements are the unit of ranges, bytes the unit of cursors; a message is its head
 * and then its range. What arrives to be combined goes through a block that fits the cache and is combined when the
 * block is full or the message over, so that the network fills the next one meanwhile.
 *
 * A head that is not the expected one ends the job: after it nothing in the stream can be believed.
 */
#define _GNU_SOURCE /* POLLRDHUP */
#include "pack.h"

#include <inttypes.h>
#include <string.h>

static void load(struct hvd_p2p_run *run, struct hvd_p2p_cursor *cursor)
{
    cursor->at = 0;
    if (cursor->i < run->steps)
        cursor->step = hvd_algo_step(run->algo, &run->shape, cursor->i);
}

void hvd_p2p_begin(struct hvd_p2p_run *run)
{
    run->steps = run->algo->steps(&run->shape);
    run->out.i = run->in.i = 0;
    run->block_fill = run->skip = 0;
    run->was_early = run->early && hvd_p2p_early_was(run->early, run->mark);
    if (run->was_early)
        run->out.i = run->steps;
    run->patrol = run->shape.rank;
    load(run, &run->out);
    load(run, &run->in);
    run->in_order =
        run->bucket && run->shape.kind == HVD_ALLREDUCE && run->steps == 1 && run->in.step.how == HVD_STEP_REDUCE;
}

size_t hvd_p2p_kept_bytes(const struct hvd_algo *algo, const struct hvd_shape *shape, size_t element_bytes)
{
    uint64_t begin, end;
    struct hvd_shape own = *shape;
    if (!algo->ordered || algo->steps(&own) == 0 || hvd_algo_step(algo, &own, 0).how != HVD_STEP_STAGE)
        return 0;
    hvd_algo_folded(algo, shape, &begin, &end);
    return (size_t)(end - begin) * element_bytes * (size_t)shape->size;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Elements of the receive under way that are where they belong. */
static uint64_t arrived(const struct hvd_p2p_run *run)
{
    size_t head = sizeof run->head_in;
    return run->in.at <= head ? 0 : (run->in.at - head - run->block_fill) / run->element_bytes;
}

/* Of [at, at + count), the elements in front of everything that [begin, end) holds. */
static uint64_t before(uint64_t at, uint64_t count, uint64_t begin, uint64_t end)
{
    if (begin >= end || end <= at || begin >= at + count)
        return count;
    return begin > at ? begin - at : 0;
}

/* Elements of the send at the cursor that no receive is waited for. */
static uint64_t may_send(const struct hvd_p2p_run *run)
{
    const struct hvd_step *step = &run->out.step;
    uint64_t ready = step->send_count, begin, end;
    if (run->shape.kind == HVD_ALLTOALL)
        return ready;
    hvd_algo_folded(run->algo, &run->shape, &begin, &end);
    for (int j = run->in.i; j < run->out.i && ready; j++) {
        struct hvd_step got = j == run->in.i ? run->in.step : hvd_algo_step(run->algo, &run->shape, j);
        uint64_t come = j == run->in.i ? arrived(run) : 0;
        if (got.from >= 0 && got.how != HVD_STEP_STAGE)
            ready = before(step->send_at, ready, got.recv_at + come, got.recv_at + got.recv_count);
        if (got.fold)
            ready = before(step->send_at, ready, begin, end);
    }
    return ready;
}

/* Of [at, at + count), the elements in front of everything that has yet to be sent, by a step up to that of the receive
 * cursor. */
static uint64_t sent_before(const struct hvd_p2p_run *run, uint64_t at, uint64_t count)
{
    for (int k = run->out.i; k <= run->in.i && k < run->steps && count; k++) {
        struct hvd_step sends = k == run->out.i ? run->out.step : hvd_algo_step(run->algo, &run->shape, k);
        size_t head = sizeof run->head_out, left = k == run->out.i && run->out.at > head ? run->out.at - head : 0;
        if (sends.to >= 0)
            count = before(at, count, sends.send_at + left / run->element_bytes, sends.send_at + sends.send_count);
    }
    return count;
}

/* May bytes of the receive at the cursor be taken? What would replace what has yet to be sent may not; what is to be
 * combined can wait in the block. */
static bool may_recv(const struct hvd_p2p_run *run)
{
    const struct hvd_step *step = &run->in.step;
    return run->shape.kind == HVD_ALLTOALL || step->from < 0 || step->how != HVD_STEP_COPY ||
           sent_before(run, step->recv_at, step->recv_count) == step->recv_count;
}

/* All has come; may it be combined? */
static bool may_fold(const struct hvd_p2p_run *run)
{
    uint64_t begin, end;
    hvd_algo_folded(run->algo, &run->shape, &begin, &end);
    return sent_before(run, begin, end - begin) == end - begin;
}

/* Some bytes of the send at the cursor. HVD_OK: moved; HVD_AGAIN: cannot now. */
static int send_some(struct hvd_p2p_run *run, struct hvd_error *error)
{
    struct hvd_p2p_cursor *out = &run->out;
    if (out->i == run->steps)
        return HVD_AGAIN;
    if (out->step.to < 0) {
        out->i++;
        load(run, out);
        return HVD_OK;
    }
    struct hvd_link *link = run->link[out->step.to];
    int rest = hvd_link_send_rest(link, error);
    if (rest != HVD_OK)
        return rest;
    size_t head = sizeof run->head_out, total = head + out->step.send_count * run->element_bytes;
    uint64_t elements = may_send(run);
    if (run->in_order) {
        elements = least(elements, (out->at + HVD_P2P_AHEAD) / run->element_bytes);
        hvd_p2p_pack_until(run->bucket, elements);
    }
    size_t ready = head + elements * run->element_bytes, moved = 0;
    if (out->at == 0)
        run->head_out = (struct hvd_p2p_head){run->mark, (uint32_t)out->i, 0, total - head};
    if (out->at >= ready || (out->at == 0 && ready == head)) /* a head alone would be a packet of its own */
        return HVD_AGAIN;
    const unsigned char *from = out->at < head
                                    ? (const unsigned char *)&run->head_out + out->at
                                    : run->source + out->step.send_at * run->element_bytes + (out->at - head);
    int code = link->kind->send(link, from, (out->at < head ? head : ready) - out->at, &moved, error);
    if (code != HVD_OK || moved == 0)
        return code == HVD_OK ? HVD_AGAIN : code;
    out->at += moved;
    if (out->at == total) {
        link->counts.messages_out++;
        out->i++;
        load(run, out);
    }
    return HVD_OK;
}

static int check_head(const struct hvd_p2p_run *run, struct hvd_error *error)
{
    const struct hvd_p2p_head *head = &run->head_in;
    const struct hvd_step *step = &run->in.step;
    if (head->mark == run->mark && head->step == (uint32_t)run->in.i && head->early <= 1 &&
        head->bytes == step->recv_count * run->element_bytes)
        return HVD_OK;
    return hvd_fail_rank(error, HVD_EINTERNAL, run->link[step->from]->peer,
                         HVD901 "%s sent %" PRIu64 " bytes as step %" PRIu32 " of another collective, where %" PRIu64
                                " bytes of step %d (%s) were expected; please report this",
                         run->link[step->from]->called, head->bytes, head->step, step->recv_count * run->element_bytes,
                         run->in.i, run->algo->name);
}

/* Bytes of the message under way, in all. */
static size_t total_in(const struct hvd_p2p_run *run)
{
    return run->in.step.from < 0 ? 0 : sizeof run->head_in + run->in.step.recv_count * run->element_bytes;
}

/* Where the next bytes go, and how many fit there. */
static unsigned char *target(struct hvd_p2p_run *run, size_t *room)
{
    const struct hvd_step *step = &run->in.step;
    size_t head = sizeof run->head_in, total = head + step->recv_count * run->element_bytes, at = run->in.at;
    if (at < head) {
        *room = head - at;
        return (unsigned char *)&run->head_in + at;
    }
    *room = total - at;
    switch (step->how) {
    case HVD_STEP_STAGE:
        return run->kept + (size_t)step->from * step->recv_count * run->element_bytes + (at - head);
    case HVD_STEP_REDUCE:
        *room = least(*room, HVD_P2P_BLOCK - run->block_fill);
        return run->block + run->block_fill;
    default:
        return run->buffer + step->recv_at * run->element_bytes + (at - head);
    }
}

/* Combine what the block holds, if it is full or all has come: whole elements, as far as their place has been sent. An
 * ordered algorithm combines an element once: with the scale, and in rank order. */
static void combine(struct hvd_p2p_run *run)
{
    const struct hvd_step *step = &run->in.step;
    if (run->block_fill == 0 || (run->block_fill < HVD_P2P_BLOCK && run->in.at < total_in(run)))
        return;
    uint64_t done = arrived(run), may = sent_before(run, step->recv_at, step->recv_count);
    size_t whole = least(run->block_fill / run->element_bytes, may - done);
    unsigned char *to = run->buffer + (step->recv_at + done) * run->element_bytes;
    bool ordered = run->algo->ordered, after = ordered && step->from < run->shape.rank;
    const void *source[2] = {after ? run->block : to, after ? to : run->block};
    if (whole == 0)
        return;
    hvd_reduce(run->dtype, ordered ? &run->fold : &run->hop, to, source, 2, whole);
    run->block_fill -= whole * run->element_bytes;
    memmove(run->block, run->block + whole * run->element_bytes, run->block_fill);
    if (run->in_order)
        hvd_p2p_unpack_until(run->bucket, done + whole);
}

/* This rank's chunk, or the buffer, of everyone's values in rank order. */
static void fold(struct hvd_p2p_run *run)
{
    const void *source[HVD_RANKS_MAX];
    uint64_t begin, end, count;
    hvd_algo_folded(run->algo, &run->shape, &begin, &end);
    count = end - begin;
    unsigned char *mine = run->buffer + begin * run->element_bytes;
    HVD_ASSERT(run->shape.size <= HVD_RANKS_MAX);
    for (int rank = 0; rank < run->shape.size; rank++)
        source[rank] = rank == run->shape.rank ? mine : run->kept + (size_t)rank * count * run->element_bytes;
    if (count)
        hvd_reduce(run->dtype, &run->fold, mine, source, run->shape.size, count);
}

/* Past a guess that was wrong. */
static int skip_some(struct hvd_p2p_run *run, struct hvd_error *error)
{
    struct hvd_link *link = run->link[run->in.step.from];
    size_t moved = 0;
    int code = link->kind->recv(link, run->block, least(run->skip, HVD_P2P_BLOCK), &moved, error);
    run->skip -= moved;
    return code == HVD_OK && moved == 0 ? HVD_AGAIN : code;
}

/* A head has come. */
static int begin_message(struct hvd_p2p_run *run, struct hvd_error *error)
{
    const struct hvd_p2p_head *head = &run->head_in;
    if (head->early != 1 || head->mark == run->mark || head->bytes > HVD_EARLY_BYTES)
        return check_head(run, error);
    run->link[run->in.step.from]->counts.messages_in++;
    run->skip = (size_t)head->bytes;
    run->in.at = 0;
    return HVD_OK;
}

static int recv_part(struct hvd_p2p_run *run, struct hvd_error *error)
{
    struct hvd_p2p_cursor *in = &run->in;
    struct hvd_link *link = run->link[in->step.from];
    size_t head = sizeof run->head_in, room, moved = 0;
    unsigned char *to = target(run, &room);
    if (room == 0)
        return HVD_AGAIN;
    int code = link->kind->recv(link, to, room, &moved, error);
    if (code != HVD_OK || moved == 0)
        return code == HVD_OK ? HVD_AGAIN : code;
    if (in->at >= head && in->step.how == HVD_STEP_REDUCE)
        run->block_fill += moved;
    bool heading = in->at < head;
    in->at += moved;
    if (heading && in->at == head)
        code = begin_message(run, error);
    if (code != HVD_OK || in->at == 0)
        return code;
    combine(run);
    link->counts.messages_in += in->at == total_in(run);
    return HVD_OK;
}

static int recv_some(struct hvd_p2p_run *run, struct hvd_error *error)
{
    struct hvd_p2p_cursor *in = &run->in;
    if (in->i == run->steps || (in->at == 0 && !may_recv(run)))
        return HVD_AGAIN;
    if (run->skip)
        return skip_some(run, error);
    combine(run); /* what has been sent since */
    if (in->at < total_in(run)) {
        int code = recv_part(run, error);
        if (code != HVD_OK || in->at < total_in(run))
            return code;
    }
    if (run->block_fill)
        return HVD_AGAIN;
    if (in->step.fold && !may_fold(run))
        return HVD_AGAIN;
    if (in->step.fold)
        fold(run);
    in->i++;
    load(run, in);
    return HVD_OK;
}

/* A peer that is lost may be one that no step waits for: whoever does wait for it stops, and would be waited for here
 * without end. One peer a time, so that an idle poll stays cheap. */
static int look_around(struct hvd_p2p_run *run, struct hvd_error *error)
{
    if (run->leaving && *run->leaving)
        return HVD_AGAIN; /* who has left may end its streams, with nothing missing */
    do
        run->patrol = (run->patrol + 1) % run->shape.size;
    while (run->patrol == run->shape.rank);
    struct hvd_link *link = run->link[run->patrol];
    int code = link->kind->ended(link, error);
    return code == HVD_OK ? HVD_AGAIN : code;
}

/* Will look_around look for the ends of peers? Otherwise an end would be news for ever. */
static bool ends_are_news(const struct hvd_p2p_run *run)
{
    bool lost = run->leaving && *run->leaving;
    for (int peer = 0; peer < run->shape.size; peer++)
        lost |= peer != run->shape.rank && run->link[peer]->over;
    return !lost;
}

/* Does a step come to receiving? Not where what is to be sent before finds its stream ended: bytes that lie there would
 * be news for ever. */
static bool comes_to_receive(const struct hvd_p2p_run *run)
{
    bool ended = false;
    for (int peer = 0; peer < run->shape.size; peer++)
        if (peer != run->shape.rank && run->link[peer]->over)
            ended |= run->was_early || (run->out.i < run->steps && run->out.step.to == peer);
    return !ended;
}

int hvd_p2p_watch(const struct hvd_p2p_run *run, struct pollfd *news)
{
    int count = 0;
    bool ends = ends_are_news(run);
    bool receives = comes_to_receive(run) && run->in.i < run->steps &&
                    (run->in.at > 0 ? run->in.at < total_in(run) : may_recv(run)) && run->block_fill < HVD_P2P_BLOCK;
    for (int peer = 0; peer < run->shape.size; peer++) {
        const struct hvd_link *link = run->link[peer];
        if (peer == run->shape.rank || link->fd < 0 || link->over || link->forged)
            continue;
        short what = ends ? POLLRDHUP : 0;
        if (receives && run->in.step.from == peer)
            what |= POLLIN;
        bool sends = run->was_early || (run->out.i < run->steps && run->out.step.to == peer);
        if (sends && link->wants_out)
            what |= POLLOUT;
        if (what)
            news[count++] = (struct pollfd){.fd = link->fd, .events = what};
    }
    return count;
}

/* The guess was right, and all of it must leave: HVD_OK: it has. */
static int finish_early(struct hvd_p2p_run *run, struct hvd_error *error)
{
    int all = HVD_OK;
    for (int peer = 0; run->was_early && peer < run->shape.size; peer++) {
        if (peer == run->shape.rank)
            continue;
        int code = hvd_link_send_rest(run->link[peer], error);
        if (code < 0)
            return code;
        all = code == HVD_OK ? all : HVD_AGAIN;
    }
    return all;
}

int hvd_p2p_step(struct hvd_p2p_run *run, bool *progress, struct hvd_error *error)
{
    enum { PASSES = 64 }; /* so that a poll stays short */
    int rest = finish_early(run, error);
    if (rest < 0)
        return rest;
    for (int pass = 0; pass < PASSES; pass++) {
        int sent = send_some(run, error);
        int received = sent < 0 ? sent : recv_some(run, error);
        if (received < 0)
            return received;
        if (run->out.i == run->steps && run->in.i == run->steps) {
            *progress |= rest == HVD_OK;
            return rest;
        }
        if (sent == HVD_AGAIN && received == HVD_AGAIN)
            return pass == 0 ? look_around(run, error) : HVD_AGAIN;
        *progress = true;
    }
    return HVD_AGAIN;
}
