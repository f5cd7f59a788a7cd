/* link.h - a stream of bytes to one other rank: ordered, reliable, never blocking.
 *
 * One file csrc/link/x.c per transport, exporting only hvd_link_x. A link belongs to one process set and one peer: sets
 * that share a stream would wait for each other's bytes. It is made of what Python has connected and authenticated;
 * nothing here opens a connection. Calls come from the turn only. Every link counts what crosses it. A kind that needs
 * no descriptor is made by a function of its own (tests/c/netsim.h).
 */
#ifndef HVD_LINK_H
#define HVD_LINK_H

#include "../base/base.h"

struct hvd_link_counts {
    uint64_t bytes_out, bytes_in;
    uint64_t messages_out, messages_in; /* kept by who uses the link: it knows where a message ends */
};

struct hvd_link {
    const struct hvd_link_kind *kind;
    void *self;      /* the kind's own */
    int peer;        /* rank in the set */
    char called[96]; /* what errors call the peer */
    int fd;          /* to be watched; -1: none, ask again and again */
    bool wants_out;  /* the last send was cut short: tell when there is room again */
    bool over;       /* its end has been seen: to watch it would be news for ever */
    bool forged;     /* kind signed: what has come is not the peer's; nothing more is read, so do not watch for it */
    int unheard;     /* ticks of a clock in a row at which the peer's machine had not answered (silence.c) */
    /* The end of a message that somebody has begun to send and need not wait for: whoever sends next lets it leave
     * first (hvd_link_send_rest). It takes itself away when it has left. NULL: there is none. */
    int (*rest)(struct hvd_link *link, struct hvd_error *error);
    void *rest_of;
    struct hvd_link_counts counts;
};

struct hvd_link_signing {
    const unsigned char *keys; /* HVD_KEY_PAIR_BYTES */
    const char *what;          /* crosses: "votes", for errors; a literal */
};

struct hvd_link_kind {
    const char *name;
    /* Takes over a connected descriptor (switches it to non-blocking). Fails with HVD_EINIT. NULL: needs none. Kind
     * mpi: fd is -1, `self` the communicator, lent, and peer a rank of it; its close may wait, 1 s, for that of the
     * peer. Kind signed: `self` is a struct hvd_link_signing, lent for the call; HVD_ENOMEM, too. */
    int (*open)(struct hvd_link *link, int fd, int peer, struct hvd_error *error);
    /* As many of the bytes as go now; *moved may be 0. What was not moved is what is sent next: nothing may come
     * between. HVD_OK, or HVD_EPEER: the peer is gone, the link is dead. The error's culprit is the peer's rank in the
     * set. It may be asked again, and says the same. */
    int (*send)(struct hvd_link *link, const void *bytes, size_t count, size_t *moved, struct hvd_error *error);
    int (*recv)(struct hvd_link *link, void *bytes, size_t count, size_t *moved, struct hvd_error *error);
    /* HVD_EPEER if the peer has ended the stream, however much of it is still unread; else HVD_OK. */
    int (*ended)(struct hvd_link *link, struct hvd_error *error);
    /* A peer's machine that does not answer for so long ends the stream. unread: so does a peer that takes nothing of
     * what was sent; only for what is read at all times. */
    void (*give_up_after)(struct hvd_link *link, int ms, bool unread);
    /* Has its machine answered nothing for the last ms, though it was asked again for what is under way? A peer that is
     * slow to read does answer. May be so once by chance. */
    bool (*unheard)(struct hvd_link *link, int ms);
    /* This rank neither sends nor reads any more: what comes is thrown away. True: all that it has sent is with the
     * peer's machine, or never will be. To be asked again until then, or close may lose it. */
    bool (*settle)(struct hvd_link *link);
    void (*close)(struct hvd_link *link);
};

/* Before anything else is sent. HVD_OK: nothing is left; HVD_AGAIN: it cannot leave now; or as `send` has it. */
static inline int hvd_link_send_rest(struct hvd_link *link, struct hvd_error *error)
{
    return link->rest ? link->rest(link, error) : HVD_OK;
}

extern const struct hvd_link_kind hvd_link_tcp, hvd_link_signed, hvd_link_mpi;

#endif
