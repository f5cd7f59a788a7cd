"""How does a call get to another rank, and its answer back? Sockets of one thread, and a pool that does the work.

A ROUTER takes the calls of all ranks (also this one), a DEALER to each rank sends them; answers go back the same way.
All messages are under CURVE with keys of this job (_curve.py), and nothing else is unpickled. Who has something to
send puts it into a queue and rings a bell: neither waits, so that a Ref may be dropped anywhere, also in the middle of
a garbage collection. Calls are done by `threads` threads, and answers are unpickled by one more, never by the socket
thread: so counts of references are answered, and a dead rank is seen, whatever calls are doing.

The core watches the ranks. Ten times a second the socket thread asks it whether the job has failed, as long as an
answer is missing; every call under way raises then.

How it ends (hvd.shutdown): a rank waits for its own answers, says BYE to all, and serves until all have said so, or for
HVDLITE_LEAVE_TIMEOUT. What is left then fails, here and (GONE) on those who wait for this rank.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import queue
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from .. import _core, _files, _life, _opening, _sealed, config
from .._curve import Door, Keys, bounded, zmq_for
from .._gate import Gate
from ..errors import HvdError
from ..objects import allgather_object, broadcast_object
from .messages import TEXT_MAX, found, pickled, places, raised, taken, unpickled, whole
from .tables import Future, Kept, Waiting

_CALL, _UP, _DOWN, _HERE, _BYE = b"call", b"up", b"down", b"here", b"bye"  # to a rank
_VALUE, _ERROR, _COUNTED, _GONE = b"value", b"error", b"counted", b"gone"  # back from it
_LOOK_S = 0.1
_LINGER_MS = 1000  # for the last words of a rank
_IDLE_S = 60  # after which a connection shows that it is in use: firewalls forget those that are silent for minutes
_NUMBER = struct.Struct("<Q")


class Calls:
    """Of one life of the job, from `start` to `close`."""

    def __init__(self, threads: int, ref: Callable[[int, int], Any]) -> None:
        self.ref = ref
        self.rank, self.size, self.closed, self.kept = _core.rank(), _core.size(), False, Kept()
        self._limit = config.read(config.environ()).values["leave_timeout"]
        self._zmq = zmq_for("hvd.rpc")
        _files.allow(5 * self.size, f"rank {self.rank}", f"for calls of {self.size} ranks")  # 2 sockets each, 3 bells
        self._context = self._zmq.Context()
        self._context.max_sockets = self.size + 16
        self._gate: Gate | None = None
        try:
            self._open()
        except BaseException:
            self._context.destroy(linger=0)
            if self._gate is not None:
                self._gate.close()
            raise
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._rung.setblocking(False)
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()  # (rank, or a caller's name; frames)
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()  # calls of others
        self._back: queue.SimpleQueue[Any] = queue.SimpleQueue()  # answers to us
        self._waiting = Waiting()
        self._rounds = [0] * self.size  # how often each rank has begun to serve
        self._leaving = set[int]()  # ranks that have no more calls
        self._gone = set[int]()
        jobs = [("sockets", self._loop), ("answers", self._settle), *[("calls", self._work)] * threads]
        self._threads = [threading.Thread(target=job, name=f"hvd.rpc {name}", daemon=True) for name, job in jobs]

    def run(self) -> None:
        """This is the one that `running` gives; calls of others may begin."""
        for thread in self._threads:
            thread.start()

    def _open(self) -> None:
        """Binds, tells the others where, and connects to all."""
        zmq, ip = self._zmq, _opening.address()
        nonce = broadcast_object(os.urandom(32), 0, name="hvd.rpc.start")
        keys = Keys(hmac.digest(_sealed.current().key, nonce, "sha256"), "rpc", zmq)
        self._door = Door(self._context, keys, zmq)
        self._router = self._socket(zmq.ROUTER)
        keys.serve(self._router, self.rank)
        self._router.router_handover = 1  # a rank that connects again has the name that it had
        self._gate = keys.listen(self._router, ip)
        ends = allgather_object(self._gate.address, name="hvd.rpc.start")
        self._dealers = []
        for rank, end in enumerate(ends):
            dealer = self._socket(zmq.DEALER)
            dealer.routing_id = _name(self.rank)
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

    def begin(self, rank: int, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future:
        """Sends a call."""
        name, args, kwargs = whole(f, args, kwargs)
        body, refs = pickled(f"an argument of {name}", (name, args, kwargs))
        self._count_up(refs)
        return self._send(rank, name, _CALL, body, places(refs))

    def _send(self, rank: int, name: str, kind: bytes, body: bytes, refs: bytes = b"") -> Future:
        number, future = self._waiting.add(rank, name)
        self._put(rank, [_NUMBER.pack(number), kind, body, refs])
        if self.closed and self._waiting.taken(number) is not None:  # else the end of the loop has seen it
            future.set_exception(_not_running())
        return future

    def _put(self, to: Any, frames: list[bytes]) -> None:
        self._out.put((to, frames))
        try:
            self._bell.send(b"\0")
        except OSError:  # it rings already (its buffer is full), or nobody listens any more
            pass

    def _count_up(self, refs: list[Any]) -> None:
        """Returns when their owners have counted these references once more."""
        owners: dict[int, list[int]] = {}
        for ref in refs:
            owners.setdefault(ref.rank, []).append(ref._number)
        sent = [(self._send(rank, "a Ref", _UP, struct.pack(f"<{len(n)}Q", *n)), rank, n) for rank, n in owners.items()]
        counted, failed = list[tuple[int, int]](), None
        for future, rank, numbers in sent:
            try:
                future.result()
                counted += [(rank, number) for number in numbers]
            except HvdError as error:
                failed = error
        if failed is not None:
            for rank, number in counted:
                self.count_down(rank, number)
            raise failed

    def count_down(self, rank: int, number: int) -> None:
        """A reference is dropped. Never waits."""
        if not self.closed:
            self._put(rank, [_NUMBER.pack(0), _DOWN, _NUMBER.pack(number), b""])

    def serve(self) -> None:
        round_ = self._rounds[self.rank] + 1
        self._tell_all(_HERE)
        self._wait(lambda: all(n >= round_ or r in self._leaving | self._gone for r, n in enumerate(self._rounds)))
        failure = _core.failure_of_job()
        if failure is not None:
            raise _core.error_for(failure[1], failure[2])

    def _tell_all(self, kind: bytes) -> None:
        for rank in range(self.size):
            self._put(rank, [_NUMBER.pack(0), kind, _NUMBER.pack(self.rank), b""])

    def _wait(self, is_met: Callable[[], bool], until: float = math.inf) -> None:
        """Until then, or until the job has failed."""
        pause = 0.001
        while not (is_met() or self.closed or time.monotonic() >= until or _core.failure_of_job()):
            time.sleep(pause)
            pause = min(0.05, 1.5 * pause)

    def close(self, failed: bool) -> Callable[[], None]:
        """For hvd.shutdown."""
        until = time.monotonic() + self._limit * (not failed)
        self._wait(lambda: not self._waiting, until)
        self._tell_all(_BYE)
        self._wait(lambda: len(self._leaving) == self.size, until)
        return lambda: self._end(0 if failed else _LINGER_MS)

    def _end(self, linger_ms: int) -> None:
        global _running
        self._put(None, [_NUMBER.pack(linger_ms)])
        sockets, _, *pool = self._threads
        sockets.join()
        self._back.put(None)
        for _ in pool:
            self._todo.put(None)
        until = time.monotonic() + self._limit
        for thread in self._threads[1:]:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))  # a call that does not end is left alone
        _running = None

    # of the socket thread

    def _loop(self) -> None:
        poller, linger_ms = self._zmq.Poller(), 0
        for each in (self._router, self._door.socket, self._rung, *self._dealers):
            poller.register(each, self._zmq.POLLIN)
        ranks = {dealer: rank for rank, dealer in enumerate(self._dealers)}
        look, last = 0.0, None
        try:
            while last is None:
                for ready, _ in poller.poll(1000 * _LOOK_S if self._waiting else None):
                    if ready == self._rung.fileno():
                        last = self._send_all()
                    elif ready is self._door.socket:
                        self._door.turn()
                    elif ready is self._router:
                        self._take_call(*ready.recv_multipart())
                    else:
                        self._take_answer(ranks[ready], *ready.recv_multipart())
                if time.monotonic() > look:
                    look = time.monotonic() + _LOOK_S
                    self._look()
            (linger_ms,) = _NUMBER.unpack(last)
            for rank in set(range(self.size)) - self._leaving:
                self._router.send_multipart([_name(rank), _NUMBER.pack(0), _GONE, b"", b"", b""])
        finally:
            self.closed = True
            self._waiting.fail(_not_running)
            self._bell.close()
            self._rung.close()
            self._context.destroy(linger=linger_ms)
            if self._gate is not None:
                self._gate.close()

    def _send_all(self) -> bytes | None:
        """Sends what is in the queue; returns the last word."""
        self._rung.recv(4096)
        while True:
            try:
                to, frames = self._out.get_nowait()
            except queue.Empty:
                return None
            if to is None:
                return bytes(frames[0])
            if isinstance(to, bytes):
                self._router.send_multipart([to, *frames])
            elif to not in self._gone:
                self._dealers[to].send_multipart(frames)
            else:
                self._lose(to)
                self._drop(frames[3])

    def _drop(self, refs: bytes) -> None:
        """Counts down what was counted for a message that nobody gets."""
        for rank, number in taken(refs, lambda *place: place):
            self.count_down(rank, number)

    def _take_call(self, who: bytes, number: bytes, kind: bytes, body: bytes, refs: bytes) -> None:
        if kind == _CALL:
            self._todo.put((who, number, body, refs))
        elif kind == _BYE:
            self._leaving.update(_NUMBER.unpack(body))
        elif kind == _HERE:
            self._rounds[_NUMBER.unpack(body)[0]] += 1
        else:
            for (each,) in _NUMBER.iter_unpack(body):
                self._todo.put(self.kept.count(each, 1 if kind == _UP else -1))  # the pool frees it, if it is to be
            if kind == _UP:
                self._router.send_multipart([who, number, _COUNTED, b"", b"", b""])

    def _take_answer(self, rank: int, number: bytes, kind: bytes, body: bytes, text: bytes, refs: bytes) -> None:
        future = self._waiting.taken(*_NUMBER.unpack(number))
        if kind == _GONE:
            self._gone.add(rank)
            self._lose(rank)
        elif future is not None and kind == _COUNTED:
            future.set_result(None)
        elif future is not None:
            self._back.put((future, kind, body, text, refs))
        else:
            self._drop(refs)

    def _lose(self, rank: int) -> None:
        """It has left: perhaps because the job has failed."""
        self._look()
        self._waiting.lose(rank)

    def _look(self) -> None:
        failure = _core.failure_of_job() if self._waiting else None
        if failure is not None:
            self._waiting.fail(lambda: _core.error_for(failure[1], failure[2]))

    # of the pool, and of the thread for answers

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            if len(job) == 4:
                self._do(*job)
            del job  # it may hold a value that is to be freed now

    def _do(self, who: bytes, number: bytes, body: bytes, listed: bytes) -> None:
        name = "a call"
        try:
            name, args, kwargs = unpickled(f"a call to rank {self.rank}", body, taken(listed, self.ref))
            value = found(name)(*args, **kwargs)
            answer, refs = pickled(f"the result of {name} on rank {self.rank}", value)
            self._count_up(refs)
            frames = [number, _VALUE, answer, b"", places(refs)]
        except BaseException as error:  # also SystemExit: it is an error of the call, and this thread goes on
            text = traceback.format_exc()[-TEXT_MAX:]
            answer, refs = b"", []
            if isinstance(error, Exception):
                with contextlib.suppress(Exception):
                    itself, within = pickled("an exception", error)
                    self._count_up(within)
                    answer, refs = itself, within
            frames = [number, _ERROR, answer, text.encode("utf-8", "replace"), places(refs)]
            error.__traceback__ = None  # it may hold the arguments, and itself by them, until a garbage collection
        self._put(who, frames)

    def _settle(self) -> None:
        while (job := self._back.get()) is not None:
            future, kind, body, text, listed = job
            try:
                refs = taken(listed, self.ref)
                if kind == _ERROR:
                    raise raised(future.name, future.rank, body, text.decode(), refs)
                future.set_result(unpickled(f"the result of {future.name} on rank {future.rank}", body, refs))
            except Exception as error:
                future.set_exception(error)
            job = future = refs = None


def _name(rank: int) -> bytes:
    return b"rank %d" % rank


_running: Calls | None = None
_inherited: list[Any] = []  # what a forked child must neither use nor close


def start(threads: int = 8) -> None:
    """Let ranks call each other from now on. All ranks must call it, after ``hvd.init()``.

    It opens an encrypted connection to each rank and starts threads that run the calls of others. A second call does
    nothing. ``hvd.shutdown()`` ends it. It needs the package pyzmq.

    Args:
        threads (int): the number of calls of other ranks that run at once. A call that calls back needs one thread for
            each level. Default: 8.

    Raises:
        HvdNotInitializedError: ``hvd.init()`` has not been called.
        ModuleNotFoundError: pyzmq is not installed.
        ValueError: ``threads`` is less than 1.

    Example:
        >>> hvd.rpc.start(threads=4)
    """
    global _running
    if _running is not None:
        return
    _core.require_job()
    if threads < 1:
        raise ValueError(f"hvd.rpc.start needs at least one thread, not threads={threads} [HVD047]")
    from .references import Ref  # which knows calls

    _running = Calls(threads, Ref)
    _running.run()
    _life.closers.append(_running.close)


def running() -> Calls:
    """Raises HvdError where there is none."""
    if _running is None:
        _core.require_job()
        raise _not_running()
    return _running


def _not_running() -> HvdError:
    return HvdError("hvd.rpc is not running: call hvd.rpc.start() on all ranks, after hvd.init() [HVD040]")


def _in_child() -> None:
    global _running
    if _running is not None:
        _running.closed = True
        _inherited.append(_running)
        _running = None


os.register_at_fork(after_in_child=_in_child)
