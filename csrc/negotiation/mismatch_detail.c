/* mismatch_detail.c - the part of a vote that says who said what.
 *
 * Only when a mismatch is certain does a round carry this section, for one slot: the name, up to
 * HVD_DETAIL_MAX different signatures in ascending order of their bytes, and for each a bitmap of ranks. It is
 * the one place where a vote's size depends on the number of ranks (a bit each), which is why it is not part
 * of every vote.
 *
 * Merging unites the signatures and ORs the bitmaps; of more than fit, the smallest are kept. As with fresh
 * keys, a signature that is kept at the end was kept by every merge on the way, so its bitmap is complete. The
 * name is the same wherever a rank has the request; a joined rank has none, and the longer one wins.
 */
#include "state.h"

struct section {
    uint64_t *name;
    struct hvd_signature *said;
    uint64_t *ranks; /* HVD_DETAIL_MAX bitmaps */
    uint32_t words;  /* of each */
};

/* Of a const vote too: whoever got it so does not write through this. */
static struct section section_of(const struct hvd_coord *coord, const struct hvd_vote *vote)
{
    uint64_t *at = (uint64_t *)(uintptr_t)(vote->body + hvd_vote_detail_at(vote->slots));
    return (struct section){
        .name = at,
        .said = (struct hvd_signature *)(at + HVD_DETAIL_NAME_WORDS),
        .ranks = at + HVD_DETAIL_NAME_WORDS + HVD_DETAIL_MAX * HVD_SIGNATURE_WORDS,
        .words = hvd_words((uint32_t)coord->limits.size),
    };
}

/* Copy a name, cut with "..." if it is too long and never inside a character of UTF-8; returns its bytes. */
static uint16_t copy_name(char *into, const char *name)
{
    static const char dots[] = "...";
    size_t bytes = strlen(name);
    if (bytes <= HVD_NAME_MAX) {
        memcpy(into, name, bytes);
        return (uint16_t)bytes;
    }
    bytes = HVD_NAME_MAX - (sizeof dots - 1);
    while (bytes > 0 && ((unsigned char)name[bytes] & 0xc0) == 0x80)
        bytes--;
    memcpy(into, name, bytes);
    memcpy(into + bytes, dots, sizeof dots - 1);
    return (uint32_t)(bytes + sizeof dots - 1);
}

void hvd_detail_write(const struct hvd_coord *coord, struct hvd_vote *vote)
{
    struct section section = section_of(coord, vote);
    memset(section.name, 0, 8 * hvd_detail_words(coord->limits.size));
    uint32_t ticket = coord->known[vote->detail_slot].ticket;
    if (ticket == HVD_TICKET_NONE)
        return;
    const struct hvd_mine *mine = &coord->mine[ticket];
    vote->detail = 1;
    section.said[0] = mine->signature;
    hvd_bit_set(section.ranks, (uint32_t)coord->limits.rank, true);
    if (mine->name)
        vote->name_bytes = copy_name((char *)section.name, mine->name);
}

static bool zero(const void *bytes, size_t count)
{
    const unsigned char *byte = bytes;
    for (size_t i = 0; i < count; i++)
        if (byte[i])
            return false;
    return true;
}

bool hvd_detail_check(const struct hvd_coord *coord, const struct hvd_vote *vote)
{
    if (vote->detail_slot == HVD_NONE)
        return vote->detail == 0 && vote->name_bytes == 0;
    if (vote->detail > HVD_DETAIL_MAX || vote->name_bytes > HVD_NAME_MAX)
        return false;
    struct section section = section_of(coord, vote);
    if (!zero((char *)section.name + vote->name_bytes, 8 * HVD_DETAIL_NAME_WORDS - vote->name_bytes))
        return false;
    uint32_t tail = (uint32_t)coord->limits.size % 64;
    for (uint32_t i = 0; i < vote->detail; i++) {
        if (!hvd_signature_sane(&coord->limits, &section.said[i]) ||
            (i > 0 && memcmp(&section.said[i - 1], &section.said[i], sizeof section.said[i]) >= 0))
            return false;
        if (tail && section.ranks[(i + 1) * section.words - 1] >> tail)
            return false;
    }
    size_t unused = HVD_DETAIL_MAX - vote->detail;
    return zero(section.said + vote->detail, unused * sizeof *section.said) &&
           zero(section.ranks + vote->detail * section.words, 8 * unused * section.words);
}

/* Unite one signature and its ranks with a section of `count`; returns the new count. */
static uint32_t join_saying(struct section *into, uint32_t count, const struct hvd_signature *said,
                            const uint64_t *ranks)
{
    uint32_t at = 0;
    int order = 1;
    while (at < count && (order = memcmp(said, &into->said[at], sizeof *said)) > 0)
        at++;
    size_t words = into->words;
    if (at < count && order == 0) {
        for (size_t i = 0; i < words; i++)
            into->ranks[at * words + i] |= ranks[i];
        return count;
    }
    if (at == HVD_DETAIL_MAX)
        return count;
    uint32_t kept = count < HVD_DETAIL_MAX ? count : HVD_DETAIL_MAX - 1;
    memmove(into->said + at + 1, into->said + at, sizeof *said * (kept - at));
    memmove(into->ranks + (at + 1) * words, into->ranks + at * words, 8 * words * (kept - at));
    into->said[at] = *said;
    memcpy(into->ranks + at * words, ranks, 8 * words);
    return kept + 1;
}

void hvd_detail_merge(const struct hvd_coord *coord, struct hvd_vote *into, const struct hvd_vote *from)
{
    struct section to = section_of(coord, into), other = section_of(coord, from);
    if (from->name_bytes > into->name_bytes ||
        (from->name_bytes == into->name_bytes && memcmp(other.name, to.name, from->name_bytes) > 0)) {
        memcpy(to.name, other.name, 8 * HVD_DETAIL_NAME_WORDS);
        into->name_bytes = from->name_bytes;
    }
    for (uint32_t i = 0; i < from->detail; i++)
        into->detail = join_saying(&to, into->detail, &other.said[i], other.ranks + i * other.words);
}
