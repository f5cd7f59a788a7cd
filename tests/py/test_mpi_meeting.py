"""Ranks that an MPI has started meet over it, with and without mpi4py, and what goes wrong names the remedy."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import mpis
import pytest
from ranks import everything

from hvdlite import mpi
from hvdlite.mpi import unmet, waiting, world

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "over_mpi.py"
DIGITS = HERE.parents[1] / "examples" / "03_train_digits.py"


@pytest.mark.parametrize("mpi", mpis.ALL)
def test_ranks_meet_without_a_launcher_of_ours(mpi):
    code, said = mpis.run(mpi, 3, PROGRAM, "meet")
    assert code == 0 and said.count("fine") == 3, said


@pytest.mark.parametrize("mpi", mpis.WHEELS)
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


@pytest.mark.parametrize("mpi", mpis.WHEELS)
def test_mpi_init_is_waited_in_no_longer_than_allowed(mpi):
    """It cannot be interrupted: the process ends, with it the job."""
    code, said = mpis.run(mpi, 2, PROGRAM, "never", HVDLITE_START_TIMEOUT="3")
    assert code != 0 and "rank 0 of 2" in said and "Do all of them call it" in said, said
    assert "has waited 3 s in MPI_Init (HVDLITE_START_TIMEOUT)" in said or "within 3 s" in said, said


@pytest.mark.parametrize("way", ["raise", "_exit"])
@pytest.mark.parametrize("mpi", mpis.ALL)
def test_a_rank_that_ends_before_mpi_init_ends_the_job(mpi, way):
    """Hydra does not see to that, so those who wait do; the limit of a minute is not reached."""
    began = time.monotonic()
    code, said = mpis.run(mpi, 3, PROGRAM, f"early_{way}", HVDLITE_START_TIMEOUT="100")
    assert code != 0 and time.monotonic() - began < 60, said
    assert way == "_exit" or "ValueError: too early to be a rank" in said, said
    wanted = "waits in MPI_Init for rank 1, which has ended before it came there"
    assert mpi != "mpich" or way == "raise" or wanted in said, said


def test_only_a_rank_that_hydra_has_started_says_abort_to_it(monkeypatch):
    """Under hvdlite-run --mpi Hydra is told nothing: the launcher would not live to name the rank."""
    asked = []
    monkeypatch.setattr(unmet.atexit, "register", lambda act, *given: asked.append(given))
    for more in ({}, {"PMI_FD": "7"}, {"PMI_SIZE": "1", "PMI_FD": "7"}, {"PMI_SIZE": "2", "PMI_FD": "port"}):
        unmet.watch(more)
    unmet.watch({"PMI_SIZE": "2", "PMI_FD": "7", "HVDLITE_RESTART_COUNT": "0"})
    assert not asked
    unmet.watch({"PMI_SIZE": "2", "PMI_FD": "7"})
    assert asked == [(os.getpid(), 7)]


def siblings(proc, parent, states, **environ):
    """Ranks 0, 1, ... under a made /proc: process 10 is `parent`, its children 20, 21, ... are in these states."""
    (proc / "10" / "task" / "10").mkdir(parents=True)
    (proc / "10" / "comm").write_text(parent)
    (proc / "10" / "stat").write_text("10 (a) b) S 1 10")
    (proc / "10" / "task" / "10" / "children").write_text(" ".join(str(20 + i) for i in range(len(states))))
    for i, state in enumerate(states):
        (proc / str(20 + i)).mkdir()
        (proc / str(20 + i) / "comm").write_text("python3")
        (proc / str(20 + i) / "stat").write_text(f"{20 + i} (python3) {state} 10 10")
        (proc / str(20 + i) / "environ").write_bytes(b"A=1\0PMI_RANK=%d\0" % i)
    (proc / "30").mkdir()  # the Python of a rank that is a script
    (proc / "30" / "comm").write_text("python3")
    (proc / "30" / "stat").write_text("30 (python3) S 20 10")
    return waiting.Siblings({"MPI_LOCALNRANKS": "3", "PMI_SIZE": "3", **environ}, 30, proc)


@pytest.mark.parametrize(
    "parent, states, environ, ended",
    [
        ("hydra_pmi_proxy\n", "SRS", {}, None),
        ("hydra_pmi_proxy\n", "SZS", {}, "rank 1"),
        ("hydra_pmi_proxy\n", "SS", {}, "rank 2"),
        ("hydra_pmi_proxy\n", "SZS", {"PMI_SIZE": "6"}, "a rank of this host"),
        ("hydra_pmi_proxy\n", "SZS", {"MPI_LOCALNRANKS": "many"}, None),
        ("prted\n", "SZS", {}, None),
    ],
)
def test_who_waits_under_hydra_sees_a_rank_that_has_ended(tmp_path, parent, states, environ, ended):
    assert siblings(tmp_path, parent, states, **environ).ended() == ended


def test_an_mpi_that_is_not_the_launchers_is_no_job_of_ones():
    """Every rank would be rank 0 of 1."""
    code, said = mpis.run("mpich", 2, PROGRAM, "init", HVDLITE_MPI_LIBRARY=str(mpis.library("openmpi")))
    assert code != 0 and "tells of a job of 2 ranks, but MPI_COMM_WORLD has 1" in said and "Open MPI" in said, said


@pytest.mark.parametrize("mpi", mpis.WHEELS)
def test_a_rank_that_raises_ends_the_job_and_is_named(mpi):
    code, said = mpis.run(mpi, 3, PROGRAM, "fail")
    assert code != 0 and "rank 1 raised ValueError: out of cheese (over_mpi.py:" in said, said


@pytest.mark.parametrize("mpi", mpis.WHEELS)
def test_a_rank_that_is_killed_ends_the_job(mpi):
    code, said = mpis.run(mpi, 3, PROGRAM, "die")
    assert code != 0, said


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


def test_mpi_is_left_alone_where_the_ranks_agent_cannot_be_told(monkeypatch):
    """Whatever goes wrong once the thread is there that calls MPI."""
    nothing = SimpleNamespace(hvd_mpi_poke=lambda comm: 0)
    steps = {"_begin": None, "_finish_at_exit": None, "_check_size": None, "_communicator": 7, "_rank_and_size": (0, 1)}
    for name, result in steps.items():
        monkeypatch.setattr(world, name, lambda *_, result=result: result)
    monkeypatch.setattr(world, "lib", nothing)
    monkeypatch.setattr(world, "_has_agent", False)
    monkeypatch.setattr(world.find, "load", lambda: None)
    monkeypatch.setattr(world.World, "allgather", lambda self, mine: [mine])
    monkeypatch.setattr(world.agent, "introduce", lambda to, numbers: 1 // to.imag)
    with pytest.raises(ZeroDivisionError):
        world.open_world(None, None, 1.0, 0, None)
    assert "hvdlite-mpi-move" not in {each.name for each in threading.enumerate()}
