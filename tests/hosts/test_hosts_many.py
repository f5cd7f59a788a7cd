"""A job of more ranks than one host may have: processes on six hosts, streams between all of them, every collective.

What each of 66 ranks costs is mostly its Python's start; a machine of two cores needs a minute for it.
"""

from hosts import Hosts, needs_hosts
from hosts_job import HostsJob

pytestmark = needs_hosts

PROGRAM = """
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
everyone = range(size)
for count in (1, 1000, 200000):
    mine = np.full(count, rank, np.float32)
    assert (hvd.allreduce(mine, op=hvd.Sum, name=f"sum{count}") == sum(everyone)).all()
rows = hvd.allgather(np.full((rank % 3, 2), rank), name="rows")
assert rows[:, 1].tolist() == [each for each in everyone for _ in range(each % 3)]
assert hvd.broadcast(np.array([rank, 7]), root_rank=size - 1, name="last").tolist() == [size - 1, 7]
given, splits = hvd.alltoall(np.array([rank * 1000 + to for to in everyone]), np.ones(size, np.int32), name="all")
assert given.tolist() == [each * 1000 + rank for each in everyone] and splits.tolist() == [1] * size
share = hvd.reducescatter(np.ones((2 * size, 3), np.int64), op=hvd.Sum, name="share")
assert share.shape == (2, 3) and (share == size).all()
most = hvd.add_process_set(list(everyone)[1:])
if rank:
    assert hvd.allreduce(np.array([1]), op=hvd.Sum, process_set=most, name="most") == size - 1
hvd.barrier()
hvd.shutdown()
print("all is well", flush=True)
"""


def run(hosts, slots):
    with HostsJob(hosts, slots, ["-c", PROGRAM], HVDLITE_START_TIMEOUT="400", HVDLITE_LEAVE_TIMEOUT="60") as job:
        codes = job.wait(500)
        assert set(codes.values()) == {0}, job.text()
        assert all("all is well" in job.said(rank) for rank in codes), job.text()


def test_sixty_six_ranks():
    with Hosts(6) as hosts:
        run(hosts, (11,) * 6)
