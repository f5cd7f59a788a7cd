"""Tables and remote calls where jobs really run: hvdlite-run over ssh, mpirun, srun, torchrun, a script alone.

Each runs the same script, in two lives: pushes and pulls are counted, each server listens at one address alone, and
each rank is called. Nothing may be left afterwards. On hosts the network between ranks and servers is cut, too.
"""

import re
import subprocess
import sys
import time
import uuid

import launching
import mpi_hosts
import mpis
import pytest
from hosts import needs_hosts
from hosts_sshd import empty_within
from launching import Launch

pytest.importorskip("zmq")
SCRIPT = """
import os, pathlib, socket, sys
import numpy as np
import hvdlite as hvd
def listens(pid):
    files = {os.readlink(each) for each in pathlib.Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    words = [each.split() for name in ("tcp", "tcp6") for each in open(f"/proc/net/{name}").readlines()[1:]]
    return [each[1].partition(":")[0] for each in words if each[3] == "0A" and f"socket:[{each[9]}]" in files]
for life in range(2):
    hvd.init()
    table = hvd.ps.Table("users", 500, 3, hvd.ps.Add(), reduce="sum")
    every, total = np.arange(500), hvd.size() * (hvd.size() + 1) // 2
    for step in range(4):
        assert (table.pull(every) == step * total).all(), (life, step, table.pull(every))
        table.push(every, np.full((500, 3), hvd.rank() + 1.0))
        table.step()
    assert (table.pull(every) == 4 * total).all()
    stats = table.stats()
    assert sum(told["rows"] for told in stats) == 500 and all(told["clocks"] == [4] * hvd.size() for told in stats), stats
    for told in stats if hvd.local_rank() == 0 else ():
        if os.path.exists(f"/proc/{told['pid']}"):
            print(f"server {told['server']} listens at {listens(told['pid'])}", flush=True)
    hvd.rpc.start()
    assert [hvd.rpc.call(rank, hvd.rank) for rank in range(hvd.size())] == list(range(hvd.size()))
    print("called", [hvd.rpc.call(rank, socket.gethostname) for rank in range(hvd.size())], flush=True)
    hvd.rpc.serve()
    hvd.shutdown()
print(f"fine {hvd.__name__}\\n", end="", flush=True)
"""
HOST_OF = {"0B004D0A": 0, "0C004D0A": 1, "0D004D0A": 2}
