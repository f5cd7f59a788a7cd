"""hvdlite-run --mpi: the command line for each MPI (pure), and real ones that it starts."""

import os
import shlex
import sys
from pathlib import Path

import mpis
import pytest
from hosts import Hosts, needs_hosts
from hosts_shell import Shell, end
from launching import RUN, launch

from hvdlite.launcher.hosts import Host
from hvdlite.launcher.mpi import INTEL, MPICH, OPEN_MPI, Kind, MpiError, Wanted, joined, kind_of, line, variables

OVER_MPI = Path(__file__).resolve().parent / "over_mpi.py"
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
    return line(kind, "mpirun", Wanted(**{"size": 8, "hosts": TWO, "command": ["python", "t.py"], **wanted}), names)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            made(OMPI4, ["PATH", "HVDLITE_X"], root=True),
            "mpirun --allow-run-as-root -np 8 -H a:4,b:4 --bind-to none --map-by slot --tag-output --mca btl ^openib "
            "-x PATH -x HVDLITE_X python t.py",
        ),
        (
            made(OMPI5, ["A"], tcp=True, timestamps=True, folder="out", args="-x A=1 --mca btl_base_verbose 30"),
            "mpirun -np 8 -H a:4,b:4 --bind-to none --map-by slot --output tag,timestamp,dir=out --mca pml ob1 "
            "--mca btl self,sm,tcp -x A=1 --mca btl_base_verbose 30 python t.py",
        ),
        (
            made(OMPI4, interfaces=["eth0"], binding="--bind-to core", ssh_port=2222, ssh_identity="k", tcp=True),
            "mpirun -np 8 -H a:4,b:4 --bind-to core --tag-output --mca pml ob1 --mca btl self,vader,tcp "
            "--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --mca plm_rsh_args '-p 2222 -i k' python t.py",
        ),
        (
            made(OMPI5, bridges=["docker0"]),
            "mpirun -np 8 -H a:4,b:4 --bind-to none --map-by slot --output tag "
            "--mca btl_tcp_if_exclude 127.0.0.0/8,docker0 --mca oob_tcp_if_exclude 127.0.0.0/8,docker0 python t.py",
        ),
        (
            made(OMPI5, bridges=["docker0"], args="--mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0"),
            "mpirun -np 8 -H a:4,b:4 --bind-to none --map-by slot --output tag --mca btl_tcp_if_include ib0 "
            "--mca oob_tcp_if_include ib0 python t.py",
        ),
        (made(HYDRA, ["PATH"]), "mpirun -n 8 -hosts a:4,b:4 -prepend-rank python t.py"),
        (made(HYDRA, hosts=[], interfaces=["ib0"]), "mpirun -n 8 -prepend-rank -iface ib0 python t.py"),
        (made(IMPI, args="-genv X 1"), "mpirun -n 8 -hosts a,b -ppn 4 -prepend-rank -genv X 1 python t.py"),
    ],
)
def test_each_mpi_is_spoken_to_in_its_own_words(words, expected):
    assert shlex.join(words) == expected.replace("^openib", "'^openib'")


