/* nccl.h - an NCCL that was found when the program ran: one table of functions.
 *
 * No nccl.h is compiled against. Handles travel as void *; the numbers of dtypes, ops and results are NCCL's own, which
 * it has never changed. A process has one NCCL (two would not share a device's memory limits, nor their bugs), so there
 * is one table, written once by hvd_nccl_load and read-only from then on. Calls of the table return NCCL's own codes.
 */
#ifndef HVD_NCCL_H
#define HVD_NCCL_H

#include "../base/base.h"

enum hvd_nccl_result { HVD_NCCL_SUCCESS = 0, HVD_NCCL_IN_PROGRESS = 7 };
/* Of a communicator that does not block, a call may say that it goes on in the background: that is no failure. */
static inline bool hvd_nccl_going(int result)
{
    return result == HVD_NCCL_SUCCESS || result == HVD_NCCL_IN_PROGRESS;
}
enum hvd_nccl_op { HVD_NCCL_SUM, HVD_NCCL_PRODUCT, HVD_NCCL_MAX, HVD_NCCL_MIN, HVD_NCCL_AVERAGE };
enum hvd_nccl_type {
    HVD_NCCL_INT8,
    HVD_NCCL_UINT8,
    HVD_NCCL_INT32,
    HVD_NCCL_UINT32,
    HVD_NCCL_INT64,
    HVD_NCCL_UINT64,
    HVD_NCCL_FLOAT16,
    HVD_NCCL_FLOAT32,
    HVD_NCCL_FLOAT64,
    HVD_NCCL_BFLOAT16,
    HVD_NCCL_FLOAT8_E4M3, /* since 2.24, for devices since compute capability 9.0 */
    HVD_NCCL_FLOAT8_E5M2
};

struct hvd_nccl_id { /* passed by value */
    char bytes[128];
};

/* As NCCL 2.14 has it; later ones append, know by `version` how much is there, and take their defaults for the rest. */
struct hvd_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
};
#define HVD_NCCL_MAGIC          0xcafebeefu
#define HVD_NCCL_CONFIG_VERSION 21400u
#define HVD_NCCL_SCALAR_HOST    1 /* ncclScalarHostImmediate */

/* X(NAME, arguments) */
#define HVD_NCCL_CALLS(X)                                                                                           \
    X(GetVersion, (int *version))                                                                                   \
    X(GetUniqueId, (struct hvd_nccl_id * id))                                                                       \
    X(CommInitRankConfig, (void **comm, int size, struct hvd_nccl_id id, int rank, struct hvd_nccl_config *config)) \
    X(CommFinalize, (void *comm))                                                                                   \
    X(CommDestroy, (void *comm))                                                                                    \
    X(CommAbort, (void *comm))                                                                                      \
    X(CommGetAsyncError, (void *comm, int *result))                                                                 \
    X(RedOpCreatePreMulSum, (int *op, void *scalar, int type, int residence, void *comm))                           \
    X(RedOpDestroy, (int op, void *comm))                                                                           \
    X(AllReduce, (const void *in, void *out, size_t count, int type, int op, void *comm, void *stream))             \
    X(Reduce, (const void *in, void *out, size_t count, int type, int op, int root, void *comm, void *stream))      \
    X(ReduceScatter, (const void *in, void *out, size_t gets, int type, int op, void *comm, void *stream))          \
    X(AllGather, (const void *in, void *out, size_t gives, int type, void *comm, void *stream))                     \
    X(Broadcast, (const void *in, void *out, size_t count, int type, int root, void *comm, void *stream))           \
    X(Send, (const void *in, size_t count, int type, int to, void *comm, void *stream))                             \
    X(Recv, (void *out, size_t count, int type, int from, void *comm, void *stream))                                \
    X(GroupStart, (void))                                                                                           \
    X(GroupEnd, (void))

struct hvd_nccl {
    bool loaded;
    int version; /* such as 22105 */
    char path[512];
    const char *(*GetErrorString)(int result);
    const char *(*GetLastError)(void *comm); /* NULL before NCCL 2.13 */
#define X(name, arguments) int(*name) arguments;
    HVD_NCCL_CALLS(X)
#undef X
};

/* The NCCL of this process. Any thread; loads it at the first call. NULL and why not, which will not change. */
const struct hvd_nccl *hvd_nccl_load(struct hvd_error *error);
/* The file to load unless an NCCL is in this process already, before the first load; a copy is kept. NULL: by name. */
void hvd_nccl_prefer(const char *path);
/* The version as a text: "2.21.5". */
void hvd_nccl_version(int version, char *text, size_t text_bytes);
/* HVD_OK, or HVD_EINTERNAL with NCCL's words: "NCCL <version> (<path>) could not <what>: ...". comm may be NULL. */
int hvd_nccl_failed(int result, void *comm, const char *what, struct hvd_error *error);

#endif
