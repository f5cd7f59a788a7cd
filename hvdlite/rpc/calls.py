"""Remote calls: a pool of threads runs them, and every call ends.

sockets.py sends and receives. A sender does not wait. Calls are done by `threads` threads. Answers are unpickled by the
thread that asks for the result, or by one more thread where callbacks wait for it, never by the thread that receives:
so counts of references are answered, and a dead rank is seen, whatever calls are doing. Nothing is unpickled that is
not of this job.

The core watches the ranks. Ten times a second the thread that receives asks it whether the job has failed, as long as
an answer is missing; every call in flight raises then.

How it ends (hvd.shutdown): a rank waits for its own answers, sends BYE to all, and serves until all have sent it, or
for HVDLITE_LEAVE_TIMEOUT. What is left then fails, here and (GONE) on ranks that wait for this one.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import struct
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import _core, config
from ..errors import HvdError
from ..lifecycle import init
from .call_tables import Future, Kept, Waiting
from .messages import TEXT_MAX, found, packed_refs, pickled, raised, taken, unpickled, whole
from .sockets import Sockets

_CALL, _UP, _DOWN, _HERE, _BYE = b"call", b"up", b"down", b"here", b"bye"  # to a rank
_VALUE, _ERROR, _COUNTED, _LEFT = b"value", b"error", b"counted", b"gone"  # back from it
_LINGER_MS = 1000  # for the last words of a rank
_NUMBER = struct.Struct("<Q")


class Calls:
    """Of one incarnation of the job, from `start` to `close`."""

    def __init__(self, threads: int, ref: Callable[[int, int], Any]) -> None:
        self.ref = ref
        self.rank, self.size, self.closed, self.kept = _core.rank(), _core.size(), False, Kept()
        self._limit = config.read(config.environ()).values["leave_timeout"]
        self.sockets = Sockets(self.rank, self.size, self._undelivered)
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()  # calls of others
        self._back: queue.SimpleQueue[Any] = queue.SimpleQueue()  # answers to us
        self._waiting = Waiting(self._finish)
        self._rounds = [0] * self.size  # how often each rank has begun to serve
        self._leaving = set[int]()  # ranks that have no more calls
        self._linger_ms = 0
        jobs = [("sockets", self._loop), ("answers", self._settle), *[("calls", self._work)] * threads]
        self._threads = [threading.Thread(target=job, name=f"hvd.rpc {name}", daemon=True) for name, job in jobs]

    def run(self) -> None:
        """This is the one that `running` gives; calls of others may begin."""
        for thread in self._threads:
            thread.start()

    # of any thread

    def begin(self, rank: int, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future:
        """Sends a call."""
        name, args, kwargs = whole(f, args, kwargs)
        body, refs = pickled(f"an argument of {name}", (name, args, kwargs))
        self._count_up(refs)
        if rank == self.rank and threading.current_thread() in self._threads:  # others of the pool may do the same
            number, future = self._waiting.add(rank, name)
            self._waiting.taken(number)
            self._settled(future, *self._answer(body, packed_refs(refs)))
            return future
        return self._send(rank, name, _CALL, body, packed_refs(refs))

    def _send(self, rank: int, name: str, kind: bytes, body: bytes, refs: bytes = b"") -> Future:
        number, future = self._waiting.add(rank, name)
        self.sockets.put(rank, [_NUMBER.pack(number), kind, body, refs])
        if self.closed and self._waiting.taken(number) is not None:  # else the end of the loop has seen it
            future.set_exception(_not_running())
        return future

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
            self.sockets.post(rank, [_NUMBER.pack(0), _DOWN, _NUMBER.pack(number), b""])

    def serve(self) -> None:
        round_ = self._rounds[self.rank] + 1
        self._send_all(_HERE)
        self._wait(
            lambda: all(n >= round_ or r in self._leaving | self.sockets.left for r, n in enumerate(self._rounds))
        )
        failure = _core.failure_of_job()
        if failure is not None:
            raise _core.error_for(failure[1], failure[2])

    def _send_all(self, kind: bytes) -> None:
        for rank in range(self.size):
            self.sockets.put(rank, [_NUMBER.pack(0), kind, _NUMBER.pack(self.rank), b""])

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
        self._send_all(_BYE)
        self._wait(lambda: len(self._leaving) == self.size, until)
        return lambda: self._end(0 if failed else _LINGER_MS)

    def _end(self, linger_ms: int) -> None:
        global _running
        self._linger_ms = linger_ms
        self.sockets.end()
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

    # of the thread that receives

    def _loop(self) -> None:
        try:
            self.sockets.loop(self._take_call, self._take_answer, self._look, self._last_words)
        finally:
            self.closed = True
            self._waiting.fail(_not_running)

    def _last_words(self) -> int:
        for rank in set(range(self.size)) - self._leaving:
            self.sockets.answer_last(rank, [_NUMBER.pack(0), _LEFT, b"", b"", b""])
        return self._linger_ms

    def _undelivered(self, rank: int, frames: list[bytes]) -> None:
        self._lose(rank)
        self._drop(frames[3])

    def _drop(self, refs: bytes) -> None:
        """Counts down what was counted for a message that is not delivered."""
        for rank, number in taken(refs, lambda *reference: reference):
            self.count_down(rank, number)

    def _take_call(self, source: bytes, number: bytes, kind: bytes, body: bytes, refs: bytes) -> None:
        if kind == _CALL:
            self._todo.put((source, number, body, refs))
        elif kind == _BYE:
            self._leaving.update(_NUMBER.unpack(body))
        elif kind == _HERE:
            self._rounds[_NUMBER.unpack(body)[0]] += 1
        else:
            for (each,) in _NUMBER.iter_unpack(body):
                self._todo.put(self.kept.count(each, 1 if kind == _UP else -1))  # the pool frees it, if it is to be
            if kind == _UP:
                self.sockets.put(source, [number, _COUNTED, b"", b"", b""])

    def _take_answer(self, rank: int, number: bytes, kind: bytes, body: bytes, text: bytes, refs: bytes) -> None:
        future = self._waiting.taken(*_NUMBER.unpack(number))
        if kind == _LEFT:
            self.sockets.left.add(rank)
            self._lose(rank)
        elif future is not None and kind == _COUNTED:
            future.set_result(None)
        elif future is not None:
            self._settled(future, kind, body, text, refs)
        else:
            self._drop(refs)

    def _settled(self, future: Future, kind: bytes, body: bytes, text: bytes, refs: bytes) -> None:
        held = taken(refs, self.ref)  # whether or not a caller asks for the result
        self._finish(future, partial(_made, future.name, future.rank, kind, body, text, held))

    def _finish(self, future: Future, answer: Callable[[], Any]) -> None:
        if not future._settle(answer):
            self._back.put(future)

    def _lose(self, rank: int) -> None:
        """It has left: perhaps because the job has failed."""
        self._look()
        self._waiting.lose(rank)

    def _look(self) -> bool:
        failure = _core.failure_of_job() if self._waiting else None
        if failure is not None:
            self._waiting.fail(lambda: _core.error_for(failure[1], failure[2]))
        return bool(self._waiting)

    # of the pool, and of the thread for answers with callbacks

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            if len(job) == 4:
                self._do(*job)
            del job  # it may hold a value that is to be freed now

    def _do(self, source: bytes, number: bytes, body: bytes, listed: bytes) -> None:
        self.sockets.put(source, [number, *self._answer(body, listed)])

    def _answer(self, body: bytes, listed: bytes) -> list[bytes]:
        """Does a call: kind, value or exception, text of the traceback, references."""
        name = "a call"
        try:
            name, args, kwargs = unpickled(f"a call to rank {self.rank}", body, taken(listed, self.ref))
            value = found(name)(*args, **kwargs)
            answer, refs = pickled(f"the result of {name} on rank {self.rank}", value)
            self._count_up(refs)
            return [_VALUE, answer, b"", packed_refs(refs)]
        except BaseException as error:  # also SystemExit: it is an error of the call, and this thread goes on
            text = traceback.format_exc()[-TEXT_MAX:]
            answer, refs = b"", []
            if isinstance(error, Exception):
                with contextlib.suppress(Exception):
                    itself, within = pickled("an exception", error)
                    self._count_up(within)
                    answer, refs = itself, within
            error.__traceback__ = None  # it may hold the arguments, and itself by them, until a garbage collection
            return [_ERROR, answer, text.encode("utf-8", "replace"), packed_refs(refs)]

    def _settle(self) -> None:
        while (future := self._back.get()) is not None:
            future._settle_now()
            del future


def _made(name: str, rank: int, kind: bytes, body: bytes, text: bytes, refs: list[Any]) -> Any:
    if kind == _ERROR:
        raise raised(name, rank, body, text.decode(), refs)
    return unpickled(f"the result of {name} on rank {rank}", body, refs)


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
    init.closers.append(_running.close)


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