def test_what_is_said_by_the_environment():
    wanted = Wanted(8, TWO, ["t"], tcp=True, ssh_port=2222)
    assert variables(OMPI4, wanted) == {"NCCL_IB_DISABLE": "1"}
    assert variables(HYDRA, wanted)["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 2222"
    assert variables(IMPI, wanted)["FI_PROVIDER"] == "tcp"
    assert variables(HYDRA, Wanted(8, TWO, ["t"])) == {}


def test_what_cannot_be_said_is_an_error():
    with pytest.raises(MpiError, match="machinefile"):
        made(IMPI, hosts=[Host("a", 4), Host("b", 2)])
    with pytest.raises(MpiError, match="one network interface"):
        made(HYDRA, interfaces=["a", "b"])
    with pytest.raises(MpiError, match="No closing quotation"):
        made(OMPI4, args="-x 'A")


def test_values_may_start_with_a_dash():
    assert joined(["-np", "2", "--mpi-args", "-q"]) == ["-np", "2", "--mpi-args=-q"]


@pytest.mark.parametrize("mpi", mpis.ALL)
def test_it_starts_the_mpirun_that_is_on_the_path(mpi):
    path = f"{mpis.mpirun(mpi).parent}:{os.environ['PATH']}"
    words = ["--mpi", "-np", "3", "--mpi-args", "-l" if mpi == "mpich" else "--oversubscribe", "--verbose"]
    code, out, err = launch(*words, sys.executable, OVER_MPI, "meet", PATH=path, HVDLITE_RANK="7")
    assert code == 0 and out.count("fine\n") == 3, out + err
    assert f"hvdlite-run: {mpis.mpirun(mpi).parent}/mpirun " in err, err


def test_a_dry_run_shows_the_line_and_starts_nothing(tmp_path):
    """The mpirun tells only its version."""
    (tmp_path / "mpirun").write_text(
        f"#!/bin/sh\n[ $# = 1 ] || touch {tmp_path}/started\necho 'mpirun (Open MPI) 5.0.2'\n"
    )
    (tmp_path / "mpirun").chmod(0o755)
    words = ["--mpi", "--dry-run", "-np", "3", "-mca", "pml", "ob1", "--output-filename", tmp_path / "said"]
    code, out, err = launch(*words, "train", "a b", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 0 and out.startswith(f"command: {tmp_path}/mpirun ") and " -np 3 " in out, out + err
    assert out.endswith(" --mca pml ob1 train 'a b'\n") and os.listdir(tmp_path) == ["mpirun"], out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--mpi", "true"], 2, "how many ranks? Say -np N"),
        (["--mpi", "-np", "x", "true"], 2, "-np x"),
        (["--mpi", "-np", "4", "-H", "a:2", "true"], 2, "Requested more processes (4)"),
        (["--mpi", "-np", "1", "true"], 127, "neither mpirun, mpiexec nor mpiexec.hydra is on PATH"),
        (["--tcp", "-np", "1", "true"], 2, "they need --mpi"),
        (["--mpi-args", "-x A", "-np", "1", "true"], 2, "they need --mpi"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(words, code, says, tmp_path):
    (tmp_path / "true").symlink_to("/bin/true")
    ended, _, err = launch(*words, PATH=str(tmp_path))
    assert ended == code and says in err, err


def test_a_program_that_is_no_mpi_is_not_run(tmp_path):
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho something else\n")
    program.chmod(0o755)
    code, _, err = launch("--mpi", "-np", "1", "true", PATH=f"{tmp_path}:/bin")
    assert code == 2 and "--version says 'something else'" in err, err


@needs_hosts
@pytest.mark.parametrize("mpi", ["mpich", "system"])
def test_hosts_are_passed_on(mpi):
    """Over two hosts, of which each has a docker0 of the same address; the agent stands for ssh."""
    mpis.mpirun(mpi)
    args = "" if mpi == "system" else "-launcher ssh -launcher-exec {}"
    with Hosts(2) as hosts, Shell(hosts, mpis.environment(mpi)) as shell:
        path = f"{mpis.mpirun(mpi).parent}:{os.environ['PATH']}"
        environ = {**shell.environ, "PATH": path, "OMPI_MCA_plm_rsh_agent": shell.agent, "OMP_NUM_THREADS": "1"}
        words = [
            *RUN,
            "--mpi",
            "-H",
            "nodeA:2,nodeB:1",
            f"--mpi-args={args.format(shell.agent)}",
            "-x",
            "HVDLITE_TEST=1",
        ]
        words += [sys.executable, OVER_MPI, "meet", "2,1"]
        process = hosts.popen(0, words, env=environ, stdout=-1, stderr=-2, stdin=-3, start_new_session=True)
        try:
            said = process.communicate(timeout=120)[0].decode(errors="replace")
        finally:
            end(process)
    assert process.returncode == 0 and said.count("fine\n") == 3, said
