"""Work: a collective in flight and its future, as torch.distributed returns it.

C++ asks a Work for wait and get_future only; the rest is for Python. A caller that polls reads the outputs without a
wait, so is_completed completes the result, too. What failed is raised by every wait, as the exception that it is. A
future can hold no exception that C++ would understand, since what set_exception sets is a value there; but a callback
that raises is an error for C++, too, so a future here is a `then` of one that never fails.

On a GPU no thread waits for the result: each wait, also that of a future, makes its current stream wait. is_completed
tells whether the device is done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from ... import _core
from ...errors import HvdTimeoutError
from ..device import CudaDevice
from . import futures

_UNTIMED = timedelta(0)
# Before torch 2.7 C++ holds a Work without its Python object, and waits for ever on the base class, once that is freed.
HOLDS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)
_PLAIN: Any = contextlib.nullcontext()
profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_held = set[Work]()  # those that nobody has waited for or asked for a future


def ranged(what: str) -> Any:
    """While a profiler of torch's looks: a range of that name in what it records. torch makes none for a Python group;
    one that spans two threads is not to be had from Python, so a call and the wait for it have one each."""
    return torch.profiler.record_function(f"hvdlite:{what}") if profiled() else _PLAIN


class HvdWork(Work):
    """A collective in flight. results: what result() and the future give, and what the caller's memory is held by."""

    def __init__(
        self, pending: list[_core.Pending], results: list[torch.Tensor], limit: float | None,
        text: Callable[[], str], finish: Callable[[list[_core.Pending]], Any] | None = None,
        device: CudaDevice | None = None, line: futures.FutureQueue | None = None
    ) -> None:  # fmt: skip
        super().__init__()
        self._pending, self._finish, self._results, self._limit = pending, finish, results, limit
        self._text = text  # for errors: which call of which group
        self._device, self._line = device, line
        self._completed: torch.cuda.Event | None = None  # on a GPU: after the result
        self._turn = threading.Lock()  # threads wait one after the other
        self._ended = False
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        self._source = -1
        if HOLDS:
            _held.add(self)

    def wait(self, timeout: timedelta = _UNTIMED) -> bool:
        """True when the result is there. Raises why the collective failed; HvdTimeoutError after `timeout`, or else the
        group's: then it goes on, and may be waited for again."""
        seconds = timeout.total_seconds() if timeout > _UNTIMED else self._limit
        if not self._ended:
            until = None if seconds is None else time.monotonic() + seconds
            if not self._turn.acquire(timeout=-1 if seconds is None else seconds):
                raise HvdTimeoutError(
                    f"{self._text()}: rank {_core.rank()} has waited its whole timeout of {seconds:g} s for another "
                    "thread that waits for the same Work [HVD502]"
                )
            try:
                with ranged("wait"):
                    self._complete(until, seconds)
            finally:
                self._turn.release()
        _held.discard(self)
        if self._error is not None:
            raise self._error
        if self._device is not None and self._completed is not None:
            self._device.behind(self._completed)
        return True

    def _complete(self, until: float | None, seconds: float | None) -> None:
        """Waits, and copies the result back. Its outcome is kept, a limit of time that passes is raised."""
        if self._ended:
            return
        if until is not None and seconds is not None:
            self._within(until, seconds)
        errors = [each.ended() for each in self._pending]
        self._error = next((named(each, self._text) for each in errors if each is not None), None)
        if self._error is None:
            try:
                if self._finish is not None:
                    self._finish(self._pending)
                if self._device is not None:
                    self._completed = self._device.completed(self._pending[0].ready)
            except Exception as error:
                self._error = named(error, self._text)
        self._ended, self._finish = True, None
        over, self._pending = self._pending, []
        for each in over:
            each.release()

    def _within(self, until: float, seconds: float) -> None:
        for each in self._pending:
            if not _core.within(each.native, max(until - time.monotonic(), 0.0)):
                error = _core.too_late(each.native, each.request, seconds, AGAIN)
                if error is not None:
                    raise named(error, self._text)

    def _poll(self) -> bool:
        return all(each.done() for each in self._pending)

    def is_completed(self) -> bool:
        """Whether it is over. Then the result is there, without a wait."""
        if not self._ended and self._poll():
            self.settle()
        return self._ended and (self._completed is None or self._completed.query())

    def settle(self) -> BaseException | None:
        """Waits without raising; why it failed, which the next wait raises."""
        try:
            self.wait()
        except Exception as error:
            if isinstance(error, HvdTimeoutError):
                self._error = error
            elif not self._ended:  # a signal handler's
                raise
            return error
        return None

    def is_success(self) -> bool:
        """Whether it is over and has not failed."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Why it failed; None while it is in flight, and when it has not failed."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The outputs."""
        return self._results

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def source_rank(self) -> int:
        """Of a receive: the rank in the group that it came from; -1 until it is known."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future of the outputs: completed at the end of backward if a hook of DDP asks, else by a thread."""
        if self._future is None:
            began: Future[Any] = Future(devices=[each.device for each in self._results[:1] if each.is_cuda])
            self._future = began.then(self._outcome)
            _held.discard(self)  # the future has it
            if self._ended or futures.inside():  # a callback that waited for the next one would wait for itself
                self.settle()
                began.set_result(None)
            else:
                (self._line or futures.FutureQueue()).complete(self, began, last=self._line is None)
        return self._future

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        if self._error is None:
            self.wait()
        if self._error is not None:
            raise self._error
        return self._results


AGAIN = "wait() waits for it again"


def named(error: BaseException, text: Callable[[], str]) -> BaseException:
    """The same error, whose text begins with the call of the group that it is about."""
    if error.args and isinstance(error.args[0], str) and not error.args[0].startswith("process group"):
        error.args = (f"{text()}: {error.args[0]}", *error.args[1:])
    return error


DONE = HvdWork([], [], None, str)  # of calls that have waited themselves
DONE._ended = True
