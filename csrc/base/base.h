/* base.h - limits, errors, time and assertions: what every floor may stand on.
 *
 * Nothing here knows about ranks meeting, votes or planes. The folder is the only place with a
 * platform #if. Allocation is the caller's business; no function here keeps a pointer it is given
 * unless its contract says so.
 */
#ifndef HVD_BASE_BASE_H
#define HVD_BASE_BASE_H

#include "../hvdlite.h"
#include "codes.h"

#include <stdarg.h>
#include <stdbool.h>

#define HVD_WIRE_VERSION 13    /* grows whenever bytes that ranks exchange change meaning */
#define HVD_LOCAL_MAX    64    /* ranks on one host, which shared memory serves */
#define HVD_RANKS_MAX    1024  /* ranks of a job */
#define HVD_CACHE_LINE   64    /* bytes; flags that different ranks write keep two lines apart */
#define HVD_HANDLES_MAX  65536 /* collectives in flight in one process */
#define HVD_PAGE         4096

#define HVD_ALIGN_UP(n, to) (((n) + (to) - 1) / (to) * (to))
#define HVD_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* Asserts are for our own mistakes and stay on in release builds: a wrong sum is worse than a stop. */
#define HVD_ASSERT(condition) ((condition) ? (void)0 : hvd_assert_failed(#condition, __FILE__, __LINE__))
_Noreturn void hvd_assert_failed(const char *condition, const char *file, int line);

/* One failure: its code, the rank at fault (-1: none in particular) and one sentence. */
struct hvd_error {
    int code;
    int culprit;
    char text[HVD_TEXT_MAX];
};

/* No error yet. On hot paths instead of {0}, which clears the kilobytes of the text, too. */
static inline void hvd_error_none(struct hvd_error *error)
{
    error->code = error->culprit = 0;
    error->text[0] = '\0';
}

/* Fill `error` and return `code`, so that a failing function ends in one line. The first failure wins:
 * an error that already holds a code is left as it is. `error` may be NULL. The format begins with a code of codes.h,
 * which goes to the end of the text unless that quotes one; without a code the text is passed on as it is. */
int hvd_fail(struct hvd_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The same, naming the rank at fault. */
int hvd_fail_rank(struct hvd_error *error, int code, int culprit, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* A text that is no hvd_error yet, in the same way. `text` may be among the arguments. */
void hvd_text_write(char *text, size_t text_bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Without its code, to be quoted as one of several reasons. */
void hvd_text_bare(char *text);
/* Copy the text out, cut to fit but for the code at its end, always terminated. */
void hvd_text_copy(char *text, size_t text_bytes, const char *from);
/* A name that somebody chose, as it may stand in a line of a text: control characters and what is no UTF-8 as "\n" or
 * "\x1b". Cut to the room, between characters; returns `into`. */
const char *hvd_text_shown(char *into, size_t into_bytes, const char *name);
#define HVD_SHOWN_BYTES 512
#define HVD_SHOWN(name) hvd_text_shown((char[HVD_SHOWN_BYTES]){0}, HVD_SHOWN_BYTES, name) /* until the block ends */

/* Monotonic time in ns. Never called by the pure floors. */
uint64_t hvd_now_ns(void);
/* Random bytes from the kernel; false if there are none (the caller says what that means). */
bool hvd_random(void *bytes, size_t count);
/* CPUs this process may use: affinity and cgroup quota, at least 1. */
int hvd_cpus_usable(void);
void hvd_move_to_cpu(int cpu); /* the calling thread runs there alone from now on, if it may */

#endif
