"""`watch_gradients` measures what each rank gave and what came of it; `noise_scale` finds a noise that is known."""

import math

import pytest
from pretended_hosts import pretend
from ranks import as_ranks

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402
from hvdlite.torch.optimizer import gradient_watch  # noqa: E402

INT8 = hvd.Compression.int8(least_bytes=0)
SHAPES = {"a": (40, 30), "b": (7,), "late": (1500,), "frozen": (3,)}


def wrapped(dtype=torch.float32, lr=0.0, **options):
    named = {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    named["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD(named.values(), lr=lr)
    return named, hvd.DistributedOptimizer(optimizer, named.items(), **options)


def given(seed, rank, dtype=torch.float32):
    chance = torch.Generator().manual_seed(1000 * seed + rank)
    return {name: torch.randn(shape, generator=chance).to(dtype) for name, shape in SHAPES.items() if name != "frozen"}


def backward(named, gradients):
    sum((named[name] * each).sum() for name, each in gradients.items()).backward()


def close(found, values):
    values = values.double()
    assert math.isclose(found.greatest, float(values.abs().max()), rel_tol=1e-6)
    assert math.isclose(found.square, float(values.square().sum()), rel_tol=1e-5) and found.not_finite == 0


@as_ranks(2, 4)
def test_stats_are_those_of_torch():
    pretend(hvd.size() // 2)
    kinds = {}, {"compression": INT8}, {"gradient_predivide_factor": 2.0, "compression": INT8}
    kinds += {"dtype": torch.bfloat16}, {"groups": 1}, {"backward_passes_per_step": 2, "compression": INT8}
    for options in kinds:
        named, optimizer = wrapped(**options)
        hvd.watch_gradients(optimizer)
        assert hvd.gradient_stats(optimizer) == {}
        dtype = options.get("dtype", torch.float32)
        for step in range(3):
            optimizer.zero_grad()
            mine = given(step, hvd.rank(), dtype)
            for _ in range(passes := options.get("backward_passes_per_step", 1)):
                backward(named, mine)
            stats = hvd.gradient_stats(optimizer)
            assert set(stats) == set(mine)
            for name, each in mine.items():
                close(stats[name][0], passes * each)
                close(stats[name][1], named[name].grad)
            optimizer.step()


@as_ranks(2)
def test_what_is_not_finite_and_what_is_not_there():
    named, optimizer = wrapped()
    calls, measure = [], gradient_watch.measured
    gradient_watch.measured = lambda gradient: calls.append(1) or measure(gradient)
    try:
        mine = given(0, hvd.rank())
        backward(named, mine)
        with pytest.raises(ValueError, match="HVD229"):
            hvd.gradient_stats(optimizer)
        hvd.watch_gradients(optimizer)
        hvd.watch_gradients(optimizer, on=False)
        backward(named, mine)
        assert not calls  # nothing is computed while it is off
        hvd.watch_gradients(optimizer)
        optimizer.zero_grad()
        if hvd.rank() == 0:
            mine["a"][3, :2] = torch.tensor([math.nan, math.inf])
            del mine["late"]  # unused here, with zeros in its place
        backward(named, mine)
        stats = hvd.gradient_stats(optimizer)
        assert [each.not_finite for each in stats["a"]] == ([2, 2] if hvd.rank() == 0 else [0, 2])
        assert (stats["late"][0].square == 0) == (hvd.rank() == 0) and stats["late"][1].square > 0
        assert len(calls) == 6 - (hvd.rank() == 0)
        assert gradient_watch.measured(torch.full((3000,), 1e25))[1] == pytest.approx(3e53, rel=1e-6)
    finally:
        gradient_watch.measured = measure
    for call, options in ((hvd.watch_gradients, {"shard": True}), (hvd.gradient_stats, {"op": hvd.Adasum})):
        with pytest.raises(ValueError, match="HVD229"):
            call(wrapped(**options)[1])
    with pytest.raises(TypeError, match="HVD229"):
        hvd.watch_gradients(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))


@as_ranks(2, 4)
def test_the_noise_scale_of_a_quadratic():
    """A gradient of |G|^2 = 134, and noise of tr S = 100 a sample."""
    pretend(hvd.size() // 2)
    size, batch, dims = hvd.size(), 2, 200
    chance = torch.Generator().manual_seed(hvd.rank() + 1)
    for options in ({}, {"op": hvd.Sum}) if size == 2 else ({"compression": INT8},):
        weight = torch.nn.Parameter(torch.full((dims,), math.sqrt(134 / dims)))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), [("weight", weight)], **options)
        noise = hvd.noise_scale(optimizer, batch=batch)
        with pytest.raises(ValueError, match="more steps"):
            noise.scale  # noqa: B018
        for _ in range(500):
            optimizer.zero_grad()
            sample = torch.randn(batch, dims, generator=chance) * math.sqrt(100 / dims)
            (weight.square().sum() / 2 + (sample.mean(0) * weight).sum()).backward()
            optimizer.step()
        assert noise.scale == pytest.approx(100 / 134, rel=0.1)
        assert abs(noise.scale - 100 / 134) < 4 * noise.error * noise.scale < 0.2
        s, g = 100 / batch, 134
        assert noise.gain() == pytest.approx((s + g) / (s / size + g), rel=0.03)
        phi = noise.scale
        assert noise.efficiency(100) == (phi + batch * size) / (phi + 100)
    if size == 4:
        optimizer._hvd.carrier.compressor.exact_mean = False
        with pytest.raises(ValueError, match="HVD208"):
            hvd.noise_scale(optimizer, batch=1)
    for wrong, options in ((0, {}), (1, {"op": hvd.Max})):
        with pytest.raises(ValueError, match="noise_scale"):
            hvd.noise_scale(wrapped(**options)[1], batch=wrong)
