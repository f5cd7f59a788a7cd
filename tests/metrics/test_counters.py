"""hvd.counters(): what the core has done, also over links between hosts."""

import importlib.util

import numpy as np
import pytest
from hosts import Hosts, needs_hosts
from hosts_job import HostsJob
from ranks import as_ranks

import hvdlite.numpy as hvd

# Hosts whose ranks do not come together, each time another one first.
PROGRAM = """
import time
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
mine = np.ones(64, np.float32)
for k in range(5):
    hvd.allreduce(mine, op=hvd.Sum, name="small")
before = hvd.counters()
for k in range(60):
    time.sleep(0.003 * ((hvd.rank() + k) % hvd.size()))
    assert (hvd.allreduce(mine, op=hvd.Sum, name="small") == hvd.size()).all()
did = {name: count - before[name] for name, count in hvd.counters().items()}
assert did["buckets"] == 60, did
assert did["rides"] >= 50, did
assert min(did[f"link_{what}_{way}"] for what in ("bytes", "messages") for way in ("in", "out")) > 0, did
hvd.barrier()
hvd.shutdown()
print("all is well", flush=True)
"""


def test_every_front_end_has_them():
    """And before init they say so."""
    for name, needs in (("hvdlite", None), ("hvdlite.numpy", None), ("hvdlite.torch", "torch")):
        if needs is None or importlib.util.find_spec(needs):
            assert callable(importlib.import_module(name).counters), name


@as_ranks(1, 2)
def test_they_count_what_was_done_since_init():
    hvd.shutdown()
    with pytest.raises(hvd.HvdNotInitializedError):
        hvd.counters()
    hvd.init()
    before = hvd.counters()
    assert before["buckets"] == 0 and set(before) >= {"rounds", "link_bytes_out", "link_messages_in", "rides"}
    for _ in range(3):
        hvd.allreduce(np.ones(10), name="counted")
    after = hvd.counters()
    assert after["buckets"] == 3 and after["elements"] == 30 and after["submits"] >= 3
    assert after["link_bytes_out"] == 0  # one host
    assert (after["rides"] > 0) == (hvd.size() > 1)


@needs_hosts
def test_small_tensors_ride_within_votes_though_hosts_do_not_come_together():
    with Hosts(3) as hosts, HostsJob(hosts, (1, 1, 1), ["-c", PROGRAM], HVDLITE_START_TIMEOUT="120") as job:
        codes = job.wait(150)
        assert set(codes.values()) == {0}, job.text()
        assert all("all is well" in job.said(rank) for rank in codes), job.text()
