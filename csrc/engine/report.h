/* report.h - the two frames the core shares with the job's store: "this is why the job ends" and "rank k is lost".
 *
 * The store's client is Python and speaks during init; the socket is lent to the core for the rest of the
 * engine's life, for exactly these two frames:
 *
 *     u32 length of what follows | u8 type (5 ABORT to the store, 6 LOST from it) | i32 culprit | i32 code | text
 *
 * all big-endian. Frames are bounded; anything else on the socket is a protocol error.
 */
#ifndef HVD_REPORT_H
#define HVD_REPORT_H

#include "../ground/ground.h"

#define HVD_REPORT_TEXT_MAX 1500

/* Tell the store why the job ends. Does not block; one send. A store that is gone is no error. */
void hvd_report_abort(int store_fd, int culprit, int code, const char *text);
/* Something is readable on the store's socket: read one frame. HVD_AGAIN: nothing yet. Otherwise negative, with
 * culprit and text in `error`: a rank is lost (HVD_EPEER), or has ended the job by its time limit (HVD_ETIMEOUT), or
 * the store itself ended (HVD_EPEER, culprit -1). */
int hvd_report_read(int store_fd, struct hvd_error *error);

#endif
