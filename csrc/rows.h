/* rows.h - the part of the C API that finds rows of hvd.ps tables. hvdlite.h includes it.
 *
 * The calls compute; they change no state and may run in any thread. hvdlite/ps/placement.py defines the result, and is
 * used for what they refuse. They exist for speed: NumPy takes 15 calls for each message. cffi reads what stands
 * between the marks, as in hvdlite.h. The code is in kernel/rows.c.
 */
#ifndef HVD_ROWS_H
#define HVD_ROWS_H

/* cffi: begin */

/* How the rows of a table are placed: an id is mixed if `is_mixed`; the upper bits of the result are the part, the
 * `low` lower ones the row within it. base: of each part, where it begins in `index`, -1: it is not here. index: slot +
 * 1 of each row, 0: the row is not made yet. owners: `replicas` servers of each part. `ids` are int64 at any alignment.
 * Both calls return 1, or 0 where an id is no row of the table, or the row has no slot here: what is written is then
 * not valid. */
struct hvd_row_places {
    uint64_t rows;
    int bits, low, is_mixed, replicas;
    const int64_t *base;
    const int32_t *index;
    const int16_t *owners;
};
int hvd_row_slots(const struct hvd_row_places *places, const void *ids, int64_t count, int64_t *slots);
int hvd_row_owners(const struct hvd_row_places *places, const void *ids, int64_t count, int16_t *owners);

/* cffi: end */

#endif
