"""How jobs end: the culprit's exit code and last words, nobody left behind whoever is killed, and Ctrl-C."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
from launching import Launch, launch
from ranks import EVERYTHING, everything

from hvdlite.launcher.control.ending import KILLED

PYTHON = (sys.executable, "-u", "-c")
HANG = "exec sleep 600"
STUBBORN = "trap '' TERM INT HUP; while :; do sleep 1; done"
ONE_FAILS = "[ $RANK = 0 ] && { read line; exit 9; }; "
BY_DEFAULT = ("env", "-u", "HVDLITE_FAILURE_GRACE")


@pytest.mark.parametrize(
    "does, code, says",
    [
        ("exit 37", 37, "exited with code 37 [HVD401]"),
        ("kill -SEGV $$", 139, "killed by SIGSEGV [HVD402]"),
        ("sleep 600 & kill -KILL $$", 137, f"killed by SIGKILL{KILLED} [HVD402]"),
        ("kill -TERM $$", 143, "killed by SIGTERM [HVD402]"),
        *everything(("kill -ABRT $$", 134, "killed by SIGABRT [HVD402]")),
    ],
)
def test_the_first_to_fail_gives_the_exit_code_and_is_named(does, code, says):
    core = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
    try:
        ended, _, err = launch("-np", 3, "--failure-grace", 0, "sh", "-c", f"[ $RANK = 2 ] && {{ {does}; }}; {HANG}")
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, core)
    assert ended == code and re.search(rf"hvdlite-run: rank 2 \(pid \d+\) {re.escape(says)}\n\Z", err), err


def test_last_words_that_stand_there_already_are_not_repeated():
    code, _, err = launch("-np", 1, *PYTHON, "raise ValueError('boom')")
    assert code == 1 and err.count("ValueError: boom") == 1
    assert re.search(r"ValueError: boom\nhvdlite-run: rank 0 \(pid \d+\) exited with code 1 \[HVD401\]\n\Z", err), err


def test_a_rank_that_exits_early_with_0_is_no_failure():
    script = "[ $RANK = 1 ] && exit 0; read line; exit 0"
    with Launch("-np", 2, "--stdin", 0, "sh", "-c", script, stdin=subprocess.PIPE) as job:
        deadline = time.monotonic() + 10
        while sum("sh -c" in command for command in job.left().values()) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert job.process.poll() is None
        job.process.stdin.close()
        assert job.wait() == 0


LEFT = """
import os, sys, threading, time
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    while not os.path.exists({passed!r}): time.sleep(0.01)
    {leaves}
open({passed!r}, "w").close() # a rank that ends at once may be seen to be lost before its barrier is seen to be done
if input() == "goes on":
    hvd.allreduce(np.ones(3))
{ends}
"""
EXIT = "os._exit(0)"
BESIDE = "threading.Thread(target=threading.Event().wait, daemon=True).start(); sys.exit(0)"


@pytest.mark.parametrize(
    "leaves, ends, needs", [(EXIT, EXIT, ""), (EXIT, "", ""), (BESIDE, BESIDE, ""), (EXIT, "", "goes on")]
)
def test_a_rank_that_exits_with_0_ends_nobody_but_who_needs_it_fails(leaves, ends, needs, tmp_path):
    """The note about who still runs comes where nobody counts as failed."""
    body = LEFT.format(leaves=leaves, ends=ends, passed=str(tmp_path / "passed"))
    words = ("-np", 2, "--stdin", 0, "--stall-check-time", 0.1, *PYTHON, body)
    with Launch(*words, stdin=subprocess.PIPE) as job:
        job.until("1 of 2 ranks have ended well")
        job.process.stdin.write(f"{needs}\n".encode())
        job.process.stdin.close()
        assert job.wait() == (1 if needs else 0), job.err
    told = r"hvdlite-run: rank 0 \(pid \d+\) exited with code 1: rank 1 \(pid \d+\) exited with code 0 without hvd.sh"
    assert bool(re.search(told, job.err)) == bool(needs) == ("HvdPeerLostError" in job.err), job.err


def test_the_first_to_fail_may_take_its_time_to_exit_with_its_code():
    """Its handler is done when the other rank has been ended, which is in an hour's sleep."""
    body = """
import atexit, os, sys, time
def save():
    while os.path.exists(f"/proc/{others[0]}"): time.sleep(0.01)
    print("saved")
atexit.register(save)
import hvdlite.numpy as hvd
hvd.init()
others = hvd.allgather_object(os.getpid())
hvd.rank() and sys.exit(5)
time.sleep(3600)
"""
    code, out, err = launch("-np", 2, "--failure-grace", 0, *PYTHON, body)
    assert code == 5 and "[1]<stdout>:saved" in out, err
    assert re.search(r"hvdlite-run: rank 1 \(pid \d+\) exited with code 5: rank 1 called sys.exit\(5\)", err), err


