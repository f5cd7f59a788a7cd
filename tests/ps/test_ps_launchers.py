"""Tables and remote calls where jobs really run: hvdlite-run over ssh, mpirun, srun, torchrun, a script alone.

Each runs the same script, in two lives: pulls see all pushes, each server listens at the address of its host alone, and
each rank is called. Nothing may be left afterwards.
"""

import subprocess
import sys
import uuid

import mpi_hosts
import mpis
import pytest
from hosts import needs_hosts
from hosts_sshd import empty_within
from launching import SECONDS, Launch, marked

pytest.importorskip("zmq")
SCRIPT = """
import os, pathlib, socket
import numpy as np
import hvdlite as hvd
def listens(pid):
    files = {os.readlink(each) for each in pathlib.Path(f"/proc/{pid}/fd").iterdir()}
    words = [each.split() for name in ("tcp", "tcp6") for each in open(f"/proc/net/{name}").readlines()[1:]]
    found = [each[1].partition(":")[0] for each in words if each[3] == "0A" and f"socket:[{each[9]}]" in files]
    return [socket.inet_ntoa(bytes.fromhex(each)[::-1]) for each in found]
for life in range(2):
    hvd.init()
    table = hvd.ps.Table("users", 500, 3, hvd.ps.Add(), reduce="sum")
    every, total = np.arange(500), hvd.size() * (hvd.size() + 1) // 2
    for step in range(5):
        assert (table.pull(every) == step * total).all(), (life, step)
        if step < 4:
            table.push(every, np.full((500, 3), hvd.rank() + 1.0))
            table.step()
    stats = table.stats()
    assert sum(each["rows"] for each in stats) == 500, stats
    assert all(each["clocks"] == [4] * hvd.size() and not each["duplicates"] for each in stats), stats
    hvd.rpc.start()
    assert [hvd.rpc.call(each, hvd.rank) for each in range(hvd.size())] == list(range(hvd.size()))
    hvd.rpc.serve()
    at = [(each["server"], listens(each["pid"])) for each in stats if os.path.exists(f"/proc/{each['pid']}")]
    if hvd.local_rank() == 0:
        os.write(1, f"here {at}\\n".encode())
    hvd.shutdown()
os.write(1, b"fine\\n")
"""
AT_A, AT_B = "here [(0, ['10.77.0.11'])]", "here [(1, ['10.77.0.12'])]"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A file, for launchers that take no text."""
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT)
    return path


@needs_hosts
def test_over_ssh(hosts, sshd, script):
    words = ("-H", "nodeA:1,nodeB:1,nodeC:1", *sshd.flags, "--servers", 2, sys.executable, script)
    with Launch(*map(str, words), under=hosts.within(0, ["--"])) as job:
        assert job.wait() == 0 and job.out.count("fine") == 3, job.out + job.err
        assert job.out.count(AT_A) == job.out.count(AT_B) == 2, job.out
    empty_within(hosts, 10)


@needs_hosts
@pytest.mark.parametrize("name", ["mpich", "system"])
def test_under_mpirun(hosts, script, name):
    code, said = mpi_hosts.run(hosts, name, (1, 1, 1), [script], HVDLITE_SERVERS="2")
    assert code == 0 and said.count("fine") == 3 and said.count(AT_A) == said.count(AT_B) == 2, said


@needs_hosts
def test_under_srun(slurm, script, tmp_path):
    environ = {"HVDLITE_SERVERS": "2", "XDG_CONFIG_HOME": str(tmp_path)}
    code, said = slurm.srun(["-N2", "-n3", "--mpi=none"], [sys.executable, script], **environ)
    assert code == 0 and said.count("fine") == 3 and said.count(AT_A) == said.count(AT_B) == 2, said


@pytest.mark.parametrize("ranks", [1, 2], ids=["alone", "torchrun"])
def test_on_one_host(ranks, script, tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    if words:
        pytest.importorskip("torch")
    given = {"HVDLITE_TEST_MARK": uuid.uuid4().hex, "HVDLITE_SERVERS": "1", "XDG_CONFIG_HOME": str(tmp_path)}
    settings = {"env": mpis.environment("", **given), "capture_output": True, "text": True, "timeout": SECONDS}
    done = subprocess.run([sys.executable, *words, script], **settings)
    assert done.returncode == 0 and done.stdout.count("fine") == ranks, done.stdout + done.stderr
    assert done.stdout.count("here [(0, ['127.0.0.1'])]") == 2 and not marked(given["HVDLITE_TEST_MARK"])
