"""Ranks on several hosts that an MPI's own launcher starts: mpirun on nodeA, its daemons on the others by an agent.

The hosts are those of hosts.py, and hosts_shell.py stands for ssh. Each host has a docker0 of the same address, as real
ones do, which leads an Open MPI astray that is not told which network is the right one: `run` tells it, as users must.
"""

import os
import subprocess
import sys
import tempfile
import time
import uuid

import launching
import mpis
import pytest
from hosts_shell import NAMES, Shell, end

SECONDS = 300
_NETWORK = {"mpich": ["-iface", "eth0"]}
_NETWORK["openmpi"] = _NETWORK["system"] = [
    *("--mca", "btl_tcp_if_include", "eth0"),
    *("--mca", "oob_tcp_if_include", "eth0"),
]


def command(name, slots, agent, network=True):
    """What stands before the program: slots=(2, 1) are two ranks on nodeA and one on nodeB."""
    words = [str(mpis.mpirun(name)), "-n", str(sum(slots)), *(_NETWORK[name] if network else [])]
    where = ",".join(f"{host}:{count}" for host, count in zip(NAMES, slots) if count)
    if name == "mpich":
        return [*words, "-launcher", "ssh", "-launcher-exec", agent, "-hosts", where]
    return [*words, "--allow-run-as-root", "--bind-to", "none", "--mca", "plm_rsh_agent", agent, "-H", where]


def run(hosts, name, slots, program, network=True, with_mpi4py=False, seconds=SECONDS, **environ):
    """(exit code, output) of a Python program on these slots. No process of the job may be left.

    network: whether the launcher is told which network joins the hosts.
    """
    words = [*command(name, slots, agent(hosts), network), sys.executable, *map(str, program)]
    return ended(hosts, words, mpis.environment(name, with_mpi4py, **environ), seconds)


def agent(hosts):
    """The path of what stands for ssh."""
    return os.path.join(hosts.folder, "agent")


def ended(hosts, words, environ, seconds=SECONDS):
    """(exit code, output) of a launcher on nodeA that starts others by `agent`. No process of the job may be left."""
    mark = uuid.uuid4().hex
    with (
        Shell(hosts, {**environ, "HVDLITE_TEST_MARK": mark}) as shell,
        tempfile.TemporaryFile("w+", errors="replace") as output,
    ):
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = hosts.popen(0, words, **streams, env=shell.environ, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            output.seek(0)
            pytest.fail(f"no end within {seconds} s:\n{output.read()[-9000:]}", pytrace=False)
        finally:
            end(process)
            left = _gone(mark)
        output.seek(0)
        said = output.read()
    assert not left, f"left: {left}"
    return code, said


def _gone(mark, seconds=10):
    """Processes of the job that do not go by themselves; they are killed."""
    until = time.monotonic() + seconds
    while (left := launching.marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, 9)
    return left
