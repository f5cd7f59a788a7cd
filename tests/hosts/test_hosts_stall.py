"""Ranks of another host that keep the others waiting are named by rank 0, with their host, and what they do instead."""

import re

from hosts import needs_hosts
from hosts_job import HERE, HostsJob

pytestmark = needs_hosts
LIMITS = {"HVDLITE_STALL_CHECK_TIME": "1", "HVDLITE_COLLECTIVE_TIMEOUT": "3", "HVDLITE_PEER_TIMEOUT": "60"}


def test_a_rank_that_sleeps_and_one_that_is_stopped_on_another_host(hosts):
    with HostsJob(hosts, (2, 2), [str(HERE / "stalling.py"), "hosts"], **LIMITS) as job:
        codes = job.wait(60, [0, 1])
        said = job.said(0)
        assert all(codes.values()), job.text()
        begin = said.find("hvdlite: stall: ")
        assert begin >= 0 and not any("hvdlite: stall: " in job.said(rank) for rank in (1, 2)), job.text()
        report = said[begin : said.find("saw ")]
        waited = "'allreduce.wanted', 'allreduce.more.0', 'allreduce.more.1' and 7 more"
        assert f"{waited}: submitted by ranks 0, 1, missing on ranks 2, 3" in report, report
        alive = r"rank 2 \(pid \d+, host nodeB\) is alive; it submitted 'allreduce.first' last, and waits for no "
        assert re.search(alive, report) and "in sleeps_here" in report, report
        assert re.search(r"rank 3 \(pid \d+, host nodeB\) is stopped", report), report
        for rank in (0, 1):  # who is stopped is worse than who computes
            assert re.search(r"saw HvdTimeoutError 3 .*missing on ranks 2, 3", job.said(rank)), job.text()
