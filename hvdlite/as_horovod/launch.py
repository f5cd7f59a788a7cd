"""`horovod.runner` and below: what scripts ask the launcher's side for, which is their place before init().

The rank is looked for where init() will look, so that an early reader and hvd.rank() agree. `run` starts ranks from
Python, and the command is there as a function. There is no console script `horovodrun`, which would take the place of
one that is installed: say hvdlite-run --as-horovod.
"""

from __future__ import annotations

from .. import config
from ..executors.run import run
from ..lifecycle.capabilities import gloo_built
from ..rendezvous import discovery

__all__ = [
    "get_env_rank_and_size",
    "gloo_built",
    "is_intel_mpi",
    "is_mpich",
    "is_open_mpi",
    "is_spectrum_mpi",
    "mpi_available",
    "run",
    "run_commandline",
]


def get_env_rank_and_size() -> tuple[int, int]:
    """(rank, size) as the environment has it; (0, 1) without a launcher. HvdInitError if it contradicts itself."""
    place = discovery.discover(config.environ())
    return place.rank, place.size


def mpi_available(env: object = None) -> bool:
    """Whether jobs can be started by mpirun. False: this version has its own launcher only."""
    return False


# Which MPI would start a job: none does.
is_open_mpi = is_spectrum_mpi = is_mpich = is_intel_mpi = mpi_available


def run_commandline() -> None:
    """`horovodrun` as a function: hvdlite-run with this process's arguments. Ends the process."""
    import sys
    from importlib import import_module

    sys.exit(import_module("hvdlite.launcher.cli").main())
