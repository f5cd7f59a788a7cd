/* fuzz_tree.c - what comes over an edge of the tree of hosts: votes, openings, signs of life, aborts, and none of them.
 *
 * One rank per host. The leader under test runs the engine's own vote_tree.c, abort.c and silence.c over links that are
 * made of the input; the other ranks are coordinators only, whose true votes reach it merged, as their side of an edge
 * would send them. The input says what each rank submits, which frames come, in which pieces, and what is damaged on
 * the way.
 *
 * What must hold: frames that leave are whole and of this round; where nothing was damaged, what is agreed is what the
 * others agreed on, and the job goes on; whatever was believed speaks for every rank once; an abort has a text and
 * names nobody outside the job. In any case it ends: there is no input that keeps a turn busy.
 */
#include "check.h"
#include "negotiation/state.h"
#include "engine/engine.h"
#include "fuzz.h"
#include "ranks.h"

enum {
    RANKS_MAX = 6,
    TICKETS = 8,
    TURNS = 64,
    INBOX = 1 << 15,
    MAGIC = 0x65746f76,
    OPEN = 1,
    VOTE,
    ABORT,
    ALIVE,
    PART
};

/* A neighbour: what waits to be read from it, and what of a frame was written to it. */
struct wire {
    struct hvd_link link;
    size_t read, written; /* of the inbox */
    struct hvd_frame out;
    size_t out_at;
    uint64_t sent; /* round whose true vote was put into the inbox */
    bool over;
    uint8_t inbox[INBOX];
};

struct scene {
    struct fuzz_input input;
    struct ranks ranks;
    struct hvd_set set;
    struct hvd_stream_table wires;
    struct hvd_link *link[RANKS_MAX];
    int member[RANKS_MAX];
    struct wire wire[HVD_NEAR_MAX];
    int me, piece;         /* bytes that one call moves at most */
    bool whole, damaged;   /* my vote lies in tree->mine; something came that was not true */
    bool ahead;            /* the others have decided this round: `agreed` is theirs */
    struct hvd_vote *side; /* room for one vote */
};

static struct hvd_engine engine;
static struct hvd_who who[RANKS_MAX];
static struct hvd_trace_slot trace;
static struct scene scene; /* one at a time: links know it by this name */

static struct wire *wire_of(struct hvd_link *link)
{
    return (struct wire *)(void *)link;
}

static int wire_send(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct wire *wire = wire_of(link);
    *moved = count < (size_t)scene.piece ? count : (size_t)scene.piece;
    for (size_t i = 0; i < *moved; i++) {
        if (wire->out_at < sizeof wire->out)
            ((char *)&wire->out)[wire->out_at] = ((const char *)bytes)[i];
        wire->out_at++;
        if (wire->out_at < sizeof wire->out)
            continue;
        const struct hvd_frame *frame = &wire->out;
        CHECK(frame->magic == MAGIC && frame->type >= OPEN && frame->type <= PART && frame->life == scene.set.life &&
                  frame->round <= hvd_coord_round(scene.set.coord) &&
                  frame->bytes <= scene.set.vote_bytes + HVD_EAGER_ROOM,
              "type %u, %u bytes, round %llu", frame->type, frame->bytes, (unsigned long long)frame->round);
        if (wire->out_at == sizeof wire->out + frame->bytes)
            wire->out_at = 0;
    }
    link->counts.bytes_out += *moved;
    return HVD_OK;
}

static int wire_recv(struct hvd_link *link, void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct wire *wire = wire_of(link);
    size_t there = wire->written - wire->read;
    *moved = count < there ? count : there;
    *moved = *moved < (size_t)scene.piece ? *moved : (size_t)scene.piece;
    if (*moved == 0 && wire->over) {
        link->over = true;
        return hvd_fail_rank(error, HVD_EPEER, link->peer, "the connection has ended");
    }
    memcpy(bytes, wire->inbox + wire->read, *moved);
    wire->read += *moved;
    return HVD_OK;
}

static void put(struct wire *wire, const void *bytes, size_t count)
{
    if (wire->read == wire->written)
        wire->read = wire->written = 0;
    if (wire->written + count <= INBOX)
        memcpy(wire->inbox + wire->written, bytes, count);
    else
        scene.damaged = true;
    wire->written += wire->written + count <= INBOX ? count : 0;
}

static const struct hvd_link_kind kind = {.name = "fuzz", .send = wire_send, .recv = wire_recv};

static bool is_behind(int rank, int host, int near)
{
    int below = near > host ? near : host;
    while (rank > below)
        rank = (rank - 1) / 2;
    return (rank == below) == (near > host);
}

/* Who is on the other side of the edge to this neighbour votes; their merge. */
static void side_of(int near)
{
    bool any = false;
    for (int rank = 0; rank < scene.ranks.size; rank++) {
        struct hvd_vote *vote = scene.ranks.vote[rank];
        if (!is_behind(rank, scene.me, near))
            continue;
        hvd_coord_vote(scene.ranks.coord[rank], vote, scene.ranks.vote_bytes);
        if (any)
            hvd_vote_merge(scene.ranks.coord[rank], scene.side, vote);
        else
            memcpy(scene.side, vote, vote->bytes);
        any = true;
    }
}

