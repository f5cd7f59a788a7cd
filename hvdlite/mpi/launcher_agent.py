"""Reports of ranks that use MPI to the agent of `hvdlite-run --mpi`: why the job ends.

Such ranks have no connection to the launcher's store, over which other ranks report the first rank that failed, and
why. Without that report the launcher would blame the rank that ends first, and ranks that have just received a failure
end as soon as the one that fails. So each agent keeps one end of a pair of sockets and its rank inherits the other
(launcher/starters/mpi_agent.py); HVDLITE_AGENT names it by its number and its inode, so that no process that has the
variable but not the socket writes into another file. It stands where the store's connection stands: the core writes the
same ABORT frames to it, and the agent passes them on.

Ranks are numbered as the job is, which may have but some of those that the launcher started, in another order
(`hvd.init(comm=...)`). So they send their identity first.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Sequence

from ..security import framing


def connection(name: str | None) -> int:
    """The descriptor that this variable names; -1: there is none. Processes that are started here do not get it."""
    number, _, inode = (name or "").partition(":")
    if not (number.isdecimal() and inode.isdecimal()):
        return -1
    try:
        found = os.fstat(int(number))
    except (OSError, OverflowError):
        return -1
    if not stat.S_ISSOCK(found.st_mode) or found.st_ino != int(inode):
        return -1
    os.set_inheritable(int(number), False)
    return int(number)


def introduce(to: int, numbers: Sequence[int]) -> None:
    """Says which of the launcher's ranks each rank of this job is."""
    _send(to, framing.Session().pack(framing.JOIN, json.dumps(list(numbers)).encode()))


def abort(to: int, culprit: int, code: int, text: str) -> None:
    """Says why the job ends, as the core does once it runs."""
    _send(to, framing.Session().pack(framing.ABORT, framing.pack_end(culprit, code, text)))


def leave(to: int) -> None:
    """Says that this rank has left the job, and may run exit handlers from now on."""
    _send(to, framing.Session().pack(framing.BYE, b""))


def _send(to: int, frame: bytes) -> None:
    if to < 0:
        return
    with contextlib.suppress(OSError):  # an agent that is gone takes its rank along
        while frame:
            frame = frame[os.write(to, frame) :]
