"""A store in a thread, and ranks as plain clients of it: what the launcher and the ranks are to each other."""

import os
import socket
import threading
import time
from contextlib import contextmanager

import linking
from linking import JOB, SECRET, exactly

from hvdlite.launcher.store.server import StoreServer
from hvdlite.rendezvous import store_client
from hvdlite.security import framing, handshake

SECONDS = 20.0


class Served:
    """A StoreServer that a thread turns; calls into it are made between two turns, as the launcher does."""

    def __init__(self, size, servers=0, aggregators=0):
        self.aborts, self.missed = [], []
        told = {"on_abort": lambda *it: self.aborts.append(it), "on_late": lambda *it: self.missed.append(it)}
        self.store = StoreServer(size, SECRET, JOB, servers=servers, aggregators=aggregators, **told)
        self.address = self.store.address
        self._orders = []
        self._lock = threading.Lock()
        self._stop = False
        self.slowest_turn = 0.0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while not self._stop:
            with self._lock:
                orders, self._orders = self._orders, []
            for order in orders:
                order()
            began = time.thread_time()
            self.store.turn(0.01)
            self.slowest_turn = max(self.slowest_turn, time.thread_time() - began)

    def rank_ended(self, rank, text):
        self.between(lambda: self.store.rank_ended(rank, text))

    def between(self, call):
        """The thread makes this call next."""
        with self._lock:
            self._orders.append(call)

    def connect(self, rank, size, timeout=SECONDS, secret=SECRET, version="1.0", wire=1):
        return store_client.connect(
            *self.address, secret, rank=rank, size=size, version=version, wire=wire, timeout=timeout
        )

    def stop(self):
        self._stop = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the store does not turn any more"
        self.store.close()


@contextmanager
def served(size, servers=0, aggregators=0):
    """A store for a job of `size` ranks, with so many servers of tables and aggregators."""
    store = Served(size, servers, aggregators)
    try:
        yield store
    finally:
        store.stop()


def together(size, body):
    """Runs body(rank) for all ranks at once; their results, or exceptions, in rank order."""
    return linking.together([lambda rank=rank: body(rank) for rank in range(size)])


def stranger(store, shake_hands=False, secret=SECRET):
    """A bare connection to the store, before or after the handshake."""
    sock = Line(socket.create_connection(store.address, timeout=SECONDS))
    if shake_hands:
        sock.session = handshake.shake_hands(sock.sock, secret, handshake.STORE, time.monotonic() + SECONDS)
    return sock


class Line:
    """A connection that says what a test wants said. session: what signs its frames, after a handshake."""

    def __init__(self, sock):
        self.sock, self.session = sock, None

    def __getattr__(self, name):
        return getattr(self.sock, name)

    def say(self, kind, body=b""):
        self.sock.sendall(self.session.pack(kind, body))


def frame(sock):
    """(kind, body) of the next frame, or None at the end."""
    head = exactly(sock, sock.session.head_bytes)
    if len(head) < sock.session.head_bytes:
        return None
    return sock.session.opened(head + exactly(sock, framing.frame_length(head, sock.session)))


def joining(rank, size=2, **changes):
    """The kind and body of a JOIN frame."""
    import json

    says = {"rank": rank, "size": size, "pid": os.getpid(), "host": "here", "version": "1.0", "wire": 1, **changes}
    return framing.JOIN, json.dumps(says).encode()


def joined(store):
    """Two strangers with the secret that have joined as ranks 0 and 1."""
    both = [stranger(store, True), stranger(store, True)]
    for rank, each in enumerate(both):
        each.say(*joining(rank))
    assert [frame(each)[0] for each in both] == [framing.JOINED] * 2
    return both
