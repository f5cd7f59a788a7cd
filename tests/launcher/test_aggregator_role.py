"""How does the launcher start an aggregator, name it, report its end and let it go?

What an aggregator does is not tested here: a stand-in with its main holds the line to the store, as the real one does.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from launching import Launch, answers
from storing import frame, served, stranger, together

from hvdlite.launcher.agent import child
from hvdlite.launcher.hosts.hosts import server_name
from hvdlite.rendezvous.server_line import StoreLine
from hvdlite.security import framing

STAND_IN = """
import os, select, sys, time, types
def main():
    from hvdlite import config
    from hvdlite.rendezvous import server_line, store_client
    values, limit = config.load().values, time.monotonic() + 20
    where = values["store_addr"], values["store_port"], values["secret_key"], "aggregator 0", limit
    line = server_line.StoreLine(*store_client.authenticate(*where), values["server"], "aggregator 0")
    print("adds", values["server"], values["servers"], values["aggregators"], "pid", os.getpid(), flush=True)
    line.announce(f"udp://{line.host}:4141")
    while select.select([line], [], []):
        if line.ended(lambda number, text: print("gone", number)):
            return print("bye", flush=True)
if "HVDLITE_SERVER" in os.environ:
    package = sys.modules["hvdlite.aggregation"] = types.ModuleType("hvdlite.aggregation")
    package.__path__ = []
    sys.modules["hvdlite.aggregation.aggregator_main"] = package.aggregator_main = types.SimpleNamespace(main=main)
"""
RANK = """
import os, time, hvdlite.numpy as hvd
from hvdlite.lifecycle import init
hvd.init()
found, names = list(init._state.store.aggregators), ("HVDLITE_AGGREGATORS", "HVDLITE_AGGREGATOR_KIND")
print("found", found, list(init._state.store.servers), *map(os.environ.get, names), flush=True)
while found != [""] and not os.path.exists("go"):
    time.sleep(0.02)
hvd.shutdown(), hvd.init()
print("then", *init._state.store.aggregators, "end", flush=True)
"""


@pytest.mark.parametrize("ends", [True, False])
def test_an_aggregator_is_started_and_its_end_ends_no_job(tmp_path, monkeypatch, ends):
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    words = ("-np", 2, "--aggregators", 1, "--aggregator-kind", "hashed", "--output-filename", "files")
    with Launch(*words, sys.executable, "-u", "-c", RANK, cold=True, PYTHONPATH=str(tmp_path)) as job:
        job.until("found ['udp://127.0.0.1:4141'] [] 1 hashed", 2)
        pid = int(re.search(r"\[aggregator 0\]<stdout>:adds 0 0 1 pid (\d+)\n", job.out)[1])
        if ends:
            os.kill(pid, signal.SIGKILL)
            end = f"aggregator 0 (pid {pid}) killed by SIGKILL"
            job.until(f"hvdlite-run: {end}; the ranks add without it from now on [HVD402]\n")
        Path("go").touch()
        assert job.wait() == 0, job.err
        assert job.out.count("then  end" if ends else "then udp://127.0.0.1:4141 end") == 2, job.out
    assert ("bye" in Path("files/aggregator.0/stdout").read_text()) is not ends


def test_what_cannot_be_is_refused_and_what_would_be_is_shown(tmp_path):
    jobs = [("--dry-run", "-np", 2, "--aggregators", 1, *more, "true") for more in [("--min-np", 1), ("--mpi",), ()]]
    *refusals, (code, shown, _) = answers(jobs, tmp_path)
    for (refused, _, text), flag in zip(refusals, ("--min-np", "--mpi")):
        assert refused == 2 and f"{flag} with --aggregators" in text and "--aggregator HOST:PORT [HVD246]" in text, text
    assert code == 0 and "aggregator 0 on localhost: HVDLITE_AGGREGATORS=1 HVDLITE_SERVER=0 HVDLITE_SERVERS=0 " in shown


def test_aggregators_are_numbered_after_servers():
    assert [server_name(number, 2) for number in range(3)] == ["server 0", "server 1", "aggregator 0"]
    mains = [child._main({"HVDLITE_SERVER": str(number), "HVDLITE_SERVERS": "1"}) for number in (0, 1)]
    assert mains == ["hvdlite.ps.server_main", "hvdlite.aggregation.aggregator_main"]


def test_an_aggregator_is_no_table_server_to_the_store():
    late = "did not start within 0.3 s (HVDLITE_START_TIMEOUT sets the limit) [HVD113]"
    with served(2, servers=1, aggregators=1) as store:
        line = stranger(store, shake_hands=True)
        table = StoreLine(line.sock, line.session, 0)
        other = stranger(store, shake_hands=True)
        other.say(framing.SERVE, json.dumps({"server": 1, "address": "tcp://127.0.0.1:4141"}).encode())
        assert frame(other)[0] == framing.REFUSED
        errors = together(2, lambda rank: store.connect(rank, 2, timeout=0.3))
        assert str(errors[0]) == f"rank 0: parameter server 0 and aggregator 0 {late}"
        table.announce("tcp://127.0.0.1:4000")
        errors = together(2, lambda rank: store.connect(rank, 2, timeout=0.3))
        assert str(errors[1]) == f"rank 1: aggregator 0 {late}"
        store.between(lambda: store.store.servers.ended(1, "aggregator 0 (pid 2) is gone [HVD401]"))
        both = together(2, lambda rank: store.connect(rank, 2))
        assert [(list(each.servers), list(each.aggregators)) for each in both] == [(["tcp://127.0.0.1:4000"], [""])] * 2
