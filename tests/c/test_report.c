/* test_report.c - frames between engine and store: whole, in pieces, hostile; and signed, with a stranger in between.
 */
#include "crew.h"

#include "engine/state/store_frames.h"
#include "streams.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

enum { HEAD = 4 + 4, BODY = 9, LOST = 6 }; /* HEAD: of a signed frame */

static int ends[2]; /* ours, the store's */
static uint8_t bytes[4096];

static size_t frame(uint8_t *at, uint32_t length, uint8_t type, int culprit, int code, const char *text)
{
    uint32_t words[2] = {htonl((uint32_t)culprit), htonl((uint32_t)code)}, head = htonl(length);
    memcpy(at, &head, 4);
    at[4] = type;
    memcpy(at + 5, words, 8);
    memcpy(at + 13, text, strlen(text));
    return 13 + strlen(text);
}

/* Byte by byte: nothing until the last one, and the next frame is left alone. */
static void lost_ranks_are_told(const struct hvd_report_line *store)
{
    struct hvd_error error = {0};
    CHECK(hvd_report_read(store, &error) == HVD_AGAIN);
    size_t length = frame(bytes, 9 + 4, LOST, 3, -5, "gone");
    for (size_t i = 0; i < length; i++) {
        CHECK(hvd_report_read(store, &error) == HVD_AGAIN);
        CHECK(write(ends[1], bytes + i, 1) == 1);
    }
    CHECK(write(ends[1], bytes, 3) == 3);
    CHECK(hvd_report_read(store, &error) == HVD_EPEER && error.culprit == 3 && !strcmp(error.text, "gone"));
    memset(&error, 0, sizeof error);
    CHECK(hvd_report_read(store, &error) == HVD_AGAIN);
    CHECK(read(ends[0], bytes, 3) == 3);
    static const int told[][2] = {
        {-7, HVD_ETIMEOUT}, {-3, HVD_EPEER}, {1, HVD_EPEER}, {0, HVD_EPEER}, {-99, HVD_EPEER}};
    for (size_t i = 0; i < HVD_COUNT_OF(told); i++) { /* what every rank raises by itself, and no other number */
        length = frame(bytes, 9 + 4, LOST, 2, told[i][0], "late");
        CHECK(write(ends[1], bytes, length) == (ssize_t)length);
        CHECK(hvd_report_read(store, &error) == told[i][1] && error.code == told[i][1] && error.culprit == 2);
        memset(&error, 0, sizeof error);
    }
}

/* What the engine says comes out as it was meant. */
static void aborts_are_said(const struct hvd_report_line *store)
{
    hvd_report_abort(store, 2, HVD_EPEER, "boom");
    CHECK(read(ends[1], bytes, sizeof bytes) == 17);
    CHECK(bytes[3] == 13 && bytes[4] == 5 && bytes[8] == 2 && (int8_t)bytes[12] == HVD_EPEER &&
          !memcmp(bytes + 13, "boom", 4));
    char *large = malloc(100001);
    memset(large, 'x', 100000);
    large[100000] = '\0';
    hvd_report_abort(store, 2, HVD_EPEER, large);
    CHECK(read(ends[1], bytes, sizeof bytes) == 13 + HVD_REPORT_TEXT_MAX);
    memcpy(large + 100000 - 9, " [HVD450]", 9); /* a cut text keeps its code */
    hvd_report_abort(store, 2, HVD_EPEER, large);
    CHECK(read(ends[1], bytes, sizeof bytes) == 13 + HVD_REPORT_TEXT_MAX);
    CHECK(!memcmp(bytes + 13 + HVD_REPORT_TEXT_MAX - 11, "xx [HVD450]", 11));
    free(large);
}

/* Wrong type, absurd lengths. */
static void what_is_no_frame_is_told(const struct hvd_report_line *store)
{
    static const struct {
        uint32_t length;
        uint8_t type;
    } wrong[] = {{13, 5}, {13, 0}, {0, 6}, {3, 6}, {0xffffffff, 6}, {5000, 6}};
    for (size_t i = 0; i < HVD_COUNT_OF(wrong); i++) {
        struct hvd_error error = {0};
        size_t length = frame(bytes, wrong[i].length, wrong[i].type, 1, -5, "gone");
        CHECK(write(ends[1], bytes, length) == (ssize_t)length);
        CHECK(hvd_report_read(store, &error) == HVD_EINTERNAL && error.text[0]);
        CHECK(read(ends[0], bytes, sizeof bytes) > 0);
    }
}

static void the_launcher_ends(const struct hvd_report_line *store)
{
    struct hvd_error error = {0};
    close(ends[1]);
    CHECK(hvd_report_read(store, &error) == HVD_EPEER && error.culprit <= 0 && strstr(error.text, "launcher") &&
          strstr(error.text, " [HVD455]"));
    hvd_report_abort(store, 2, HVD_EPEER, "nobody listens"); /* no SIGPIPE */
    hvd_report_abort(&(struct hvd_report_line){.fd = -1}, 2, HVD_EPEER, "no store");
    close(ends[0]);
}