def test_who_does_not_fail_by_itself_is_terminated_and_then_killed():
    """By default: one second, SIGTERM, half a second, SIGKILL."""
    traps = "trap 'echo told' TERM; trap '' INT HUP; echo ready; while :; do sleep 0.05; done"
    words = ("-np", 2, "--stdin", 0, "--verbose", "sh", "-c", ONE_FAILS + traps)
    with Launch(*words, stdin=subprocess.PIPE, under=BY_DEFAULT) as job:
        job.until("]<stdout>:ready")
        job.process.stdin.close()
        assert job.wait() == 9 and "[1]<stdout>:told" in job.out
    first, last = (float(re.search(rf"rank {rank} .* after ([\d.]+) s", job.err)[1]) for rank in (0, 1))
    assert 1.4 < last - first < 5.5, job.err


def test_who_needs_longer_to_save_gets_it():
    saves = "trap 'sleep 2; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    words = ("-np", 2, "--stdin", 0, "--failure-grace", 0, "--term-grace", 25, "sh", "-c", ONE_FAILS + saves)
    with Launch(*words, stdin=subprocess.PIPE) as job:
        job.until("ready")
        job.process.stdin.close()
        assert job.wait() == 9 and "[1]<stdout>:saved" in job.out


def test_a_scheduler_that_ends_the_job_leaves_time_to_save():
    """SIGTERM gives more than Ctrl-C does, without being asked for it: test_launcher_ending has the times."""
    saves = "trap 'sleep 1; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    with Launch("-np", 2, "sh", "-c", saves) as job:
        job.until("ready", 2)
        job.send(signal.SIGTERM)
        assert job.wait() == 143 and job.out.count("saved") == 2
        assert "have 30 s to end" in job.err


def test_who_does_not_end_by_a_signal_is_killed_after_the_time_that_was_asked_for():
    """Less than what SIGTERM gives by default."""
    with Launch("-np", 2, "--signal-grace", 0.5, "sh", "-c", f"echo ready; {STUBBORN}") as job:
        job.until("ready", 2)
        began = time.monotonic()
        job.send(signal.SIGTERM)
        assert job.wait() == 143 and 0.4 < time.monotonic() - began < 25 and not job.left()


def test_grandchildren_go():
    """They ignore signals, and hold the output. Where a rank has failed also those that have sessions of their own."""
    deaf = 'trap "" TERM HUP INT; while :; do sleep 1; done'
    script = f"for i in 1 2 3; do setsid sh -c '{deaf}' & done; [ $RANK = 1 ] && exit 37; exit 0"
    began = time.monotonic()
    assert launch("-np", 2, "--failure-grace", 0, "sh", "-c", script)[0] == 37
    assert launch("-np", 1, "sh", "-c", script.replace("setsid", ""))[0] == 0
    assert time.monotonic() - began < 50


LEAVES = "import subprocess\nfor new in (True, False): subprocess.Popen(['sleep', '600'], start_new_session=new)\n"


