"""Servers of tables as a role of the launcher: they come, are told of each other, and go when no rank lives.

What a server does is not tested here: a stand-in listens to the store as it would, and says what it hears.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from hosts import needs_hosts
from hosts_sshd import empty_within
from launching import Launch, answers, launch
from storing import frame, served, stranger, together

from hvdlite.errors import HvdInitError
from hvdlite.launcher.hosts.hosts import Host, assign, of_servers
from hvdlite.security import framing

PYTHON = (sys.executable, "-u", "-c")
STAND_IN = """
import os, select, sys, types
def run(order, source, announce, does=os.environ["TEST_SERVER"]):
    if does == "fails":
        raise MemoryError("no room for tables")
    place = [name for name in os.environ if name.endswith("RANK")]
    print("serves", order.number, order.servers, len(order.secret), order.host, place, "pid", os.getpid(), flush=True)
    announce(f"tcp://{order.host}:{4000 + order.number}")
    while select.select([source], [], []):
        if source.ended(lambda number, text: print("gone", number, text, flush=True)) and does != "stays":
            return print("bye", flush=True)
if "HVDLITE_SERVER" in os.environ:
    sys.modules["hvdlite.ps.server"] = types.SimpleNamespace(ServerOptions=types.SimpleNamespace, run=run)
"""
RANK = """
import os, signal, sys, time, numpy as np, hvdlite.numpy as hvd
from hvdlite.lifecycle import init
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("saved", flush=True), os._exit(7)))
hvd.init()
print("found", *init._state.store.servers, os.environ["HVDLITE_SERVERS"], flush=True)
step = lambda: hvd.allreduce(np.ones(2), name="x")
"""
STEPS = RANK + "while True:\n    step(), time.sleep(0.02)\n    os.path.exists('go') and print('step', flush=True)"


@pytest.fixture
def environ(tmp_path, monkeypatch):
    """Of jobs whose servers are stand-ins, in a folder of their own."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    return {"cold": True, "PYTHONPATH": str(tmp_path), "TEST_SERVER": "serves"}


def test_servers_are_no_ranks_and_go_when_no_rank_lives(environ):
    fails_once = RANK + "step(); sys.exit(os.environ['HVDLITE_RESTART_COUNT'] == '0' and hvd.rank() == 1)"
    words = ("-np", 2, "--servers", 2, "--max-restarts", 1, "--output-filename", "files", *PYTHON, fails_once)
    code, out, err = launch(*words, **environ)
    assert code == 0 and "restart 1 of 1" in err and "server" not in err, err
    for each in (0, 1):
        assert out.count(f"[server {each}]<stdout>:serves {each} 2 32 127.0.0.1 [] pid") == 2, out
        assert out.count(f"[server {each}]<stdout>:bye") == 2
        assert out.count(f"[{each}]<stdout>:found tcp://127.0.0.1:4000 tcp://127.0.0.1:4001 2") == 2
        assert Path(f"files/server.{each}/stdout").read_text().count("bye") == 2


def test_the_end_of_a_server_is_told_and_that_of_the_last_ends_the_job(environ):
    with Launch("-np", 2, "--servers", 2, *PYTHON, STEPS, **environ) as job:
        job.until("found", 2)
        pids = {number: int(pid) for number, pid in re.findall(r"serves (\d) .* pid (\d+)", job.out)}
        os.kill(pids["1"], signal.SIGKILL)
        ended = f"server 1 (pid {pids['1']}) killed by SIGKILL"
        job.until(f"hvdlite-run: {ended} [HVD402]\n")
        job.until(f"[server 0]<stdout>:gone 1 {ended} [HVD402]")
        Path("go").touch()
        job.until("step", 8)
        os.kill(pids["0"], signal.SIGKILL)
        assert job.wait() == 1
        lost = (
            rf"LostError: .* rank ([01]): server 0 \(pid {pids['0']}\) killed by SIGKILL: no parameter server is left"
        )
        assert set(re.findall(lost, job.err)) == {"0", "1"}, job.err
        assert re.search(r"rank . \(pid \d+\) exited with code 1.*; before that, server 1 \(pid", job.err), job.err


def test_a_server_that_ends_at_once_ends_init(environ):
    code, _, err = launch("-np", 2, "--servers", 1, *PYTHON, RANK, **{**environ, "TEST_SERVER": "fails"})
    ended = r"server 0 \(pid \d+\) exited with code 1 \(last words: MemoryError: no room for tables\)"
    assert code == 1 and set(re.findall(rf"HvdInitError: rank ([01]): {ended} \[HVD024\]", err)) == {"0", "1"}, err
    last = r"hvdlite-run: rank . \(.*\) exited with code 1; before that, server 0 .* \[HVD401\]\n"
    assert re.search(rf"hvdlite-run: {ended} \[HVD401\]\n(?s:.*){last}", err), err


