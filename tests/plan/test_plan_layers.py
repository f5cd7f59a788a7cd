"""From a model to a plan that trains: profile, file of layers, choice, file of the plan, mesh, pipeline.

What `choose` writes must be what hvdlite.parallel runs: a small model is trained from such a file on four ranks, and
has the weights of one process.
"""

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import as_ranks
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel
from hvdlite.plan import layers as files
from hvdlite.plan.auto import choose, meshes
from hvdlite.plan.profile import profile, stages
from hvdlite.plan.search import Chain, Layer, PlanError, best

BLOCK = Layer("block", 4.0, 8.0, 8e6, 4e6, 4e6, heads=4, sync=8e6)


CLOCK = [0.0]  # seconds, of a clock that only layers move


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward = backward
        CLOCK[0] += forward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        CLOCK[0] += ctx.backward
        return gradient, None, None


class Nap(nn.Module):
    def __init__(self, forward, backward):
        super().__init__()
        self.line, self.seconds = nn.Linear(16, 16, bias=False), (forward, backward)

    def forward(self, x):
        return Sleeps.apply(self.line(x), *self.seconds)


def test_profile_of_layers_of_known_times(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: CLOCK[0])
    found = profile([Nap(0.04, 0.08), Nap(0.06, 0.05)], torch.randn(8, 16), 3)
    for layer, forward, backward in zip(found, (40, 60), (80, 50)):
        assert (layer.forward_ms, layer.backward_ms) == pytest.approx((forward, backward))
        assert (layer.activation, layer.weights, layer.stash) == (8 * 16 * 4, 16 * 16 * 4, 8 * 16 * 4)
    files.write(tmp_path / "layers.json", found)
    assert files.read(tmp_path / "layers.json") == found
    assert best(Chain(found, 0.0, 4), 2).stages[0].end in (1, 2)


class Skipping(nn.Module):
    """U-shaped: what `down` makes skips the middle."""

    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(64, 10)

    def forward(self, x):
        d = torch.relu(self.down(x))
        return self.up(torch.cat([torch.tanh(self.middle(d)), d], 1))


def test_a_model_with_a_skip_is_cut_bit_by_bit():
    model, x = Skipping(), torch.randn(16, 64)
    whole = model(x)
    whole.square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    cut = stages(model, {"down": 0, "middle": 1, "up": 2})
    out = cut(x)
    out.square().sum().backward()
    assert len(list(cut.children())) == 3 and torch.equal(out, whole)
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted))
    with pytest.raises(PlanError, match=r"module up is in stage 0, but needs an output of stage 1 \[HVD005\]"):
        stages(model, {"middle": 1, "up": 0})
    with pytest.raises(PlanError, match=r"no module 'side'.*\[HVD005\]"):
        stages(model, {"side": 1})


GOOD = {"name": "a", "forward_ms": 1, "backward_ms": 2, "activation": 3, "weights": 4}


@pytest.mark.parametrize("text, why", [
    ("{", "not a file of layers"),
    ("[]", "its format is 'list'"),
    ([], "layers must be a list of 1 to"),
    ([3], "layer 0 is no object with a name"),
    ([GOOD, {**GOOD, "name": 7}], "layer 1 is no object with a name"),
    ([{"name": "a", "forward_ms": 1}], "layer 0, 'a': backward_ms is missing, activation is missing"),
    ([{**GOOD, "head": 1}], "layer 0, 'a': head is no field"),
    ([{**GOOD, "name": "\x1b[31m"}], "layer 0 is no object with a name of at most 200 letters that can be printed"),
    ([{**GOOD, "weights": -1}], "layer 'a': weights is -1"),
    ([{**GOOD, "weights": "1"}], "layer 'a': weights is 1: it must be a number"),
    ([{**GOOD, "stash": float("inf")}], "layer 'a': stash is inf"),
    ([{**GOOD, "heads": 1.5}], "layer 'a': heads is 1.5: it must be a whole number"),
])  # fmt: skip
def test_bad_files_of_layers(tmp_path, text, why):
    path = tmp_path / "f.json"
    path.write_text(text if isinstance(text, str) else json.dumps({"format": files.FORMAT, "layers": text}))
    with pytest.raises(PlanError, match=rf"f.json: .*{why}.*\[HVD005\]"):
        files.read(path)


