"""Handle of a collective in flight: opaque, hashable, accepted by `poll` and `synchronize`.

A handle owns the requests of one call (one, or as many as a group has members) and knows how their results become what
the caller gets. It keeps every tensor alive that the core may touch. Unlike Horovod's it may be synchronized again,
with the same outcome, also when that was an error. Only a caller that gave up (`timeout`) gets another outcome later.

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
    """An asynchronous collective that is in flight or has ended.

    The ``_async`` functions return it; do not construct one. Pass it to ``poll`` and ``synchronize``. It keeps the
    memory of its tensors alive. It may be waited for more than once, and by several threads; the result or the error is
    the same each time.

    Example:
        >>> handle = hvd.allreduce_async(np.array([1.0]), op=hvd.Sum)
        >>> handle.wait().tolist(), handle.done()
        ([2.0], True)
    """

    __slots__ = ("__weakref__", "_error", "_finish", "_given_up", "_pending", "_result", "_turn", "brought")

    def __init__(
        self,
        pending: list[_core.Pending],
        finish: Callable[[list[_core.Pending]], Any],
        brought: list[Any] | None = None,
    ) -> None:
        self._pending = pending
        self._finish: Callable[[list[_core.Pending]], Any] | None = finish
        self._result: Any = None
        self._error: Exception | None = None
        self._turn = threading.RLock()
        self._given_up = False  # by a caller that waited with a limit of its own
        # What `finish` learns beside the result. It holds the list, not the handle, which ends when it is dropped.
        self.brought: list[Any] = [] if brought is None else brought

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a handle has one collective in flight, and cannot be copied or pickled [HVD218]")

    def done(self) -> bool:
        """Return whether ``wait`` would return or raise at once.

        Returns:
            bool: True if the collective has ended, with or without success.
        """
        return all(pending.done() for pending in self._pending)

    def wait(self, timeout: Any = None) -> Any:
        """Wait for the collective and return its result, as ``synchronize`` does.

        In a group it raises the first failure, after all members have ended.

        Args:
            timeout (float or datetime.timedelta, optional): seconds to wait, above 0, as in ``synchronize``. Default:
                no limit of this call.

        Returns:
            array: what the form without ``_async`` returns.

        Raises:
            HvdError: why the collective failed, as ``synchronize`` raises it.
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
        """Change the result by a function before it is returned.

        Call it before the first ``wait``.

        Args:
            change (callable): gets the result and returns the new one.

        Returns:
            Handle: this handle.
        """
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
    """Return whether ``synchronize(handle)`` would return or raise at once.

    Args:
        handle (Handle): what an ``_async`` function returned.

    Returns:
        bool: True if the collective has ended, with or without success.

    Raises:
        ValueError: if ``handle`` is not a ``Handle``.

    Example:
        >>> handle = hvd.allreduce_async(np.array([1.0]))
        >>> _ = hvd.synchronize(handle)
        >>> hvd.poll(handle)
        True
    """
    return _handle(handle).done()


def synchronize(handle: Handle, timeout: Any = None) -> Any:
    """Wait for an asynchronous collective and return its result.

    If ``timeout`` passes, the job and the collective go on, and ``handle`` stays valid: it may be waited for again.
    Until the collective has ended, its memory and its name are in use. If ``HVDLITE_COLLECTIVE_TIMEOUT`` is shorter, it
    ends the job first.

    Args:
        handle (Handle): what an ``_async`` function returned.
        timeout (float or datetime.timedelta, optional): seconds to wait, above 0. Default: no limit of this call.

    Returns:
        array: what the form without ``_async`` returns; a list for a group.

    Raises:
        HvdMismatchError: if the ranks disagree about this tensor.
        HvdPeerLostError: if a rank dies or leaves the job.
        HvdTimeoutError: if ``timeout`` passes first. The text names the tensor and the missing ranks.
        ValueError: if ``handle`` is not a ``Handle``, and for a timeout that is not positive.
        TypeError: if ``timeout`` is not a number.

    Example:
        >>> handle = hvd.broadcast_async(np.array([3 + hvd.rank()]), root_rank=0)
        >>> hvd.synchronize(handle, timeout=30).tolist()
        [3]
    """
    return _handle(handle).wait(timeout)


def _handle(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is not the handle of an asynchronous collective [HVD218]")
    return handle