@pytest.mark.parametrize("hosts", [(), ("-H", "192.0.2.77:1,192.0.2.78:1", "--network-interface", "lo")])
def test_what_has_a_session_of_its_own_outlives_a_job_that_ends_well(hosts, tmp_path):
    """As under Python alone; what has none is named and ends with the ranks."""
    shell = tmp_path / "rsh"
    shell.write_text('#!/bin/sh\nshift\nexec setsid -w sh -c "$*"\n')
    shell.chmod(0o755)
    with Launch("-np", 2, *hosts, *PYTHON, LEAVES, OMPI_MCA_plm_rsh_agent=str(shell)) as job:
        assert job.wait() == 0 and job.err.count("(sleep 600) of rank") == 2, job.err
        assert [each for each in job.left().values() if "launcher" not in each] == ["sleep 600 "] * 2


def test_what_outlives_a_job_can_write_and_the_first_is_named(tmp_path):
    """Nobody waits for it, or for who reads what it writes."""
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)
    script = f"cd {tmp_path}; read go <go; for i in 1 2 3; do echo $i || exit; done; echo yes >uploaded"
    body = f"import subprocess\nsubprocess.Popen(['sh', '-c', {script!r}], start_new_session=True)"
    with Launch("-np", 1, *PYTHON, body) as job:
        assert job.wait() == 0
        assert re.search(r"^hvdlite-run: pid \d+ \(sh\), which rank 0 has started .*, goes on; .* \[HVD501\]$", job.err)
        os.write(go, b"go\n")
        os.close(go)
        job.until_gone()
    assert (tmp_path / "uploaded").exists()


def test_what_has_a_session_of_its_own_ends_with_a_job_that_is_interrupted():
    body = f"{LEAVES}import signal, sys\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('ready'); signal.pause()"
    with Launch("-np", 1, *PYTHON, body) as job:
        job.until("ready")
        job.send(signal.SIGTERM)
        assert job.wait() == 143 and not job.left()


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_killing_the_launcher_leaves_nobody(kill):
    """Alone, or with its whole process group."""
    with Launch("-np", 3, "sh", "-c", f"setsid sleep 600 & echo ready; {STUBBORN}") as job:
        job.until("ready", 3)
        kill(job.pid, signal.SIGKILL)
        job.process.wait()
        job.until_gone()


def test_killing_the_agent_leaves_nobody_and_is_told():
    with Launch("-np", 2, "--verbose", "sh", "-c", f"setsid sleep 600 & echo ready; {STUBBORN}") as job:
        job.until("]<stdout>:ready", 2)
        agent = int(re.search(r"agent (\d+)", job.err).group(1))
        os.kill(agent, signal.SIGKILL)
        assert job.wait() == 1
        assert "killed by SIGKILL" in job.err and not job.left()


def test_one_interrupt_lets_the_ranks_end_by_themselves():
    body = (
        "import signal, time\n"
        "try:\n    print('ready'); time.sleep(600)\n"
        "except KeyboardInterrupt: print('saved a checkpoint')"
    )
    with Launch("-np", 2, *PYTHON, body) as job:
        job.until("ready", 2)
        job.send(signal.SIGINT)
        assert job.wait() == 130
        assert job.out.count("saved a checkpoint") == 2 and not job.left()
        assert "SIGINT" in job.err and "Traceback" not in job.err


def test_a_second_interrupt_kills():
    """At once, and not when the time has passed that the first one gives."""
    with Launch("-np", 2, "--signal-grace", 600, "sh", "-c", f"echo ready; {STUBBORN}") as job:
        job.until("ready", 2)
        job.send(signal.SIGINT)
        job.until("SIGINT")
        job.send(signal.SIGINT)
        assert job.wait() == 130 and not job.left()


