"""Bound on how long a thread waits for a collective when nothing else ends the wait.

HVDLITE_COLLECTIVE_TIMEOUT is the core's to keep (csrc/engine/lifecycle/stall_check.c): it ends the job with a text that
names the missing ranks, whether a thread waits or not. If the core itself hangs, a thread that waits in Python gives up
after twice that time and some seconds. It then fails the whole job with what it knows: this rank and the tensor. Only a
waiting thread checks, each time that the core returns to Python; join may wait without a limit. Waits outside of Python
get the limit, and check it themselves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from .library import ffi, lib

WAIT_MS = 50  # after which waiting comes back to Python

_limit = [0.0]  # seconds; 0: none
_core_limit = [0.0]  # of the core's own limit
_followers: list[Callable[[float], None]] = []


def bound(seconds: float | None) -> None:
    """The core's limit from now on is so many seconds; 0 or None: none."""
    _core_limit[0] = seconds or 0.0
    _limit[0] = 2 * seconds + 10 if seconds else 0.0
    for notify in _followers:
        notify(_limit[0])


def core_limit() -> float:
    """The core's own limit in seconds; 0: none."""
    return _core_limit[0]


def follow(notify: Callable[[float], None]) -> None:
    """Calls `notify` with the limit in seconds (0: none), now and whenever it changes."""
    _followers.append(notify)
    notify(_limit[0])


def waited(since: float, name: Any = None) -> float:
    """Called once waiting has come back without an end; returns what to pass the next time, 0.0 at first.

    name: as Request has it. When it is too long the job fails, and with it what is waited for.
    """
    if not _limit[0]:
        return 0.0
    now = time.monotonic()
    if not since:
        return now - WAIT_MS / 1000
    if now - since < _limit[0]:
        return since
    what = f"tensor {name[0]!r}" if name is not None and isinstance(name[0], str) else "a collective"
    rank = lib.hvd_rank()
    reason = (
        f"rank {rank} has waited {_limit[0]:g} s for {what}, which not all ranks have submitted or finished "
        "(HVDLITE_COLLECTIVE_TIMEOUT sets the limit)"
    )
    lib.hvd_abort(rank, lib.HVD_ETIMEOUT, ffi.new("char[]", reason.encode("utf-8", "replace")))
    return math.inf
