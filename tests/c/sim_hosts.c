/* sim_hosts.c - see sim_hosts.h. Two kinds of event, in the order of their time: a rank submits its next tensors; bytes
 * reach a host. Whoever is touched takes its turn as engine/shm_votes.c does: reads, enters a round if it has news or
 * hears of one, gives what it can to its neighbours, decides when all is there. */
#include "sim_hosts.h"

#include "check.h"
#include "negotiation/state.h"
#include "engine/engine.h"
#include "ranks.h"

#define ALPHA_NS 25000 /* one way of a message */
#define BETA_PS  1000  /* and of a byte: 8 Gbit/s */
#define FRESH    256   /* as in shm_votes.c */
#define SLOTS    512
#define SAMPLES  64 /* ranks whose agreed state is compared after each step; all plans are compared always */

struct delivery {
    uint64_t at_ns;
    size_t end; /* of the bytes that are there from then on */
};

/* One way of an edge. */
struct way {
    struct hvd_link link; /* of the host that reads here; it writes to the other way of the edge */
    struct way *other;
    int host;
    char *bytes;
    size_t read, written, room;
    struct delivery due[8];
    uint32_t first, count;
};

struct host {
    struct hvd_set set;
    struct hvd_tree tree;
    struct hvd_eager_room riders;
    struct way pipe[HVD_NEAR_MAX];
    uint64_t bytes;
};

struct event {
    uint64_t at_ns;
    int host, rank; /* rank < 0: bytes come */
};

struct sim_hosts {
    int ranks, per_host, hosts, tensors;
    uint64_t seed, now_ns;
    struct hvd_coord **coord;
    char (*name)[16];
    int *submitted, *planned; /* by rank, of this step */
    uint64_t *pace_ns;        /* by rank, between two tensors */
    bool odd;
    struct host *host;
    struct event *event; /* a heap */
    size_t events, event_room;
    struct hvd_plan plan;
    uint64_t *digest; /* of the plan of each round, by round % 64; 0: nobody has decided it */
    struct sim_step step;
    uint64_t last_submit_ns, last_decide_ns;
};

static struct hvd_engine engine; /* only for what never happens here: an abort */
static struct sim_hosts *sim;    /* links know it by this name */

static bool earlier(const struct event *a, const struct event *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->host != b->host ? a->host < b->host : a->rank < b->rank;
}

static void expect(uint64_t at_ns, int host, int rank)
{
    if (sim->events == sim->event_room) {
        sim->event_room = 2 * sim->event_room + 1024;
        sim->event = realloc(sim->event, sim->event_room * sizeof *sim->event);
    }
    size_t i = sim->events++;
    struct event event = {at_ns, host, rank};
    for (; i > 0 && earlier(&event, &sim->event[(i - 1) / 2]); i = (i - 1) / 2)
        sim->event[i] = sim->event[(i - 1) / 2];
    sim->event[i] = event;
}

static struct event next_event(void)
{
    struct event first = sim->event[0], last = sim->event[--sim->events];
    size_t i = 0;
    for (size_t below = 1; below < sim->events; below = 2 * i + 1) {
        below += below + 1 < sim->events && earlier(&sim->event[below + 1], &sim->event[below]);
        if (!earlier(&sim->event[below], &last))
            break;
        sim->event[i] = sim->event[below];
        i = below;
    }
    sim->event[i] = last;
    return first;
}

static int pipe_send(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct way *pipe = (struct way *)(void *)link, *to = pipe->other;
    *moved = 0;
    if (to->count == HVD_COUNT_OF(to->due))
        return HVD_OK; /* full, as a socket may be */
    if (to->read == to->written)
        to->read = to->written = 0;
    if (to->written + count > to->room) {
        to->room = 2 * (to->written + count);
        to->bytes = realloc(to->bytes, to->room);
    }
    memcpy(to->bytes + to->written, bytes, count);
    to->written += count;
    uint64_t at_ns = sim->now_ns + ALPHA_NS + count * BETA_PS / 1000;
    to->due[(to->first + to->count++) % HVD_COUNT_OF(to->due)] = (struct delivery){at_ns, count};
    expect(at_ns, to->host, -1);
    link->counts.bytes_out += *moved = count;
    sim->step.bytes += count;
    sim->step.messages++;
    sim->host[pipe->host].bytes += count;
    sim->host[to->host].bytes += count;
    return HVD_OK;
}

