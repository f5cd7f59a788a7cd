/* room.c - collectives of the stub: values combined in rank order, one piece of them at a time. See room.h. */
#include "room.h"
#include "kernel/number.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const size_t bytes_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

double stub_number(int type, const void *element)
{
    _Float16 half;
    float single;
    double wide;
    uint32_t bits = 0;
    switch (type) {
    case 6:
        memcpy(&half, element, 2);
        return (double)half;
    case 7:
        memcpy(&single, element, 4);
        return single;
    case 8:
        memcpy(&wide, element, 8);
        return wide;
    case 10:
        return (double)hvd_float_of_float8_e4m3fn(*(const uint8_t *)element);
    case 11:
        return (double)hvd_float_of_float8_e5m2(*(const uint8_t *)element);
    default:
        memcpy((char *)&bits + 2, element, 2);
        memcpy(&single, &bits, 4);
        return single;
    }
}

static int64_t integer(int type, const void *element)
{
    int64_t wide = 0;
    memcpy(&wide, element, bytes_of[type]);
    return type == 0 ? (int8_t)wide : type == 2 ? (int32_t)wide : wide;
}

static void store(int type, long double value, void *to)
{
    _Float16 half = (_Float16)value;
    float single = (float)value;
    double wide = (double)value;
    uint32_t bits;
    uint8_t eighth = type == 10 ? hvd_float8_e4m3fn_of_float(single) : hvd_float8_e5m2_of_float(single);
    memcpy(&bits, &single, 4);
    uint16_t brain = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    memcpy(to,
           type == 6    ? (void *)&half
           : type == 7  ? (void *)&single
           : type == 8  ? (void *)&wide
           : type >= 10 ? (void *)&eighth
                        : (void *)&brain,
           bytes_of[type]);
}

#define COMBINE(op, all, one)                      \
    ((op) == 1   ? (all) * (one)                   \
     : (op) == 2 ? ((one) > (all) ? (one) : (all)) \
     : (op) == 3 ? ((one) < (all) ? (one) : (all)) \
                 : (all) + (one))

static void combine(const struct stub_comm *comm, const struct stub_call *call, size_t i, void *to)
{
    size_t bytes = bytes_of[call->type];
    if (call->type >= 6) {
        long double all = 0, factor = call->op >= STUB_OPS ? call->factor : 1;
        for (int rank = 0; rank < comm->size; rank++) {
            long double one = stub_number(call->type, &comm->room->slot[rank][i * bytes]) * factor;
            all = rank ? COMBINE(call->op, all, one) : one;
        }
        store(call->type, all, to);
    } else {
        uint64_t wrapped = 0;
        int64_t all = 0;
        for (int rank = 0; rank < comm->size; rank++) {
            int64_t one = integer(call->type, &comm->room->slot[rank][i * bytes]);
            wrapped = rank ? (call->op == 1 ? wrapped * (uint64_t)one : wrapped + (uint64_t)one) : (uint64_t)one;
            all = rank && call->op > 1 ? COMBINE(call->op, all, one) : one;
        }
        memcpy(to, call->op > 1 ? (void *)&all : (void *)&wrapped, bytes);
    }
}

/* False: the communicator was aborted. */
static bool barrier(struct stub_comm *comm)
{
    struct stub_room *room = comm->room;
    uint32_t generation = atomic_load(&room->generation);
    if (atomic_fetch_add(&room->arrived, 1) + 1 == (uint32_t)comm->size) {
        atomic_store(&room->arrived, 0);
        atomic_fetch_add(&room->generation, 1);
        return true;
    }
    while (atomic_load(&room->generation) == generation) {
        if (atomic_load(&comm->aborted))
            return false;
        usleep(20);
    }
    return true;
}

