/* hvdlite.h - the public C API of the core: the one contract between C and Python.
 *
 * cffi reads the part between the two marks below, so the header is written once: it holds plain
 * declarations, literal defines and enums only. dtype and op travel as int; their names and sizes are
 * asked at import (hvd_dtype_name and friends), so a new dtype or op is one X-macro row in kernel/.
 *
 * Rules that hold for every function:
 *   - Any thread may call any function; none is called with a lock of the core held.
 *   - The return value is HVD_OK (0), a positive answer where documented, or a negative HVD_E* code.
 *     Where there is a `text` argument, a failure writes one human sentence into it (always
 *     NUL-terminated, cut at text_bytes): which rank, which tensor, what to do.
 *   - The core never exits, prints or throws.
 *   - In a forked child every function but hvd_forked() fails with HVD_EFORK.
 */
#ifndef HVDLITE_H
#define HVDLITE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The one place: setup.py reads it, hvd_version() returns it, hvdlite.__version__ is tested against it. */
#define HVD_VERSION "0.1.0"

/* cffi: begin */

/* Results. HVD_AGAIN is no error: "not yet". */
#define HVD_AGAIN     1
#define HVD_OK        0
#define HVD_EINVAL    -1  /* the caller's mistake, seen locally: ValueError */
#define HVD_ETYPE     -2  /* unsupported dtype: ValueError too, as Horovod has it */
#define HVD_EDUP      -3  /* the name is in flight already: ValueError */
#define HVD_EMISMATCH -4  /* ranks disagree on one tensor: HvdMismatchError */
#define HVD_EPEER     -5  /* a rank died or left: HvdPeerLostError */
#define HVD_EINIT     -6  /* initialisation failed: HvdInitError */
#define HVD_ETIMEOUT  -7  /* HvdTimeoutError */
#define HVD_ENOMEM    -8  /* MemoryError; the text says of what and how much */
#define HVD_ESTATE    -9  /* not initialised, or shut down while the request was pending */
#define HVD_EFORK     -10 /* called in a forked child */
#define HVD_EHANDLE   -11 /* stale or unknown handle: ValueError */
#define HVD_EINTERNAL -12 /* our own mistake; please report */
#define HVD_EFULL     -13 /* internal: a table is full, come again; never leaves the core */

/* Kinds of collective. */
#define HVD_ALLREDUCE     0
#define HVD_ALLGATHER     1
#define HVD_BROADCAST     2
#define HVD_BARRIER       3
#define HVD_JOIN          4
#define HVD_ALLTOALL      5
#define HVD_REDUCESCATTER 6
#define HVD_REDUCE        7 /* an allreduce whose result only the root wants */
#define HVD_SEND          8 /* point-to-point: from rank root to rank peer of the set; only these two submit it. */
                            /* Always named: the two find each other by root, peer and name */

/* How quietly a request is submitted. */
#define HVD_NOW 0 /* the engine is woken for it */
#define HVD_QUIET \
    1              /* nobody is woken: the caller soon waits for it, submits one that is not quiet, or calls hvd_kick */
#define HVD_SOON 2 /* nobody is woken, but it is sent by itself within a millisecond (a large one at once) */

#define HVD_DIMS_MAX 8
#define HVD_NAME_MAX 255 /* bytes of a tensor name that errors can show; longer names are hashed whole */
#define HVD_TEXT_MAX 2048

