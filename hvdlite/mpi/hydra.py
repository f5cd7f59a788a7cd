"""Report to Hydra when a rank raises before MPI_Init.

Hydra (of MPICH and Intel MPI) takes an exit before MPI_Init for an end like any other; the others wait for that rank.
Those of its host see that it has gone (diagnosis.py); those of other hosts cannot. So the rank says it itself, by the
one word of PMI, the protocol between Hydra and its processes, that needs no greeting: abort. That is done at exit, when
the exception has been printed, and never where an MPI may have been started: the connection is that MPI's then. Under
`hvdlite-run --mpi` nothing is printed: that launcher notices the end by itself, and gives the others time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import sys
import time
from collections.abc import Mapping

_ABORT = b"cmd=abort exitcode=1\n"
_READ_S = 0.3  # for Hydra to read the traceback, which it drops once it has the order to abort
_OURS = "HVDLITE_RESTART_COUNT"  # which hvdlite-run tells every rank


def watch(environ: Mapping[str, str]) -> None:
    """From now on an exception that ends this process ends the job, if Hydra has started it; until `met`."""
    number = environ.get("PMI_FD", "")
    if _OURS not in environ and number.isdigit() and environ.get("PMI_SIZE", "1") != "1":
        atexit.register(_at_exit, os.getpid(), int(number))


def met() -> None:
    """MPI is about to be started, and knows by itself what to say."""
    atexit.unregister(_at_exit)


def _at_exit(pid: int, connection: int) -> None:
    raised = getattr(sys, "last_value", None) is not None
    if os.getpid() != pid or not raised or "mpi4py.MPI" in sys.modules:
        return
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(connection).st_mode):
            sys.stderr.flush()
            time.sleep(_READ_S)
            os.write(connection, _ABORT)
