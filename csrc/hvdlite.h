/* hvdlite.h - the public C API of the core: the one contract between C and Python.
 *
 * cffi reads the part between the two marks below, so the header is written once: it holds plain declarations, literal
 * defines and enums only. dtype and op travel as int; their names and sizes are asked at import (hvd_dtype_name and
 * friends), so a new dtype or op is one X-macro row in kernel/. Rules that hold for every function:
 *   - Any thread may call any function; none is called with a lock of the core held.
 *   - The return value is HVD_OK (0), a positive answer where documented, or a negative HVD_E* code. Where there is a
 *     `text` argument, a failure writes one human sentence into it (NUL-terminated, cut at text_bytes): which rank,
 *     which tensor, what to do. The core never exits, prints or throws.
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
#define HVD_VERSION "0.2.0"

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
#define HVD_ENAN      -14 /* the NaN guard: a rank gave NaN or infinities to be reduced: HvdNotFiniteError */

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
#define HVD_NOW   0 /* the engine is woken for it */
#define HVD_QUIET 1 /* nobody is woken: the caller soon waits, submits one that is not quiet, or calls hvd_kick */
#define HVD_SOON  2 /* nobody is woken, but it is sent by itself within a millisecond (a large one at once) */
#define HVD_ASIDE 3 /* as HVD_SOON, and nobody waits: no limit of time ends the job, no report names who lacks it */

/* What the NaN guard does where a rank gives NaN or infinities to an allreduce, a reduce or a reducescatter. */
#define HVD_GUARD_OFF   0
#define HVD_GUARD_WARN  1 /* the collective goes on, and hvd_guarded tells */
#define HVD_GUARD_RAISE 2 /* it fails on all ranks, with HVD_ENAN */
#define HVD_GUARD_NAN   3 /* the same of NaN alone */

#define HVD_DIMS_MAX       8
#define HVD_NAME_MAX       255 /* bytes of a tensor name that errors can show; longer names are hashed whole */
#define HVD_TEXT_MAX       2048
#define HVD_KEY_PAIR_BYTES 64 /* keys of a connection, 32 bytes each: for what this end sends, for what it receives */

