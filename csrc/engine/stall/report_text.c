/* report_text.c - in which words is it told who keeps the others waiting?
 *
 * For a caller whose patience is over one line; for the user a report, with the stacks of those that are missing; for
 * the end of the job a sentence or two. Who is missing missing_ranks.c has said; nothing is decided here. A line of
 * which no rank is surely missing, because lists were cut, is no news beside one that names somebody.
 *
 * Names came with their control characters escaped (rank_status.c), so a line stays one. Pure.
 */
#include "missing_ranks.h"

#include "../engine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RANKS_SHOWN 12 /* in a list of numbers */
#define NAME_SHOWN  120
#define TOLD_MAX    16 /* missing ranks that are described */
#define STACKS_MAX  6
#define DESCRIBED   500 /* bytes of a finding that the description of a rank takes at most, but for long names */

struct text {
    char *at;
    size_t left;
};

static void say(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(struct text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int count = vsnprintf(text->at, text->left, format, arguments);
    va_end(arguments);
    size_t used = count < 0 ? 0 : (size_t)count < text->left ? (size_t)count : text->left - 1;
    text->at += used;
    text->left -= used;
}

static void say_ranks(struct text *text, const uint64_t *bits, int size)
{
    int count = 0, shown = 0;
    for (int rank = 0; rank < size; rank++)
        count += hvd_rank_in(bits, rank);
    say(text, count == 1 ? "rank " : "ranks ");
    for (int rank = 0; rank < size; rank++) {
        int to = rank;
        if (!hvd_rank_in(bits, rank))
            continue;
        if (shown == RANKS_SHOWN) {
            say(text, " and more");
            return;
        }
        while (to + 1 < size && hvd_rank_in(bits, to + 1))
            to++;
        say(text, to > rank + 1 ? "%s%d-%d" : "%s%d", shown ? ", " : "", rank, to);
        shown++;
        rank = to > rank + 1 ? to : rank;
    }
}

/* Names begin with their kind, mostly. */
static void say_request(struct text *text, const struct hvd_entry *entry, const char *name)
{
    const char *kind = hvd_engine_kind(entry->kind);
    int length = (int)strnlen(name, NAME_SHOWN);
    while (length && ((unsigned char)name[length] & 0xc0) == 0x80) /* not inside of a character */
        length--;
    if (!name[0])
        say(text, "%s%s", kind, entry->kind == HVD_JOIN ? "" : " without a name");
    else
        say(text, strncmp(name, kind, strlen(kind)) == 0 ? "'%.*s'" : "'%.*s' (%s)", length, name, kind);
    if (entry->kind == HVD_SEND)
        say(text, " (from %d to %d)", entry->root, entry->peer);
}

static void say_rank(struct text *text, const struct hvd_inquiry *inquiry, int rank)
{
    const struct hvd_account *account = inquiry->of[rank];
    const char *host = strstr(inquiry->who[rank].called, " (host ");
    say(text, "rank %d (", rank);
    if (account && account->state != HVD_RANK_APART)
        say(text, "pid %d%s", account->pid, host ? ", " : ")");
    if (host || !account || account->state == HVD_RANK_APART)
        say(text, "%s", host ? host + 2 : "its process is not known)");
    say(text, " %s", hvd_state_words(hvd_rank_state_of(account)));
}

/* What it does instead. */
static void say_rest(struct text *text, const struct hvd_account *account)
{
    const struct hvd_entry *oldest = NULL;
    bool joined = false;
    if (!account || account->state != HVD_RANK_ALIVE)
        return;
    say(text, account->last[0] ? "; it submitted %s last" : "; it has submitted nothing yet%s", account->last);
    for (uint32_t i = 0; i < account->entries; i++) {
        const struct hvd_entry *entry = &account->entry[i];
        joined = joined || entry->kind == HVD_JOIN;
        if (entry->kind != HVD_JOIN && (!oldest || entry->waited_ms > oldest->waited_ms ||
                                        (entry->waited_ms == oldest->waited_ms && entry->number < oldest->number)))
            oldest = entry;
    }
    if (!oldest) {
        say(text, joined ? ", and has joined" : ", and waits for no collective");
        return;
    }
    say(text, ", and waits for ");
    say_request(text, oldest, account->names + oldest->name);
}

static void say_stack(struct text *text, const struct hvd_account *account)
{
    const char *at = account ? account->stack : "";
    if (!at[0])
        return;
    say(text, "    the Python stack of its main thread, the innermost call first:\n");
    for (bool head = true; *at; head = false) {
        size_t length = strcspn(at, "\n");
        if (!head || at[0] == ' ') /* its own headline */
            say(text, "    %.*s\n", (int)(length < 300 ? length : 300), at);
        at += length + (at[length] == '\n');
    }
}

static void say_tensors(struct text *text, const struct hvd_line *line)
{
    for (int i = 0; i < line->shown; i++) {
        say(text, i ? ", " : "");
        say_request(text, line->first[i]->entry, line->first[i]->name);
    }
    uint32_t rest = (uint32_t)(line->tensors - line->shown) + line->more;
    if (rest)
        say(text, " and %s%u more", line->at_least ? "at least " : "", rest);
    if (line->set)
        say(text, " in process set %d", HVD_MARK_NUMBER(line->set));
}

/* Who has it, who has not. */
static void say_who(struct text *text, const struct hvd_inquiry *inquiry, const struct hvd_line *line)
{
    bool on_device = line->agreed == HVD_ENTRY_ON_DEVICE;
    if (hvd_rank_in_none(line->missing) && !hvd_rank_in_none(line->perhaps)) {
        say(text, "missing nowhere for sure: more than can be listed waits on ");
        say_ranks(text, line->perhaps, inquiry->size);
        return;
    }
    if (hvd_rank_in_none(line->missing)) {
        say(text, on_device      ? "launched on GPUs, and does not end there"
                  : line->agreed ? "submitted by all, under way, and does not get on"
                                 : "submitted by all that take part; waits for the rest of its group");
        return;
    }
    say(text, on_device      ? "launched on GPUs, and does not end there without "
              : line->agreed ? "submitted by all, and does not get on without "
                             : "submitted by ");
    if (!line->agreed) {
        say_ranks(text, line->have, inquiry->size);
        say(text, ", missing on ");
    }
    say_ranks(text, line->missing, inquiry->size);
}

/* For the finding: one line without the tensor's name. */
static void write_finding(const struct hvd_inquiry *inquiry, const struct hvd_line *line, int lines,
                          struct hvd_told *told)
{
    for (int i = 0; i < lines; i++) {
        struct text text = {told->finding.line[i], HVD_FINDING_BYTES};
        say_who(&text, inquiry, &line[i]);
        for (int rank = 0; rank < inquiry->size && text.left > DESCRIBED; rank++)
            if (hvd_rank_in(line[i].missing, rank)) {
                say(&text, "; ");
                say_rank(&text, inquiry, rank);
                say_rest(&text, inquiry->of[rank]);
            }
    }
    told->finding.lines = (uint32_t)lines;
}

#define MIX(sign, value) (((sign) ^ (uint64_t)(value)) * 0x100000001b3u)

static int by_age(const void *left, const void *right)
{
    const struct hvd_line *const *a = left, *const *b = right;
    return (*a)->waited_ms < (*b)->waited_ms ? 1 : (*a)->waited_ms > (*b)->waited_ms ? -1 : 0;
}

/* What is news, the oldest first. */
static int choose(const struct hvd_inquiry *inquiry, const struct hvd_line *line, int lines,
                  const struct hvd_line **chosen)
{
    int count = 0;
    bool named = false;
    for (int i = 0; i < lines; i++)
        named = named || (line[i].waited_ms >= inquiry->least_ms && !hvd_rank_in_none(line[i].missing));
    for (int i = 0; i < lines; i++)
        if (line[i].waited_ms >= inquiry->least_ms &&
            !(named && hvd_rank_in_none(line[i].missing) && !hvd_rank_in_none(line[i].perhaps)))
            chosen[count++] = &line[i];
    qsort(chosen, (size_t)count, sizeof chosen[0], by_age);
    return count;
}

static void write_report(const struct hvd_inquiry *inquiry, const struct hvd_line *all, int count,
                         struct hvd_told *told)
{
    const struct hvd_line *line[HVD_FINDING_LINES];
    uint64_t mentioned[HVD_RANK_WORDS] = {0};
    struct text text = {told->report, sizeof told->report}, end = {told->end, sizeof told->end};
    int lines = choose(inquiry, all, count, line), shown = 0;
    for (int i = 0; i < lines; i++) {
        say(&text, "  for %.3g s: ", line[i]->waited_ms / 1000.0);
        say_tensors(&text, line[i]);
        say(&text, ": ");
        say_who(&text, inquiry, line[i]);
        say(&text, "\n");
        if (i < 2) {
            say(&end, i ? "; " : "");
            say_tensors(&end, line[i]);
            say(&end, " was ");
            say_who(&end, inquiry, line[i]);
        }
        for (int w = 0; w < HVD_RANK_WORDS; w++) {
            mentioned[w] |= line[i]->missing[w];
            told->sign = MIX(told->sign, line[i]->missing[w]);
        }
        told->sign = MIX(MIX(told->sign, line[i]->first[0]->key), line[i]->tensors);
        told->on_device |= line[i]->agreed == HVD_ENTRY_ON_DEVICE;
    }
    for (int rank = 0; rank < inquiry->size; rank++) {
        if (!hvd_rank_in(mentioned, rank))
            continue;
        if (told->culprit < 0 || hvd_account_weight(inquiry->of[rank]) > hvd_account_weight(inquiry->of[told->culprit]))
            told->culprit = rank;
        if (shown < TOLD_MAX) {
            say(&text, "  ");
            say_rank(&text, inquiry, rank);
            say_rest(&text, inquiry->of[rank]);
            say(&text, "\n");
        }
        if (shown < STACKS_MAX)
            say_stack(&text, inquiry->of[rank]);
        if (shown < 3) {
            say(&end, "; ");
            say_rank(&end, inquiry, rank);
            say_rest(&end, inquiry->of[rank]);
        }
        shown++;
    }
    if (shown > TOLD_MAX)
        say(&text, "  and %d ranks more\n", shown - TOLD_MAX);
}

void hvd_finding_tell(const struct hvd_inquiry *inquiry, const struct hvd_line *line, int lines, struct hvd_told *told)
{
    write_finding(inquiry, line, lines, told);
    write_report(inquiry, line, lines, told);
}
