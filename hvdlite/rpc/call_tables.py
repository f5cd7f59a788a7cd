"""Tables of calls: the answers that a rank waits for, and the values of references.

No sockets and no threads: calls.py has them. Numbers name both, and are never used again. An answer is settled once:
by what came, or by an error when nothing can come any more. A value is freed when its count falls to 0; counts are
changed by one thread, and new values may be added by any.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import HvdPeerLostError, HvdTimeoutError


class Future(concurrent.futures.Future[Any]):
    """The future result of a call: a ``concurrent.futures.Future`` that cannot be cancelled. ``call_async`` makes it.

    Args:
        rank (int): the rank that runs the call.
        name (str): the name of the function.

    Example:
        >>> hvd.rpc.start()
        >>> future = hvd.rpc.call_async(0, "builtins:len", [1, 2, 3])
        >>> future.result(timeout=30)
        3
    """

    def __init__(self, rank: int, name: str) -> None:
        super().__init__()
        self.rank, self.name = rank, name
        self._answer: Callable[[], Any] | None = None  # makes the result, or raises
        self._making = threading.Lock()
        self._callbacks = 0
        self.set_running_or_notify_cancel()

    def _settle(self, answer: Callable[[], Any]) -> bool:
        """The answer is there; the thread that asks for the result makes it. False: callbacks wait, so call
        `_settle_now`."""
        with self._making:
            self._answer = answer
            if not self._callbacks:
                self.set_result(None)
            return not self._callbacks

    def _settle_now(self) -> None:
        """Makes the result, and calls the callbacks."""
        answer, self._answer = self._answer, None
        assert answer is not None
        try:
            self.set_result(answer())
        except Exception as error:
            self.set_exception(error)

    def _make(self) -> None:
        with self._making:
            if self._answer is not None and self.done():
                try:
                    self._result = self._answer()
                except Exception as error:
                    self._exception = error
                self._answer = None

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        """Call ``fn(future)`` when the future is done, in another thread, or at once if it is done.

        Args:
            fn (callable): gets this future.
        """
        with self._making:
            self._callbacks += not self.done()
        super().add_done_callback(fn)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call and return its exception, or None.

        Args:
            timeout (float, optional): seconds to wait. Default: None, no limit.

        Returns:
            BaseException: what ``result`` would raise.

        Raises:
            TimeoutError: no answer within ``timeout``.
        """
        super().exception(timeout)
        self._make()
        return super().exception(0)

    def result(self, timeout: float | None = 60) -> Any:
        """Wait for the call and return its result, or raise its exception.

        Args:
            timeout (float, optional): seconds to wait. Default: 60. None: no limit.

        Returns:
            The result of the call.

        Raises:
            HvdPeerLostError: a rank of the job has died, or the rank has left.
            HvdTimeoutError: no answer within ``timeout``.
        """
        try:
            super().result(timeout)
            self._make()
            return super().result(0)
        except concurrent.futures.TimeoutError:
            if self.done():  # just now, or the call itself has raised it
                return super().result()
            raise HvdTimeoutError(
                f"rank {self.rank} did not answer {self.name} within {timeout:g} s; the function may still run there "
                "[HVD043]"
            ) from None


def _raised(error: Exception) -> None:
    raise error


class Waiting:
    """Calls whose answers have not come. Any thread; true as long as there are some."""

    def __init__(self, finish: Callable[[Future, Callable[[], Any]], None]) -> None:
        self._finish = finish
        self._futures: dict[int, Future] = {}
        self._numbers = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self._futures)

    def add(self, rank: int, name: str) -> tuple[int, Future]:
        number, future = next(self._numbers), Future(rank, name)
        self._futures[number] = future
        return number, future

    def taken(self, number: int) -> Future | None:
        """The future of that number, if it still waits; the thread that takes it settles it."""
        return self._futures.pop(number, None)

    def fail(self, error: Callable[[], Exception], rank: int | None = None) -> None:
        """Those that wait for this rank, or all, end with an error, each with its own."""
        for number, future in list(self._futures.items()):
            if rank in (None, future.rank) and self.taken(number) is not None:
                self._finish(future, partial(_raised, error()))

    def lose(self, rank: int) -> None:
        """This rank has left."""

        def error() -> HvdPeerLostError:
            lost = HvdPeerLostError(f"rank {rank} has left the job, and answers no more calls [HVD451]")
            lost.rank = rank
            return lost

        self.fail(error, rank)


class Kept:
    """The values that references of all ranks lead to, by number."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self._counts: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def add(self, value: Any) -> int:
        number = next(self._numbers)
        self._counts[number], self.values[number] = 1, value
        return number

    def count(self, number: int, by: int) -> list[Any]:
        """The value, if no rank has a reference to it any more."""
        self._counts[number] += by
        if self._counts[number]:
            return []
        del self._counts[number]
        return [self.values.pop(number)]