def test_output_that_nobody_reads_does_not_keep_a_second_interrupt_waiting():
    reader, writer = os.pipe()
    spam = "import os\nos.write(2, b'ready')\nwhile True: os.write(1, b'x' * 4095 + b'\\n')"
    with Launch("-np", 2, *PYTHON, spam, stdout=writer) as job:
        os.close(writer)
        job.until("ready")
        time.sleep(0.5)  # all buffers are full by now; if not, the job only ends sooner
        job.send(signal.SIGINT)
        job.until("SIGINT")
        job.send(signal.SIGINT)
        assert job.wait() == 130 and not job.left()
    os.close(reader)


def test_signals_are_passed_on_and_hangup_gives_128_and_its_number():
    traps = "trap 'echo got one' USR1; trap 'echo got two' USR2; trap 'echo got HUP; exit 0' HUP"
    with Launch("-np", 2, "sh", "-c", f"{traps}; echo ready; while :; do sleep 0.05; done") as job:
        job.until("ready", 2)
        for number, said in ((signal.SIGUSR1, "got one"), (signal.SIGUSR2, "got two"), (signal.SIGHUP, "got HUP")):
            job.send(number)
            job.until(said, 2)
        assert job.wait() == 128 + signal.SIGHUP and not job.left()


def test_stop_and_continue_hold_the_ranks_too():
    script = "echo ready; [ $RANK = 0 ] || exit 0; read line; exit 0"
    with Launch("-np", 2, "--stdin", 0, "sh", "-c", script, stdin=subprocess.PIPE) as job:
        job.until("ready", 2)
        job.send(signal.SIGTSTP)
        deadline = time.monotonic() + 10
        while states(job.left()) != {"T"}:
            assert time.monotonic() < deadline, states(job.left())
            time.sleep(0.02)
        job.send(signal.SIGCONT)
        job.process.stdin.close()
        assert job.wait() == 0


def states(pids):
    """The states of these processes but the agent's, which is never stopped."""
    found = set()
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name != "hvdlite-agent":
                found.add(rest.split()[0])
    return found


def test_nohup_stays_nohup():
    under = (
        sys.executable,
        "-c",
        "import os, signal, sys; signal.signal(1, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
    )
    script = "echo ready; read line; exit 4"
    with Launch("-np", 1, "--stdin", 0, "sh", "-c", script, stdin=subprocess.PIPE, under=under) as job:
        job.until("ready")
        job.send(signal.SIGHUP)
        job.process.stdin.close()
        assert job.wait() == 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_ended_while_it_starts_leaves_nothing(number):
    chance = random.Random(int(number))
    for _ in range(8 if EVERYTHING else 3):
        with Launch("-np", 6, "sh", "-c", f"setsid sleep 600 & {HANG}") as job:
            time.sleep(chance.uniform(0.02, 0.4))  # a random moment is what is tested
            job.send(number)
            assert job.process.wait(60) != 0
            job.until_gone()


@pytest.mark.parametrize("how", ["Ctrl-C", "too late"])
def test_an_mpirun_that_is_a_script_leaves_nothing_when_it_is_given_up(how, tmp_path):
    """What it runs is no child of ours, and no signal to the script reaches it."""
    program = tmp_path / "mpirun"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo "mpirun (Open MPI) 4.1.4"\necho go\nsleep 600\n')
    program.chmod(0o755)
    words = ("--mpi", "--oversubscribe", "--start-timeout", 2 if how == "too late" else 60, "-np", 2, "true")
    with Launch(*words, PATH=f"{tmp_path}:{os.environ['PATH']}") as job:
        if how == "Ctrl-C":
            end = time.monotonic() + 60
            while not any("sleep 600" in command for command in job.left().values()):
                assert time.monotonic() < end, job.err
                time.sleep(0.02)
            job.send(signal.SIGINT)
        assert job.wait() == (130 if how == "Ctrl-C" else 255), job.err
        job.until_gone()
        assert how == "Ctrl-C" or job.err == (
            "hvdlite-run: no agent that mpirun should start has reported within 2 s (--start-timeout sets the limit); "
            "its last words: go [HVD715]\n"
        )
