/* test_negotiation_parts.c - the pieces of negotiation/ alone: fuse, keys, map, sort, refused submissions, long texts.
 */
#include "check.h"
#include "negotiation/state.h"
#include "ranks.h"

static const uint8_t bytes_of[11] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2};

/* A plan of float32 allreduces with these counts. */
static void plan_of(struct hvd_plan *plan, struct hvd_plan_item *item, const uint64_t *count, uint32_t items)
{
    memset(plan, 0, sizeof *plan);
    plan->item = item;
    plan->items = plan->items_max = items;
    for (uint32_t i = 0; i < items; i++)
        item[i] = (struct hvd_plan_item){.signature = ranks_signature((int64_t)count[i]), .count = count[i]};
}

static void check_buckets(struct hvd_plan *plan, uint64_t bucket_bytes, const uint32_t *bucket, uint32_t buckets)
{
    hvd_plan_fuse(plan, bucket_bytes, bytes_of);
    CHECK(plan->buckets == buckets, "%u buckets", plan->buckets);
    for (uint32_t i = 0; i < plan->items; i++)
        CHECK(plan->item[i].bucket == bucket[i], "item %u is in bucket %u", i, plan->item[i].bucket);
}

static void buckets_fill_up_to_their_limit_in_order(void)
{
    struct hvd_plan plan;
    struct hvd_plan_item item[6];
    plan_of(&plan, item, (const uint64_t[]){10, 10, 5, 26, 1, 0}, 6);
    check_buckets(&plan, 100, (const uint32_t[]){0, 0, 0, 1, 2, 2}, 3); /* 100 bytes; 104 alone; the rest */
}

static void a_bucket_takes_later_items_past_other_classes(void)
{
    struct hvd_plan plan;
    struct hvd_plan_item item[7];
    plan_of(&plan, item, (const uint64_t[]){1, 1, 1, 1, 1, 1, 1}, 7);
    item[1].signature.dtype = 10;
    item[2].signature.kind = HVD_BROADCAST;
    item[3].flags = HVD_FRESH_IN_PLANE;
    item[4].signature.prescale = 0.5;
    item[5].signature.dtype = 10;
    check_buckets(&plan, 100, (const uint32_t[]){0, 1, 2, 3, 4, 1, 0}, 5);
    item[6].code = HVD_EINVAL;
    check_buckets(&plan, 100, (const uint32_t[]){0, 1, 2, 3, 4, 1, 5}, 6);
    check_buckets(&plan, 0, (const uint32_t[]){0, 1, 2, 3, 4, 5, 6}, 7);
}

static void more_classes_than_are_remembered_only_cut_smaller(void)
{
    struct hvd_plan plan;
    struct hvd_plan_item item[60];
    uint64_t count[60];
    for (int i = 0; i < 60; i++)
        count[i] = 1;
    plan_of(&plan, item, count, 60);
    for (int i = 0; i < 60; i++)
        item[i].signature.prescale = 1 + i % 30;
    hvd_plan_fuse(&plan, 100, bytes_of);
    for (uint32_t i = 0; i < 60; i++)
        for (uint32_t j = 0; j < i; j++)
            CHECK(item[i].bucket != item[j].bucket || i % 30 == j % 30, "%u and %u", i, j);
}

static void keys_differ_by_name_set_and_length(void)
{
    enum { KEYS = 4000 };
    static struct hvd_key key[KEYS];
    char name[300];
    for (int i = 0; i < KEYS; i++) {
        memset(name, 'a', sizeof name);
        if (i < 290)
            name[i] = 0; /* every length */
        else
            snprintf(name, sizeof name, "layer%d.%d.weight", i / 7, i % 7);
        key[i] = hvd_key_of(0, name);
        struct hvd_key other = hvd_key_of(1, name);
        CHECK(key[i].high != 0 && other.high != key[i].high && other.low != key[i].low, "%s", name);
    }
    for (int i = 0; i < KEYS; i++)
        for (int j = 0; j < i; j++)
            CHECK(key[i].high != key[j].high && key[i].low != key[j].low, "keys %d and %d", i, j);
}