static int pipe_recv(struct hvd_link *link, void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    struct way *pipe = (struct way *)(void *)link;
    struct delivery *due = &pipe->due[pipe->first];
    *moved = 0;
    if (pipe->count == 0 || due->at_ns > sim->now_ns)
        return HVD_OK;
    *moved = count < due->end ? count : due->end;
    memcpy(bytes, pipe->bytes + pipe->read, *moved);
    pipe->read += *moved;
    due->end -= *moved;
    if (due->end == 0) {
        pipe->first = (pipe->first + 1) % HVD_COUNT_OF(pipe->due);
        pipe->count--;
    }
    return HVD_OK;
}

static const struct hvd_link_kind kind = {.name = "counted", .send = pipe_send, .recv = pipe_recv};

static void *zeroed(size_t count, size_t bytes)
{
    void *memory = calloc(count, bytes);
    CHECK(memory, "%zu x %zu bytes", count, bytes);
    return memory;
}

/* Ranks on the other side of the edge: all below the lower host, or all others. */
static int behind(int below, bool is_below)
{
    int hosts = 0;
    for (long first = below, width = 1; first < sim->hosts; first = 2 * first + 1, width *= 2)
        hosts += (int)(sim->hosts - first < width ? sim->hosts - first : width);
    return is_below ? hosts * sim->per_host : sim->ranks - hosts * sim->per_host;
}

static void open_host(int at, size_t vote_bytes)
{
    struct host *host = &sim->host[at];
    int near[HVD_NEAR_MAX], count = hvd_tree_neighbours(at, sim->hosts, near);
    host->set = (struct hvd_set){.rank = at * sim->per_host,
                                 .size = sim->ranks,
                                 .locals = sim->per_host,
                                 .vote_bytes = vote_bytes,
                                 .coord = sim->coord[at * sim->per_host],
                                 .tree = &host->tree,
                                 .agreed = zeroed(1, vote_bytes)};
    host->riders.agreed = zeroed(1, HVD_EAGER_ROOM);
    host->set.riders = &host->riders;
    host->tree = (struct hvd_tree){.count = count, .vote_bytes = vote_bytes};
    for (int i = 0; i < count; i++) {
        struct hvd_neighbor *one = &host->tree.near[i];
        struct host *there = &sim->host[near[i]];
        int back[HVD_NEAR_MAX], place = 0;
        hvd_tree_neighbours(near[i], sim->hosts, back);
        while (back[place] != at)
            place++;
        struct way *pipe = &host->pipe[i];
        *pipe = (struct way){.link = {.kind = &kind, .fd = -1}, .other = &there->pipe[place], .host = at};
        one->link = &pipe->link;
        one->behind = behind(near[i] > at ? near[i] : at, near[i] > at);
    }
    CHECK(hvd_tree_room(&host->tree, vote_bytes), "%zu bytes", vote_bytes);
}

