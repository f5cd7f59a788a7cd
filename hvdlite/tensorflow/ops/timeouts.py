"""Eager calls whose own `timeout=` is over: they raise, and the collective goes on.

A collective that ranks have voted for cannot be withdrawn (../../_core/deadline.py), so the error's `handle` leads to
it: `hvd.synchronize(error.handle)` waits for it again, and brings what the call would have returned: tensors, and all
that is done to them after the collective. They have gradients where the tape records when they are first waited for.
A caller that drops the handle gets no result; memory and name are in use until the collective has ended on all ranks.

A graph has no such calls. Which of its collectives have begun when one of them is given up is for TensorFlow to choose,
on this rank differently than on others, so the next run would find the last one's tensors under the same names, and add
up what does not belong together. There the limit of the whole job holds, which no run comes after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ... import _core
from ...errors import HvdNotYetError, HvdTimeoutError
from ...ops import Handle
from ..errors import translated


class Late(Handle):
    """A collective that its caller has given up waiting for. `made` makes its result of it, once it has ended."""

    __slots__ = ("_handle", "_made", "_what")

    def __init__(self, handle: Handle, what: tuple[str, str | None], made: Callable[[], Any]) -> None:
        super().__init__([], lambda _: None)
        self._handle, self._what = handle, what
        self._made: Callable[[], Any] | None = made

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """Before the first `wait`: the result is what `change` makes of it."""
        made = self._made
        assert made is not None
        self._made = lambda: change(made())
        return self

    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._handle.done()

    def wait(self, timeout: Any = None) -> Any:
        """The result of the call. Raises as the call does, and may be called again. timeout: as `synchronize` has it.
        ValueError, TypeError for no time to wait."""
        with translated(*self._what):
            wait(self._handle, timeout, self)
        if self._made is not None:
            self._result, self._made = self._made(), None
        return self._result


def wait(handle: Handle, timeout: Any, late: Late) -> None:
    """Returns when the collective has ended. HvdTimeoutError, whose handle is `late`: not within so many seconds."""
    try:
        handle.wait(timeout)
    except HvdTimeoutError as error:
        if error.handle is handle:
            error.handle = late
        raise


def finished(finish: Callable[[Any], Any], call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """`finish` of what the call returns: now or, where its time is over, once a caller waits for it again."""
    try:
        found = call(*args, **more)
    except HvdTimeoutError as error:
        if isinstance(error.handle, Late):
            error.handle.then(finish)
        raise
    return finish(found)


def seconds_of(kind: str, name: Any, timeout: Any) -> float | None:
    """The time that a call may take. HvdArgumentError, TypeError for what is none; HvdNotYetError in a graph."""
    with translated(kind, name):
        seconds = _core.seconds_of(timeout)
        if seconds is not None and not tf.executing_eagerly():
            of = f"{kind} of a tensor without a name" if name is None else f"tensor '{kind}.{name}'"
            raise HvdNotYetError(
                f"rank {_core.rank()}: {of}: timeout= works in eager calls only, and this call is traced into a "
                "graph: remove it. HVDLITE_COLLECTIVE_TIMEOUT (hvdlite-run --collective-timeout) limits how long a "
                "graph waits, and then ends the job [HVD504]"
            )
        return seconds
