/* network_cost.c - what does a message between hosts cost here? Asked once, when the engine begins; agreed.
 *
 * Which algorithm is the cheapest depends on two numbers (algo.h): how long a message is on its way, and how long a
 * byte keeps the wire busy. The caller may have told them. If not, the leaders of the hosts, in a ring, each send the
 * next one some messages over the stream for tensors, on which nothing else has yet been sent, and time the answers:
 * small ones, of which the fastest tells alpha; then ever larger ones, whose time beyond that, by byte, is beta. They
 * double, as TCP's window does, so that a window still small is not taken for a slow wire; of the two largest the
 * faster counts. All that takes PROBE_NS, or as long as the three messages that are needed at least.
 *
 * A rank that answers late is waited for until the deadline of init before its time counts: the first message is for
 * that. Whoever has said END and heard it from the one before is done, and everything sent has then been read, so
 * planes find the streams as new. Links may differ; the slowest speaks for all, since a collective
 * waits for it: the greatest of all ranks' numbers is everyone's.
 *
 * It is no benchmark: on a busy machine the numbers are too great by some wake-ups. Neither does it see that ranks of a
 * host share the wire; who knows of hosts reckons with that.
 */
#include "../engine.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define PROBE_NS  UINT64_C(20000000)
#define LEAST     ((uint32_t)8 << 10) /* bytes of the first large message: any window takes it */
#define MOST      ((uint32_t)128 << 10)
#define SMALLS    8
#define BETA_MIN  UINT64_C(10)  /* ps: 100 GB/s */
#define ALPHA_MIN UINT64_C(500) /* ns */

enum said { PING = 0x50, PONG, END };

struct head {
    uint32_t said, bytes; /* which follow */
};

/* One link, in both directions. */
struct line {
    struct hvd_link *link;
    unsigned char *block;  /* a head and MOST bytes: what is sent */
    size_t out, out_bytes; /* of the message that is leaving */
    struct head in;
    size_t in_at;
    int pongs;      /* to be sent */
    bool ping, end; /* to be sent */
    uint32_t ping_bytes;
    bool answered, ended; /* heard */
};

struct probe {
    struct line line[2], *next, *before;
    int lines;
    uint32_t bytes; /* of the message that is on its way, without its head */
    int smalls;     /* that have been answered, the first included */
    bool over;
    uint64_t began_ns, sent_ns, small_ns, beta_ps[2];
};

/* Is there a message to leave? Then its head is written. */
static bool next_out(struct line *line)
{
    struct head head = {PONG, 0};
    if (line->pongs)
        line->pongs--;
    else if (line->ping) {
        head = (struct head){PING, line->ping_bytes};
        line->ping = false;
    } else if (line->end) {
        head.said = END;
        line->end = false;
    } else
        return false;
    memset(line->block, 0, sizeof head + head.bytes);
    memcpy(line->block, &head, sizeof head);
    line->out = 0;
    line->out_bytes = sizeof head + head.bytes;
    return true;
}

static int push(struct line *line, struct hvd_error *error)
{
    size_t moved = 1;
    while (moved && (line->out < line->out_bytes || next_out(line))) {
        int code =
            line->link->kind->send(line->link, line->block + line->out, line->out_bytes - line->out, &moved, error);
        if (code != HVD_OK)
            return code;
        line->out += moved;
    }
    return HVD_OK;
}

static int heard(struct line *line, struct hvd_error *error)
{
    const struct head *head = &line->in;
    if (head->said < PING || head->said > END || head->bytes > MOST || (head->said != PING && head->bytes))
        return hvd_fail_rank(error, HVD_EINTERNAL, line->link->peer,
                             HVD901
                             "%s sent something else than was expected while links were measured; please report this",
                             line->link->called);
    return HVD_OK;
}

