/* test_host_bootstrap.c - how ranks of a host meet: sockets, exchange, shared segments; strangers, liars and absentees.
 */
#define _GNU_SOURCE
#include "crew.h"

#include "boot_memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { SIZE = 3 };

/* The sockets' way of meeting, with threads standing in for processes: each has its own descriptors and mappings. */
struct attendee {
    struct hvd_boot_seat seat;
    struct hvd_host host;
    struct hvd_error error;
    int strangers; /* that connect from here before this rank does */
    bool absent;   /* takes part in the boot allgather and then never connects */
    bool stopped;  /* connects, and says nothing more until the others have given up */
    bool wrong_secret;
    bool fails_locally;
    bool comes_late; /* when rank 0 is gone, as the store has told */
    bool is_told;    /* within an exchange, that rank 0 is lost: it leaves that one half done */
    bool waits;      /* with that exchange, so that the store is faster */
    bool goes_on;    /* with one more exchange, whatever came of it */
    int code;
};

static _Atomic bool first_is_gone;

/* The store's end of its connection, with its word that rank 0 is lost. */
static int store_that_tells(int *rank_end)
{
    static const char frame[] = "\0\0\0\x0d\x06\0\0\0\0\xff\xff\xff\xfbgone";
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    CHECK(write(ends[1], frame, sizeof frame - 1) == sizeof frame - 1);
    *rank_end = ends[0];
    return ends[1];
}

static void be_a_stranger(const uint8_t name[16], int number)
{
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    int length = sprintf(un.sun_path + 1, "hvdlite-"), to = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char garbage[4096];
    for (int i = 0; i < 16; i++)
        length += sprintf(un.sun_path + 1 + length, "%02x", name[i]);
    CHECK(connect(to, (struct sockaddr *)&un,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length)) == 0);
    memset(garbage, number, sizeof garbage);
    if (number % 3 == 0)
        CHECK(send(to, garbage, sizeof garbage, MSG_NOSIGNAL) > 0);
    if (number % 3 == 1)
        CHECK(send(to, garbage, 5, MSG_NOSIGNAL) > 0);
    close(to); /* the third kind says nothing at all */
}

static int attend_boot(void *self, const void *mine, size_t bytes, void *all, char *text, size_t text_bytes)
{
    struct attendee *attendee = self;
    int code = hvd_boot_memory_allgather(&attendee->seat, mine, bytes, all, text, text_bytes);
    for (int i = 0; i < attendee->strangers; i++)
        be_a_stranger(all, i);
    attendee->strangers = 0;
    while (attendee->comes_late && !atomic_load(&first_is_gone))
        usleep(1000);
    if (attendee->absent) {
        hvd_text_copy(text, text_bytes, "absent");
        return HVD_EINIT;
    }
    return code;
}

static void *attend(void *self)
{
    struct attendee *attendee = self;
    struct hvd_host *host = &attendee->host;
    host->rank = attendee->seat.rank;
    host->size = SIZE;
    host->job = 1;
    host->store.fd = -1;
    host->deadline_ns = hvd_now_ns() + 1500000000u;
    host->allgather = attend_boot;
    host->allgather_self = attendee;
    memset(host->secret, attendee->wrong_secret ? 1 : 2, sizeof host->secret);
    int store = attendee->comes_late ? store_that_tells(&host->store.fd) : -1;
    attendee->code = hvd_host_open(host, 10000, &attendee->error);
    if (host->rank == 0)
        atomic_store(&first_is_gone, true);
    if (store >= 0)
        close(store), close(host->store.fd);
    if (attendee->code != HVD_OK)
        return NULL;
    int mine = host->rank * 11, all[SIZE], fds[SIZE], ends[2];
    CHECK(pipe(ends) == 0);
    CHECK(hvd_host_exchange(host, &mine, sizeof mine, all, ends[1], fds, &attendee->error) == HVD_OK);
    for (int rank = 0; rank < SIZE; rank++) {
        CHECK(all[rank] == rank * 11);
        CHECK(write(fds[rank], &mine, sizeof mine) == sizeof mine); /* everyone's pipe hears from everyone */
        close(fds[rank]);
    }
    for (int rank = 0, sum = 0, heard; rank < SIZE; rank++, sum += heard)
        CHECK(read(ends[0], &heard, sizeof heard) == sizeof heard && heard % 11 == 0);
    close(ends[0]), close(ends[1]);
    struct hvd_share *share = hvd_host_share(host, 3 << 20, &attendee->error);
    CHECK(share && share->bytes >= 3 << 20);
    ((_Atomic int *)share->map[host->rank])[700000] = host->rank + 5;
    CHECK(hvd_host_exchange(host, &mine, sizeof mine, all, -1, NULL, &attendee->error) == HVD_OK);
    for (int rank = 0; rank < SIZE; rank++)
        CHECK(((_Atomic int *)share->map[rank])[700000] == rank + 5 && ((_Atomic int *)share->map[rank])[5] == 0);
    hvd_share_drop(share);
    if (attendee->stopped)
        usleep(2500000);
    if (attendee->fails_locally)
        hvd_fail_rank(&attendee->error, HVD_EINIT, host->rank, "no luck on rank %d", host->rank);
    if (attendee->waits)
        usleep(300000);
    store = attendee->is_told ? store_that_tells(&host->store.fd) : -1;
    attendee->code = hvd_host_exchange(host, &mine, sizeof mine, all, -1, NULL, &attendee->error);
    if (attendee->goes_on) {
        char more[100] = "more", of_all[SIZE * sizeof more];
        memset(&attendee->error, 0, sizeof attendee->error);
        attendee->code = hvd_host_exchange(host, more, sizeof more, of_all, -1, NULL, &attendee->error);
    }
    if (store >= 0)
        close(store), close(host->store.fd);
    hvd_host_close(host);
    return NULL;
}

