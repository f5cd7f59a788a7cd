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
from hvdlite.launcher import agent, cli
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
        job.until("SIGINT: passed on")
        job.send(signal.SIGINT)
        assert job.wait(20) == 130 and not job.left()


def test_a_launcher_that_was_stopped_blames_nobody():
    with Launch("-np", 2, "--verbose", "--agent-timeout", 1, "sh", "-c", "echo ready; sleep 5; exit 4") as job:
        started(job)
        time.sleep(1.0)
        job.send(signal.SIGSTOP)
        time.sleep(2.0)
        job.send(signal.SIGCONT)
        assert job.wait(30) == 4, job.err


def test_a_process_that_cannot_be_killed_is_named_and_left():
    script = "setsid sh -c 'exec sleep 6543' & exit 3"
    with Launch("-np", 1, "--failure-grace", 0, "sh", "-c", script, under=(sys.executable, "-c", IMMORTAL)) as job:
        assert job.wait(20) == 3
        (pid,) = job.left()
        assert f"host localhost: pid {pid} (sleep) cannot be killed" in job.err
