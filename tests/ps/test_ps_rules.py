"""The pure files of hvdlite.ps: each row has one place, rules have the bits of scalars, messages say what was packed.

The references are written per row, of float32 scalars: what one would write on paper. That arrays give the same bits
says that a rule is free of whatever depends on vectors: the width of a processor's registers, the place in an array.
"""

import json
import math
import re
import socket
import threading

import numpy as np
import pytest

from hvdlite.errors import HvdMismatchError
from hvdlite.ps import messages, optimizers
from hvdlite.ps.arrays import added_up, by_piece, different, in_order
from hvdlite.ps.placement import RowPlacement, ranked
from hvdlite.ps.protocol import Protocol
from hvdlite.ps.shard import Refused, Shard
from hvdlite.ps.socket_watch import SocketWatch

F32 = np.float32


@pytest.mark.parametrize("order", ["hash", "range"])
def test_every_row_has_one_place_and_one_owner(order):
    for rows in (*range(1, 300), 1000, 4097, 65535, 65536, 65537, 1_000_003):
        ids = np.arange(rows)
        for servers in range(1, 8):
            at = RowPlacement(rows, servers, min(2, servers), order)
            if servers == 1:  # places do not depend on servers
                part, place = at.places(ids)
                assert len(np.unique(part * at.rows_per_part + place)) == rows
                assert part.min() >= 0 and part.max() < at.parts and place.max() < at.rows_per_part
            owners = at.owners_of(ids)
            assert owners.shape == (rows, min(2, servers)) and owners.min() >= 0 and owners.max() < servers
            assert (at.owners[:, 0] != at.owners[:, -1]).all() or servers == 1
            if order == "range":
                assert (np.diff(owners[:, 0]) >= 0).all()
                assert rows < 1000 or np.bincount(owners[:, 0]).max() <= 1.05 * rows / servers


def test_one_that_joins_takes_its_part_and_nothing_else_moves():
    lists = [ranked(1 << 14, servers)[:, 0] for servers in range(1, 65)]
    for servers, (before, after) in enumerate(zip(lists, lists[1:]), 1):
        assert (after[before != after] == servers).all() and (before != after).mean() <= 1.1 / (servers + 1)
    for servers, owners in enumerate(lists[:16], 1):
        assert np.bincount(owners).max() <= 1.06 * len(owners) / servers


@pytest.mark.parametrize("stride", [1, 2, 1000, 4096, 1 << 16])
def test_ids_with_a_pattern_spread(stride):
    rows = 1 << 30 if stride > 1000 else 1 << 24
    ids = np.arange(0, rows, stride)[: 1 << 18]
    assert np.bincount(RowPlacement(rows, 4).owners_of(ids)[:, 0]).max() <= 1.05 * len(ids) / 4


def sgd(row, state, grad, lr):
    return [w - lr * g for w, g in zip(row, grad)], state


def adagrad(row, state, grad, lr, eps):
    state = [s + g * g for s, g in zip(state, grad)]
    return [w - lr * g / (np.sqrt(s) + eps) for w, s, g in zip(row, state, grad)], state


def adam(row, state, grad, lr, first, second, eps):
    dim, one = len(row), F32(1)
    mean = [first * m + (one - first) * g for m, g in zip(state, grad)]
    square = [second * v + (one - second) * g * g for v, g in zip(state[dim:], grad)]
    by = [beta * d + (one - beta) for beta, d in zip((first, second), state[2 * dim :])]
    step = lr * np.sqrt(by[1]) / by[0]
    return [w - step * m / (np.sqrt(v) + eps) for w, m, v in zip(row, mean, square)], mean + square + by


def ftrl(row, state, grad, lr, l1, l2, beta):
    dim, z, n = len(row), [], []
    for w, s, q, g in zip(row, state, state[dim:], grad):
        z.append(s + (g - (np.sqrt(q + g * g) - np.sqrt(q)) / lr * w))
        n.append(q + g * g)
    rates = [(beta + np.sqrt(q)) / lr + l2 for q in n]
    return [F32(0) if abs(s) <= l1 else -(s - l1 if s > 0 else s + l1) / r for s, r in zip(z, rates)], z + n


def momentum(rows, state, grads):
    state[:] = F32(0.9) * state + grads
    rows -= F32(0.1) * state


momentum.columns = 1  # what a user would write


def by_momentum(row, state, grad, *_):
    state = [F32(0.9) * s + g for s, g in zip(state, grad)]
    return [w - F32(0.1) * s for w, s in zip(row, state)], state


CASES = [
    (optimizers.Sgd(0.1), sgd), (optimizers.Adagrad(0.05, 1e-6), adagrad), (optimizers.Adam(0.01), adam),
    (optimizers.Adam(F32(0.01), [0.8, 0.95], 1e-5), adam), (optimizers.Ftrl(0.1, 0.5, 0.01), ftrl),
    (optimizers.Add(), lambda row, state, grad: ([w + g for w, g in zip(row, grad)], state)), (momentum, by_momentum),
]  # fmt: skip


