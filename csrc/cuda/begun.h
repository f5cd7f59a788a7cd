/* begun.h - a mark behind all that a device has been given so far, by whomever in this process.
 *
 * For a framework that does not tell on which stream it works: what is reached after everything is reached after that
 * as well. And a copy that nobody's stream has to be lent for. Any thread, any time, also when no engine is open.
 */
#ifndef HVD_CUDA_BEGUN_H
#define HVD_CUDA_BEGUN_H

#include "block.h"

/* Can this machine's driver make such marks (CUDA 12.5)? Begins nothing, not even the driver. */
bool hvd_begun_can(void);
/* The ordinal of the device on which this address lies; negative: HVD_EINVAL, it lies on none. */
int hvd_begun_on(const void *memory, struct hvd_error *error);
/* Reached when all is done that the device has been given until now. NULL: error says why. */
struct hvd_mark *hvd_begun_mark(int ordinal, struct hvd_error *error);
/* Copies a block's result to where anything that the device has been given so far may still be at work, behind all of
 * that and `behind`. The mark of the end of the copy. Where that fails, error says why, and `to` must be left alone
 * until the mark is reached all the same; NULL: the driver makes none any more. */
struct hvd_mark *hvd_begun_fetch(struct hvd_block *block, const struct hvd_mark *behind, uintptr_t to, size_t bytes,
                                 struct hvd_error *error);
/* An engine ends: what nobody holds a mark of is given back. */
void hvd_begun_free(void);

#endif
