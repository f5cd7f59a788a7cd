"""hvdlite-run over ssh: who runs where, what ranks find, how jobs on several hosts end, and that nothing is left."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import needs_hosts
from hosts_sshd import empty_within
from launching import Launch
from ranks import everything

pytestmark = needs_hosts
HANG = "exec sleep 600"


@pytest.fixture
def on(hosts, sshd):
    """`on(*words)` is a job that a launcher on nodeA starts; nothing of it is left on any host."""

    def start(*words, at=0, **settings):
        return Launch(*sshd.flags, *words, under=hosts.within(at, ["--"]), **settings)

    yield start
    empty_within(hosts, 10)


def test_ranks_and_their_environment_are_those_of_the_host_list(on):
    show = 'echo "$(hostname) $HVDLITE_LOCAL_RANK/$LOCAL_WORLD_SIZE $HOROVOD_CROSS_RANK/$HVDLITE_CROSS_SIZE $MINE $PWD"'
    with on("-H", "nodeA:2,nodeB:1,nodeC:2", "sh", "-c", show, MINE="with blanks ' \" and $") as job:
        assert job.wait() == 0, job.err
        said = dict(re.findall(r"\[(\d)\]<stdout>:(.*)", job.out))
    tail = f"with blanks ' \" and $ {os.getcwd()}"
    places = ["nodeA 0/2 0/3", "nodeA 1/2 0/2", "nodeB 0/1 1/3", "nodeC 0/2 2/3", "nodeC 1/2 1/2"]
    assert said == {str(rank): f"{place} {tail}" for rank, place in enumerate(places)}


SUM = """
import hvdlite.numpy as hvd, numpy as np
hvd.init()
assert hvd.allreduce(np.ones(1000), op=hvd.Sum)[0] == hvd.size()
print("sum", hvd.rank(), hvd.local_rank(), hvd.cross_rank())
hvd.shutdown()
"""


@pytest.mark.parametrize("listed", ["10.77.0.12:2,nodeC", "[fd77::12]:2,[fd77::13]"])
def test_ranks_on_other_hosts_meet_over_either_ip(on, listed):
    with on("-H", listed, sys.executable, "-c", SUM) as job:
        assert job.wait(60) == 0, job.out + job.err
        assert sorted(re.findall(r"sum (.*)", job.out)) == ["0 0 0", "1 1 0", "2 0 1"]


def test_a_host_file_and_the_address_of_the_launchers_own_host(on, hosts):
    path = os.path.join(hosts.folder, "list")
    with open(path, "w") as file:
        file.write("# three\n10.77.0.11 slots=1\n\nnodeB\n")
    with on("--hostfile", path, "-x", "EXTRA=5", "sh", "-c", "echo $(hostname) $EXTRA $RANK") as job:
        assert job.wait() == 0, job.err
        assert sorted(re.findall(r">:(.*)", job.out)) == ["nodeA 5 0", "nodeB 5 1"]


def test_the_secret_and_the_environment_stand_in_no_argument_list(on, hosts):
    with on("-H", "nodeB", "sh", "-c", "echo secret $HVDLITE_SECRET_KEY; read x; sleep 600", PRIVATE="a7f3b1") as job:
        job.until("secret ")
        secret = re.search(r"secret ([0-9a-f]{64})", job.out)[1]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read()
            except OSError:
                continue
            assert secret.encode() not in words and b"a7f3b1" not in words
        job.send(signal.SIGTERM)


@pytest.mark.parametrize("named", ["eth0", "10.77.0.0/24"])
def test_where_the_launcher_listens_can_be_said_by_name_and_by_network(on, named):
    with on("-H", "nodeA,nodeB", "--verbose", "--network-interface", named, "true") as job:
        assert job.wait() == 0 and "store on 10.77.0.11:" in job.err, job.err
    with on("-H", "nodeA,nodeB", "--network-interface", "192.0.2.0/24", "true") as job:
        assert job.wait() == 2 and "192.0.2.0/24: this host has only" in job.err and "eth0" in job.err, job.err


def test_the_key_of_a_host_is_kept_and_another_is_refused(on, hosts):
    known = Path(hosts.folder) / "known"
    with on("-H", "nodeA,nodeB", "true") as job:
        assert job.wait() == 0, job.err
    kept = known.read_text()
    assert "nodeb" in kept.lower()
    other = Path(hosts.folder) / "key.pub"  # some key, but not this host's
    known.write_text(f"nodeb {' '.join(other.read_text().split()[:2])}\n")
    try:
        with on("-H", "nodeA,nodeB", "sh", "-c", "echo started") as job:
            assert job.wait() == 255 and "started" not in job.out
            assert "nodeB: its ssh host key is not the known one" in job.err, job.err
    finally:
        known.write_text(kept)


def test_the_first_to_fail_is_named_with_its_host_and_gives_the_exit_code(on):
    script = "[ $RANK = 2 ] || exec sleep 600; setsid sleep 600 & echo why >&2; exit 37"
    with on("-H", "nodeA:2,nodeB:2", "--failure-grace", 0, "sh", "-c", script) as job:
        assert job.wait() == 37
        assert re.search(r"hvdlite-run: rank 2 \(nodeB, pid \d+\) exited with code 37 \[HVD401\]\n", job.err), job.err
        assert "[2]<stderr>:why" in job.err


def test_stdin_goes_to_rank_0_on_another_host_and_to_nobody_unasked(on, tmp_path):
    """A pipe and a file, of more than any buffer holds; rank 0 reads late, and need not read all."""
    text = "".join(f"line {number}\n" for number in range(60_000))
    (tmp_path / "text").write_text(text)
    total = hashlib.sha256(text.encode()).hexdigest()
    script = "sleep 0.5; echo sum of $RANK $(sha256sum)"
    for words, rank_0 in ((("--stdin", 0), total), ((), hashlib.sha256(b"").hexdigest())):
        with open(tmp_path / "text") as file, on("-H", "nodeB,nodeA", *words, "sh", "-c", script, stdin=file) as job:
            assert job.wait(60) == 0, job.err
        sums = dict(re.findall(r"sum of (\d) (\w+)", job.out))
        assert sums == {"0": rank_0, "1": hashlib.sha256(b"").hexdigest()}, job.out
    with on("-H", "nodeB,nodeC", "--stdin", 0, "sh", "-c", script, stdin=subprocess.PIPE) as job:
        job.process.stdin.write(text.encode())
        job.process.stdin.close()
        assert job.wait(60) == 0 and f"sum of 0 {total}" in job.out, job.out + job.err
    with (
        open(tmp_path / "text") as file,
        on("-H", "nodeB", "--stdin", 0, "sh", "-c", "read x; echo $x", stdin=file) as job,
    ):
        assert job.wait(60) == 0 and job.out == "line 0\n", job.err


def test_signals_reach_the_ranks_of_all_hosts(on, hosts):
    script = "trap 'echo got it; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    with on("-H", "nodeA,nodeB", "sh", "-c", script) as job:
        job.until("ready", 2)
        os.kill(job.children()[0], signal.SIGTERM)
        assert job.wait() == 143 and job.out.count("got it") == 2


def test_killing_the_launcher_leaves_nobody_on_any_host(on, hosts):
    with on("-H", "nodeA,nodeB,nodeC", "sh", "-c", f"trap '' TERM; setsid sleep 600 & echo ready; {HANG}") as job:
        job.until("ready", 3)
        os.kill(job.children()[0], signal.SIGKILL)
        empty_within(hosts, 10)


def test_an_ssh_that_is_cut_ends_the_job_and_names_the_host(on, hosts):
    with on("-H", "nodeA,nodeB", "--failure-grace", 0, "sh", "-c", f"echo ready; {HANG}") as job:
        job.until("ready", 2)
        (ssh,) = [pid for pid, words in job.left().items() if words.startswith("ssh ")]
        os.kill(ssh, signal.SIGKILL)
        assert job.wait() == 255
        assert "host nodeB is lost: ssh, which led there, has ended; rank 1 ran there" in job.err, job.err


@contextlib.contextmanager
def without_sshd(sshd):
    """nodeB has none for a while."""
    sshd.stop(1)
    try:
        yield
    finally:
        sshd.start(1)


def test_every_host_that_cannot_take_part_is_told_with_the_remedy(on, hosts, sshd):
    hosts.cable(2, "down")
    try:
        with without_sshd(sshd):
            began = time.monotonic()
            words = ("-H", "nodeA,nodeB,nodeC,nodeX", "--ssh-opt", "-o ConnectTimeout=2", "sh", "-c", "echo started")
            with on(*words) as job:
                assert job.wait() == 255 and time.monotonic() - began < 20
    finally:
        hosts.cable(2, "up")
    assert "nodeB: ssh was refused: is sshd running there" in job.err, job.err
    assert "nodeC: ssh does not reach it: is it up, and is the network?" in job.err, job.err
    assert "nodeX: there is no host of this name" in job.err and "nodeA:" not in job.err, job.err
    assert "started" not in job.out and "Traceback" not in job.err


@pytest.mark.parametrize(
    "lacks, code, says",
    [
        ("folder", 1, "nodeB: there is no folder {0}"),
        ("program", 127, "nodeB: {0}/train: command not found"),
        ("Python", (126, 127), "nodeB: there is no Python {executable}"),
    ],
)
def test_what_one_host_lacks_is_told_with_its_name_before_anything_starts(on, hosts, sshd, tmp_path, lacks, code, says):
    here = tmp_path / "only-here"
    here.mkdir()
    program = here / "train"
    program.write_text("#!/bin/sh\necho started\n")
    program.chmod(0o755)
    enter = ["sh", "-c", 'cd "$0" && exec "$@"', str(here)] if lacks == "folder" else []
    command = [program] if lacks == "program" else ["sh", "-c", "echo started"]
    with without_sshd(sshd):
        sshd.start(1, hide=sys.prefix if lacks == "Python" else tmp_path)
        try:
            words = (*sshd.flags, "-H", "nodeA,nodeB,nodeC", *command)
            with Launch(*words, under=hosts.within(0, ["--", *enter])) as job:
                assert job.wait() in (code if isinstance(code, tuple) else (code,)), job.err
        finally:
            sshd.stop(1)
    assert job.err.count(says.format(here, executable=sys.executable)) == 1 and "started" not in job.out, job.err
    assert "nodeA:" not in job.err and "nodeC:" not in job.err, job.err


def test_a_job_that_fails_is_started_again_on_all_hosts_and_bound_there(on):
    script = "echo try $RANK $HVDLITE_RESTART_COUNT; [ $HVDLITE_RESTART_COUNT = 1 ] || [ $RANK = 0 ] || exit 5; exit 0"
    words = ("-H", "nodeA,nodeB", "--max-restarts", 1, "--bind-to", "numa", "--failure-grace", 20)
    with on(*words, "sh", "-c", script) as job:
        assert job.wait(60) == 0, job.err
        assert sorted(re.findall(r"try (\d \d)", job.out)) == ["0 0", "0 1", "1 0", "1 1"], job.out + job.err


def test_a_host_whose_cable_is_pulled_ends_the_job_and_what_runs_there_ends_itself(on, hosts):
    with on("-H", "nodeA,nodeB,nodeC", "--failure-grace", 0, "sh", "-c", f"trap '' TERM; echo ready; {HANG}") as job:
        job.until("ready", 3)
        hosts.cable(2, "down")
        began = time.monotonic()
        try:
            assert job.wait() == 255
            assert "host nodeC is lost" in job.err and time.monotonic() - began < 15, job.err
            empty_within(hosts, 10)  # nodeC, too, by itself
        finally:
            hosts.cable(2, "up")


def test_a_job_that_is_ended_while_it_starts_leaves_nothing(on, hosts):
    kill, interrupt = signal.SIGKILL, signal.SIGINT
    more = everything((kill, 0.1), (interrupt, 0.1), (interrupt, 0.6))
    for number, pause in ((kill, 0.3), (kill, 0.6), (interrupt, 0.3), *more):
        with on("-H", "nodeA:2,nodeB:2,nodeC:2", "sh", "-c", HANG) as job:
            time.sleep(pause)  # any moment will do
            os.kill(job.children()[0], number)
            job.process.wait(20)
            empty_within(hosts, 10)
