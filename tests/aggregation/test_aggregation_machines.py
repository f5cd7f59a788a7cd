"""Do the machines of an aggregator give the same bits whatever a network does, with bounded memory and fair shares?

Pure: simulated networks with seeds. The references are sums in float64 and the run without loss.
"""

import hashlib

import numpy as np
import pytest
from ranks import everything

from hvdlite.aggregation import Hashed, Network, Pool, Server, Worker, fixed_point, packet, run
from hvdlite.aggregation.switch import ALL, Cell
from hvdlite.errors import HvdArgumentError, HvdNotFiniteError, HvdTimeoutError

BAD = {"loss": 0.01, "double": 0.01, "long": 0.01, "jitter": 200e-6}


def vectors(n, length, job=0, wild=False):
    found = {}
    for rank in range(n):
        random = np.random.default_rng(100 * job + rank)
        x = random.standard_normal(length).astype(np.float32)
        found[job, rank] = x * np.exp2(random.integers(-60, 60, length)).astype(np.float32) if wild else x
    return found


def by_pool(inputs, n, window=32, job=0, **more):
    network = Network([Worker(job, rank, n, window) for rank in range(n)], Pool(window), **more)
    return run(network, inputs), network


def by_hashed(inputs, jobs, n, slots, window=64, starts=None, **more):
    workers = [Worker(job, rank, n, window, hashed=True, rto=0.002) for job in jobs for rank in range(n)]
    for worker in workers:
        worker.traced = True
    network = Network(workers, Hashed(slots), Server(2 * window), **more)
    return run(network, inputs, starts), network


def same(results, expected):
    return all(y.tobytes() == expected[at].tobytes() for at, y in results.items()) and len(results) > 0


@pytest.mark.parametrize("n", [2, 3, 5, 8, 64])
def test_fixed_point_is_within_its_bound_and_never_overflows(n):
    random = np.random.default_rng(n)
    below = np.nextafter(np.float32(2), np.float32(0))
    cases = [random.standard_normal((n, 256)) * scale for scale in (1.0, 2.0**-120, 2.0**120)]
    cases += [np.full((n, 256), below), np.full((n, 256), -below), np.zeros((n, 256))]
    for case in cases:
        xs = list(case.astype(np.float32))
        e = max(int(fixed_point.exponents(x)[0]) for x in xs)
        total = sum(fixed_point.encode(x, e, n).astype(np.int64) for x in xs)
        assert np.abs(total).max() < 2**31
        exact = sum(x.astype(np.float64) for x in xs)
        bound = n * n * 2.0**-30 * max(np.abs(x).max() for x in xs)
        got = np.ldexp(total.astype(np.float64), -(31 - (n - 1).bit_length() - e))
        assert np.abs(got - exact).max() <= bound
        with np.errstate(over="ignore"):
            assert (fixed_point.decode(total.astype(np.int32), e, n) == got.astype(np.float32)).all()


@pytest.mark.parametrize("n", [2, 3, *everything(4, 8)])
def test_loss_repeats_and_late_datagrams_change_no_bit(n):
    inputs = vectors(n, 12_000, wild=True)
    quiet, _ = by_pool(inputs, n)
    total = sum(x.astype(np.float64) for x in inputs.values())
    bound = n * n * 2.0**-30 * max(np.abs(x).max() for x in inputs.values())
    assert np.abs(quiet[0, 0] - total).max() <= bound + np.spacing(np.abs(quiet[0, 0]).max())
    seen, lost = {hashlib.sha256(y.tobytes()).digest() for y in quiet.values()}, 0
    for seed in range(5):
        got, network = by_pool(inputs, n, seed=seed, **BAD)
        seen |= {hashlib.sha256(y.tobytes()).digest() for y in got.values()}
        lost += network.counts["lost"]
        got, network = by_hashed(inputs, (0,), n, 16, seed=seed, **BAD)
        seen |= {hashlib.sha256(y.tobytes()).digest() for y in got.values()}
    assert len(seen) == 1 and lost > 5
    assert network.server.counts["single"] > 0  # the fallback was used


