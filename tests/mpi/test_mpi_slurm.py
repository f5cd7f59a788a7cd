"""Ranks that a real Slurm's srun starts on two hosts meet over the MPI that its --mpi option serves, or say why not."""

import sys

import mpis
import pytest
from hosts import needs_hosts
from slurm import pmix
from test_mpi_init import PROGRAM

pytestmark = needs_hosts
TWO_AND_TWO = ["-N2", "-n4", "--ntasks-per-node=2"]


def start(slurm, way, mpi, *words, **environ):
    """(exit code, output) of PROGRAM under srun --mpi=way, with a library of this MPI."""
    mpis.mpirun(mpi)
    if way == "pmix" and pmix() is None:
        pytest.skip("Slurm finds no libpmix.so (Debian: apt-get install libpmix-dev)")
    environ = {"OMP_NUM_THREADS": "1", "OMPI_MCA_btl_tcp_if_include": "eth0", **mpis.under_srun(mpi), **environ}
    return slurm.srun([f"--mpi={way}", *TWO_AND_TWO], [sys.executable, PROGRAM, *words], **environ)


@pytest.mark.parametrize(("way", "mpi"), [("pmix", "system"), ("pmi2", "mpich")])
def test_srun_needs_no_other_launcher(slurm, way, mpi):
    code, said = start(slurm, way, mpi, "meet", "2,2", "mpi")
    assert code == 0 and said.count("fine") == 4, said


@pytest.mark.parametrize(("way", "mpi"), [("pmix", "system"), ("pmi2", "mpich")])
def test_collectives_are_right(slurm, way, mpi):
    code, said = start(slurm, way, mpi, "collectives", HVDLITE_PLANE="mpi")
    assert code == 0 and said.count("fine") == 4, said


def test_an_srun_that_serves_no_mpi_makes_no_jobs_of_one(slurm):
    """Each rank's MPI would be a world of its own: Slurm says four, MPI says one."""
    code, said = start(slurm, "none", "mpich", "init", HVDLITE_PLANE="mpi")
    assert code != 0 and "reports a job of 4 ranks, but MPI_COMM_WORLD has 1" in said and "srun --mpi" in said, said
