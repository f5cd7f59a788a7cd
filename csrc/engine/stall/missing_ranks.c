/* missing_ranks.c - from what all ranks have told: which tensors wait, and for whom?
 *
 * The union of what waits anywhere, by key; of each key, who has it and who has not. Not missing are ranks that are not
 * in the set, or have joined, and of a send all but its two ends. A rank whose list was cut is missing for what surely
 * does not wait there (hvd_account_may_have); for the rest it is known as one that perhaps has it. Keys with the same
 * set and the same missing ranks make one line, because mostly a rank that is late lacks all of a step; the line shows
 * the names of those that have waited longest. Who has not answered at all counts as missing everywhere, and its state
 * says why; so it does of what all have agreed on, and that does not get on.
 *
 * Ranks that have joined wait for the others of their set, which is news where nobody there waits for anything else.
 *
 * What is on no list is counted, but nobody knows what it is: where all that a rank has listed is in one line, so is
 * the rest of it; where it is in several, their counts are "at least". Pure.
 */
#include "missing_ranks.h"

#include <stdlib.h>
#include <string.h>

struct work {
    const struct hvd_inquiry *inquiry;
    struct hvd_line line[HVD_FINDING_LINES];
    int lines;
    uint32_t asked;                        /* keys of the finding that somebody asks for: the first */
    uint32_t (*listed)[HVD_FINDING_LINES]; /* of each rank: how many of its entries each line has */
};

static void put(uint64_t *bits, int rank)
{
    bits[rank / 64] |= (uint64_t)1 << (rank % 64);
}

static int compare(const void *left, const void *right)
{
    const struct hvd_seen *a = left, *b = right;
    if (a->set != b->set)
        return a->set < b->set ? -1 : 1;
    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    return a->rank - b->rank;
}

/* Everything that waits anywhere; how much, and the caller frees it. */
static struct hvd_seen *collect(const struct hvd_inquiry *inquiry, size_t *count)
{
    size_t room = 0, at = 0;
    for (int rank = 0; rank < inquiry->size; rank++)
        room += inquiry->of[rank] ? inquiry->of[rank]->entries : 0;
    struct hvd_seen *seen = malloc((room ? room : 1) * sizeof *seen);
    for (int rank = 0; seen && rank < inquiry->size; rank++)
        for (uint32_t i = 0; inquiry->of[rank] && i < inquiry->of[rank]->entries; i++) {
            const struct hvd_entry *entry = &inquiry->of[rank]->entry[i];
            seen[at++] = (struct hvd_seen){entry->key, entry->set, rank, entry, inquiry->of[rank]->names + entry->name};
        }
    if (seen)
        qsort(seen, at, sizeof *seen, compare);
    *count = seen ? at : 0;
    return seen;
}

static bool has_joined(const struct hvd_account *account, int set)
{
    for (uint32_t i = 0; account && i < account->entries; i++)
        if (account->entry[i].kind == HVD_JOIN && account->entry[i].set == set)
            return true;
    return false;
}

/* Not listed by this rank, of which it was expected. */
static void look_at_one(const struct hvd_inquiry *inquiry, const struct hvd_seen *seen, int rank, struct hvd_line *line)
{
    const struct hvd_account *account = inquiry->of[rank];
    if (!has_joined(account, seen->set))
        put(account && account->more && hvd_account_may_have(account, seen->key, seen->set) ? line->perhaps
                                                                                            : line->missing,
            rank);
}

static void look_who_misses(const struct hvd_inquiry *inquiry, const struct hvd_seen *seen, size_t count,
                            struct hvd_line *line)
{
    const struct hvd_entry *entry = seen->entry;
    bool send = entry->kind == HVD_SEND;
    int place = 0; /* in the set */
    memset(line, 0, sizeof *line);
    line->set = seen->set;
    for (size_t i = 0; i < count; i++) {
        put(line->have, seen[i].rank);
        line->agreed |= seen[i].entry->agreed;
        if (seen[i].entry->waited_ms > line->waited_ms)
            line->waited_ms = seen[i].entry->waited_ms;
    }
    for (int rank = 0; rank < inquiry->size; rank++) {
        if (!hvd_account_in_set(inquiry->of[seen->rank], seen->set, rank))
            continue;
        bool asked = !send || place == entry->root || place == entry->peer;
        place++;
        if (line->agreed && hvd_account_holds_up(inquiry->of[rank]))
            put(line->missing, rank);
        else if (!line->agreed && !hvd_rank_in(line->have, rank) && asked)
            look_at_one(inquiry, seen, rank, line);
    }
}

/* Is it known of all whether they have it, or would it not matter? */
static bool sure(const struct hvd_line *line)
{
    return !hvd_rank_in_none(line->missing) || hvd_rank_in_none(line->perhaps);
}

