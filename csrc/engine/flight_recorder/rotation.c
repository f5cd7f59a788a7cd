/* rotation.c - what happens to a file of records that lies where a new one shall go?
 *
 * One rule for flight records, steps and timelines. What this life of this job has written itself is replaced. What
 * another life has written, of a job that was started again or of a process that was a rank before, becomes NAME.1;
 * what was NAME.1 becomes NAME.2, and so on up to NAME.5. Then the oldest goes; of flight records the oldest that tells
 * of no failure, if there is one: so a failure never makes room for what went well. The newest has the plain name.
 *
 * Whose a file is stands in its beginning, in all three formats in the same words: "job":"...","epoch":N. A file
 * without them is none of ours, and is left to whoever writes.
 */
#define _GNU_SOURCE
#include "../engine.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KEPT       5
#define HEAD_BYTES 4096
#define PATH_BYTES 4096

/* The beginning of a plain file, as a text; false: there is none. */
static bool read_head(int in, const char *name, char head[HEAD_BYTES])
{
    struct stat found;
    int fd = openat(in, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    ssize_t got = -1;
    if (fd >= 0 && fstat(fd, &found) == 0 && S_ISREG(found.st_mode))
        got = pread(fd, head, HEAD_BYTES - 1, 0);
    if (fd >= 0)
        close(fd);
    head[got > 0 ? got : 0] = '\0';
    return got >= 0;
}

/* A flight record of a rank that failed, or saw the job fail? */
static bool tells_of_failure(const char *head)
{
    return strstr(head, "\"hvdlite-flight-1\"") &&
           (!strstr(head, "\"failure\":null") || strstr(head, "\"why\":\"error\"") ||
            strstr(head, "\"why\":\"abort\""));
}

/* The number whose file makes room: the first that is free, else the oldest that may go. */
static int place_of(int in, const char *name, char older[PATH_BYTES])
{
    char head[HEAD_BYTES];
    int place = 0;
    for (int i = 1; i <= KEPT; i++) {
        snprintf(older, PATH_BYTES, "%s.%d", name, i);
        if (!read_head(in, older, head) && faccessat(in, older, F_OK, AT_SYMLINK_NOFOLLOW))
            return i;
        if (!tells_of_failure(head))
            place = i;
    }
    return place ? place : KEPT;
}

void hvd_rotate_in(int in, const char *name, uint64_t job, uint64_t epoch)
{
    char head[HEAD_BYTES], from[PATH_BYTES], to[PATH_BYTES], mine[80];
    if (strlen(name) + 4 > PATH_BYTES || !read_head(in, name, head))
        return;
    snprintf(mine, sizeof mine, "\"job\":\"%016" PRIx64 "\",\"epoch\":%" PRIu64 ",", job, epoch);
    const char *whose = strstr(head, "\"job\":\"");
    if (!whose || !strstr(whose, "\",\"epoch\":") || strncmp(whose, mine, strlen(mine)) == 0)
        return;
    for (int i = place_of(in, name, to); i > 0; i--) {
        snprintf(to, sizeof to, "%s.%d", name, i);
        snprintf(from, sizeof from, i > 1 ? "%s.%d" : "%s", name, i - 1);
        renameat(in, from, in, to); /* if it fails, the writer hears of it */
    }
}

int hvd_engine_keep(struct hvd_engine *engine, const char *path, uint64_t *job, uint64_t *epoch)
{
    *job = engine->options.job;
    *epoch = engine->options.epoch;
    hvd_rotate_in(AT_FDCWD, path, *job, *epoch);
    return HVD_OK;
}