static int pull(struct line *line, struct hvd_error *error)
{
    unsigned char unread[16 << 10];
    for (size_t moved = 1; moved;) {
        size_t head = sizeof line->in;
        bool heading = line->in_at < head;
        void *to = heading ? (unsigned char *)&line->in + line->in_at : unread;
        size_t room = heading ? head - line->in_at : head + line->in.bytes - line->in_at;
        int code = line->link->kind->recv(line->link, to, room < sizeof unread ? room : sizeof unread, &moved, error);
        line->in_at += moved;
        if (code == HVD_OK && heading && line->in_at == head)
            code = heard(line, error);
        if (code != HVD_OK)
            return code;
        if (line->in_at < head || line->in_at < head + line->in.bytes)
            continue;
        line->pongs += line->in.said == PING;
        line->answered |= line->in.said == PONG;
        line->ended |= line->in.said == END;
        line->in_at = 0;
    }
    return HVD_OK;
}

static void ask(struct probe *probe, uint32_t bytes)
{
    probe->bytes = bytes;
    probe->next->ping = true;
    probe->next->ping_bytes = bytes;
    probe->sent_ns = hvd_now_ns();
}

/* The answer has come: what is asked next? */
static void go_on(struct probe *probe)
{
    uint64_t now = hvd_now_ns(), took = now - probe->sent_ns;
    probe->next->answered = false;
    if (probe->smalls == 0) {
        probe->began_ns = now;
        probe->small_ns = UINT64_MAX;
    } else if (probe->bytes == 0) {
        probe->small_ns = took < probe->small_ns ? took : probe->small_ns;
    } else {
        probe->beta_ps[1] = probe->beta_ps[0];
        probe->beta_ps[0] = took > probe->small_ns ? (took - probe->small_ns) * 1000 / probe->bytes : BETA_MIN;
    }
    uint64_t used = now - probe->began_ns;
    if (probe->bytes == 0 && (probe->smalls == 0 || (probe->smalls < SMALLS && used < PROBE_NS / 8))) {
        probe->smalls++;
        ask(probe, 0);
    } else if (probe->bytes == 0) {
        ask(probe, LEAST);
    } else if (probe->bytes < MOST && used + 2 * took < PROBE_NS) {
        ask(probe, 2 * probe->bytes);
    } else {
        probe->over = probe->next->end = true;
    }
}

static bool leaves(const struct line *line)
{
    return line->out < line->out_bytes || line->pongs || line->ping || line->end;
}

static int sleep_on(const struct probe *probe, uint64_t deadline_ns, struct hvd_error *error)
{
    struct pollfd news[2];
    uint64_t now = hvd_now_ns();
    for (int i = 0; i < probe->lines; i++)
        news[i] = (struct pollfd){.fd = probe->line[i].link->fd,
                                  .events = (short)(POLLIN | (leaves(&probe->line[i]) ? POLLOUT : 0))};
    if (now < deadline_ns)
        poll(news, (nfds_t)probe->lines, (int)((deadline_ns - now) / 1000000) + 1);
    if (hvd_now_ns() < deadline_ns)
        return HVD_OK;
    const struct line *silent = probe->over ? probe->before : probe->next;
    return hvd_fail_rank(error, HVD_EINIT, silent->link->peer,
                         HVD113
                         "%s did not answer in time during the measurement of links: its host is too busy, or the "
                         "network loses packets. Raise --start-timeout for a busy host, or set HVDLITE_LINK_COST to "
                         "skip the measurement",
                         silent->link->called);
}

static int run(struct probe *probe, uint64_t deadline_ns, struct hvd_error *error)
{
    ask(probe, 0);
    for (;;) {
        bool busy = false;
        for (int i = 0; i < probe->lines; i++) {
            struct line *line = &probe->line[i];
            int code = pull(line, error);
            if (line == probe->next && line->answered)
                go_on(probe);
            if (code == HVD_OK)
                code = push(line, error);
            if (code != HVD_OK)
                return code;
            busy |= leaves(line);
        }
        if (probe->over && probe->before->ended && !busy)
            return HVD_OK;
        int code = sleep_on(probe, deadline_ns, error);
        if (code != HVD_OK)
            return code;
    }
}