/* What rides with a vote, if anything does: a part of the neighbour's, or anything. Returns its bytes. */
static size_t ride_of(int near, void *room, size_t bytes)
{
    struct hvd_eager ride = {HVD_EAGER_MATCHES + fuzz_below(&scene.input, 2), 8, 1};
    uint64_t part[2] = {(uint64_t)near, 1};
    switch (fuzz_below(&scene.input, 4)) {
    case 0:
        memcpy(room, &ride, sizeof ride);
        memcpy((char *)room + sizeof ride, part, sizeof part);
        return sizeof ride + sizeof part;
    case 1:
        scene.damaged = true;
        return fuzz_take(&scene.input, room, fuzz_below(&scene.input, (uint32_t)bytes));
    default:
        return 0;
    }
}

/* A frame from a neighbour: mostly the one that is due. */
static void come(struct wire *wire)
{
    struct hvd_frame frame = {MAGIC, fuzz_byte(&scene.input), 0, scene.set.life, hvd_coord_round(scene.set.coord)};
    union {
        struct {
            int32_t culprit, code;
            char text[32];
        } last;
        char bytes[64];
    } body = {0};
    const void *from = &body;
    frame.round += scene.ahead;
    if (frame.type >= 8) { /* the vote, if it has not come already */
        frame.type = VOTE;
        if (wire->sent == frame.round)
            return;
    }
    if (frame.type == VOTE) {
        scene.damaged |= wire->sent == frame.round;
        wire->sent = frame.round;
        side_of(wire->link.peer);
        frame.bytes = scene.side->bytes;
        from = scene.side;
        scene.damaged |= fuzz_damage(&scene.input, scene.side, frame.bytes);
    } else if (frame.type == ABORT) {
        scene.damaged = true;
        frame.bytes = fuzz_below(&scene.input, sizeof body);
        fuzz_take(&scene.input, &body, frame.bytes);
    } else if (frame.type != OPEN && frame.type != ALIVE && frame.type != PART) { /* raw: no frame at all */
        scene.damaged = true;
        put(wire, &body, fuzz_take(&scene.input, &body, fuzz_below(&scene.input, sizeof body)));
        return;
    }
    size_t count = frame.bytes, rides = frame.type == VOTE ? ride_of(wire->link.peer, &body, sizeof body) : 0;
    frame.bytes += (uint32_t)rides;
    scene.damaged |= fuzz_damage(&scene.input, &frame, sizeof frame);
    put(wire, &frame, sizeof frame);
    put(wire, from, count);
    put(wire, &body, rides);
}

/* All others have everybody's vote before this rank has read theirs. */
static void others_go_ahead(void)
{
    struct ranks *ranks = &scene.ranks;
    if (!scene.whole || scene.damaged || scene.ahead)
        return;
    for (int i = 0; i < scene.set.tree->count; i++)
        if (scene.wire[i].sent != hvd_coord_round(scene.set.coord))
            return;
    memcpy(ranks->agreed, scene.set.tree->mine, scene.set.tree->mine->bytes);
    for (int rank = 0; rank < ranks->size; rank++)
        if (rank != scene.me)
            hvd_vote_merge(scene.set.coord, ranks->agreed, ranks->vote[rank]);
    for (int rank = 0; rank < ranks->size; rank++)
        if (rank != scene.me)
            hvd_coord_decide(ranks->coord[rank], ranks->agreed, &ranks->plan[rank]);
    scene.ahead = true;
}

static void submit(int rank)
{
    static const char *const name[] = {"a", "b", "c", "d"};
    uint32_t which = fuzz_below(&scene.input, 8);
    struct hvd_signature signature = ranks_signature(1 + (which > 5));
    const struct hvd_mine *mine = &scene.ranks.coord[rank]->mine[which];
    if (which < scene.ranks.coord[rank]->mine_high && mine->state != HVD_MINE_IDLE)
        return;
    hvd_coord_submit(scene.ranks.coord[rank], which, name[which % 4], &signature, 0);
}

static void agreed(void)
{
    struct ranks *ranks = &scene.ranks;
    const struct hvd_vote *vote = scene.set.agreed;
    CHECK(vote->ranks == (uint32_t)ranks->size, "a vote of %u of %d", vote->ranks, ranks->size);
    CHECK(hvd_eager_check(scene.set.riders->agreed, HVD_EAGER_ROOM, ranks->size), "no ride was agreed on");
    hvd_eager_agreed(&scene.set);
    CHECK(scene.damaged || !scene.ahead ||
              (vote->bytes == ranks->agreed->bytes && memcmp(vote, ranks->agreed, vote->bytes) == 0),
          "not what the others agreed on in round %llu", (unsigned long long)vote->round);
    for (int rank = 0; rank < ranks->size; rank++)
        if (rank == scene.me || !scene.ahead)
            hvd_coord_decide(ranks->coord[rank], vote, &ranks->plan[rank]);
    scene.whole = scene.ahead = false;
}

