"""A rank dies, a host dies, a cable is pulled, a peer stops reading: all others say who and where, and soon.

A closed connection is noticed within a second or so, silence after HVDLITE_PEER_TIMEOUT; the bounds here leave room
for a busy machine. `tell` is whether somebody who watches over processes tells the store of ends, as the launcher does.
"""

import itertools
import re
import signal
import time

import pytest
from hosts import NAMES, Hosts, needs_hosts
from hosts_job import HostsJob
from ranks import everything

pytestmark = needs_hosts
SLACK_S = 8.0
PATIENCE_S = 2.0

LOOP = """
import sys, time
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
try:
    hvd.allreduce(np.ones(int(sys.argv[1])), name="x")
    print("ready", flush=True)
    while True:
        hvd.allreduce(np.ones(int(sys.argv[1])), name="x")
except hvd.HorovodInternalError as error:
    print(f"caught {time.monotonic()} {type(error).__name__}: {error}", flush=True)
    sys.exit(3)
"""


@pytest.fixture
def hosts():
    with Hosts(3) as made:
        yield made


def looping(hosts, slots, count=1000, **settings):
    settings.setdefault("HVDLITE_PEER_TIMEOUT", str(PATIENCE_S))
    return HostsJob(hosts, slots, ["-c", LOOP, str(count)], **settings)


def survivors_say(job, lost, since, seconds):
    """Every rank but the lost ones raises in time, naming one of them and its host."""
    for slot in job.slots:
        if slot.rank in lost:
            continue
        job.wait(60, [slot.rank])
        found = re.search(r"caught (\S+) (\w+): (.*)", job.said(slot.rank), re.DOTALL)
        assert found is not None, job.text()
        assert found[2] == "HvdPeerLostError", job.text()
        assert float(found[1]) - since < seconds, f"rank {slot.rank} took {float(found[1]) - since} s:\n{job.text()}"
        named = [rank for rank in lost if re.search(rf"\brank {rank}\b", found[3])]
        assert named and any(job.slots[rank].host in found[3] for rank in named), job.text()


MUCH = 300000  # doubles: some segments of plane hier
KILLED = [(0, False, 1000), (2, False, 1000), (0, True, MUCH), (5, True, MUCH)]


@pytest.mark.parametrize(
    ("lost", "tell", "count"), everything(*itertools.product([0, 1, 2, 5], [True, False], [1000, MUCH])) or KILLED
)
def test_a_killed_rank_is_named_with_its_host(hosts, lost, tell, count):
    with looping(hosts, (2, 1, 3), count=count, tell=tell, store_on=None) as job:
        job.until("ready")
        began = time.monotonic()
        job.kill_rank(lost)
        survivors_say(job, {lost}, began, 1 + SLACK_S)


@pytest.mark.parametrize(("number", "count"), [(0, 1000), (1, MUCH), *everything((1, 1000), (0, MUCH))])
def test_a_killed_host_is_named(hosts, number, count):
    with looping(hosts, (2, 2), count=count, store_on=None) as job:
        job.until("ready")
        began = time.monotonic()
        hosts.kill(number)
        lost = {slot.rank for slot in job.slots if slot.host == NAMES[number]}
        survivors_say(job, lost, began, 1 + SLACK_S)


@pytest.mark.parametrize("count", [1, 300000])
def test_a_pulled_cable_is_noticed_on_both_sides(hosts, count):
    """Each side loses the other: whoever is cut off from the store, too."""
    with looping(hosts, (1, 2), count=count, store_on=0) as job:
        job.until("ready")
        began = time.monotonic()
        hosts.cable(1, "down")
        job.wait(60)
        for rank, other in ((0, "nodeB"), (1, "nodeA"), (2, "nodeA")):
            said = job.said(rank)
            found = re.search(r"caught (\S+) HvdPeerLostError: (.*)", said, re.DOTALL)
            assert found is not None and other in found[2] and re.search(r"\brank \d", found[2]), job.text()
            assert float(found[1]) - began < PATIENCE_S + SLACK_S, job.text()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_peer_that_stops_reading_is_named(hosts, lost):
    with looping(hosts, (2, 2), count=300000, store_on=None) as job:
        job.until("ready")
        began = time.monotonic()
        job.kill_rank(lost, signal.SIGSTOP)
        survivors_say(job, {lost}, began, PATIENCE_S + SLACK_S)


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("raise ValueError('boom')", 1, r"rank 2 \(host \S+\) raised ValueError: boom"),
        ("sys.exit(0)", 0, r"caught .*HvdPeerLostError.*\brank 2\b"),
    ],
)
def test_a_rank_that_raises_or_leaves_early_is_named_on_other_hosts(hosts, does, code, says):
    program = LOOP.replace("    while True:", f"    if hvd.rank() == 2:\n        {does}\n    while True:")
    with HostsJob(hosts, (2, 1), ["-c", program, "10"]) as job:
        assert job.wait(60)[2] == code
        assert all(re.search(says, job.said(rank)) for rank in (0, 1)), job.text()


def test_ranks_that_cannot_link_up_say_with_whom(hosts):
    """The store is reached, but not the other host: a firewall between them."""
    for number, other in ((0, 1), (1, 0)):
        rule = f"ip saddr {hosts.ip(other)} drop"
        table = f"table inet wall {{ chain into {{ type filter hook input priority 0; {rule}; }}; }}"
        hosts._in_net(hosts._inits[number], "nft", table)
    with HostsJob(hosts, (1, 1), ["-c", LOOP, "10"], store_on=None, HVDLITE_START_TIMEOUT="3") as job:
        codes = job.wait(60)
        assert set(codes.values()) == {1}
        at = [rf"rank {rank} at 10\.77\.0\.1{rank + 1}:\d+ on host {NAMES[rank]}" for rank in range(2)]
        for rank in (0, 1):  # whoever runs out of time first tells the other
            assert "has no connection for 'set 0 votes'" in job.said(rank) and "firewall" in job.said(rank), job.text()
            assert all(re.search(each, job.said(rank)) for each in at), job.text()


def test_a_rank_that_dies_while_the_others_link_up_is_named_at_once(hosts):
    program = "import hvdlite as hvd, hvdlite.transport.mesh as job, os, time\n"
    program += "if os.environ['HVDLITE_RANK'] == '2': job.JobLinks.rows = lambda *_: os._exit(7)\n" + LOOP
    with HostsJob(hosts, (1, 1, 1), ["-c", program, "10"]) as job:
        began = time.monotonic()
        codes = job.wait(60)
        assert time.monotonic() - began < 30  # not the time limit of 60 s
        assert codes[2] == 7 and codes[0] == codes[1] == 1
        for rank in (0, 1):
            assert "rank 2 on nodeC exited with 7" in job.said(rank), job.text()
