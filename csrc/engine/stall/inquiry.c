/* inquiry.c - what does every rank say of itself, and what is made of it? Asked by stall_check.c, which says when and
 * why.
 *
 * The leader of a host holds a book of accounts. Rank 0's becomes the report; the others' go up the tree of hosts, each
 * account once, when the stream is free, and what came from below goes the same way. All of it is the turn's, but that
 * rank 0's engine thread tells the user without the turn: whoever reads its output may be slow.
 *
 * Ranks leave one by one. A leader whose way up has ended with a rank that has left makes the report itself, of whom it
 * still reaches; of the others it says that they cannot be asked. So for a moment there may be two, and a report too
 * many; each host counts its inquiries upwards, whoever opens them.
 *
 * What comes from a stream is not believed: heads are checked before (may_come), accounts and findings for numbers that
 * cannot be, and texts get an end. A rank's account counts once in an inquiry, so a babbling host fills no memory.
 */
#define _GNU_SOURCE
#include "stall.h"

#include "../engine.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ANSWER_NS     1000000000u /* for ranks of the own host; rank 0 waits twice as long for those of others */
#define DEVICES_SHOWN 3
#define NOTHING_MOVED \
    "nothing has moved for %g s (HVDLITE_COLLECTIVE_TIMEOUT, --collective-timeout; 0: without limit): %s%s"

struct hvd_book {
    int size, have, below; /* below: ranks whose accounts come here */
    struct hvd_account **of;
    uint8_t *sent;
    struct hvd_told told;
};

static void forget_accounts(struct hvd_book *book)
{
    for (int rank = 0; book->of && rank < book->size; rank++) {
        free(book->of[rank]);
        book->of[rank] = NULL;
    }
    if (book->sent)
        memset(book->sent, 0, (size_t)book->size);
    book->have = 0;
}

int hvd_inquiry_open(struct hvd_engine *engine, struct hvd_error *error)
{
    engine->stall.may_come = hvd_stall_may_come;
    engine->stall.take = hvd_stall_take;
    struct hvd_book *book = calloc(1, sizeof *book);
    engine->stall.book = book;
    if (book) {
        book->size = engine->options.size;
        book->of = calloc((size_t)book->size, sizeof(void *));
        book->sent = calloc((size_t)book->size, 1);
    }
    return book && book->of && book->sent
               ? HVD_OK
               : hvd_fail(error, HVD_ENOMEM, HVD951 "rank %d: no memory for reports", engine->options.rank);
}

void hvd_inquiry_close(struct hvd_engine *engine)
{
    struct hvd_book *book = engine->stall.book;
    if (!book)
        return;
    forget_accounts(book);
    free(book->of);
    free(book->sent);
    free(book);
    engine->stall.book = NULL;
}

static void ask_own_host(struct hvd_engine *engine, uint64_t number)
{
    struct hvd_stall *stall = &engine->stall;
    forget_accounts(stall->book);
    stall->number = number;
    stall->until_ns = hvd_now_ns() + ANSWER_NS;
    atomic_store(&hvd_inbox(engine)->inquiry, number);
    for (int local = 0; local < engine->host.size; local++)
        hvd_stall_ring(engine, local);
}

static void say_down(struct hvd_engine *engine, uint32_t type, uint64_t number, const void *body, size_t bytes)
{
    struct hvd_set *set = engine->global;
    for (int i = engine->options.rank != 0; set->tree && i < set->tree->count; i++)
        hvd_neighbor_say(engine, set, &set->tree->near[i], type, number, body, bytes, NULL);
}