static void meet(struct attendee *attendees)
{
    struct hvd_boot_memory memory;
    pthread_t thread[SIZE];
    hvd_boot_memory_open(&memory, SIZE);
    for (int rank = 0; rank < SIZE; rank++) {
        attendees[rank].seat = (struct hvd_boot_seat){&memory, rank};
        CHECK(pthread_create(&thread[rank], NULL, attend, &attendees[rank]) == 0);
    }
    for (int rank = 0; rank < SIZE; rank++)
        pthread_join(thread[rank], NULL);
    hvd_boot_memory_close(&memory);
}

static int descriptors(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* What is left of one exchange is not read as the next, which fails for the same reason. */
static void leave_half_done(void)
{
    struct attendee told[SIZE] = {
        {.waits = true, .goes_on = true}, {.is_told = true, .goes_on = true}, {.goes_on = true}};
    meet(told);
    for (int rank = 0; rank < SIZE; rank++)
        CHECK_CODE(told[rank].code, HVD_EPEER, told[rank].error.text);
    CHECK_CODE(!strcmp(told[1].error.text, "gone"), 1, told[1].error.text);
}

int main(void)
{
    crew_deadline(60);
    int before = descriptors();

    struct attendee ordinary[SIZE] = {{.code = 1}};
    meet(ordinary);
    for (int rank = 0; rank < SIZE; rank++)
        CHECK_CODE(ordinary[rank].code, HVD_OK, ordinary[rank].error.text);

    struct attendee besieged[SIZE] = {[1] = {.strangers = 30}, [2] = {.strangers = 7}};
    meet(besieged);
    for (int rank = 0; rank < SIZE; rank++)
        CHECK_CODE(besieged[rank].code, HVD_OK, besieged[rank].error.text);

    /* who finds nobody where rank 0 was hears who has died, and blames neither the network nor itself */
    struct attendee orphaned[SIZE] = {{.absent = true}, {.comes_late = true}, {.comes_late = true}};
    atomic_store(&first_is_gone, false);
    meet(orphaned);
    for (int rank = 1; rank < SIZE; rank++) {
        CHECK_CODE(orphaned[rank].code, HVD_EPEER, orphaned[rank].error.text);
        CHECK_CODE(orphaned[rank].error.culprit == 0 && !strcmp(orphaned[rank].error.text, "gone"), 1,
                   orphaned[rank].error.text);
    }

    /* one rank's own failure becomes everyone's, in its words */
    for (int unlucky = 0; unlucky < SIZE; unlucky++) {
        struct attendee failing[SIZE] = {[0] = {.code = 1}};
        char words[32];
        failing[unlucky].fails_locally = true;
        meet(failing);
        snprintf(words, sizeof words, "no luck on rank %d", unlucky);
        for (int rank = 0; rank < SIZE; rank++) {
            CHECK_CODE(failing[rank].code, HVD_EINIT, failing[rank].error.text);
            CHECK(!strcmp(failing[rank].error.text, words) && failing[rank].error.culprit == unlucky);
        }
    }

    struct attendee late[SIZE] = {[2] = {.absent = true}};
    meet(late);
    CHECK(late[0].code == HVD_ETIMEOUT && strstr(late[0].error.text, "rank 2 did not connect") &&
          late[0].error.culprit == 2);
    CHECK(late[1].code == HVD_ETIMEOUT && late[1].error.culprit == 2 && late[2].code < 0);

    struct attendee stopped[SIZE] = {[1] = {.stopped = true}}; /* of whom rank 0 alone knows */
    meet(stopped);
    for (int rank = 0; rank < SIZE; rank += 2)
        CHECK(stopped[rank].code == HVD_ETIMEOUT && strstr(stopped[rank].error.text, "rank 1 did not answer") &&
              stopped[rank].error.culprit == 1);

    leave_half_done();

    struct attendee liar[SIZE] = {[2] = {.wrong_secret = true}};
    meet(liar);
    for (int rank = 0; rank < SIZE; rank++)
        CHECK(liar[rank].code < 0 && liar[rank].error.text[0]);
    CHECK(liar[0].error.culprit == 2);

    CHECK(descriptors() == before);
    return 0;
}
