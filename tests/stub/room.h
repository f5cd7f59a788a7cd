/* room.h - what the ranks of a stub's communicator share, and one group of calls. Between nccl.c and room.c. */
#ifndef HVD_TESTS_ROOM_H
#define HVD_TESTS_ROOM_H

#include "stub.h"

#include <stdatomic.h>

enum {
    STUB_RANKS = 8,
    STUB_SLOT = 1 << 15,
    STUB_BOX = 1 << 12,
    STUB_CALLS = 2048,
    STUB_FACTORS = 64,
    STUB_OPS = 5,
    STUB_ASKS = 20 /* until a communicator is connected, when all have come */
};
enum stub_kind { STUB_ALLREDUCE, STUB_REDUCE, STUB_SCATTER, STUB_GATHER, STUB_BROADCAST, STUB_SEND, STUB_RECEIVE };

struct stub_room {                          /* zero at first */
    _Atomic int joined, device[STUB_RANKS]; /* device: of each rank */
    _Atomic int finalized, destroyed, aborted;
    _Atomic uint32_t arrived, generation;
    uint64_t says[STUB_RANKS]; /* kind, op, type and count of the call under way: they must be the same */
    struct {
        _Atomic uint32_t full;
        unsigned char bytes[STUB_BOX];
    } box[STUB_RANKS][STUB_RANKS];
    unsigned char slot[STUB_RANKS][STUB_SLOT];
};

struct stub_call {
    enum stub_kind kind;
    const void *in;
    void *out;
    size_t count;
    int type, op, peer;
    double factor; /* of an op from STUB_OPS on */
};

struct stub_comm {
    struct stub_room *room;
    int rank, size;
    char path[128];
    bool unlinked;
    _Atomic bool aborted;
    _Atomic int failed, users;
    unsigned groups, asked, connecting; /* connecting: how often it has been asked for since all have come */
    int job;                            /* of the thread that began what goes on in the background; 0: nothing does */
    int device, ops;
    bool finalizing, stuck;  /* stuck: what goes on in the background never ends */
    bool blocks;             /* nothing goes on there */
    struct stub_group *late; /* ended, and to be put on its stream */
    void *late_stream;
    double factor[STUB_FACTORS];
    int factors;
};

struct stub_group {
    struct stub_comm *comm;
    int calls;
    struct stub_call call[STUB_CALLS];
};

void stub_run_group(void *group); /* by a stream */
void stub_group_free(struct stub_group *group);
double stub_number(int type, const void *element);

#endif
