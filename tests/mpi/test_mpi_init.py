"""Ranks that an MPI has started meet over it, with and without mpi4py, and what goes wrong names the remedy."""

import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import mpis
import pytest
from ranks import everything

from hvdlite import mpi
from hvdlite.mpi import world

HERE = Path(__file__).resolve().parents[1] / "support"
PROGRAM = HERE / "over_mpi.py"
DIGITS = HERE.parents[1] / "examples" / "03_train_digits.py"


@pytest.mark.parametrize("mpi", ["mpich", "openmpi", *everything("system")])
def test_ranks_meet_without_a_launcher_of_ours(mpi):
    code, said = mpis.run(mpi, 3, PROGRAM, "meet")
    assert code == 0 and said.count("fine") == 3, said


@pytest.mark.parametrize("mpi", ["mpich", *everything("openmpi")])
def test_communicators_of_mpi4py_are_taken_and_go_on_working(mpi):
    code, said = mpis.run(mpi, 3, PROGRAM, "communicators", with_mpi4py=True)
    assert code == 0 and said.count("fine") == 3, said


@pytest.mark.parametrize("environ", [{}, {"HVDLITE_PLANE": "mpi"}], ids=["shm", "mpi"])
def test_process_sets_are_made_of_communicators(environ):
    code, said = mpis.run("mpich", 4, PROGRAM, "sets", with_mpi4py=True, **environ)
    assert code == 0 and said.count("fine") == 4, said


def test_a_thread_level_that_is_too_low_is_refused_with_the_remedy():
    code, said = mpis.run("mpich", 2, PROGRAM, "low", with_mpi4py=True)
    assert code == 0 and said.count("fine") == 2, said


def test_a_rank_that_does_not_call_init_is_waited_for_no_longer_than_allowed():
    code, said = mpis.run("mpich", 3, PROGRAM, "absent", with_mpi4py=True, HVDLITE_START_TIMEOUT="1")
    assert said.count("fine") == 2, said
    assert code != 0, "an init that has failed ended as if nothing had been"


@pytest.mark.parametrize("mpi", ["mpich", *everything("openmpi")])
def test_mpi_init_is_waited_in_no_longer_than_allowed(mpi):
    """It cannot be interrupted: the process ends, with it the job."""
    code, said = mpis.run(mpi, 2, PROGRAM, "never", HVDLITE_START_TIMEOUT="3")
    assert code != 0 and "rank 0 of 2" in said and "Do all of them call it" in said, said
    assert "has waited 3 s in MPI_Init (HVDLITE_START_TIMEOUT)" in said or "within 3 s" in said, said


@pytest.mark.parametrize(
    ("mpi", "way"),
    everything(*itertools.product(mpis.ALL, ["raise", "_exit"])) or [("mpich", "raise"), ("openmpi", "_exit")],
)
def test_a_rank_that_ends_before_mpi_init_ends_the_job(mpi, way):
    """Hydra does not see to that, so those who wait do; the limit of a minute is not reached."""
    began = time.monotonic()
    code, said = mpis.run(mpi, 3, PROGRAM, f"early_{way}", HVDLITE_START_TIMEOUT="100")
    assert code != 0 and time.monotonic() - began < 60, said
    assert way == "_exit" or "ValueError: too early to be a rank" in said, said
    wanted = "waits in MPI_Init for rank 1, which ended before"
    assert mpi != "mpich" or way == "raise" or wanted in said, said


def test_an_mpi_that_is_not_the_launchers_is_no_job_of_ones():
    """Every rank would be rank 0 of 1."""
    code, said = mpis.run("mpich", 2, PROGRAM, "init", HVDLITE_MPI_LIBRARY=str(mpis.library("openmpi")))
    assert code != 0 and "reports a job of 2 ranks, but MPI_COMM_WORLD has 1" in said and "Open MPI" in said, said


@pytest.mark.parametrize("mpi", ["mpich", *everything("openmpi")])
def test_the_digits_of_the_readme_are_learnt_under_mpirun(mpi):
    pytest.importorskip("sklearn")
    code, said = mpis.run(mpi, 2, DIGITS, "--epochs", "1")
    assert code == 0 and "test accuracy" in said, said


def test_mpi_is_called_until_the_job_has_begun(monkeypatch):
    """What an exchange owes to others leaves meanwhile; afterwards the core sees to that."""
    poked = threading.Event()
    monkeypatch.setattr(world, "lib", SimpleNamespace(hvd_mpi_poke=lambda comm: comm == 7 and poked.set()))
    met = world.World(7, None, 1.0)
    monkeypatch.setattr(mpi, "_worlds", [met])
    with pytest.raises(ZeroDivisionError), mpi.settling():
        met.begin()
        assert poked.wait(60)
        assert "hvdlite-mpi-move" in {each.name for each in threading.enumerate()}
        raise ZeroDivisionError("it will not begin")
    assert "hvdlite-mpi-move" not in {each.name for each in threading.enumerate()}
    met.settled()  # again
