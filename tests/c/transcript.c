/* transcript.c - see transcript.h. */
#include "transcript.h"

#include "check.h"
#include "negotiation/state.h"
#include "ranks.h"

#include <stdarg.h>

#define TICKETS 64
#define NAMES   64

struct play {
    struct ranks ranks;
    bool open;
    const char *title;
    char seen[16384];
    size_t seen_bytes;
    char name[NAMES][32];
    int names;
    bool taken[16][TICKETS];
};

static __attribute__((format(printf, 2, 3))) void see(struct play *play, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    play->seen_bytes +=
        (size_t)vsnprintf(play->seen + play->seen_bytes, sizeof play->seen - play->seen_bytes, format, arguments);
    va_end(arguments);
    CHECK(play->seen_bytes < sizeof play->seen, "%s: too much to see", play->title);
}

static const char *name_kept(struct play *play, const char *name)
{
    for (int i = 0; i < play->names; i++)
        if (strcmp(play->name[i], name) == 0)
            return play->name[i];
    CHECK(play->names < NAMES, "%s", name);
    snprintf(play->name[play->names], sizeof play->name[0], "%s", name);
    return play->name[play->names++];
}

static void see_item(struct play *play, const struct hvd_plan_item *item, uint32_t i)
{
    if (item->key.high == 0)
        see(play, "#%d", (int)item->key.low);
    for (int n = 0; n < play->names; n++) {
        struct hvd_key key = hvd_key_for(play->ranks.limits.set, play->name[n], &item->signature);
        if (memcmp(&key, &item->key, sizeof key) == 0)
            see(play, "%s", play->name[n]);
    }
    if (item->slot == HVD_SLOTLESS)
        see(play, "@none");
    else if (item->key.high)
        see(play, "@%u", item->slot);
    see(play, "%s%s", item->code == HVD_OK ? "" : " refused", item->flags & HVD_FRESH_IN_PLANE ? " plane" : "");
    for (int rank = 0, first = 1; rank < play->ranks.size; rank++) {
        uint32_t ticket = play->ranks.plan[rank].item[i].ticket;
        if (ticket == HVD_TICKET_NONE) {
            see(play, first ? " without %d" : ",%d", rank);
            first = 0;
        } else {
            CHECK(play->taken[rank][ticket], "%s: ticket %u of rank %d", play->title, ticket, rank);
            play->taken[rank][ticket] = false;
        }
    }
}

static void play_round(struct play *play)
{
    struct ranks *ranks = &play->ranks;
    for (int rank = 0; rank < ranks->size; rank++)
        if (!ranks->voted[rank])
            ranks_vote(ranks, rank);
    ranks_agree(ranks, 4);
    for (int rank = 0; rank < ranks->size; rank++)
        ranks_decide(ranks, rank);
    const struct hvd_plan *plan = &ranks->plan[0];
    see(play, "> %d:", (int)plan->round);
    for (uint32_t i = 0; i < plan->items; i++) {
        see(play, i ? ", " : " ");
        see_item(play, &plan->item[i], i);
    }
    if (plan->joined >= 0)
        see(play, " joined, %d last", plan->joined);
    if (plan->tuned >= 0)
        see(play, " tuned to %d", (int)plan->tuned);
    if (plan->date > 1)
        see(play, " dated %d", (int)plan->date);
    if (plan->learned)
        see(play, " learned %u", plan->learned);
    if (plan->deviated)
        see(play, " deviated");
    if (plan->left >= 0)
        see(play, " left %d", plan->left);
    if (plan->text[0]) {
        see(play, plan->not_finite && play->ranks.limits.forgives ? " told" : " fails on");
        for (int rank = 0; rank < ranks->size; rank++)
            if (ranks->plan[rank].failed_ticket != HVD_TICKET_NONE) {
                play->taken[rank][ranks->plan[rank].failed_ticket] = false;
                see(play, " %d", rank);
            }
    }
    see(play, "%s\n", ranks_news(ranks) ? " ..." : "");
    if (plan->text[0])
        see(play, "> %s\n", plan->text);
}

static int number_of(const char *const *name, int names, const char *word)
{
    for (int i = 0; i < names; i++)
        if (name[i] && strcmp(name[i], word) == 0)
            return i;
    return -1;
}

static void read_word(struct hvd_signature *signature, uint32_t *flags, const char *word)
{
    int number;
    unsigned count;
    unsigned long long group;
    double scale;
    if (word[0] >= '0' && word[0] <= '9') {
        signature->ndim = 0;
        for (char *at = (char *)(uintptr_t)word; *at; at += *at == 'x')
            signature->dims[signature->ndim++] = strtoll(at, &at, 10);
    } else if ((number = number_of(ranks_names.kind, ranks_names.kinds, word)) >= 0) {
        signature->kind = number;
    } else if ((number = number_of(ranks_names.op, ranks_names.ops, word)) >= 0) {
        signature->op = number;
    } else if ((number = number_of(ranks_names.dtype, ranks_names.dtypes, word)) >= 0) {
        signature->dtype = number;
    } else if (strcmp(word, "gpu") == 0) { /* behind the dtype */
        signature->dtype += ranks_names.on_device;
    } else if (strcmp(word, "plane") == 0) {
        *flags = HVD_FRESH_IN_PLANE;
    } else if (sscanf(word, "nan=%u", &count) == 1) {
        signature->not_finite += (uint64_t)count << 32;
    } else if (sscanf(word, "inf=%u", &count) == 1) {
        signature->not_finite += count;
    } else if (sscanf(word, "root=%d", &number) == 1) {
        signature->root = number;
    } else if (sscanf(word, "peer=%d", &number) == 1) {
        signature->peer = number;
    } else if (sscanf(word, "priority=%d", &number) == 1) {
        signature->priority = number;
    } else if (sscanf(word, "pre=%lf", &scale) == 1) {
        signature->prescale = scale;
    } else if (sscanf(word, "post=%lf", &scale) == 1) {
        signature->postscale = scale;
    } else {
        CHECK(sscanf(word, "group=%llu/%u", &group, &count) == 2, "what is '%s'?", word);
        signature->group = group;
        signature->group_count = count;
    }
}