static uint64_t counters[2];

static struct hvd_report_line signed_line(void)
{
    struct hvd_report_line store = {.fd = ends[0], .is_signed = true, .counters = counters};
    for (size_t i = 0; i < sizeof store.keys; i++)
        store.keys[i] = (unsigned char)(3 * i);
    return store;
}

/* Makes of an unsigned frame of so many bytes the store's number-th, with both tags; returns its length. */
static size_t sign(const struct hvd_report_line *store, uint8_t *at, size_t length, uint64_t number)
{
    uint8_t tag[HVD_TAG_BYTES];
    memmove(at + 8, at + 4, length - 4);
    hvd_mac_tag(store->keys + HVD_KEY_BYTES, number, at, 4, tag);
    memcpy(at + 4, tag, 4);
    hvd_mac_tag(store->keys + HVD_KEY_BYTES, number, at, length + 4, at + length + 4);
    return length + 4 + HVD_TAG_BYTES;
}

static size_t signed_frame(const struct hvd_report_line *store, uint8_t *at, uint64_t number, const char *text)
{
    size_t length = (size_t)BODY + strlen(text) + HVD_TAG_BYTES;
    return sign(store, at, frame(at, (uint32_t)length, LOST, 3, -5, text), number);
}

/* The store's way is emptied: what is not taken lies there. */
static void empty(void)
{
    uint8_t unread[8192];
    while (recv(ends[0], unread, sizeof unread, MSG_DONTWAIT) > 0)
        ;
}

/* These bytes are not the store's, and nothing of them is taken; nor is anything waited for. */
static void is_forged(const struct hvd_report_line *store, const uint8_t *forged, size_t length)
{
    struct hvd_error error = {0}, again = {0};
    uint64_t number = store->counters[1];
    uint8_t more[HEAD + BODY + HVD_REPORT_TEXT_MAX + HVD_TAG_BYTES];
    CHECK(write(ends[1], forged, length) == (ssize_t)length);
    int code = hvd_report_read(store, &error);
    CHECK_CODE(code, HVD_EPEER, error.text);
    CHECK_CODE(strstr(error.text, "data from this job's store was changed") && strstr(error.text, "[HVD458]"), 1,
               error.text);
    CHECK(error.culprit < 0 && hvd_report_read(store, &again) == code && !strcmp(error.text, again.text));
    CHECK(store->counters[1] == number && recv(ends[0], more, sizeof more, MSG_PEEK) >= (ssize_t)length);
    empty();
}

static void signed_frames_are_told_in_order(void)
{
    const struct hvd_report_line store = signed_line();
    char text[HVD_REPORT_TEXT_MAX + 1] = "gone";
    for (counters[1] = 0; counters[1] < 3;) {
        struct hvd_error error = {0};
        uint64_t number = counters[1];
        size_t length = signed_frame(&store, bytes, number, text);
        for (size_t i = 0, part; i < length; i += part) {
            part = length < 100 ? 1 : 1 + (length - 1) / 40; /* each one costs the socket room */
            part = part < length - i ? part : length - i;
            CHECK(hvd_report_read(&store, &error) == HVD_AGAIN);
            CHECK(write(ends[1], bytes + i, part) == (ssize_t)part);
        }
        CHECK(write(ends[1], bytes, 3) == 3);
        CHECK(hvd_report_read(&store, &error) == HVD_EPEER && error.culprit == 3 && !strcmp(error.text, text));
        CHECK(counters[1] == number + 1 && read(ends[0], bytes, sizeof bytes) == 3);
        memset(text, 'x', number == 0 ? HVD_REPORT_TEXT_MAX : 0); /* the longest one, and none */
        text[number == 0 ? HVD_REPORT_TEXT_MAX : 0] = '\0';
    }
}

static void signed_aborts_carry_their_number(void)
{
    const struct hvd_report_line store = signed_line();
    uint8_t tag[HVD_TAG_BYTES];
    for (counters[0] = 0; counters[0] < 3;) {
        uint64_t number = counters[0];
        hvd_report_abort(&store, 2, HVD_EPEER, "boom");
        CHECK(read(ends[1], bytes, sizeof bytes) == 21 + HVD_TAG_BYTES && bytes[3] == 13 + HVD_TAG_BYTES);
        hvd_mac_tag(store.keys, number, bytes, 4, tag);
        CHECK(memcmp(tag, bytes + 4, 4) == 0);
        hvd_mac_tag(store.keys, number, bytes, 21, tag);
        CHECK(hvd_mac_same(tag, bytes + 21) && counters[0] == number + 1);
    }
}