/* The line that speaks of the same ranks, or room for a new one; NULL: there is none. */
static struct hvd_line *place(struct work *work, const struct hvd_line *line)
{
    for (int i = 0; i < work->lines; i++)
        if (work->line[i].set == line->set && work->line[i].agreed == line->agreed &&
            sure(&work->line[i]) == sure(line) &&
            memcmp(work->line[i].missing, line->missing, sizeof line->missing) == 0)
            return &work->line[i];
    if (work->lines == HVD_FINDING_LINES)
        return NULL;
    work->line[work->lines] = *line;
    return &work->line[work->lines++];
}

/* Of ranks that have joined, and others of that set who wait for something: who is late there, is late here. */
static bool waits_rightly(const struct hvd_seen *seen, const struct hvd_seen *all, size_t count)
{
    for (size_t i = 0; i < count && seen->entry->kind == HVD_JOIN; i++)
        if (all[i].set == seen->set && all[i].entry->kind != HVD_JOIN)
            return true;
    return false;
}

/* Does it wait longer, as far as its first rank knows? */
static bool before(const struct hvd_seen *one, const struct hvd_seen *other)
{
    if (one->rank != other->rank)
        return one->rank < other->rank;
    return one->entry->number < other->entry->number;
}

/* Those that somebody asks for come first, and have room before others. */
static void add_key(struct work *work, struct hvd_finding *finding, const struct hvd_seen *seen, bool asked,
                    uint32_t line)
{
    uint32_t at = finding->keys;
    if (at == HVD_FINDING_KEYS && (!asked || work->asked == HVD_FINDING_KEYS))
        return;
    if (at < HVD_FINDING_KEYS)
        finding->keys++;
    if (asked) {
        if (at < HVD_FINDING_KEYS)
            finding->of[at] = finding->of[work->asked];
        at = work->asked++;
    }
    finding->of[at].key = hvd_finding_key(seen->key, seen->set);
    finding->of[at].line = line;
}

static void sort_in(struct work *work, const struct hvd_seen *seen, size_t count, struct hvd_told *told)
{
    struct hvd_line one;
    look_who_misses(work->inquiry, seen, count, &one);
    struct hvd_line *line = place(work, &one);
    bool asked = false;
    if (!line)
        return;
    for (size_t i = 0; i < count; i++) {
        work->listed[seen[i].rank][line - work->line] += seen[i].entry->kind != HVD_JOIN;
        asked = asked || seen[i].entry->asked;
    }
    add_key(work, &told->finding, seen, asked, (uint32_t)(line - work->line));
    line->tensors++;
    if (one.waited_ms > line->waited_ms)
        line->waited_ms = one.waited_ms;
    for (int i = 0; i < HVD_RANK_WORDS; i++) { /* who has one of them */
        line->have[i] |= one.have[i];
        line->perhaps[i] |= one.perhaps[i];
    }
    int at = line->shown < HVD_FINDING_SHOWN ? line->shown++ : HVD_FINDING_SHOWN;
    for (; at > 0 && before(seen, line->first[at - 1]); at--)
        if (at < HVD_FINDING_SHOWN)
            line->first[at] = line->first[at - 1];
    if (at < HVD_FINDING_SHOWN)
        line->first[at] = seen;
}

/* What is on no list. */
static void count_the_rest(struct work *work)
{
    for (int rank = 0; rank < work->inquiry->size; rank++) {
        const struct hvd_account *account = work->inquiry->of[rank];
        uint32_t all = 0;
        if (!account || account->more == 0)
            continue;
        for (uint32_t i = 0; i < account->entries; i++)
            all += account->entry[i].kind != HVD_JOIN;
        for (int i = 0; i < work->lines; i++) {
            struct hvd_line *line = &work->line[i];
            uint32_t listed = work->listed[rank][i], tensors = listed + account->more;
            line->at_least = line->at_least || (listed && listed < all);
            if (listed == all && tensors > (uint32_t)line->tensors + line->more)
                line->more = tensors - (uint32_t)line->tensors;
        }
    }
}

void hvd_finding_make(const struct hvd_inquiry *inquiry, struct hvd_told *told)
{
    struct work *work = calloc(1, sizeof *work);
    if (work)
        work->listed = calloc((size_t)inquiry->size, sizeof *work->listed);
    size_t count = 0;
    memset(told, 0, sizeof *told);
    told->culprit = -1;
    struct hvd_seen *seen = work && work->listed ? collect(inquiry, &count) : NULL;
    if (seen) {
        work->inquiry = inquiry;
        for (size_t from = 0, to; from < count; from = to) {
            for (to = from + 1; to < count && seen[to].key == seen[from].key && seen[to].set == seen[from].set;)
                to++;
            if (!waits_rightly(&seen[from], seen, count))
                sort_in(work, seen + from, to - from, told);
        }
        count_the_rest(work);
        hvd_finding_tell(inquiry, work->line, work->lines, told);
    }
    free(seen);
    if (work)
        free(work->listed);
    free(work);
}
