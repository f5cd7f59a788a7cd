/* missing.c - the caller of a collective has reached its own time limit and asks which ranks are missing.
 *
 * The caller requests an inquiry at the desk of its host (stall_check.c describes an inquiry) and reads the finding
 * there. It does this without the turn, which another thread may hold for long. Only a finding that is newer than the
 * question counts. The job continues, and from then on its own limits ignore this request.
 */
#include "rank_status.h"
#include "../engine.h"
#include "missing_ranks.h"

#include <time.h>

#define SOON_NS 5000000u /* until the turn is free, an account is there */

/* The finding with this number, unless another one is written over it meanwhile. */
__attribute__((no_sanitize("thread"))) static bool copy_finding(struct hvd_inbox *desk, uint64_t found,
                                                                struct hvd_finding *finding)
{
    const volatile uint32_t *from = (const volatile uint32_t *)(const volatile void *)&desk->finding;
    for (size_t i = 0; i < sizeof *finding / sizeof *from; i++)
        ((uint32_t *)(void *)finding)[i] = from[i];
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load(&desk->found) == found && hvd_finding_sane(finding);
}

/* What the newest finding of this host says of a request. `found`: its number. */
static bool found_for(struct hvd_inbox *desk, const struct hvd_slot *slot, uint32_t word, uint64_t found, char *text,
                      size_t text_bytes)
{
    struct hvd_finding finding;
    if (!copy_finding(desk, found, &finding) || atomic_load(&slot->key_word) != word)
        return false;
    uint64_t key = atomic_load(&slot->key);
    for (uint32_t i = 0; i < finding.keys; i++)
        if (finding.of[i].key == key) {
            hvd_text_copy(text, text_bytes, finding.line[finding.of[i].line]);
            return true;
        }
    return false;
}

/* A finding without this request is not the last word: what asked may have overtaken it on some rank. */
int hvd_engine_missing(struct hvd_engine *engine, int64_t handle, int wait_ms, uint64_t *asked, char *text,
                       size_t text_bytes)
{
    struct hvd_slot *slot = hvd_handles_find(&engine->handles, handle);
    if (!slot)
        return HVD_EHANDLE;
    uint32_t word = atomic_load(&slot->word);
    atomic_store(&slot->excused, wait_ms < 0 ? 0 : word);
    if (wait_ms < 0)
        return HVD_OK;
    if (engine->alone || !engine->thread_runs || (word & 3) != HVD_SLOT_BUSY)
        return HVD_AGAIN;
    struct hvd_inbox *desk = hvd_inbox(engine);
    uint64_t before = *asked ? *asked - 1 : atomic_load(&desk->inquiry);
    uint64_t until_ns = hvd_now_ns() + (uint64_t)wait_ms * 1000000u;
    while (hvd_now_ns() < until_ns && !atomic_load(&engine->failed) && atomic_load(&slot->word) == word) {
        uint64_t found = atomic_load(&desk->found);
        if (found > before) {
            if (found_for(desk, slot, word, found, text, text_bytes))
                return HVD_OK;
            before = atomic_load(&desk->inquiry);
        }
        if (atomic_load(&desk->inquiry) <= before)
            hvd_inbox_want(engine, HVD_WANT_ANSWER);
        if (hvd_inbox_leads(engine))
            hvd_turn_call(engine);
        nanosleep(&(struct timespec){.tv_nsec = SOON_NS}, NULL);
    }
    *asked = before + 1;
    return HVD_AGAIN;
}
