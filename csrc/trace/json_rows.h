/* json_rows.h - rows of a timeline, as text: objects of JSON, one on each line.
 *
 * A row is begun, told what it needs in the order in which these functions stand, and ended. Where there is no memory
 * for more, what does not fit is left out, and `failed` says so: then the text is good for nothing.
 */
#ifndef HVD_TRACE_JSON_ROWS_H
#define HVD_TRACE_JSON_ROWS_H

#include "../base/base.h"

struct hvd_rows {
    char *text; /* of `bytes` bytes, a comma, a new line and a row, again and again; no zero after it */
    size_t bytes, room;
    bool failed;
    bool inside; /* a row's arguments have begun */
};

/* A row of this phase: of what happens, or (without a time) of what a lane is. Then its members; then its end. */
void hvd_row_begin(struct hvd_rows *rows, char phase, int rank, int lane);
void hvd_row_time(struct hvd_rows *rows, int64_t ns); /* told in microseconds */
void hvd_row_name(struct hvd_rows *rows, const char *text);
void hvd_row_activity(struct hvd_rows *rows, const char *before, const char *kind); /* a name, both in capitals */
/* What is the program's own goes as it is, as names of arguments do; their text is anybody's. */
void hvd_row_literal(struct hvd_rows *rows, const char *members);
void hvd_row_argument(struct hvd_rows *rows, const char *name, int64_t number);
void hvd_row_argument_text(struct hvd_rows *rows, const char *name, const char *text);
void hvd_row_end(struct hvd_rows *rows);
/* All rows, and `ending` after them, which *bytes does not count; from now on there are none, but the text stays until
 * the next one begins. NULL: some have failed, and what there is may be cut. */
const char *hvd_rows_take(struct hvd_rows *rows, const char *ending, size_t *bytes);

#endif