@pytest.mark.parametrize("given, reference", CASES)
def test_a_rule_has_the_bits_of_its_reference(given, reference):
    rule = optimizers.made(**json.loads(json.dumps(optimizers.described(given))))
    numbers = [F32(n) for n in np.hstack([[], *rule.options.values()])] if given is not momentum else []
    random, count, dim = np.random.default_rng(1), 5, 3
    rows = random.standard_normal((count, dim)).astype(F32)
    state = np.zeros((count, dim * rule.columns + rule.extra), F32)
    expected, states = [list(row) for row in rows], [list(row) for row in state]
    for _ in range(1000):
        some = np.flatnonzero(random.random(count) < 0.6)  # lazy: the others stay as they are
        grads = (random.standard_normal((len(some), dim)) * 10.0 ** random.integers(-6, 2)).astype(F32)
        moved, kept = rows[some], state[some]
        rule.update(moved, kept, grads)
        rows[some], state[some] = moved, kept
        for i, grad in zip(some, grads):
            expected[i], states[i] = reference(expected[i], states[i], list(grad), *numbers)
    assert np.array_equal(rows, np.array(expected, F32)) and np.isfinite(rows).all()
    assert np.array_equal(state, np.array(states, F32).reshape(state.shape))


def test_adam_is_the_one_of_the_paper():
    rule, row, state = optimizers.Adam(0.1), np.ones((1, 1), F32), np.zeros((1, 4), F32)
    expected, mean, square = 1.0, 0.0, 0.0
    for t, grad in enumerate(np.random.default_rng(2).standard_normal(1000), 1):
        rule.update(row, state, np.full((1, 1), grad, F32))
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad * grad
        expected -= 0.1 * (mean / (1 - 0.9**t)) / (math.sqrt(square / (1 - 0.999**t)) + 1e-8)
    assert abs(row.item() - expected) < 1e-3


@pytest.mark.parametrize("given", [lambda *_: None, np.float32(1), optimizers.Sgd(math.nan), "Sgd", optimizers.Adam])
def test_what_servers_cannot_make_is_refused(given):
    with pytest.raises(ValueError, match=r"\[HVD025\]$"):
        optimizers.described(given)


def test_first_values_are_functions_of_the_row():
    init, ids = optimizers.uniform(0.5, seed=3), np.arange(10_000)
    rows, some = init.rows(ids, 6), np.random.default_rng(4).permutation(ids)[:777]
    assert np.array_equal(init.rows(some, 6), rows[some]) and rows.dtype == F32
    assert rows.min() >= -0.5 and rows.max() < 0.5 and abs(rows.mean()) < 0.01 and abs(rows.std() - 0.2887) < 0.005
    assert not np.array_equal(optimizers.uniform(0.5, seed=4).rows(ids, 6), rows)
    assert not optimizers.uniform(0.0).rows(ids, 6).any()


def test_ids_come_in_order_and_equal_ones_as_they_stood():
    for most, count in ((10, 5000), (1 << 40, 5000), (1 << 62, 5000), (9, 1), (9, 0)):  # one leaves no bits
        ids = np.random.default_rng(5).integers(0, most, count)
        assert np.array_equal(in_order(ids), np.argsort(ids, kind="stable"))


@pytest.mark.parametrize("count", [0, 1, 16, 64, 65, 500])
def test_different_ids_are_those_of_numpy_and_no_gradient_is_left_out(count):
    ids = np.random.default_rng(count).integers(0, 300, (count, 1))
    for one, two in zip(different(ids), np.unique(ids, return_inverse=True)):
        assert np.array_equal(one, two.reshape(one.shape))
    for some in (ids.ravel(), np.random.default_rng(count).permutation(count)):  # the second has no id twice
        found, total = added_up(some, np.arange(2 * count, dtype=F32).reshape(count, 2))
        assert np.array_equal(found, np.unique(some))
        at = [np.nonzero(some == each)[0] for each in found]
        assert total.tolist() == [[2 * each.sum(), 2 * each.sum() + len(each)] for each in at]


@pytest.mark.parametrize(("servers", "copies"), [(1, 1), (2, 1), (2, 2), (5, 2)])
def test_a_server_gets_each_row_of_which_it_has_a_copy_once(servers, copies):
    owners = RowPlacement(1000, servers, copies).owners_of(np.arange(500))
    rows, found = np.arange(500), list(by_piece(owners, 64))
    pieces = [(server, row) for server, at in found for row in rows[at].tolist()]
    assert sorted(pieces) == sorted((server, row) for row, those in enumerate(owners.tolist()) for server in those)
    assert max(len(rows[at]) for _, at in found) == 64
    assert not list(by_piece(owners[:0], 64))


