"""Time limit of one collective that the caller sets: when it is over, and the error that it raises then.

The limit ends a call, not the collective: one rank cannot withdraw what ranks have voted for. The core keeps the
memory, and the holder of the handle may wait again. From then on the job's own limits ignore this collective. The call
asks all ranks which ranks are missing (csrc/engine/lifecycle/stall_check.c): some milliseconds, and up to three seconds
more if a rank does not answer. If the collective has completed meanwhile, the call returns its result.
"""

from __future__ import annotations

import math
import numbers
import time
from typing import TYPE_CHECKING, Any

from ..errors import HvdTimeoutError
from ..errors.codes import coded
from .library import ffi, lib, text_of, thread
from .wait_limit import WAIT_MS

if TYPE_CHECKING:
    from .request import Request

_AGAIN = "hvd.synchronize(error.handle) waits for it again"
_ANSWER_S = 4.0  # of an inquiry, at most
_text_bytes = lib.HVD_TEXT_MAX
_KINDS = {
    getattr(lib, f"HVD_{kind.upper()}"): kind
    for kind in ("allreduce", "allgather", "broadcast", "barrier", "alltoall", "reducescatter", "reduce", "send")
}


def seconds_of(timeout: Any) -> float | None:
    """A `timeout` as users give it: seconds, a datetime.timedelta, or None for none. TypeError for what is no number,
    ValueError for what is not positive and finite."""
    if timeout is None:
        return None
    number = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(
            coded("HVD503", f"timeout must be a number of seconds, a datetime.timedelta or None, not {timeout!r}")
        )
    number = float(number)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(
            coded(
                "HVD503",
                f"timeout must be a positive number of seconds, not {timeout!r}: None sets no limit, and hvd.poll "
                "asks without waiting",
            )
        )
    return number


def within(native: int, seconds: float | None) -> bool:
    """Waits for what was submitted, so long at most; None: without a limit. Whether it has ended, well or not."""
    until = math.inf if seconds is None else time.monotonic() + seconds
    left_ms = WAIT_MS
    while left_ms >= 0:
        if lib.hvd_wait(native, left_ms, thread.text, _text_bytes) != lib.HVD_AGAIN:
            return True
        left = until - time.monotonic()
        left_ms = WAIT_MS if left > WAIT_MS / 1000 else math.ceil(left * 1000) if left > 0 else -1
    return False


def excuse(native: int) -> None:
    """The job's own limits of time pass it by from now on."""
    lib.hvd_missing(native, 0, ffi.new("uint64_t *"), ffi.new("char[]", 1), 1)


def count_again(native: int) -> None:
    """A thread waits for it again without a limit of its own: the job's limits apply."""
    lib.hvd_missing(native, -1, ffi.new("uint64_t *"), ffi.new("char[]", 1), 1)


def missing(native: int) -> str:
    """The ranks that it waits for, as text. Asks all ranks; from now on the job's limits ignore this collective."""
    text, inquiry, until = ffi.new("char[]", _text_bytes), ffi.new("uint64_t *"), time.monotonic() + _ANSWER_S
    while time.monotonic() < until:
        code = lib.hvd_missing(native, WAIT_MS, inquiry, text, _text_bytes)
        if code == lib.HVD_OK:
            return text_of(text)
        if code != lib.HVD_AGAIN or lib.hvd_poll(native) != lib.HVD_AGAIN:
            break
    return "not finished, and the missing ranks are unknown: not all ranks have reported in time"


def too_late(native: int, request: Request | None, seconds: float, again: str = _AGAIN) -> HvdTimeoutError | None:
    """The error for a caller whose limit is over; None: the collective has ended after all. again: its last words."""
    launched = lib.hvd_wait(native, 0, thread.text, _text_bytes) != lib.HVD_AGAIN
    state = "launched on the GPU, and not finished there" if launched else missing(native)
    if lib.hvd_poll(native) != lib.HVD_AGAIN:
        return None
    name, kind = (request.name, _KINDS.get(request.native.kind)) if request is not None else (None, None)
    what = f"tensor {name[0]!r}" if name is not None else f"{kind or 'a collective'} without a name"
    return HvdTimeoutError(
        coded(
            "HVD502",
            f"rank {lib.hvd_rank()} has waited its whole timeout of {seconds:g} s for {what}: {state}. The collective "
            f"is still in progress, and its memory is in use: {again}",
        )
    )