/* What a leader's turn does of it. False: the job is over. */
static bool turn(void)
{
    struct hvd_set *set = &scene.set;
    bool moved = false;
    uint64_t round = hvd_coord_round(set->coord);
    set->entered = true;
    hvd_tree_pump(&engine, set);
    if (!scene.whole) {
        hvd_coord_vote(set->coord, set->tree->mine, set->vote_bytes);
        scene.whole = true;
    }
    int code = hvd_tree_round(&engine, set, round, true, &moved);
    CHECK(code == HVD_OK || code == HVD_AGAIN || (code == HVD_EINVAL && scene.damaged), "%d", code);
    if (code == HVD_OK)
        agreed();
    if (!hvd_abort_seen(&engine))
        return scene.ranks.plan[scene.me].left < 0;
    const struct hvd_error *why = &engine.failure;
    CHECK(scene.damaged && why->code < 0 && why->culprit >= -1 && why->culprit < scene.ranks.size, "%d %d: %s",
          why->code, why->culprit, why->text);
    hvd_tree_pump(&engine, set);
    return false;
}

static bool lives_on(void)
{
    uint32_t what = fuzz_byte(&scene.input);
    struct wire *wire = &scene.wire[what / 64 % (uint32_t)scene.set.tree->count];
    switch (what % 16) {
    case 0:
        scene.piece = 1 + (int)fuzz_below(&scene.input, 1024);
        return true;
    case 1:
        wire->over = scene.damaged = true;
        return true;
    case 2:
        scene.damaged = true; /* silence is a reason to end, too */
        hvd_silence_tick(&engine);
        return true;
    case 3:
        others_go_ahead();
        return true;
    case 4:
    case 5:
    case 6:
        submit((int)(what / 16) % scene.ranks.size);
        return true;
    case 7:
    case 8:
    case 9:
    case 10:
        return turn();
    default:
        come(wire);
        return true;
    }
}

static void open_scene(struct fuzz_input input)
{
    memset(&engine, 0, sizeof engine);
    engine.who = who;
    memset(&scene, 0, offsetof(struct scene, wire));
    uint32_t form = fuzz_byte(&input);
    int size = 2 + (int)(form % (RANKS_MAX - 1));
    scene.input = input;
    scene.me = (int)(form / 8) % size;
    scene.piece = 1 << 20;
    scene.damaged = scene.whole = scene.ahead = false;
    ranks_open(&scene.ranks, size, 6, 4, TICKETS, 1);
    scene.side = malloc(scene.ranks.vote_bytes);
    engine.options = (struct hvd_options){.rank = scene.me, .size = size, .store_fd = -1, .peer_timeout_ms = 800};
    engine.alone = true; /* no host segment: the abort word is its own */
    engine.bell = -1;
    engine.hosts = size;
    engine.trace.slot = &trace;
    engine.set[0] = &scene.set;
    engine.sets = 1;
    struct hvd_set *set = &scene.set;
    *set = (struct hvd_set){.rank = scene.me,
                            .size = size,
                            .locals = 1,
                            .member = scene.member,
                            .host_of = scene.member, /* each has one of its own */
                            .life = 1 + form / 128,
                            .vote_bytes = scene.ranks.vote_bytes,
                            .coord = scene.ranks.coord[scene.me],
                            .vote_wires = &scene.wires};
    set->agreed = malloc(set->vote_bytes);
    for (int rank = 0; rank < size; rank++) {
        set->member[rank] = who[rank].host = rank;
        snprintf(who[rank].called, sizeof who[rank].called, "rank %d", rank);
    }
    int near[HVD_NEAR_MAX], count = hvd_tree_neighbours(scene.me, size, near);
    for (int i = 0; i < count; i++) {
        struct wire *wire = &scene.wire[i];
        memset(wire, 0, offsetof(struct wire, inbox));
        wire->link = (struct hvd_link){.kind = &kind, .peer = near[i], .fd = -1};
        snprintf(wire->link.called, sizeof wire->link.called, "rank %d", near[i]);
        scene.link[near[i]] = &wire->link;
    }
    scene.wires.link = scene.link;
    struct hvd_error error = {0};
    CHECK(hvd_tree_open(&engine, set, &error) == HVD_OK && hvd_eager_open(&engine, set, &error) == HVD_OK, "%s",
          error.text);
}

void fuzz_tree(struct fuzz_input input)
{
    open_scene(input);
    for (int turns = 0; turns < TURNS && scene.input.left; turns++)
        if (!lives_on())
            break;
    hvd_tree_close(&scene.set);
    hvd_eager_close(&scene.set);
    free(scene.set.agreed);
    free(scene.side);
    ranks_close(&scene.ranks);
}
