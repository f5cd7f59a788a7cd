"""The collectives over two and three hosts, and over streams on one: the suite that shared memory passes, on planes.

Slots are ranks per host; ragged ones, too. Every case is that of the suite of one host (over_hosts.py runs them).
"""

import re

import pytest
from hosts import needs_hosts
from hosts_job import HERE, HostsJob
from ranks import everything

pytestmark = needs_hosts
SUITE = ["test_numpy_collectives", "test_process_sets"]


def passes(hosts, slots, *modules, seconds=180, **variables):
    """Every rank in these slots passes the cases of the modules; how many there were."""
    with HostsJob(hosts, slots, [str(HERE / "over_hosts.py"), *modules], **variables) as job:
        codes = job.wait(seconds)
        assert set(codes.values()) == {0}, job.text()
        counts = {re.search(r"(\d+) cases passed", job.said(rank)).group(1) for rank in codes}
    assert len(counts) == 1
    return int(counts.pop())


STREAMS = {"HVDLITE_PLANE": "p2p"}  # of every rank, as if the ranks of a host shared nothing but their host
SIGNED = {**STREAMS, "HVDLITE_WIRE_AUTH": "1"}
LAYOUTS = [((1, 1, 1), {}), ((2, 2), {}), ((3, 1, 3), {}), *everything(((1, 1), {}), ((2, 1), {}), ((4, 4), {}))]
LAYOUTS += [(slots, STREAMS) for slots in ((2, 1), (4, 4), (2,), (7,))]
LAYOUTS += everything(*[(slots, STREAMS) for slots in ((2, 2), (3, 1, 3), (1,), (3,), (4,), (8,))])
LAYOUTS += [((2, 1), SIGNED), *everything(((3,), SIGNED), ((2, 2), SIGNED))]


@pytest.mark.parametrize(("slots", "variables"), LAYOUTS, ids=str)
def test_collectives_over_hosts_and_streams(hosts, slots, variables):
    assert passes(hosts, slots, *SUITE, **variables) > 10


def test_the_store_and_the_links_may_be_reached_over_ipv6(hosts):
    assert passes(hosts, (1, 1), "test_process_sets", ipv6=True) > 3


def test_the_store_may_be_on_any_machine(hosts):
    assert passes(hosts, (2, 1), "test_process_sets", store_on=None) > 3


def test_a_slow_way_with_losses_carries_the_same(hosts):
    hosts.delay(1, 2)
    hosts.loss(1, 2)
    hosts.rate(1, "200mbit")
    try:
        assert passes(hosts, (1, 1), "test_process_sets") > 3
    finally:
        hosts.rate(1, None)
        hosts.loss(1, 0)
        hosts.delay(1, 0)
