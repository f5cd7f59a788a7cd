"""A real Slurm on two hosts starts ranks: by srun alone, and by hvdlite-run inside an allocation."""

import os
import sys
from pathlib import Path

import mpis
import pytest
from hosts import needs_hosts
from ranks import everything

pytestmark = needs_hosts
JOBS = Path(__file__).resolve().parents[2] / "examples" / "batch"
PROGRAM = Path(__file__).resolve().parents[1] / "support/on_slurm.py"


@pytest.fixture
def quiet(tmp_path):
    """A home without a key in it, and one thread per rank."""
    return {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("slots", ["2,1", *everything("2,2")])
def test_srun_needs_neither_mpi_nor_a_launcher(slurm, quiet, slots):
    count = sum(map(int, slots.split(",")))
    ranks = ["-N2", f"-n{count}", "--ntasks-per-node=2", "--mpi=none", "--distribution=block"]
    code, said = slurm.srun(ranks, [sys.executable, PROGRAM, "meet", slots], **quiet)
    assert code == 0 and said.count("fine") == count, said
    kept = os.stat(os.path.join(quiet["XDG_CONFIG_HOME"], "hvdlite", "key"))
    assert kept.st_mode & 0o077 == 0


def test_a_lost_rank_0_is_named_by_the_others(slurm, quiet):
    code, said = slurm.srun(["-N2", "-n4", "--mpi=none"], [sys.executable, PROGRAM, "die", "0"], kill=False, **quiet)
    assert code != 0 and said.count("lost: barrier") == 3 and said.count("rank 0 (pid ") == 3, said


def test_nodes_that_do_not_share_a_secret_are_told_so(slurm, quiet):
    """The second node's key is another: its rank says what to do, and nobody waits for ever."""
    words = f"XDG_CONFIG_HOME={quiet['XDG_CONFIG_HOME']}/$SLURM_NODEID exec {sys.executable} {PROGRAM} meet 1,1"
    quiet["HVDLITE_START_TIMEOUT"] = "4"
    code, said = slurm.srun(["-N2", "-n2", "--mpi=none"], ["sh", "-c", words], kill=False, **quiet)
    assert (
        code != 0
        and "the store at that port refused this rank's secret" in said
        and "export HVDLITE_SECRET_KEY" in said
    ), said
    assert "rank 1 did not call init within 4 s" in said, said


ALLOCATED = ["salloc", "-Q", "-N2", "-n4", "--ntasks-per-node=2"]
RUN = [sys.executable, "-m", "hvdlite.launcher"]


def test_hvdlite_run_takes_hosts_and_counts_from_the_allocation(slurm, quiet):
    code, said = slurm.run([*ALLOCATED, *RUN, sys.executable, PROGRAM, "meet", "2,2"], **quiet)
    assert code == 0 and all(f"[{rank}]<stdout>:fine\n" in said for rank in range(4)), said


CALL = """
import hvdlite
def f():
    import numpy, socket, hvdlite.numpy as hvd
    hvd.init()
    return socket.gethostname(), float(hvd.allreduce(numpy.ones(2), op=hvd.Sum)[0])
print(hvdlite.run(f, num_proc=4))
"""


def test_a_call_from_python_runs_on_the_allocation(slurm, quiet):
    code, said = slurm.run([*ALLOCATED, sys.executable, "-c", CALL], **quiet)
    assert code == 0 and str([("nodeA", 4.0)] * 2 + [("nodeB", 4.0)] * 2) in said, said


def test_the_doctor_examines_the_allocation(slurm, quiet):
    code, said = slurm.run([*ALLOCATED, *RUN, "doctor"], **quiet)
    assert code == 0 and "2 hosts: 0 failures" in said and "every host reaches every other (2 ways)" in said, said


def test_the_code_of_the_rank_that_failed_comes_through_srun(slurm, quiet):
    """The others have left their sessions: an agent on each node ends them as well."""
    words = "test $HVDLITE_RANK = 3 && exit 37; setsid sleep 100"
    code, said = slurm.run([*ALLOCATED, *RUN, "sh", "-c", words], **quiet)
    assert code == 37 and "rank 3" in said, said


def test_a_launcher_that_is_killed_takes_its_ranks_on_all_nodes_along(slurm, quiet):
    """Rank 0 does it, when all of them run. The allocation goes on. Whether the agents' SIGTERM comes to the other
    node's ranks, or Slurm's SIGKILL with the launcher's srun, is a matter of milliseconds: none of them ticks on."""
    folder = quiet["XDG_CONFIG_HOME"]
    rank = f"""tick() {{ date +%s.%N > {folder}/tick.$HVDLITE_RANK; }}; tick
        [ $HVDLITE_RANK = 0 ] && {{ until [ -e {folder}/tick.1 -a -e {folder}/tick.2 -a -e {folder}/tick.3 ]
            do sleep 0.1; done; kill -9 $LAUNCHER; }}
        while :; do tick; sleep 0.1; done"""
    script = f"""sh -c 'export LAUNCHER=$$; exec "$@"' sh "$@"; echo launcher ended with $?
        for _ in $(seq 15); do cat {folder}/tick.* > {folder}/before; sleep 2; cat {folder}/tick.* > {folder}/after
            cmp -s {folder}/before {folder}/after && echo all gone && break; done"""
    code, said = slurm.run([*ALLOCATED, "sh", "-c", script, "sh", *RUN, "sh", "-c", rank], **quiet)
    assert "launcher ended with 137" in said and "all gone" in said, said


SAVES = """cd {folder} || exit; trap 'sleep $((RANK * 2)); echo saved $RANK; exit 143' TERM; : > ready.$RANK
    [ $RANK = 0 ] && { until [ -e ready.1 -a -e ready.2 -a -e ready.3 ]; do sleep 0.1; done
        scancel --signal=TERM $SLURM_JOB_ID; }
    while :; do sleep 0.1; done"""


def test_ranks_that_slurm_ends_past_the_launcher_may_save_as_long_as_it_takes(slurm, quiet):
    """scancel signals the step, not the job file. Who has saved first, and ends with a code, hurries nobody."""
    saves = SAVES.replace("{folder}", quiet["XDG_CONFIG_HOME"])  # the ranks have not got this variable
    code, said = slurm.run([*ALLOCATED, *RUN, "sh", "-c", saves], **quiet)
    assert code == 143 and all(f"[{rank}]<stdout>:saved {rank}\n" in said for rank in range(4)), said


def test_ranks_may_be_less_than_the_allocation_or_more_on_each_node(slurm, quiet):
    code, said = slurm.run([*ALLOCATED, *RUN, "-np", "3", sys.executable, PROGRAM, "place"], **quiet)
    assert code == 0 and [said.count(f"of 3 on node{node}\n") for node in "AB"] == [2, 1], said
    words = [*ALLOCATED[:3], "--ntasks-per-node=1", *RUN, "--nproc-per-node", "2"]
    code, said = slurm.run([*words, sys.executable, PROGRAM, "place"], **quiet)
    assert code == 0 and [said.count(f"of 4 on node{node}\n") for node in "AB"] == [2, 2], said
    code, said = slurm.run([*ALLOCATED, *RUN, "-np", "5", "true"], **quiet)
    assert code == 2 and "-np 5: Slurm has given this job 4 slots on 2 hosts" in said, said


def test_a_launcher_that_srun_multiplies_refuses(slurm, quiet):
    code, said = slurm.srun(["-N1", "-n2"], [*RUN, "true"], kill=False, **quiet)
    assert code == 2 and "srun has started hvdlite-run 2 times" in said, said


@pytest.fixture
def batch(slurm, quiet, tmp_path, monkeypatch):
    """Submits a job file of the examples, as it is, where its train.py is this call of on_slurm.py."""

    def submit(name, *words):
        script = f"import sys, on_slurm as ranks\nranks.{words[0]}(*{words[1:]!r})\n"
        (tmp_path / "train.py").write_text(script)
        monkeypatch.chdir(tmp_path)
        path = os.pathsep.join([os.path.dirname(sys.executable), mpis.OF_SYSTEM, os.environ["PATH"]])
        environ = {**quiet, "PATH": path, "PYTHONPATH": str(PROGRAM.parent), "OMPI_MCA_btl_tcp_if_include": "eth0"}
        smaller = ["--ntasks-per-node=2", "--time=5", "--output=said"]
        code = slurm.sbatch([*smaller, str(JOBS / name)], **environ)
        return code, (tmp_path / "said").read_text()

    return submit


@pytest.mark.parametrize(("name", "to"), [("slurm_srun.sbatch", "ranks"), ("slurm_hvdlite_run.sbatch", "script")])
def test_a_job_file_is_told_when_the_time_is_nearly_over(batch, name, to):
    code, said = batch(name, "wait", to)
    assert code == 0 and said.count("committed") == 4, said


def test_the_job_file_for_mpirun_runs(batch):
    mpis.mpirun("system")
    code, said = batch("slurm_mpirun.sbatch", "meet", "2,2")
    assert code == 0 and said.count("fine") == 4, said


def test_output_is_the_same_by_srun_and_by_mpirun(slurm, quiet):
    """Agents bring it in both ways, and in no way does the starter put words of its own before the lines."""
    mpis.mpirun("system")
    path = os.pathsep.join([mpis.OF_SYSTEM, os.environ["PATH"]])
    words = "echo all alike; echo from $(uname -n) >&2; test $SLURM_JOB_NUM_NODES = 2 || exit 3"
    found = []
    for way in ([], ["--mpi"]):
        command = [*ALLOCATED, *RUN, *way, "-np", "4", "sh", "-c", words]
        code, said = slurm.run(command, PATH=path, OMPI_MCA_btl_tcp_if_include="eth0", **quiet)
        found.append(sorted(line for line in said.splitlines() if line.startswith("[")))
        assert code == 0, said
    assert found[0] == found[1] and len(found[0]) == 8, found
    assert "[0]<stdout>:all alike" in found[0] and "[3]<stderr>:from nodeB" in found[0], found


def test_ranks_meet_over_the_mpi_that_carries_them_in_an_allocation(slurm, quiet):
    mpis.mpirun("system")
    path = os.pathsep.join([mpis.OF_SYSTEM, os.environ["PATH"]])
    command = [*ALLOCATED, *RUN, "--mpi", "--mpi-args=--mca btl_tcp_if_include eth0"]
    code, said = slurm.run([*command, sys.executable, PROGRAM, "meet", "2,2"], PATH=path, **quiet)
    assert code == 0 and all(f"[{rank}]<stdout>:fine\n" in said for rank in range(4)), said
