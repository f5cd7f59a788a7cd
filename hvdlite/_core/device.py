"""What a device may still touch when a job has failed, and how long a caller waits for a device.

When a job fails, what waits for a lost peer on a device is ended by force, beside everything else, which takes up to a
second; a thread that waits for a collective gets the error at once. What a device may still read or write is held
(`risk`), or its framework would reuse that memory: until the core has closed and has seen that nothing of its own runs
there any more. If it has not seen that, for ever.
"""

from __future__ import annotations

from typing import Any

from .library import error_for, failure_of_job, lib

_risked: list[Any] = []
_HANGS = 2  # asks whether something that a failed job has left on a device could not be ended


def risk(keep: Any) -> None:
    """Holds the memory of a collective on a device that has ended, if it may have ended because the job has failed."""
    if failure_of_job() is not None or lib.hvd_gpu_version(_HANGS):
        _risked.append(keep)


def let_go() -> None:
    """The core has closed: devices touch nothing any more that was at risk, unless one hangs."""
    if not lib.hvd_gpu_version(_HANGS):
        _risked.clear()


def raise_failure() -> None:
    """Raises the job's error if it has failed: a collective that has ended on a device may have ended without its
    peers."""
    failure = failure_of_job()
    if failure is not None:
        raise error_for(*failure[1:])
