"""Streams between hosts: Python connects and authenticates; the core gets descriptors.

`listen` opens one listening socket per process and incarnation, on the address from which the route to the rendezvous
leaves; its packed form, `Listener.address`, goes to all ranks through the bootstrap's allgather. `connect` then makes
the streams of one purpose ("set 3 votes") with any number of ranks at once: of two ranks the smaller accepts and the
greater connects, and both call `connect`, in any order and as much later as they like within the deadline. A thread of
the listener accepts and authenticates as long as the listener is open, and keeps a stream until it is asked for.

Callers: hvdlite/lifecycle/init.py listens before the core is started, gathers the addresses and connects the
streams of all ranks; hvdlite/process_sets/process_set.py connects those of a set before the core opens it, on its
members alone. Both detach the sockets and give their descriptors to the core, which owns and closes them from then on:

    listener = links.listen((store_addr, store_port), secret, job, epoch, rank)
    addresses = store.allgather(listener.address)
    streams = links.connect(listener, {r: addresses[r] for r in others}, "set 0 votes", time.monotonic() + timeout)
    descriptors = {r: stream.detach() for r, stream in streams.items()}

A stranger, a half-open connection, a wrong secret, a replayed or reflected message, an earlier incarnation of the job:
none of them can join, and none can keep others from joining (security/handshake.py says how peers prove themselves,
peer_claim.py what).

Deliberately not here: what crosses the streams, encryption of it, and reconnecting (a lost stream is a lost peer).
"""

from .address import host_id, hosts_of
from .connector import connect
from .listener import Listener, listen

__all__ = ["Listener", "connect", "host_id", "hosts_of", "listen"]
