/* fuzz_signed.c - a stranger on a signed stream: what one end sends lies in his hands, and he gives the other what he
 * likes, in whatever pieces: true bytes, damaged ones, none, some twice, and his own.
 *
 * As long as what he gave is how the stream began, all records that are whole come out, and nothing else; from the
 * first byte on that is another, nothing does, and when an end is told it is for that.
 */
#define _GNU_SOURCE
#include "check.h"
#include "fuzz.h"
#include "link/link.h"
#include "ranks.h"

#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SAID_MAX = 1 << 18, WIRE_MAX = 2 * SAID_MAX, RECORD = 64 << 10, MORE = 24, RECORDS_MAX = 1024 };

static unsigned char said[SAID_MAX], wire[WIRE_MAX], gave[WIRE_MAX], heard[SAID_MAX];

static struct scene {
    struct hvd_link link[2];
    int stranger[2];    /* his ends, of the sender's socket and of the reader's */
    size_t out, in;     /* bytes said and heard */
    size_t sent, given; /* what lies in `wire` and `gave` */
    size_t next;        /* of `wire`, to be given */
    size_t same;        /* `gave` begins as `wire` does, as far as is known */
    size_t room;        /* of each call that reads */
    int records;
    struct {
        size_t wire, said; /* where it ends */
    } ends[RECORDS_MAX];
} scene;

static struct hvd_link open_end(int which, int *stranger)
{
    static const unsigned char keys[HVD_KEY_PAIR_BYTES + HVD_KEY_PAIR_BYTES / 2] = {1, [32] = 2, [64] = 1};
    struct hvd_link_signing signing = {keys + which * HVD_KEY_PAIR_BYTES / 2, "votes"};
    struct hvd_link link = {.self = &signing};
    struct hvd_error error = {0};
    int fd[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0, "a pair");
    CHECK(hvd_link_signed.open(&link, fd[0], 1 - which, &error) == HVD_OK, "%s", error.text);
    *stranger = fd[1];
    return link;
}

static void say(size_t count)
{
    struct hvd_error error = {0};
    size_t moved;
    if (scene.out + count > SAID_MAX || scene.records + 2 > RECORDS_MAX)
        return;
    CHECK(scene.link[0].kind->send(&scene.link[0], said + scene.out, count, &moved, &error) == HVD_OK, "%s",
          error.text);
    CHECK(moved == count, "%zu of %zu bytes, with room", moved, count);
    for (size_t part; count; count -= part) {
        part = count < RECORD ? count : RECORD;
        scene.out += part;
        size_t end = scene.sent + part + MORE;
        while (scene.sent < end)
            scene.sent += (size_t)read(scene.stranger[0], wire + scene.sent, end - scene.sent);
        scene.ends[scene.records].wire = scene.sent;
        scene.ends[scene.records++].said = scene.out;
    }
}

/* What is in the records that have been given whole, and as they were. */
static size_t due(void)
{
    size_t bytes = 0;
    while (scene.same < scene.given && scene.same < scene.sent && gave[scene.same] == wire[scene.same])
        scene.same++;
    for (int i = 0; i < scene.records && scene.ends[i].wire <= scene.same; i++)
        bytes = scene.ends[i].said;
    return bytes;
}

/* Sleeps as an engine does: on the descriptor alone. */
static void hear(void)
{
    struct hvd_link *link = &scene.link[1];
    struct pollfd news = {.fd = link->fd, .events = POLLIN};
    struct hvd_error error = {0};
    int code = HVD_OK;
    size_t want = due(), moved = 0;
    while (code == HVD_OK && (moved || link->forged || poll(&news, 1, 0) > 0)) {
        size_t room = scene.room < SAID_MAX - scene.in ? scene.room : SAID_MAX - scene.in;
        code = link->kind->recv(link, heard + scene.in, room ? room : 1, &moved, &error);
        scene.in += moved;
    }
    CHECK(scene.in == want && memcmp(heard, said, want) == 0, "%zu bytes came, not %zu", scene.in, want);
    CHECK(code == HVD_OK || (code == HVD_EPEER && strstr(error.text, "[HVD458]")), "%s", error.text);
    CHECK(code == HVD_OK || scene.same < scene.given, "what is true was not believed: %s", error.text);
}

static void give(const unsigned char *bytes, size_t count)
{
    if (count == 0 || scene.given + count > WIRE_MAX || scene.link[1].forged)
        return;
    memcpy(gave + scene.given, bytes, count);
    scene.given += count;
    CHECK(send(scene.stranger[1], bytes, count, MSG_DONTWAIT) == (ssize_t)count, "%zu bytes", count);
    hear();
}

static void act(struct fuzz_input *input)
{
    unsigned char own[2048];
    size_t left = scene.sent - scene.next, count;
    switch (fuzz_byte(input) % 8) {
    case 0:
        say(1 + fuzz_below(input, 300));
        break;
    case 1:
        say(1 + fuzz_below(input, 65536) + fuzz_below(input, 256));
        break;
    case 2:
        count = fuzz_below(input, 65536) % (left + 1);
        give(wire + scene.next, count);
        scene.next += count;
        break;
    case 3:
        count = left < sizeof own ? left : sizeof own;
        memcpy(own, wire + scene.next, count);
        fuzz_damage(input, own, count);
        give(own, count);
        scene.next += count;
        break;
    case 4:
        scene.next += fuzz_below(input, 256) % (left + 1);
        break;
    case 5:
        scene.next -= fuzz_below(input, 256) % (scene.next + 1);
        break;
    case 6:
        give(own, fuzz_take(input, own, fuzz_below(input, 40)));
        break;
    case 7:
        scene.room = 1 + fuzz_below(input, 65536);
        break;
    }
}

void fuzz_signed(struct fuzz_input input)
{
    static bool known;
    uint64_t seed = 5;
    for (size_t i = 0; !known && i < SAID_MAX; i++)
        said[i] = (unsigned char)ranks_random(&seed);
    known = true;
    memset(&scene, 0, offsetof(struct scene, ends));
    scene.room = 1000;
    for (int i = 0; i < 2; i++)
        scene.link[i] = open_end(i, &scene.stranger[i]);
    while (input.left)
        act(&input);
    if (scene.same == scene.given && scene.next == scene.given) { /* he has been true so far: be it to the end */
        for (size_t part; scene.next < scene.sent; scene.next += part) {
            part = scene.sent - scene.next < RECORD ? scene.sent - scene.next : RECORD;
            give(wire + scene.next, part);
        }
        CHECK(scene.in == scene.out, "%zu of %zu bytes", scene.in, scene.out);
    }
    for (int i = 0; i < 2; i++) {
        scene.link[i].kind->close(&scene.link[i]);
        close(scene.stranger[i]);
    }
}
