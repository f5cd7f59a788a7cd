"""PowerSGD, top-k and Accordion (hvdlite/torch/compressed): what arrives, what is kept, and beside what else."""

import math

import pytest
import torch
from pretended_hosts import pretend
from ranks import as_ranks
from test_torch_compressed import backward, buckets, distance, network, same_everywhere, train, wrapped

import hvdlite.torch as hvd
from hvdlite.errors import HvdMismatchError
from hvdlite.torch.compressed.accordion import Regimes

FRESH_RANKS = True
POWER = hvd.PowerSGD(2, start_after=2, least_gain=1.0)
TOP = hvd.TopK(0.05, least_bytes=1024)
ACCORDION = hvd.Accordion(hvd.PowerSGD(4, start_after=2, least_gain=1.0), hvd.PowerSGD(1), every=3)


@as_ranks(2, 4)
@pytest.mark.parametrize("compression", [POWER, TOP, ACCORDION], ids=["power", "top-k", "accordion"])
def test_training_gives_the_same_bits_on_all_ranks_and_all_errors_are_kept(compression):
    pretend(hvd.size() // 2)
    model = network()
    optimizer = wrapped(model, compression, rate=0.01)
    train(model, optimizer, 12)
    same_everywhere(model)
    assert buckets(optimizer) >= 9
    exact = network()
    train(exact, wrapped(exact, hvd.Compression.none, rate=0.01), 12)
    assert 0 < distance(model, exact) < 0.3
    name, shape = "0.weight", model[0].weight.shape
    kept = lambda: optimizer.state_dict()["hvdlite"]["residuals"][name].view(shape).double()  # noqa: E731
    before, given, sent = kept(), torch.zeros(shape).double(), torch.zeros(shape).double()
    optimizer.param_groups[0]["lr"] = 0.0
    for step in range(20, 30):
        mine = network()
        mine.load_state_dict(model.state_dict())
        backward(mine, step)
        given += mine[0].weight.grad
        optimizer.zero_grad()
        backward(model, step)
        sent += model[0].weight.grad
    lost = hvd.allreduce(given + before - kept(), name="lost") - sent
    assert float(lost.abs().max()) < 1e-5 * float(hvd.allreduce(given.abs(), name="given").max())


@as_ranks(2)
def test_full_rank_is_exact_and_what_is_not_finite_spoils_one_step_only():
    pretend(1)
    weight = torch.nn.Parameter(torch.zeros(40, 12))
    nothing = torch.nn.Parameter(torch.zeros(30, 20))
    plain = torch.optim.SGD([weight, nothing], lr=1.0)
    full = hvd.PowerSGD(64, start_after=1, least_gain=1.0)
    with pytest.raises(ValueError, match="least_gain"):
        hvd.PowerSGD(least_gain=0.5)
    full.least_gain = 0.1
    optimizer = hvd.DistributedOptimizer(plain, [("weight", weight), ("nothing", nothing)], compression=full)
    chance = torch.Generator().manual_seed(hvd.rank())
    for step in range(8):
        given = torch.randn(40, 12, generator=chance)
        if step == 4 and hvd.rank() == 1:
            given[3, 3], given[5] = math.inf, math.nan
        mean = hvd.allreduce(given.clone(), name="mean")
        optimizer.zero_grad()
        ((weight * given).sum() + (nothing * 0).sum()).backward()
        if step == 4:
            assert not weight.grad.isfinite().any()
        else:
            assert float((weight.grad - mean).abs().max()) < 1e-4
        assert not nothing.grad.any()
    assert all(each.isfinite().all() for each in optimizer.state_dict()["hvdlite"]["residuals"].values())


@as_ranks(3)
def test_top_k_of_whole_numbers_loses_nothing():
    pretend(1)
    weight = torch.nn.Parameter(torch.zeros(2000))
    spec = hvd.TopK(0.05, least_bytes=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.0), [("w", weight)], compression=spec, op=hvd.Sum
    )
    chance = torch.Generator().manual_seed(hvd.rank())
    given, sent = torch.zeros(2000).double(), torch.zeros(2000).double()
    for _ in range(200):
        mine = torch.randint(-50, 51, (2000,), generator=chance).float()
        given += mine
        optimizer.zero_grad()
        (weight * mine).sum().backward()
        sent += weight.grad
    kept = optimizer.state_dict()["hvdlite"]["residuals"]["w"].double()
    optimizer.zero_grad()
    (weight * math.nan).sum().backward()
    assert torch.equal(optimizer.state_dict()["hvdlite"]["residuals"]["w"].double(), kept)
    assert torch.equal(hvd.allreduce(given - kept, op=hvd.Sum, name="total"), sent)