def test_integers_are_exact_and_operations_follow_each_other():
    random = np.random.default_rng(1)
    network = Network([Worker(0, rank, 4, 8) for rank in range(4)], Pool(8), seed=3, **BAD)
    for length in (1, 255, 256, 257, 5000, 0):
        inputs = {(0, rank): random.integers(-(2**31), 2**31, length).astype(np.int32) for rank in range(4)}
        with np.errstate(over="ignore"):
            expected = sum(inputs.values())
        assert same(run(network, inputs), dict.fromkeys(inputs, expected))
    assert run(network, {(0, rank): np.float32([1.5]) for rank in range(4)})[0, 3].tolist() == [6.0]


class _Published(Pool):
    """SwitchML's rule without the number of the block."""

    def on_packet(self, p, now, congested=False):
        cells = self.cells.setdefault(p.job, [Cell() for _ in range(2 * self.slots)])
        half, slot = p.seq // self.slots % 2, p.seq % self.slots
        cell, other = cells[half * self.slots + slot], cells[(1 - half) * self.slots + slot]
        seen, count = getattr(cell, "seen", 0), getattr(cell, "ranks", 0)
        if seen & p.bits:
            return [(p.rank, self.sum(cell, p))] if count == 0 else []
        if count == 0:
            cell.take(p)
        cell.seen, other.seen = seen | p.bits, getattr(other, "seen", 0) & ~p.bits
        cell.ranks = (count + 1) % p.n
        cell.add(p, now)
        return [(ALL, self.sum(cell, p))] if cell.ranks == 0 else []

    def sum(self, cell, p):
        return cell.packet(packet.RESULT)._replace(bits=(1 << p.n) - 1, seq=p.seq)


def test_without_block_numbers_late_repeats_give_wrong_sums():
    """The control: what the network does is bad enough that the numbers are needed."""
    inputs, bad = vectors(3, 20_000), {"double": 0.1, "long": 0.1, "jitter": 100e-6}
    quiet, _ = by_pool(inputs, 3, window=4)
    wrong = 0
    for seed in range(5):
        assert same(by_pool(inputs, 3, window=4, seed=seed, **bad)[0], quiet)
        try:
            network = Network([Worker(0, rank, 3, 4) for rank in range(3)], _Published(4), seed=seed, **bad)
            wrong += not same(run(network, inputs), quiet)
        except (HvdTimeoutError, HvdNotFiniteError):
            wrong += 1
    assert wrong > 0


def test_a_rank_sends_its_tensor_once_and_memory_does_not_grow():
    memory = set()
    for n, length, most in ((2, 4096, 1.004), (2, 262_144, 1.0002), (8, 65_536, 1.0008)):
        _, network = by_pool(vectors(n, length), n, drop_at=4096)
        assert max(worker.counts["bytes"] for worker in network.workers.values()) <= most * 4 * length
        memory.add(network.switch.bytes)
    assert memory == {2 * 32 * (1024 + 40)}


@pytest.mark.parametrize("late", [0.0, 0.004])
def test_two_jobs_share_eight_slots_fairly_with_the_bits_of_one(late):
    inputs = {**vectors(2, 100_000, 1), **vectors(2, 100_000, 2)}
    got, network = by_hashed(inputs, (1, 2), 2, 8, starts={2: late}, loss=0.001, seed=1)
    for job in (1, 2):
        mine = {at: x for at, x in inputs.items() if at[0] == job}
        assert same({at: got[at] for at in mine}, by_pool(mine, 2, job=job)[0])
    ends = [max(w.trace[-1][0] for w in network.workers.values() if w.job == job) for job in (1, 2)]
    done = [sum(late < at <= min(ends) for at, _ in network.workers[job, 0].trace) for job in (1, 2)]
    assert sum(done) ** 2 / (2 * sum(each**2 for each in done)) >= 0.9
    assert network.switch.counts["collided"] > 50 and network.switch.bytes == 8 * (1024 + 40)
    assert network.server.most <= 2 * (2 * 64 + 64)


