"""Python stack of this rank, for the report of a stalled collective. The core takes it when others wait for it
(csrc/engine/lifecycle/stall_check.c).

faulthandler writes the stack of a thread from a signal handler: it needs neither the GIL nor a Python that gets on. It
is registered once per process, for a real-time signal without another handler (SIGUSR1 and SIGUSR2 are the user's),
with a file without a name that the core reads. The core sends the signal to the main thread, so that the handler looks
at the one stack that cannot change meanwhile; stacks of other threads are not taken.

A signal shortens what the main thread sleeps in: sleep(), poll() and their kind return early with EINTR in C code that
does not call them again (Python's own calls do). That is so in every rank that the core signals, also in one that no
rank waits for, and at most once per report.
"""

from __future__ import annotations

import contextlib
import os
import signal

_found: list[tuple[int, int]] = []


def source() -> tuple[int, int]:
    """(signal, descriptor) for the core; (0, -1) where there is no such way."""
    if not _found:
        _found.append(_register())
    return _found[0]


def _register() -> tuple[int, int]:
    try:
        import faulthandler

        free = _free_signal()
        if free == 0:
            return 0, -1
        file = os.memfd_create("hvdlite-stack", os.MFD_CLOEXEC)
        faulthandler.register(free, file=file, all_threads=False, chain=False)
        return free, file
    except (ImportError, AttributeError, OSError, ValueError, RuntimeError):
        return 0, -1


def _free_signal() -> int:
    """The greatest real-time signal that does what it does by default, but for the last few. The kernel names them, for
    Python does not know of handlers that C has installed, as faulthandler itself does for the user."""
    caught = 0
    with contextlib.suppress(OSError), open("/proc/self/status", "rb") as status:
        caught = next((int(line.split()[1], 16) for line in status if line.startswith(b"SigCgt:")), 0)
    for number in range(signal.SIGRTMAX - 4, signal.SIGRTMIN + 4, -1):
        if signal.getsignal(number) is signal.SIG_DFL and not caught >> (number - 1) & 1:
            return number
    return 0
