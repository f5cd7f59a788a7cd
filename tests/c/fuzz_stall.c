/* fuzz_stall.c - what comes over an edge of the tree of hosts while somebody asks who is missing
 * (engine/stall/inquiry.c).
 *
 * One rank per host. The leader under test runs the engine's own neighbor.c, inquiry.c, rank_status.c and
 * missing_ranks.c over links that are made of the input: frames WANT, ASK, ACCOUNT and FINDING, which are mostly what a
 * neighbour would send, and damaged where the input says so. The input also says when the leader has its turn, answers,
 * wants to know, and when time passes.
 *
 * What must hold: frames that leave are whole, and what they hold would be believed; texts have an end; only rank 0
 * makes findings, and only who was asked gives accounts. The job ends for what is no frame, and where rank 0 was to end
 * it, and nobody outside the job is named.
 */
#include "check.h"
#include "engine/engine.h"
#include "fuzz.h"
#include "ranks.h"

enum { RANKS_MAX = 6, TURNS = 96, INBOX = 1 << 16, MAGIC = 0x65746f76, CONTROL = 1 << 17 };
#define SECOND UINT64_C(1000000000)

struct wire {
    struct hvd_link link;
    size_t read, written, out_at;
    char out[sizeof(struct hvd_frame) + HVD_STALL_BODY_MAX], inbox[INBOX];
};

static struct scene {
    struct fuzz_input input;
    struct ranks ranks;
    struct hvd_set set;
    struct hvd_stream_table wires;
    struct hvd_link *link[RANKS_MAX];
    int member[RANKS_MAX], me;
    uint64_t later_ns; /* how far time has passed */
    bool damaged;      /* something came that was not true */
    struct wire wire[HVD_NEAR_MAX];
} scene;
static struct hvd_engine engine;
static struct hvd_who who[RANKS_MAX];
static struct hvd_trace_slot trace;
static struct hvd_slot slot;
static _Alignas(HVD_PAGE) char control[CONTROL];

static struct wire *wire_of(struct hvd_link *link)
{
    return (struct wire *)(void *)link;
}

static void look_at_frame(const struct wire *wire, const struct hvd_frame *head)
{
    union {
        struct hvd_account account;
        struct hvd_finding finding;
    } body;
    const char *from = wire->out + sizeof *head;
    bool above = scene.me != 0 && wire == &scene.wire[0];
    CHECK(head->magic == MAGIC && head->life == scene.set.life, "type %u", head->type);
    switch (head->type) {
    case HVD_FRAME_ABORT:
        return;
    case HVD_FRAME_WANT:
        CHECK(above && head->bytes == 0 && head->round && head->round < 8, "%llu", (unsigned long long)head->round);
        return;
    case HVD_FRAME_ASK:
        CHECK(!above && head->bytes == 0, "%u", head->bytes);
        return;
    case HVD_FRAME_ACCOUNT:
        memcpy(&body.account, from, sizeof body.account);
        CHECK(above && head->bytes == sizeof body.account && hvd_account_sane(&body.account, scene.ranks.size), "%u",
              head->bytes);
        return;
    default:
        memcpy(&body.finding, from, sizeof body.finding);
        CHECK(head->type == HVD_FRAME_FINDING && !above && head->bytes == sizeof body.finding &&
                  hvd_finding_sane(&body.finding),
              "type %u, %u bytes", head->type, head->bytes);
        for (uint32_t i = 0; i < body.finding.lines; i++)
            CHECK(memchr(body.finding.line[i], 0, HVD_FINDING_BYTES), "line %u has no end", i);
    }
}

static int wire_send(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct wire *wire = wire_of(link);
    struct hvd_frame head;
    *moved = count;
    for (size_t i = 0; i < count; i++) {
        CHECK(wire->out_at < sizeof wire->out, "a frame of more than %zu bytes", sizeof wire->out);
        wire->out[wire->out_at++] = ((const char *)bytes)[i];
        if (wire->out_at < sizeof head)
            continue;
        memcpy(&head, wire->out, sizeof head);
        if (wire->out_at < sizeof head + head.bytes)
            continue;
        look_at_frame(wire, &head);
        wire->out_at = 0;
    }
    return HVD_OK;
}

static int wire_recv(struct hvd_link *link, void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct wire *wire = wire_of(link);
    size_t there = wire->written - wire->read;
    *moved = count < there ? count : there;
    memcpy(bytes, wire->inbox + wire->read, *moved);
    wire->read += *moved;
    if (wire->read == wire->written)
        wire->read = wire->written = 0;
    return HVD_OK;
}

