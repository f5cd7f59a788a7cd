/* fuzz_report.c - what comes from the store while an engine runs: frames of a lost rank, halves of them, other things.
 *
 * The input is cut into pieces that arrive one after the other; each time the frame is read as an engine does it, until
 * there is no more or an error is told. What is told is one sentence, its code an error's, and nothing is read beyond
 * the frame: the socket is Python's again after a shutdown.
 */
#define _GNU_SOURCE
#include "check.h"
#include "engine/report.h"
#include "fuzz.h"

#include <string.h>
#include <sys/socket.h>

static int end[2];

static void drain(void)
{
    char bytes[4096];
    while (recv(end[1], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        ;
}

/* A true frame, or one nearly true. */
static size_t frame_of(struct fuzz_input *input, uint8_t *frame)
{
    uint32_t text = fuzz_below(input, 1700);
    size_t body = 9 + text;
    memset(frame, 'x', 4 + body);
    memcpy(frame, (uint8_t[]){(uint8_t)(body >> 24), (uint8_t)(body >> 16), (uint8_t)(body >> 8), (uint8_t)body, 6}, 5);
    memset(frame + 5, 0, 8);
    fuzz_take(input, frame + 5, 8);
    fuzz_damage(input, frame, 4 + body);
    return 4 + body;
}

void fuzz_report(struct fuzz_input input)
{
    static bool open;
    uint8_t bytes[2048];
    if (!open)
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, end) == 0, "a pair");
    open = true;
    while (input.left) {
        uint32_t how = fuzz_byte(&input);
        size_t count = how < 64 ? fuzz_take(&input, bytes, how) : frame_of(&input, bytes);
        size_t cut = how % 3 == 0 ? fuzz_below(&input, 65536) % (count + 1) : count;
        const size_t part[] = {cut, count - cut};
        for (int i = 0, from = 0; i < 2; from += (int)part[i++]) {
            if (part[i] == 0)
                continue;
            CHECK(send(end[0], bytes + from, part[i], MSG_DONTWAIT) == (ssize_t)part[i], "%zu bytes", part[i]);
            struct hvd_error error = {0};
            int code = hvd_report_read(end[1], &error);
            CHECK(code == HVD_AGAIN ||
                      (code == error.code && (code == HVD_EPEER || code == HVD_ETIMEOUT || code == HVD_EINTERNAL)),
                  "%d", code);
            CHECK(strlen(error.text) < sizeof error.text, "text");
            if (code == HVD_EINTERNAL) {
                drain();
                return;
            }
        }
        if (how % 7 == 0)
            drain();
    }
    drain();
}
