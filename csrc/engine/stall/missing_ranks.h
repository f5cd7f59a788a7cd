/* missing_ranks.h - which tensors wait for the same ranks, and become one line?
 *
 * Made by missing_ranks.c, which decides who is missing, and read by report_text.c, which finds the words. Ranks are
 * bits, so that lines are compared and united at once.
 */
#ifndef HVD_ENGINE_STALL_FINDING_H
#define HVD_ENGINE_STALL_FINDING_H

#include "rank_status.h"

#define HVD_RANK_WORDS    (HVD_RANKS_MAX / 64)
#define HVD_FINDING_SHOWN 3 /* names in a line */

struct hvd_seen {
    uint64_t key;
    int set, rank; /* set: its mark */
    const struct hvd_entry *entry;
    const char *name;
};

/* `more`: tensors that are on no list. at_least: there are some of which it is not known whether they belong here.
 * `perhaps`: ranks whose list was cut, and that may well have it: not missing. */
struct hvd_line {
    int set, tensors, shown;
    uint32_t waited_ms, more;
    const struct hvd_seen *first[HVD_FINDING_SHOWN];
    uint64_t have[HVD_RANK_WORDS], missing[HVD_RANK_WORDS], perhaps[HVD_RANK_WORDS];
    uint16_t agreed; /* as in its entries */
    bool at_least;
};

static inline bool hvd_rank_in(const uint64_t *bits, int rank)
{
    return bits[rank / 64] >> (rank % 64) & 1;
}

static inline bool hvd_rank_in_none(const uint64_t *bits)
{
    for (int i = 0; i < HVD_RANK_WORDS; i++)
        if (bits[i])
            return false;
    return true;
}

static inline enum hvd_rank_state hvd_rank_state_of(const struct hvd_account *account)
{
    return account ? account->state : HVD_RANK_UNHEARD;
}

/* report_text.c. Pure. The texts of a finding, its report and its end. */
void hvd_finding_tell(const struct hvd_inquiry *inquiry, const struct hvd_line *line, int lines, struct hvd_told *told);

#endif
