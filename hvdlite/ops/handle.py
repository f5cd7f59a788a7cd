"""What does a caller hold while a collective is under way? A Handle: opaque, hashable, good for `poll`, `synchronize`.

A handle owns the requests of one call (one, or as many as a group has members) and knows how their results become what
the caller gets. It keeps every tensor alive that the core may touch. Unlike Horovod's it may be synchronized again, and
says the same again, also when that was an error; only who lost patience (`timeout`) hears another time how it ended.

A signal handler that raises while it is waited for (Ctrl-C, an alarm) changes nothing: the exception is the caller's,
and the handle may be synchronized again.

Several threads may wait for one handle: they do so one after the other, and all get the result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .. import _core


class Handle:
    """An asynchronous collective. `brought` is what it learned beside its result: of an allgather, whose rows came."""

    __slots__ = ("__weakref__", "_error", "_finish", "_given_up", "_pending", "_result", "_turn", "brought")

    def __init__(self, pending: list[_core.Pending], finish: Callable[[list[_core.Pending]], Any]) -> None:
        self._pending = pending
        self._finish: Callable[[list[_core.Pending]], Any] | None = finish
        self._result: Any = None
        self._error: Exception | None = None
        self._turn = threading.RLock()
        self._given_up = False  # by who waited with a limit of his own
        self.brought: list[Any] = []

    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return all(pending.done() for pending in self._pending)

    def wait(self, timeout: Any = None) -> Any:
        """The result. Raises why the collective failed; in a group the first failure, after all have ended.

        timeout: as `synchronize` has it.
        """
        if timeout is not None and self._pending:
            self._within(timeout, [(each.native, each.request) for each in self._pending])
        elif self._given_up:
            for pending in self._pending:
                _core.count_again(pending.native)
        with self._turn:
            if self._finish is not None:
                errors = [pending.ended() for pending in self._pending]
                error = next((each for each in errors if each is not None), None)
                result = self._finish(self._pending) if error is None else None
                self._result, self._error, self._finish = result, error, None
                over, self._pending = self._pending, []
                for pending in over:
                    pending.release()
        if self._error is not None:
            raise self._error
        return self._result

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """Before the first `wait`: the result is what `change` makes of it."""
        finish = self._finish
        assert finish is not None
        self._finish = lambda pending: change(finish(pending))
        return self

    def _within(self, timeout: Any, flights: list[tuple[int, Any]]) -> None:
        """Returns when all of these, (number, request), have ended. HvdTimeoutError: not in
        time, and nothing has changed."""
        seconds = _core.seconds_of(timeout)
        if seconds is None:
            return
        until = time.monotonic() + seconds
        for native, request in flights:
            if not _core.within(native, max(until - time.monotonic(), 0.0)):
                error = _core.too_late(native, request, seconds)
                if error is not None:
                    error.handle = self
                    self._given_up = True
                    raise error


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return or raise at once. ValueError for what is no handle."""
    return _handle(handle).done()


def synchronize(handle: Handle, timeout: Any = None) -> Any:
    """Wait for an asynchronous collective; its result, as the call without `_async` would have returned it.

    timeout: seconds, a datetime.timedelta, or None, without a limit of its own. After that time HvdTimeoutError names
    the tensor and the ranks that are missing. The job goes on, and so does the collective: the handle stays what it
    was, and may be synchronized again; until it has ended, also if nobody waits for it any more, its memory is in use,
    and its name. HVDLITE_COLLECTIVE_TIMEOUT ends the job earlier where it is the shorter one.

    Raises HvdMismatchError (the ranks disagree about this tensor), HvdPeerLostError (a rank died or left), ValueError
    for what is no handle or no time to wait, TypeError for a timeout that is no number.
    """
    return _handle(handle).wait(timeout)


def _handle(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is not the handle of an asynchronous collective [HVD218]")
    return handle
