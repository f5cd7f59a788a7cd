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
from test_ps_traps import folder_of_rank_0

import hvdlite as hvd
from hvdlite import ps
from hvdlite.ps import serving, together

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

    def told(said, name):
        ends.set()
        work._thread.join()
        return said

    monkeypatch.setattr(together, "rank", lambda: 0)
    monkeypatch.setattr(together, "broadcast_object", told)
    work = together.Work(SimpleNamespace(servers=1, alive=lambda: [0]), ends.wait, {})
    assert not work.is_over() and work.is_over() and work.wait() is True


@as_ranks(2)
def test_a_save_holds_what_rows_were_when_it_began_and_what_makes_the_others():
    folder, first = folder_of_rank_0(), {}
    for servers, scale in ((3, 0.5), (2, 0.1), (3, 0.0)):
        serving.serve(servers)
        table = ps.Table("t", len(EVERY), 8, ps.Adagrad(0.1), init=ps.uniform(scale, seed=servers) if scale else None)
        if first:
            table.pull([5])
            table.load(folder)
        else:
            table.push(EVERY[:1000], np.ones((1000, 8)))
            table.step()
            first = {"rows": table.pull(EVERY[:1000])}
        under_way = table.save_async(folder)
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
    serving.serve(1)
    table = ps.Table("t", len(EVERY), 8, ps.Adagrad(0.1), order="range")
    table.load(folder)
    assert np.array_equal(table.pull(EVERY), first["all"])
    hvd.shutdown()


@as_ranks(2)
def test_what_ends_a_save_early_is_told_to_all_ranks_and_the_save_before_stays():
    serving.serve(2)
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
    serving.serve(1)
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
