/* post.c - how bytes of any number become calls of an MPI whose counts are ints.
 *
 * Allreduce and broadcast go in parts, several non-blocking calls of the same kind one after the other: MPI keeps their
 * order. Allgather and alltoall have one count and one displacement for each rank, and displacements cannot be cut;
 * where the sum of all does not fit, each pair of ranks exchanges messages instead, in parts. MPI delivers messages
 * between two ranks in the order in which they were posted, so the parts need no numbers.
 *
 * A call that MPI refuses (errors are returned on our communicators) is told in its words, and the plane stops there.
 */
#include "post.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define TAG 1

int hvd_mpi_posts_open(struct hvd_mpi_posts *posts, uintptr_t comm, int rank, int size, struct hvd_error *error)
{
    *posts = (struct hvd_mpi_posts){.mpi = hvd_mpi_loaded(), .comm = comm, .rank = rank, .size = size, .most = INT_MAX};
    posts->gives = calloc(4 * (size_t)size, sizeof *posts->gives);
    if (!posts->gives)
        return hvd_fail_rank(error, HVD_ENOMEM, rank, HVD951 "rank %d: no memory for plane mpi", rank);
    posts->from = posts->gives + size;
    posts->gets = posts->from + size;
    posts->at = posts->gets + size;
    return HVD_OK;
}

void hvd_mpi_posts_close(struct hvd_mpi_posts *posts)
{
    free(posts->gives);
    free(posts->request);
}

/* A place for one more request; NULL and an error if there is no memory. */
static uintptr_t *next(struct hvd_mpi_posts *posts, struct hvd_error *error)
{
    if (posts->requests == posts->room) {
        int room = posts->room ? 2 * posts->room : 8;
        uintptr_t *more = realloc(posts->request, (size_t)room * sizeof *more);
        if (!more) {
            hvd_fail_rank(error, HVD_ENOMEM, posts->rank, HVD951 "rank %d: no memory for plane mpi", posts->rank);
            return NULL;
        }
        posts->request = more;
        posts->room = room;
    }
    return &posts->request[posts->requests];
}

/* What a call said: count its request, or put the failure into words. */
static int said(struct hvd_mpi_posts *posts, int code, const char *what, struct hvd_error *error)
{
    if (code == 0) {
        posts->requests++;
        return HVD_OK;
    }
    struct hvd_error why = {0};
    hvd_mpi_failed(code, what, &why);
    return hvd_fail_rank(error, HVD_EINTERNAL, posts->rank, HVD666 "rank %d: %s", posts->rank, why.text);
}

static uint64_t part_of(const struct hvd_mpi_posts *posts, uint64_t left)
{
    return left < posts->most ? left : posts->most;
}

int hvd_mpi_post_allreduce(struct hvd_mpi_posts *posts, const void *in, void *out, uint64_t count, size_t element_bytes,
                           uintptr_t type, uintptr_t op, struct hvd_error *error)
{
    const struct hvd_mpi *mpi = posts->mpi;
    int code = HVD_OK;
    for (uint64_t done = 0, part; code == HVD_OK && done < count; done += part) {
        part = part_of(posts, count - done);
        uintptr_t *request = next(posts, error);
        const char *source = (const char *)in + done * element_bytes;
        char *target = (char *)out + done * element_bytes;
        if (!request)
            return HVD_ENOMEM;
        code = said(posts,
                    mpi->call.Iallreduce(source == target ? mpi->in_place : source, target, (int)part, type, op,
                                         posts->comm, request),
                    "reduce", error);
    }
    return code;
}

int hvd_mpi_post_broadcast(struct hvd_mpi_posts *posts, void *values, uint64_t bytes, int root, struct hvd_error *error)
{
    int code = HVD_OK;
    for (uint64_t done = 0, part; code == HVD_OK && done < bytes; done += part) {
        part = part_of(posts, bytes - done);
        uintptr_t *request = next(posts, error);
        if (!request)
            return HVD_ENOMEM;
        code = said(
            posts,
            posts->mpi->call.Ibcast((char *)values + done, (int)part, posts->mpi->byte, root, posts->comm, request),
            "broadcast", error);
    }
    return code;
}

/* One direction between this rank and another: `bytes` from or into `values`, in parts. */
static int post_stream(struct hvd_mpi_posts *posts, void *values, uint64_t bytes, int peer, bool sends,
                       struct hvd_error *error)
{
    const struct hvd_mpi *mpi = posts->mpi;
    int code = HVD_OK;
    for (uint64_t done = 0, part; code == HVD_OK && done < bytes; done += part) {
        part = part_of(posts, bytes - done);
        uintptr_t *request = next(posts, error);
        char *at = (char *)values + done;
        if (!request)
            return HVD_ENOMEM;
        code = sends ? mpi->call.Isend(at, (int)part, mpi->byte, peer, TAG, posts->comm, request)
                     : mpi->call.Irecv(at, (int)part, mpi->byte, peer, TAG, posts->comm, request);
        code = said(posts, code, sends ? "send" : "receive", error);
    }
    return code;
}

