"""Agents elsewhere that are killed -9 or stopped: what they had started ends all the same. --mpi: test_launcher_mpi."""

import os
import signal

import pytest
from launching import Launch, free_port

from hvdlite.launcher.agent import process

SECRET = "5e" * 32
BODY = ("sh", "-c", "setsid sh -c \"trap '' TERM HUP; sleep 600\" & echo ready; sleep 600")
ENDS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])


def agents(job):
    return [pid for pid in process.descendants(job.pid) if process.name_of(pid) == "hvdlite-agent"]


def nodes():
    words = ("--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--agent-timeout", 4)
    first = Launch(*words, "--node-rank", 0, *BODY, HVDLITE_SECRET_KEY=SECRET)
    second = Launch(*words, "--node-rank", 1, *BODY, HVDLITE_SECRET_KEY=SECRET)
    return first, second


@ENDS
def test_the_agent_of_another_node(number):
    first, second = nodes()
    with second, first:
        first.until("ready", 2)
        (agent,) = agents(second)
        os.kill(agent, number)
        assert (first.wait(), second.wait()) == (255, 255) and "is lost" in first.err, first.err + second.err
        assert number != signal.SIGSTOP or "its agent has not answered for 4 s (--agent-timeout)" in first.err
        second.until_gone()
        first.until_gone()
    told = "the agent of this host was killed by SIGKILL"
    assert second.err.count(told) == 1 and "Traceback" not in first.err + second.err, second.err


def test_the_launcher_of_another_node_that_is_killed():
    first, second = nodes()
    with second, first:
        first.until("ready", 2)
        second.send(signal.SIGKILL)
        second.process.wait()
        second.until_gone()
        assert first.wait() == 255 and "is lost" in first.err, first.err
        first.until_gone()


@ENDS
def test_the_agent_that_a_remote_shell_has_brought(number, tmp_path):
    shell = tmp_path / "rsh"
    shell.write_text('#!/bin/sh\nshift\nexec setsid -w sh -c "$*"\n')
    shell.chmod(0o755)
    words = ("-H", "192.0.2.77:1,192.0.2.78:1", "--agent-timeout", 4)
    with Launch(*words, *BODY, OMPI_MCA_plm_rsh_agent=str(shell)) as job:
        job.until("ready", 2)
        os.kill(agents(job)[0], number)
        assert job.wait() == 255 and "is lost" in job.err, job.err
        job.until_gone()
