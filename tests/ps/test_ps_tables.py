"""Tables on real servers: s = 0 has the bits of synchronous training, faults of the network change nothing, and what
users of hvd.ps hear when something is wrong."""

import hashlib
import random
import threading
import time

import numpy as np
import pytest
from ranks import as_ranks, everything

import hvdlite as hvd
from hvdlite import ps
from hvdlite.ps import cluster, messages, staleness_wait
from hvdlite.ps.arrays import added_up
from hvdlite.ps.client import Client
from hvdlite.ps.optimizers import uniform

pytest.importorskip("zmq")
F32 = np.float32
ROWS, DIM, BATCH, STEPS = 20000, 16, 256, 20
FIRST = uniform(0.1, seed=7)


def drawn(rank, step):
    """Clicks: ids of 4 fields, by Zipf's law, and labels."""
    rng = np.random.default_rng((rank, step))
    ids = np.minimum(rng.zipf(1.2, (BATCH, 4)) - 1, ROWS - 1).astype(np.int64)
    return ids, (rng.random(BATCH) < 0.5).astype(F32)


def gradients(rows, label):
    """Of a factorisation machine's logistic loss, by the rows of its 4 fields."""
    total = rows.sum(axis=1)
    score = ((total**2).sum(-1) - (rows**2).sum((1, 2))) / F32(2)
    p = F32(1) / (F32(1) + np.exp(-score))
    return ((p - label)[:, None, None] * (total[:, None, :] - rows) / F32(BATCH)).astype(F32)


