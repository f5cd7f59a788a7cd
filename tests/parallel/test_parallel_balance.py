"""Layers into stages: the exact cut, what a layer costs, and this rank's share of a model."""

import random
import weakref
from itertools import combinations

import pytest
import torch
from ranks import as_ranks
from torch import nn

import hvdlite.torch as hvd
from hvdlite.parallel import partition, profile, split


def sums(numbers, balance):
    ends = [sum(balance[:i]) for i in range(len(balance) + 1)]
    return [sum(numbers[a:b]) for a, b in zip(ends, ends[1:])]


def all_cuts(layers, stages):
    for inner in combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in zip((0, *inner), (*inner, layers))]


def test_partition_is_optimal():
    draw = random.Random(0)
    for _ in range(500):
        layers = draw.randint(1, 12)
        stages = draw.randint(1, layers)
        costs = [draw.choice((0, 1, 2, 7, 30)) for _ in range(layers)]
        weights, limit = [draw.randint(0, 5) for _ in range(layers)], draw.randint(1, 25)
        fit = [c for c in all_cuts(layers, stages) if max(sums(weights, c)) <= limit]
        found = partition(costs, stages)
        assert len(found) == stages and min(found) >= 1 and sum(found) == layers
        assert max(sums(costs, found)) == min(max(sums(costs, cut)) for cut in all_cuts(layers, stages))
        if not fit:
            with pytest.raises(ValueError, match=f"{stages} stages keeps every stage within {limit} .HVD013"):
                partition(costs, stages, weights, limit)
            continue
        found = partition(costs, stages, weights, limit)
        assert found in fit and max(sums(costs, found)) == min(max(sums(costs, cut)) for cut in fit)


@pytest.mark.parametrize(
    "given",
    [
        ([1, 2], 3),
        ([1, 2], 0),
        ([1, 2], 1.0),
        ([1, -1], 1),
        ([1, float("nan")], 1),
        ([1, "2"], 1),
        ([1, 1], 1, [1, 1]),
        ([1, 1], 1, [1], 3),
        ([1, 1], 1, None, 3),
    ],
)
def test_partition_of_what_cannot_be_cut(given):
    with pytest.raises(ValueError, match="HVD013"):
        partition(*given)


def test_profile_measures_and_changes_nothing():
    def heavy():
        return nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))

    layers = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.5), heavy().eval(), heavy]
    layers[0].weight.grad = torch.ones(64, 8)
    state = {name: value.clone() for name, value in nn.ModuleList(layers[:5]).state_dict().items()}
    x, generator = torch.randn(256, 8), torch.get_rng_state()
    kept = x.clone()
    found = profile(layers, x, repeats=3)
    assert found.activations == [256 * 64 * 4] * 6
    assert found.weights == [64 * 9 * 4, 64 * 4 * 4 + 8, 0, 0, *[4 * (64 * 512 * 2 + 512 + 64)] * 2]
    assert min(found.costs) > 0 and sum(found.costs[4:]) > sum(found.costs[1:4])
    assert torch.equal(torch.get_rng_state(), generator) and torch.equal(x, kept) and not x.requires_grad
    assert all(torch.equal(value, state[name]) for name, value in nn.ModuleList(layers[:5]).state_dict().items())
    assert torch.equal(layers[0].weight.grad, torch.ones(64, 8)) and layers[0].bias.grad is None
    assert layers[0].training and not any(each.training for each in layers[4].modules())


def test_profile_makes_one_layer_at_a_time():
    alive = weakref.WeakSet()

    class Skip(nn.Module):
        def forward(self, h, ids):
            return h + ids[:, None], ids

    def make():
        assert not alive
        layer = Skip()
        alive.add(layer)
        return layer

    assert profile([make] * 3, (torch.ones(5, 2), torch.arange(5))).activations == [5 * 2 * 4 + 5 * 8] * 3


@as_ranks(4)
def test_split():
    called = []

    def maker(number):
        return lambda: called.append(number) or nn.Linear(2, 2)

    class Twice(nn.Module):
        def forward(self, x, *rest):
            return x, 2 * x

    mesh = hvd.Mesh(dp=2, pp=2)
    stage = split([maker(0), maker(1), Twice(), Twice(), maker(4)], mesh, [1, 4])
    assert called == ([[0], [1, 4]][mesh.coordinate("pp")])
    names = [name for name, _ in stage.named_parameters()]
    assert names == [f"{n}.{what}" for n in called for what in ("weight", "bias")]
    one = split([Twice()] * 4, hvd.Mesh(pp=4), [1] * 4)
    assert [t.tolist() for t in one(torch.ones(1), torch.zeros(1))] == [[1.0], [2.0]]
    for balance in ([4, 0, 0, 0], [1, 1, 1], [2, 2, 2, 2]):
        with pytest.raises(ValueError) as caught:
            split([Twice()] * 4, hvd.Mesh(pp=4), balance)
        assert str(caught.value) == f"balance {balance} must give each of 4 stages at least one of 4 layers [HVD013]"
    with pytest.raises(ValueError, match="is Tensor: pass a module, .*HVD013"):
        split([lambda: torch.ones(1)] * 4, hvd.Mesh(pp=4), [1] * 4)
