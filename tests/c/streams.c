/* streams.c - see streams.h. One table of descriptors, from rank to rank for each purpose; 0 is "not made yet", what
 * has been taken is -1, so that nothing is closed twice and a test for leaks sees every descriptor.
 */
#include "streams.h"

#include "check.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int table[STREAMS_PURPOSES][STREAMS_RANKS][STREAMS_RANKS], ranks_all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void make(int purpose, int a, int b)
{
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "a pair for %d", purpose);
    table[purpose][a][b] = pair[0];
    table[purpose][b][a] = pair[1];
}

void streams_open(int size, int purposes)
{
    CHECK(size <= STREAMS_RANKS && purposes <= STREAMS_PURPOSES, "%d ranks, %d purposes", size, purposes);
    memset(table, 0, sizeof table);
    ranks_all = size;
    for (int purpose = 0; purpose < purposes; purpose++)
        for (int a = 0; a < size; a++)
            for (int b = 0; b < a; b++)
                make(purpose, a, b);
}

static void close_of(int keep)
{
    for (int purpose = 0; purpose < STREAMS_PURPOSES; purpose++)
        for (int a = 0; a < ranks_all; a++)
            for (int b = 0; b < ranks_all; b++)
                if (a != keep && table[purpose][a][b] > 0) {
                    close(table[purpose][a][b]);
                    table[purpose][a][b] = -1;
                }
}

void streams_keep(int rank)
{
    close_of(rank);
}

void streams_take(int purpose, int rank, const int *ranks, int count, int *row)
{
    CHECK(purpose < STREAMS_PURPOSES, "purpose %d", purpose);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++) {
        row[i] = -1;
        if (ranks[i] == rank || ranks[i] < 0)
            continue;
        if (!table[purpose][rank][ranks[i]])
            make(purpose, rank, ranks[i]);
        row[i] = table[purpose][rank][ranks[i]];
        CHECK(row[i] > 0, "the stream of %d from %d to %d was taken before", purpose, rank, ranks[i]);
        table[purpose][rank][ranks[i]] = -1;
    }
    pthread_mutex_unlock(&lock);
}

void streams_close(void)
{
    close_of(-1);
}

void streams_loopback(int *pair, int buffer)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    pair[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    for (int i = 0; i < 2 && buffer; i++) { /* what is accepted has those of the listener */
        setsockopt(i ? listener : pair[0], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
        setsockopt(i ? listener : pair[0], SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    }
    CHECK(bind(listener, (struct sockaddr *)&at, sizeof at) == 0 && listen(listener, 1) == 0 &&
              getsockname(listener, (struct sockaddr *)&at, &bytes) == 0 &&
              connect(pair[0], (struct sockaddr *)&at, sizeof at) == 0,
          "loopback");
    pair[1] = accept(listener, NULL, NULL);
    close(listener);
}
