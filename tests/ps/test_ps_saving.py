"""Saves that last, and threads that wait: training goes on beside a save, and a thread that waits holds up no other."""

import os
import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import small_rules
from launching import launch
from ranks import as_ranks
from test_ps_regressions import folder_of_rank_0

import hvdlite as hvd
from hvdlite import ps
from hvdlite.ps import cluster
from hvdlite.ps import coordination as together

pytest.importorskip("zmq")
EVERY = np.arange(3000)
SLOW = """
import os, signal, sys, threading, time
import numpy as np
import hvdlite as hvd
hvd.init()
table = hvd.ps.Table("t", 1000, 4, hvd.ps.Add(), reduce="sum")
table.push([1], np.ones((1, 4)))
table.step()
server = table.stats()[0]["pid"]
def stopped(call):
    hvd.barrier()
    if hvd.rank() == 0:
        os.kill(server, signal.SIGSTOP)
        threading.Timer(3.2, lambda: os.kill(server, signal.SIGCONT)).start()
    return call()
stopped(lambda: table.save(sys.argv[1]))
stopped(lambda: table.load(sys.argv[1]))
print("rows", table.pull([1])[0, 0], flush=True)
"""


def test_a_save_and_a_load_may_take_longer_than_a_collective(tmp_path):
    words = "-np", 2, "--servers", 1, "--collective-timeout", "2.5", sys.executable, "-c", SLOW, str(tmp_path / "saved")
    code, out, err = launch(*words)
    assert code == 0 and out.count("rows 2.0") == 2, (out, err)


def test_an_end_while_ranks_hear_that_there_is_none_is_not_lost(monkeypatch):
    ends = threading.Event()

    def asked(block, root, name):
        ends.set()
        work._thread.join()
        return SimpleNamespace(wait=lambda: None, release=lambda: None)

    monkeypatch.setattr(together, "rank", lambda: 0)
    monkeypatch.setattr(together, "broadcast_bytes_async", asked)
    monkeypatch.setattr(together, "broadcast_object", lambda said, name: said)
    work = together.Work(SimpleNamespace(servers=1, alive=lambda: [0]), ends.wait, {})
    assert not work.is_over() and work.is_over() and work.wait() is True


@as_ranks(2)
def test_a_save_holds_what_rows_were_when_it_began_and_what_makes_the_others():
    folder, first = folder_of_rank_0(), {}
    for servers, scale in ((3, 0.5), (2, 0.1), (3, 0.0)):
        cluster.serve(servers)
        table = ps.Table("t", len(EVERY), 8, ps.Adagrad(0.1), init=ps.uniform(scale, seed=servers) if scale else None)
        if first:
            table.pull([5])
            table.load(folder)
        else:
            table.push(EVERY[:1000], np.ones((1000, 8)))
            table.step()
            first = {"rows": table.pull(EVERY[:1000])}
        under_way = table.save_async(folder)
        if scale == 0.1:  # at once
            hvd.shutdown()
            hvd.init()
            continue
        for _ in range(5):
            table.push(EVERY[:2000], np.ones((2000, 8)))
            table.step()
            table.pull([1])
        if scale == 0.5:
            hvd.synchronize(under_way)
            assert under_way.done()
            table.load(folder)
            first["all"] = table.pull(EVERY)
            assert np.array_equal(first["all"][:1000], first["rows"]) and len(np.unique(first["all"][1000:])) > 9000
        hvd.shutdown()  # which ends a save that nobody has waited for
        hvd.init()
    cluster.serve(1)
    table = ps.Table("t", len(EVERY), 8, ps.Adagrad(0.1), order="range")
    table.load(folder)
    assert np.array_equal(table.pull(EVERY), first["all"])
    hvd.shutdown()


