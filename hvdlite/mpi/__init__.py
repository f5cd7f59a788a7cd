"""MPI as the rendezvous of ranks: `mpirun python train.py` and `hvd.init(comm=...)`, with any MPI that is there.

MPI is touched only when it was asked for, in one of three ways (`wanted`):

    hvd.init(comm=MPI.COMM_WORLD), or another communicator of mpi4py, or a list of them: the job's, then process sets
    more than one rank, started by mpirun, mpiexec or srun --mpi=pmi2|pmix (and not by hvdlite-run); then init() also
    takes a list of ranks of MPI_COMM_WORLD
    HVDLITE_PLANE=mpi with more than one rank

Then the library is found (libmpi.py), MPI is started unless it runs already, and a `World` (world.py) takes the place
that the launcher's store has otherwise: it knows the ranks, and its allgather is the bootstrap. Nothing here is
compiled against an MPI, and mpi4py is needed only by scripts that pass its communicators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..rendezvous.discovery import Place

if TYPE_CHECKING:
    from .world import World

_STARTERS = ("Open MPI", "MPICH or Intel MPI", "MVAPICH", "jsrun")
_worlds: list[World] = []  # the last one opened; empty: this process is no rank of a job over MPI
exit_code = 0  # of this process, once it is about to end


def wanted(comm: Any, place: Place | None, environ: Mapping[str, str], plane: Any = None) -> bool:
    """Whether this job is to be made over MPI. place: None where the environment alone says nothing usable."""
    if is_communicator(comm):
        return True
    if place is None or place.size == 1:
        return False
    started = place.source in _STARTERS or (
        place.source == "Slurm" and ("PMI_RANK" in environ or "PMIX_RANK" in environ)
    )
    return started or plane == "mpi"


def is_communicator(comm: Any) -> bool:
    """Whether comm is one of mpi4py's communicators."""
    return hasattr(comm, "Get_rank") and hasattr(comm, "Get_size")


def first_of(comm: Any) -> tuple[Any, list[Any]]:
    """Of a list of communicators the job's and the rest; of anything else that and nothing."""
    if isinstance(comm, (list, tuple)) and comm and all(map(is_communicator, comm)):
        return comm[0], list(comm[1:])
    return comm, []


def enabled() -> bool:
    """Whether this process is a rank of a job over MPI."""
    return bool(_worlds)


def current() -> World:
    """The World of this job. IndexError unless `enabled()`."""
    return _worlds[-1]


@contextlib.contextmanager
def settling() -> Iterator[None]:
    """Around what begins a job: afterwards it has begun, or will not."""
    try:
        yield
    finally:
        for world in _worlds:
            world.settled()


def available() -> bool:
    """Whether an MPI that can be used is there; loads it to find out, and does not start it."""
    from . import libmpi

    try:
        libmpi.load()
    except Exception:
        return False
    return True
