/* test_signed.c - the signed link: all that is sent comes out, and nothing that a stranger has touched does.
 *
 * For attacks there is a stranger between the two ends: what one end has sent lies in his hands, record by record, and
 * he gives the other end what he likes. Whatever that is, it gets what came before, and then the same sentence for
 * ever.
 */
#define _GNU_SOURCE
#include "check.h"
#include "base/blake2b.h"
#include "link/link.h"
#include "ranks.h"
#include "streams.h"

#include <arpa/inet.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LARGE = 3 << 20, MOVE_MAX = 1 << 20, RECORD = 64 << 10, HEAD = 8, MORE = HEAD + 16, MESSAGES = 4 };

static unsigned char sent[2][LARGE], got[LARGE], keys[2][HVD_KEY_PAIR_BYTES];

static struct hvd_link open_end(int fd, int which)
{
    struct hvd_error error = {0};
    struct hvd_link_signing signing = {keys[which], "votes"};
    struct hvd_link link = {.self = &signing};
    CHECK(hvd_link_signed.open(&link, fd, 3 + which, &error) == HVD_OK, "%s", error.text);
    snprintf(link.called, sizeof link.called, "rank %d (host b)", 3 + which);
    return link;
}

static void unix_pair(int *fd, int buffer)
{
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0, "a pair");
    for (int i = 0; i < 2 && buffer; i++)
        CHECK(setsockopt(fd[i], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer) == 0, "%d bytes", buffer);
}

/* What a call asks for: never more than is left, at times one byte, at times all. */
static size_t some(uint64_t *seed, size_t left, uint32_t most)
{
    size_t part = ranks_below(seed, 8) ? 1 + ranks_below(seed, most) : left;
    return part < left ? part : left;
}

static bool has_news(int fd)
{
    struct pollfd news = {.fd = fd, .events = POLLIN};
    return poll(&news, 1, 0) > 0;
}

/* Reads as a plane would. Who got less than he asked for sleeps on the descriptor: so nothing may wait elsewhere. */
static size_t read_some(struct hvd_link *link, unsigned char *to, size_t part)
{
    struct hvd_error error = {0};
    size_t moved, more;
    CHECK(link->kind->recv(link, to, part, &moved, &error) == HVD_OK, "%s", error.text);
    if (moved < part) {
        bool woken = has_news(link->fd);
        CHECK(link->kind->recv(link, to + moved, part - moved, &more, &error) == HVD_OK, "%s", error.text);
        CHECK(more == 0 || woken, "%zu bytes of which nobody is told", more);
        moved += more;
    }
    return moved;
}

/* Both ways at once, in odd pieces; who was told "not yet" comes again with more or fewer of the same bytes. */
static void comes_through(const int *fd, size_t count, uint32_t most, uint64_t seed)
{
    struct hvd_link link[2] = {open_end(fd[0], 0), open_end(fd[1], 1)};
    struct hvd_error error = {0};
    size_t out[2] = {0}, in[2] = {0};
    while (in[0] < count || in[1] < count || out[0] < count || out[1] < count)
        for (int i = 0; i < 2; i++) {
            size_t part = some(&seed, count - out[i], most), moved = 0;
            CHECK(link[i].kind->send(&link[i], sent[i] + out[i], part, &moved, &error) == HVD_OK, "%s", error.text);
            CHECK(link[i].wants_out == (moved < part && moved < MOVE_MAX), "%zu of %zu", moved, part);
            out[i] += moved;
            moved = read_some(&link[i], got, some(&seed, count - in[i], most));
            CHECK(memcmp(got, sent[1 - i] + in[i], moved) == 0, "other bytes from %zu on", in[i]);
            in[i] += moved;
        }
    for (int i = 0; i < 2; i++)
        link[i].kind->close(&link[i]);
}

static void all_sizes_come_through(void)
{
    static const size_t sizes[] = {1, 2, 7, 255, 4096, RECORD - 1, RECORD, RECORD + 1, 2 * RECORD, 200000, LARGE};
    int fd[2];
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (uint32_t most = 1; most <= 1 << 20; most *= 32)
            for (int kind = 0; kind < 4; kind++) {
                if (sizes[k] / most > 2000)
                    continue;
                (kind % 2 ? streams_loopback
                          : unix_pair)(fd, (const int[]){0, 0, 2048, 32768}[kind]); /* TCP waits in less */
                comes_through(fd, sizes[k], most, sizes[k] + most + (uint64_t)kind);
            }
}

