"""hvdlite.run over several hosts: the call and its results cross the network, and only that network listens to them."""

import os
import shutil
import subprocess
import sys
import textwrap

import mpis
import pytest
from hosts import needs_hosts
from hosts_sshd import empty_within

SECONDS = 300


@pytest.fixture(scope="module")
def path(hosts, sshd):
    """PATH on which ssh reaches the hosts of the test."""
    folder = os.path.join(hosts.folder, "bin")
    os.mkdir(folder)
    with open(os.path.join(folder, "ssh"), "w") as file:
        file.write(f'#!/bin/sh\nexec {shutil.which("ssh")} {sshd.flags[1]} "$@"\n')
    os.chmod(file.name, 0o755)
    return folder + os.pathsep + os.environ["PATH"]


def called(hosts, path, body):
    words = hosts.within(0, [sys.executable, "-c", textwrap.dedent(body)])
    environ = {**os.environ, "PATH": path}
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=environ)
    empty_within(hosts, 10)
    return done.returncode, done.stdout, done.stderr


@needs_hosts
def test_results_come_from_all_hosts_and_exceptions_name_theirs(hosts, path):
    body = """
    import hvdlite
    def f(add):
        import os, socket, hvdlite.numpy as hvd, numpy
        hvd.init()
        return socket.gethostname(), float(hvd.allreduce(numpy.ones(8), op=hvd.Sum)[0]) + add, os.environ["MINE"]
    import os
    os.environ["MINE"] = "with 'quotes'"
    print(hvdlite.run(f, (0.5,), num_proc=3, hosts="nodeA:2,nodeB:2"))
    print(hvdlite.run(f, (1.5,), num_proc=1, hosts="nodeB:2"))
    def g():
        import socket
        if socket.gethostname() == "nodeB":
            raise OSError(5, "a broken disk")
    try:
        hvdlite.run(g, num_proc=2, hosts="nodeA,nodeB")
    except hvdlite.HvdRunError as error:
        print(error.rank, error.__cause__.errno, str(error).splitlines()[0].split(", pid")[0])
    """
    code, out, err = called(hosts, path, body)
    assert code == 0, out + err
    everywhere = [("nodeA", 3.5, "with 'quotes'")] * 2 + [("nodeB", 3.5, "with 'quotes'")]
    assert out.splitlines() == [str(everywhere), "[('nodeB', 2.5, \"with 'quotes'\")]", "1 5 rank 1 (nodeB"]


@needs_hosts
def test_the_desk_listens_where_the_hosts_meet_only(hosts, path):
    body = """
    import hvdlite
    def f():
        return None
    from hvdlite.launcher import function_server as desk
    class Told(desk.FunctionServer):
        def __init__(self, *words):
            super().__init__(*words)
            print(self.address[0], flush=True)
    desk.FunctionServer = Told
    hvdlite.run(f, num_proc=2, hosts="nodeA,nodeB")
    hvdlite.run(f, num_proc=2, hosts="nodeA,nodeB", network_interface="eth0")
    hvdlite.run(f, num_proc=2, hosts="nodeA:2,nodeB")
    hvdlite.run(f)
    """
    code, out, err = called(hosts, path, body)
    assert code == 0, out + err
    assert out.splitlines() == ["10.77.0.11", "10.77.0.11", "127.0.0.1", "127.0.0.1"]


@needs_hosts
def test_hosts_that_cannot_be_reached_are_named(hosts, path):
    body = """
    import hvdlite
    try:
        hvdlite.run(print, num_proc=2, hosts="nodeB,10.77.0.99", start_timeout=5)
    except hvdlite.HvdRunError as error:
        print(error.rank, error)
    """
    code, out, err = called(hosts, path, body)
    assert code == 0 and out.startswith("None the job ended with code 255") and "10.77.0.99" in out, out + err


def test_a_job_over_mpi():
    program = mpis.mpirun("mpich")
    body = """
    import hvdlite
    def f():
        import hvdlite.numpy as hvd, numpy
        hvd.init()
        return hvd.rank(), hvd.mpi_enabled(), float(hvd.allreduce(numpy.ones(8), op=hvd.Sum)[0])
    print(hvdlite.run(f, num_proc=2, use_mpi=True))
    """
    environ = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    words = [sys.executable, "-c", textwrap.dedent(body)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=environ)
    assert done.returncode == 0 and "[(0, True, 2.0), (1, True, 2.0)]" in done.stdout, done.stdout + done.stderr