/* What hvd_init needs to know. Python fills it from the `config` table; 0 means "default" for limits. */
struct hvd_options {
    int rank, size;
    int local_rank, local_size; /* the ranks of a host are counted in the order of their ranks in the job */
    int cross_rank, cross_size;
    uint64_t job;          /* the same on all ranks of a job, differs between jobs */
    uint64_t epoch;        /* counts the inits of a job */
    uint8_t secret[32];    /* proves that a local socket belongs to the job */
    int store_fd;          /* connected, authenticated store connection or -1: abort records go out on it,
                              "rank k is lost" frames come in; lent until hvd_shutdown returns */
    int32_t shared_memory; /* 0: memfd where it can be had; 1: /dev/shm, whose size limits it */
    int64_t fusion_bytes;  /* agreed; bytes in one bucket at most, 0 = no fusion */
    int32_t slots_max;     /* agreed; known tensors at most */
    int32_t deterministic; /* agreed; 1: only ways of adding floats whose bits do not depend on timing or buckets */
    int32_t start_timeout_ms;
    int32_t leave_timeout_ms; /* how long shutdown waits for the others to acknowledge: 2000 */
    int32_t spin_us;          /* how long a turn spins before it sleeps; -1 = decide from CPUs and ranks */
    int32_t trace_events;     /* ring size, power of two */
    int32_t peer_timeout_ms;  /* how long a rank of another host may be silent while it is waited for; 0: 30000 */
    const char *plane;        /* agreed; the name of the plane that does what it can do; NULL: the best that works */
    const char *algo;         /* agreed; the algorithm that p2p uses wherever it can; NULL: the cheapest */
    uint64_t link_alpha_ns;   /* agreed; of a message between hosts: how long it takes to arrive */
    uint64_t link_beta_ps;    /* agreed; and how long each byte of it keeps the wire busy. Both 0: they are measured */
    int32_t shares_gpus;      /* 1: NCCL was told in this process that ranks may share a GPU */
    uintptr_t mpi_comm; /* an MPI communicator of all ranks, from hvd_mpi_comm; lent until hvd_shutdown. 0: none */
    /* Several hosts, or plane p2p: what Python has connected, by rank, -1 where there is nothing. NULL: none at all.
     * The descriptors belong to the core from the call on, whatever comes of it. */
    const int *tensor_fd;         /* a stream to every other rank, for the tensors of the global set */
    const int *vote_fd;           /* a stream to each rank that hvd_vote_peers names; NULL: over mpi_comm */
    const int *host_of;           /* the number of each rank's host; NULL: all ranks are on one */
    const char *const *host_name; /* what errors call the host of each rank; NULL: nothing */
};

/* Does this build have a plane and an algorithm of these names? NULL asks for none. HVD_OK, or HVD_EINIT and which
 * there are: what hvd_init would say, for a caller whose ranks are to say it all at once. Needs no init. */
int hvd_named(const char *plane, const char *algo, char *text, size_t text_bytes);

/* allgather: every rank gives `bytes` bytes, all[rank * bytes] receives them in rank order. May block.
 * Returns HVD_OK or a negative code with the reason in text. Implemented in Python over the store. */
typedef int hvd_boot_allgather(void *self, const void *mine, size_t bytes, void *all, char *text, size_t text_bytes);

struct hvd_request {
    const char *name; /* NULL: unnamed, matched by order of submission */
    int kind, op, dtype;
    int root; /* broadcast, reduce: rank inside the process set; send: the sender; alltoall: only compared (gather) */
    int peer; /* send: the receiver, a rank inside the process set; 0 for all other kinds */
    int ndim;
    int64_t dims[HVD_DIMS_MAX];
    double prescale, postscale;
    const void *input;     /* contiguous; NULL only for barrier, join and zero elements */
    void *output;          /* allreduce, broadcast: same size as the input, may be the input itself. reduce: NULL on
                              others than the root. reducescatter: this rank's rows (dims[0] / size, the first
                              dims[0] % size ranks have one more). send: the receiver's, of the same dims.
                              allgather, alltoall: NULL, the engine allocates (hvd_result, on a device hvd_fetch) */
    const int64_t *splits; /* alltoall: rows of the input for each rank of the set, in order, sum <= dims[0]; lent
                              until the handle is finished. NULL: dims[0] in equal parts */
    int splits_count;      /* entries of splits */
    int process_set;       /* 0: all ranks; else a number from hvd_set_open */
    int quiet;             /* HVD_NOW, HVD_QUIET or HVD_SOON. Forgotten it is not lost: polls and peers send it, too */
    int32_t priority;      /* the same on all ranks; of what is ready together, greater goes first */
    uint64_t group;        /* 0: none; all members of a group become ready together */
    int group_count;
    int device;  /* 0: the memory is the CPU's; k + 1: that of CUDA's device k. The same kind of memory on all ranks */
    void *ready; /* on a device: a CUevent after which the memory may be read and written; lent until the handle is
                    finished. NULL: it may now */
};