/* What a call leaves in the socket is as many records as it takes, the last one of what is left. */
static void records_are_as_long_as_they_may_be(void)
{
    int fd[2];
    size_t moved;
    struct hvd_error error = {0};
    unix_pair(fd, 1 << 20);
    struct hvd_link link = open_end(fd[0], 0);
    CHECK(link.kind->send(&link, sent[0], RECORD + 1, &moved, &error) == HVD_OK && moved == RECORD + 1, "%zu", moved);
    CHECK(link.counts.bytes_out == RECORD + 1 + 2 * MORE, "%zu bytes", (size_t)link.counts.bytes_out);
    link.kind->close(&link);
    close(fd[1]);
}

/* The stranger: MESSAGES records that the first end has sent, and where each begins; and one that the second has. */
static unsigned char stream[1024], back[64];
static size_t begins[MESSAGES + 1], lengths[MESSAGES], back_bytes;

static void listen_in(void)
{
    int fd[2];
    size_t moved, from = 0;
    struct hvd_error error = {0};
    unix_pair(fd, 0);
    struct hvd_link link[2] = {open_end(fd[0], 0), open_end(fd[1], 1)};
    for (int i = 0; i < MESSAGES; i++) {
        lengths[i] = (const size_t[]){5, 1, 90, 17}[i];
        CHECK(link[0].kind->send(&link[0], sent[0] + from, lengths[i], &moved, &error) == HVD_OK, "%s", error.text);
        from += lengths[i];
        begins[i + 1] = begins[i] + lengths[i] + MORE;
    }
    CHECK(read(fd[1], stream, sizeof stream) == (ssize_t)begins[MESSAGES], "%zu bytes", begins[MESSAGES]);
    CHECK(link[1].kind->send(&link[1], sent[1], 5, &moved, &error) == HVD_OK, "%s", error.text);
    back_bytes = (size_t)read(fd[0], back, sizeof back);
    for (int i = 0; i < 2; i++)
        link[i].kind->close(&link[i]);
}

enum { WAITS, ENDED, FORGED };

/* The second end reads what the stranger gives it: `given` bytes of what was sent come, and no others, and then? */
static void reads(const unsigned char *bytes, size_t count, size_t piece, bool ends, size_t given, int then)
{
    int fd[2], code = HVD_OK;
    unix_pair(fd, 0);
    struct hvd_link link = open_end(fd[1], 1);
    struct hvd_error error = {0}, again = {0};
    size_t in = 0, moved;
    for (size_t at = 0; at < count && code == HVD_OK; at += piece) {
        size_t part = piece < count - at ? piece : count - at;
        CHECK(write(fd[0], bytes + at, part) == (ssize_t)part, "%zu bytes", part);
        if (ends && at + part == count)
            shutdown(fd[0], SHUT_WR);
        for (moved = 1; code == HVD_OK && (moved || has_news(fd[1])); in += moved) {
            code = link.kind->recv(&link, got + in, sizeof stream, &moved, &error);
            CHECK(code != HVD_OK || !link.over, "who has yet to hear of the end must watch for it");
        }
    }
    CHECK(in == given && memcmp(got, sent[0], in) == 0, "%zu bytes were given out, not %zu", in, given);
    CHECK((code == HVD_OK) == (then == WAITS) && link.forged == (then == FORGED) && link.over == (then == ENDED),
          "%d: %s", code, error.text);
    if (code != HVD_OK) {
        const char *says = then == FORGED ? "the votes from rank 4 (host b) were changed in transit" : "has ended";
        CHECK(code == HVD_EPEER && error.culprit == 4 && strstr(error.text, says), "%s", error.text);
        CHECK(strstr(error.text, then == FORGED ? "[HVD458]" : "[HVD450]"), "%s", error.text);
        code = link.kind->recv(&link, got, 1, &moved, &again);
        CHECK(code == error.code && again.culprit == error.culprit && moved == 0 && !strcmp(error.text, again.text),
              "asked again: %s", again.text);
    }
    link.kind->close(&link);
    close(fd[0]);
}

/* What was sent in the records before that one. */
static size_t before(int record)
{
    return begins[record] - (size_t)record * MORE;
}

