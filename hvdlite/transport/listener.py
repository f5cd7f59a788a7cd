"""Listener: a thread that accepts connections of peers, authenticates them and keeps them.

The listener trusts no peer before its proof, and waits for none. One thread serves all by epoll, and reads exactly the
bytes of the message that comes next (what follows CONFIRMED belongs to the core). security/connection_limits.py bounds
connections that have not proved themselves, and KEPT_MAX streams that no caller has claimed yet (a peer that finds no
room is asked to try again). Neither time nor number ends one that has proved itself: its peer may believe that it is
connected, however long one of the two processes was stopped. It ends with its connection, or when the same peer comes
later for the same.

`claim_streams` hands a stream to its caller, at once or when it comes. A rank that connects again for the
same purpose has given up the earlier stream: the newest is kept.

The thread shares two tables with callers, under one lock that is never held over a system call that could block. A
forked child has the descriptors and no thread: its `close` only closes them. An idle listener costs no CPU.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Collection
from typing import Any

from .._core import WIRE_VERSION
from ..errors import HvdInitError
from ..security import connection_limits, handshake
from . import address as addressing
from . import peer_claim

KEPT_MAX = 1024

Key = tuple[int, str]  # a peer's rank and the purpose


class Stream(socket.socket):
    """A connection to another rank, proved. keys: of what this side sends and of what it receives, 64 bytes."""

    keys = b""


class Delivery:
    """Streams that a caller of `connect` waits for. `fileno` is readable when some have come."""

    def __init__(self) -> None:
        self._news, self._bell = socket.socketpair()
        for end in (self._news, self._bell):
            end.setblocking(False)
        self._come: dict[Key, Stream] = {}
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._news.fileno()

    def put(self, key: Key, stream: Stream) -> None:
        """For the listener's thread."""
        with self._lock:
            self._come[key] = stream
            try:
                self._bell.send(b"\1")
            except BlockingIOError:  # it has rung often enough
                pass

    def take(self) -> dict[Key, Stream]:
        """What has come since the last call."""
        with self._lock:
            try:
                self._news.recv(4096)
            except BlockingIOError:
                pass
            come, self._come = self._come, {}
            return come

    def close(self) -> None:
        for stream in self.take().values():
            stream.close()
        self._news.close()
        self._bell.close()


