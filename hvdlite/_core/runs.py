"""Allreduces that are submitted together, step after step: a call into the core for all of them, not one for each.

A `Run` holds what stays the same from step to step (names, shapes, scales), laid out as the core reads it; only
addresses are renewed, where they have changed. `submit` gives a `Sent`, which is waited for in one call, too.

Everything is reduced in place. As with a Pending, the core's fingers are on the tensors until it has finished: a Sent
that is dropped early hands them on to those that later submissions sweep up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .flight import _WAIT_MS, _abandoned, _made, _sweep
from .library import TEXT_BYTES, error_for, ffi, lib, text_of, thread
from .patience import waited


class Member(NamedTuple):
    """One tensor of a run."""

    name: str
    dtype: int  # number in DTYPES
    shape: tuple[int, ...]


class Run:
    """Allreduces in place with the same op and scales. ValueError for a name that cannot be."""

    __slots__ = ("_addresses", "_keep", "_pointers", "_requests", "count")

    def __init__(self, members: Sequence[Member], op: int, prescale: float, postscale: float, process_set: int) -> None:
        made = [
            _made(
                lib.HVD_ALLREDUCE, op, member.dtype, member.name, member.shape, 0, 0, None, prescale, postscale,
                process_set, 0, 0, 0, 0
            )
            for member in members
        ]  # fmt: skip
        self.count = len(made)
        self._requests = [request.native for request in made]  # of this run alone, so it may change them
        self._pointers = ffi.new("struct hvd_request *[]", self._requests)
        self._keep = made
        self._addresses = [0] * len(made)

    def point(self, addresses: list[int]) -> None:
        """Where the tensors lie this time, one address for each."""
        if addresses == self._addresses:
            return
        for request, address, before in zip(self._requests, addresses, self._addresses):
            if address != before:
                request.input = request.output = ffi.cast("void *", address)
        self._addresses = addresses

    def submit(self, keep: Any, quiet: bool) -> Sent:
        """Hand all over, in order; the engine is woken once, and not at all if `quiet` (see `flight.submit`).

        `keep` is what holds their memory. Raises nothing: what is wrong is raised by the Sent's wait, since others of
        the run may be on their way.
        """
        if _abandoned:
            _sweep()
        text, handles = thread.text, ffi.new("int64_t[]", self.count)
        self._requests[-1].quiet = quiet
        taken = lib.hvd_submit_many(self._pointers, self.count, handles, text, TEXT_BYTES)
        if taken == self.count:
            return Sent(handles, taken, keep, None)
        code = taken if taken < 0 else handles[taken]
        return Sent(handles, max(taken, 0), keep, error_for(code, text_of(text)))


class Sent:
    """A run under way, or as much of it as was taken."""

    __slots__ = ("_count", "_error", "_handles", "_keep")

    def __init__(self, handles: Any, count: int, keep: Any, error: Exception | None) -> None:
        self._handles, self._count, self._keep, self._error = handles, count, keep, error

    def wait(self) -> None:
        """Blocks until all are finished. Raises why the first of those that failed did, now and ever after."""
        if self._handles is not None:
            text = thread.text
            code = lib.hvd_wait_many(self._handles, self._count, _WAIT_MS, text, TEXT_BYTES)
            since = 0.0
            while code == lib.HVD_AGAIN:
                since = waited(since)
                code = lib.hvd_wait_many(self._handles, self._count, _WAIT_MS, text, TEXT_BYTES)
            self._handles = self._keep = None
            if code != lib.HVD_OK and self._error is None:
                self._error = error_for(code, text_of(text))
        if self._error is not None:
            raise self._error

    def __del__(self) -> None:
        if self._handles is not None:
            _abandoned.extend((handle, self._keep, None) for handle in list(self._handles)[: self._count])
