"""The NaN guard as Python sees it: whether it looks, and what it warns of.

The core looks at each tensor that is to be reduced, and all ranks agree on which rank had what
(csrc/engine/state/nan_guard.c). Where the guard raises, that is the error of the collective. Where it warns, the
collective goes on, and the sentence waits in the core: a thread that runs in this mode alone fetches it, since a step
may be a graph that never comes back to Python. Every rank warns, in the same words: each may have a log of its own.
"""

from __future__ import annotations

import sys
import threading

from ..errors.codes import code_of, uncoded
from ..errors.user_warning import warn
from . import TEXT_BYTES, ffi, lib, text_of

MODES = ("off", "warn", "raise", "nan")  # in the order of the core's numbers
_PERIOD_S = 0.2


class _Watch:
    """The mode in force, the thread that fetches warnings, and what is not looked at whatever the mode."""

    def __init__(self) -> None:
        self.mode = 0
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def run(self) -> None:
        while not self.over.wait(_PERIOD_S):
            report()


_watch = _Watch()


def begin(mode: int) -> None:
    """The core looks from now on, or not: HVD_GUARD_*."""
    _watch.mode = mode
    if mode == lib.HVD_GUARD_WARN:
        _watch.over = threading.Event()
        _watch.thread = threading.Thread(target=_watch.run, name="hvdlite-nan-guard", daemon=True)
        _watch.thread.start()


def end() -> None:
    """The reports that are still due; they are removed."""
    _watch.over.set()
    if _watch.mode == lib.HVD_GUARD_WARN:
        report()
    _watch.mode, _watch.thread = 0, None


def looks() -> bool:
    """Whether tensors on devices are to be looked at, too, before they are submitted: the core cannot."""
    return _watch.mode != 0


def report() -> None:
    """Warns of what the core has found since this was called last; of several tensors it names the first."""
    text = ffi.new("char[]", TEXT_BYTES)
    tensors = lib.hvd_guarded(text, TEXT_BYTES)
    if tensors < 1:
        return
    more = f" ({tensors - 1} more tensors followed.)" if tensors > 2 else " (One more followed.)" if tensors > 1 else ""
    first = text_of(text)
    code = code_of(first) or "HVD320"
    message = f"hvdlite: {uncoded(first)}{more} [{code}]"
    try:
        warn(message, RuntimeWarning)
    except RuntimeWarning:  # warnings are errors here, and an error of this thread would be lost
        print(message, file=sys.stderr, flush=True)