@as_ranks(2)
@pytest.mark.parametrize("compression", [POWER, TOP, ACCORDION], ids=["power", "top-k", "accordion"])
def test_beside_failures_frozen_parameters_accumulation_and_states(compression):
    pretend(1)
    model = network()
    optimizer = wrapped(model, compression)
    train(model, optimizer, 6)
    handle = model[0].weight.register_hook(lambda _: 1 / 0)
    if hvd.rank() == 0:
        handle.remove()
    with pytest.raises(ZeroDivisionError if hvd.rank() else HvdMismatchError) as caught:
        backward(model, 6)
    assert hvd.rank() or "HVD308" in str(caught.value)
    handle.remove()
    for step in range(7, 16):
        model[0].weight.requires_grad = step != 9 and (step != 10 or hvd.rank() == 0)
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward(model, step)
        backward(model, step + 100)
        optimizer.step()
    same_everywhere(model)
    saved, weights = optimizer.state_dict(), {name: each.clone() for name, each in model.state_dict().items()}
    again = network(5)
    again.load_state_dict(weights)
    second = wrapped(again, compression)
    second.load_state_dict(saved)
    fresh = wrapped(network(), compression).state_dict()
    if hvd.rank():  # one that has loaded nothing gets all but the residuals
        second.load_state_dict(fresh)
    hvd.broadcast_optimizer_state(second, 0)
    train(again, second, 5, 20)
    same_everywhere(again)
    other = wrapped(network(), hvd.Compression.int8)
    with pytest.warns(UserWarning, match="HVD428"):
        other.load_state_dict(saved)
    third = network()
    optimizer = wrapped(third, compression)
    if not isinstance(compression, hvd.TopK):
        if hvd.rank():  # without the other, which has another Q then
            optimizer.load_state_dict(saved)
        with pytest.raises(HvdMismatchError, match="after 0 steps"):
            train(third, optimizer, 3)


def test_regimes_on_a_series_with_corners():
    regimes, found = Regimes(0.5, 1), ""
    series = [(8, 1), (7, 1), (3, 1), (2.5, 1), (2.4, 0.1), (2.4, 0.1), (0, 0.1), (1, 0.1), (1, 0.1)]
    for norm, rate in series:
        regimes.add(0, norm)
        regimes.step({0: rate})
        found += "l" if regimes.critical[0] else "h"
    assert found == "lhlhlhllh"


@as_ranks(2)
def test_levels_follow_the_learning_rate_and_windows():
    pretend(1)
    model = network()
    optimizer = wrapped(model, ACCORDION)
    levels = []
    for step in range(20):
        if step == 14:
            optimizer.param_groups[0]["lr"] /= 10
        train(model, optimizer, 1, step)
        levels.append(dict(optimizer._hvd.carrier.compressor.ranks))
    assert all(each == levels for each in hvd.allgather_object(levels))
    assert {rank for each in levels for rank in each.values()} == {1, 4}
    same_everywhere(model)


@as_ranks(2)
def test_what_is_refused():
    pretend(1)
    for wrong in (
        lambda: hvd.PowerSGD(0),
        lambda: hvd.TopK(2.0),
        lambda: wrapped(network(), hvd.TopK(0.6)),
        lambda: wrapped(network(), POWER, op=hvd.Max),
        lambda: wrapped(network(), POWER, shard=True),
        lambda: hvd.Accordion(hvd.PowerSGD(1), hvd.PowerSGD(1)),
    ):
        with pytest.raises(ValueError, match="HVD2"):
            wrong()
    with pytest.raises(TypeError, match="PowerSGD"):
        hvd.Accordion(hvd.Compression.int8, hvd.PowerSGD(1))
