"""The hosts that tests pretend: each has a name, network and memory of its own, can be slowed and killed, and goes."""

import os
import signal
import socket
import subprocess
import sys
import time

import hosts as network
import pytest
from hosts import Hosts, needs_hosts

pytestmark = needs_hosts

SERVE = """
import socket
server = socket.create_server(("", 5000)); print("ready", flush=True)
while True:
    peer, _ = server.accept()
    while peer.recv(1 << 20):
        pass
    peer.close()
"""
MEASURE = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000), timeout=20)
count = 5 << 20
began = time.monotonic()
peer.sendall(bytes(count)); peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(count * 8 / (time.monotonic() - began))
"""


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3) as made:
        server = made.popen(1, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"ready\n"
        yield made
    server.wait(30)
    server.stdout.close()


def test_each_host_has_a_name_and_processes_of_its_own(hosts):
    for number, name in enumerate(["nodeA", "nodeB", "nodeC"]):
        assert hosts.run(number, ["hostname"]).strip() == name
        assert hosts.run(number, ["sh", "-c", "readlink /proc/1/ns/net; ls /dev/shm"]) not in ("", "\n")
    assert len({hosts.run(n, ["readlink", "/proc/self/ns/net"]) for n in range(3)}) == 3
    assert socket.gethostname() not in ("nodeA", "nodeB", "nodeC")


def test_host_ids_differ_between_hosts_and_agree_within(hosts):
    words = [sys.executable, "-c", "from hvdlite import transport as links; print(links.host_id())"]
    said = [hosts.run(number, words) for number in (0, 0, 1, 2)]
    assert said[0] == said[1] and len(set(said)) == 3


def test_a_limited_rate(hosts):
    """Delays: test_hosts_cost; pulled cables and hosts that are killed: test_hosts_faults."""

    def measured():
        """Bits per second from nodeA to nodeB."""
        return float(hosts.run(0, [sys.executable, "-c", MEASURE, hosts.ip(1)]))

    hosts.rate(1, "100mbit")
    try:
        assert measured() < 120e6
    finally:
        hosts.rate(1, None)
    assert measured() > 120e6


def test_hosts_go_when_the_test_is_killed():
    program = """
import sys, time
sys.path.insert(0, sys.argv[1])
from hosts import Hosts
hosts = Hosts(2)
hosts.delay(1, 1)
rank = hosts.popen(1, ["sleep", "1234.5"])
print(hosts._switch, *hosts._inits, flush=True)
time.sleep(100)
"""
    words = [sys.executable, "-c", program, str(network.HERE)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as test:
        pids = [int(word) for word in test.stdout.readline().split()]
        assert len(pids) == 3 and all(os.path.exists(f"/proc/{pid}/cwd") for pid in pids)
        test.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}/cwd")]:
        assert time.monotonic() < until, f"left: {left}"
        time.sleep(0.02)
    listed = subprocess.run(["ps", "ax"], capture_output=True, text=True).stdout if os.path.exists("/bin/ps") else ""
    assert "sleep 1234.5" not in listed
