"""Uses of tables that went wrong once: loads between pushes, deaths within a save, rules that print, long pauses."""

import copy
import pickle
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import small_rules
from launching import launch
from ranks import as_ranks

import hvdlite as hvd
from hvdlite import ps
from hvdlite.ps import cluster
from hvdlite.ps.client import Client

pytest.importorskip("zmq")


def folder_of_rank_0():
    import tempfile

    return hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)


@as_ranks(2)
def test_what_is_pushed_and_not_applied_yet_outlives_a_load():
    cluster.serve(1)
    folder, me = folder_of_rank_0(), hvd.rank()
    table = ps.Table("t", 100, 1, ps.Add(), reduce="sum")
    table.push([me], np.ones((1, 1)))
    table.step()
    table.save(folder.encode())
    if me == 1:
        table.push([60, 61], np.full((2, 1), 5.0))
        table.leave()
    table.load(folder)
    if me == 0:
        table.push([7], np.full((1, 1), 100.0))
        table.step()
        rows = table.pull(np.arange(100))[:, 0]
        assert {int(n): float(rows[n]) for n in np.nonzero(rows)[0]} == {0: 1, 1: 1, 7: 100, 60: 5, 61: 5}
    hvd.shutdown()


@as_ranks(2)
@pytest.mark.parametrize("when", ["save", "load", "loaded", "open"])
def test_with_two_copies_a_server_may_end_while_all_ranks_act_together(when):
    cluster.serve(3)
    table, folder = ps.Table("t", 300, 2, ps.Add(), replicas=2, reduce="sum"), folder_of_rank_0()
    table.push(np.arange(300), np.ones((300, 2)))
    table.step()
    table.save(folder)
    table.push(np.arange(300), np.full((300, 2), 7.0))
    table.step()
    table.pull([1])
    victim = cluster._serving._children[1:2]
    ask, left = Client.ask, [3]

    def ask_and_kill(client, server, do, *more, **named):
        left[0] -= do == when
        if left[0] == 1 and do == when:
            victim[0]._process.kill()
            time.sleep(0.2)
        return ask(client, server, do, *more, **named)

    Client.ask = ask_and_kill if victim else ask  # rank 0 asks, and has started it
    try:
        if when == "open":
            other = ps.Table("other", 300, 2, ps.Add(), replicas=2, reduce="sum")
            other.push([5], np.ones((1, 2)))
            other.step()
            assert (other.pull([5]) == 2).all()
        elif when == "save":
            table.save(folder)
        table.load(folder)
    finally:
        Client.ask = ask
    assert (table.pull(np.arange(300)) == (16 if when == "save" else 2)).all()
    assert len(table.stats()) == 2
    with pytest.raises(hvd.HvdPeerLostError, match=r"a server has ended, and there would be no copy.*HVD029"):
        ps.Table("single", 10, 1, ps.Add())
    hvd.shutdown()


@as_ranks(2)
def test_a_rule_that_raises_at_the_end_of_a_step_is_told_to_all_ranks():
    cluster.serve(1)
    table = ps.Table("t", 100, 2, small_rules.refuses)
    table.push([1 + hvd.rank()], np.full((1, 2), 1000.0 if hvd.rank() else 1.0))
    said = r"server 0: table 't': its optimizer raised KeyError: 'too large', at the end of step 1 \[HVD033\]"
    with pytest.raises(hvd.HvdError, match=said):
        table.step()
        table.pull([1])
    try:
        hvd.barrier()  # the other rank is still to be told
    except hvd.HvdPeerLostError as error:  # rank 0 was faster: a table that failed lets nobody leave its servers first
        assert hvd.rank() == 1 and "which has left the job" in str(error)
    hvd.shutdown()


@as_ranks(1)
def test_a_rule_may_print_and_one_server_of_one_rank_is_missed():
    cluster.serve(1)
    table = ps.Table("t", 100, 2, small_rules.prints, staleness=None, reduce="sum")
    for _ in range(30):  # more than a pipe holds
        table.push([1], np.ones((1, 2)))
    assert (table.pull([1]) == 30).all()
    cluster._serving._children[0]._process.kill()
    began = time.monotonic()
    with pytest.raises(
        hvd.HvdPeerLostError, match=r"server 0 .*killed by SIGKILL: no parameter server is left.*HVD029"
    ):
        while time.monotonic() - began < 5:
            table.pull([1])
    hvd.shutdown()


def test_a_rank_that_does_something_else_does_not_take_servers_for_silent():
    body = """
import threading, time, numpy as np, hvdlite as hvd
hvd.init()
table = hvd.ps.Table("t", 100, 4, hvd.ps.Add())
if hvd.rank() == 0:
    table.prefetch([1])
    table.step()
    for _ in range(3):
        time.sleep(0.4)
        table.stats()
    time.sleep(1.8)
    print("pulled", table.pull([1]).sum(), flush=True)
else:
    time.sleep(3.5)
    table.step()
hvd.barrier()
"""
    code, out, err = launch("-np", 2, "--servers", 1, "--peer-timeout", "1.2", sys.executable, "-c", body)
    assert code == 0 and "pulled 0.0" in out, (out, err)


@as_ranks(2)
def test_a_rank_that_has_left_waits_for_nobody_and_copies_of_models_share_tables():
    cluster.serve(1)
    table = ps.Table("t", 100, 2, ps.Add(), reduce="sum")
    if hvd.rank() == 1:
        table.prefetch([1])
        table.leave()
        table.prefetch([1])
        assert table.pull([1]).shape == (1, 2)
    hvd.barrier()
    assert copy.deepcopy([table])[0] is table
    with pytest.raises(TypeError, match=r"table 't' lies on servers.*table.save.*HVD035"):
        pickle.dumps(table)
    if hvd.rank() == 0:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(505):
                table.push_async([1], np.ones((1, 2)))
        assert [str(each.message)[-8:] for each in said] == ["[HVD037]"]
        waits = threading.Thread(target=table.step)
        waits.start()
        waits.join(10)
        assert not waits.is_alive() and (table.pull([1]) == 505).all()
    hvd.shutdown()
