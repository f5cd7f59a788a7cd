"""Signals as bytes in a socket, for a loop over descriptors.

Handlers do nothing themselves: Python's C handler writes the number, and the loop that watches the descriptors reads
it. A zero byte is `ring`: another thread wants the loop to look around.

Signals that nohup ignores stay ignored. Children must hold no copy of the ends (`ends`), and set no store by the
handlers: exec resets them.
"""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Collection
from typing import Any

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # to the ranks' own processes only
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Catches the launcher's signals while it is entered."""

    def __init__(self) -> None:
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self.ends = (self._woken, self._wake)  # not for children to keep

    def __enter__(self) -> Signals:
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (*ENDING, *PASSED_ON, signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD):
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:  # nohup stays nohup
                signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(-1)
        self._woken.close()
        self._wake.close()

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._woken.fileno()

    def read(self) -> bytes:
        """The numbers of those that have come. Raises BlockingIOError when there is none."""
        return self._woken.recv(4096)

    def awaited(self, seconds: float, numbers: Collection[int]) -> int:
        """Sleeps; the first of these signals that came meanwhile or before, 0 if none did."""
        end = time.monotonic() + seconds
        while True:
            ready = select.select([self._woken], [], [], max(0.0, end - time.monotonic()))[0]
            found = next((number for number in (self.read() if ready else b"") if number in numbers), 0)
            if found or not ready:
                return found

    def ring(self) -> None:
        """Wakes the loop, from any thread."""
        try:
            self._wake.send(b"\0")
        except OSError:
            pass  # full: it will wake up anyway
