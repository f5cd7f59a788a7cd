"""Servers that die, stop or are talked to by strangers, and jobs that end: who hears what, and that nothing is left."""

import os
import re
import socket
import sys
import time

import numpy as np
import pytest
from launching import launch
from ranks import as_ranks, gone

import hvdlite as hvd
from hvdlite import ps
from hvdlite.ps import cluster, messages, shard
from hvdlite.security import curve

zmq = pytest.importorskip("zmq")
PYTHON = (sys.executable, "-c")
BEGIN = """
import os, signal, sys, time
import numpy as np
import hvdlite as hvd
from hvdlite.ps import cluster as serving
hvd.init()
hvd.ps.serve({servers})
table = hvd.ps.Table("users", 1000, 4, hvd.ps.Add(), replicas={replicas}, reduce="sum", staleness={staleness})
every = np.arange(1000)
table.push(every, np.ones((1000, 4)))
table.flush()
pids = [each["pid"] for each in table.stats()]
hvd.barrier()
def kill(number):
    if hvd.rank() == 0:
        time.sleep(0.2)  # until the other rank, too, is out of the barrier
        os.kill(pids[number], signal.SIGKILL)
def told(call):
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        print(f"{{type(error).__name__}} after {{time.monotonic() - began:.2f}} s: {{error}}", flush=True)
        raise
"""


def begin(servers=3, replicas=1, staleness=None):
    return BEGIN.format(servers=servers, replicas=replicas, staleness=staleness)


FOR_EVER = """
kill({number})
def pulls():
    while True:
        table.pull(every)
told({call})
"""


@pytest.mark.parametrize(
    ("servers", "call"),
    [(3, "pulls"), (1, "pulls"), (3, "pulls if hvd.rank() else hvd.barrier")],
    ids=["of 3", "the only one", "within a barrier"],
)
def test_a_server_without_a_copy_is_missed_by_every_rank(servers, call):
    body = FOR_EVER.format(number=servers - 1, call=call)
    code, out, err = launch("-np", 2, *PYTHON, begin(servers) + body)
    said = re.findall(
        r"\[(\d)\]<stdout>:HvdPeerLostError after ([\d.]+) s: .*server (\d) \(pid (\d+)\) killed by SIGKILL", out
    )
    assert len(said) == 2, (out, err)
    assert all(float(seconds) < 5 and int(number) == servers - 1 for _, seconds, number, _ in said), out
    assert servers == 1 or "its rows of table 'users' are lost, because they have no copy (replicas=1) [HVD029]" in out
    assert not gone([int(pid) for *_, pid in said])


def test_with_two_copies_the_job_goes_on_and_loses_nothing_and_a_second_loss_ends_it():
    body = """
kill(1)
began, longest = time.monotonic(), 0.0
for _ in range(40):
    at = time.monotonic()
    table.push(every, np.ones((1000, 4)))
    assert table.pull(every).min() >= 2
    longest = max(longest, time.monotonic() - at)
table.flush()
hvd.barrier()
assert (table.pull(every) == 82).all()
print(f"went on after {longest:.2f} s", flush=True)
hvd.barrier()
kill(0)
told(lambda: [table.pull(every) for _ in range(10000)])
"""
    code, out, err = launch("-np", 2, *PYTHON, begin(3, 2) + body)
    went = [float(each) for each in re.findall(r"went on after ([\d.]+) s", out)]
    assert len(went) == 2 and max(went) < 5, (out, err)
    assert err.count("its rows are read from their copies") == 1 and "[HVD030]" in err
    assert out.count("both copies of some rows are lost (replicas=2) [HVD029]") == 2, out


def test_a_stopped_server_changes_nothing_and_one_that_stays_silent_is_named():
    body = """
if hvd.rank() == 0:
    os.kill(pids[0], signal.SIGSTOP)
    import threading
    threading.Timer(0.8, os.kill, (pids[0], signal.SIGCONT)).start()
for _ in range(20):
    table.push(every, np.ones((1000, 4)))
table.flush()
hvd.barrier()
assert (table.pull(every) == 42).all()
hvd.barrier()
if hvd.rank() == 0:
    os.kill(pids[0], signal.SIGSTOP)
told(lambda: table.push(every, np.ones((1000, 4))) or table.pull(every))
"""
    code, out, err = launch("-np", 2, "--peer-timeout", "2", *PYTHON, begin(2) + body)
    said = re.findall(
        r"HvdPeerLostError after ([\d.]+) s: (server 0 of tables has said nothing for 2 s|.*rank \d)", out
    )
    assert said and "server 0 of tables has said nothing for 2 s (HVDLITE_PEER_TIMEOUT" in out, (out, err)