/* Each bit; other numbers, keys and directions; lengths that lie; no tag; and a sound tag under what is no news. */
static void what_a_stranger_touches_is_told(void)
{
    struct hvd_report_line store = signed_line(), other = store;
    struct hvd_error error = {0};
    counters[0] = 0;
    counters[1] = 7;
    size_t length = signed_frame(&store, bytes, 7, "gone");
    for (size_t bit = 0; bit < 8 * length; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        is_forged(&store, bytes, length);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (uint64_t number = 5; number < 10; number += 1 + (number == 6))
        is_forged(&store, bytes, signed_frame(&store, bytes, number, "gone"));
    other.keys[HVD_KEY_BYTES] ^= 1;
    is_forged(&store, bytes, signed_frame(&other, bytes, 7, "gone"));
    counters[0] = 7;
    hvd_report_abort(&store, 3, -5, "gone"); /* sent back to who said it */
    length = (size_t)read(ends[1], bytes, sizeof bytes);
    is_forged(&store, bytes, length);
    is_forged(&store, bytes, frame(bytes, 9 + 4, LOST, 3, -5, "gone"));
    is_forged(&store, bytes, frame(bytes, 9 + 40, LOST, 3, -5, "gone and signed by nobody at all, see?   "));
    signed_frame(&store, bytes, 7, "gone"); /* no more than its head has come, and that is a longer one's */
    bytes[2] ^= 1;
    is_forged(&store, bytes, HEAD);
    static const uint32_t lies[] = {0, 12, 9 + HVD_TAG_BYTES - 1, 9 + HVD_REPORT_TEXT_MAX + HVD_TAG_BYTES + 1,
                                    UINT32_MAX};
    for (size_t i = 0; i < HVD_COUNT_OF(lies); i++) {
        length = sign(&store, bytes, frame(bytes, lies[i], LOST, 3, -5, "gone"), 7);
        is_forged(&store, bytes, length);
    }
    length = sign(&store, bytes, frame(bytes, 9 + 4 + HVD_TAG_BYTES, 5, 3, -5, "gone"), 7);
    CHECK(write(ends[1], bytes, length) > 0 && hvd_report_read(&store, &error) == HVD_EINTERNAL);
    empty();
}

/* A store that reads nothing for a while: whole frames leave, or half of one and then nothing more. */
static void half_a_frame_is_the_last(void)
{
    close(ends[0]);
    close(ends[1]);
    streams_loopback(ends, 2048);
    const struct hvd_report_line store = signed_line();
    char text[HVD_REPORT_TEXT_MAX + 1];
    uint8_t *all = calloc(1, 1 << 20), tag[HVD_TAG_BYTES];
    size_t got = 0, at = 0, whole = HEAD + BODY + HVD_REPORT_TEXT_MAX + HVD_TAG_BYTES;
    memset(text, 'x', HVD_REPORT_TEXT_MAX);
    text[HVD_REPORT_TEXT_MAX] = '\0';
    counters[0] = 0;
    for (uint64_t before = UINT64_MAX; before != counters[0] && counters[0] < 300;) {
        before = counters[0];
        hvd_report_abort(&store, 2, HVD_EPEER, text);
    }
    while (got < whole)
        got += (size_t)read(ends[1], all + got, whole - got);
    hvd_report_abort(&store, 2, HVD_EPEER, "later");
    shutdown(ends[0], SHUT_WR);
    for (ssize_t part; (part = read(ends[1], all + got, whole)) > 0;)
        got += (size_t)part;
    for (uint64_t number = 0; at + HEAD <= got; number++) {
        size_t length = (size_t)all[at + 2] << 8 | all[at + 3];
        if (at + HEAD + length > got)
            break;
        hvd_mac_tag(store.keys, number, all + at, HEAD + length - HVD_TAG_BYTES, tag);
        at += HEAD + length;
        CHECK(hvd_mac_same(tag, all + at - HVD_TAG_BYTES));
    }
    for (size_t i = at; i < got; i++) /* of the first one, but for the length's tag: its text is all that may be cut */
        CHECK(all[i] == all[i - at] || (i - at >= 4 && i - at < HEAD));
    free(all);
}

/* A part of a frame that nothing can follow is no frame that is waited for. */
static void what_was_cut_is_the_end(bool is_signed)
{
    struct hvd_report_line store = signed_line();
    store.is_signed = is_signed;
    counters[1] = 0;
    size_t length = is_signed ? signed_frame(&store, bytes, 0, "gone") : frame(bytes, 9 + 4, LOST, 3, -5, "gone");
    for (size_t part = 1; part < length; part++) {
        struct hvd_error error = {0};
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
        store.fd = pair[0];
        CHECK(write(pair[1], bytes, part) == (ssize_t)part && hvd_report_read(&store, &error) == HVD_AGAIN);
        close(pair[1]);
        CHECK(hvd_report_read(&store, &error) == HVD_EPEER && strstr(error.text, " [HVD455]"));
        close(pair[0]);
    }
}

int main(void)
{
    crew_deadline(20);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    const struct hvd_report_line store = {.fd = ends[0]};
    lost_ranks_are_told(&store);
    aborts_are_said(&store);
    what_is_no_frame_is_told(&store);
    signed_frames_are_told_in_order();
    signed_aborts_carry_their_number();
    what_a_stranger_touches_is_told();
    half_a_frame_is_the_last();
    what_was_cut_is_the_end(false);
    what_was_cut_is_the_end(true);
    the_launcher_ends(&store);
    return 0;
}