struct sim_hosts *sim_hosts_open(int ranks, int ranks_per_host, int tensors, uint64_t seed)
{
    sim = zeroed(1, sizeof *sim);
    CHECK(ranks % ranks_per_host == 0 && tensors <= FRESH, "%d ranks, %d a host", ranks, ranks_per_host);
    *sim = (struct sim_hosts){
        .ranks = ranks, .per_host = ranks_per_host, .hosts = ranks / ranks_per_host, .tensors = tensors, .seed = seed};
    struct hvd_coord_limits limits = {.size = ranks,
                                      .slots = SLOTS,
                                      .tickets = (uint32_t)tensors,
                                      .fresh = FRESH,
                                      .names = &ranks_names,
                                      .zeroed = true};
    sim->coord = zeroed((size_t)ranks, sizeof *sim->coord);
    sim->submitted = zeroed((size_t)ranks, sizeof *sim->submitted);
    sim->planned = zeroed((size_t)ranks, sizeof *sim->planned);
    sim->pace_ns = zeroed((size_t)ranks, sizeof *sim->pace_ns);
    sim->digest = zeroed(64, sizeof *sim->digest);
    sim->plan.items_max = SLOTS + FRESH;
    sim->plan.item = zeroed(sim->plan.items_max, sizeof *sim->plan.item);
    sim->name = zeroed((size_t)tensors, sizeof *sim->name);
    for (int i = 0; i < tensors; i++)
        snprintf(sim->name[i], sizeof sim->name[i], "gradient.%d", i);
    for (limits.rank = 0; limits.rank < ranks; limits.rank++)
        sim->coord[limits.rank] = hvd_coord_open(zeroed(1, hvd_coord_bytes(&limits)), &limits);
    sim->host = zeroed((size_t)sim->hosts, sizeof *sim->host);
    for (int at = 0; at < sim->hosts; at++)
        open_host(at, hvd_vote_bytes_max(&limits));
    return sim;
}

void sim_hosts_close(struct sim_hosts *of)
{
    for (int at = 0; at < of->hosts; at++) {
        struct host *host = &of->host[at];
        for (int i = 0; i < host->tree.count; i++)
            free(host->pipe[i].bytes);
        hvd_tree_free_room(&host->tree);
        free(host->riders.agreed);
        free(host->set.agreed);
    }
    for (int rank = 0; rank < of->ranks; rank++)
        free(of->coord[rank]);
    free(of->host), free(of->coord), free(of->submitted), free(of->planned), free(of->pace_ns), free(of->digest);
    free(of->name), free(of->plan.item), free(of->event), free(of);
}

int sim_hosts_count(const struct sim_hosts *of)
{
    return of->hosts;
}

int sim_hosts_deepest(const struct sim_hosts *of)
{
    int left = 0, right = 0;
    for (int at = 1; at < of->hosts; at = 2 * at + 1)
        left++;
    for (int at = 2; at < of->hosts; at = 2 * at + 1)
        right++;
    return left + right;
}

/* The plan of a round must be the same on every rank, but for tickets. */
static void compare_plan(void)
{
    uint64_t digest = 14695981039346656037u, *known = &sim->digest[sim->plan.round % 64];
    for (uint32_t i = 0; i < sim->plan.items; i++) {
        const struct hvd_plan_item *item = &sim->plan.item[i];
        digest = (digest ^ item->slot ^ item->key.low ^ (uint64_t)item->code << 32) * 0x100000001b3u;
    }
    digest = (digest ^ sim->plan.round << 16 ^ sim->plan.items ^ strlen(sim->plan.text)) * 0x100000001b3u | 1;
    if (*known == 0) {
        sim->digest[(sim->plan.round + 32) % 64] = 0; /* everybody is within two rounds of each other */
        *known = digest;
        sim->step.rounds++;
        sim->step.learned += sim->plan.learned > 0;
    }
    CHECK(*known == digest, "two ranks have different plans of round %llu", (unsigned long long)sim->plan.round);
}

static void decide(struct host *host)
{
    for (int i = 0; i < sim->per_host; i++) {
        int rank = host->set.rank + i;
        hvd_coord_decide(sim->coord[rank], host->set.agreed, &sim->plan);
        compare_plan();
        for (uint32_t k = 0; k < sim->plan.items; k++)
            sim->planned[rank] += sim->plan.item[k].ticket != HVD_TICKET_NONE;
        sim->planned[rank] += sim->plan.failed_ticket != HVD_TICKET_NONE;
        sim->step.failed |= sim->plan.text[0] != 0;
    }
    host->set.entered = false;
    sim->last_decide_ns = sim->now_ns;
}

