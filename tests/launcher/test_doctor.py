"""hvdlite-run doctor: what facts mean, what stands in the way of a job on one host and on several, and the fixes."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
from hosts import needs_hosts
from hosts_sshd import empty_within
from launching import Launch, launch

from hvdlite.launcher.diagnostics import findings
from hvdlite.launcher.diagnostics.findings import FAILURE, WARNING, WELL
from hvdlite.launcher.probe import host_probe

SECONDS = 300
GOOD = {
    "python": "3.11.7",
    "executable": "/usr/bin/python3",
    "hvdlite": "0.2.0",
    "core": None,
    "frameworks": {"PyTorch": "2.9.0", "JAX": None},
    "gpus": [],
    "cpus": 8,
    "libraries": {"MPI": None, "NCCL": None},
    "shm": [8 << 30, 8 << 30],
    "files": [65536, 65536],
    "ports": 28232,
}

HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "2"}
OWN = {"HVDLITE_SIZE": "2", "HVDLITE_STORE_ADDR": "t-0.t", "JOB_COMPLETION_INDEX": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def bad(facts, slots=None):
    """Findings that are not well."""
    return [each for each in findings.of_facts(facts, slots or {}) if each.grade != WELL]


def test_hosts_that_are_alike_are_one_line_each():
    found = findings.of_facts({"a": GOOD, "b": GOOD, "c": GOOD}, {})
    assert not bad({"a": GOOD, "b": GOOD, "c": GOOD}) and not any("JAX" in each.text for each in found)
    assert findings.Finding(WELL, "all 3 hosts", "PyTorch 2.9.0") in found
    assert str(found[0]) == "ok   all 3 hosts: Python 3.11.7"


@pytest.mark.parametrize(
    "change, grade, says, fix",
    [
        ({"python": "3.9.1"}, FAILURE, "Python 3.9, where other hosts have 3.11", "install Python 3.11"),
        ({"hvdlite": "0.3.0"}, FAILURE, "hvdlite 0.3.0, where other", "hvdlite==0.2.0"),
        ({"core": "is not built"}, FAILURE, "core: is not built", "pip install hvdlite"),
        ({"frameworks": {"PyTorch": "2.8.0"}}, FAILURE, "PyTorch 2.8.0, where", "pip install torch==2.9.0"),
        ({"frameworks": {}}, FAILURE, "no PyTorch, where other hosts have 2.9.0", "torch==2.9.0"),
        ({"gpus": ["X"], "libraries": {"MPI": None, "NCCL": "2"}}, WARNING, "differ in GPUs: a 0, b 1 X", "nvidia-smi"),
        ({"libraries": {"MPI": "Open MPI", "NCCL": None}}, WARNING, "differ in MPI: a: none, b: Open MPI", "same MPI"),
        ({"gpus": ["H"] * 8}, WARNING, "no NCCL", "nvidia-nccl"),
        ({"shm": None}, WARNING, "/dev/shm cannot be written", "mount -t tmpfs"),
        ({"shm": [64 << 20, 60 << 20]}, WARNING, "60 MB free of 64", "--shm-size"),
        ({"files": [256, 4096]}, FAILURE, "open files: 256; 4 ranks may need 352", "ulimit -n 352"),
        ({"files": [256, 300]}, FAILURE, "open files: 256", r"limits.conf \(hard limit 300\)"),
        ({"ports": 99}, WARNING, "only 99 free ports", "ip_local_port_range"),
        ({"cpus": 3}, WARNING, "3 CPUs for 4 ranks", "-H b:3"),
    ],
)
def test_what_differs_or_is_too_little_is_named_with_its_fix(change, grade, says, fix):
    facts = {"a": GOOD, "b": {**GOOD, **change}, "c": GOOD}
    if "differ" in says:
        del facts["c"]
    elif "NCCL" in says:
        facts = {"b": facts["b"]}
    (found,) = [each for each in bad(facts, {"a": 1, "b": 4, "c": 1}) if "differ in NCCL" not in each.text]
    assert found.grade == grade and re.search(re.escape(says), found.text), found
    assert re.search(fix, found.fix) and (found.where == "b" or "differ" in says), found


def test_clocks_ways_and_speeds():
    assert findings.of_clocks({}) == []
    (found,) = findings.of_clocks({"a": 0.002, "b": -0.004})
    assert found.grade == WELL and "within 4 ms" in found.text
    (found,) = findings.of_clocks({"a": 0.002, "b": -75.0})
    assert found.grade == WARNING and found.where == "b" and "75.0 s behind" in found.text and "chronyd" in found.fix
    (found,) = findings.of_ways({("a", "b"): None, ("b", "a"): None})
    assert found.grade == WELL and "2 ways" in found.text
    (found,) = findings.of_ways({("a", "b"): None, ("b", "a"): "timed out"})
    assert found.grade == FAILURE and str(found).startswith("FAIL b: does not reach a: timed out. Fix: open TCP")
    one, two = findings.of_speeds({("a", "b"): [2e-5, 1e9], ("a", "c"): [2e-5, 1e8]})
    assert one.text == "20 us one way, 1000 MB/s (8.00 Gbit/s)" and one.grade == WELL
    assert two.grade == WARNING and two.where == "a to c" and two.fix


@pytest.mark.parametrize(
    "environ, grades, says",
    [
        ({"JOB_COMPLETION_INDEX": "0"}, [WELL], "a job of one rank: no launcher's variables are set"),
        (
            {"JOB_COMPLETION_INDEX": "1"},
            [WARNING],
            "n pods would be n jobs of one. Fix: set HVDLITE_SIZE to the number",
        ),
        ({"JOB_COMPLETION_INDEX": "0"} | POD, [WARNING], "JOB_COMPLETION_INDEX=0 is set: n pods would be n jobs of"),
        (OWN | {"JOB_COMPLETION_INDEX": "2"}, [FAILURE], "HVDLITE_SIZE=2, JOB_COMPLETION_INDEX=2: rank 2 must be"),
        (
            HAND,
            [WELL],
            "would be rank 1 of 2: RANK=1, WORLD_SIZE=2, MASTER_ADDR=a, MASTER_PORT=2 (set by hand, or by an",
        ),
        (
            HAND | POD,
            [WELL, WARNING],
            "each pod would make a key of its own. Fix: set HVDLITE_SECRET_KEY in all pods from a Secret",
        ),
        (HAND | POD | {"HVDLITE_SECRET_FILE": "/f"}, [WELL], "rank 1 of 2: RANK=1"),
        ({"RANK": "1", "MASTER_ADDR": "a"}, [FAILURE], "init() would raise: RANK=1, MASTER_ADDR=a without WORLD_SIZE"),
        ({"HVDLITE_SIZE": "x"}, [FAILURE], "init() would raise: HVDLITE_SIZE='x'"),
        ({"HVDLITE_RANK": "1", "HOROVOD_SIZE": "2"}, [FAILURE], "HVDLITE_RANK=1, HOROVOD_SIZE=2 (set by hvdlite-run"),
        (OWN, [WELL], "HVDLITE_SIZE=2, HVDLITE_STORE_ADDR=t-0.t, JOB_COMPLETION_INDEX=1 (set by hvdlite-run, or by"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, [WELL], "SLURM_NTASKS=2 (Slurm)"),
        (MPI | POD, [WELL], "rank 1 of 2: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2 (Open MPI)"),
    ],
)
def test_which_rank_a_script_would_be(environ, grades, says):
    found = findings.of_rank(environ)
    assert [each.grade for each in found] == grades and says in str(found[-1]), found


def test_ports_that_are_taken_are_not_free():
    before = host_probe.facts()["ports"]
    with contextlib.ExitStack() as taken:
        for _ in range(300):
            taken.enter_context(socket.create_server(("127.0.0.1", 0)))
        assert before - host_probe.facts()["ports"] > 200  # others on this machine take and give back some, too


def test_this_host_alone():
    code, out, err = launch("doctor", **HAND)
    assert code == 0 and not err, out + err
    assert re.search(r"^ok   python train.py here: would be rank 1 of 2: RANK=1, ", out, re.MULTILINE), out
    assert re.search(rf"^ok   localhost: Python {re.escape(sys.version.split()[0])}$", out, re.MULTILINE), out
    assert re.search(r"^1 host: 0 failures, \d+ warnings$", out, re.MULTILINE), out


def test_too_few_descriptors_are_a_failure_with_its_fix():
    words = ("sh", "-c", 'ulimit -Sn 300; exec "$@"', "sh")
    code, out, _ = launch("doctor", "-np", 8, under=words)
    assert code == 1 and "FAIL localhost: open files: 300; 8 ranks may need 448. Fix: ulimit -n 448\n" in out, out


@pytest.fixture
def doctor(hosts, sshd):
    """`doctor(*words)` from nodeA: (code, output, errors)."""

    def ask(*words):
        with Launch(*words, *sshd.flags, under=hosts.within(0, ["--"])) as job:
            return job.wait(SECONDS), job.out, job.err

    yield ask
    empty_within(hosts, 15)


@needs_hosts
def test_all_hosts_are_examined_and_measured(doctor):
    code, out, err = doctor("doctor", "-H", "nodeA,nodeB,nodeC", "--measure")
    assert code == 0, out + err
    for line in (
        r"ok   nodeB: reached, at 10\.77\.0\.12",
        r"ok   all 3 hosts: Python 3\.\d+\.\d+",
        r"ok   clocks: within \d+ ms of this host's",
        r"ok   routes: every host reaches every other \(6 ways\)",
        r"ok   nodeA to nodeB: \d+ us one way, \d+ MB/s \(\d+\.\d\d Gbit/s\)",
        r"(ok  |warn) nodeB to nodeC: \d+ us one way, \d+ MB/s .*",
        r"3 hosts: 0 failures, \d+ warnings",
    ):
        assert re.search(rf"^{line}$", out, re.MULTILINE), out


@needs_hosts
def test_a_host_that_cannot_be_reached_is_a_finding_and_the_others_are_examined(doctor, sshd):
    sshd.stop(1)
    try:
        code, out, err = doctor("-H", "nodeA,nodeB,nodeC", "doctor")
    finally:
        sshd.start(1)
    assert code == 1, out + err
    assert re.search(r"^FAIL nodeB: ssh was refused. Fix: is sshd running there, at this port", out, re.MULTILINE), out
    assert "every host reaches every other (2 ways)" in out and "all 2 hosts: Python" in out, out


@needs_hosts
def test_a_way_that_is_closed_is_found_from_both_ends(doctor, hosts):
    if shutil.which("nft") is None:
        pytest.skip("it takes nft to close a way")
    rule = "table inet shut { chain out { type filter hook output priority 0; ip daddr 10.77.0.13 reject; }; }"
    subprocess.run(hosts.within(1, ["nft", rule]), check=True, timeout=30)
    try:
        code, out, err = doctor("doctor", "-H", "nodeA,nodeB,nodeC")
    finally:
        subprocess.run(hosts.within(1, ["nft", "delete table inet shut"]), check=True, timeout=30)
    assert code == 1, out + err
    assert re.search(r"^FAIL nodeB: does not reach nodeC: .+\. Fix: open TCP", out, re.MULTILINE), out
    assert re.search(r"^FAIL nodeC: does not reach nodeB: ", out, re.MULTILINE), out
    assert "nodeA: does not reach" not in out


@needs_hosts
def test_check_build_shows_every_host(doctor):
    code, out, err = doctor("--check-build", "-H", "nodeA,nodeB")
    assert code == 0, out + err
    assert out.count("Available Frameworks:") == 2 and "==== nodeA\n" in out and "==== nodeB\n" in out
    assert len(re.findall(r"\[X\] NumPy: \d", out)) == 2 and os.sep in out
