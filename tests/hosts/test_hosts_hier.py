"""Plane hier over hosts of several ranks: the suite that shared memory passes; deaths are in test_hosts_faults.

By default it does what is large enough; asked for by name it does all that it can, so that the suite, whose tensors are
small, goes through it. What it promises beside (bytes, rounding, who is named in a lane), test_plane_hier.c asks.
"""

import itertools

import pytest
from hosts import needs_hosts
from hosts_job import HostsJob
from ranks import everything
from test_hosts_collectives import SUITE, passes

pytestmark = needs_hosts

LARGE = """
import numpy as np
import hvdlite.numpy as hvd
from hvdlite._core import lib, text_of
hvd.init()
print("plane", text_of(lib.hvd_plane_used()))
n, rank = hvd.size(), hvd.rank()
pairs = hvd.add_process_set([0, n - 1])
most = hvd.add_process_set(range(1, n))
for count in (1, 9000, 700001):
    for dtype in (np.float32, np.float16, np.int16):
        mine = (np.arange(count) % 5 + rank).astype(dtype)
        for name, ranks in (("global", range(n)), (pairs, [0, n - 1]), (most, range(1, n))):
            if rank not in ranks:
                continue
            where = {} if name == "global" else {"process_set": name}
            due = (len(ranks) * (np.arange(count) % 5) + sum(ranks)).astype(dtype)
            assert np.array_equal(hvd.allreduce(mine, op=hvd.Sum, **where), due), (count, dtype, name)
            root = ranks[-1]
            got = hvd.broadcast(mine, root, **where)
            assert np.array_equal(got, (np.arange(count) % 5 + root).astype(dtype)), (count, dtype, name)
lists = hvd.grouped_allreduce([np.full(k * 1000 + 1, rank, np.float32) for k in range(60)], op=hvd.Max)
assert all((each == n - 1).all() and each.size == k * 1000 + 1 for k, each in enumerate(lists))
print("large ones are right", flush=True)
"""


@pytest.mark.parametrize("slots", [(2, 1), (3, 1, 3), *everything((2, 2), (4, 4))], ids=str)
def test_collectives_through_hier_wherever_it_can(hosts, slots):
    assert passes(hosts, slots, *SUITE, HVDLITE_PLANE="hier", seconds=500) > 10


LAYOUTS, ASKED = [(2, 1), (2, 2), (3, 1, 2)], [None, "hier", "p2p"]


@pytest.mark.parametrize(
    ("slots", "plane"), everything(*itertools.product(LAYOUTS, ASKED)) or list(zip(LAYOUTS, ASKED)), ids=str
)
def test_large_tensors_of_sets_that_span_hosts(hosts, slots, plane):
    settings = {"HVDLITE_PLANE": plane} if plane else {}
    with HostsJob(hosts, slots, ["-c", LARGE], **settings) as job:
        codes = job.wait(120)
        assert set(codes.values()) == {0}, job.text()
        for rank in codes:
            said = job.said(rank)
            assert f"plane {plane or 'hier'}\n" in said and "large ones are right" in said, job.text()


@pytest.mark.parametrize("slots", [(3,), (1, 1)], ids=str)
def test_hier_is_refused_where_it_makes_no_sense(hosts, slots):
    with HostsJob(hosts, slots, ["-c", LARGE], HVDLITE_PLANE="hier") as job:
        codes = job.wait(60)
        assert 0 not in codes.values(), job.text()
        assert "plane hier, which HVDLITE_PLANE names, does not work here" in job.said(0), job.text()
        assert "needs several hosts, one of them with several ranks" in job.said(0), job.text()
