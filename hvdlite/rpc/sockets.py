"""Sockets of calls: ZeroMQ to every other rank, which any thread may send by.

A ROUTER takes the messages of all ranks (also this one), a DEALER to each rank sends them. Answers go back this way.
All messages are under CURVE with keys of this job (security/curve.py).

What is to be sent goes into a queue. The thread that has put it there empties the queue, if no other holds the lock of
the sockets; else a bell tells the thread that receives to do it. `post` rings the bell always. It never waits and takes
no lock, so it may be called in the middle of a garbage collection. One thread, `loop`, receives. It waits
for the descriptors of the sockets without the lock. ZeroMQ makes such a descriptor readable once for all that has come,
and sending may use that up: then the sender rings.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ..ops.objects import allgather_object, broadcast_object
from ..process_sets import open
from ..security import signed_pickle
from ..security.curve import Door, Keys, bounded, zmq_for
from ..security.zmq_proxy import Proxy
from ..system import open_files
from ..system.interrupts import Deferred

Frames = list[bytes]
LOOK_S = 0.1
_AWAKE_S = 1.0  # of looking after the last call: the next one need not ring
_IDLE_S = 60  # after which a connection shows that it is in use: firewalls forget those that are silent for minutes
_FRAMES = 5  # of a message that has come: a call with its caller's name, or an answer with the text of an error
_AT_ONCE = 64  # messages that are received before they are looked at


class Sockets:
    """Of one incarnation of the job. lost(rank, frames): they cannot be sent, since that rank is gone."""

    def __init__(self, rank: int, size: int, lost: Callable[[int, Frames], None]) -> None:
        self.rank, self.size, self.left = rank, size, set[int]()
        self._lost, self._zmq = lost, zmq_for("hvd.rpc")
        open_files.allow(6 * size, f"rank {rank}", f"for calls of {size} ranks")  # 2 sockets each, 3 bells
        self._context = self._zmq.Context()
        self._context.max_sockets = size + 16
        self.proxy: Proxy | None = None
        try:
            self._open()
        except BaseException:
            self._context.destroy(linger=0)
            if self.proxy is not None:
                self.proxy.close()
            raise
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)
        self._out: queue.SimpleQueue[tuple[int | bytes, Frames]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_ending = self._is_over = self._is_deep = False

    def _open(self) -> None:
        """Binds, tells the others where, and connects to all."""
        zmq, ip = self._zmq, open.address()
        nonce = broadcast_object(os.urandom(32), 0, name="hvd.rpc.start")
        keys = Keys(hmac.digest(signed_pickle.current().key, nonce, "sha256"), "rpc", zmq)
        self.door = Door(self._context, keys, zmq)
        self._router = self._socket(zmq.ROUTER)
        keys.serve(self._router, self.rank)
        self._router.router_handover = 1  # a rank that connects again has the name that it had
        self.proxy = keys.listen(self._router, ip)
        ends = allgather_object(self.proxy.address, name="hvd.rpc.start")
        self._dealers = []
        for rank, end in enumerate(ends):
            dealer = self._socket(zmq.DEALER)
            dealer.routing_id = name_of(self.rank)
            keys.connect_to(dealer, rank)
            keys.connect(dealer, end)
            self._dealers.append(dealer)

    def _socket(self, kind: int) -> Any:
        made = self._context.socket(kind)
        bounded(made, 0)  # no heartbeats: the core watches ranks, and a rank that was stopped for a while loses nothing
        made.linger = 0
        made.tcp_keepalive, made.tcp_keepalive_idle = 1, _IDLE_S
        return made

    # of any thread

    def put(self, to: int | bytes, frames: Frames) -> None:
        """Sends to a rank, or an answer to the caller of that name."""
        with Deferred():
            self._out.put((to, frames))
            if self._is_deep or not self._lock.acquire(blocking=False):
                self._ring()
                return
            try:
                consumed = self._send_all()
            finally:
                self._lock.release()
            if consumed or not self._out.empty():
                self._ring()

    def post(self, to: int, frames: Frames) -> None:
        """Sends to a rank soon."""
        self._out.put((to, frames))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it rings already (its buffer is full), or it has no listener any more
            self._bell.send(b"\0")

    def _send_all(self) -> bool:
        """Empties the queue. Whether something has come for a socket that was used. Called with the lock."""
        used: set[Any] = set()
        while not self._is_over:
            try:
                to, frames = self._out.get_nowait()
            except queue.Empty:
                return any(each.get(self._zmq.EVENTS) & self._zmq.POLLIN for each in used)
            if isinstance(to, bytes):
                self._router.send_multipart([to, *frames])
                used.add(self._router)
            elif to not in self.left:
                self._dealers[to].send_multipart(frames)
                used.add(self._dealers[to])
            else:
                self._lost(to, frames)
        return False

    # of the thread that receives

    def loop(
        self,
        call: Callable[..., None],
        answer: Callable[..., None],
        look: Callable[[], bool],
        linger_ms: Callable[[], int],
    ) -> None:
        """Until `end`. call(name of the caller, *frames), answer(rank, *frames). look() tells whether calls are
        in flight, and is called ten times a second as long as they are. linger_ms(): of the last words."""
        waits, ways = select.poll(), {each.FD: each for each in (self._router, *self._dealers)}
        rank_of = {dealer: rank for rank, dealer in enumerate(self._dealers)}
        for each in (*ways, self.door.socket.FD, self._rung.fileno()):
            waits.register(each, select.POLLIN)
        next_look = busy = 0.0
        ready = {*ways.values()}
        try:
            while not self._is_ending:
                with self._lock:
                    consumed = self._send_all()
                    came = [(each, frames) for each in ready for frames in self._received(each)]
                self._admit()
                for each, frames in came:
                    if len(frames) != _FRAMES:  # nothing of ours
                        continue
                    if each is self._router:
                        call(*frames)
                    else:
                        answer(rank_of[each], *frames)
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + LOOK_S
                    busy = now if look() else busy
                if came or consumed:  # there may be more
                    ready = {*ways.values()} if consumed else {each for each, _ in came}
                    continue
                self._is_deep = now - busy > _AWAKE_S
                if self._is_deep and (look() or not self._out.empty()):  # since it was seen last
                    busy = now
                    continue
                numbers = [number for number, _ in waits.poll(None if self._is_deep else 1000 * LOOK_S)]
                busy = time.monotonic() if self._is_deep else busy
                self._is_deep = False
                ready = {ways[number] for number in numbers if number in ways}
                if self._rung.fileno() in numbers:
                    self._rung.recv(4096)
                    ready = {*ways.values()}
        finally:
            with self._lock:
                self._send_all()
                self._close(linger_ms())

    def _received(self, each: Any) -> list[Frames]:
        came: list[Frames] = []
        while len(came) < _AT_ONCE and each.get(self._zmq.EVENTS) & self._zmq.POLLIN:
            came.append(each.recv_multipart(self._zmq.NOBLOCK))
        return came

    def _admit(self) -> None:
        while self.door.socket.get(self._zmq.EVENTS) & self._zmq.POLLIN:
            self.door.turn()

    def end(self) -> None:
        """The thread that receives comes to its end. Any thread."""
        self._is_ending = True
        self._ring()

    def answer_last(self, rank: int, frames: Frames) -> None:
        """A last word as an answer to a rank: of the thread that receives, when it ends."""
        self._router.send_multipart([name_of(rank), *frames])

    def _close(self, linger_ms: int) -> None:
        self._is_over = True
        self._bell.close()
        self._rung.close()
        self._context.destroy(linger=linger_ms)
        if self.proxy is not None:
            self.proxy.close()


def name_of(rank: int) -> bytes:
    """By which a ROUTER knows a rank."""
    return b"rank %d" % rank
