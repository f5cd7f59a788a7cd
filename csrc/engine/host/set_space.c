/* set_space.c - the set space: places for process sets, laid out once, filled when a set is opened.
 *
 * A place is a page with the words for rounds, two boards and HVD_PLANE_SHARE_MAX bytes for planes. 256 of them are
 * some hundreds of megabytes of addresses per rank and no memory at all, until a set is opened. Three sources:
 *
 *     memfd      sparse; what a closed set leaves is punched out of the file
 *     /dev/shm   sparse too, but a page that is touched when it is full kills the process: so memory is reserved,
 *                place by place, when a set is opened, and a lack of it is an error that can be told
 *     threads    (tests) private memory; dropped pages read as zero again
 *
 * The page of the round word is never given back: a rank that has not closed the set yet may look at it at any
 * time. What it finds there is dated by the set's life, so that no rank believes what an earlier set has left.
 */
#define _GNU_SOURCE
#include "set_space.h"

#include "../../plane/plane.h"
#include "host.h"

#include <stdio.h>
#include <unistd.h>

static char *place_at(const struct hvd_space *space, int rank, int number)
{
    return (char *)space->share->map[rank] + (size_t)number * space->place_bytes;
}

struct hvd_place hvd_space_place(const struct hvd_space *space, int rank, int number)
{
    char *at = place_at(space, rank, number);
    struct hvd_round_line *line = (struct hvd_round_line *)(void *)at;
    return (struct hvd_place){.line = line,
                              .posted = (_Atomic uint64_t *)(void *)(line + 2),
                              .boards = at + HVD_PAGE,
                              .share = at + HVD_PAGE + 2 * space->board_bytes};
}

int hvd_space_open(struct hvd_space *space, struct hvd_host *host, size_t board_bytes, struct hvd_error *error)
{
    space->board_bytes = board_bytes;
    space->place_bytes = HVD_PAGE + 2 * board_bytes + HVD_PLANE_SHARE_MAX;
    space->rank = host->rank;
    space->private = host->in_process;
    struct hvd_error mine = {0};
    space->share = hvd_host_share_sparse(host, space->place_bytes * HVD_SETS_MAX, &space->fd, &mine);
    if (!space->share)
        hvd_text_copy(space->why, sizeof space->why, mine.text);
    /* A peer that ended meanwhile is no lack of memory. */
    return mine.code == HVD_EPEER || mine.code == HVD_ETIMEOUT
               ? hvd_fail_rank(error, mine.code, mine.culprit, "%s", mine.text)
               : HVD_OK;
}

void hvd_space_close(struct hvd_space *space)
{
    if (space->fd >= 0)
        close(space->fd);
    space->fd = -1;
    if (space->share)
        hvd_share_drop(space->share);
    space->share = NULL;
}

static int reserve(struct hvd_space *space, int number, size_t from, size_t bytes, struct hvd_error *error)
{
    if (space->fd < 0)
        return HVD_OK;
    return hvd_memory_reserve(space->fd, (size_t)number * space->place_bytes + from, bytes, error);
}

int hvd_space_take(struct hvd_space *space, int number, struct hvd_error *error)
{
    if (!space->share)
        return hvd_fail(error, HVD_ENOMEM, HVD652 "there is no shared memory for process sets: %s", space->why);
    return reserve(space, number, 0, HVD_PAGE + 2 * space->board_bytes, error);
}

int hvd_space_take_share(struct hvd_space *space, int number, size_t share_bytes, struct hvd_error *error)
{
    HVD_ASSERT(share_bytes <= HVD_PLANE_SHARE_MAX);
    return reserve(space, number, HVD_PAGE + 2 * space->board_bytes, share_bytes, error);
}

void hvd_space_clear(struct hvd_space *space, int number)
{
    char *at = place_at(space, space->rank, number);
    hvd_memory_clear(at + HVD_PAGE, space->place_bytes - HVD_PAGE, !space->private);
}