/* Somebody here, or below, wants to know. */
static void serve_wants(struct hvd_engine *engine, uint64_t now)
{
    struct hvd_stall *stall = &engine->stall;
    struct hvd_inbox *desk = hvd_inbox(engine);
    if (!stall->led && atomic_load(&desk->inquiry) != atomic_load(&desk->found)) /* who led before has not ended it */
        atomic_fetch_or(&desk->wanted, HVD_WANT_ANSWER);
    stall->led = true;
    uint64_t wanted = atomic_load(&desk->wanted);
    struct hvd_neighbor *up = hvd_tree_above(engine);
    if (!wanted)
        return;
    if (up) {
        if (up->out_count == 0) {
            atomic_fetch_and(&desk->wanted, ~wanted);
            hvd_neighbor_say(engine, engine->global, up, HVD_FRAME_WANT, wanted, NULL, 0, NULL);
        }
        return;
    }
    if (stall->number) { /* who asks for what is missing waits for the next one; what ends the job does not */
        stall->why |= (uint32_t)wanted & HVD_WANT_END;
        atomic_fetch_and(&desk->wanted, ~(uint64_t)HVD_WANT_END);
        return;
    }
    atomic_fetch_and(&desk->wanted, ~wanted);
    if (wanted & HVD_WANT_REPORT && stall->told_ns && now - stall->told_ns < stall->repeat_ns)
        wanted &= ~(uint64_t)HVD_WANT_REPORT;
    if (!wanted)
        return;
    stall->why = (uint32_t)wanted;
    ask_own_host(engine, atomic_load(&desk->inquiry) + 1);
    say_down(engine, HVD_FRAME_ASK, stall->number, NULL, 0);
}

void hvd_inquiry_answer(struct hvd_engine *engine, uint64_t number, uint64_t now)
{
    struct hvd_inbox *desk = hvd_inbox(engine);
    hvd_account_fill(engine, &desk->account[engine->host.rank], now);
    atomic_store_explicit(&desk->answered[engine->host.rank], number, memory_order_release);
    hvd_stall_ring(engine, hvd_stall_leader(engine));
}

static void keep(struct hvd_book *book, const struct hvd_account *account)
{
    if (account->rank < 0 || account->rank >= book->size || book->of[account->rank])
        return;
    struct hvd_account *copy = malloc(sizeof *copy);
    if (!copy)
        return;
    *copy = *account;
    book->of[account->rank] = copy;
    book->have++;
}

/* Take what ranks of this host have written; of who has not in time, what is to be seen. True: all are there. */
static bool gather(struct hvd_engine *engine, uint64_t now)
{
    struct hvd_stall *stall = &engine->stall;
    struct hvd_inbox *desk = hvd_inbox(engine);
    struct hvd_account account;
    uint64_t gone = atomic_load(&desk->gone);
    bool all = true;
    for (int local = 0; local < engine->host.size; local++) {
        int rank = engine->host.member[local];
        if (stall->book->of[rank])
            continue;
        if (gone >> local & 1 || (now >= stall->until_ns && hvd_abort_has_left(engine, rank))) {
            hvd_account_other(engine, local, &account);
            account.state = HVD_RANK_LEFT;
        } else if (atomic_load_explicit(&desk->answered[local], memory_order_acquire) == stall->number) {
            account = desk->account[local];
            if (!hvd_account_sane(&account, engine->options.size) || account.rank != rank)
                hvd_account_other(engine, local, &account);
        } else if (now >= stall->until_ns) {
            hvd_account_other(engine, local, &account);
        } else {
            all = false;
            hvd_stall_ring(engine, local);
            continue;
        }
        keep(stall->book, &account);
    }
    return all;
}

/* Who cannot be asked any more. */
static void keep_apart(struct hvd_engine *engine)
{
    struct hvd_account account = {.state = HVD_RANK_APART};
    for (int rank = 0; engine->hosts > 1 && rank < engine->options.size; rank++)
        if (!engine->stall.book->of[rank] && !hvd_tree_reaches(engine, rank)) {
            account.rank = rank;
            keep(engine->stall.book, &account);
        }
}

