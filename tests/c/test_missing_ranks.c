/* test_missing_ranks.c - what is made of accounts whose lists were cut: who surely lacks a tensor is named, who may
 * have it is not, no line says that all have submitted what they have not, and what is on no list is counted. */
#include "check.h"
#include "engine/engine.h"

#include <string.h>

enum { SIZE = 3, MANY = 161 };

static struct hvd_account account[SIZE];
static struct hvd_who who[SIZE];
static struct hvd_told told;

/* This rank waits for key, and lists it if there is room. */
static void waits(int rank, uint64_t key)
{
    struct hvd_account *of = &account[rank];
    hvd_account_add(of, key, 0);
    if (of->entries == HVD_ENTRIES_MAX) {
        of->more++;
        return;
    }
    of->entry[of->entries++] = (struct hvd_entry){.key = key, .number = of->entries, .waited_ms = 5000, .name = 1};
}

static void forget(void)
{
    memset(account, 0, sizeof account);
    for (int rank = 0; rank < SIZE; rank++) {
        account[rank].rank = rank;
        strcpy(account[rank].names + 1, "w");
        snprintf(who[rank].called, sizeof who[rank].called, "rank %d", rank);
    }
}

static void make(void)
{
    const struct hvd_account *of[SIZE];
    for (int rank = 0; rank < SIZE; rank++) {
        of[rank] = &account[rank];
        CHECK(hvd_account_sane(&account[rank], SIZE), "rank %d", rank);
    }
    hvd_finding_make(&(struct hvd_inquiry){.of = of, .size = SIZE, .who = who}, &told);
    CHECK(hvd_finding_sane(&told.finding), "%u keys", told.finding.keys);
    CHECK(!strstr(told.report, "submitted by all"), "%s", told.report);
}

static bool says(const char *words)
{
    return strstr(told.report, words) != NULL;
}

static const char *line_of(uint64_t key)
{
    for (uint32_t i = 0; i < told.finding.keys; i++)
        if (told.finding.of[i].key == key)
            return told.finding.line[told.finding.of[i].line];
    return NULL;
}

static void who_has_not_one_of_many_is_named(void)
{
    forget();
    for (uint64_t i = 1; i <= MANY; i++) {
        waits(0, i);
        waits(1, i << 20); /* the same layers, called otherwise */
        waits(2, i);
    }
    make();
    CHECK(says("and 158 more: submitted by ranks 0, 2, missing on rank 1\n"), "%s", told.report);
    CHECK(says("and 158 more: submitted by rank 1, missing on ranks 0, 2\n"), "%s", told.report);
    CHECK(says("rank 1 (pid 0) is alive") && told.culprit >= 0, "%s", told.report);
    CHECK(strstr(told.end, "missing on rank 1") && strstr(line_of(1), "missing on rank 1"), "%s", told.end);
}

/* All wait for the same, but each has listed others. */
static void who_may_have_it_is_not(void)
{
    forget();
    for (uint64_t i = 0; i < MANY; i++)
        for (int rank = 0; rank < SIZE; rank++)
            waits(rank, 1 + (i + (uint64_t)rank * 60) % MANY);
    make();
    CHECK(says("missing nowhere for sure: more than can be listed waits on ranks 0-2"), "%s", told.report);
    CHECK(told.culprit == -1, "%d", told.culprit);
    waits(0, MANY + 1);
    account[0].entry[0].key = MANY + 1; /* and one that nobody else has */
    make();
    CHECK(says("'w' (allreduce): submitted by rank 0, missing on ranks 1, 2\n"), "%s", told.report);
    CHECK(!says("for sure"), "%s", told.report);
}

/* What is on no list may belong to either line. */
static void counts_are_exact_or_say_that_they_are_not(void)
{
    forget();
    for (uint64_t i = 1; i <= MANY; i++) {
        waits(0, i);
        if (i <= 10)
            waits(2, i);
    }
    make();
    CHECK(says("and at least 7 more: submitted by ranks 0, 2, missing on rank 1\n"), "%s", told.report);
    CHECK(says("and at least 83 more: submitted by rank 0, missing on ranks 1, 2\n"), "%s", told.report);
}