int hvd_cost_probe(struct hvd_link *next, struct hvd_link *before, uint64_t deadline_ns, struct hvd_cost *cost,
                   struct hvd_error *error)
{
    struct probe probe = {.lines = next == before ? 1 : 2};
    struct hvd_link *link[] = {next, before};
    int code = HVD_OK;
    probe.next = &probe.line[0];
    probe.before = &probe.line[probe.lines - 1];
    for (int i = 0; i < probe.lines; i++) {
        probe.line[i].link = link[i];
        probe.line[i].block = malloc(sizeof(struct head) + MOST);
        if (!probe.line[i].block)
            code = hvd_fail(error, HVD_ENOMEM, HVD951 "no memory to measure links");
    }
    if (code == HVD_OK)
        code = run(&probe, deadline_ns, error);
    for (int i = 0; i < probe.lines; i++) {
        free(probe.line[i].block);
        link[i]->counts = (struct hvd_link_counts){0};
    }
    if (code != HVD_OK)
        return code;
    uint64_t beta = probe.beta_ps[0];
    if (probe.beta_ps[1] && probe.beta_ps[1] < beta)
        beta = probe.beta_ps[1];
    cost->alpha_ns = probe.small_ns / 2 > ALPHA_MIN ? probe.small_ns / 2 : ALPHA_MIN;
    cost->beta_ps = beta > BETA_MIN ? beta : BETA_MIN;
    return HVD_OK;
}

/* The leaders' ring of hosts, in the order of their first ranks. */
static int measure(struct hvd_engine *engine, struct hvd_cost *cost, struct hvd_error *error)
{
    const struct hvd_set *set = engine->global;
    int leader[HVD_RANKS_MAX], hosts = 0, me = -1;
    if (!set->wires || set->here != 0)
        return HVD_OK;
    for (int rank = 0; rank < set->size; rank++)
        if (engine->who[rank].local == 0) {
            me = rank == set->rank ? hosts : me;
            leader[hosts++] = rank;
        }
    struct hvd_link *next = set->wires->link[leader[(me + 1) % hosts]];
    struct hvd_link *before = set->wires->link[leader[(me + hosts - 1) % hosts]];
    uint64_t now = hvd_now_ns(), until = engine->host.deadline_ns;
    uint64_t half = until > now ? (until - now) / 2 : 0; /* the rest is for telling the others why */
    return next && before ? hvd_cost_probe(next, before, now + half, cost, error) : HVD_OK;
}

static uint64_t greater(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

struct found { /* by a rank */
    struct hvd_cost cost;
    int32_t code, culprit;
    char text[224];
};

/* The greatest of all ranks' numbers, or the first failure: the same on all. */
static int greatest(const struct found *all, int size, struct hvd_cost *cost, struct hvd_error *error)
{
    for (int rank = 0; rank < size; rank++) {
        if (all[rank].code != HVD_OK)
            return hvd_fail_rank(error, all[rank].code, all[rank].culprit, "%.223s", all[rank].text);
        cost->alpha_ns = greater(cost->alpha_ns, all[rank].cost.alpha_ns);
        cost->beta_ps = greater(cost->beta_ps, all[rank].cost.beta_ps);
    }
    return HVD_OK;
}

int hvd_cost_agree(struct hvd_engine *engine, const struct hvd_options *options, struct hvd_error *error)
{
    struct found mine = {.culprit = -1}, *all;
    char text[HVD_TEXT_MAX] = "";
    struct hvd_error failed = {0};
    engine->link_cost = (struct hvd_cost){options->link_alpha_ns, options->link_beta_ps};
    if (engine->hosts == 1 || engine->link_cost.alpha_ns || engine->link_cost.beta_ps)
        return HVD_OK;
    mine.code = measure(engine, &mine.cost, &failed);
    if (mine.code != HVD_OK) {
        mine.culprit = failed.culprit;
        hvd_text_copy(mine.text, sizeof mine.text, failed.text);
    }
    struct hvd_host *host = &engine->host;
    all = calloc((size_t)options->size, sizeof *all);
    if (!all)
        return hvd_fail(error, HVD_ENOMEM, HVD951 "out of memory during init");
    int code = host->allgather(host->allgather_self, &mine, sizeof mine, all, text, sizeof text);
    if (code == HVD_OK)
        code = greatest(all, options->size, &engine->link_cost, error);
    else
        hvd_fail(error, code, "%s", text);
    free(all);
    return code;
}
