"""Agents that are stopped, and processes that cannot be killed: the launcher ends all the same, and says why."""

import os
import re
import signal
import sys
import time

from launching import Launch

HANG = "echo ready; exec sleep 600"


IMMORTAL = """
import os, signal, sys
from hvdlite.launcher.agent import agent; from hvdlite.launcher import cli
agent.STUCK_S = 1.0
kill = os.kill
def refused(pid, number):  # as the kernel does for a process that has become another user
    with open(f"/proc/{pid}/cmdline") as file:
        if "6543" in file.read(): raise PermissionError
    kill(pid, number)
os.kill = refused
sys.exit(cli.main(sys.argv[4:]))
"""


def started(job, ranks=2):
    """The pid of the job's agent, once its ranks have said that they are ready."""
    job.until("]<stdout>:ready", ranks)
    return int(re.search(r"agent (\d+)", job.err).group(1))


def test_a_stopped_agent_ends_the_job():
    with Launch("-np", 2, "--verbose", "--agent-timeout", 2, "sh", "-c", HANG) as job:
        agent = started(job)
        job.until("is process", 2)
        os.kill(agent, signal.SIGSTOP)
        assert job.wait(20) == 1
        assert f"the agent (pid {agent}) of the ranks has not answered for 2 s" in job.err
        assert not job.left()


def test_a_second_interrupt_kills_past_a_stopped_agent():
    with Launch("-np", 2, "--verbose", "--agent-timeout", 600, "sh", "-c", HANG) as job:
        agent = started(job)
        os.kill(agent, signal.SIGSTOP)
        job.send(signal.SIGINT)
        job.until("SIGINT is forwarded")
        job.send(signal.SIGINT)
        assert job.wait(20) == 130 and not job.left()


def test_a_launcher_that_was_stopped_blames_nobody():
    with Launch("-np", 2, "--verbose", "--agent-timeout", 1, "sh", "-c", "echo ready; sleep 3; exit 4") as job:
        started(job)
        job.send(signal.SIGSTOP)
        time.sleep(1.5)
        job.send(signal.SIGCONT)
        assert job.wait(30) == 4, job.err


def test_a_process_that_cannot_be_killed_is_named_and_left():
    script = 'setsid sleep 6543 & until [ "$(cat /proc/$!/comm)" = sleep ]; do sleep 0.01; done; exit 3'
    with Launch("-np", 1, "--failure-grace", 0, "sh", "-c", script, under=(sys.executable, "-c", IMMORTAL)) as job:
        assert job.wait(20) == 3
        (pid,) = job.left()
        assert f"hvdlite-run: pid {pid} (sleep) cannot be killed" in job.err


def test_it_is_said_once_who_still_runs_long_after_the_others():
    script = '[ $HVDLITE_RANK = 0 ] && exit 0; [ $HVDLITE_RANK = 2 ] && exec sleep 600; echo "pid $$"; kill -STOP $$'
    with Launch("-np", 3, "--stall-check-time", 0.3, "sh", "-c", script) as job:
        job.until("HVD505")
        stopped = int(re.search(r"pid (\d+)", job.out).group(1))
        line = next(line for line in job.err.splitlines() if "HVD505" in line)
        assert "1 of 3 ranks have ended well, the last of them 0.3 s ago; rank 1 (pid" in line
        assert f"(pid {stopped}) is stopped (SIGCONT lets it go on), rank 2 (pid " in line and "still runs [" in line
        os.kill(stopped, signal.SIGCONT)
        job.until("HVD505", 2)  # after another end
        job.send(signal.SIGTERM)
        assert job.wait(20) == 143 and job.err.count("HVD505") == 2 and not job.left()


def test_nothing_is_said_of_who_still_runs_where_stalls_are_not_told():
    for words in (("--stall-check-time", 0), ("--no-stall-check",)):
        with Launch("-np", 2, *words, "sh", "-c", "[ $HVDLITE_RANK = 0 ] || sleep 1") as job:
            assert job.wait() == 0 and "HVD505" not in job.err