@as_ranks(2)
def test_what_ends_a_save_early_is_told_to_all_ranks_and_the_save_before_stays():
    cluster.serve(2)
    table, folder = ps.Table("t", 3000, 8, small_rules.disk_stops, reduce="sum"), folder_of_rank_0()
    table.push(EVERY, np.ones((3000, 8)))
    table.step()
    table.save(folder)
    table.push(EVERY, np.full((3000, 8), 100.0))
    table.step()
    with pytest.raises(hvd.HvdError, match=r"server 0: .*HVD033"):
        table.save(os.path.join(folder, "index.json"))
    late = table.save_async(folder)
    with pytest.raises(hvd.HvdTimeoutError, match=r"table 't': servers were not done within 0\.1 s \[HVD031\]"):
        late.wait(timeout=0.1)
    assert not late.done()
    hvd.barrier()
    if hvd.rank() == 0:
        for pid in children(table):
            os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(hvd.HvdError, match=r"server \d: its process that writes ended with status -9 \[HVD033\]"):
            late.wait()
    table.load(folder)
    assert (table.pull(EVERY) == 2).all()  # of the save before
    hvd.shutdown()


def children(table):
    pids = [each["pid"] for each in table.stats()]
    return [int(pid) for server in pids for pid in open(f"/proc/{server}/task/{server}/children").read().split()]


@as_ranks(2)
@pytest.mark.parametrize("wait", ["pull", "step"])
def test_a_thread_that_waits_for_a_slow_rank_holds_up_no_other(wait):
    cluster.serve(1)
    together, free = ps.Table("together", 10, 2, ps.Add()), ps.Table("free", 10, 2, ps.Add(), staleness=None)

    def waits():
        together.step()
        if wait == "step":
            together.step()
        else:
            together.pull([1])

    if hvd.rank() == 0:
        thread = threading.Thread(target=waits)
        thread.start()
        for _ in range(300):  # at one in each slice of a wait they take 15 s
            free.push([1], np.ones((1, 2)))
        hvd.barrier(timeout=10)
    else:
        hvd.barrier(timeout=10)
        waits()
    if hvd.rank() == 0:
        thread.join()
    hvd.shutdown()


@as_ranks(1)
def test_a_folder_takes_one_table_at_a_time():
    cluster.serve(1)
    slow, other = ps.Table("slow", 10, 1, small_rules.disk_stops), ps.Table("other", 10, 1, ps.Add())
    slow.push([1], np.full((1, 1), 100.0))
    slow.step()
    folder = folder_of_rank_0()
    late = slow.save_async(folder)
    with pytest.raises(hvd.HvdError, match=r"table 'other': table 'slow' is being saved to .*own \[HVD033\]"):
        other.save(folder)
    for pid in children(slow):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(hvd.HvdError, match="status -9"):
        late.wait()
    other.save(folder)
    other.load(folder)
    hvd.shutdown()


INTERRUPTS = """
import signal, sys, threading, time
import numpy as np
import hvdlite as hvd
hvd.init()
table = hvd.ps.Table("t", 300, 4, hvd.ps.Add(), reduce="sum", staleness=None)
every, over, counts = np.arange(300), [], [0, 0, 0, 0]
def pulls(number):
    while not over:
        table.pull(every[:20])
        counts[number] += 1
def interrupts():
    for _ in range(60):
        time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    over.append(True)
others = [threading.Thread(target=pulls, args=(n,)) for n in (0, 1)] + [threading.Thread(target=interrupts)]
tried = done = 0
def pushes():
    global tried, done
    while not over:
        tried += 1
        table.push(every, np.ones((300, 4)))
        done += 1
def caught(call):
    try:
        call()
    except KeyboardInterrupt:
        pass
for each in others:
    each.start()
while not over:
    try:
        caught(pushes)
    except KeyboardInterrupt:
        pass
for each in others:
    each.join()
rows = table.pull(every)
print("right", done <= rows.min() and rows.max() <= tried and min(counts[:2]) > 0, done, tried, rows.min(), rows.max())
"""


def test_ctrl_c_that_is_caught_tears_no_message_and_holds_up_no_thread():
    code, out, err = launch("-np", 1, "--servers", 2, sys.executable, "-c", INTERRUPTS)
    assert code == 0 and "right True" in out, (out, err)