static void the_map_finds_what_is_in_it_and_nothing_else(void)
{
    enum { ENTRIES = 24, CELLS = 32 }; /* fuller than in use, so that runs are long and wrap round */
    struct hvd_key entry[ENTRIES];
    uint32_t cell[CELLS] = {0};
    bool in[ENTRIES] = {false};
    struct hvd_map map = {(const char *)entry, sizeof entry[0], CELLS - 1, cell};
    uint64_t seed = 5;
    for (uint64_t i = 0; i < ENTRIES; i++)
        entry[i] = (struct hvd_key){i % 2, i / 2};
    for (int step = 0; step < 20000; step++) {
        uint32_t i = ranks_below(&seed, ENTRIES);
        if (in[i])
            hvd_map_drop(&map, i);
        else
            hvd_map_put(&map, i);
        in[i] = !in[i];
        for (uint32_t j = 0; j < ENTRIES; j++)
            CHECK(hvd_map_find(&map, entry[j]) == (in[j] ? j : HVD_NONE), "entry %u after step %d", j, step);
    }
}

static void the_heap_keeps_the_smallest_and_sorts_them(void)
{
    uint64_t seed = 6;
    for (uint32_t count = 0; count < 70; count++) {
        struct hvd_sortable all[70], kept[70];
        uint32_t max = 1 + ranks_below(&seed, 70), kept_count = 0;
        for (uint32_t i = 0; i < count; i++) {
            all[i] = (struct hvd_sortable){ranks_below(&seed, 4), ranks_below(&seed, 4), i, i, 0};
            hvd_sort_keep(kept, &kept_count, max, all[i]);
        }
        hvd_sort(all, count);
        hvd_sort(kept, kept_count);
        CHECK(kept_count == (count < max ? count : max), "%u kept", kept_count);
        for (uint32_t i = 0; i < kept_count; i++)
            CHECK(kept[i].id == all[i].id, "place %u of %u", i, count);
        for (uint32_t i = 1; i < count; i++)
            CHECK(all[i - 1].major < all[i].major ||
                      (all[i - 1].major == all[i].major &&
                       (all[i - 1].high < all[i].high ||
                        (all[i - 1].high == all[i].high && all[i - 1].low < all[i].low))),
                  "place %u", i);
    }
}

static void what_cannot_be_is_refused_at_submit(void)
{
    struct ranks ranks;
    ranks_open(&ranks, 1, 4, 4, 4, 1);
    struct hvd_signature bad[9];
    for (int i = 0; i < 9; i++)
        bad[i] = ranks_signature(4);
    bad[0].kind = 9;
    bad[1].kind = -1;
    bad[2].op = 2; /* a hole in the table */
    bad[3].dtype = ranks_names.dtypes;
    bad[4].ndim = 9;
    bad[5].ndim = -1;
    bad[6].dims[0] = -4;
    bad[7].ndim = 2;
    bad[7].dims[0] = bad[7].dims[1] = INT64_MAX / 2;
    bad[8].group = 1;
    bad[8].group_count = 5; /* the table has 4 slots */
    for (int i = 0; i < 9; i++)
        CHECK(hvd_coord_submit(ranks.coord[0], 0, "w", &bad[i], 0) == HVD_EINVAL, "signature %d", i);
    CHECK(!ranks_news(&ranks), "a refused request is no news");
    bad[7].dims[0] = 0;
    CHECK(hvd_coord_submit(ranks.coord[0], 0, "w", &bad[7], 0) == HVD_OK, "nothing times much is nothing");
    ranks_round(&ranks);
    CHECK(ranks.plan[0].items == 1 && ranks.plan[0].item[0].count == 0, "%u items", ranks.plan[0].items);
    ranks_close(&ranks);
}

static void a_ragged_dimension_is_not_counted(void)
{
    struct ranks ranks;
    ranks_open(&ranks, 2, 4, 4, 4, 1);
    for (int rank = 0; rank < 2; rank++) {
        struct hvd_signature signature = ranks_signature(0); /* it differs */
        signature.kind = HVD_ALLGATHER;
        signature.ndim = 3;
        signature.dims[1] = 5;
        signature.dims[2] = 2;
        CHECK(hvd_coord_submit(ranks.coord[rank], 0, "w", &signature, 0) == HVD_OK, "rank %d", rank);
        signature.dims[0] = 3; /* all give as many */
        CHECK(hvd_coord_submit(ranks.coord[rank], 1, "even", &signature, 0) == HVD_OK, "rank %d", rank);
    }
    ranks_round(&ranks);
    CHECK(ranks.plan[0].items == 2 && ranks.plan[0].item[0].count == 10 && ranks.plan[0].item[1].count == 10,
          "%u items", ranks.plan[0].items);
    ranks_close(&ranks);
}