static void submit(struct play *play, int rank, const char *name, const struct hvd_signature *signature, uint32_t flags)
{
    uint32_t ticket = 0;
    while (play->taken[rank][ticket])
        ticket++;
    CHECK(ticket < TICKETS, "%s", play->title);
    const char *kept = strcmp(name, "#") == 0 ? NULL : name_kept(play, name);
    int code = hvd_coord_submit(play->ranks.coord[rank], ticket, kept, signature, flags);
    play->taken[rank][ticket] = code == HVD_OK;
    if (code != HVD_OK)
        see(play, "> refused %d\n", code);
}

static bool speaks(const char *list, int rank)
{
    if (strcmp(list, "all") == 0)
        return true;
    for (char *at = (char *)(uintptr_t)list; *at; at += *at == ',')
        if (strtol(at, &at, 10) == rank)
            return true;
    return false;
}

static void play_line(struct play *play, char *line)
{
    char *word[16] = {NULL};
    int words = 0;
    for (char *at = strtok(line, " "); at && words < 16; at = strtok(NULL, " "))
        word[words++] = at;
    if (strcmp(word[0], "open") == 0) {
        uint32_t slots = 16, fresh = 16, forgive = 0;
        for (int i = 2; i + 1 < words; i += 2)
            *(strcmp(word[i], "slots") == 0   ? &slots
              : strcmp(word[i], "fresh") == 0 ? &fresh
                                              : &forgive) = (uint32_t)atoi(word[i + 1]);
        ranks_forgive = forgive;
        ranks_open(&play->ranks, atoi(word[1]), slots, fresh, TICKETS, 1);
        play->open = true;
        return;
    }
    CHECK(play->open, "%s: open first", play->title);
    if (strcmp(word[0], "round") == 0) {
        play_round(play);
        return;
    }
    if (strcmp(word[0], "settle") == 0) {
        for (int rounds = 0; ranks_news(&play->ranks); rounds++) {
            CHECK(rounds < 30, "%s: does not settle; seen:\n%s", play->title, play->seen);
            play_round(play);
        }
        return;
    }
    struct hvd_signature signature = ranks_signature(4);
    uint32_t flags = 0;
    for (int i = 2; i < words && strcmp(word[0], "vote") != 0; i++)
        read_word(&signature, &flags, word[i]);
    for (int rank = 0; rank < play->ranks.size; rank++) {
        if (strcmp(word[0], "vote") == 0 && speaks(word[1], rank))
            ranks_vote(&play->ranks, rank);
        else if (!speaks(word[0], rank))
            continue;
        else if (strcmp(word[1], "!join") == 0)
            hvd_coord_join(play->ranks.coord[rank]);
        else if (strcmp(word[1], "!tune") == 0)
            hvd_coord_tune(play->ranks.coord[rank], signature.dims[0]);
        else if (strcmp(word[1], "!date") == 0)
            hvd_coord_date(play->ranks.coord[rank], (uint64_t)signature.dims[0]);
        else if (strcmp(word[1], "!leave") == 0)
            hvd_coord_leave(play->ranks.coord[rank]);
        else
            submit(play, rank, word[1], &signature, flags);
    }
}

/* The next line that was seen must be this one. */
static void expect(struct play *play, const char *line)
{
    size_t bytes = strlen(line), seen = strcspn(play->seen, "\n");
    CHECK(play->seen_bytes > 0 && seen == bytes && memcmp(play->seen, line, bytes) == 0, "\n%s\nwritten: %s\nseen:\n%s",
          play->title, line, play->seen);
    memmove(play->seen, play->seen + seen + 1, play->seen_bytes - seen);
    play->seen_bytes -= seen + 1;
}

void transcript_play(const char *title, const char *script)
{
    struct play *play = calloc(1, sizeof *play);
    play->title = title;
    char line[512];
    for (const char *at = script; *at;) {
        size_t bytes = strcspn(at, "\n");
        CHECK(bytes < sizeof line, "%s", at);
        memcpy(line, at, bytes);
        line[bytes] = 0;
        at += bytes + (at[bytes] == '\n');
        if (line[0] == '>' || play->seen_bytes) /* a table has lines without the mark */
            expect(play, line);
        else
            play_line(play, line);
    }
    CHECK(play->seen_bytes == 0, "\n%s\nat the end also seen:\n%s", title, play->seen);
    if (play->open)
        ranks_close(&play->ranks);
    free(play);
}