/* The result of a ragged collective. Valid until hvd_forget or hvd_shutdown. */
struct hvd_output {
    void *data;
    int64_t bytes;
    int64_t rows;           /* first dimension of the result; join: the rank that joined last */
    const int64_t *rows_of; /* rows that came from each rank of the set, `size` entries */
    int size;               /* of the process set */
};

/* Life. hvd_init blocks until all ranks have met or start_timeout_ms is over. */
int hvd_init(const struct hvd_options *options, hvd_boot_allgather *allgather, void *self, char *text,
             size_t text_bytes);
int hvd_shutdown(void); /* agreed by votes; bounded by leave_timeout_ms; HVD_OK also when not initialised */
int hvd_abort(int culprit, int code,
              const char *reason); /* tell everyone why this job ends; first call of the job wins */
int hvd_initialized(void);         /* 1 or 0 */
int hvd_forked(void);              /* 1 in a forked child of a process that had called hvd_init */
/* 1 and what happened if the job has failed, or if hvd_init did (culprit -1: no rank in particular); 0 if not. */
int hvd_failure(int *culprit, int *code, char *text, size_t text_bytes);

/* Topology; negative HVD_ESTATE before init. */
int hvd_rank(void);
int hvd_size(void);
int hvd_local_rank(void);
int hvd_local_size(void);
int hvd_cross_rank(void);
int hvd_cross_size(void);

/* Which ranks does this one need streams for votes with, in a set or job of so many on these hosts? host_of: by rank.
 * Fills peers (up to 3 ranks) and returns how many. The same edges from both ends. */
int hvd_vote_peers(const int *host_of, int size, int rank, int *peers);

/* Process sets: some ranks, in ascending order, that run collectives of their own. All ranks of the job, members or
 * not, make the same calls in the same order, and the caller sees to two things: nobody submits to a set before
 * hvd_set_open has returned on all ranks, and nobody closes one before its last collective is over on all members
 * (Python exchanges over the global set). open returns the number of the set, which is the same on all ranks: the
 * lowest that is free. Where it fails on some ranks only (HVD_ENOMEM, say: /dev/shm is full), the others close theirs.
 * vote_fd, tensor_fd: as in hvd_options, by rank in the set; NULL on ranks that are no members.
 * A rank that is no member gets the number, too; submitting there is HVD_EINVAL. close fails what is outstanding in the
 * set on this rank. A shutdown leaves all sets of this rank; sets without it go on. */
int hvd_set_open(const int *ranks, int count, const int *vote_fd, const int *tensor_fd, char *text, size_t text_bytes);
int hvd_set_close(int process_set, char *text, size_t text_bytes);

/* Collectives. submit returns a handle > 0 or a negative code; it never waits for another rank.
 * The request is copied; tensor memory stays the caller's and must live until the handle is finished. */
int64_t hvd_submit(const struct hvd_request *request, char *text, size_t text_bytes);
/* Would submit take it, as far as this process can see alone? So that of a group all members are submitted or none. */
int hvd_check(const struct hvd_request *request, char *text, size_t text_bytes);
int hvd_kick(void);           /* what was submitted quietly is sent now; wakes the engine if it sleeps */
int hvd_poll(int64_t handle); /* HVD_OK: finished (well or not), HVD_AGAIN, HVD_EHANDLE */
int hvd_wait(int64_t handle, int timeout_ms, char *text, size_t text_bytes); /* HVD_OK, HVD_AGAIN, or why it failed */
int hvd_result(int64_t handle,
               struct hvd_output *output); /* after hvd_wait returned HVD_OK; ragged collectives and join */
