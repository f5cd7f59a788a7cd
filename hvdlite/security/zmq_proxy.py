"""Proxy before ZeroMQ: libzmq bounds neither connections nor what a client sends before it has authenticated.

So a socket of hvd.rpc and hvd.ps listens at a unix socket, which the kernel opens to processes of the same user alone,
and members on the same host connect there. The port for the other hosts belongs to a `Proxy`, a thread that passes
bytes on. It opens a connection to ZeroMQ once the first byte is one of ZMTP, and counts until ZeroMQ has sent READY:
the client has proved then that it holds a key of the job (CURVE). Before that, connection_limits.py bounds number, time
and bytes.

The proxy keeps at most one block in each direction, and reads no more until it is sent. The price is a copy of what
other hosts send and receive; messages within a host do not pass through here.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from . import connection_limits

_BLOCK = 64 << 10
_FIRST = b"\xff"  # of a greeting of ZMTP
_READY = b"\x05READY"  # the name of the command by which a server ends the handshake
_HANDSHAKE_BYTES = 1024  # from ZeroMQ, within which it comes
_LAST_WORDS_S = 1.0  # for what ZeroMQ has sent before it closed


def listen(router: Any, host: str, named: Callable[[str], str]) -> Proxy:
    """Binds a socket of ZeroMQ to a unix socket behind a port at `host`. named: gives the (abstract) name of the unix
    socket behind an address. OSError: no port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=512)
    try:
        router.ipc_filter_uid = os.geteuid()
        router.backlog = 2 * connection_limits.STRANGERS_MAX
        host, port = listener.getsockname()[:2]
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        router.bind(f"ipc://@{named(address)}")
        return Proxy(listener, address, named(address))
    except BaseException:
        listener.close()
        raise


def local_address(address: str, name: str) -> str:
    """Where to connect to the socket behind a proxy: its unix socket if that is on this host, else the proxy."""
    with socket.socket(socket.AF_UNIX) as near, contextlib.suppress(OSError):
        near.settimeout(1.0)
        near.connect(f"\0{name}")
        if near.recv(1):  # nothing: it is another user's
            return f"ipc://@{name}"
    return address


class _Passage:
    """A connection from outside, and from its first byte on the one to ZeroMQ."""

    def __init__(self, sock: socket.socket) -> None:
        self.ends = [sock]  # the outer one, the inner one
        self.unsent = [b"", b""]  # to each
        self.deadline = connection_limits.limit()
        self.got, self.replied = 0, b""  # from outside, and by ZeroMQ, before the proof
        self.is_ending = False


class Proxy:
    """Passes on what comes to `listener` until `close`."""

    def __init__(self, listener: socket.socket, address: str, name: str) -> None:
        self.address = address  # what clients connect to
        self._listener, self._name = listener, name
        self._strangers: list[_Passage] = []  # oldest first
        self._passages: set[_Passage] = set()
        self._block = memoryview(bytearray(_BLOCK))
        self._paused: float | None = None
        self._end: float | None = None
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (listener, self._woken):
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="hvdlite proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Once ZeroMQ has closed its socket: what it has sent leaves before. Returns soon."""
        self._wake.send(b"\1")
        self._thread.join()
        for sock in (self._listener, self._woken, self._wake):
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while self._end is None or self._passages:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._selector.unregister(self._woken)
                    self._end = time.monotonic() + _LAST_WORDS_S
                    for passage in list(self._strangers):
                        self._drop(passage)
                    if self._paused is None:
                        self._selector.unregister(self._listener)
                    self._paused = None
                elif key.data[0] in self._passages:  # else it has been dropped in this very turn
                    self._serve_end(*key.data)
            now = time.monotonic()
            late = [each for each in self._strangers if each.deadline <= now]
            for passage in [*late, *(self._passages if self._end is not None and self._end <= now else ())]:
                self._drop(passage)
            if self._paused is not None and self._paused <= now:
                self._paused = None
                self._selector.register(self._listener, selectors.EVENT_READ)

    def _patience(self) -> float | None:
        times = [each.deadline for each in self._strangers[:1]]
        times += [each for each in (self._paused, self._end) if each is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self) -> None:
        try:
            for sock in connection_limits.accepted(self._listener, lambda: self._strangers, self._drop):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
                passage = _Passage(sock)
                self._strangers.append(passage)
                self._passages.add(passage)
                self._selector.register(sock, selectors.EVENT_READ, (passage, 0))
        except OSError:  # out of descriptors
            self._selector.unregister(self._listener)
            self._paused = time.monotonic() + connection_limits.NO_DESCRIPTOR_S

    def _serve_end(self, passage: _Passage, side: int) -> None:
        """Sends what waits for this end, and reads what it has sent unless the other one has no room."""
        try:
            if passage.unsent[side]:
                passage.unsent[side] = passage.unsent[side][passage.ends[side].send(passage.unsent[side]) :]
            if not passage.unsent[1 - side] and not passage.is_ending:
                self._pass_on(passage, side)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(passage)
            return
        if passage.is_ending and not any(passage.unsent):
            self._drop(passage)
        else:
            self._watch(passage)

    def _pass_on(self, passage: _Passage, side: int) -> None:
        block = self._block[: passage.ends[side].recv_into(self._block)]
        if passage in self._strangers:
            self._judge(passage, side, block)
        passage.is_ending = not block
        if block:
            try:
                block = block[passage.ends[1 - side].send(block) :]
            except BlockingIOError:
                pass
            passage.unsent[1 - side] = bytes(block)

    def _judge(self, passage: _Passage, side: int, block: memoryview) -> None:
        """Raises OSError for one that is to be dropped."""
        if side == 0:
            passage.got += len(block)
            if passage.got > connection_limits.BYTES_MAX or (len(passage.ends) == 1 and bytes(block[:1]) != _FIRST):
                raise OSError
            if len(passage.ends) == 1:
                inner = socket.socket(socket.AF_UNIX)
                passage.ends.append(inner)
                inner.setblocking(False)
                if inner.connect_ex(f"\0{self._name}") != 0:  # ZeroMQ has too many to accept: it is asked again
                    raise ConnectionError
        elif len(passage.replied) < _HANDSHAKE_BYTES:
            passage.replied += bytes(block[:_HANDSHAKE_BYTES])
            if _READY in passage.replied:
                self._strangers.remove(passage)

    def _watch(self, passage: _Passage) -> None:
        for side, sock in enumerate(passage.ends):
            reads = not passage.unsent[1 - side] and not passage.is_ending
            interest = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if passage.unsent[side] else 0)
            key = self._selector.get_map().get(sock)
            if (key.events if key is not None else 0) == interest:
                continue
            if not interest:
                self._selector.unregister(sock)
            elif key is None:
                self._selector.register(sock, interest, (passage, side))
            else:
                self._selector.modify(sock, interest, key.data)

    def _drop(self, passage: _Passage) -> None:
        self._passages.discard(passage)
        if passage in self._strangers:
            self._strangers.remove(passage)
        for sock in passage.ends:
            if sock in self._selector.get_map():
                self._selector.unregister(sock)
            sock.close()
