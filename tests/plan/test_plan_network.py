"""Is the split of bandwidth the best that a grid of splits knows, and is the noise of gradients what it is made of?

Loads are random collectives over two or three dimensions; gradients are a known vector and normal noise on it.
"""

from itertools import product

import numpy as np
import pytest
from ranks import EVERYTHING

from hvdlite import predict
from hvdlite.plan import network
from hvdlite.predict.goodput import efficiency, gain


def by_grid(load, budget, steps):
    """The least time of a step over all splits into so many steps."""
    parts = np.array([p for p in product(range(1, steps), repeat=load.shape[1] - 1) if sum(p) < steps], float)
    rates = np.column_stack([parts, steps - parts.sum(1)]) / steps * budget
    return float((load[None] / rates[:, None]).max(2).sum(1).min())


def test_a_split_is_as_good_as_the_best_of_a_grid():
    pytest.importorskip("scipy", reason="splits are solved by SciPy: pip install hvdlite[plan]")
    draw, equal = np.random.default_rng(3), []
    for case in range(20):
        dims = [int(each) for each in draw.choice([2, 4, 8], 2 + case % 2)]
        load = []
        for _ in range(int(draw.integers(2, 7))):
            used = [d for d in range(len(dims)) if draw.random() < 0.6] or [int(draw.integers(len(dims)))]
            load.append(network.volumes(draw.uniform(1e6, 1e9), dims, used))
        rates = network.split(load, 100.0)
        assert rates.sum() == pytest.approx(100) and rates.min() > 0
        fine = (1000 if len(dims) == 2 else 200) if EVERYTHING else (200 if len(dims) == 2 else 60)
        assert network.step_time(load, rates) <= 1.01 * by_grid(np.array(load), 100.0, fine)
        equal.append(network.step_time(load, [100 / len(dims)] * len(dims)) / network.step_time(load, rates))
    assert min(equal) > 0.999 and max(equal) > 1.5
    assert network.split([[1.0, 1.0]], 10.0, [1, 4]) == pytest.approx([2, 2], rel=1e-3)


@pytest.mark.parametrize("call", [
    lambda: network.split([[1.0, -1.0]], 1.0),
    lambda: network.split([[0.0, 0.0]], 1.0),
    lambda: network.split([1.0], 1.0),
    lambda: network.split([[1.0, 2.0]], 0.0),
    lambda: network.split([[1.0, 2.0]], 1.0, [1.0]),
    lambda: network.volumes(1e6, [2, 4], [2]),
    lambda: predict.Noise().add([1.0], 1.0, 1),
    lambda: predict.Noise().add([1.0, float("nan")], 1.0, 1),
    lambda: predict.Noise().add([1.0, 1.0], float("inf"), 1),
    lambda: predict.advise(float("inf"), 32, lambda batch: 1.0, [32]),
    lambda: predict.Noise(1.0),
    lambda: predict.advise(1.0, 32, lambda batch: 0.0, [32]),
    lambda: predict.advise(1.0, 32, lambda batch: 1.0, []),
])  # fmt: skip
def test_numbers_that_cannot_be(call):
    with pytest.raises(ValueError, match=r"\[HVD008\]"):
        call()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_noise_after_500_steps(ranks):
    draw, batch, sigma = np.random.default_rng(11 + ranks), 16, 2.0
    true, noise = draw.standard_normal(1000), predict.Noise()
    with pytest.raises(ValueError, match=r"more steps are needed \[HVD008\]"):
        noise.phi  # noqa: B018
    for _ in range(500):
        gradients = true + draw.standard_normal((ranks, 1000)) * sigma / np.sqrt(batch)
        if ranks == 1:
            noise.add_alone(gradients[0], batch)
        else:
            mean = gradients.mean(0)
            noise.add((gradients**2).sum(1), float(mean @ mean), batch)
    assert noise.square == pytest.approx(true @ true, rel=0.01)
    assert noise.variance == pytest.approx(1000 * sigma**2, rel=0.01)
    assert noise.phi == pytest.approx(noise.variance / noise.square)


def test_advice_is_near_the_best_of_a_sweep():
    draw = np.random.default_rng(5)
    batches = [2**k for k in range(5, 15)]
    for _ in range(50):
        late, each, phi = draw.uniform(5, 50), draw.uniform(0.02, 0.5), draw.uniform(50, 5000)
        seen = np.array([32, 64, 128, 256])
        slope, base = np.polyfit(seen, (late + each * seen) * draw.uniform(0.97, 1.03, 4), 1)
        goodput = {b: b / (late + each * b) * efficiency(phi, b, 32) for b in batches}
        found = predict.advise(
            phi * draw.uniform(0.9, 1.1), 32, lambda b, a=base, s=slope: max(a, 0.1) + s * b, batches
        )
        assert goodput[found.batch] >= 0.95 * max(goodput.values())
    assert (efficiency(100, 32, 32), gain(100, 32, 32)) == (1, 1) and gain(1e12, 320, 32) == pytest.approx(10)
