/* fuzz.h - targets for fuzzers: each plays one input, a short program in bytes, against something that reads what
 * others have sent. What is read is mostly true, and damaged where the input says so: raw bytes alone would end at the
 * first magic number.
 *
 * A target returns, whatever the input; it ends the process where something does not hold (check.h, the asserts of the
 * core, a sanitizer). It is a pure function of its input, so that a failure is replayed by it. test_fuzz.c plays the
 * inputs that tests/fuzz/ keeps, and mutations of them; `make -C tests fuzz` gives the targets to libFuzzer.
 */
#ifndef HVD_TESTS_FUZZ_H
#define HVD_TESTS_FUZZ_H

#include "hvdlite.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fuzz_input {
    const uint8_t *at;
    size_t left;
};

/* Beyond the end all is 0. below: 0 <= result < bound <= 65536. take: returns how many were left to be taken. */
uint32_t fuzz_byte(struct fuzz_input *input);
uint32_t fuzz_below(struct fuzz_input *input, uint32_t bound);
size_t fuzz_take(struct fuzz_input *input, void *bytes, size_t count);
/* Damage `bytes` as the input says: nothing, bits, extremes, steps by one, raw bytes, moved pieces. True if it did. */
bool fuzz_damage(struct fuzz_input *input, void *bytes, size_t count);

struct fuzz_target {
    const char *name;
    void (*play)(struct fuzz_input input);
};

/* NULL-terminated by name. */
extern const struct fuzz_target fuzz_targets[];
const struct fuzz_target *fuzz_target_named(const char *name);

void fuzz_check(struct fuzz_input input);  /* one vote: check and merge alone */
void fuzz_votes(struct fuzz_input input);  /* what boards hold: check, merge, decide */
void fuzz_tree(struct fuzz_input input);   /* what comes over an edge of the tree of hosts */
void fuzz_stall(struct fuzz_input input);  /* the same, of who asks who is missing */
void fuzz_heads(struct fuzz_input input);  /* what comes over a link of plane p2p */
void fuzz_report(struct fuzz_input input); /* what comes from the store while an engine runs */
void fuzz_tagged(struct fuzz_input input); /* the same where frames are signed */
void fuzz_signed(struct fuzz_input input); /* what comes over a signed stream */

#endif
