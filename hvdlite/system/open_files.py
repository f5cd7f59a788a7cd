"""Limit of open files: check that this process may open as many as its part of the job takes.

In a job of some hundred ranks each has a stream to every other one, and the launcher a connection to each. Usual limits
are 1,024 open files, which a process may raise by itself (the soft limit), and a much higher one that it may not. Here
the soft one is raised as far as is needed, once it is known how many that is, and not before: a program that uses
select() can watch no descriptor above 1,023, and small jobs never get there.
"""

from __future__ import annotations

import os
import resource

from ..errors import HvdInitError

SPARE = 256  # connections that are not yet believed, and what the framework opens meanwhile


def allow(more: int, process: str, why: str) -> None:
    """Room for `more` descriptors beyond those that are open. Raises HvdInitError naming the process and the
    purpose."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _opened() + more
    if soft == resource.RLIM_INFINITY or soft >= needed + SPARE:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise HvdInitError(
            f"{process} may open {hard} files, and needs {needed + SPARE} {why}: raise the hard limit of open files "
            "(ulimit -Hn, LimitNOFILE of a service, --ulimit nofile of a container) [HVD120]"
        )
    limit = needed + SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _opened() -> int:
    """How many are open, as far as that is known."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