int hvd_mpi_post_send(struct hvd_mpi_posts *posts, const void *values, uint64_t bytes, int peer,
                      struct hvd_error *error)
{
    return post_stream(posts, (void *)(uintptr_t)values, bytes, peer, true, error);
}

int hvd_mpi_post_receive(struct hvd_mpi_posts *posts, void *values, uint64_t bytes, int peer, struct hvd_error *error)
{
    return post_stream(posts, values, bytes, peer, false, error);
}

static int allgather_by_pairs(struct hvd_mpi_posts *posts, char *values, const uint64_t *bytes, struct hvd_error *error)
{
    uint64_t mine = 0, at = 0;
    int code = HVD_OK;
    for (int rank = 0; rank < posts->rank; rank++)
        mine += bytes[rank];
    for (int rank = 0; rank < posts->size && code == HVD_OK; at += bytes[rank++])
        if (rank != posts->rank)
            code = post_stream(posts, values + at, bytes[rank], rank, false, error);
    for (int rank = 0; rank < posts->size && code == HVD_OK; rank++)
        if (rank != posts->rank)
            code = post_stream(posts, values + mine, bytes[posts->rank], rank, true, error);
    return code;
}

int hvd_mpi_post_allgather(struct hvd_mpi_posts *posts, void *values, const uint64_t *bytes, struct hvd_error *error)
{
    const struct hvd_mpi *mpi = posts->mpi;
    uint64_t total = 0;
    for (int rank = 0; rank < posts->size; rank++)
        total += bytes[rank];
    if (total == 0)
        return HVD_OK;
    if (total > posts->most)
        return allgather_by_pairs(posts, values, bytes, error);
    for (int rank = 0, at = 0; rank < posts->size; rank++) {
        posts->at[rank] = at;
        posts->gets[rank] = (int)bytes[rank];
        at += posts->gets[rank];
    }
    uintptr_t *request = next(posts, error);
    if (!request)
        return HVD_ENOMEM;
    return said(posts,
                mpi->call.Iallgatherv(mpi->in_place, 0, mpi->byte, values, posts->gets, posts->at, mpi->byte,
                                      posts->comm, request),
                "gather", error);
}

static int alltoall_by_pairs(struct hvd_mpi_posts *posts, const char *in, const uint64_t *gives, char *out,
                             const uint64_t *gets, struct hvd_error *error)
{
    int code = HVD_OK;
    const char *own = in;
    for (int rank = 0; rank < posts->rank; rank++)
        own += gives[rank];
    for (int rank = 0; rank < posts->size && code == HVD_OK; out += gets[rank++])
        if (rank == posts->rank)
            memcpy(out, own, gets[rank]);
        else
            code = post_stream(posts, out, gets[rank], rank, false, error);
    for (int rank = 0; rank < posts->size && code == HVD_OK; in += gives[rank++])
        if (rank != posts->rank)
            code = post_stream(posts, (char *)(uintptr_t)in, gives[rank], rank, true, error);
    return code;
}

int hvd_mpi_post_alltoall(struct hvd_mpi_posts *posts, const void *in, const uint64_t *gives, void *out,
                          const uint64_t *gets, uint64_t longest, struct hvd_error *error)
{
    const struct hvd_mpi *mpi = posts->mpi;
    if (longest == 0)
        return HVD_OK;
    if (longest > posts->most)
        return alltoall_by_pairs(posts, in, gives, out, gets, error);
    for (int rank = 0, from = 0, at = 0; rank < posts->size; rank++) {
        posts->from[rank] = from;
        posts->at[rank] = at;
        from += posts->gives[rank] = (int)gives[rank];
        at += posts->gets[rank] = (int)gets[rank];
    }
    uintptr_t *request = next(posts, error);
    if (!request)
        return HVD_ENOMEM;
    if (in == out) /* nothing to give or to get; Open MPI would read it as IN_PLACE, and lose count of its calls */
        in = posts->gives;
    return said(posts,
                mpi->call.Ialltoallv(in, posts->gives, posts->from, mpi->byte, out, posts->gets, posts->at, mpi->byte,
                                     posts->comm, request),
                "exchange", error);
}

int hvd_mpi_settle(struct hvd_mpi_posts *posts, bool *progress, struct hvd_error *error)
{
    while (posts->requests) {
        int last = posts->requests - 1, done = 0;
        int code = posts->mpi->call.Test(&posts->request[last], &done, posts->mpi->status_ignore);
        if (code)
            return said(posts, code, "go on", error);
        if (!done)
            return HVD_AGAIN;
        posts->requests = last;
        *progress = true;
    }
    return HVD_OK;
}
