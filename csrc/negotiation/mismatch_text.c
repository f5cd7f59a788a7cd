/* mismatch_text.c - a mismatch in words: which tensor, what differs, who said what, what to do.
 *
 * Two sayings of few ranks are one sentence; more sayings, or rank lists that make the sentence long, become a
 * table with a row for each. Only what differs is shown, by name. When the kind of collective differs nothing
 * else is compared: the shape of an allreduce and the root of a broadcast do not argue with each other.
 *
 * The text is made from the agreed vote alone, so all ranks print the same one. It is cut to fit, never
 * overrun: rank lists are shortened first ("ranks 0, 2, 4, ... (512 in all)").
 */
#include "state.h"

#include <inttypes.h>
#include <stdio.h>

#define LIST_MAX 120 /* characters of a rank list */
#define SIDE_MAX 48  /* ... that still goes into a sentence */

enum { KIND, OP, PLACE, DTYPE, SHAPE, ROOT, PRESCALE, POSTSCALE, PRIORITY, GROUP, FIELDS };

static const char *const field_name[FIELDS] = {
    "collective", "reduce op",       "device",           "dtype",    "shape",
    "root rank",  "prescale factor", "postscale factor", "priority", "group",
};

struct text {
    char *at;
    size_t left;
};

static __attribute__((format(__printf__, 2, 3))) void add(struct text *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int wrote = vsnprintf(text->at, text->left, format, arguments);
    va_end(arguments);
    size_t bytes = wrote < 0 ? 0 : (size_t)wrote;
    bytes = bytes < text->left ? bytes : text->left - 1;
    text->at += bytes;
    text->left -= bytes;
}

static bool on_device(const struct hvd_coord_names *names, const struct hvd_signature *said)
{
    return names->on_device && said->dtype >= names->on_device;
}

static int plain_dtype(const struct hvd_coord_names *names, const struct hvd_signature *said)
{
    return said->dtype - (on_device(names, said) ? names->on_device : 0);
}

static bool differs(const struct hvd_coord_names *names, int field, const struct hvd_signature *a,
                    const struct hvd_signature *b)
{
    switch (field) {
    case KIND:
        return a->kind != b->kind;
    case OP:
        return a->op != b->op;
    case PLACE:
        return on_device(names, a) != on_device(names, b);
    case DTYPE:
        return plain_dtype(names, a) != plain_dtype(names, b);
    case SHAPE:
        return a->ndim != b->ndim || memcmp(a->dims, b->dims, sizeof a->dims) != 0;
    case ROOT:
        return a->root != b->root;
    case PRESCALE:
        return memcmp(&a->prescale, &b->prescale, sizeof a->prescale) != 0;
    case POSTSCALE:
        return memcmp(&a->postscale, &b->postscale, sizeof a->postscale) != 0;
    case PRIORITY:
        return a->priority != b->priority;
    default:
        return a->group != b->group || a->group_count != b->group_count;
    }
}

static void add_shape(struct text *text, const struct hvd_signature *said)
{
    add(text, "[");
    for (int i = 0; i < said->ndim; i++)
        if (i == 0 && hvd_kind_ragged(said->kind) && said->dims[0] == 0)
            add(text, "*");
        else
            add(text, "%s%" PRId64, i ? ", " : "", said->dims[i]);
    add(text, "]");
}

static void add_field(struct text *text, const struct hvd_coord_limits *limits, int field,
                      const struct hvd_signature *said)
{
    const struct hvd_coord_names *names = limits->names;
    switch (field) {
    case KIND:
        add(text, "%s", names->kind[said->kind]);
        break;
    case OP:
        add(text, "%s", names->op[said->op]);
        break;
    case PLACE:
        add(text, "%s", on_device(names, said) ? "a GPU" : "the CPU");
        break;
    case DTYPE:
        add(text, "%s", names->dtype[said->dtype]);
        break;
    case SHAPE:
        add_shape(text, said);
        break;
    case ROOT:
        add(text, "%d", limits->called ? limits->called[said->root] : said->root);
        break;
    case PRESCALE:
        add(text, "%.17g", said->prescale);
        break;
    case POSTSCALE:
        add(text, "%.17g", said->postscale);
        break;
    case PRIORITY:
        add(text, "%" PRId32, said->priority);
        break;
    default:
        if (said->group)
            add(text, "group %" PRIu64 " of %u", said->group, said->group_count);
        else
            add(text, "no group");
    }
}

static uint32_t count_bits(const uint64_t *bits, uint32_t words)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < words; i++)
        for (uint64_t left = bits[i]; left; left &= left - 1)
            count++;
    return count;
}