@pytest.mark.parametrize("order", ["hash", "range"])
@pytest.mark.parametrize("rows", [1, 2, 3, 1000, 1_000_003])
def test_the_core_finds_the_owners_and_slots_that_numpy_finds(order, rows):
    spec = {"name": "t", "rows": rows, "dim": 1, **optimizers.described(optimizers.Sgd(1.0)), "replicas": 2,
            "order": order, "scale": 0.0, "seed": 0}  # fmt: skip
    shard, ids = Shard(spec, 1, 3), np.random.default_rng(6).permutation(rows)[:500]
    owners = shard.placement.owners_of(ids)
    assert np.array_equal(owners, shard.placement.owners[shard.placement.places(ids)[0]])
    here = ids[(owners == 1).any(axis=1)]
    assert shard.slots(here).tolist() == list(range(len(here)))  # NumPy makes them
    odd = np.frombuffer(b"\0" + here[::-1].tobytes(), np.int64, offset=1)  # as in a message
    assert shard.slots(odd).tolist() == list(range(len(here)))[::-1]
    assert not len(shard.slots(ids[:0])) and not len(shard.placement.owners_of(ids[:0]))
    elsewhere = ids[(owners != 1).all(axis=1)][:1].tolist()
    for bad in (-1, -(1 << 63), rows, 1 << 40, *elsewhere):
        with pytest.raises(Refused, match="lie here" if bad in elsewhere else "has rows 0 to"):
            shard.slots(np.array([*here[:9], bad]))
    assert shard.used == len(here)


def test_a_second_thread_that_waits_for_sockets_returns():
    watch, (near, far) = SocketWatch(), socket.socketpair()
    watch.register(near.fileno())
    found = []

    def first():
        while not found:
            found.extend(watch.wait(20_000))

    thread = threading.Thread(target=first)
    thread.start()
    for _ in range(50):
        assert watch.wait(1.0) == []
    far.send(b"1")
    thread.join(20)
    assert found == [near.fileno()]
    near.close()
    far.close()


def ended(staleness, *pushes):
    """The two rows of a table of ones, Sgd(1.0), after pushes (worker, row, step, rate, flags); the last answers."""
    server = Protocol(0, 1, 0, {})
    spec = {"name": "t", "rows": 2, "dim": 1, **optimizers.described(optimizers.Sgd(1.0)), "staleness": staleness,
            "replicas": 1, "order": "range", "reduce": "sum", "scale": 0.0, "seed": 0}  # fmt: skip
    calls = [{"do": "hello", "job": 0, "workers": 2}, {"do": "open", "spec": spec, "number": 0}]
    for number, asked in enumerate(calls, 1):
        call = messages.pack(messages.CALL, 0, 0, 7, number=number)
        server.take(messages.unpack(call, 0), [json.dumps(asked).encode()])
    for count, (worker, row, step, rate, flags) in enumerate(pushes):
        number = 1 + sum(each[0] == worker for each in pushes[:count])
        push = messages.pack(messages.PUSH, worker, 0, 7, number=number, clock=step, rate=rate, flags=flags, rows=1)
        answers = server.take(messages.unpack(push, 0), [np.array([row]), np.ones((1, 1), F32)])
    return server.tables[0].shard.read(np.arange(2)).ravel().tolist(), answers


def test_a_step_has_the_rate_with_which_all_end_it_and_a_stale_push_its_own():
    tick, leave = messages.TICK, messages.LEAVE
    assert ended(0, (0, 0, 0, 1, 0), (1, 0, 0, 0.5, tick), (0, 1, 0, 0.5, tick))[0] == [-1.0, -0.5]
    assert ended(1, (0, 0, 0, 1, 0), (1, 0, 0, 0.5, tick), (0, 1, 0, 0.0, tick))[0] == [-1.5, 0.0]
    for one in ((0, 0, 0, 0.25, tick), (1, 1, 0, 4, leave)), ((1, 1, 0, 4, leave), (0, 0, 0, 0.25, tick)):
        assert ended(0, *one)[0] == [-0.25, -0.25]  # whoever comes first
        assert ended(0, *one, (0, 0, 1, 0.5, leave))[0] == [-0.75, -0.25]
    rows, answers = ended(0, (1, 0, 0, 0.5, tick), (0, 1, 0, 0.25, tick))
    said = [(worker, messages.refusal(messages.unpack(head, 0), text.decode())) for worker, (head, *text) in answers
            for text in text]  # fmt: skip
    assert rows == [0.0, 0.0] and [worker for worker, _ in said] == [0, 1]
    for _, error in said:
        assert isinstance(error, HvdMismatchError)
        assert re.search(r"'t': rank 1 ends step 1 with lr=0.5, rank 0 with lr=0.25: .*\[HVD026\]$", str(error))


def test_messages_say_what_was_packed_and_strangers_are_not_looked_at():
    said = {"flags": 3, "table": 2, "clock": 7, "number": 1 << 40, "after": 9, "rows": 11, "rate": 0.5}
    frame = messages.pack(messages.PUSH, 4, 5, 1 << 63, **said)
    assert messages.unpack(frame, 5) == messages.Head(messages.PUSH, worker=4, server=5, session=1 << 63, **said)
    others = [frame[1:], b"", b"\0" + frame[1:], messages.pack(messages.GONE + 1, 4, 5, 0)]
    assert [messages.unpack(each, 5) for each in others] == [None] * 4 and messages.unpack(frame, 6) is None
    assert messages.rows_per_piece(64) == 16384 and messages.rows_per_piece(1 << 21) == 1
