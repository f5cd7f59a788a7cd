"""When has a device done what, for frameworks that show no stream of theirs?

A *point* is reached when the device has done all that it was given until the point was made, on whatever streams; a
collective may begin then. And as no stream of such a framework can wait for a collective, the calling thread does: it
looks again, with naps that grow to a millisecond, and loses patience as everybody who waits (patience.py).

When a job fails, what waits for a lost peer on a device is ended by force, beside everything else, which takes up to a
second; who waits for a collective is told at once. What a device may still read or write is held, or its framework
would give that memory to somebody else: where there is a point, until the device has come to one that is made then;
else (`risk`) until the core has closed and has seen that nothing of its own runs there any more. If it has not seen
that, for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from .library import TEXT_BYTES, checked, error_for, failure_of_job, ffi, lib, thread
from .patience import WAIT_MS, waited

_AGAIN = lib.HVD_AGAIN
_NAP_S, _NAP_MOST_S = 20e-6, 1e-3


_held: list[tuple[Any, Point | None]] = []
_risked: list[Any] = []
_HANGS = 3  # asks whether something that a failed job has left on a device could not be ended


def risk(keep: Any) -> None:
    """Holds the memory of a collective on a device that has ended, if it may have ended because the job has failed."""
    if failure_of_job() is not None or lib.hvd_gpu_version(_HANGS):
        _risked.append(keep)


def let_go() -> None:
    """The core has closed: devices touch nothing any more that was at risk, unless one hangs."""
    if not lib.hvd_gpu_version(_HANGS):
        _risked.clear()


class Point:
    """All that the device of this address has been given until now. `device` and `event` are as a request has them;
    where a Point owns what is `ready`, who waits for a collective waits for its device.

    Raises HvdError: the address is on no GPU, the driver is too old, a CUDA graph is being captured.
    """

    __slots__ = ("_memory", "_native", "device", "event")

    def __init__(self, memory: int) -> None:
        self._memory, self._native = memory, ffi.NULL
        made = ffi.new("void **")
        self.device = checked(lib.hvd_point(ffi.cast("void *", memory), made, thread.text, TEXT_BYTES), thread.text)
        self._native = made[0]
        self.event = int(ffi.cast("uintptr_t", lib.hvd_point_event(made[0])))

    def __del__(self) -> None:
        lib.hvd_point_drop(self._native)

    def reached(self) -> bool:
        """Whether all of that is done."""
        return bool(lib.hvd_point_reached(self._native) != _AGAIN)

    def hold(self, keep: Any) -> None:
        """Keeps what the device may still write, after a failure, until it has done all that it has been given by now;
        for ever if that cannot be known."""
        _held[:] = [(kept, point) for kept, point in _held if point is None or not point.reached()]
        try:
            _held.append((keep, Point(self._memory)))
        except Exception:
            _held.append((keep, None))


def _until(ended: Callable[[], bool], seconds: float = math.inf) -> bool:
    """Looks again and again. False: so many seconds are over, or the job's limit is, and the job has been told so."""
    nap, since, looked = _NAP_S, 0.0, time.monotonic()
    until = looked + seconds
    while not ended():
        time.sleep(nap)
        nap = min(2 * nap, _NAP_MOST_S)
        now = time.monotonic()
        if now >= until:
            return False
        if now - looked >= WAIT_MS / 1000:
            since, looked = waited(since), now
            if since == math.inf:
                return False
    return True


def raise_failure() -> None:
    """Raises the job's error if it has failed: a collective that has ended on a device may have ended without its
    peers."""
    failure = failure_of_job()
    if failure is not None:
        raise error_for(*failure[1:])


def arrives(native: int, seconds: float = math.inf) -> bool:
    """Whether a collective that was waited for ends on its device, well or not, within so many seconds."""
    return _until(lambda: lib.hvd_poll(native) != _AGAIN or failure_of_job() is not None, seconds)


def arrived(native: int) -> None:
    """Blocks until a collective that was waited for has ended on its device. Raises HvdPeerLostError, HvdError."""
    arrives(native)
    raise_failure()


def bring(native: int, target: int) -> None:
    """`arrived`, and the result of a ragged collective is at this address on the device, whatever was there before
    being over. Raises as `arrived`."""
    point = ffi.new("void **")
    code = lib.hvd_point_fetch(native, target, point, thread.text, TEXT_BYTES)
    if code < 0:
        lib.hvd_point_drop(point[0])  # who has the result holds it until the job has closed
    checked(code, thread.text)
    if point[0] == ffi.NULL or _until(lambda: lib.hvd_point_reached(point[0]) != _AGAIN):
        lib.hvd_point_drop(point[0])
    raise_failure()  # an event that may still come is nobody's
