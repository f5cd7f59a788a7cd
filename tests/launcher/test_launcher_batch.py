"""Which hosts a scheduler has given to a job, from what Slurm, LSF, PBS, SGE and an MPI operator leave; all pure."""

import pytest

from hvdlite.launcher import cli
from hvdlite.launcher.hosts import scheduler
from hvdlite.launcher.hosts.hosts import Host, HostError
from hvdlite.launcher.hosts.scheduler import crowd
from hvdlite.launcher.placement import allocation, host_flags
from hvdlite.launcher.starters.rsh import agent_of
from hvdlite.launcher.starters.slurm import Srun

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[01-03],big",
    "SLURM_TASKS_PER_NODE": "4(x2),2,8",
    "SLURM_STEP_NODELIST": "n01",
}
FILES = {
    "pbs": "a\na\nb\na\n",
    "sge": "a.example.org 4 all.q@a UNDEFINED\nb.example.org 2 all.q@b UNDEFINED\n",
    "lsf": "a\na\nb\n",
    "operator": "# made by the operator\nw-0.w slots=2\nw-1.w slots=2\n",
    "intel": "w-0.w:2\nw-1.w:2\n",
    "empty": "\n",
}


def read(path):
    if path not in FILES:
        raise FileNotFoundError(2, "No such file or directory", path)
    return FILES[path]


@pytest.mark.parametrize(
    ("environ", "title", "hosts"),
    [
        (SLURM, "Slurm", [("n01", 4), ("n02", 4), ("n03", 2), ("big", 8)]),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2"}, "Slurm", [("n01", 2), ("n02", 2), ("n03", 2), ("big", 2)]),
        ({"SLURM_JOB_ID": "7", "SLURM_NODELIST": "n1"}, "Slurm", [("n1", 1)]),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b 2 "}, "LSF", [("a", 4), ("b", 2)]),
        ({"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": "lsf", "LSB_HOSTS": "c"}, "LSF", [("a", 2), ("b", 1)]),
        ({"LSB_JOBID": "7", "LSB_HOSTS": "a b b"}, "LSF", [("a", 1), ("b", 2)]),
        ({"PBS_NODEFILE": "pbs"}, "PBS", [("a", 3), ("b", 1)]),
        ({"PE_HOSTFILE": "sge"}, "SGE", [("a.example.org", 4), ("b.example.org", 2)]),
        ({"OMPI_MCA_orte_default_hostfile": "operator"}, "the MPI operator", [("w-0.w", 2), ("w-1.w", 2)]),
        ({"I_MPI_HYDRA_HOST_FILE": "intel"}, "the MPI operator", [("w-0.w", 2), ("w-1.w", 2)]),
    ],
)
def test_a_scheduler_tells_its_hosts(environ, title, hosts):
    found = scheduler.allocation(environ, read)
    assert found is not None and found.title == title
    assert found.hosts == [Host(*each) for each in hosts] and found.slots == sum(slots for _, slots in hosts)


@pytest.mark.parametrize("environ", [{}, {"SLURM_CONF": "x"}, {"LSB_HOSTS": "a"}, {"SLURM_JOB_ID": "7"}])
def test_outside_of_an_allocation_there_is_none(environ):
    assert scheduler.allocation(environ, read) is None


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST='n\\[1-'"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE='two'"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2,2"}, "does not match the 4 nodes of SLURM_JOB_NODELIST"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b x"}, "LSB_MCPU_HOSTS"),
        ({"LSB_JOBID": "7"}, "LSB_HOSTS names no host"),
        ({"PBS_NODEFILE": "gone"}, "PBS: gone: No such file"),
        ({"PBS_NODEFILE": "empty"}, "PBS_NODEFILE empty names no host"),
        ({"PE_HOSTFILE": "operator"}, "PE_HOSTFILE operator, line"),
    ],
)
def test_half_an_allocation_is_an_error_that_names_it(environ, says):
    with pytest.raises(HostError, match=says):
        scheduler.allocation(environ, read)


def test_a_launcher_that_srun_has_started_several_times_is_seen():
    assert crowd({}) == crowd(SLURM) == 1 == crowd({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert crowd({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}) == 4


def test_an_agent_of_the_scheduler_stands_for_ssh(tmp_path):
    (tmp_path / "blaunch").write_text("#!/bin/sh\n")
    (tmp_path / "blaunch").chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert agent_of({}) is agent_of(path) is agent_of(path, "PBS") is agent_of({"PATH": "/nowhere"}, "LSF") is None
    assert agent_of({"OMPI_MCA_plm_rsh_agent": "ssh : rsh"}) is None
    for starter, begins in (
        (agent_of(path, "LSF"), [str(tmp_path / "blaunch"), "b"]),
        (agent_of({"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"}), ["/etc/mpi/kubexec.sh", "b"]),
    ):
        (session,) = starter.sessions([(1, "b")])
        assert session.words[:2] == begins and session.hosts == [1]
        assert "use hvdlite-run --mpi" in starter.remedy("b", 255, "")


def test_one_srun_starts_all_agents_in_slurms_order():
    apart = Srun(["a", "b", "c"], apart=True).sessions([(0, "c"), (1, "a")])
    assert [(each.hosts, "--nodelist=a" in each.words) for each in apart] == [([1], True), ([0], False)]
    (session,) = Srun(["a", "b", "c"]).sessions([(0, "c"), (1, "a")])
    assert session.hosts == [1, 0] and "--nodelist=a,c" in session.words and "--ntasks-per-node=1" in session.words
    assert "srun" in session.words and not any("secret" in word for word in session.words[:-1])
    assert "install it on all nodes" in Srun(["a"]).remedy("a", 1, "ModuleNotFoundError: No module named 'hvdlite'")


def test_more_ranks_than_slots_are_refused_but_where_the_job_is_this_host_alone(monkeypatch):
    monkeypatch.setattr(allocation.hosts, "read", lambda path: "a\nb\n")
    with pytest.raises(host_flags.PlaceError, match="PBS has given this job 2 slots on 2 hosts"):
        allocation.placement(cli._parser().parse_args(["-np", "3"]), {"PBS_NODEFILE": "x"}, 30.0)
    monkeypatch.setattr(allocation.hosts, "read", lambda path: "localhost\n")
    found = allocation.placement(cli._parser().parse_args(["-np", "3"]), {"PBS_NODEFILE": "x"}, 30.0)
    assert len(found.slots) == 3 and found.gather is None
