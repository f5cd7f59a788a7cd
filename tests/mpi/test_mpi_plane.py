"""Plane mpi does every collective of the core, on every MPI, and gives what all planes give."""

import re
import shutil

import mpis
import pytest
from ranks import everything
from test_mpi_init import HERE, PROGRAM

BENCHMARK = HERE.parents[1] / "examples" / "benchmarks" / "over_mpi.py"


@pytest.mark.parametrize(
    ("mpi", "ranks"), [("mpich", 4), ("openmpi", 3), *everything(("mpich", 1), ("mpich", 2), ("system", 3))]
)
def test_collectives_are_right(mpi, ranks):
    code, said = mpis.run(mpi, ranks, PROGRAM, "collectives", HVDLITE_PLANE="mpi")
    assert code == 0 and said.count("fine") == ranks, said


@pytest.mark.parametrize("mpi", ["mpich", *everything("openmpi")])
def test_a_set_that_one_rank_cannot_open_leaves_no_communicator(mpi):
    code, said = mpis.run(mpi, 3, PROGRAM, "half", HVDLITE_PLANE="mpi")
    assert code == 0 and said.count("fine") == 3, said


def test_the_benchmark_compares_with_a_program_in_c():
    if not mpis.library("mpich").exists() or shutil.which("cc") is None:
        pytest.skip("the MPI's own compiler is needed")
    mpicc = str(mpis.mpirun("mpich").parent / "mpicc")
    words = ["--rounds", "1", "--least", "4096", "--most", "4096", "--mpicc", mpicc]
    code, said = mpis.run("mpich", 2, BENCHMARK, *words, HVDLITE_PLANE="mpi")
    assert code == 0 and re.search(r"4096 bytes  hvdlite +[\d.]+ us  C +[\d.]+ us .*hvdlite/C [\d.]+\n", said), said


def test_collectives_are_right_in_rank_order():
    """Deterministic mode: MPI carries, our kernels add."""
    code, said = mpis.run("mpich", 3, PROGRAM, "collectives", HVDLITE_PLANE="mpi", HVDLITE_DETERMINISTIC="1")
    assert code == 0 and said.count("fine") == 3, said


@pytest.mark.parametrize("mpi", ["openmpi", *everything("mpich")])
def test_a_rank_that_dies_ends_a_job_on_plane_mpi(mpi):
    code, said = mpis.run(mpi, 3, PROGRAM, "die", HVDLITE_PLANE="mpi")
    assert code != 0, said


def test_a_rank_that_raises_is_named_on_plane_mpi():
    code, said = mpis.run("openmpi", 3, PROGRAM, "fail", HVDLITE_PLANE="mpi")
    assert code != 0 and "rank 1 raised ValueError: out of cheese (over_mpi.py:" in said, said
