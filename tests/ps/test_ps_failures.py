"""Tables whose job meets trouble: the network is cut, a server dies and the job starts again, a rank leaves before the
others, Ctrl-C, kill -9.

Servers are the launcher's or a rank's. What a server's death means to ranks is in test_ps_faults.py; here it is what
becomes of the job, and that nothing is left of it.
"""

import os
import re
import signal
import sys
import time

import pytest
from hosts import needs_hosts
from hosts_sshd import empty_within
from launching import Launch, launch

pytest.importorskip("zmq")
BEGIN = "import os, pathlib, sys, time\nimport numpy as np\nimport hvdlite as hvd\nhvd.init()\n"
PUSHES = """
table = hvd.ps.Table("users", 500, 3, hvd.ps.Add(), reduce="sum", staleness=None)
every, until, count = np.arange(500), time.monotonic() + 5.5, 0
print("at", *hvd.ps.cluster._serving.addresses, flush=True)
while time.monotonic() < until:
    count += 1
    table.push(every, np.ones((500, 3)))
    assert table.pull(every).min() >= count
hvd.rpc.start()
hvd.rpc.serve()
assert (table.pull(every) == sum(hvd.allgather_object(count))).all()
print("equal", hvd.ps.cluster.current().sent_again, flush=True)
"""


@needs_hosts
def test_a_cut_is_survived_and_one_longer_than_the_limit_names_the_server(hosts, sshd):
    words = ("-H", "nodeA:1,nodeB:1", *sshd.flags, "--servers", "2", "--peer-timeout")
    under, program = hosts.within(0, ["--"]), (sys.executable, "-c", BEGIN + PUSHES)
    with Launch(*words, "20", *program, under=under) as short, Launch(*words, "3", *program, under=under) as long:
        for job in (short, long):
            job.until("]<stdout>:at", 2)
        time.sleep(0.5)
        ports = [re.search(r"at .*:(\d+)\n", job.out)[1] for job in (short, long)]
        hosts.cut(0, 1, ports=ports)
        assert long.wait() == 1
        time.sleep(0.5)
        hosts.cut(0, 1, state=False)
        assert "server 1 of tables has said nothing for 3 s (HVDLITE_PEER_TIMEOUT" in long.err, long.err
        assert short.wait() == 0, short.out + short.err
        assert len(re.findall(r"equal \d", short.out)) == 2 and re.search("equal [1-9]", short.out), short.out
    empty_within(hosts, 10)


RESTARTED = """
folder, every = pathlib.Path(sys.argv[1]), np.arange(300)
def learned(name, first, is_saved):
    table = hvd.ps.Table(name, 300, 4, hvd.ps.Adagrad(lr=0.1), init=hvd.ps.uniform(0.1, seed=1))
    if first:
        table.load(folder / str(first))
    for step in range(first, 6):
        ids = (every + 7 * hvd.rank())[: 50 + 40 * step] % 300
        table.push(ids, table.pull(ids) * (step + 1) - hvd.rank())
        table.step()
        if is_saved:
            table.save(folder / str(step + 1))
        if step == 3 and is_saved and not first and hvd.rank() == 0:
            os.kill(table.stats()[1]["pid"], 9)
    return table.pull(every)
first = max((int(each.parent.name) for each in folder.glob("*/index.json")), default=0)
assert first == hvd.broadcast_object(first) == 4 * int(os.environ["HVDLITE_RESTART_COUNT"])
assert learned("users", first, True).tobytes() == learned("undisturbed", 0, False).tobytes()
"""


def test_after_a_servers_death_the_job_starts_again_and_goes_on_from_the_last_save(tmp_path):
    words = ("-np", 2, "--servers", 2, "--max-restarts", 1, sys.executable, "-c", BEGIN + RESTARTED, tmp_path)
    code, out, err = launch(*words)
    assert code == 0 and err.count("restart 1 of 1") == 1 and re.search(r"server 1 \(pid \d+\) killed", err), out + err


LIVES = """
hvd.ps.serve(2)
table = hvd.ps.Table("users", 100, 3, hvd.ps.Add(), reduce="sum", staleness={staleness})
every = np.arange(100)
table.push(every, np.ones((100, 3)))
print("pids", os.getpid(), *[each["pid"] for each in table.stats()], flush=True)
for step in range({steps}):
    table.pull(every)
    table.push(every, np.ones((100, 3)))
    table.step()
    if hvd.rank() == 0 and step == 1 and {leaves}:
        sys.exit()
    time.sleep(0.02)
table.flush()
print("went on", table.pull(every).max(), flush=True)
"""
SERVERS = pytest.mark.parametrize("servers", [("--servers", 2), ()], ids=["of the launcher", "of rank 0"])


@SERVERS
def test_a_rank_that_has_left_takes_no_servers_along_and_is_named_where_it_is_waited_for(servers):
    python = ("-np", 2, *servers, sys.executable, "-c")
    code, out, err = launch(*python, BEGIN + LIVES.format(staleness=None, steps=40, leaves=True))
    assert code == 0 and "went on 44.0" in out, out + err
    program = BEGIN + LIVES.format(staleness=0, steps=40, leaves=True)
    code, out, err = launch(*python, program, HVDLITE_FAILURE_GRACE="1")
    assert code == 1 and "HvdPeerLostError: table 'users': rank 0 has left the job after 2 steps" in err, out + err


@SERVERS
@pytest.mark.parametrize("victim", ["launcher", "rank", "server", "all by Ctrl-C"])
def test_nothing_is_left(servers, victim):
    program = BEGIN + LIVES.format(staleness=None, steps=10**6, leaves=False)
    with Launch("-np", 2, *servers, sys.executable, "-c", program) as job:
        job.until("pids", 2)
        rank, server, _ = map(int, re.search(r"pids (\d+) (\d+) (\d+)", job.out).groups())
        if victim == "all by Ctrl-C":
            os.killpg(job.pid, signal.SIGINT)
        else:
            os.kill({"launcher": job.pid, "rank": rank, "server": server}[victim], signal.SIGKILL)
        assert job.wait() != 0
        job.until_gone()
