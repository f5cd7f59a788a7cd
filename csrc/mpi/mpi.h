/* mpi.h - an MPI that was found when the program ran: one table of functions and handles, whichever library it is.
 *
 * No mpi.h is compiled against. Handles travel as uintptr_t, be they ints (MPICH's ABI) or pointers (Open MPI's, the
 * standard ABI of MPI 5); only the constants differ, and who loads the library fills them in. A process has one MPI,
 * so there is one table, written once by hvd_mpi_load and read-only from then on.
 *
 * Calls of the table return MPI's own codes: 0 is success, hvd_mpi_failed puts the others into words.
 */
#ifndef HVD_MPI_H
#define HVD_MPI_H

#include "../base/base.h"

/* X(NAME, symbol of Open MPI, value in MPICH's ABI, value in the standard ABI) */
#define HVD_MPI_CONSTANTS(X)                                      \
    X(world, "ompi_mpi_comm_world", 0x44000000, 0x101)            \
    X(comm_null, "ompi_mpi_comm_null", 0x04000000, 0x100)         \
    X(self, "ompi_mpi_comm_self", 0x44000001, 0x102)              \
    X(request_null, "ompi_request_null", 0x2c000000, 0x180)       \
    X(errors_return, "ompi_mpi_errors_return", 0x54000001, 0x143) \
    X(byte, "ompi_mpi_byte", 0x4c00010d, 0x247)                   \
    X(int8, "ompi_mpi_int8_t", 0x4c000137, 0x240)                 \
    X(uint8, "ompi_mpi_uint8_t", 0x4c00013b, 0x241)               \
    X(int16, "ompi_mpi_int16_t", 0x4c000238, 0x248)               \
    X(uint16, "ompi_mpi_uint16_t", 0x4c00023c, 0x249)             \
    X(int32, "ompi_mpi_int32_t", 0x4c000439, 0x250)               \
    X(int64, "ompi_mpi_int64_t", 0x4c00083a, 0x258)               \
    X(float32, "ompi_mpi_float", 0x4c00040a, 0x210)               \
    X(float64, "ompi_mpi_double", 0x4c00080b, 0x214)              \
    X(sum, "ompi_mpi_op_sum", 0x58000003, 0x21)                   \
    X(min, "ompi_mpi_op_min", 0x58000002, 0x22)                   \
    X(max, "ompi_mpi_op_max", 0x58000001, 0x23)                   \
    X(product, "ompi_mpi_op_prod", 0x58000004, 0x24)

/* X(NAME, arguments): functions without handles, the same for every ABI. */
#define HVD_MPI_PLAIN_CALLS(X)                                            \
    X(Init_thread, (int *count, char ***words, int required, int *level)) \
    X(Initialized, (int *flag))                                           \
    X(Finalized, (int *flag))                                             \
    X(Finalize, (void))                                                   \
    X(Query_thread, (int *level))                                         \
    X(Get_library_version, (char *text, int *length))                     \
    X(Error_string, (int code, char *text, int *length))                  \
    X(Comm_create_keyval, (void (*copy)(void), void (*drop)(void), int *key, void *more))

/* The same with handles, which are `H`: expanded once per width of a handle (calls.h) and once here. */
#define HVD_MPI_HANDLE_CALLS(X, H)                                                                                    \
    X(Abort, (H comm, int code))                                                                                      \
    X(Comm_rank, (H comm, int *rank))                                                                                 \
    X(Comm_size, (H comm, int *size))                                                                                 \
    X(Comm_set_attr, (H comm, int key, void *value))                                                                  \
    X(Comm_set_errhandler, (H comm, H handler))                                                                       \
    X(Comm_free, (H * comm))                                                                                          \
    X(Comm_idup, (H comm, H * made, H * request))                                                                     \
    X(Comm_group, (H comm, H * group))                                                                                \
    X(Group_incl, (H group, int count, const int *ranks, H *made))                                                    \
    X(Group_free, (H * group))                                                                                        \
    X(Comm_create_group, (H comm, H group, int tag, H *made))                                                         \
    X(Iallreduce, (const void *in, void *out, int count, H type, H op, H comm, H *request))                           \
    X(Iallgather, (const void *in, int gives, H type, void *out, int gets, H out_type, H comm, H *request))           \
    X(Iallgatherv,                                                                                                    \
      (const void *in, int gives, H type, void *out, const int *gets, const int *at, H out_type, H comm, H *request)) \
    X(Ialltoallv, (const void *in, const int *gives, const int *from, H type, void *out, const int *gets,             \
                   const int *at, H out_type, H comm, H *request))                                                    \
    X(Ibcast, (void *values, int count, H type, int root, H comm, H *request))                                        \
    X(Isend, (const void *values, int count, H type, int to, int tag, H comm, H *request))                            \
    X(Irecv, (void *values, int count, H type, int from, int tag, H comm, H *request))                                \
    X(Iprobe, (int from, int tag, H comm, int *flag, void *status))                                                   \
    X(Cancel, (H * request))                                                                                          \
    X(Get_count, (const void *status, H type, int *count))                                                            \
    X(Test, (H * request, int *flag, void *status))

struct hvd_mpi_calls {
#define X(name, arguments) int(*name) arguments;
    HVD_MPI_HANDLE_CALLS(X, uintptr_t)
#undef X
};

struct hvd_mpi {
    const char *abi; /* "Open MPI", "MPICH" or "MPI standard"; NULL: nothing is loaded */
    char version[128];
    char path[512]; /* the file that was asked for */
#define X(name, symbol, mpich, standard) uintptr_t name;
    HVD_MPI_CONSTANTS(X)
#undef X
    void *in_place, *status_ignore;
    int thread_multiple;
#define X(name, arguments) int(*name) arguments;
    HVD_MPI_PLAIN_CALLS(X)
#undef X
    struct hvd_mpi_calls call;
};

/* The MPI of this process; all fields zero (abi NULL) before hvd_mpi_load. Any thread, after hvd_mpi_load returned. */
const struct hvd_mpi *hvd_mpi_loaded(void);
/* HVD_OK, or HVD_EINIT with MPI's own words in `error`: "MPI could not <what>: ...". */
int hvd_mpi_failed(int code, const char *what, struct hvd_error *error);

/* Between load.c and the two widths: all calls from `library`; the name of one that it lacks, or NULL. */
const char *hvd_mpi_int_handles(void *library, struct hvd_mpi_calls *calls);
const char *hvd_mpi_pointer_handles(void *library, struct hvd_mpi_calls *calls);

#endif
