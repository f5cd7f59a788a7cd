/* test_neighbor.c - what becomes of frames for a neighbour in the tree of hosts that reads nothing? And of what comes
 * from one on whose stream a stranger sits?
 *
 * A vote that was dropped in silence would be waited for, for ever: the neighbour is suspected instead, by name. Signs
 * of life are not worth their room, and the last words of a job are for whoever can hear them.
 */
#include "check.h"
#include "engine/engine.h"
#include "engine/host_votes/vote_tree.h"
#include "ranks.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { VOTE_BYTES = 4096 };

static size_t taken; /* bytes that the stream takes */

static int mute_send(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error)
{
    *moved = count < taken ? count : taken;
    taken -= *moved;
    return HVD_OK;
}

static const struct hvd_link_kind mute = {.send = mute_send};
static struct hvd_engine engine;
static struct hvd_neighbor near;

static void open_near(struct hvd_link *link, struct hvd_set *set)
{
    memset(&engine, 0, sizeof engine);
    engine.alone = true;
    engine.bell = engine.call = -1;
    near = (struct hvd_neighbor){.link = link, .rank = 0};
    *link = (struct hvd_link){.kind = &mute, .peer = 1, .fd = -1};
    strcpy(link->called, "rank 1 (host b)");
    set->member[0] = 1;
    CHECK(hvd_neighbor_room(&near, VOTE_BYTES), "no memory");
}

static void close_near(void)
{
    for (int i = 0; i < 2; i++)
        free(near.vote[i]);
    free(near.out);
    free(near.in);
}

static struct hvd_link signed_end(int fd, int peer)
{
    static const unsigned char keys[HVD_KEY_PAIR_BYTES]; /* the same both ways is enough here */
    struct hvd_link_signing signing = {keys, "votes"};
    struct hvd_link link = {.self = &signing};
    struct hvd_error error = {0};
    CHECK(hvd_link_signed.open(&link, fd, peer, &error) == HVD_OK, "%s", error.text);
    strcpy(link.called, "rank 1 (host b)");
    return link;
}

/* What was forged lies behind a sound frame, and all of it has been read from the socket with that: nothing would wake
 * whoever slept now. */
static void forged_behind_a_sound_one(void)
{
    int fd[2], member[2] = {0, 1};
    char junk[8] = "forged";
    struct ranks ranks;
    struct hvd_link link;
    struct hvd_set set = {.size = 2, .member = member, .life = 1};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0, "a pair");
    ranks_open(&ranks, 2, 8, 8, 8, 1);
    set.coord = ranks.coord[0];
    open_near(&link, &set);
    near.rank = 1;
    struct hvd_link far = signed_end(fd[0], 0);
    link = signed_end(fd[1], 1);
    near.link = &far;
    hvd_neighbor_say(&engine, &set, &near, HVD_FRAME_ALIVE, 0, NULL, 0, NULL);
    CHECK(write(fd[0], junk, sizeof junk) == sizeof junk, "a head");
    near.link = &link;
    CHECK(hvd_neighbor_read(&engine, &set, &near) && near.deaf, "it was told");
    CHECK(link.counts.messages_in == 1, "%d frames", (int)link.counts.messages_in);
    CHECK(engine.failure.code == HVD_EPEER && engine.failure.culprit == 1, "%d", engine.failure.culprit);
    CHECK(strstr(engine.failure.text, "the votes from rank 1 (host b) were changed in transit"), "%s",
          engine.failure.text);
    far.kind->close(&far);
    link.kind->close(&link);
    close_near();
    ranks_close(&ranks);
}

int main(void)
{
    static char body[VOTE_BYTES];
    int member[2] = {1, 1};
    struct hvd_link link;
    struct hvd_set set = {.size = 2, .member = member, .life = 1};
    open_near(&link, &set);

    hvd_neighbor_say(&engine, &set, &near, HVD_FRAME_ALIVE, 0, NULL, 0, NULL);
    size_t one = near.out_count;
    hvd_neighbor_say(&engine, &set, &near, HVD_FRAME_ALIVE, 0, NULL, 0, NULL);
    CHECK(one > 0 && near.out_count == one, "%zu and %zu bytes", one, near.out_count);

    for (int round = 1; round <= 2; round++) /* what may wait has room */
        hvd_neighbor_say(&engine, &set, &near, HVD_FRAME_VOTE, (uint64_t)round, body, sizeof body, NULL);
    CHECK(!engine.suspicion.since_ns && near.out_count > 2 * sizeof body, "%zu bytes", near.out_count);

    size_t before = 0;
    while (before != near.out_count) { /* the farewell of a job takes what room there is, and is no fault */
        before = near.out_count;
        hvd_neighbor_say(&engine, &set, &near, HVD_FRAME_ABORT, 0, body, 1000, NULL);
    }
    CHECK(!engine.suspicion.since_ns, "%s", engine.suspicion.text);

    hvd_neighbor_say(&engine, &set, &near, HVD_FRAME_VOTE, 3, body, sizeof body, NULL);
    CHECK(engine.suspicion.since_ns && engine.suspicion.culprit == 1, "rank %d", engine.suspicion.culprit);
    CHECK(strstr(engine.suspicion.text, "rank 1 (host b) is lost: it does not read"), "%s", engine.suspicion.text);
    CHECK(near.out_count == before, "nothing of it was written");

    taken = near.out_count;
    hvd_neighbor_flush(&engine, &set, &near);
    CHECK(near.out_count == 0, "%zu bytes", near.out_count);
    close_near();
    forged_behind_a_sound_one();
    return 0;
}