/* Told when the record that is touched has come, though nothing follows; and when more does. */
static void each_bit_counts(void)
{
    for (int record = 0; record < MESSAGES; record++)
        for (size_t bit = 8 * begins[record]; bit < 8 * begins[record + 1]; bit++) {
            stream[bit / 8] ^= (unsigned char)(1 << bit % 8);
            reads(stream, begins[record + 1], sizeof stream, false, before(record), FORGED);
            reads(stream, begins[MESSAGES], bit % 8 ? sizeof stream : 1 + bit % 37, false, before(record), FORGED);
            stream[bit / 8] ^= (unsigned char)(1 << bit % 8);
        }
    reads(stream, begins[MESSAGES], sizeof stream, false, before(MESSAGES), WAITS);
}

/* Each order of up to MESSAGES records, any of them more than once, but the true one. */
static void no_record_is_moved(void)
{
    unsigned char forged[MESSAGES * sizeof stream];
    for (int count = 1, all = MESSAGES; count <= MESSAGES; count++, all *= MESSAGES)
        for (int order = 0; order < all; order++) {
            size_t bytes = 0;
            int right = 0, code = order;
            for (int i = 0; i < count; i++, code /= MESSAGES) {
                int record = code % MESSAGES;
                right += right == i && record == i;
                memcpy(forged + bytes, stream + begins[record], lengths[record] + MORE);
                bytes += lengths[record] + MORE;
            }
            reads(forged, bytes, sizeof forged, false, before(right), right == count ? WAITS : FORGED);
        }
}

static void nothing_else_is_taken(void)
{
    unsigned char forged[HEAD + RECORD + 64] = {0};
    reads(back, back_bytes, sizeof back, false, 0, FORGED); /* its own words */
    keys[1][HVD_KEY_BYTES] ^= 1;                            /* those of another connection */
    reads(stream, begins[MESSAGES], sizeof stream, false, 0, FORGED);
    keys[1][HVD_KEY_BYTES] ^= 1;
    reads(sent[0] + 1, 100, 100, false, 0, FORGED); /* those of who signs nothing */
    for (size_t cut = 1; cut <= begins[MESSAGES]; cut++) {
        int whole = 0;
        while (whole < MESSAGES && begins[whole + 1] <= cut)
            whole++;
        reads(stream, cut, sizeof stream, false, before(whole), WAITS);
        reads(stream, cut, sizeof stream, true, before(whole), ENDED);
        memcpy(forged, stream, cut); /* and he goes on by himself */
        memset(forged + cut, 0x5a, 200);
        reads(forged, cut + 200, sizeof forged, false, before(whole), FORGED);
    }
    static const uint32_t lengths_of_the_peer[] = {0, RECORD + 1, UINT32_MAX}; /* even from who has the keys */
    for (size_t i = 0; i < sizeof lengths_of_the_peer / sizeof *lengths_of_the_peer; i++) {
        unsigned char tag[HVD_TAG_BYTES];
        uint32_t length = htonl(lengths_of_the_peer[i]);
        memcpy(forged, &length, sizeof length);
        hvd_mac_tag(keys[0], 0, forged, sizeof length, tag);
        memcpy(forged + sizeof length, tag, HEAD - sizeof length);
        reads(forged, HEAD, HEAD, false, 0, FORGED);
    }
}

static void what_is_no_stream_is_refused(void)
{
    int fd[2];
    struct hvd_error error = {0};
    struct hvd_link_signing signing = {keys[0], "votes"};
    struct hvd_link link = {.self = &signing};
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, fd) == 0, "a pair");
    CHECK(hvd_link_signed.open(&link, fd[0], 1, &error) == HVD_EINIT, "%s", error.text);
    close(fd[0]); /* it is still the caller's */
    close(fd[1]);
}

int main(void)
{
    uint64_t seed = 7;
    for (size_t i = 0; i < 2 * sizeof sent[0]; i++)
        sent[i / LARGE][i % LARGE] = (unsigned char)ranks_random(&seed);
    for (size_t i = 0; i < HVD_KEY_PAIR_BYTES; i++)
        keys[0][i] = keys[1][(i + HVD_KEY_BYTES) % HVD_KEY_PAIR_BYTES] = (unsigned char)ranks_random(&seed);
    all_sizes_come_through();
    records_are_as_long_as_they_may_be();
    listen_in();
    each_bit_counts();
    no_record_is_moved();
    nothing_else_is_taken();
    what_is_no_stream_is_refused();
    return 0;
}