static const struct hvd_link_kind kind = {.name = "fuzz", .send = wire_send, .recv = wire_recv};

static struct hvd_inbox *desk(void)
{
    return hvd_host_desk(&engine.host);
}

/* Of some rank: what it waits for, among few keys and sets. */
static void tell(struct hvd_account *account)
{
    uint32_t what = fuzz_byte(&scene.input);
    account->rank = (int)(what % (uint32_t)scene.ranks.size);
    account->pid = 4711;
    account->state = what / 16 % (HVD_RANK_UNHEARD + 1);
    account->entries = fuzz_below(&scene.input, 12) * (what > 250 ? 8 : 1);
    for (uint32_t i = 0; i < account->entries; i++) {
        uint32_t of = fuzz_byte(&scene.input);
        account->entry[i] = (struct hvd_entry){.key = of % 16,
                                               .number = i,
                                               .set = of > 240 ? 1 + (int)(of % 8) : 0,
                                               .kind = (int)(of % (HVD_SEND + 1)),
                                               .peer = 1,
                                               .waited_ms = of * 64,
                                               .name = (uint16_t)(of % 4),
                                               .asked = of % 5 == 1,
                                               .agreed = of % 32 == 7};
    }
    account->circle[what % HVD_CIRCLES_MAX].set = 1 + (int)(what % 8);
    account->circle[what % HVD_CIRCLES_MAX].members[0] = what;
    account->more = what % 3 ? 0 : what;
    for (uint64_t key = what % 7; key < 16; key += 1 + what % 4)
        hvd_account_add(account, key, 0);
    strcpy(account->names + 1, "ab");
    strcpy(account->last, "'ab'");
    strcpy(account->stack, "Thread 1:\n  File \"a.py\", line 1 in f\n");
}

static void find(struct hvd_finding *finding)
{
    finding->lines = 1 + fuzz_below(&scene.input, HVD_FINDING_LINES);
    finding->keys = fuzz_below(&scene.input, 16);
    for (uint32_t i = 0; i < finding->keys; i++)
        finding->of[i].line = i % finding->lines;
    strcpy(finding->line[0], "submitted by rank 0, missing on rank 1");
}

static void put(struct wire *wire, const void *bytes, size_t count)
{
    scene.damaged |= wire->written + count > INBOX;
    if (wire->written + count > INBOX)
        return;
    memcpy(wire->inbox + wire->written, bytes, count);
    wire->written += count;
}

static void come(struct wire *wire)
{
    static union {
        struct hvd_account account;
        struct hvd_finding finding;
    } body;
    bool above = scene.me != 0 && wire == &scene.wire[0];
    uint32_t what = fuzz_byte(&scene.input);
    struct hvd_frame frame = {MAGIC, HVD_FRAME_WANT, 0, scene.set.life, 1 + what / 64};
    memset(&body, 0, sizeof body);
    if (what % 16 == 15) { /* the wrong way */
        above = !above;
        scene.damaged = true;
    }
    if (above)
        frame.type = what % 2 ? HVD_FRAME_ASK : HVD_FRAME_FINDING;
    else
        frame.type = what % 4 ? HVD_FRAME_ACCOUNT : HVD_FRAME_WANT;
    if (frame.type != HVD_FRAME_WANT)
        frame.round = atomic_load(&desk()->inquiry) + (frame.type == HVD_FRAME_ASK) * (what / 64);
    if (frame.type == HVD_FRAME_ACCOUNT) {
        frame.bytes = sizeof body.account;
        tell(&body.account);
    } else if (frame.type == HVD_FRAME_FINDING) {
        frame.bytes = sizeof body.finding;
        find(&body.finding);
    }
    if (frame.bytes)
        scene.damaged |= fuzz_damage(&scene.input, &body, frame.bytes);
    scene.damaged |= fuzz_damage(&scene.input, &frame, sizeof frame);
    put(wire, &frame, sizeof frame);
    put(wire, &body, frame.bytes <= sizeof body ? frame.bytes : 0);
}