/* Contributions of `count` elements each; what rank `wants` says gets them. reduces: combined, else all of them. */
static bool piece(struct stub_comm *comm, const struct stub_call *call, const unsigned char *in, unsigned char *out,
                  size_t count)
{
    size_t bytes = bytes_of[call->type];
    if (in)
        memcpy(comm->room->slot[comm->rank], in, count * bytes);
    if (!barrier(comm))
        return false;
    if (out && call->kind == STUB_BROADCAST)
        memmove(out, comm->room->slot[call->peer], count * bytes);
    else if (out && call->kind == STUB_GATHER)
        for (int rank = 0; rank < comm->size; rank++)
            memcpy(out + (size_t)rank * call->count * bytes, comm->room->slot[rank], count * bytes);
    else
        for (size_t i = 0; out && i < count; i++)
            combine(comm, call, i, out + i * bytes);
    return barrier(comm);
}

static bool collective(struct stub_comm *comm, const struct stub_call *call)
{
    size_t bytes = bytes_of[call->type], most = STUB_SLOT / bytes;
    const unsigned char *in = call->in;
    unsigned char *out = call->out;
    int blocks = call->kind == STUB_SCATTER ? comm->size : 1;
    comm->room->says[comm->rank] = (uint64_t)call->kind | (uint64_t)(call->op < STUB_OPS ? call->op : STUB_OPS) << 4 |
                                   (uint64_t)call->type << 8 | (uint64_t)call->count << 16;
    if (!barrier(comm))
        return false;
    for (int rank = 0; rank < comm->size; rank++)
        if (comm->room->says[rank] != comm->room->says[0])
            atomic_store(&comm->failed, 5);
    for (int block = 0; block < blocks; block++)
        for (size_t at = 0; at < call->count; at += most) {
            size_t count = call->count - at < most ? call->count - at : most;
            bool gives = call->kind != STUB_BROADCAST || call->peer == comm->rank;
            bool gets = call->kind == STUB_REDUCE    ? call->peer == comm->rank
                        : call->kind == STUB_SCATTER ? block == comm->rank
                                                     : true;
            size_t from = ((size_t)block * call->count + at) * bytes;
            if (!piece(comm, call, gives ? in + from : NULL, gets ? out + at * bytes : NULL, count))
                return false;
        }
    return true;
}

/* All sends and receives of a group side by side. */
static bool between_two(struct stub_comm *comm, struct stub_group *group)
{
    size_t done[STUB_CALLS] = {0};
    for (int left = 1; left;) {
        bool moved = false;
        left = 0;
        for (int i = 0; i < group->calls; i++) {
            const struct stub_call *call = &group->call[i];
            size_t all = call->count * bytes_of[call->type], part = all - done[i] < STUB_BOX ? all - done[i] : STUB_BOX;
            bool sends = call->kind == STUB_SEND;
            if (call->kind < STUB_SEND || part == 0)
                continue;
            left = 1;
            int from = sends ? comm->rank : call->peer, to = sends ? call->peer : comm->rank;
            if (atomic_load(&comm->room->box[from][to].full) == (uint32_t)sends)
                continue;
            if (sends)
                memcpy(comm->room->box[from][to].bytes, (const char *)call->in + done[i], part);
            else
                memcpy((char *)call->out + done[i], comm->room->box[from][to].bytes, part);
            atomic_store(&comm->room->box[from][to].full, sends);
            done[i] += part;
            moved = true;
        }
        if (atomic_load(&comm->aborted))
            return false;
        if (left && !moved)
            usleep(20);
    }
    return true;
}

void stub_run_group(void *self)
{
    struct stub_group *group = self;
    bool goes_on = stub_called("runs") == 0;
    while (!goes_on && !atomic_load(&group->comm->aborted)) /* told to stand still there */
        usleep(1000);
    for (int i = 0; i < group->calls && goes_on; i++)
        if (group->call[i].kind < STUB_SEND)
            goes_on = collective(group->comm, &group->call[i]);
    if (goes_on)
        between_two(group->comm, group);
    stub_group_free(group);
}
