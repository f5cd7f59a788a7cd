"""Wait for sockets: a short spin, then sleep.

The kernel takes 20 to 100 us to wake a thread, and a small call needs four threads, one after the other. So ranks and
servers first look at their sockets for as long as a small call takes. Between looks they yield the processor to any
thread that is ready.

Where nothing comes so soon several times in a row, the next waits do not spin: the answer takes longer, or other
threads need the processors. So an idle server takes no processor time.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any

_SPIN_S = 0.0004
_VAIN_MOST, _VAIN_REST = 3, 64  # after so many vain spins in a row, so many waits do not spin


class SocketWatch:
    """File descriptors that are to become readable. One thread at a time waits; a second one returns soon."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._vain = 0  # spins in a row, then waits without one

    def register(self, descriptor: int) -> None:
        self._poll.register(descriptor, select.POLLIN)

    def unregister(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)

    def wait(self, milliseconds: float) -> list[int]:
        """The descriptors that are readable, after this time at most."""
        try:
            ready = (milliseconds and self._spin()) or self._poll.poll(milliseconds)
        except RuntimeError:  # of a poll object: another thread is in it. It may have waited for the GIL for long
            time.sleep(0.001)
            return []
        return [number for number, _ in ready]

    def _spin(self) -> Any:
        if self._vain >= _VAIN_MOST:
            self._vain = self._vain + 1 if self._vain < _VAIN_MOST + _VAIN_REST else 0
            return None
        until = time.monotonic() + _SPIN_S
        while time.monotonic() < until:
            if ready := self._poll.poll(0):
                self._vain = 0
                return ready
            os.sched_yield()
        self._vain += 1
        return None