/* More keys than a finding has room for: those that somebody asks for are among them. */
static void who_asks_is_answered(void)
{
    forget();
    for (uint64_t i = 1; i <= 96; i++)
        for (int rank = 0; rank < SIZE; rank++)
            waits(rank, i * SIZE + (uint64_t)rank);
    for (int i = 0; i < 96; i += 5)
        account[2].entry[i].asked = 1;
    make();
    CHECK(told.finding.keys == HVD_FINDING_KEYS, "%u keys", told.finding.keys);
    for (int i = 0; i < 96; i += 5) {
        const char *line = line_of(account[2].entry[i].key);
        CHECK(line && strstr(line, "submitted by rank 2, missing on ranks 0, 1;"), "%s", line ? line : "(none)");
    }
}

static void joins(int rank)
{
    struct hvd_account *of = &account[rank];
    of->entry[of->entries++] = (struct hvd_entry){.kind = HVD_JOIN, .waited_ms = 5000};
}

static void who_has_joined_waits_where_nobody_gets_on(void)
{
    forget();
    joins(0);
    joins(2);
    make();
    CHECK(says("for 5 s: join: submitted by ranks 0, 2, missing on rank 1\n"), "%s", told.report);
    CHECK(says("rank 1 (pid 0) is alive; it has submitted nothing yet, and waits for no collective"), "%s",
          told.report);
    CHECK(told.culprit == 1 && strstr(told.end, "join was submitted by ranks 0, 2, missing on rank 1;"), "%s",
          told.end);
    waits(2, 7); /* before it joined: it is that for which others are late */
    make();
    CHECK(says("'w' (allreduce): submitted by rank 2, missing on rank 1\n") && !says("join:"), "%s", told.report);
    account[2].entries = 0;
    account[0].entry[0].set = account[0].circle[0].set = HVD_SET_MARK(1, 0);
    account[0].circle[0].members[0] = 7; /* joined elsewhere only, so it lacks this: */
    waits(1, 7);
    waits(2, 7);
    make();
    CHECK(says("'w' (allreduce): submitted by ranks 1, 2, missing on rank 0\n"), "%s", told.report);
    CHECK(says("it has submitted nothing yet, and has joined\n"), "%s", told.report);
}

static void waits_in_set(int rank, int first, uint64_t members)
{
    waits(rank, 7);
    account[rank].entry[0].set = account[rank].circle[0].set = HVD_SET_MARK(3, first);
    account[rank].circle[0].members[0] = members;
}

static void sets_of_one_number_are_told_apart_by_their_members(void)
{
    forget();
    waits_in_set(0, 0, 3);
    waits_in_set(2, 2, 4);
    account[2].entry[0].agreed = HVD_ENTRY_AGREED; /* of itself */
    hvd_finding_make(&(struct hvd_inquiry){.of = (const struct hvd_account *[]){account, account + 1, account + 2},
                                           .size = SIZE,
                                           .who = who},
                     &told);
    CHECK(says("'w' (allreduce) in process set 3: submitted by rank 0, missing on rank 1\n"), "%s", told.report);
    CHECK(told.culprit == 1 && told.finding.keys == 2 && told.finding.of[0].key != told.finding.of[1].key, "%s",
          told.report);
}

static void the_filter_forgets_nothing_and_makes_up_little(void)
{
    int wrong = 0;
    forget();
    for (uint64_t i = 0; i < MANY; i++)
        hvd_account_add(&account[0], i * 0x9e3779b97f4a7c15u, (int)(i % 3));
    for (uint64_t i = 0; i < MANY; i++)
        CHECK(hvd_account_may_have(&account[0], i * 0x9e3779b97f4a7c15u, (int)(i % 3)), "%d", (int)i);
    for (uint64_t i = MANY; i < MANY + 300000; i++)
        wrong += hvd_account_may_have(&account[0], i * 0x9e3779b97f4a7c15u, 0);
    CHECK(wrong < 100, "%d of 300000", wrong); /* 10 are to be expected */
}

int main(void)
{
    who_has_not_one_of_many_is_named();
    who_may_have_it_is_not();
    counts_are_exact_or_say_that_they_are_not();
    who_asks_is_answered();
    who_has_joined_waits_where_nobody_gets_on();
    sets_of_one_number_are_told_apart_by_their_members();
    the_filter_forgets_nothing_and_makes_up_little();
    return 0;
}