def test_a_slow_rank_is_named_and_a_stuck_one_ends_the_wait():
    body = """
if hvd.rank() == 1:
    time.sleep(2.8)
    os._exit(0)
table.step()
table.step()
with_limit = table.pull_async([1])
try:
    hvd.synchronize(with_limit, 0.3)
except hvd.HvdTimeoutError as error:
    print("servers did not answer" in str(error), error.handle is with_limit, flush=True)
told(table.step)
"""
    code, out, err = launch(
        "-np",
        2,
        "--stall-check-time",
        "0.5",
        "--collective-timeout",
        "1.5",
        *PYTHON,
        begin(2, staleness=1) + body,
    )
    said = "table 'users': step 4 waits for rank 1, which has ended 0 steps (ranks [0] are there), for more than 0.5 s"
    assert f"hvdlite: rank 0: {said} [HVD032]" in err, (out, err)
    assert "True True" in out
    assert re.search(r"HvdTimeoutError after 1.\d+ s: .*waits for rank 1.*more than 1.5 s .*HVD031", out), (out, err)


@as_ranks(2)
def test_strangers_are_not_let_in_and_their_messages_change_nothing():
    cluster.serve(2)
    table = ps.Table("t", 100, 2, ps.Add(), reduce="sum", staleness=None)
    table.push(np.arange(100), np.ones((100, 2)))
    client, where = table._client, cluster._serving.addresses[0]
    ours, theirs = cluster._serving._secret, bytes(32)
    host, port = where.rpartition("://")[2].rsplit(":", 1)
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    for each in silent[:10]:
        each.sendall(os.urandom(1000))
    context = zmq.Context()
    context.linger = 0  # of all its sockets
    push = messages.pack(messages.PUSH, 1 - hvd.rank(), 0, client.session, number=99, rows=1)
    body = [np.zeros(1, np.int64), np.full((1, 2), 1e9, np.float32)]
    for secret in (None, theirs):  # no encryption; another job's keys
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, b"%d" % (1 - hvd.rank()))
        if secret is not None:
            curve.Keys(secret, "ps", zmq).connect_to(dealer, 0)
        dealer.connect(where)
        dealer.send_multipart([push, *body])
        assert not dealer.poll(200)
    keys = curve.Keys(ours, "ps", zmq)
    inside = context.socket(
        zmq.DEALER
    )  # the job's keys, but wrong messages: another name, another session, too short, too long
    keys.connect_to(inside, 0)
    inside.connect(where)
    for frames in ([push, *body], [push[:20]], [b""], [messages.pack(messages.PULL, 0, 1, client.session)]):
        inside.send_multipart(frames)
    large = context.socket(zmq.DEALER)
    keys.connect_to(large, 0)
    large.connect(where)
    large.send_multipart([push, bytes(curve.MESSAGE_MAX + 1)])
    assert not inside.poll(200)
    context.destroy(linger=0)
    table.flush()
    hvd.barrier()
    assert (table.pull(np.arange(100)) == 2).all()
    assert max(each["strange"] for each in table.stats()) >= 4
    for each in silent:
        each.close()
    hvd.shutdown()


@as_ranks(2)
def test_a_rule_that_raises_changes_nothing_and_is_told():
    import small_rules

    cluster.serve(2)
    table = ps.Table("t", 100, 2, small_rules.halves, staleness=None)
    table.push([1, 2], np.full((2, 2), 4.0))
    table.flush()
    hvd.barrier()
    assert (table.pull([1, 2]) == -1).all() and (table.pull([3]) == 0).all()
    with pytest.raises(hvd.HvdError, match=r"server \d: ArithmeticError: no gradient of a thousand.*HVD033"):
        table.push([1], np.full((1, 2), 2000.0))
    hvd.barrier()  # the other rank still reads rows of this one
    hvd.shutdown()


def test_a_server_says_that_there_is_no_memory_before_it_is_killed(monkeypatch):
    spec = {"name": "t", "rows": 1 << 30, "dim": 64, "rule": "Adam", "options": {}, "replicas": 1, "order": "hash"}
    held = shard.Shard({**spec, "scale": 0.0, "seed": 0}, 0, 1)
    held.slots(np.arange(1000) * 1_000_003)
    monkeypatch.setattr(shard, "memory", lambda: (int(2e8), int(64e9)))
    with pytest.raises(shard.Refused, match=r"has 63.8 of 64.0 GB in use and cannot make 65,53\d rows of table 't'"):
        held.slots(np.arange(1 << 16) + 7)
    assert held.used == 1000 and not held.read(np.arange(10) * 1_000_003).any()


def test_without_pyzmq_or_its_encryption_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda feature: False)
    with pytest.raises(hvd.HvdInitError, match=r"was built without CURVE.*HVD023"):
        curve.zmq_for("hvd.ps")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(hvd.HvdInitError, match=r'hvd.rpc needs pyzmq: pip install "hvdlite\[rpc\]".*HVD023'):
        curve.zmq_for("hvd.rpc")


@as_ranks(1)
def test_a_child_of_a_rank_hears_that_it_is_none():
    cluster.serve(1)
    table = ps.Table("t", 10, 2, ps.Add())
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            table.pull([1])
        except Exception as error:
            os.write(write, type(error).__name__.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"HvdForkError"
    assert (table.pull([1]) == 0).all()
    began = time.monotonic()
    hvd.shutdown()
    assert time.monotonic() - began < 2
