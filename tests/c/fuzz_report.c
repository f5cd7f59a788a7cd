/* fuzz_report.c - what comes from the store while an engine runs: frames of a lost rank, halves of them, other things;
 * and the same where frames are signed.
 *
 * The input is cut into pieces that arrive one after the other; each time the frame is read as an engine does it, until
 * there is no more or an error is told. What is told is one sentence, its code an error's, and nothing is read beyond
 * the frame: the socket is Python's again after a shutdown. Of what carries no true tag nothing is read at all.
 */
#define _GNU_SOURCE
#include "check.h"
#include "engine/state/store_frames.h"
#include "fuzz.h"

#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

enum { SIGNED_AS_NEXT = 200 }; /* of 256; else as the one after */
enum { HEAD = 4 + 4 };         /* of a signed frame */

static int end[2];
static uint64_t counters[2];
static struct hvd_report_line store = {.keys = {[32] = 1}, .counters = counters};

static void drain(void)
{
    char bytes[4096];
    while (recv(end[1], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        ;
}

/* A true frame, or one nearly true; with its tag, which is true or not. */
static size_t frame_of(struct fuzz_input *input, uint8_t *frame)
{
    uint32_t text = fuzz_below(input, 1700);
    size_t tagged = store.is_signed ? HVD_TAG_BYTES : 0, body = 9 + text + tagged, bytes = 4 + body;
    memset(frame, 'x', bytes);
    memcpy(frame, (uint8_t[]){(uint8_t)(body >> 24), (uint8_t)(body >> 16), (uint8_t)(body >> 8), (uint8_t)body, 6}, 5);
    memset(frame + 5, 0, 8);
    fuzz_take(input, frame + 5, 8);
    fuzz_damage(input, frame, bytes - tagged);
    if (tagged) {
        const unsigned char *key = store.keys + HVD_KEY_BYTES;
        uint64_t number = counters[1] + (fuzz_byte(input) >= SIGNED_AS_NEXT);
        uint8_t tag[HVD_TAG_BYTES];
        memmove(frame + HEAD, frame + 4, body);
        bytes += HEAD - 4;
        hvd_mac_tag(key, number, frame, 4, tag);
        memcpy(frame + 4, tag, HEAD - 4);
        hvd_mac_tag(key, number, frame, bytes - tagged, frame + bytes - tagged);
        fuzz_damage(input, frame, bytes);
    }
    return bytes;
}

/* What lies in the socket, and how much. */
static size_t waits(uint8_t *bytes, size_t room)
{
    int all = 0;
    CHECK(ioctl(end[1], FIONREAD, &all) == 0, "FIONREAD");
    ssize_t got = recv(end[1], bytes, room, MSG_PEEK | MSG_DONTWAIT);
    (void)got;
    return (size_t)all;
}

/* False: nothing more can be read here. */
static bool read_one(void)
{
    uint8_t front[4096], tag[HVD_TAG_BYTES];
    struct hvd_error error = {0};
    uint64_t number = counters[1];
    size_t before = waits(front, sizeof front), after;
    int code = hvd_report_read(&store, &error);
    CHECK(code == HVD_AGAIN ||
              (code == error.code && (code == HVD_EPEER || code == HVD_ETIMEOUT || code == HVD_EINTERNAL)),
          "%d", code);
    CHECK(strlen(error.text) < sizeof error.text, "text");
    if (!store.is_signed)
        return code != HVD_EINTERNAL;
    after = waits(front + sizeof front - 1, 1);
    if (before >= HEAD && code == HVD_AGAIN) { /* a length that is waited for is the store's */
        hvd_mac_tag(store.keys + HVD_KEY_BYTES, number, front, 4, tag);
        CHECK(memcmp(tag, front + 4, HEAD - 4) == 0, "a length that nobody has sent is waited for");
    }
    if (counters[1] == number) {
        CHECK(after == before, "of %zu bytes %zu are left, and no frame was taken", before, after);
        return code == HVD_AGAIN;
    }
    size_t length = HEAD + ((size_t)front[2] << 8 | front[3]);
    hvd_mac_tag(store.keys + HVD_KEY_BYTES, number, front, length - HVD_TAG_BYTES, tag);
    CHECK(counters[1] == number + 1 && before == after + length, "a frame of %zu bytes", length);
    CHECK(memcmp(tag, front + length - HVD_TAG_BYTES, HVD_TAG_BYTES) == 0, "a frame without its tag was taken");
    return true;
}

static void play(struct fuzz_input input, bool is_signed)
{
    uint8_t bytes[2048];
    if (end[0] == end[1])
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, end) == 0, "a pair");
    counters[1] = 0;
    store.fd = end[1];
    store.is_signed = is_signed;
    while (input.left) {
        uint32_t how = fuzz_byte(&input);
        size_t count = how < 64 ? fuzz_take(&input, bytes, how) : frame_of(&input, bytes);
        size_t cut = how % 3 == 0 ? fuzz_below(&input, 65536) % (count + 1) : count;
        const size_t part[] = {cut, count - cut};
        for (int i = 0, from = 0; i < 2; from += (int)part[i++]) {
            if (part[i] == 0)
                continue;
            CHECK(send(end[0], bytes + from, part[i], MSG_DONTWAIT) == (ssize_t)part[i], "%zu bytes", part[i]);
            if (!read_one()) {
                drain();
                return;
            }
        }
        if (how % 7 == 0)
            drain();
    }
    drain();
}

void fuzz_report(struct fuzz_input input)
{
    play(input, false);
}

void fuzz_tagged(struct fuzz_input input)
{
    play(input, true);
}
