"""Clocks of ranks on several hosts: the estimate lies within its bound. (Hosts that tests pretend share a clock.)"""

import json
from pathlib import Path

from hosts import needs_hosts
from hosts_job import HostsJob

pytestmark = needs_hosts

PROGRAM = """
import sys, numpy as np, hvdlite as hvd
from hvdlite import _core
hvd.init()
hvd.allreduce(np.ones(4), name="x")
offset, error, host = _core.clock()
print("clock", offset, error, host.partition("#")[0], flush=True)
hvd.dump_trace(sys.argv[1])
"""


def test_a_job_on_two_hosts_knows_how_far_apart_clocks_can_be(hosts, tmp_path):
    with HostsJob(hosts, (1, 2), ["-c", PROGRAM, str(tmp_path)]) as job:
        assert set(job.wait().values()) == {0}, job.text()
        said = [job.said(rank).split("clock ")[1].split() for rank in range(3)]
    assert said[0] == ["0", "0", "nodeA"] and said[1] == said[2]  # ranks of a host have one clock
    offset, error = int(said[1][0]), int(said[1][1])
    assert abs(offset) <= error < 5_000_000_000 and said[1][2] == "nodeB"
    records = [json.loads(Path(tmp_path, f"rank-{rank}.flight.json").read_text()) for rank in range(3)]
    assert [each["clock"] for each in records[1:]] == [{"offset_ns": offset, "error_ns": error}] * 2
    assert records[1]["host"].startswith("nodeB")