/* Ranks of a bitmap as "rank 3" or "ranks 0-3, 7". */
static void add_ranks(struct text *text, const uint64_t *bits, uint32_t size, const int *called)
{
    uint32_t total = count_bits(bits, hvd_words(size));
    size_t end = text->left > LIST_MAX ? text->left - LIST_MAX : 1;
    add(text, total == 1 ? "rank" : "ranks");
    for (uint32_t rank = 0, runs = 0; rank < size; rank++) {
        if (!hvd_bit(bits, rank))
            continue;
        uint32_t first = rank;
        while (rank + 1 < size && hvd_bit(bits, rank + 1) && (!called || called[rank + 1] == called[rank] + 1))
            rank++;
        if (text->left <= end) {
            add(text, ", ... (%u in all)", total);
            return;
        }
        add(text,
            first == rank       ? "%s %u"
            : rank == first + 1 ? "%s %u, %u"
                                : "%s %u-%u",
            runs++ ? "," : "", called ? (uint32_t)called[first] : first, called ? (uint32_t)called[rank] : rank);
    }
}

/* All fields that differ of one saying; alone, a value needs no name beside it. */
static void add_saying(struct text *text, const struct hvd_coord_limits *limits, uint32_t fields,
                       const struct hvd_signature *said)
{
    bool alone = (fields & (fields - 1)) == 0, first = true;
    for (int field = 0; field < FIELDS; field++)
        if (fields >> field & 1) {
            add(text, first ? "" : ", ");
            if (!alone && field != KIND && field != GROUP)
                add(text, "%s ", field_name[field]);
            add_field(text, limits, field, said);
            first = false;
        }
}

static void add_field_names(struct text *text, uint32_t fields, const char *article)
{
    for (int field = 0, first = 1; field < FIELDS; field++)
        if (fields >> field & 1) {
            bool last = fields >> field == 1;
            add(text, "%s%s%s", first ? "" : last ? " and " : ", ", article, field_name[field]);
            first = 0;
        }
}

static uint32_t fields_that_differ(const struct hvd_coord_names *names, const struct hvd_signature *said,
                                   uint32_t count)
{
    uint32_t fields = 0;
    for (uint32_t i = 1; i < count; i++)
        for (int field = 0; field < FIELDS; field++)
            fields |= (uint32_t)differs(names, field, &said[0], &said[i]) << field;
    return fields & 1u << KIND ? 1u << KIND : fields;
}

static void add_tensor(struct text *text, const struct hvd_coord *coord, const struct hvd_vote *vote,
                       struct hvd_key key, uint32_t fields, const struct hvd_signature *said)
{
    if (key.high == 0) {
        const char *kind =
            vote->detail && !(fields & 1u << KIND) ? coord->limits.names->kind[said->kind] : "collective";
        add(text, "%s #%" PRIu64 " (unnamed)", kind, key.low);
        return;
    }
    char name[HVD_NAME_MAX + 1];
    memcpy(name, vote->body + hvd_vote_detail_at(vote->slots), vote->name_bytes);
    name[vote->name_bytes] = 0;
    add(text, "tensor '%s'", HVD_SHOWN(name));
}

