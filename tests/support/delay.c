/* delay.c - a slow cable for tests: every frame between two network interfaces arrives some milliseconds later.
 *
 * Kernels without netem can limit a rate and lose packets, but not delay them. This process stands between two
 * interfaces of a namespace of its own: it takes every frame from one, keeps it for the delay and puts it out at the
 * other, in order, both ways alike. Frames come with their virtio header, so that those which the sender's offload has
 * left large pass whole, with their checksums still to be made. At more than QUEUE_MAX bytes on the way a frame is
 * lost, as a full queue of a switch loses it.
 *
 * delay FROM TO MILLISECONDS: prints "ready", then serves until its standard input ends or it is killed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FRAME_MAX 70000
#define QUEUE_MAX ((size_t)64 << 20)
#define READS_MAX 256

struct frame {
    struct frame *next;
    int64_t due_ns;
    size_t bytes;
    char byte[];
};

struct way {
    int from, to;
    struct frame *first, *last;
    size_t bytes;
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int open_interface(const char *name)
{
    int on = 1, room = 32 << 20;
    int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL));
    struct sockaddr_ll at = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    at.sll_ifindex = (int)if_nametoindex(name);
    if (fd < 0 || !at.sll_ifindex || setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on) ||
        setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on) ||
        bind(fd, (const struct sockaddr *)&at, sizeof at)) {
        fprintf(stderr, "delay: %s: %s\n", name, strerror(errno));
        exit(1);
    }
    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
    return fd;
}

static void take(struct way *way, int64_t delay_ns)
{
    static char bytes[FRAME_MAX];
    for (int i = 0; i < READS_MAX; i++) {
        ssize_t count = read(way->from, bytes, sizeof bytes);
        if (count <= 0)
            return;
        struct frame *frame = way->bytes < QUEUE_MAX ? malloc(sizeof *frame + (size_t)count) : NULL;
        if (!frame)
            continue;
        *frame = (struct frame){.due_ns = now_ns() + delay_ns, .bytes = (size_t)count};
        memcpy(frame->byte, bytes, (size_t)count);
        *(way->last ? &way->last->next : &way->first) = frame;
        way->last = frame;
        way->bytes += frame->bytes;
    }
}

/* Sends what is due; when the next frame is. */
static int64_t give(struct way *way, int64_t until_ns)
{
    while (way->first && way->first->due_ns <= now_ns()) {
        struct frame *frame = way->first;
        if (write(way->to, frame->byte, frame->bytes) < 0 && (errno == EAGAIN || errno == ENOBUFS))
            return now_ns() + 100000;
        way->first = frame->next;
        way->last = way->first ? way->last : NULL;
        way->bytes -= frame->bytes;
        free(frame);
    }
    return way->first && way->first->due_ns < until_ns ? way->first->due_ns : until_ns;
}

int main(int count, char **word)
{
    if (count != 4) {
        fprintf(stderr, "delay FROM TO MILLISECONDS\n");
        return 2;
    }
    int64_t delay_ns = (int64_t)(strtod(word[3], NULL) * 1e6);
    int one = open_interface(word[1]), other = open_interface(word[2]);
    struct way ways[2] = {{.from = one, .to = other}, {.from = other, .to = one}};
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int64_t next_ns = now_ns() + 1000000000;
        for (int i = 0; i < 2; i++)
            next_ns = give(&ways[i], next_ns);
        int64_t left_ns = next_ns - now_ns();
        left_ns = left_ns < 0 ? 0 : left_ns;
        struct timespec left = {.tv_sec = left_ns / 1000000000, .tv_nsec = left_ns % 1000000000};
        struct pollfd news[3] = {{one, POLLIN, 0}, {other, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
        if (ppoll(news, 3, &left, NULL) > 0 && news[2].revents)
            return 0;
        for (int i = 0; i < 2; i++)
            take(&ways[i], delay_ns);
    }
}