/* On a device nobody waits for it: hvd_wait returns when the collective lies on a stream of the core's, and hvd_poll
 * says HVD_OK when it is done there. After hvd_wait returned HVD_OK: what is put on this stream of the tensor's device
 * (a CUstream as an integer) from now on comes after the collective. Of one in the CPU's memory it does nothing. */
int hvd_behind(int64_t handle, uintptr_t stream, char *text, size_t text_bytes);
/* And the result of a ragged collective there, which lies in memory of the core's until the handle is forgotten: copied
 * on this stream, behind the collective, to an address of the device with room for hvd_output's `bytes`. Nobody waits;
 * the handle may be forgotten at once. */
int hvd_fetch(int64_t handle, uintptr_t to, uintptr_t stream, char *text, size_t text_bytes);
int hvd_forget(int64_t handle); /* frees the slot and the engine's output; waits if the work is still in flight */

/* The short way, for what is called again and again. run submits what is like `like` but for its memory and `quiet`;
 * with wait_ms > 0 it waits so long: HVD_OK, it is over and forgotten; > 0, the handle of what is still in flight;
 * negative, why it was refused or has failed. Waiting is not for kinds that have a hvd_result. finish is hvd_wait and,
 * unless that says HVD_AGAIN, hvd_forget. */
int64_t hvd_run(const struct hvd_request *like, uintptr_t input, uintptr_t output, int quiet, int wait_ms, char *text,
                size_t text_bytes);
int hvd_finish(int64_t handle, int timeout_ms, char *text, size_t text_bytes);

/* Proposes a size of buckets for the global set (others keep the option's). It rides in this rank's next vote and is in
 * force on all ranks from the plan of the round that decides it; of several proposed in one round, the greatest.
 * Returns when the engine knows, not when it is agreed. HVD_EINVAL: negative. fusion_bytes: what is in force on this
 * rank. */
int hvd_tune(int64_t fusion_bytes, char *text, size_t text_bytes);
int64_t hvd_fusion_bytes(void);

/* Buckets become ranges of NVTX, which NVIDIA's profilers show, from now to the end of the process. HVD_EINIT says why
 * this library will not do. */
int hvd_ranges(const char *library, char *text, size_t text_bytes);

/* GPUs. Neither CUDA's driver nor NCCL is loaded before the first tensor on a device is submitted. libraries: which
 * files to take then (NULL: by their names; NCCL's is not loaded where one is in the process already). notice: 1 and a
 * sentence, once, if tensors on devices go another way than by NCCL; else 0. */
void hvd_gpu_libraries(const char *cuda, const char *nccl);
int hvd_gpu_version(int which); /* 0: of CUDA's driver, such as 12040; 1: of NCCL, such as 22105; 0 if there is none */
int hvd_notice(char *text, size_t text_bytes);

/* Many at once, for a call of hundreds of small ones costs more than its work. submit_many: as hvd_submit for each, in
 * order; returns how many were taken. If that is less than count, text says why the next one was refused; handles of
 * the others are valid. The engine wakes once, if the last one taken is not quiet; quiet of the others means nothing.
 * wait_many: HVD_AGAIN, or all are finished: then all are forgotten, and HVD_OK or why the first of those that failed
 * did. What lies on a device's stream is done there by then, as after hvd_finish and hvd_run. Handles that are 0 are
 * passed over. None of them may be waited for or forgotten by others meanwhile. */
int hvd_submit_many(const struct hvd_request *const *requests, int count, int64_t *handles, char *text,
                    size_t text_bytes);