/* The member that completes the group has a lower slot, in another word of the maps, than the one that was held:
 * the held one's bit is still 1 when the search comes to it, and it must not be planned again. */
static void a_released_member_is_planned_once(void)
{
    enum { TENSORS = 130 };
    struct ranks ranks;
    ranks_open(&ranks, 2, 200, 200, 200, 1);
    char name[TENSORS][8];
    struct hvd_signature plain = ranks_signature(4), member = plain;
    member.group = 9;
    member.group_count = 2;
    for (uint32_t i = 0; i < TENSORS; i++) {
        snprintf(name[i], sizeof name[i], "t%u", i);
        for (int rank = 0; rank < 2; rank++)
            CHECK(hvd_coord_submit(ranks.coord[rank], i, name[i], i == 3 || i == 120 ? &member : &plain, 0) == HVD_OK,
                  "%u", i);
    }
    ranks_round(&ranks);
    CHECK(ranks.plan[0].items == TENSORS, "%u items", ranks.plan[0].items);
    for (int rank = 0; rank < 2; rank++)
        hvd_coord_submit(ranks.coord[rank], 120, name[120], &member, 0);
    ranks_round(&ranks);
    CHECK(ranks.plan[0].items == 0, "%u items", ranks.plan[0].items);
    for (int rank = 0; rank < 2; rank++)
        hvd_coord_submit(ranks.coord[rank], 3, name[3], &member, 0);
    ranks_round(&ranks);
    CHECK(ranks.plan[0].items == 2, "%u items", ranks.plan[0].items);
    for (int rank = 0; rank < 2; rank++) /* nor may it count for the next time */
        hvd_coord_submit(ranks.coord[rank], 3, name[3], &member, 0);
    ranks_round(&ranks);
    CHECK(ranks.plan[0].items == 0, "%u items", ranks.plan[0].items);
    ranks_close(&ranks);
}

/* Every second of 500 ranks says something else, of a name that is too long to be shown and ends in the middle
 * of a two-byte character there. */
static void a_long_text_is_shortened_with_sense(void)
{
    struct ranks ranks;
    char name[600];
    memset(name, 'n', sizeof name);
    for (size_t i = 101; i + 1 < sizeof name; i += 2)
        memcpy(name + i, "\xc3\xa9", 2);
    name[5] = '\n';
    name[sizeof name - 1] = 0;
    ranks_open(&ranks, 500, 4, 4, 4, 1);
    for (int rank = 0; rank < 500; rank++) {
        struct hvd_signature signature = ranks_signature(3 + rank % 2);
        CHECK(hvd_coord_submit(ranks.coord[rank], 0, name, &signature, 0) == HVD_OK, "rank %d", rank);
    }
    ranks_round(&ranks);
    ranks_round(&ranks);
    const char *text = ranks.plan[499].text;
    CHECK(ranks.plan[499].failed_ticket == 0, "%u", ranks.plan[499].failed_ticket);
    CHECK(strlen(text) < 700 && strstr(text, "...': ranks disagree on the shape:\n  ranks 0, 2, 4, "), "%s", text);
    CHECK(strstr(text, ", ... (250 in all): [4]\nSubmit the same shape on all ranks."), "%s", text);
    CHECK(strstr(text, "tensor 'nnnnn\\nnnn") && strstr(text, "\xc3\xa9..."), "%s", text);
    ranks_close(&ranks);
}

int main(void)
{
    buckets_fill_up_to_their_limit_in_order();
    a_bucket_takes_later_items_past_other_classes();
    more_classes_than_are_remembered_only_cut_smaller();
    keys_differ_by_name_set_and_length();
    the_map_finds_what_is_in_it_and_nothing_else();
    the_heap_keeps_the_smallest_and_sorts_them();
    what_cannot_be_is_refused_at_submit();
    a_ragged_dimension_is_not_counted();
    a_released_member_is_planned_once();
    a_long_text_is_shortened_with_sense();
    return 0;
}