/* False: the job is over. */
static bool lives_on(void)
{
    uint32_t what = fuzz_byte(&scene.input);
    uint64_t now = hvd_now_ns() + scene.later_ns, inquiry = atomic_load(&desk()->inquiry);
    switch (what % 8) {
    case 0:
        scene.later_ns += (1 + what / 8 % 3) * SECOND;
        return true;
    case 1:
        atomic_fetch_or(&desk()->wanted, 1 + what / 8 % 7);
        return true;
    case 2:
        if (inquiry != atomic_load(&desk()->answered[0]))
            hvd_inquiry_answer(&engine, inquiry, now);
        return true;
    case 3:
    case 4:
        hvd_tree_pump(&engine, &scene.set);
        if (!atomic_load(&engine.failed) && hvd_inquiry_lead(&engine, now))
            CHECK(scene.me == 0, "rank %d has come to a finding", scene.me);
        break;
    default:
        come(&scene.wire[what / 8 % (uint32_t)scene.set.tree->count]);
        return true;
    }
    if (!hvd_abort_seen(&engine))
        return true;
    const struct hvd_error *why = &engine.failure;
    CHECK(why->culprit >= -1 && why->culprit < scene.ranks.size && why->text[0], "%d: %s", why->culprit, why->text);
    CHECK(scene.damaged || (scene.me == 0 && why->code == HVD_ETIMEOUT), "%d: %s", why->code, why->text);
    return false;
}

static void open_engine(int size)
{
    memset(&engine, 0, sizeof engine);
    memset(control, 0, sizeof control);
    engine.options = (struct hvd_options){.rank = scene.me,
                                          .size = size,
                                          .store_fd = -1,
                                          .report_fd = -1,
                                          .stall_warn_ms = 60000,
                                          .collective_timeout_ms = 600000};
    engine.alone = true; /* the abort word is its own; the desk is ours */
    engine.who = who;
    engine.bell = -1;
    engine.hosts = size;
    engine.trace.slot = &trace;
    engine.handles.slot = &slot;
    engine.last = HVD_TRACE_UNNAMED; /* it has submitted one without a name */
    engine.host.size = 1;
    engine.host.member[0] = scene.me;
    engine.host.bells.eventfd[0] = engine.host.pidfd[0] = -1;
    engine.host.control = (struct hvd_control *)(void *)control;
    CHECK((char *)desk() + sizeof(struct hvd_inbox) + sizeof(struct hvd_account) < control + CONTROL, "%d", CONTROL);
    engine.set[0] = engine.global = &scene.set;
    engine.sets = 1;
}

static void open_scene(struct fuzz_input input)
{
    struct hvd_error error = {0};
    uint32_t form = fuzz_byte(&input);
    int size = 2 + (int)(form % (RANKS_MAX - 1)), near[HVD_NEAR_MAX];
    memset(&scene, 0, offsetof(struct scene, wire));
    scene.input = input;
    scene.me = (int)(form / 8) % size;
    ranks_open(&scene.ranks, size, 6, 4, 8, 1);
    open_engine(size);
    struct hvd_set *set = &scene.set;
    *set = (struct hvd_set){.rank = scene.me,
                            .size = size,
                            .locals = 1,
                            .member = scene.member,
                            .host_of = scene.member, /* each has one of its own */
                            .life = 1,
                            .vote_bytes = scene.ranks.vote_bytes,
                            .coord = scene.ranks.coord[scene.me],
                            .vote_wires = &scene.wires};
    for (int rank = 0; rank < size; rank++) {
        set->member[rank] = who[rank].host = rank;
        snprintf(who[rank].called, sizeof who[rank].called, "rank %d (host %d)", rank, rank);
    }
    int count = hvd_tree_neighbours(scene.me, size, near);
    for (int i = 0; i < count; i++) {
        struct wire *wire = &scene.wire[i];
        memset(wire, 0, offsetof(struct wire, out));
        wire->link = (struct hvd_link){.kind = &kind, .peer = near[i], .fd = -1};
        snprintf(wire->link.called, sizeof wire->link.called, "rank %d", near[i]);
        scene.link[near[i]] = &wire->link;
    }
    scene.wires.link = scene.link;
    CHECK(hvd_tree_open(&engine, set, &error) == HVD_OK && hvd_inquiry_open(&engine, &error) == HVD_OK, "%s",
          error.text);
}

void fuzz_stall(struct fuzz_input input)
{
    open_scene(input);
    for (int turns = 0; turns < TURNS && scene.input.left && lives_on(); turns++)
        ;
    hvd_inquiry_close(&engine);
    hvd_tree_close(&scene.set);
    ranks_close(&scene.ranks);
}