static bool enters(const struct host *host, uint64_t round)
{
    bool news = hvd_tree_heard(&host->tree, round);
    for (int i = 0; i < sim->per_host && !news; i++)
        news = hvd_coord_news(sim->coord[host->set.rank + i]);
    return news;
}

static void turn(int at)
{
    struct host *host = &sim->host[at];
    struct hvd_set *set = &host->set;
    bool moved;
    for (;;) {
        hvd_tree_pump(&engine, set);
        uint64_t round = hvd_coord_round(set->coord);
        if (!set->entered && !enters(host, round))
            return;
        if (!set->entered) {
            hvd_coord_vote(set->coord, host->tree.mine, set->vote_bytes);
            for (int i = 1; i < sim->per_host; i++) {
                hvd_coord_vote(sim->coord[set->rank + i], host->tree.part, set->vote_bytes);
                hvd_vote_merge(set->coord, host->tree.mine, host->tree.part);
            }
            set->entered = true;
        }
        if (hvd_tree_round(&engine, set, round, true, &moved) != HVD_OK)
            return;
        decide(host);
    }
}

/* The next tensor, or all of them; then the time of the one after it. */
static void submit(int rank)
{
    int until = sim->pace_ns[rank] ? sim->submitted[rank] + 1 : sim->tensors;
    for (int i = sim->submitted[rank]; i < until; i++) {
        struct hvd_signature signature = ranks_signature(1000 + i + (sim->odd && i == 0 && rank == sim->ranks - 1));
        int code = hvd_coord_submit(sim->coord[rank], (uint32_t)i, sim->name[i], &signature, 0);
        CHECK(code == HVD_OK, "rank %d, tensor %d: %d", rank, i, code);
    }
    sim->submitted[rank] = until;
    sim->last_submit_ns = sim->now_ns;
    if (until < sim->tensors)
        expect(sim->now_ns + sim->pace_ns[rank], rank / sim->per_host, rank);
}

static void check_all(void)
{
    int stride = sim->ranks > SAMPLES ? sim->ranks / SAMPLES : 1;
    uint64_t digest = ranks_digest(sim->coord[0]);
    for (int rank = 0; rank < sim->ranks; rank++) {
        CHECK(sim->planned[rank] == sim->tensors, "rank %d: %d of %d are done", rank, sim->planned[rank], sim->tensors);
        CHECK(rank % stride || ranks_digest(sim->coord[rank]) == digest, "rank %d agreed on something else", rank);
    }
    CHECK(atomic_load(&engine.witnessing) == 0, "somebody ended the job");
}

struct sim_step sim_hosts_step(struct sim_hosts *of, uint64_t spread_ns, bool odd)
{
    sim = of;
    sim->step = (struct sim_step){0};
    sim->odd = odd;
    for (int rank = 0; rank < sim->ranks; rank++) {
        sim->submitted[rank] = sim->planned[rank] = 0;
        uint64_t pace = spread_ns / (uint64_t)sim->tensors;
        sim->pace_ns[rank] = pace + (pace ? ranks_random(&sim->seed) % (pace / 100 + 1) : 0);
        expect(sim->now_ns + sim->pace_ns[rank], rank / sim->per_host, rank);
    }
    for (int at = 0; at < sim->hosts; at++)
        sim->host[at].bytes = 0;
    while (sim->events) {
        struct event event = next_event();
        sim->now_ns = event.at_ns;
        if (event.rank >= 0)
            submit(event.rank);
        if (sim->events == 0 || sim->event[0].at_ns > event.at_ns || sim->event[0].host != event.host)
            turn(event.host); /* else once for all that happens there now */
    }
    check_all();
    for (int at = 0; at < sim->hosts; at++)
        if (sim->host[at].bytes > sim->step.most_bytes)
            sim->step.most_bytes = sim->host[at].bytes;
    sim->step.after_ns = sim->last_decide_ns - sim->last_submit_ns;
    return sim->step;
}
