"""Every port of a job with all features, under attack: memory, descriptors, steps, and members that come anew."""

import http.client
import re
import subprocess
import sys
import time

import pytest
from attacking import Attack, listening, open_files, resident
from launching import Launch
from ranks import EVERYTHING

from hvdlite.security import connection_limits

pytest.importorskip("plotly", reason="the dashboard is drawn by plotly: pip install hvdlite[report]")
pytest.importorskip("zmq", reason="hvd.rpc and hvd.ps need pyzmq")
SECONDS = 60.0 if EVERYTHING else 0.5
MEMORY = 20_000_000 if EVERYTHING else 4_000_000  # the short form sends less
DESCRIPTORS = 3 * connection_limits.STRANGERS_MAX + 32  # a stranger at a proxy has a connection to ZeroMQ, too
# Rank 0 steps and opens ports of agents and links. Told a port, it connects there as a member does, and says so.
JOB = """
import sys, threading, time
import numpy as np
import zmq
import hvdlite as hvd
from hvdlite import config, ps
from hvdlite.rendezvous import store_client
from hvdlite.security import zmq_proxy
from hvdlite.launcher.control import registration
from hvdlite.transport import connector, listener
from hvdlite.ps import cluster
from hvdlite.rpc import calls

hvd.init()
hvd.rpc.start(threads=1)
table = ps.Table("t", 100, 2, ps.Add())
secret, store, over = bytes(32), config.load().values, threading.Event()
zmq_proxy.local_address = lambda address, name: address  # as from another host

def links(at):
    one, other = made[at], listener.listen(("127.0.0.1", 1), secret, 7, 0, 1 - at)
    until = time.monotonic() + 20
    there = threading.Thread(target=lambda: connector.connect(other, {at: one.address}, "probe", until)[at].close())
    there.start()
    connector.connect(one, {1 - at: other.address}, "probe", until)[1 - at].close()
    there.join()
    other.close()

def agent(at):
    registration.report(place.address, secret, {"host": 1}, time.monotonic() + 20)[0].close()

def at_proxy(keys, address):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.routing_id = 0, b"probe"
        events = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        keys.connect_to(dealer, 0)
        keys.connect(dealer, address)
        assert events.poll(20_000)
        dealer.disable_monitor()

def at_store(at):
    store_client.authenticate("127.0.0.1", at, store["secret_key"], "a watcher", time.monotonic() + 20)[0].close()

def port_of(address):
    return int(address.rpartition(":")[2])

def probes():
    for line in sys.stdin:
        at = int(line)
        began = time.monotonic()
        {of_rpc: at_rpc, of_ps: at_ps, of_agents: agent, of_links: lambda at: links(0),
         store["store_port"]: at_store}.get(at, lambda at: None)(at)
        print(f"member {at} {time.monotonic() - began:.2f}\\n", end="", flush=True)  # one piece: rank 0 prints, too
    over.set()

if hvd.rank() == 0:
    place = registration.Registration(secret, "127.0.0.1")
    made = [listener.listen(("127.0.0.1", 1), secret, 7, 0, 0)]
    us, them = calls.running(), cluster._serving
    of_rpc, of_ps = port_of(us.sockets.proxy.address), port_of(them.addresses[0])
    of_agents, of_links = place.address[1], made[0].known.ends[0].port
    at_rpc = lambda at: at_proxy(us.sockets.door._keys, us.sockets.proxy.address)
    at_ps = lambda at: at_proxy(cluster.curve.Keys(them._secret, "ps", zmq), them.addresses[0])
    threading.Thread(target=probes, daemon=True).start()
step = 0
while not hvd.broadcast(np.array([over.is_set()]), 0)[0]:
    step += 1
    hvd.allreduce(np.ones(1000, np.float32), name="grad")
    table.push([1], np.ones((1, 2)))
    table.step()
    hvd.rpc.call(1 - hvd.rank(), "operator:add", 1, 2)
    if hvd.rank() == 0:
        for arrival in place.turn():
            arrival.sock.close()
        print(f"step {step}\\n", end="", flush=True)
    time.sleep(0.01)
"""


def _page(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read()
    except (http.client.HTTPException, OSError):  # no port of HTTP
        return b""
    finally:
        connection.close()


def _steps(job):
    return int(re.findall(r"step (\d+)", job.out)[-1])


def _attacked(job, pid, port):
    """Problems that this port has."""
    memory, files, steps, most, wrong = resident(pid), len(open_files(pid)), _steps(job), [0, 0], []
    with Attack("127.0.0.1", port) as attack:
        job.process.stdin.write(b"%d\n" % port)
        job.process.stdin.flush()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            most = [max(most[0], resident(pid) - memory), max(most[1], len(open_files(pid)) - files)]
            time.sleep(0.05)
        job.until(f"member {port} ")
        job.until(f"step {steps + 5}\n")
    wrong += [f"{most[0]} bytes more"] if most[0] > MEMORY else []
    wrong += [f"{most[1]} descriptors more"] if most[1] > DESCRIPTORS else []
    wrong += [f"{attack.let_in} answers to a wrong Host"] if attack.let_in else []
    wrong += [f"no attack: {attack.tried}"] if min(attack.tried[kind] for kind in ("wrong_host", "half")) == 0 else []
    return wrong, most


def _left_open(before):
    """{pid: descriptors} that stay open after the attacks, of processes which had so many before."""
    until = time.monotonic() + 4 * connection_limits.HANDSHAKE_S
    while True:
        left = {pid: len(open_files(pid)) - files for pid, files in before.items()}
        if all(count <= 4 for count in left.values()) or time.monotonic() > until:
            return {pid: count for pid, count in left.items() if count > 4}
        time.sleep(0.05)


def test_strangers_at_every_port_cost_little_and_harm_nothing(tmp_path):
    words = ("-np", 2, "--servers", 1, "--stdin", 0, "--metrics-port", 0, "--dashboard", "--trace-dir", tmp_path)
    with Launch(*words, sys.executable, "-c", JOB, stdin=subprocess.PIPE, cold=True) as job:
        job.until("step 20\n")
        ports = {port: pid for pid in [job.pid, *job.left()] for port in listening(pid)}
        assert len(ports) == 8, ports  # store, two of rpc, one of ps, metrics, dashboard, agents, links
        for port in ports:
            _page(port)
        before = {pid: len(open_files(pid)) for pid in ports.values()}
        found = {port: _attacked(job, pid, port) for port, pid in ports.items()}
        left = _left_open(before)
        assert not left and not any(wrong for wrong, _ in found.values()), (found, left, job.left(), job.err)
        job.process.stdin.close()
        assert job.wait() == 0, job.err
