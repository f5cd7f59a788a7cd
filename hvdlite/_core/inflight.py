"""References that keep tensor memory alive while the core works on it, whatever happens in Python meanwhile.

A `Flight` exists before the call that starts a request. It holds the memory that the core may touch, and the core
writes the handle into it. A signal handler may raise between any two lines of Python, also right after the call; then
the flight alone knows that a request is in flight.

Invariants:
  - Whatever the core may touch is held until the core has finished with it. If the job has failed a device may be at it
    although the core has finished: see device.py.
  - Flights are never freed, only used again. So one that is lost between two lines, since a second exception came while
    the first was dealt with, costs its memory until the process ends, and never the numbers of another rank.
  - A flight that its owner drops early (an exception, a user who never synchronizes) goes to `abandon`, and later
    submissions sweep it.
  - Waiting returns to Python every 50 ms, so that Ctrl-C works. What a signal handler raises there is the caller's, and
    never taken for the outcome of the collective, which may be waited for again.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from .auto_names import forget_unnamed
from .deadline import too_late, within
from .device import let_go, risk
from .library import TEXT_BYTES, error_for, ffi, lib, text_of, thread
from .wait_limit import WAIT_MS, waited

if TYPE_CHECKING:
    from .request import Request

_OK, _AGAIN = lib.HVD_OK, lib.HVD_AGAIN
_finish, _poll = lib.hvd_finish, lib.hvd_poll
_WAIT_NS = WAIT_MS * 1_000_000

in_flight: dict[Any, Flight] = {}  # by name, until its owner has waited: so that a duplicate fails at the call
abandoned: deque[Abandoned] = deque()
idle: list[Flight] = []
_flights: list[Flight] = []  # all there are: keeps them alive when no caller does
_several: set[Flights] = set()  # those in flight, likewise


class Abandoned(Protocol):
    """What may be in flight after its owner has dropped it."""

    def over(self) -> bool:
        """Whether the core is done with it."""
        ...

    def let_go(self) -> None:
        """After that: gives back what it holds."""
        ...


class Flight:
    """One request in flight, or none: the memory that the core may touch (`keep`), and the handle.

    From `take` to `complete` it has one owner, which drops its reference before `complete`. Threads that wait for one
    handle do so one after the other (`turn`). `free`: the owner has dropped it or knows that it is over, so its name
    may come again. `address` is that of `native`, for csrc/python.
    """

    __slots__ = ("address", "free", "keep", "native", "request", "turn")

    def __init__(self) -> None:
        self.native = ffi.new("struct hvd_owner *")
        self.address = int(ffi.cast("uintptr_t", self.native))
        self.turn = threading.RLock()
        self.free = False
        self.keep: Any = None
        self.request: Request | None = None
        _flights.append(self)

    def over(self) -> bool:
        """Whether nothing is in flight any more: waiting for it would return at once."""
        handle = self.native.handle
        return not handle or _poll(handle) != _AGAIN

    def polled(self) -> bool:
        """`over`, called by its owner."""
        self.free = self.over()
        return self.free

    def wait(self) -> Exception | None:
        """Blocks until it is over and forgotten by the core; why it failed, now and ever after."""
        native, text, since = self.native, thread.text, 0.0
        code = _finish(native, _WAIT_NS, text, TEXT_BYTES)
        while code == _AGAIN:
            since = waited(since, self.request.name if self.request is not None else None)
            code = _finish(native, _WAIT_NS, text, TEXT_BYTES)
        return None if code == _OK else error_for(code, text_of(text))

    def wait_for(self, seconds: float) -> Exception | None:
        """`wait`, so long at most: then HvdTimeoutError is raised, and it goes on."""
        handle = self.native.handle
        if not within(handle, seconds):
            error = too_late(handle, self.request, seconds, "hvdlite holds it until then")
            if error is not None:
                raise error
        return self.wait()

    def let_go(self) -> None:
        """After `over`: the core forgets it, and another request may use it."""
        if self.request is not None and self.request.native.device:
            risk(self.keep)
        handle = self.native.handle
        if handle:
            lib.hvd_forget(handle)
            self.native.handle = 0
        self.complete()

    def complete(self) -> None:
        """It is over and forgotten: its name and itself are free again. The owner has dropped it before."""
        request, self.request, self.keep, self.free = self.request, None, None, False
        if request is not None and request.name is not None and in_flight.get(request.name) is self:
            in_flight.pop(request.name, None)
        self._rests()

    def _rests(self) -> None:
        idle.append(self)


class Flights:
    """Several requests that are submitted in one call, and for which one owner waits. As a Flight otherwise."""

    __slots__ = ("count", "keep", "left", "owners")

    def __init__(self, count: int, keep: Any) -> None:
        self.owners, self.count, self.keep = ffi.new("struct hvd_owner[]", count), count, keep
        self.left = count  # of its members, where each has an owner of its own
        _several.add(self)

    def over(self) -> bool:
        """Whether the core is done with all of them."""
        handles = [owner.handle for owner in self.owners]
        return all(not handle or _poll(handle) != _AGAIN for handle in handles)

    def let_go(self) -> None:
        """After `over`: the core forgets them."""
        for owner in self.owners:
            if owner.handle:
                lib.hvd_forget(owner.handle)
        self.complete()

    def complete(self) -> None:
        """They are over and forgotten."""
        _several.discard(self)


class BatchedFlight(Flight):
    """One of several requests that are submitted in one call, each of which has an owner of its own."""

    __slots__ = ("_group",)

    def __init__(self, group: Flights, index: int) -> None:
        self.native = group.owners + index
        self.keep = self.request = None
        self.free = False
        self._group = group

    def _rests(self) -> None:
        self._group.left -= 1
        if self._group.left == 0:
            self._group.complete()


def take() -> Flight:
    """A flight for a caller that is about to submit."""
    try:
        return idle.pop()
    except IndexError:
        return Flight()


def refuse_twice(name: Any) -> None:
    """ValueError if a collective of this name is in flight.

    One that a thread can still wait for is in flight until its owner has waited for it or polled it done, however fast
    the core was, so that all ranks agree. One that no thread can wait for any more is in flight until it is over.
    To wait for it here could be to wait for ever: the other ranks may begin theirs only after this call.
    """
    flight = in_flight.get(name)
    if flight is None or not flight.native.handle:  # a signal handler raised before it was submitted
        return
    if not flight.free and _owned(flight):
        why = "its handle was not synchronized. Synchronize it first, or give each tensor its own name."
    elif not flight.over():
        why = (
            "its handle was dropped, and not all ranks have called it yet. Keep the handle and synchronize it first, "
            "or give each tensor its own name. A rank where the first collective has ended is not refused, and waits "
            "for this rank in the second one."
        )
    else:
        return
    raise error_for(
        lib.HVD_EDUP,
        "Requested a collective of a tensor with the same name as another tensor that is currently being processed: "
        f"{name[0]!r} is still in flight, because {why} [HVD205]",
    )


def _owned(flight: Flight) -> bool:
    """Whether a thread can still wait for it: a signal handler that raises between two lines may have lost it."""
    return any(getattr(each, "_flight", None) is flight for each in gc.get_referrers(flight))


def abandon(flight: Abandoned) -> None:
    """No thread will wait for it: it is kept as long as the core needs its memory."""
    if isinstance(flight, Flight):
        flight.free = True
    abandoned.append(flight)


def dropped() -> Exception:
    """Why a handle has no result that is used after its own __del__: by the __del__ of an object that a garbage
    collection ends together with it. Its flight may serve another request by then."""
    return error_for(
        lib.HVD_EHANDLE,
        "a garbage collection has dropped this handle before it was synchronized: its result is lost. Synchronize it "
        "before, and not in the __del__ of an object that refers to itself [HVD218]",
    )


def sweep() -> None:
    """Releases requests that no thread will wait for, if they are finished."""
    for _ in range(len(abandoned)):
        try:
            flight = abandoned.popleft()
        except IndexError:
            return
        if flight.over():
            flight.let_go()
        else:
            abandoned.append(flight)


def forget_all() -> None:
    """After shutdown, when the core touches nothing any more: the next job counts from 1 again."""
    while abandoned:  # a handle may be dropped meanwhile, by another thread or a collection of garbage
        try:
            abandoned.popleft().let_go()
        except IndexError:
            break
    let_go()
    in_flight.clear()
    forget_unnamed(None)
