"""Terminals for rank 0 with `--pty`; their other ends are read as pipes are.

Programs look whether they write to a terminal, and show a progress bar or colours, or flush line by line, only then. So
stdout and stderr of rank 0 are two terminals, as wide as the launcher's is beside its prefix. They change nothing that
is written (no carriage returns before newlines), and none controls the rank's session: Ctrl-C is the launcher's.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from collections.abc import Sequence

WIDTH_MIN = 20
_OFLAG = 1  # of what termios.tcgetattr returns


def room(prefix: int) -> tuple[int, int]:
    """(rows, columns) for a rank whose lines stand behind a prefix of so many characters."""
    columns, rows = 80, 24
    for descriptor in (1, 2):
        try:
            columns, rows = os.get_terminal_size(descriptor)
            break
        except OSError:
            continue
    return rows, max(WIDTH_MIN, columns - prefix)


def pair(size: Sequence[int]) -> tuple[int, int]:
    """(the end to read, the terminal) of size (rows, columns)."""
    reading, terminal = os.openpty()
    state = termios.tcgetattr(terminal)
    state[_OFLAG] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, state)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    return reading, terminal
