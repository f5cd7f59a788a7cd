/* store_frames.h - the frames the core shares with the job's store: "this is why the job ends", "rank k is lost" and
 * "the script of this rank has ended".
 *
 * The store's client is Python and speaks during init; the socket is lent to the core for the rest of the
 * engine's life, for exactly these frames:
 *
 *     u32 length of type to tag | check | u8 type | i32 culprit | i32 code | text | tag
 *
 * all big-endian; type 5 is ABORT, to the store, 6 LOST, from it, and 14 LEAVING, to it. Check and tag are there if the
 * connection has keys: the first four bytes of the length's own tag, and the tag of the whole frame before it, both
 * with its number (base/blake2b.h). Frames are bounded; anything else on the socket is a protocol error, or not from
 * the store.
 */
#ifndef HVD_ENGINE_STATE_STORE_FRAMES_H
#define HVD_ENGINE_STATE_STORE_FRAMES_H

#include "../../base/base.h"
#include "../../base/blake2b.h"

#define HVD_REPORT_TEXT_MAX 1500

/* The connection; the caller sets all of it before the first call. One thread reads. */
struct hvd_report_line {
    int fd; /* -1: there is no store */
    bool is_signed;
    unsigned char keys[HVD_KEY_PAIR_BYTES];
    uint64_t *counters; /* signed frames so far: sent, received; Python's memory, and Python's before and after us */
};

/* Tell the store why the job ends. Does not block; one send. A store that is gone is no error. */
void hvd_report_abort(const struct hvd_report_line *store, int culprit, int code, const char *text);
/* Tell the store that this rank's script has ended: it may run exit handlers, and then leaves. As hvd_report_abort. */
void hvd_report_leaving(const struct hvd_report_line *store);
/* Something is readable on the store's socket: read one frame. HVD_AGAIN: nothing yet. Otherwise negative, with
 * culprit and text in `error`: a rank is lost (HVD_EPEER), or has ended the job by its time limit (HVD_ETIMEOUT), or
 * the store itself ended, or this is not what it has sent (HVD_EPEER, culprit -1). */
int hvd_report_read(const struct hvd_report_line *store, struct hvd_error *error);

#endif
