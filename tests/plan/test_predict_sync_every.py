"""Predictions of ranks that exchange once in several steps: formulas by hand, and stragglers that average out."""

import numpy as np
import pytest
from test_predict import MS, write

from hvdlite import predict


@pytest.mark.parametrize("every", [2, 10, 1000])
def test_steps_of_each_ranks_own_share_one_exchange_that_all_wait_for(tmp_path, every):
    """By hand: 25 ms of computing, and a share of one bucket of all bytes, or of two."""
    job, size = predict.load(write(tmp_path / "r")), 4 << 20
    for n, late in ((2, 1), (16, 1 + 28 * 5e-3)):
        exchange = late + 2 * (n - 1) / n * 2e-6 * size
        said = job.step(n, sync_every=every)
        assert said.ms == pytest.approx(25 + exchange / every, rel=1e-5) and said.sync_every == every
        assert said.exposed_ms == pytest.approx(exchange / every, rel=1e-3) and said.late_ms == 0
        assert said.bytes_ms == pytest.approx((exchange - late) / every, rel=1e-3) and said.alone_ms == 25
        assert said.confidence == "medium" and "wait for the whole exchange" in said.notes[-1]
        apart, half = job.step(n, sync_every=every, fusion_mb=3), job.step(n, sync_every=every, wire="fp16")
        assert apart.ms == pytest.approx(25 + (exchange + late) / every, rel=1e-5)
        assert half.ms == pytest.approx(25 + (exchange + late) / 2 / every, rel=1e-5)
    coded = job.step(2, sync_every=every, wire="int8", link="1gbit,100us")
    assert coded.ms == pytest.approx(25 + (0.2 + (8e-6 * 260 / 1024 + 0.3e-6) * size) / every, rel=1e-4)
    ring = job.step(8, sync_every=every, link="1GB/s,20us", plan="ring")
    assert ring.ms == pytest.approx(25 + 14 * (0.02 + size / 8e6) / every, rel=0.01)
    waits = predict.load(write(tmp_path / "loss", loss="told")).step(2, sync_every=every)
    assert waits.ms == pytest.approx(28 + (1 + 2e-6 * size) / every, abs=1.1 / every)
    assert "taken to be gone" in waits.notes[-1] and waits.confidence == "low"
    assert predict.load(write(tmp_path / "one", size=1, sizes=())).step(1, sync_every=every).ms == pytest.approx(5)


def test_stragglers_average_out_over_the_steps_of_each_ranks_own(tmp_path):
    """32 pairs of ranks, steps of 25 or 35 ms, against the mean of the greatest of 32 sums."""
    job, chance, last = predict.load(write(tmp_path / "r", steps=25)), np.random.default_rng(0), 100.0
    job.recording.tail[:] = np.repeat([5 * MS, 15 * MS], 20)
    for every in (2, 8, 64):
        slowest = 25 + 10 * chance.binomial(every, 0.5, (4000, 32)).max(1).mean() / every
        said = job.step(64, sync_every=every)
        assert said.ms == pytest.approx(slowest + (said.exposed_ms - said.late_ms), rel=0.01)
        assert said.late_ms == pytest.approx(slowest - 30, abs=0.15) and said.ms < last
        last = said.ms
    late = predict.load(write(tmp_path / "late", late=30))  # the same rank each time: that does not
    assert late.step(8, sync_every=100).late_ms == pytest.approx(15, rel=1e-3)
