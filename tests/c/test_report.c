/* test_report.c - frames between engine and store: whole, in pieces, hostile. */
#include "crew.h"

#include "engine/report.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

static size_t frame(uint8_t *at, uint32_t length, uint8_t type, int culprit, int code, const char *text)
{
    uint32_t words[2] = {htonl((uint32_t)culprit), htonl((uint32_t)code)}, head = htonl(length);
    memcpy(at, &head, 4);
    at[4] = type;
    memcpy(at + 5, words, 8);
    memcpy(at + 13, text, strlen(text));
    return 13 + strlen(text);
}

int main(void)
{
    int ends[2];
    uint8_t bytes[4096];
    crew_deadline(20);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    struct hvd_error error = {0};
    CHECK(hvd_report_read(ends[0], &error) == HVD_AGAIN);

    /* byte by byte: nothing until the last one, and the next frame is left alone */
    size_t length = frame(bytes, 9 + 4, 6, 3, -5, "gone");
    for (size_t i = 0; i < length; i++) {
        CHECK(hvd_report_read(ends[0], &error) == HVD_AGAIN);
        CHECK(write(ends[1], bytes + i, 1) == 1);
    }
    CHECK(write(ends[1], bytes, 3) == 3);
    CHECK(hvd_report_read(ends[0], &error) == HVD_EPEER && error.culprit == 3 && !strcmp(error.text, "gone"));
    memset(&error, 0, sizeof error);
    CHECK(hvd_report_read(ends[0], &error) == HVD_AGAIN);
    CHECK(read(ends[0], bytes, 3) == 3);
    static const int told[][2] = {
        {-7, HVD_ETIMEOUT}, {-3, HVD_EPEER}, {1, HVD_EPEER}, {0, HVD_EPEER}, {-99, HVD_EPEER}};
    for (size_t i = 0; i < HVD_COUNT_OF(told); i++) { /* what every rank raises by itself, and no other number */
        length = frame(bytes, 9 + 4, 6, 2, told[i][0], "late");
        CHECK(write(ends[1], bytes, length) == (ssize_t)length);
        CHECK(hvd_report_read(ends[0], &error) == told[i][1] && error.code == told[i][1] && error.culprit == 2);
        memset(&error, 0, sizeof error);
    }

    /* what the engine says comes out as it was meant */
    hvd_report_abort(ends[0], 2, HVD_EPEER, "boom");
    CHECK(read(ends[1], bytes, sizeof bytes) == 17);
    CHECK(bytes[3] == 13 && bytes[4] == 5 && bytes[8] == 2 && (int8_t)bytes[12] == HVD_EPEER &&
          !memcmp(bytes + 13, "boom", 4));
    char *large = malloc(100001);
    memset(large, 'x', 100000);
    large[100000] = '\0';
    hvd_report_abort(ends[0], 2, HVD_EPEER, large);
    CHECK(read(ends[1], bytes, sizeof bytes) == 13 + HVD_REPORT_TEXT_MAX);
    memcpy(large + 100000 - 9, " [HVD450]", 9); /* a cut text keeps its code */
    hvd_report_abort(ends[0], 2, HVD_EPEER, large);
    CHECK(read(ends[1], bytes, sizeof bytes) == 13 + HVD_REPORT_TEXT_MAX);
    CHECK(!memcmp(bytes + 13 + HVD_REPORT_TEXT_MAX - 11, "xx [HVD450]", 11));
    free(large);

    /* hostile: wrong type, absurd lengths */
    static const struct {
        uint32_t length;
        uint8_t type;
    } wrong[] = {{13, 5}, {13, 0}, {0, 6}, {3, 6}, {0xffffffff, 6}, {5000, 6}};
    for (size_t i = 0; i < HVD_COUNT_OF(wrong); i++) {
        memset(&error, 0, sizeof error);
        length = frame(bytes, wrong[i].length, wrong[i].type, 1, -5, "gone");
        CHECK(write(ends[1], bytes, length) == (ssize_t)length);
        CHECK(hvd_report_read(ends[0], &error) == HVD_EINTERNAL && error.text[0]);
        CHECK(read(ends[0], bytes, sizeof bytes) > 0);
    }
    close(ends[1]);
    memset(&error, 0, sizeof error);
    CHECK(hvd_report_read(ends[0], &error) == HVD_EPEER && error.culprit <= 0 && strstr(error.text, "launcher") &&
          strstr(error.text, " [HVD455]"));
    hvd_report_abort(ends[0], 2, HVD_EPEER, "nobody listens"); /* no SIGPIPE */
    hvd_report_abort(-1, 2, HVD_EPEER, "no store");
    close(ends[0]);
    return 0;
}
