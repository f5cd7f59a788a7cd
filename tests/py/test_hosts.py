"""The hosts that tests pretend: each has a name, network and memory of its own, can be slowed and killed, and goes."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from hosts import Hosts, needs_hosts

pytestmark = needs_hosts

SERVE = """
import socket
server = socket.create_server(("", 5000)); print("ready", flush=True)
while True:
    peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while (got := peer.recv(1 << 20)):
        peer.sendall(got if len(got) == 1 else b"")
    peer.close()
"""
MEASURE = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000), timeout=20)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
began = time.monotonic()
for _ in range(5):
    peer.sendall(b"x"); peer.recv(1)
print((time.monotonic() - began) / 5)
count = int(sys.argv[2]) << 20
began = time.monotonic()
peer.sendall(bytes(count)); peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(count * 8 / (time.monotonic() - began) if count else 0)
"""


@pytest.fixture(scope="module")
def hosts():
    with Hosts(3) as made:
        server = made.popen(1, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"ready\n"
        yield made
    server.wait(30)
    server.stdout.close()


def measured(hosts, megabytes=0):
    """Seconds of a round trip from nodeA to nodeB, bits per second."""
    said = hosts.run(0, [sys.executable, "-c", MEASURE, hosts.ip(1), str(megabytes)])
    return [float(line) for line in said.split()]


def test_each_host_has_a_name_and_processes_of_its_own(hosts):
    for number, name in enumerate(["nodeA", "nodeB", "nodeC"]):
        assert hosts.run(number, ["hostname"]).strip() == name
        assert hosts.run(number, ["sh", "-c", "readlink /proc/1/ns/net; ls /dev/shm"]) not in ("", "\n")
    assert len({hosts.run(n, ["readlink", "/proc/self/ns/net"]) for n in range(3)}) == 3
    assert socket.gethostname() not in ("nodeA", "nodeB", "nodeC")


def test_host_ids_differ_between_hosts_and_agree_within(hosts):
    words = [sys.executable, "-c", "from hvdlite import links; print(links.host_id())"]
    said = [hosts.run(number, words) for number in (0, 0, 1, 2)]
    assert said[0] == said[1] and len(set(said)) == 3


def test_a_delayed_cable(hosts):
    hosts.delay(1, 20)
    try:
        assert 0.04 <= measured(hosts)[0] < 0.3
    finally:
        hosts.delay(1, 0)
    assert measured(hosts)[0] < 0.03


def test_a_limited_rate(hosts):
    hosts.rate(1, "100mbit")
    try:
        assert measured(hosts, 5)[1] < 120e6
    finally:
        hosts.rate(1, None)
    assert measured(hosts, 5)[1] > 120e6


def test_lost_packets_delay_but_lose_nothing(hosts):
    hosts.loss(1, 5)
    try:
        assert measured(hosts, 1)[1] > 0
    finally:
        hosts.loss(1, 0)


def test_a_pulled_cable_is_silence(hosts):
    hosts.cable(1, "down")
    try:
        with pytest.raises(subprocess.CalledProcessError):
            hosts.run(
                0, [sys.executable, "-c", f"import socket; socket.create_connection(('{hosts.ip(1)}', 5000), 0.5)"]
            )
    finally:
        hosts.cable(1, "up")
    assert measured(hosts)[0] < 5


def test_a_killed_host_takes_its_processes_with_it():
    with Hosts(2) as made:
        rank = made.popen(0, ["sleep", "1000"])
        other = made.popen(1, ["sleep", "1000"])
        made.kill(0)
        assert rank.wait(30) != 0
        assert other.poll() is None
    assert other.wait(30) != 0


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
    words = [sys.executable, "-c", program, os.path.dirname(os.path.abspath(__file__))]
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