/* A leader below another: accounts go up, one at a time. */
static void pass_up(struct hvd_engine *engine, struct hvd_neighbor *up)
{
    struct hvd_stall *stall = &engine->stall;
    for (int rank = 0; rank < stall->book->size && up->out_count == 0; rank++)
        if (stall->book->of[rank] && !stall->book->sent[rank]) {
            stall->book->sent[rank] = 1;
            hvd_neighbor_say(engine, engine->global, up, HVD_FRAME_ACCOUNT, stall->number, stall->book->of[rank],
                             sizeof *stall->book->of[rank], NULL);
        }
}

static void publish(struct hvd_engine *engine, uint64_t number, const struct hvd_finding *finding)
{
    struct hvd_inbox *desk = hvd_inbox(engine);
    atomic_store(&desk->found, 0);
    desk->finding = *finding;
    atomic_store(&desk->found, number);
}

/* On which devices ranks wait, and by what. */
static void say_devices(const struct hvd_book *book, const char *before, const char *after, char *text, size_t room)
{
    int shown = 0;
    text[0] = '\0';
    for (int rank = 0; book->told.on_device && rank < book->size && shown < DEVICES_SHOWN; rank++) {
        const struct hvd_account *account = book->of[rank];
        size_t used = strlen(text);
        if (!account || !account->device[0])
            continue;
        snprintf(text + used, room - used, "%srank %d waits on %s%s", before, rank, account->device, after);
        shown++;
    }
}

/* Who has said goodbye, or was not asked, is never blamed. */
static int culprit_of(const struct hvd_book *book)
{
    int rank = book->told.culprit;
    return rank >= 0 && hvd_account_weight(book->of[rank]) > 0 ? rank : -1;
}

/* Who leads the job: all are there, or it has waited for long enough. */
static void conclude(struct hvd_engine *engine)
{
    struct hvd_stall *stall = &engine->stall;
    struct hvd_book *book = stall->book;
    const struct hvd_inquiry inquiry = {
        .of = (const struct hvd_account *const *)book->of,
        .size = book->size,
        .who = engine->who,
        .least_ms = (uint32_t)(stall->why & HVD_WANT_REPORT ? engine->options.stall_warn_ms / 2
                                                            : engine->options.collective_timeout_ms / 2),
    };
    hvd_finding_make(&inquiry, &book->told);
    publish(engine, stall->number, &book->told.finding);
    say_down(engine, HVD_FRAME_FINDING, stall->number, &book->told.finding, sizeof book->told.finding);
    if (stall->why & HVD_WANT_END && book->told.end[0]) {
        char text[1900], devices[512];
        say_devices(book, "; ", "", devices, sizeof devices);
        double limit = engine->options.collective_timeout_ms / 1000.0;
        if (book->told.on_device)
            hvd_text_write(text, sizeof text, HVD553 NOTHING_MOVED, limit, book->told.end, devices);
        else
            hvd_text_write(text, sizeof text, HVD550 NOTHING_MOVED, limit, book->told.end, devices);
        hvd_engine_abort(engine, culprit_of(book), HVD_ETIMEOUT, text);
    }
    stall->number = 0;
}

/* Who leads the job, without the turn: the user is told. A line at a time, so that lines stay whole; who does not read
 * is not waited for. */
