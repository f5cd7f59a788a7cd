"""Agents that are stopped, and processes that cannot be killed: the launcher ends all the same, and says why."""

import os
import re
import signal
import time

from launching import Launch

HANG = "echo ready; exec sleep 600"


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