def test_the_window_grows_by_one_and_is_halved_at_a_mark():
    _, network = by_hashed(vectors(2, 200_000, 1), (1,), 2, 1024, window=128, mark_at=12, service=3e-6)
    windows = [window for _, window in network.workers[1, 0].trace]
    halved = [(a, b) for a, b in zip(windows, windows[1:]) if b < a]
    assert halved and all(b == max(a / 2, 1.0) for a, b in halved) and max(windows) > 16
    assert all(b - a == pytest.approx(1 / a) for a, b in zip(windows, windows[1:]) if b > a)


def test_a_switch_that_dies_changes_no_bit_where_there_is_a_server():
    inputs = {**vectors(2, 100_000, 1), **vectors(2, 100_000, 2)}
    whole, network = by_hashed(inputs, (1, 2), 2, 64)
    got, other = by_hashed(inputs, (1, 2), 2, 64, dies=network.now / 2)
    assert same(got, whole) and other.workers[1, 0].counts["without switch"] == 1
    assert other.now < 2 * network.now + 0.1
    ranks = [Worker(0, rank, 2, 8, patience=1.0) for rank in range(2)]
    with pytest.raises(
        HvdTimeoutError, match=r"rank \d has sent block \d+ of 'x0' \d+ times in 1.* aggregator .*HVD430"
    ):
        run(Network(ranks, Pool(8), dies=0.001), vectors(2, 100_000))


def test_a_rank_that_pauses_is_no_dead_switch():
    """All blocks of a window are late together: that counts once."""
    worker = Worker(0, 0, 2, 8, hashed=True, rto=0.01)
    worker.begin(np.zeros(5000, np.int32), 0.0)
    for now in np.arange(0.0, 0.05, 0.001):
        worker.on_timer(now)
    assert {sent.tries for sent in worker.waiting.values()} == {3} and len(worker.waiting) == 4
    assert not worker.counts["without switch"]


def test_what_cannot_be_added_is_refused_on_every_rank():
    with pytest.raises(HvdArgumentError, match="'w': the aggregator adds float32 and int32, not float64"):
        Worker(0, 0, 2, 8).begin(np.zeros(3), 0.0, "w")
    with pytest.raises(HvdArgumentError, match="at most 64 ranks, this job has 65"):
        Worker(0, 0, 65, 8)
    for where in (10, 4000):  # among the first exponents, and a window later
        inputs = vectors(3, 5000)
        inputs[0, 1][where] = np.nan
        ranks = [Worker(0, rank, 3, 8) for rank in range(3)]
        network, raised = Network(ranks, Pool(8)), set()
        for _ in range(3):
            with pytest.raises(HvdNotFiniteError):
                if raised:  # the others go on until they know it, too
                    while network.step():
                        pass
                run(network, inputs)
            raised |= {rank.rank for rank in ranks if not rank.waiting and rank.result is None}
            if raised == {0, 1, 2}:
                break
        assert raised == {0, 1, 2}


def test_only_holders_of_the_key_are_believed():
    key, other = b"k" * 32, b"o" * 32
    p = packet.Packet(packet.UPDATE, 0, 2**63, 2, 2**40, 1, -5, np.arange(4, dtype=np.int32))
    good = p.pack(key)
    back = packet.unpack(good, key)
    assert len(good) == 56 and back[:7] == p[:7] and back.numbers.tolist() == [0, 1, 2, 3]
    for bit in range(8 * len(good)):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        assert packet.unpack(bytes(changed), key) is None
    assert packet.unpack(good, other) is None
    assert all(packet.unpack(good[:length], key) is None for length in range(len(good)))
    assert packet.unpack(good + b"\0\0\0\0", key) is None
    for wrong in (p._replace(n=0), p._replace(n=65), p._replace(bits=4), p._replace(numbers=np.zeros(257, np.int32))):
        assert packet.unpack(wrong.pack(key), key) is None


def test_ranks_of_different_length_never_give_a_sum():
    ranks = [Worker(0, rank, 2, 8, patience=0.5) for rank in range(2)]
    network = Network(ranks, Pool(8))
    with pytest.raises(HvdTimeoutError):
        run(network, {(0, 0): np.zeros(100, np.int32), (0, 1): np.zeros(101, np.int32)})
    assert network.switch.counts["disagree"] > 0