void hvd_inquiry_tell(struct hvd_engine *engine, uint64_t now)
{
    struct hvd_stall *stall = &engine->stall;
    const struct hvd_told *told = &stall->book->told;
    char head[400], devices[1024];
    if (told->report[0] == '\0' || engine->options.report_fd < 0)
        return;
    uint64_t warn_ns = (uint64_t)engine->options.stall_warn_ms * 1000000u;
    stall->repeat_ns = told->sign == stall->sign ? 2 * stall->repeat_ns : warn_ns;
    stall->sign = told->sign;
    stall->told_ns = now;
    int limit_ms = engine->options.collective_timeout_ms;
    int count = snprintf(head, sizeof head,
                         "hvdlite: stall: collectives wait for ranks that have not submitted them, or make no "
                         "progress (HVDLITE_STALL_CHECK_TIME, %g s%s",
                         engine->options.stall_warn_ms / 1000.0,
                         limit_ms > 0 ? "; the job ends after HVDLITE_COLLECTIVE_TIMEOUT, " : ")" HVD_ENDS(552) "\n");
    if (limit_ms > 0)
        snprintf(head + count, sizeof head - (size_t)count, "%g s)" HVD_ENDS(552) "\n", limit_ms / 1000.0);
    say_devices(stall->book, "  ", "\n", devices, sizeof devices);
    const char *parts[] = {head, told->report, devices};
    for (size_t i = 0; i < HVD_COUNT_OF(parts); i++)
        for (const char *at = parts[i]; *at;) {
            size_t length = strcspn(at, "\n") + 1;
            struct pollfd room = {.fd = engine->options.report_fd, .events = POLLOUT};
            if (poll(&room, 1, 100) != 1 || write(engine->options.report_fd, at, length) < 0)
                return;
            at += length;
        }
}

/* A leader's part. True: it leads the job, and has come to an end. */
bool hvd_inquiry_lead(struct hvd_engine *engine, uint64_t now)
{
    struct hvd_stall *stall = &engine->stall;
    serve_wants(engine, now);
    if (!stall->number)
        return false;
    bool all = gather(engine, now);
    keep_apart(engine);
    struct hvd_neighbor *up = hvd_tree_above(engine);
    if (up) {
        pass_up(engine, up);
        if (now >= stall->until_ns + 2 * ANSWER_NS)
            stall->number = 0;
        return false;
    }
    if ((all && stall->book->have == stall->book->size) || now >= stall->until_ns + (engine->hosts > 1) * ANSWER_NS) {
        conclude(engine);
        return true;
    }
    return false;
}

/* ---- frames ---- */

bool hvd_stall_may_come(const struct hvd_set *set, const struct hvd_frame *head)
{
    if (set->number != 0)
        return false;
    switch (head->type) {
    case HVD_FRAME_WANT:
    case HVD_FRAME_ASK:
        return head->bytes == 0;
    case HVD_FRAME_ACCOUNT:
        return head->bytes == sizeof(struct hvd_account);
    case HVD_FRAME_FINDING:
        return head->bytes == sizeof(struct hvd_finding);
    default:
        return false;
    }
}

bool hvd_stall_take(struct hvd_engine *engine, const struct hvd_set *set, const struct hvd_neighbor *near,
                    const struct hvd_frame *head, const char *body)
{
    struct hvd_stall *stall = &engine->stall;
    bool above = set->rank != 0 && near == &set->tree->near[0];
    if (!stall->book)
        return true;
    if (head->type == HVD_FRAME_WANT && !above) {
        atomic_fetch_or(&hvd_inbox(engine)->wanted, head->round & 7);
    } else if (head->type == HVD_FRAME_ASK && above) {
        if (head->round > atomic_load(&hvd_inbox(engine)->inquiry)) /* now: accounts from below may come at any time */
            ask_own_host(engine, head->round);
        say_down(engine, HVD_FRAME_ASK, head->round, NULL, 0);
    } else if (head->type == HVD_FRAME_ACCOUNT && !above) {
        struct hvd_account account;
        memcpy(&account, body, sizeof account);
        if (!hvd_account_sane(&account, engine->options.size))
            return false;
        if (head->round == stall->number)
            keep(stall->book, &account);
    } else if (head->type == HVD_FRAME_FINDING && above) {
        struct hvd_finding finding;
        memcpy(&finding, body, sizeof finding);
        if (!hvd_finding_sane(&finding))
            return false;
        publish(engine, head->round, &finding);
        say_down(engine, HVD_FRAME_FINDING, head->round, &finding, sizeof finding);
    } else {
        return false;
    }
    atomic_store(&stall->news, true);
    hvd_turn_call(engine);
    return true;
}