int hvd_wait_many(const int64_t *handles, int count, int timeout_ms, char *text, size_t text_bytes);

/* MPI, found at run time; none of these needs an engine, and one thread calls them at a time. open loads a library by
 * its name (or that of a module that is linked with it); HVD_EINIT says why it will not do. begin: MPI is initialized
 * afterwards with MPI_THREAD_MULTIPLE, by whoever was first. end: finalizes it if begin had initialized it, or with an
 * abort_code ends all ranks of MPI_COMM_WORLD. word: 0 the ABI, 1 the version, 2 the library; NULL before open. */
int hvd_mpi_open(const char *library, char *text, size_t text_bytes);
int hvd_mpi_begin(char *text, size_t text_bytes);
int hvd_mpi_running(void); /* 0: not loaded, not initialized or finalized; 1: by somebody else; 2: begin did it */
void hvd_mpi_end(int abort_code);
const char *hvd_mpi_word(int which);
/* Communicators are handles of that MPI as integers; 0 is MPI_COMM_WORLD. comm: a duplicate of `from`, or with `ranks`
 * one of those of its ranks, in that order (only they call). Errors on it are returned, not fatal. exchange:
 * all[rank * bytes] gets every rank's bytes. Both return HVD_AGAIN after timeout_ms: call again with the same. */
int hvd_mpi_comm(uintptr_t from, const int *ranks, int count, int timeout_ms, uintptr_t *made, char *text,
                 size_t text_bytes);
void hvd_mpi_comm_free(uintptr_t comm);
/* The communicator of the process set that hvd_set_open opens next on this rank; lent until that is closed. 0: none. */
int hvd_mpi_comm_lend(uintptr_t comm);
int hvd_mpi_place(uintptr_t comm, int *rank, int *size);
int hvd_mpi_exchange(uintptr_t comm, const void *mine, size_t bytes, void *all, int timeout_ms, char *text,
                     size_t text_bytes);

/* Memory that a plane can move without a copy (shared by the ranks of this host). Freed by hvd_free,
 * also after shutdown. NULL when the plane has none to give. */
void *hvd_alloc(size_t bytes);
void hvd_free(void *memory);

/* Tables, so that Python never repeats them. i runs from 0; NULL or 0 past the end. */
const char *hvd_version(void);
int hvd_wire_version(void);
const char *hvd_dtype_name(int dtype);
int hvd_dtype_bytes(int dtype);
const char *hvd_op_name(int op); /* by its number; NULL: no such op (the numbers have holes) */
int hvd_op_number(int i);        /* number of the i-th op, negative past the end */
const char *hvd_plane_name(int i);
/* What a message between hosts costs, as options tell it: told or measured; the same on all ranks. Both 0: not known.
 */
int hvd_link_cost(uint64_t *alpha_ns, uint64_t *beta_ps);
const char *hvd_plane_used(void); /* the plane that the global set uses, NULL before init */

/* Trace ring: copies the newest events, oldest first; returns how many. */
struct hvd_event {
    uint64_t time_ns; /* CLOCK_MONOTONIC */
    uint32_t what;    /* see trace/trace.h */
    uint32_t tag;
    uint64_t value;
};
int hvd_trace(struct hvd_event *events, int count);
const char *hvd_trace_name(int what);

/* Counters since init, in the order that hvd_counter_name gives. */
const char *hvd_counter_name(int i);
int64_t hvd_counter(int i);

/* What has crossed the streams between this rank and another, which is a rank in the set, of tensors and of votes:
 * counts are bytes out and in, messages out and in. 1; 0: no stream leads there; HVD_ESTATE. */
int hvd_link_counts(int process_set, int peer, uint64_t *counts);

/* What this rank's memory is used for by the core, and how many bytes cost memory now; NULL past the end. */
const char *hvd_usage_name(int i);
int64_t hvd_usage_bytes(int i);

/* cffi: end */

#ifdef __cplusplus
}
#endif
#endif
