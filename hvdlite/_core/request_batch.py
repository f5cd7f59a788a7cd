"""Allreduces that are submitted together, step after step: a call into the core for all of them, not one for each.

A `Run` holds what stays the same from step to step (names, shapes, scales), laid out as the core reads it; only
addresses are renewed, where they have changed. `prepare` gives a `Sent`, which is waited for in one call, too.

Everything is reduced in place. As with a Pending, the core uses the tensors until it has finished: a Sent that is
dropped early hands its tensors to the abandoned flights, which later submissions sweep. The object that holds the
tensors exists before the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .inflight import Flights, abandon, abandoned, dropped, sweep
from .library import TEXT_BYTES, error_for, ffi, lib, text_of, thread
from .request import made as request_made
from .wait_limit import WAIT_MS, waited


class BatchEntry(NamedTuple):
    """One tensor of a run."""

    name: str
    dtype: int  # number in DTYPES
    shape: tuple[int, ...]


class Run:
    """Allreduces in place with the same op and scales. ValueError for a name that cannot be."""

    __slots__ = ("_addresses", "_keep", "_pointers", "_requests", "count")

    def __init__(
        self, members: Sequence[BatchEntry], op: int, prescale: float, postscale: float, process_set: int
    ) -> None:
        made = [
            request_made(
                lib.HVD_ALLREDUCE, op, member.dtype, member.name, member.shape, 0, 0, None, prescale, postscale,
                process_set, 0, 0, 0
            )
            for member in members
        ]  # fmt: skip
        self.count = len(made)
        self._requests = [request.native for request in made]  # of this run alone, so it may change them
        self._pointers = ffi.new("struct hvd_request *[]", self._requests)
        self._keep = made
        self._addresses = [0] * len(made)

    def point(self, addresses: list[int]) -> None:
        """Where the tensors lie this time, one address for each. A signal handler may raise half-way: then none of the
        addresses of before is taken for known."""
        known = self._addresses
        if addresses == known:
            return
        self._addresses = [0] * self.count
        for request, address, before in zip(self._requests, addresses, known):
            if address != before or not before:
                request.input = request.output = ffi.cast("void *", address)
        self._addresses = addresses

    def prepare(self, keep: Any) -> Sent:
        """What will hold them, once they have been started. `keep` is what holds their memory."""
        return Sent(Flights(self.count, keep), self._requests, self._pointers)


class Sent:
    """A run in flight, or the part of it that was taken."""

    __slots__ = ("_error", "_flights", "_pointers", "_requests")

    def __init__(self, flights: Flights, requests: list[Any], pointers: Any) -> None:
        self._flights: Flights | None = flights
        self._error: Exception | None = None
        self._requests, self._pointers = requests, pointers

    def start(self, quiet: bool) -> None:
        """Hands them over, in order; the engine is woken once, and not at all if `quiet` (see `request.submit`).

        Raises nothing: what is wrong is raised by `wait`, since others of the run may be on their way.
        """
        if abandoned:
            sweep()
        flights, text = self._flights, thread.text
        assert flights is not None
        self._requests[-1].quiet = quiet
        taken = lib.hvd_submit_many(self._pointers, flights.count, flights.owners, text, TEXT_BYTES)
        if taken != flights.count:
            code = taken if taken < 0 else flights.owners[taken].code
            self._error = error_for(code, text_of(text))

    def begun(self) -> bool:
        """Whether any was handed over, or refused."""
        flights = self._flights
        if flights is None or self._error is not None:
            return True
        return bool(flights.owners[0].handle or flights.owners[0].code)

    def wait(self) -> None:
        """Blocks until all are finished. Raises why the first of those that failed did, now and ever after."""
        flights = self._flights
        if flights is not None:
            text, since = thread.text, 0.0
            code = lib.hvd_wait_many(flights.owners, flights.count, WAIT_MS, text, TEXT_BYTES)
            while code == lib.HVD_AGAIN:
                since = waited(since)
                code = lib.hvd_wait_many(flights.owners, flights.count, WAIT_MS, text, TEXT_BYTES)
            if code != lib.HVD_OK and self._error is None:
                self._error = error_for(code, text_of(text))
            self._flights = None
            flights.complete()
        if self._error is not None:
            raise self._error

    def __del__(self) -> None:
        flights = getattr(self, "_flights", None)  # a signal handler may raise before there is any
        if flights is not None:
            self._flights, self._error = None, dropped()
            abandon(flights)
