/* shared_memory.h - memory that several processes map, and how its descriptor travels.
 *
 * Segments are memfds, which no mount and no size of /dev/shm limits; the descriptor is passed over a unix
 * socket, so nothing has a name that could be left behind. Where memfd_create is refused, an unnamed
 * O_TMPFILE in /dev/shm takes its place, allocated in full at once: ftruncate alone succeeds on a full
 * tmpfs, and the first touch would kill the process.
 */
#ifndef HVD_BASE_SHARED_MEMORY_H
#define HVD_BASE_SHARED_MEMORY_H

#include "base.h"

enum hvd_memory_source { HVD_MEMORY_BEST, HVD_MEMORY_DEV_SHM };

/* Does this kernel, and what guards this process, allow memfds? */
bool hvd_memory_has_memfd(void);
/* A new descriptor of `bytes` zero-filled bytes, close-on-exec; negative HVD_E* on failure. */
int hvd_memory_create(size_t bytes, enum hvd_memory_source source, struct hvd_error *error);
/* The same, but its memory is not there yet: where `*reserved` is false every part of it must be reserved before it is
 * touched, or the first touch may kill the process. */
int hvd_memory_create_sparse(size_t bytes, enum hvd_memory_source source, bool *reserved, struct hvd_error *error);
int hvd_memory_reserve(int fd, size_t from, size_t bytes, struct hvd_error *error);
/* Whole pages read as zero again and their memory goes back. shared: they are mapped from a descriptor. */
void hvd_memory_clear(void *memory, size_t bytes, bool shared);
/* Map it, shared; NULL on failure. Pages cost memory when they are touched. */
void *hvd_memory_map(int fd, size_t bytes, struct hvd_error *error);
void hvd_memory_unmap(void *memory, size_t bytes);
/* For a forked child: the same mapping of `fd` from its beginning, but what is written from now on stays in this
 * process. Where that is refused, it can only be read. */
void hvd_memory_part(void *memory, size_t bytes, int fd);
/* Bytes `from` to `end` of `copy` become those of `memory`, where `fd` is mapped. What was never written is skipped.
 * Pages that are equal already are, too, unless the copy is `blank`: a forked child may share them. */
void hvd_memory_renew(char *copy, const char *memory, size_t from, size_t end, int fd, bool blank);
/* Move the mapping `with`, of hvd_memory_private, to where `memory` is mapped; false: both stay as they are. */
bool hvd_memory_replace(void *memory, size_t bytes, void *with);
/* How many bytes of whole pages in it cost memory now; for one mapping, of any kind. */
uint64_t hvd_memory_resident(const void *memory, size_t bytes);
/* Anonymous zero-filled memory of this process, sparse; NULL on failure. Freed by hvd_memory_unmap. */
void *hvd_memory_private(size_t bytes, struct hvd_error *error);

/* numa.c. The memory node that all CPUs of this thread belong to; -1: they are of several, or there is only one. The
 * same read from another folder than sysfs, for a cpu_set_t. */
int hvd_memory_node(void);
int hvd_node_of(const char *folder, const void *cpus);
/* Pages of this range that nobody has touched yet shall come from `node`, whoever touches them; false: refused. */
bool hvd_memory_prefer(void *memory, size_t bytes, int node);
/* Huge pages are welcome here, where the machine allows them. */
void hvd_memory_huge(void *memory, size_t bytes);

/* Send all of `bytes` and up to HVD_LOCAL_MAX descriptors in one go, or receive just that: every message has
 * a length and a number of descriptors that both sides know. Both block until deadline_ns (monotonic), wake up
 * when `watch` (-1: none) becomes readable, and fail with HVD_EPEER at end of file, HVD_ETIMEOUT, or HVD_AGAIN
 * when it was `watch` that spoke. Received descriptors are close-on-exec; a wrong number of them is closed and
 * refused with HVD_EINVAL, or with HVD_ENOMEM where the kernel cut them off, as this process may open no more. `done`
 * carries the bytes moved so far across HVD_AGAIN; it starts at 0. */
struct hvd_parcel {
    void *bytes;
    size_t length, done;
    int *fds;
    int fds_count;
};
int hvd_parcel_send(int socket, struct hvd_parcel *parcel, int watch, uint64_t deadline_ns);
int hvd_parcel_receive(int socket, struct hvd_parcel *parcel, int watch, uint64_t deadline_ns);

#endif