class _Stranger:
    """A connection between accept and CONFIRMED."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.greeting = handshake.greeting()
        self.held = b""
        self.key: Key | None = None  # once it has proved itself
        self.keys = b""  # then, too


class Listener:
    """This rank's end for others to connect to. Made by `listen`, one per process and incarnation of the job."""

    address: bytes  # packed: what other ranks need to connect

    def __init__(
        self, sock: socket.socket, secret: bytes, mine: peer_claim.Claim, known: addressing.Address, scope: int
    ) -> None:
        self.address = addressing.pack(known)
        self.known = known
        self.secret, self.mine, self.scope = secret, mine, scope
        self._sock = sock
        self._pid = os.getpid()
        self._awaited: dict[Key, Delivery] = {}
        self._kept: dict[Key, Stream] = {}
        self._lock = threading.Lock()
        self._strangers: list[_Stranger] = []  # oldest first
        self._paused: float | None = None
        self._open = True
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (sock, self._woken):
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="hvdlite-links", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        """The rank that listens."""
        return self.mine.target

    def claim_streams(self, keys: Collection[Key], delivery: Delivery) -> None:
        """The streams of these peers and purposes go to `delivery`, now or when they come. ValueError if one is claimed
        already."""
        with self._lock:
            taken = [key for key in keys if key in self._awaited]
            if taken:
                raise ValueError(f"streams for {taken[0][1]!r} with rank {taken[0][0]} are being made already [HVD901]")
            for key in keys:
                stream = self._kept.pop(key, None)
                if stream is not None:
                    delivery.put(key, stream)
                else:
                    self._awaited[key] = delivery

    def give_up(self, keys: Collection[Key]) -> None:
        """No caller waits for these any more."""
        with self._lock:
            for key in keys:
                self._awaited.pop(key, None)

    def close(self) -> None:
        """Stops listening and closes the streams that no caller has claimed. Claimed streams stay open. May be called
        twice, and in a forked child, whose copies alone are closed then."""
        if not self._open:
            return
        self._open = False
        if os.getpid() == self._pid:
            self._wake.send(b"\1")
            self._thread.join()
        for stranger in self._strangers:
            stranger.sock.close()
        for sock in (*self._kept.values(), self._sock, self._woken, self._wake):
            sock.close()
        self._strangers, self._kept = [], {}
        self._selector.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._sock:
                    self._accept()
                elif key.fileobj is self._woken:
                    return  # only close() writes there
                elif key.data in self._strangers:
                    self._receive(key.data)
            now = time.monotonic()
            for stranger in self._unknown():
                if stranger.deadline > now:
                    break
                self._drop(stranger)
            if self._paused is not None and self._paused <= now:
                self._paused = None
                self._selector.register(self._sock, selectors.EVENT_READ)

    def _patience(self) -> float | None:
        times = [stranger.deadline for stranger in self._unknown()[:1]]
        times += [self._paused] if self._paused is not None else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self) -> None:
        try:
            for sock in connection_limits.accepted(self._sock, self._unknown, self._drop):
                stranger = _Stranger(sock, connection_limits.limit())
                self._strangers.append(stranger)
                self._selector.register(sock, selectors.EVENT_READ, stranger)
                self._send(stranger, stranger.greeting)
        except OSError:  # out of descriptors
            self._selector.unregister(self._sock)
            self._paused = time.monotonic() + connection_limits.NO_DESCRIPTOR_S

    def _unknown(self) -> list[_Stranger]:
        """Those that have not proved themselves, oldest first."""
        return [stranger for stranger in self._strangers if stranger.key is None]

    def _receive(self, stranger: _Stranger) -> None:
        """Reads what is there of the message that comes next, and not a byte more."""
        whole = peer_claim.ANSWER_BYTES if stranger.key is None else len(peer_claim.CONFIRMED)
        try:
            chunk = stranger.sock.recv(whole - len(stranger.held))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        stranger.held += chunk
        if not chunk:
            self._drop(stranger)
        elif len(stranger.held) < whole:
            return
        elif stranger.key is None:
            self._judge(stranger)
        elif stranger.held == peer_claim.CONFIRMED:
            self._admit(stranger, stranger.key)
        else:
            self._drop(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        answer, stranger.held = stranger.held, b""
        try:
            ends = handshake.ends_of(stranger.sock, connects=False)
        except OSError:  # it has gone
            self._drop(stranger)
            return
        reply, session = handshake.judge(self.secret, handshake.LINK, ends, stranger.greeting, answer, self._verdict_on)
        if session is None:
            if self._send(stranger, reply):
                self._drop(stranger)
            return
        claim = peer_claim.unpack(handshake.claim_of(answer))
        key = (claim.source, claim.purpose)
        if self._is_outdated(stranger, key):
            self._drop(stranger)
        elif self._send(stranger, reply):
            stranger.key, stranger.keys = key, session.keys

    def _verdict_on(self, packed: bytes) -> int:
        claim = peer_claim.unpack(packed)
        verdict = peer_claim.verdict_on(claim, self.mine)
        full = verdict == handshake.WELCOME and not self._has_room((claim.source, claim.purpose))
        return peer_claim.FULL if full else verdict

    def _is_outdated(self, stranger: _Stranger, key: Key) -> bool:
        """Has this peer come again for the same, later? If not, what it has begun earlier ends. Claims are heard in any
        order after a pause, but connections are accepted in theirs."""
        same = [each for each in self._strangers if each.key == key]
        if any(self._strangers.index(each) > self._strangers.index(stranger) for each in same):
            return True
        for each in same:
            self._drop(each)
        return False

    def _has_room(self, key: Key) -> bool:
        with self._lock:
            return key in self._awaited or key in self._kept or len(self._kept) < KEPT_MAX

    def _admit(self, stranger: _Stranger, key: Key) -> None:
        self._selector.unregister(stranger.sock)
        self._strangers.remove(stranger)
        stream = Stream(fileno=stranger.sock.detach())
        stream.setblocking(False)
        stream.keys = stranger.keys
        with self._lock:
            delivery = self._awaited.pop(key, None)
            if delivery is not None:
                delivery.put(key, stream)
                return
            earlier = self._kept.pop(key, None)
            self._kept[key] = stream
        if earlier is not None:
            earlier.close()

    def _send(self, stranger: _Stranger, message: bytes) -> bool:
        """A fresh connection has room for a message of ours; one that has none is no peer."""
        try:
            if stranger.sock.send(message) == len(message):
                return True
        except OSError:
            pass
        self._drop(stranger)
        return False

    def _drop(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        self._strangers.remove(stranger)
        stranger.sock.close()


def listen(
    towards: tuple[str, int] | None, secret: bytes, job: int, epoch: int, rank: int, wire: int = WIRE_VERSION
) -> Listener:
    """Listens on the address from which the route to `towards`, the rendezvous (store), leaves, IPv4 or IPv6; 127.0.0.1
    where the rendezvous is a unix socket (a path). None: there is no rendezvous; all addresses are published then.

    secret: 32 bytes that all ranks of the job know. Raises HvdInitError when there is no route or no port.
    """
    if len(secret) < 16:
        raise ValueError(f"a secret of {len(secret)} bytes is too short: use at least 16 [HVD111]")
    name: Any
    if towards is None:
        ips = addressing.everywhere()
        family, name = socket.AF_INET, ("0.0.0.0", 0)
        if any(":" in ip for ip in ips):
            family, name = socket.AF_INET6, ("::", 0, 0, 0)
    else:
        family, name = addressing.towards(towards, rank)
        ips = [name[0].partition("%")[0]]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:  # all addresses: those of IPv4, too
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, towards is not None)
        sock.bind(name)
        sock.listen(1024)
        port = sock.getsockname()[1]
    except OSError as error:
        sock.close()
        raise HvdInitError(
            f"rank {rank} on host {socket.gethostname()} cannot listen at {name[0]}, its address towards the "
            f"rendezvous ({error}): free a port, or raise the limit of open files (ulimit -n) [HVD114]"
        ) from None
    known = addressing.own_address([addressing.End(ip, port) for ip in ips], addressing.host_id())
    mine = peer_claim.Claim(wire, job, epoch, source=-1, target=rank, purpose="")
    return Listener(sock, secret, mine, known, name[3] if family == socket.AF_INET6 else 0)
