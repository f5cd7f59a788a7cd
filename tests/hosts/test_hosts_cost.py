"""What a message between hosts costs: measured when a job begins, or told; the same on all ranks, and the right size.

A line that is made slower by so much must be seen as slower by no less: what a busy machine adds makes it seem slower.
"""

import pytest
from hosts import Hosts, needs_hosts
from hosts_job import HostsJob

pytestmark = needs_hosts

SAY = """
import numpy as np
import hvdlite.numpy as hvd
from hvdlite._core import ffi, lib
hvd.init()
alpha, beta = ffi.new("uint64_t *"), ffi.new("uint64_t *")
assert lib.hvd_link_cost(alpha, beta) == 0
print("cost", alpha[0], beta[0])
mine = np.array([alpha[0], beta[0]], np.int64)
assert np.array_equal(hvd.allreduce(mine, op=hvd.Max), mine) and np.array_equal(hvd.allreduce(mine, op=hvd.Min), mine)
for count in (10, 5000, 400000):
    assert (hvd.allreduce(np.full(count, hvd.rank(), np.float32), op=hvd.Sum) == sum(range(hvd.size()))).all()
print("all have the same", flush=True)
"""


@pytest.fixture
def hosts():
    with Hosts(2) as made:
        yield made


def cost(hosts, slots, **settings):
    """What rank 0 is told."""
    with HostsJob(hosts, slots, ["-c", SAY], **settings) as job:
        codes = job.wait(120)
        assert set(codes.values()) == {0}, job.text()
        assert all("all have the same" in job.said(rank) for rank in codes), job.text()
        (line,) = [line for line in job.said(0).splitlines() if line.startswith("cost ")]
        return tuple(int(number) for number in line.split()[1:])


def test_it_is_measured(hosts):
    alpha, beta = cost(hosts, (2, 1))
    assert alpha > 500 and beta >= 10


def test_a_long_way_is_seen(hosts):
    hosts.delay(0, 4.0)
    hosts.delay(1, 4.0)
    alpha, _ = cost(hosts, (1, 1))
    assert alpha >= 3_900_000


def test_what_is_told_is_not_measured(hosts):
    assert cost(hosts, (2, 2), HVDLITE_LINK_COST="123,8") == (123_000, 8_000)


def test_ranks_that_are_told_other_costs_are_named(hosts):
    script = "import os; rank = int(os.environ['HVDLITE_RANK']); os.environ['HVDLITE_LINK_COST'] = f'5{rank},8'\n" + SAY
    with HostsJob(hosts, (1, 1), ["-c", script]) as job:
        codes = job.wait(60)
        assert 0 not in codes.values(), job.text()
        assert "HVDLITE_LINK_COST" in job.said(0) and "HVDLITE_LINK_COST" in job.said(1), job.text()