/* Sayings are told in the order of their first ranks. */
static void order_of_telling(const uint64_t *ranks, uint32_t count, uint32_t size, uint32_t *order)
{
    uint32_t first[HVD_DETAIL_MAX];
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t *bits = ranks + i * hvd_words(size);
        for (first[i] = 0; first[i] < size && !hvd_bit(bits, first[i]);)
            first[i]++;
        uint32_t at = i;
        for (; at > 0 && first[order[at - 1]] > first[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
}

bool hvd_detail_not_finite(const struct hvd_coord *coord, const struct hvd_vote *agreed)
{
    const struct hvd_signature *said = hvd_detail_signatures(agreed);
    bool any = false;
    for (uint32_t i = 0; i < agreed->detail; i++)
        any = any || said[i].not_finite;
    return any && fields_that_differ(coord->limits.names, said, agreed->detail) == 0;
}

static void add_count(struct text *text, uint32_t count, const char *one, const char *many)
{
    add(text, "%" PRIu32 "%s %s", count, count == UINT32_MAX ? " or more" : "", count == 1 ? one : many);
}

/* "3 NaN and 1 infinity". */
static void add_not_finite(struct text *text, uint64_t found)
{
    uint32_t nans = (uint32_t)(found >> 32), infinities = (uint32_t)found;
    if (nans)
        add_count(text, nans, "NaN", "NaN");
    if (nans && infinities)
        add(text, " and ");
    if (infinities)
        add_count(text, infinities, "infinity", "infinities");
}

/* Who had something, after the name of the tensor. */
static void tell_not_finite(struct text *text, const struct hvd_coord *coord, const struct hvd_vote *agreed,
                            const uint32_t *order)
{
    const struct hvd_signature *said = hvd_detail_signatures(agreed);
    const uint64_t *ranks = (const uint64_t *)(said + HVD_DETAIL_MAX);
    uint32_t size = (uint32_t)coord->limits.size, words = hvd_words(size), spoke = 0;
    bool clean = false, first = true;
    uint64_t elements = 1;
    for (int i = 0; i < said->ndim; i++)
        elements *= (uint64_t)said->dims[i];
    add(text, ", before its %s: ", coord->limits.names->kind[said->kind]);
    for (uint32_t i = 0; i < agreed->detail; i++) {
        spoke += count_bits(ranks + i * words, words);
        clean = clean || !said[i].not_finite;
        if (!said[order[i]].not_finite)
            continue;
        add(text, "%s", first ? "" : "; ");
        add_ranks(text, ranks + order[i] * words, size, coord->limits.called);
        add(text, " had ");
        add_not_finite(text, said[order[i]].not_finite);
        add(text, " in %" PRIu64 " element%s", elements, elements == 1 ? "" : "s");
        first = false;
    }
    uint32_t active = size > agreed->joined ? size - agreed->joined : 0;
    if (agreed->detail == HVD_DETAIL_MAX && spoke < active)
        add(text, "; %u more rank%s had some, too", active - spoke, active - spoke == 1 ? "" : "s");
    add(text,
        "%s. That is where to look: at the loss, the batch and the learning rate there. (With a loss scale, as of "
        "GradScaler or LossScaleOptimizer, overflow now and then is normal, and all ranks skip that step: "
        "HVDLITE_NAN_GUARD=warn tells and goes on, off says nothing.)",
        clean ? "; the other ranks had none" : "");
}

void hvd_detail_text(const struct hvd_coord *coord, const struct hvd_vote *agreed, struct hvd_key key, char *into,
                     size_t text_bytes)
{
    struct text text = {into, text_bytes};
    const struct hvd_signature *said = hvd_detail_signatures(agreed);
    const uint64_t *ranks = (const uint64_t *)(said + HVD_DETAIL_MAX);
    uint32_t size = (uint32_t)coord->limits.size, words = hvd_words(size), spoke = 0;
    uint32_t fields = fields_that_differ(coord->limits.names, said, agreed->detail);
    bool table = agreed->detail > 2;
    for (uint32_t i = 0; i < agreed->detail; i++) {
        char list[2 * LIST_MAX];
        struct text side = {list, sizeof list};
        add_ranks(&side, ranks + i * words, size, coord->limits.called);
        table = table || sizeof list - side.left > SIDE_MAX;
        spoke += count_bits(ranks + i * words, words);
    }
    add_tensor(&text, coord, agreed, key, fields, said);
    uint32_t order[HVD_DETAIL_MAX];
    order_of_telling(ranks, agreed->detail, size, order);
    if (hvd_detail_not_finite(coord, agreed)) {
        tell_not_finite(&text, coord, agreed, order);
        hvd_text_write(into, text_bytes, HVD320 "%s", into);
        return;
    }
    add(&text, ": ranks disagree on ");
    add_field_names(&text, fields, "the ");
    add(&text, ":");
    for (uint32_t i = 0; i < agreed->detail; i++) {
        add(&text, table ? "\n  " : i == 0 ? " " : fields & (fields - 1) ? "; " : ", ");
        add_ranks(&text, ranks + order[i] * words, size, coord->limits.called);
        add(&text, table ? ": " : " said ");
        add_saying(&text, &coord->limits, fields, &said[order[i]]);
    }
    uint32_t active = size > agreed->joined ? size - agreed->joined : 0;
    if (agreed->detail == HVD_DETAIL_MAX && spoke < active)
        add(&text, "\n  %u more rank%s: something else again", active - spoke, active - spoke == 1 ? "" : "s");
    add(&text, table ? "\n%s the same " : ". %s the same ", fields & 1u << KIND ? "Call" : "Submit");
    add_field_names(&text, fields, "");
    add(&text, " on all ranks%s.", fields & 1u << PLACE ? ": move the tensor with .cuda() or .cpu()" : "");
    hvd_text_write(into, text_bytes, HVD350 "%s", into);
}
