"""`hvdlite.launcher.parent_death PID ...`: hvdlite-run that ends when the process that has started it does.

hvdlite.run starts the launcher in a session of its own, so that a Ctrl-C at the terminal comes to it once, from its
caller, as a Ctrl-C in a notebook does. What it loses with the terminal is the hangup when everything there is closed;
and a notebook's kernel may be killed at any time. So the kernel is asked to send SIGTERM when the thread that called
ends (it waits for the job, so it ends before it only with its process). PID is the caller: it may have ended already.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from .agent import process
from .cli import main as launch


def main(argv: Sequence[str]) -> int:
    """The process; the exit code of hvdlite-run."""
    process.end_with_parent(signal.SIGTERM)
    if os.getppid() != int(argv[0]):
        return 128 + signal.SIGTERM
    return launch(argv[1:])