def test_choose_says_why_and_what_it_misses(tmp_path):
    chain = Chain([BLOCK] * 4, 1e-7, 4, memory=4 * 4e6 * 4 * 0.8)
    assert {tp for *_, tp in meshes(chain, 8)} == {1, 2, 4}  # of 4 heads no eighth can be taken
    assert {c.kind for c in chain.choices(BLOCK, 8)} == {"dp", "zero1", "tp2", "tp4"}
    found = choose(chain, 8)
    said = " ".join(found.why)
    assert said.startswith("dp=4 pp=2 tp=1: 32 ms a step") and "Of 8 meshes 1 cannot fit the memory." in said
    assert "would take 26.8 ms (4 layers on 8 ranks (dp, zero1)); hvdlite.parallel does not run them." in said
    assert "unequal ranks were not tried" in choose(Chain([BLOCK] * 20, 1e-7, 4), 16).why[-1]
    found.write(tmp_path / "plan.json")
    read = parallel.planned(tmp_path / "plan.json")
    assert read == ([2, 2], 4, "1f1b", {"dp": 4, "pp": 2, "tp": 1}, ["dp"] * 4)
    with pytest.raises(PlanError, match="no mesh of 8 ranks fits into 1000 bytes of memory: the minimum is 12000000"):
        choose(Chain([BLOCK] * 4, 1e-7, 4, 1e3), 8)


PLAN = {"format": "hvdlite-parallel-1", "micro_batches": 2, "schedule": "1f1b", "shape": {"dp": 1, "pp": 1, "tp": 2}}
PLAN["stages"] = [{"layers": [0, 2], "kinds": ["dp", "tp2"]}]


@pytest.mark.parametrize("change, why", [
    ({"format": "x"}, "it is not of the format 'hvdlite-parallel-1'"),
    ({"shape": {"pp": 1}}, "shape must have the axes dp, pp and tp"),
    ({"micro_batches": 0}, "micro_batches is 0"),
    ({"micro_batches": 10**9}, "micro_batches is 1000000000: it must be a whole number of 1 to 1048576"),
    ({"schedule": "continuous"}, "schedule is 'continuous'"),
    ({"stages": []}, "stages must be a list of 1"),
    ({"stages": [{"layers": [0, 2], "kinds": ["dp"]}]}, "stage 0 has the layers .0, 2. and 1 kinds"),
    ({"stages": [{"layers": [0, 1], "kinds": ["tp4"]}]}, "a layer is 'tp4': it must be 'dp' or 'tp2'"),
    ({"stages": [{"layers": [0, 1]}]}, "'kinds' is missing"),
])  # fmt: skip
def test_bad_files_of_plans(tmp_path, change, why):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**PLAN, **change}))
    with pytest.raises(ValueError, match=rf"p.json: not a plan for hvdlite.parallel: {why}.*\[HVD013\]"):
        parallel.planned(path)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def blocks():
    torch.manual_seed(3)
    return [Block() for _ in range(4)]


def data(place):
    g = torch.Generator().manual_seed(place)
    return torch.randn(8, 12, generator=g), torch.randint(0, 12, (8,), generator=g)


@pytest.mark.parametrize("heads, memory, shape", [(0, 1000, [2, 2, 1]), (2, 500, [1, 2, 2])])
@as_ranks(4)
def test_a_model_is_trained_as_planned(heads, memory, shape):
    rows = [replace(BLOCK, weights=100, stash=1, heads=heads, activation=1, sync=1) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        choose(Chain(rows, 1e-6, 4, memory), 4).write(path)
        plan = parallel.planned(path)
    mesh = hvd.Mesh(**plan.shape)
    assert list(mesh.shape.values()) == shape
    layers, whole = blocks(), blocks()
    for layer, kind in zip(layers, plan.kinds):
        if kind != "dp":
            parallel.parallelize(layer, {"up": "column", "down": "row"}, mesh.group("tp"))
    stage = parallel.split(layers, mesh, plan.balance)
    optimizer, m = torch.optim.SGD(stage.parameters(), lr=0.1), plan.micro_batches
    pipe = parallel.Pipeline(stage, optimizer, mesh, F.cross_entropy, m, plan.schedule, timeout=20)
    pipe.step(*data(mesh.coordinate("dp")))
    pipe.drain()
    alone = nn.Sequential(*whole)
    for place in range(plan.shape["dp"]):
        for x, y in zip(*(each.chunk(m) for each in data(place))):
            (F.cross_entropy(alone(x), y) / m / plan.shape["dp"]).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    wanted, start = alone.state_dict(), nn.Sequential(*blocks()).state_dict()
    for name, value in stage.named_parameters():
        cut = getattr(value, "cut", None)
        own = [each if cut is None else each.chunk(plan.shape["tp"], cut)[mesh.coordinate("tp")]
               for each in (wanted[name], start[name])]  # fmt: skip
        torch.testing.assert_close(value.detach(), own[0], rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, own[1])
