/* ranks.c - see ranks.h. The comparisons here are the invariants that hold after every round, whatever the
 * test does: one plan, one agreed state, and the same bytes from every tree of merges. */
#include "ranks.h"

#include "check.h"
#include "negotiation/state.h"

static const char *const kind_name[] = {"allreduce", "allgather",     "broadcast", "barrier", "join",
                                        "alltoall",  "reducescatter", "reduce",    "send"};
static const char *const op_name[] = {"average", "sum", NULL, "min", "max", "product"};
enum { ON_DEVICE = 16 };
static const char *const dtype_name[] = {
    "uint8",   "int8",    "uint16", "int16",    "int32",         "int64",       "float16",
    "float32", "float64", "bool",   "bfloat16", "float8_e4m3fn", "float8_e5m2", [ON_DEVICE + 7] = "float32",
    "float64"};

const struct hvd_coord_names ranks_names = {
    kind_name, op_name, dtype_name, HVD_COUNT_OF(kind_name), HVD_COUNT_OF(op_name), HVD_COUNT_OF(dtype_name), ON_DEVICE,
};

uint64_t ranks_random(uint64_t *seed)
{
    uint64_t z = *seed += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint32_t ranks_below(uint64_t *seed, uint32_t bound)
{
    return (uint32_t)((ranks_random(seed) >> 32) * bound >> 32);
}

bool ranks_forgive;

static void *take(size_t bytes)
{
    void *memory = aligned_alloc(HVD_CACHE_LINE, HVD_ALIGN_UP(bytes ? bytes : 1, (size_t)HVD_CACHE_LINE));
    CHECK(memory, "%zu bytes", bytes);
    memset(memory, 0xa5, bytes); /* nobody may count on zeros */
    return memory;
}

void ranks_open(struct ranks *ranks, int size, uint32_t slots, uint32_t fresh, uint32_t tickets, uint64_t seed)
{
    memset(ranks, 0, sizeof *ranks);
    ranks->size = size;
    ranks->seed = seed;
    ranks->limits = (struct hvd_coord_limits){
        .size = size, .slots = slots, .tickets = tickets, .fresh = fresh, .set = 7, .names = &ranks_names};
    ranks->limits.forgives = ranks_forgive;
    ranks->vote_bytes = hvd_vote_bytes_max(&ranks->limits);
    ranks->coord = take(sizeof *ranks->coord * (size_t)size);
    ranks->vote = take(sizeof *ranks->vote * (size_t)size);
    ranks->plan = take(sizeof *ranks->plan * (size_t)size);
    ranks->voted = calloc((size_t)size, 1);
    ranks->decided = calloc((size_t)size, 1);
    ranks->agreed = take(ranks->vote_bytes);
    ranks->again = take(ranks->vote_bytes);
    for (int rank = 0; rank < size; rank++) {
        struct hvd_coord_limits limits = ranks->limits;
        limits.rank = rank;
        ranks->coord[rank] = hvd_coord_open(take(hvd_coord_bytes(&limits)), &limits);
        ranks->vote[rank] = take(ranks->vote_bytes);
        ranks->plan[rank].items_max = slots + fresh;
        ranks->plan[rank].item = take(sizeof(struct hvd_plan_item) * (slots + fresh));
    }
}

void ranks_close(struct ranks *ranks)
{
    for (int rank = 0; rank < ranks->size; rank++) {
        free(ranks->coord[rank]);
        free(ranks->vote[rank]);
        free(ranks->plan[rank].item);
    }
    free(ranks->coord);
    free(ranks->vote);
    free(ranks->plan);
    free(ranks->voted);
    free(ranks->decided);
    free(ranks->agreed);
    free(ranks->again);
}

void ranks_vote(struct ranks *ranks, int rank)
{
    size_t bytes = hvd_coord_vote(ranks->coord[rank], ranks->vote[rank], ranks->vote_bytes);
    CHECK(bytes == ranks->vote[rank]->bytes, "%zu", bytes);
    CHECK(hvd_vote_check(ranks->coord[rank], ranks->vote[rank], bytes) == HVD_OK, "rank %d refuses its own vote", rank);
    ranks->voters += !ranks->voted[rank];
    ranks->voted[rank] = true;
}

/* Merge all votes in one random tree into `into`; the votes themselves stay. */
static void merge_tree(struct ranks *ranks, struct hvd_vote *into)
{
    int alive = ranks->size;
    struct hvd_vote **part = malloc(sizeof *part * (size_t)alive);
    bool *copied = calloc((size_t)alive, 1);
    for (int i = 0; i < alive; i++)
        part[i] = ranks->vote[i];
    while (alive > 1) {
        uint32_t a = ranks_below(&ranks->seed, (uint32_t)alive), b = ranks_below(&ranks->seed, (uint32_t)alive - 1);
        b += b >= a;
        if (!copied[a]) {
            struct hvd_vote *copy = malloc(ranks->vote_bytes);
            memcpy(copy, part[a], part[a]->bytes);
            part[a] = copy;
            copied[a] = true;
        }
        hvd_vote_merge(ranks->coord[0], part[a], part[b]);
        CHECK(hvd_vote_check(ranks->coord[ranks->size - 1], part[a], ranks->vote_bytes) == HVD_OK,
              "a merge of %u is refused", part[a]->ranks);
        if (copied[b])
            free(part[b]);
        alive--;
        part[b] = part[alive];
        copied[b] = copied[alive];
    }
    memcpy(into, part[0], part[0]->bytes);
    if (copied[0])
        free(part[0]);
    free(part);
    free(copied);
}

void ranks_agree(struct ranks *ranks, int shapes)
{
    CHECK(ranks->voters == ranks->size, "only %d have voted", ranks->voters);
    merge_tree(ranks, ranks->agreed);
    for (int i = 1; i < shapes; i++) {
        merge_tree(ranks, ranks->again);
        CHECK(ranks->again->bytes == ranks->agreed->bytes &&
                  memcmp(ranks->again, ranks->agreed, ranks->agreed->bytes) == 0,
              "two trees of merges disagree in round %llu", (unsigned long long)ranks->agreed->round);
    }
}

static void compare_plans(const struct hvd_plan *a, const struct hvd_plan *b, int rank)
{
    CHECK(a->round == b->round && a->items == b->items && a->active == b->active && a->left == b->left &&
              a->leaving == b->leaving && a->joined == b->joined && a->tuned == b->tuned && a->learned == b->learned &&
              a->deviated == b->deviated && strcmp(a->text, b->text) == 0,
          "plans of ranks 0 and %d differ in round %llu", rank, (unsigned long long)a->round);
    for (uint32_t i = 0; i < a->items; i++) {
        const struct hvd_plan_item *x = &a->item[i], *y = &b->item[i];
        CHECK(hvd_signature_same(&x->signature, &y->signature) && memcmp(&x->key, &y->key, sizeof x->key) == 0 &&
                  x->order == y->order && x->count == y->count && x->slot == y->slot && x->flags == y->flags &&
                  x->code == y->code,
              "item %u of ranks 0 and %d differs in round %llu", i, rank, (unsigned long long)a->round);
    }
}

bool ranks_decide(struct ranks *ranks, int rank)
{
    CHECK(!ranks->decided[rank], "rank %d decides twice", rank);
    hvd_coord_decide(ranks->coord[rank], ranks->agreed, &ranks->plan[rank]);
    ranks->decided[rank] = true;
    if (++ranks->deciders < ranks->size)
        return false;
    uint64_t digest = ranks_digest(ranks->coord[0]);
    for (int other = 1; other < ranks->size; other++) {
        compare_plans(&ranks->plan[0], &ranks->plan[other], other);
        CHECK(ranks_digest(ranks->coord[other]) == digest, "agreed state of rank %d differs after round %llu", other,
              (unsigned long long)ranks->plan[0].round);
    }
    ranks->voters = ranks->deciders = 0;
    memset(ranks->voted, 0, (size_t)ranks->size);
    memset(ranks->decided, 0, (size_t)ranks->size);
    return true;
}

void ranks_round(struct ranks *ranks)
{
    for (int rank = 0; rank < ranks->size; rank++)
        ranks_vote(ranks, rank);
    ranks_agree(ranks, 3);
    for (int rank = 0; rank < ranks->size; rank++)
        ranks_decide(ranks, rank);
}

bool ranks_news(const struct ranks *ranks)
{
    for (int rank = 0; rank < ranks->size; rank++)
        if (hvd_coord_news(ranks->coord[rank]))
            return true;
    return false;
}

struct hvd_signature ranks_signature(int64_t elements)
{
    struct hvd_signature signature;
    memset(&signature, 0, sizeof signature);
    signature.kind = HVD_ALLREDUCE;
    signature.op = 1;
    signature.dtype = 7;
    signature.ndim = 1;
    signature.prescale = signature.postscale = 1.0;
    signature.dims[0] = elements;
    return signature;
}

static uint64_t stir(uint64_t digest, const void *bytes, size_t count)
{
    const char *byte = bytes;
    for (size_t i = 0; i + 4 <= count; i += 4) { /* all that is stirred is made of 4-byte words */
        uint32_t word;
        memcpy(&word, byte + i, sizeof word);
        digest = (digest ^ word) * 0x100000001b3u ^ digest >> 29;
    }
    return digest;
}
#define STIR(digest, object) stir(digest, &(object), sizeof(object))

uint64_t ranks_digest(const struct hvd_coord *coord)
{
    uint64_t digest = 14695981039346656037u;
    digest = STIR(digest, coord->round);
    digest = STIR(digest, coord->high);
    digest = STIR(digest, coord->unnamed_done);
    digest = STIR(digest, coord->left);
    digest = STIR(digest, coord->leaving);
    digest = digest * 2 + coord->ungrouped;
    digest = STIR(digest, coord->learn.count);
    digest = STIR(digest, coord->learn.patience);
    if (coord->learn.count)
        digest = STIR(digest, coord->learn.base);
    digest = stir(digest, coord->learn.list, coord->learn.count * sizeof *coord->learn.list);
    digest = stir(digest, coord->listen, 8 * (size_t)hvd_words(coord->high));
    for (uint32_t slot = coord->vacant; slot != HVD_NONE; slot = coord->known[slot].next)
        digest = STIR(digest, slot);
    const struct hvd_list *lists[2] = {&coord->used, &coord->details};
    for (int i = 0; i < 2; i++)
        for (uint32_t slot = lists[i]->head; slot != HVD_NONE; slot = coord->known[slot].next) {
            const struct hvd_known *known = &coord->known[slot];
            digest = STIR(digest, slot);
            digest = STIR(digest, known->key);
            digest = STIR(digest, known->order);
            digest = STIR(digest, known->used);
            digest = STIR(digest, known->born);
            digest = STIR(digest, known->place);
            digest = STIR(digest, known->flags);
            digest = STIR(digest, known->signature);
            uint32_t entry =
                known->signature.group ? hvd_map_find(&coord->group_of, hvd_group_key(&known->signature)) : HVD_NONE;
            if (entry != HVD_NONE)
                digest = STIR(digest, coord->group[entry]);
        }
    return digest;
}