def test_ranks_that_save_at_a_signal_have_their_servers(environ):
    with Launch("-np", 2, "--servers", 1, "--output-json", *PYTHON, STEPS, **environ) as job:
        job.until('"text": "found', 2)
        job.send(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM and not job.left()
        said = [each for each in map(json.loads, job.out.splitlines()) if each["text"] in ("saved", "bye")]
        assert [each.get("rank", each.get("server")) for each in said[2:]] == [0] and "server" in said[2], job.out


def test_nothing_is_left_of_servers_that_stay_nor_when_the_launcher_is_killed(environ):
    environ["TEST_SERVER"] = "stays"
    assert launch("-np", 2, "--servers", 1, *PYTHON, RANK, **environ)[0] == 0
    with Launch("-np", 2, "--servers", 2, *PYTHON, STEPS, **environ) as job:
        job.until("found", 2)
        job.send(signal.SIGKILL)
        job.until_gone()


@needs_hosts
def test_each_host_has_its_servers_which_listen_where_the_others_reach_them(hosts, sshd, environ):
    words = (*sshd.flags, "-H", "nodeA:1,nodeB:1", "--servers", 3, *PYTHON, RANK + "step()")
    with Launch(*words, under=hosts.within(0, ["--"]), **environ) as job:
        assert job.wait() == 0, job.err
        assert job.out.count("found tcp://10.77.0.11:4000 tcp://10.77.0.12:4001 tcp://10.77.0.11:4002 3") == 2, job.out
    empty_within(hosts, 10)


def test_servers_take_hosts_in_turn_and_a_rank_that_is_alone_has_none():
    slots = assign([Host("a", 2), Host("b", 1), Host("c", 4)], 3)
    assert of_servers(slots, 3) == ["a", "b", "a"] and of_servers(slots, 0) == []
    assert of_servers(slots[:1], 2) == [] and of_servers((), 2) == []


def test_what_cannot_be_is_refused_and_what_would_be_is_shown(tmp_path):
    jobs = [("--dry-run", "-np", 2, "--servers", *more, "true") for more in [(65,), (1, "--min-np", 1), (1,)]]
    (many, _, too_many), (elastic, _, refused), (code, shown, _) = answers(jobs, tmp_path)
    assert many == elastic == 2 and "[HVD802]" in too_many and "--min-np with --servers" in refused, refused
    assert code == 0 and "server 0 on localhost: HVDLITE_SERVER=0 HVDLITE_SERVERS=1 HVDLITE_SIZE=2\n" in shown


def serve(store, says):
    line = stranger(store, shake_hands=True)
    line.say(framing.SERVE, says if isinstance(says, bytes) else json.dumps(says).encode())
    return line


GOOD = {"server": 0, "address": "tcp://127.0.0.1:4000", "pid": 1, "host": "here"}
ADDRESSES = ["", 7, None, "tcp://*:1", "ipc://x", "tcp://host:1", "tcp://[::1]:1\n", "tcp://1.2.3.4:" + "1" * 4000]
BAD = [*({**GOOD, "address": each} for each in ADDRESSES), *({**GOOD, "server": each} for each in (-1, 2, "x", 1e999))]


def test_strangers_that_would_serve_are_refused():
    with served(2, servers=2) as store:
        for body in (*BAD, b"", b"[]", b"null", b"\xff", b"[" * 4000, {}):
            assert frame(serve(store, body))[0] == framing.REFUSED, body
        first, _second = serve(store, GOOD), serve(store, {**GOOD, "server": 1, "address": "tcp://[::1]:4001"})
        assert frame(serve(store, GOOD))[0] == framing.REFUSED  # it is there already
        both = together(2, lambda rank: store.connect(rank, 2))
        assert [list(each.servers) for each in both] == [["tcp://127.0.0.1:4000", "tcp://[::1]:4001"]] * 2
        store.between(lambda: store.store.servers.ended(1, "server 1 (pid 2) is gone [HVD401]"))
        assert framing.unpack_end(frame(first)[1]) == (1, -5, "server 1 (pid 2) is gone [HVD401]")
        first.say(framing.SERVE, json.dumps(GOOD).encode())  # it listens, and says nothing more
        assert frame(first)[0] == framing.REFUSED
        for each in both:
            each.bye()
        with pytest.raises(HvdInitError, match=r"server 1 \(pid 2\) is gone \[HVD024\]"):
            store.connect(0, 2)


def test_a_server_that_never_comes_is_named():
    with served(2, servers=3) as store:
        _first = serve(store, GOOD)
        late = "parameter servers 1, 2 did not start within 1 s (HVDLITE_START_TIMEOUT sets the limit) [HVD113]"
        errors = together(2, lambda rank: store.connect(rank, 2, timeout=1.0))
        assert [str(error) for error in errors] == [f"rank {rank}: {late}" for rank in (0, 1)] and not store.missed