def sha(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def on_servers(optimizer, replicas, kill=False):
    cluster.serve(2)
    table = ps.Table("t", ROWS, DIM, optimizer, replicas=replicas, init=FIRST)
    for step in range(STEPS):
        ids, label = drawn(hvd.rank(), step)
        if kill and step == STEPS // 2:
            for child in cluster._serving._children[1:]:
                child._process.kill()
        table.push_async(ids, gradients(table.pull(ids), label))
        table.step()
    whole = table.pull(np.arange(ROWS))
    hvd.shutdown()  # with it the servers
    hvd.init()
    return sha(whole)


def dense(optimizer, batches):
    """batches(step, rows) -> the dense sum of all ranks' gradients."""
    rows, state = FIRST.rows(np.arange(ROWS), DIM), np.zeros((ROWS, DIM * optimizer.columns), F32)
    for step in range(STEPS):
        optimizer.update(rows, state, batches(step, rows) * F32(1 / hvd.size()))
    return sha(rows)


def of_rank(rank, step, rows):
    ids, label = drawn(rank, step)
    total = np.zeros((ROWS, DIM), F32)
    some, grads = added_up(ids.ravel(), gradients(rows[ids], label).reshape(-1, DIM))
    total[some] = grads
    return total


@as_ranks(2, 4)
@pytest.mark.parametrize("rule", ["as fits", *everything("Sgd", "Adagrad")])
def test_without_staleness_a_table_has_the_bits_of_synchronous_training(rule):
    size, mine = hvd.size(), hvd.rank()
    optimizer = ps.Sgd(0.5) if rule == "Sgd" or (rule == "as fits" and size == 2) else ps.Adagrad(0.1)
    got = {
        "allreduce": dense(optimizer, lambda n, rows: hvd.allreduce(of_rank(mine, n, rows), op=hvd.Sum, name="dense")),
        "replay": dense(optimizer, lambda n, rows: sum((of_rank(r, n, rows) for r in range(size)), F32(0))),
        "one copy": on_servers(optimizer, 1),
        "two copies": on_servers(optimizer, 2),
        "one of two servers killed": on_servers(optimizer, 2, kill=True),
    }
    with unreliable(0.05) as faults:
        got["faults"] = on_servers(optimizer, 2)
    assert all(faults.counts), faults.counts
    assert len({each for of in hvd.allgather_object(tuple(got.values())) for each in of}) == 1, got


class unreliable:
    """Drops, doubles and delays this share each of a rank's messages, both ways."""

    def __init__(self, share):
        self.share, self.random, self.counts, self.held = share, random.Random(hvd.rank()), [0, 0, 0], []

    def __enter__(self):
        self.kept = Client._put, Client._take, Client.AGAIN_S
        Client.AGAIN_S = 0.05
        put, take, _ = self.kept
        Client._put = lambda client, *message: self.fate(put, client, *message)
        Client._take = lambda client, *message: self.fate(take, client, *message)
        return self

    def __exit__(self, *_):
        Client._put, Client._take, Client.AGAIN_S = self.kept

    def fate(self, act, *message):
        kind, held, self.held = int(self.random.random() / self.share), self.held, []
        if kind < 3:
            self.counts[kind] += 1
        for _ in range((0, 2, 0, 1)[min(kind, 3)]):
            act(*message)
        if kind == 2:
            self.held = [(act, message)]
        for late, what in held:
            late(*what)


@as_ranks(4, deadline=1500)
@pytest.mark.parametrize(("operations", "share"), [(200, 0), (100, 0.05), *everything((250_000, 0), (10_000, 0.05))])
def test_random_pushes_and_pulls_of_integers_equal_numpy(operations, share):
    """Each rank adds to a column of its own, and finds there what it has pushed before, in every pull."""
    cluster.serve(2)
    rows, me, rng = 5000, hvd.rank(), np.random.default_rng(hvd.rank())
    table = ps.Table("exact", rows, 4, ps.Add(), staleness=None, replicas=2, reduce="sum")
    mine = np.zeros((rows, 4), F32)
    with unreliable(share) if share else pytest.MonkeyPatch.context():
        for _ in range(operations):
            ids = rng.integers(0, rows, rng.integers(1, 40))
            if rng.random() < 0.5:
                values = np.zeros((len(ids), 4), F32)
                values[:, me] = rng.integers(-8, 8, len(ids))
                np.add.at(mine, ids, values)
                (table.push if rng.random() < 0.5 else table.push_async)(ids, values)
            else:
                assert np.array_equal(table.pull(ids)[:, me], mine[ids, me])
        table.flush()
    hvd.barrier()
    assert np.array_equal(table.pull(np.arange(rows)), hvd.allreduce(mine, op=hvd.Sum))
    for server in table.stats():
        assert server["pushes"] == sum(hvd.allgather_object(table._client.pushes_to(server["server"]))), server
        assert server["duplicates"] > 0 or not share, server  # a busy machine sends again, too
    hvd.shutdown()


@as_ranks(2, deadline=600)
@pytest.mark.parametrize("moments", [3, *everything(100)])
def test_a_server_killed_at_any_moment_loses_and_doubles_nothing_and_pulls_go_on(moments):
    batches = [np.random.default_rng((hvd.rank(), n)).integers(0, 500, 60) for n in range(25)]
    added, longest = np.zeros((500, 4), F32), 0.0
    for ids in batches:
        np.add.at(added, ids, F32(1))
    added = hvd.allreduce(added, op=hvd.Sum)
    for moment in range(moments):
        cluster.serve(3)
        table = ps.Table("t", 500, 4, ps.Add(), staleness=(0, 1, None)[moment % 3], replicas=2, reduce="sum")
        children, rng = cluster._serving._children, random.Random(moment)
        victim = rng.choice(children)._process.kill if children else lambda: None
        timer = threading.Timer(rng.random() * 0.08, victim)
        timer.start()
        for ids in batches:
            began = time.monotonic()
            rows = table.pull(ids)
            longest = max(longest, time.monotonic() - began)
            assert (rows <= added[ids]).all()
            table.push_async(ids, np.ones((60, 4)))
            table.step()
        timer.join()
        table.flush()
        hvd.barrier()
        assert np.array_equal(table.pull(np.arange(500)), added), moment
        hvd.shutdown()
        hvd.init()
    assert longest < 5, longest


@as_ranks(2)
def test_bytes_are_those_of_the_rows_and_a_head_for_each_message():
    with pytest.MonkeyPatch.context() as never_again:  # however slow the machine is
        never_again.setattr(Client, "AGAIN_S", 60.0)
        never_again.setattr(staleness_wait, "_ASK_S", 60.0)
        bytes_of_messages()


def bytes_of_messages():
    cluster.serve(1)
    table = ps.Table("bytes", 100_000, 64, ps.Sgd(0.1), staleness=None)
    ids, client = np.random.default_rng(hvd.rank()).permutation(100_000)[:1000], table._client
    out, into = [], []
    for _ in range(3):  # the least of them: a machine that is slow makes a client ask whether its server is there
        sent, came = client.bytes_out, client.bytes_in
        table.pull(ids)
        table.push(ids, np.ones((1000, 64)))
        table.step()
        table.flush()
        out.append(client.bytes_out - sent)
        into.append(client.bytes_in - came)
    assert min(out) == 1000 * (8 + 264) + 3 * messages.HEAD.size  # asked, pushed, the step's end
    assert min(into) == 1000 * 256 + 3 * messages.HEAD.size  # rows, done, done
    assert min(out) < 0.02 * 100_000 * 64 * 4  # 1 % of the rows, beside a dense gradient
    hvd.shutdown()


@as_ranks(2, deadline=120)
@pytest.mark.parametrize("many", [700, *everything(10_000)])
def test_each_of_many_handles_ends_with_its_own_rows(many):
    cluster.serve(2)
    table, rng = ps.Table("t", 3000, 2, ps.Add(), staleness=None, reduce="sum"), np.random.default_rng(hvd.rank())
    every = np.arange(3000)
    if hvd.rank() == 0:
        table.push(every, np.stack([every, -every], axis=1).astype(F32))
    hvd.barrier()
    asked = [rng.integers(0, 3000, (rng.integers(1, 4), 2)) for _ in range(many)]
    handles = [table.pull_async(ids) for ids in asked]
    pushed = [table.push_async(ids, np.zeros((*ids.shape, 2))) for ids in asked[:200]]
    for n in rng.permutation(many).tolist():
        rows = hvd.synchronize(handles[n])
        assert np.array_equal(rows, np.stack([asked[n], -asked[n]], axis=-1))
    for each in pushed:
        hvd.synchronize(each)
        assert hvd.poll(each)
    hvd.shutdown()


@as_ranks(3)
def test_a_table_is_saved_by_two_servers_and_loaded_by_three():
    folder = hvd.broadcast_object(__import__("tempfile").mkdtemp() if hvd.rank() == 0 else None)
    rng, results = np.random.default_rng(hvd.rank()), []
    work = [(ids := rng.integers(0, 3000, 200), rng.standard_normal((200, 8)).astype(F32)) for _ in range(20)]
    for servers, replicas in ((2, 2), (3, 1)):
        cluster.serve(servers)
        table = ps.Table("saved", 3000, 8, ps.Adam(0.01), replicas=replicas, init=FIRST)
        for n, (ids, grads) in enumerate(work if servers == 2 else work[10:]):
            if servers == 3 and n == 0:
                table.load(folder)
            table.push(ids, grads)
            table.step()
            if servers == 2 and n == 9:
                table.save(folder)
        results.append(table.pull(np.arange(3000)))
        if servers == 3:
            other = ps.Table("other", 3000, 8, ps.Sgd(0.01))
            with pytest.raises(ValueError, match=r"Adam.*Sgd|Sgd.*Adam"):
                other.load(folder)
        hvd.shutdown()
        hvd.init()
    assert np.array_equal(*results) and np.abs(results[0]).max() > 0.1


@as_ranks(3)
def test_nobody_waits_for_a_rank_that_has_left_and_leads_are_bounded():
    cluster.serve(2)
    for staleness in (0, 1, 3):
        table = ps.Table(f"s{staleness}", 100, 2, ps.Add(), staleness=staleness, reduce="sum")
        ends = [12, 12, 5]
        for step in range(ends[hvd.rank()]):
            rows, seen = table.pull(np.arange(100)), max(0, step - staleness)
            assert rows.min() >= step + sum(min(seen, n) for other, n in enumerate(ends) if other != hvd.rank())
            table.push(np.arange(100), np.ones((100, 2)))
            table.step()
        if hvd.rank() == 2:
            table.leave()
            with pytest.raises(hvd.HvdError, match=r"has left it.*HVD035"):
                table.push([1], np.ones((1, 2)))
        table.flush()
        hvd.barrier()
        assert (table.pull([0, 99]) == 29).all()
        assert max(each["lead"] for each in table.stats()) <= staleness
        assert [each["clocks"] for each in table.stats()] == [[12, 12, None]] * 2
    hvd.shutdown()


@as_ranks(2)
def test_prefetched_rows_are_those_of_the_next_step_and_frozen_ones_are_not_pushed():
    cluster.serve(2)
    for staleness in (0, 1):
        table = ps.Table(f"ahead{staleness}", 50, 2, ps.Add(), staleness=staleness, reduce="sum")
        for step in range(6):
            table.prefetch([3, 4, 3])
            table.push([3, 5], np.ones((2, 2)))
            table.step()
            asked = ps.stats()["rank"]["messages_out"]
            rows = table.pull([4, 3])
            assert (rows[0] == 0).all() and (staleness or (rows[1] == 2 * step + 2).all())
            assert ps.stats()["rank"]["messages_out"] - asked <= 8  # of stats itself
    with table.frozen(), pytest.raises(hvd.HvdError, match=r"reads it only.*HVD035"):
        table.push([1], np.ones((1, 2)))
    hvd.shutdown()
    with pytest.raises(hvd.HvdError, match="HVD"):
        table.pull([1])


def refused(kind, said, call, *arguments, **more):
    with pytest.raises(kind, match=said):
        call(*arguments, **more)


@as_ranks(2)
def test_what_cannot_be_is_told_before_anything_is_sent():
    with pytest.raises(hvd.HvdInitError, match=r"has no servers: start it with hvdlite-run --servers 2.*HVD024"):
        ps.Table("t", 10, 2, ps.Add())
    cluster.serve(1)
    for said, terms in (
        ("rows=0: 1 to", {"rows": 0}), ("rows=True", {"rows": True}), ("dim=70000: 1 to 65,535", {"dim": 70000}),
        ("staleness=-1", {"staleness": -1}), ("replicas=2, but this job has 1 server", {"replicas": 2}),
        ("order='x'", {"order": "x"}), ("init=3", {"init": 3}), ("optimizer=<function", {"optimizer": lambda *_: 0}),
        ("finite", {"optimizer": ps.Sgd(float("nan"))}),
    ):  # fmt: skip
        refused(ValueError, rf"table 't': {said}.*HVD025|{said}.*HVD025", ps.Table, **{
            "name": "t", "rows": 10, "dim": 2, "optimizer": ps.Add(), **terms})  # fmt: skip
    said = r"table 't': rank 1 has dim=3, rank 0 has dim=2 \[HVD026\]"
    refused(hvd.HvdMismatchError, said, ps.Table, "t", 10, 2 + hvd.rank(), ps.Add())
    table = ps.Table("t", 10, 2, ps.Add())
    refused(ValueError, "this job already has a table of this name", ps.Table, "t", 10, 2, ps.Add())
    refused(ValueError, r"rows 0 to 9: there is no row 10 \(ids\[2\]\) \[HVD027\]", table.pull, [[1, 2], [10, 3]])
    refused(ValueError, r"there is no row -1", table.push, [-1], np.ones((1, 2)))
    refused(ValueError, r"integers, not float64", table.pull, [1.5])
    refused(ValueError, r"integers, not bool", table.pull, np.array([True]))
    said = r"gradients of shape \(3, 2\) and a floating-point dtype, not \(3, 1\) float64 \[HVD028\]"
    refused(ValueError, said, table.push, [1, 2, 3], np.ones((3, 1)))
    refused(ValueError, "not .* int64", table.push, [1], np.ones((1, 2), int))
    refused(ValueError, "no save|not whole|HVD034", table.load, "/nowhere/at/all")
    refused(hvd.HvdError, r"server 0: .*HVD033", table.save, "/proc/nothing")
    assert table.pull([]).shape == (0, 2) and table.pull(3).shape == (2,)
    table.push([], np.ones((0, 2)))
    table.step()
    hvd.shutdown()
