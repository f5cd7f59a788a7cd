"""Limits of connections that have not authenticated yet, for every port of a job.

The store, the rendezvous of hosts, the listeners of ranks, the proxy of hvd.rpc and hvd.ps, and the pages over HTTP all
accept by `accepted`. There is room for STRANGERS_MAX connections that have proved nothing. The oldest makes room for
the newest, so holding connections open locks no client out. Each has HANDSHAKE_S, and no more than BYTES_MAX of what it
sends is kept. Nothing here waits: one thread serves a port by non-blocking sockets.

What a client of a page over HTTP could prove there is nothing: it stays a stranger, and its time covers the request.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

HANDSHAKE_S = 5.0  # in which a connection must have proved itself
STRANGERS_MAX = 128  # connections of a port that have not
BYTES_MAX = 8192  # from a connection that has not
ACCEPTS_PER_TURN = 32
NO_DESCRIPTOR_S = 0.05  # how long accepting pauses when this process can open no more files

Stranger = TypeVar("Stranger")


def limit() -> float:
    """The time.monotonic() by which a connection that comes now must have proved itself."""
    return time.monotonic() + HANDSHAKE_S


def accepted(
    listener: socket.socket, strangers: Callable[[], Sequence[Stranger]], drop: Callable[[Stranger], Any]
) -> Iterator[socket.socket]:
    """Non-blocking sockets of connections that wait at `listener`, which does not block either.

    strangers: those that have proved nothing, oldest first; the caller adds each new one. drop: ends one of them.
    Raises OSError where no descriptor is left and no stranger can make room.
    """
    for _ in range(ACCEPTS_PER_TURN):
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except ConnectionError:  # gone before we looked
            continue
        except OSError:
            crowd = strangers()
            if not crowd:
                raise
            drop(crowd[0])
            return
        crowd = strangers()
        if len(crowd) >= STRANGERS_MAX:
            drop(crowd[0])
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock
