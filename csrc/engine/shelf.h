/* shelf.h - sums and broadcasts of ranks that share a device, without a copy to the CPU: each reads the others' memory.
 *
 * Called by device.c, when ranks greet each other, and by stage.c, in the turn. hello, open and agree are the three
 * steps in which ranks find out whether it works here; what each returns in `mine` all others see before the next.
 */
#ifndef HVD_SHELF_H
#define HVD_SHELF_H

#include "../cuda/block.h"
#include "../cuda/pinned.h"
#include "../cuda/shelf.h"
#include "../plane/plane.h"

#define HVD_SHELF_WORD 8 /* bytes that a rank says when its tensors lie on its shelf */

struct hvd_stage;

struct hvd_shelf {
    bool usable;             /* agreed: whatever takes says yes to goes this way */
    bool abandoned;          /* others may read there, or a device write: it stays as it is */
    int rank, size;          /* in the set */
    int device;              /* counted from 1 */
    size_t bytes;            /* of each shelf */
    struct hvd_block *block; /* my own shelf; NULL: there is none */
    uintptr_t of[HVD_SHELF_RANKS];
    struct hvd_pinned trial;
    void *module, *kernel;
    struct hvd_work work; /* under way, as it was; its pieces are the caller's */
    struct hvd_piece words;
    uint64_t count_of[HVD_SHELF_RANKS];
    unsigned char said[HVD_SHELF_WORD], all[HVD_SHELF_RANKS * HVD_SHELF_WORD];
};

/* Might the ranks of a set of this size do so? Agreed, like its arguments. */
bool hvd_shelf_fits(bool one_host, int size);
/* First: a shelf with a pattern on it, and how others find it. allowed: by this rank's options. device: counted from 1,
 * 0 if this rank has no tensor there. Fills mine with HVD_HELLO_BYTES that say so, or why not. */
void hvd_shelf_hello(struct hvd_stage *stage, int rank, int size, int device, bool allowed, void *mine);
/* Second, if agree is content with what all have said: the others' shelves are opened and a small sum of each dtype is
 * done; mine tells whether it was right. Third: agree. */
void hvd_shelf_open(struct hvd_stage *stage, const void *all, void *mine);
/* HVD_OK on all ranks, or on all of them why not. */
int hvd_shelf_agree(const struct hvd_stage *stage, const void *all, struct hvd_error *error);

/* From agreed fields only. */
bool hvd_shelf_takes(const struct hvd_shelf *shelf, const struct hvd_work *work);
/* With the device current. What this rank gives goes to its shelf, on the stage's stream. */
int hvd_shelf_give(struct hvd_stage *stage, const struct hvd_work *work, struct hvd_error *error);
/* The exchange of words that says to all that this rank has got so far. */
void hvd_shelf_say(struct hvd_shelf *shelf, struct hvd_work *work);
/* All have given: the results go to the tensors, on the stage's stream. With the device current. */
int hvd_shelf_take(struct hvd_stage *stage, struct hvd_error *error);
/* Not agreed on: what another set may use is given back, the rest by close, since that waits for the device. */
void hvd_shelf_refused(struct hvd_shelf *shelf);
/* Nothing of ours lies on it, on any rank, unless it is abandoned: then all is left to the end of the process. */
void hvd_shelf_close(struct hvd_stage *stage, struct hvd_shelf *shelf);

#endif