/* What hvd_init needs to know. Python fills it from the `config` table; 0 means "default" for limits. */
struct hvd_options {
    int rank, size;
    int local_rank, local_size; /* the ranks of a host are counted in the order of their ranks in the job */
    int cross_rank, cross_size;
    uint64_t job;       /* the same on all ranks of a job, differs between jobs */
    uint64_t epoch;     /* counts the inits of a job */
    uint8_t secret[32]; /* proves that a local socket belongs to the job */
    int store_fd;       /* connected, authenticated connection to the store, or to this rank's agent, or -1: abort
                           records go out on it, "rank k is lost" frames come in; lent until hvd_shutdown returns */
    const unsigned char *store_keys; /* HVD_KEY_PAIR_BYTES: frames there are signed (blake2b.h). NULL: they are not */
    uint64_t *store_counters; /* signed frames so far: sent, received. Lent likewise; the core goes on counting */
    int32_t shared_memory;    /* 0: memfd where it can be had; 1: /dev/shm, whose size limits it */
    int64_t fusion_bytes;     /* agreed; bytes in one bucket at most, 0 = no fusion */
    int32_t slots_max;        /* agreed; known tensors at most */
    int32_t deterministic;    /* agreed; 1: only ways of adding floats whose bits do not depend on timing or buckets */
    int32_t nan_guard;        /* agreed; HVD_GUARD_* */
    int32_t start_timeout_ms;
    int32_t leave_timeout_ms;      /* how long shutdown waits for the others to acknowledge: 2000 */
    int32_t spin_us;               /* how long a turn spins before it sleeps; -1 = decide from CPUs and ranks */
    int32_t trace_events;          /* ring size, power of two */
    const char *trace_dir;         /* where flight records go; NULL: where hvd_dump says, and nowhere by themselves */
    int32_t trace_guarded;         /* 1: it and its parent are made if missing, and used only if this user's alone */
    int32_t trace_signal;          /* asks for a record; 0: none does */
    int64_t clock_offset_ns;       /* added to CLOCK_MONOTONIC here it is that of rank 0, */
    int64_t clock_error_ns;        /* give or take so many; -1: not known */
    int32_t peer_timeout_ms;       /* how long a rank of another host may be silent while it is waited for; 0: 30000 */
    int32_t stall_warn_ms;         /* a report is written when a collective has waited so long; 0: never */
    int32_t collective_timeout_ms; /* and the job ends when it has waited so long; 0: never */
    int32_t report_fd;             /* where who leads writes reports; lent until hvd_shutdown. -1: nowhere */
    int32_t stack_signal; /* a signal whose handler writes the stack of the main thread to stack_fd; 0: there is none */
    int32_t stack_fd;     /* a file of this process's own; lent until hvd_shutdown */
    const char *plane;    /* agreed; the name of the plane that does what it can do; NULL: the best that works */
    const char *algo;     /* agreed; the algorithm that p2p uses wherever it can; NULL: the cheapest */
    uint64_t link_alpha_ns; /* agreed; of a message between hosts: how long it takes to arrive */
    uint64_t link_beta_ps;  /* agreed; and how long each byte of it keeps the wire busy. Both 0: they are measured */
    int32_t shares_gpus;    /* 1: NCCL was told in this process that ranks may share a GPU */
    int32_t nccl_blocks;    /* 1: and that its calls shall block, with which it is not used */
    uintptr_t mpi_comm;     /* an MPI communicator of all ranks, from hvd_mpi_comm; lent until hvd_shutdown. 0: none */
    /* Several hosts, or plane p2p: what Python has connected, by rank, -1 where there is nothing. NULL: none at all.
     * The descriptors belong to the core from the call on, whatever comes of it. */
    const int *tensor_fd; /* a stream to every other rank, for the tensors of the global set */
    const int *vote_fd;   /* a stream to each rank that hvd_vote_peers names; NULL: over mpi_comm */
    const unsigned char *tensor_keys, *vote_keys; /* HVD_KEY_PAIR_BYTES for each rank, to sign what crosses; or NULL */
    const int *host_of;                           /* the number of each rank's host; NULL: all ranks are on one */
    const char *const *host_name;                 /* what errors call the host of each rank; NULL: nothing */
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
                              allgather, alltoall: NULL, or where the result shall lie if it has just output_bytes.
                              It lies in memory of the engine's if it has not, if the input overlaps that memory
                              (but for an allgather's at its own place in the result), and always on a device.
                              hvd_result says where (on a device hvd_fetch copies it) */
    int64_t output_bytes;  /* allgather, alltoall: bytes at output. It may differ between ranks, as may output */
    const int64_t *splits; /* alltoall: rows of the input for each rank of the set, in order, sum <= dims[0]; lent
                              until the handle is finished. NULL: dims[0] in equal parts */
    int splits_count;      /* entries of splits */
    int even;              /* allgather, alltoall without splits: 1 on all ranks: dims[0] is compared, no rank asks for
                              counts, and hvd_run may wait: the caller sees to it that the result comes to output */
    int process_set;       /* 0: all ranks; else a number from hvd_set_open */
    int quiet; /* HVD_NOW, HVD_QUIET, HVD_SOON or HVD_ASIDE. Forgotten it is not lost: polls and peers send it, too */
    int32_t priority; /* the same on all ranks; of what is ready together, greater goes first */
    uint64_t group;   /* 0: none; all members of a group become ready together */
    int group_count;
    int device;  /* 0: the memory is the CPU's; k + 1: that of CUDA's device k. The same kind of memory on all ranks */
    void *ready; /* on a device: a CUevent after which memory may be touched; lent until finished. NULL: it may now */
    uint64_t not_finite; /* on a device, for the NaN guard: what the caller has found there, NaN << 32 | infinities */
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
/* Agreed by votes, bounded by leave_timeout_ms. HVD_AGAIN: not within wait_ms (-1: as long as it takes), call again. */
int hvd_shutdown(int wait_ms);
int hvd_abort(int culprit, int code, const char *reason); /* why the job ends, told to all; the first call wins */
int hvd_script_ended(void); /* tells the launcher that this rank's script has ended and exit handlers run */
int hvd_initialized(void);  /* 1 or 0 */
int hvd_forked(void);       /* 1 in a forked child of a process that had called hvd_init */
/* 1 and what happened if the job has failed, or if hvd_init did (culprit -1: no rank in particular); 0 if not. */
int hvd_failure(int *culprit, int *code, char *text, size_t text_bytes);
int hvd_left(void); /* the other rank that was the first to leave, agreed, of this one's sets; negative: none has */
/* Topology; negative HVD_ESTATE before init. */
int hvd_rank(void), hvd_local_rank(void), hvd_cross_rank(void);
int hvd_size(void), hvd_local_size(void), hvd_cross_size(void);
/* Rank, size, local rank and local size (0 to 3) as users see them: while a process is alone in a core of its own,
 * until it joins its job, those that it was told to expect (lent until the next call; NULL: no more). */
int hvd_place(int what);
void hvd_tell_place(const int *place);

/* Which ranks does this one need streams for votes with, in a set or job of so many on these hosts? host_of: by rank.
 * Fills peers (up to 3 ranks) and returns how many. The same edges from both ends. */
int hvd_vote_peers(const int *host_of, int size, int rank, int *peers);
/* Process sets: some ranks, in ascending order, that run collectives of their own. All members open a set and close it,
 * in an order that fits those of the other sets, and the caller sees to three things. They give the same number, 1 to
 * 255, which is free on all of them, and the same life, greater than all that one of them has given before. Nobody
 * submits to a set before hvd_set_open has returned on all members, and nobody closes one before its last collective is
 * over on all members. Where open fails on some only (HVD_ENOMEM, say: /dev/shm is full), the others close theirs.
 * vote_fd, tensor_fd, their keys: as in hvd_options, by rank in the set; NULL on ranks that are no members.
 * A rank that is no member may open the set, too, to know of it: then the number is not free there, and submitting is
 * HVD_EINVAL with the ranks. close fails what is outstanding in the set on this rank. A shutdown leaves all sets of
 * this rank; sets without it go on. */
int hvd_set_open(int number, uint32_t life, const int *ranks, int count, const int *vote_fd, const int *tensor_fd,
                 const unsigned char *vote_keys, const unsigned char *tensor_keys, char *text, size_t text_bytes);
int hvd_set_close(int process_set, char *text, size_t text_bytes);

/* Collectives. submit returns a handle > 0 or a negative code; it never waits for another rank.
 * The request is copied; tensor memory stays the caller's and must live until the handle is finished. */
int64_t hvd_submit(const struct hvd_request *request, char *text, size_t text_bytes);
/* Would submit take it, as far as this process can see alone? So that of a group all members are submitted or none. */
int hvd_check(const struct hvd_request *request, char *text, size_t text_bytes);
int hvd_kick(void);           /* what was submitted quietly is sent now; wakes the engine if it sleeps */
int hvd_poll(int64_t handle); /* HVD_OK: finished (well or not), HVD_AGAIN, HVD_EHANDLE */
/* Whose part of this collective is missing? Asks all ranks, and waits for their answers so many milliseconds at most:
 * HVD_OK and a text, HVD_AGAIN: it is not known, or it has ended meanwhile, or HVD_EHANDLE. The time limits of the job
 * pass this request by from now on, also with wait_ms 0, which asks nobody. With wait_ms -1 they hold again: HVD_OK.
 * asked: 0 at first, and after HVD_AGAIN what was left there. */
int hvd_missing(int64_t handle, int wait_ms, uint64_t *asked, char *text, size_t text_bytes);
int hvd_wait(int64_t handle, int timeout_ms, char *text, size_t text_bytes); /* HVD_OK, HVD_AGAIN, or why it failed */
int hvd_result(int64_t handle, struct hvd_output *output); /* after HVD_OK of hvd_wait; ragged collectives, join */
/* On a device nobody waits for it: hvd_wait returns when the collective lies on a stream of the core's, and hvd_poll
 * says HVD_OK when it is done there. After hvd_wait returned HVD_OK: what is put on this stream of the tensor's device
 * (a CUstream as an integer) from now on comes after the collective. Of one in the CPU's memory it does nothing. */
int hvd_behind(int64_t handle, uintptr_t stream, char *text, size_t text_bytes);
/* And the result of a ragged collective there, which lies in memory of the core's until the handle is forgotten: copied
 * on this stream, behind the collective, to an address there with room for its `bytes`; then it may be forgotten. */
int hvd_fetch(int64_t handle, uintptr_t to, uintptr_t stream, char *text, size_t text_bytes);
int hvd_forget(int64_t handle); /* frees the slot and the engine's output; HVD_AGAIN: the work is still in flight */

/* The short way, for what is called again and again. `owner` exists before the call: an exception right after it loses
 * no handle. run submits what is like `like` but for its memory and `quiet`, and waits for wait_ns nanoseconds,
 * not for kinds that have a hvd_result: HVD_OK, over and forgotten; HVD_AGAIN, in flight; else why it was refused or
 * has failed. finish is hvd_wait and, unless that says HVD_AGAIN, hvd_forget; of what is over it says again how it
 * ended. */
struct hvd_owner {
    int64_t handle; /* 0: nothing is under way, and `code` says how it ended */
    int code;
};
int hvd_run(const struct hvd_request *like, uintptr_t input, uintptr_t output, int quiet, int64_t wait_ns,
            struct hvd_owner *owner, char *text, size_t text_bytes);
int hvd_finish(struct hvd_owner *owner, int64_t wait_ns, char *text, size_t text_bytes);

/* Proposes a size of buckets for the global set (others keep the option's). It rides in this rank's next vote and is in
 * force on all ranks from the plan of the round that decides it; of several proposed in one round, the greatest.
 * Returns when the engine knows, not when it is agreed. HVD_EINVAL: negative. fusion_bytes: what is in force here. */
int hvd_tune(int64_t fusion_bytes, char *text, size_t text_bytes);
int64_t hvd_fusion_bytes(void);

/* The NaN guard, when it warns: how many tensors it has told of since it was asked last (0: none), and of the first of
 * these the sentence, which is the same on all ranks: which tensor, which ranks had how many. */
int hvd_guarded(char *text, size_t text_bytes);

/* GPUs. Neither CUDA's driver nor NCCL is begun before the first tensor on a device is submitted. libraries: which
 * files to take then (NULL: by their names; NCCL's is not loaded where one is in the process already). notice: 1 and a
 * sentence, once, on the first rank of a set whose tensors on devices go another way than by NCCL; else 0. */
void hvd_gpu_libraries(const char *cuda, const char *nccl);
int hvd_gpu_version(int which); /* 0: CUDA's driver, as 12040; 1: NCCL, as 22105; 2: hangs one? */
int hvd_notice(char *text, size_t text_bytes);

/* Many at once, which costs less. submit_many: as hvd_submit for each, in order; returns how many were taken; if these
 * are not all, text says why the next one was refused. The engine wakes once, if the last one taken is not quiet; quiet
 * of the others means nothing. wait_many: HVD_AGAIN, or all are done, on their devices, too, and forgotten: HVD_OK, or
 * why the first of those that failed did. Each owner is told its own end: asked again, it is what they know. */
int hvd_submit_many(const struct hvd_request *const *requests, int count, struct hvd_owner *owners, char *text,
                    size_t text_bytes);
int hvd_wait_many(struct hvd_owner *owners, int count, int timeout_ms, char *text, size_t text_bytes);

/* MPI, found at run time; none of these needs an engine, and one thread calls them at a time. open loads a library by
 * its name (or that of a module that is linked with it); HVD_EINIT says why it will not do. begin: MPI is initialized
 * afterwards with MPI_THREAD_MULTIPLE, by whoever was first. end: finalizes it if begin had initialized it, or with an
 * abort_code ends all ranks of MPI_COMM_WORLD. exit: a function that ends this process with that code, and leaves MPI
 * as it is; to be called instead of an MPI_Finalize that would wait for ranks that are gone. word: 0 the ABI, 1 the
 * version, 2 the library; NULL before open. */
int hvd_mpi_open(const char *library, char *text, size_t text_bytes);
int hvd_mpi_begin(char *text, size_t text_bytes);
int hvd_mpi_running(void); /* 0: not loaded, not initialized or finalized; 1: by somebody else; 2: begin did it */
void hvd_mpi_end(int abort_code);
void (*hvd_mpi_exit(int code))(void);
const char *hvd_mpi_word(int which);
/* Communicators are handles of that MPI as integers; 0 is MPI_COMM_WORLD. comm: a duplicate of `from`, or with `ranks`
 * one of those of its ranks, in that order (only they call). Errors on it are returned, not fatal. exchange:
 * all[rank * bytes] gets every rank's bytes. Both return HVD_AGAIN after timeout_ms: call again with the same. poke, by
 * any thread: MPI is called for nothing but to be called; what is over here may owe others bytes that leave then. */
int hvd_mpi_comm(uintptr_t from, const int *ranks, int count, int timeout_ms, uintptr_t *made, char *text,
                 size_t text_bytes);
void hvd_mpi_poke(uintptr_t comm);
void hvd_mpi_comm_free(uintptr_t comm);
/* Of the process set that hvd_set_open opens next here; lent until it is closed. 0: none. */
int hvd_mpi_comm_lend(uintptr_t comm);
int hvd_mpi_place(uintptr_t comm, int *rank, int *size);
int hvd_mpi_exchange(uintptr_t comm, const void *mine, size_t bytes, void *all, int timeout_ms, char *text,
                     size_t text_bytes);

/* Memory that a plane can move without a copy. Freed by hvd_free, also after shutdown. NULL: the plane has none. */
void *hvd_alloc(size_t bytes);
void hvd_free(void *memory);

/* Gradients that PyTorch allocates in such memory (torch/gradient_allocator.c). give: blocks for `counts` gradients of
 * each size in tasks that reach one of `nodes`; the number of the slab, -1: none. end: no more of that slab. */
uintptr_t hvd_grad_alloc_open(uintptr_t allocator, uintptr_t task, uintptr_t in_task, uintptr_t chosen);
int hvd_grad_alloc_give(const uint64_t *bytes, const uint32_t *counts, int sizes, const uintptr_t *nodes, int count);
void hvd_grad_alloc_end(int slab);
int hvd_grad_alloc_has(uintptr_t memory);

/* Tables, so that Python never repeats them. i runs from 0; NULL or 0 past the end. */
const char *hvd_version(void);
int hvd_stream_version(void);
const char *hvd_dtype_name(int dtype);
int hvd_dtype_bytes(int dtype);
const char *hvd_op_name(int op); /* by its number; NULL: no such op (the numbers have holes) */
int hvd_op_number(int i);        /* number of the i-th op, negative past the end */
const char *hvd_plane_name(int i);
/* What a message between hosts costs, as options tell it: told or measured, the same on all ranks. 0, 0: not known. */
int hvd_link_cost(uint64_t *alpha_ns, uint64_t *beta_ps);
const char *hvd_plane_used(void); /* the plane that the global set uses, NULL before init */

/* Trace ring: copies the newest events, oldest first; returns how many. */
#define HVD_WHY_ABORT  1
#define HVD_WHY_ERROR  2
#define HVD_WHY_ASKED  3
#define HVD_WHY_SIGNAL 4
struct hvd_event {
    uint64_t time_ns; /* CLOCK_MONOTONIC */
    uint32_t what;    /* see trace/trace.h, also for the parts of value */
    uint32_t tag;
    uint64_t value;
};
int hvd_trace(struct hvd_event *events, int count);
/* A timeline: events become rows of JSON, in the format of chrome://tracing (trace/spans.h). One thread at a time.
 * open: all times grow by offset_ns; NULL: no memory. follow: takes what is new in the ring of this process, at most
 * some thousand events: how many, or HVD_ESTATE; the first call with a follower of zeros only notes where the ring is.
 * feed: an event of a record; `what` as in hvd_trace_name. end: what is open ends with the last event. take: the rows
 * since the last one, a comma and a new line before each, then `ending`, which *bytes does not count; valid until the
 * next call. NULL: there was no memory for all of them, and this timeline is over. */
struct hvd_spans;
struct hvd_follower {
    uint64_t from, room; /* number of the next event; how many the ring holds, 0: it has not been seen */
    uint64_t lost;       /* events that the ring had no room for until somebody asked */
};
struct hvd_spans *hvd_timeline_open(int rank, const char *title, int64_t offset_ns, int mark_cycles);
int hvd_timeline_follow(struct hvd_spans *spans, struct hvd_follower *follower);
void hvd_timeline_feed(struct hvd_spans *spans, uint64_t t_ns, int what, uint32_t tag, int set, uint64_t value,
                       const char *by, const char *name);
void hvd_timeline_end(struct hvd_spans *spans);
const char *hvd_timeline_take(struct hvd_spans *spans, const char *ending, size_t *bytes);
void hvd_timeline_close(struct hvd_spans *spans);
/* This host's name, and how its clock stands to that of rank 0: as the options have it. HVD_OK, HVD_ESTATE. */
int hvd_clock(int64_t *offset_ns, int64_t *error_ns, char *host, size_t host_bytes);
/* Writes the ring as rank-K.flight.json into the folder, NULL: into trace_dir. `text` is the file's path then. For
 * HVD_WHY_ERROR it is written by the engine's thread, at the latest when the engine ends, unless the job's failure has
 * been. HVD_EINVAL: there is no folder; or HVD_EINIT and why it cannot be written. */
int hvd_dump(const char *folder, int why, char *text, size_t text_bytes);
/* A file of records is about to be written at this path: what another life of a job has left there is renamed PATH.1,
 * .2 ... Whose life this is, to be told at the beginning of the file: "job":"%016x","epoch":%u. HVD_OK, HVD_ESTATE. */
int hvd_rotate(const char *path, uint64_t *job, uint64_t *epoch);
const char *hvd_trace_name(int what);

const char *hvd_counter_name(int i); /* of counters since init */
int64_t hvd_counter(int i);

/* Training steps: who trains says when one is over, and counts are kept for each (engine/flight_recorder/step_costs.h).
 * step returns its number, from 1; the first begins with init. found: it is a graph that says so, which does not count
 * (0) once somebody else has. optimizer_ns: of it, in the optimizer itself; 0: not known. data_waited: it was waited so
 * long for the data. arrived: this rank has submitted all that the step needs (the first call of a step counts).
 * step_name: the i-th number of a row; 0 past the end. step_row: the numbers of a step as it ended, counts since init;
 * 1, or 0 if it is not kept (any more). Of step 0: as they are now, the number being that of steps so far. */
int64_t hvd_step(int found, int64_t optimizer_ns);
void hvd_data_waited(int64_t ns);
void hvd_arrived(void);
int hvd_step_name(int i, char *text, size_t text_bytes);
int hvd_step_row(int64_t number, int64_t *values);

/* Of one step in so many (0: none), beginning with step `every`, each bucket is kept. buckets: those from number
 * `first` on, as far as they are kept; how many. */
#define HVD_BUCKET_NAMES      3
#define HVD_BUCKET_NAME_BYTES 96
struct hvd_bucket_seen {
    int64_t number, step, begin_ns, end_ns, bytes;      /* number: from 1; times: CLOCK_MONOTONIC */
    int tensors, carrier, process_set;                  /* carrier: the plane by its number, or past them: votes */
    char name[HVD_BUCKET_NAMES][HVD_BUCKET_NAME_BYTES]; /* of its first tensors, cut; empty: there are no more */
};
int hvd_look_closely(int64_t every, char *text, size_t text_bytes);
int hvd_buckets(int64_t first, struct hvd_bucket_seen *buckets, int count);

/* What has crossed the streams between this rank and another, which is a rank in the set, of tensors and of votes:
 * counts are bytes out and in, messages out and in. 1; 0: no stream leads there; HVD_ESTATE. */
int hvd_link_counts(int process_set, int peer, uint64_t *counts);

/* What this rank's memory is used for by the core, and how many bytes cost memory now; NULL past the end. */
const char *hvd_usage_name(int i);
int64_t hvd_usage_bytes(int i);

/* cffi: end */
#include "quantized.h"
#include "rows.h"

#ifdef __cplusplus
}
#endif
#endif
