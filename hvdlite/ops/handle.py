"""What does a caller hold while a collective is under way? A Handle: opaque, hashable, good for `poll`, `synchronize`.

A handle owns the requests of one call (one, or as many as a group has members) and knows how their results become what
the caller gets. It keeps every tensor alive that the core may touch. Unlike Horovod's it may be synchronized again, and
says the same again, also when that was an error.

Several threads may have handles, but one handle is waited for by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _core


class Handle:
    """An asynchronous collective. `brought` is what it learned beside its result: of an allgather, whose rows came."""

    __slots__ = ("__weakref__", "_error", "_finish", "_pending", "_result", "brought")

    def __init__(self, pending: list[_core.Pending], finish: Callable[[list[_core.Pending]], Any]) -> None:
        self._pending = pending
        self._finish: Callable[[list[_core.Pending]], Any] | None = finish
        self._result: Any = None
        self._error: Exception | None = None
        self.brought: list[Any] = []

    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return all(pending.done() for pending in self._pending)

    def wait(self) -> Any:
        """The result. Raises why the collective failed; in a group the first failure, after all have ended."""
        if self._finish is not None:
            for pending in self._pending:
                try:
                    pending.wait()
                except Exception as error:
                    self._error = self._error or error
            if self._error is None:
                self._result = self._finish(self._pending)
            for pending in self._pending:
                pending.release()
            self._finish, self._pending = None, []
        if self._error is not None:
            raise self._error
        return self._result


def poll(handle: Handle) -> bool:
    """Whether `synchronize(handle)` would return or raise at once. ValueError for what is no handle."""
    return _handle(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous collective; its result, as the call without `_async` would have returned it.

    Raises HvdMismatchError (the ranks disagree about this tensor), HvdPeerLostError (a rank died or left), ValueError
    for what is no handle.
    """
    return _handle(handle).wait()


def _handle(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"{handle!r} is not the handle of an asynchronous collective")
    return handle
