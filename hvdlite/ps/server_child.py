"""A parameter server as a child of a rank, where no launcher of ours starts servers.

The order comes as a line of JSON on stdin, the address goes back as a line on stdout. The end of stdin, or of the rank,
is its end.

It takes none of the rank's signals: Ctrl-C reaches it, too, while ranks may still save their tables.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable

from . import server


class _Stdin:
    def fileno(self) -> int:
        return 0

    def ended(self, report: Callable[[int, str], None]) -> bool:
        """Nothing is reported here: ranks notify each other's servers by messages (cluster.py)."""
        return not os.read(0, 4096)


def main() -> None:
    """Called in a process of its own."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a rank may be bound to one CPU; the kernel keeps to what its group may use
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    order = json.loads(sys.stdin.buffer.readline())
    order["secret"] = bytes.fromhex(order["secret"])
    server.run(server.ServerOptions(**order), _Stdin(), _announce)


def _announce(address: str) -> None:
    print(address, flush=True)
    os.dup2(2, 1)  # the pipe has no reader any more, and a user's rule may print
