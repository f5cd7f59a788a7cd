"""Can the comparisons with one process fail, do micro-batches come in order, and does PipeMare's correction matter?

Negative controls leave one rule of a schedule or an update policy out: then the weights are others.
"""

import random
import time

import one_process
import pytest
import torch
import torch.nn.functional as F
from one_process import sha
from ranks import EVERYTHING, as_ranks
from small_pipelines import adamw, mlps, pipeline, rows, sgd, train
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel
from hvdlite.parallel import schedule as schedules
from hvdlite.parallel import weights


class SeesTheNewest(weights.TwoVersions):
    def _seen_by(self, k):
        return self.version


class InPlace(weights.Stash):
    """Without copy on write: every version is the newest."""

    def update(self, step):
        self._users, users = dict.fromkeys(self._users, 0), self._users
        super().update(step)
        self._users = {**self._users, **{v: n for v, n in users.items() if n}}
        for leaves in self.versions.values():
            for name, leaf in leaves.items():
                leaf.data = self.params[name].data

    def _wanted(self, version):
        return True


def reversed_backwards(stage, stages, m, batches=1):
    return [(what, m - 1 - k) if what == "B" else (what, k) for what, k in schedules.gpipe(stage, stages, m, batches)]


def four_times(out, y):
    return F.cross_entropy(out, y) * 4


@as_ranks(4)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({}, {"schedule": reversed_backwards}),
        ({}, {"loss": four_times}),
        ({"schedule": "continuous", "update": "2bw"}, {"schedule": "continuous", "update": SeesTheNewest}),
        ({"schedule": "continuous", "update": "stash"}, {"schedule": "continuous", "update": InPlace}),
        (
            {"schedule": "continuous", "update": "pipemare"},
            {"schedule": "continuous", "update": "pipemare", "correct": False},
        ),
    ],
)
def test_negative_controls_do_not_agree(right, wrong):
    """With one rule left out it is another algorithm, so the comparisons of these files can fail."""
    m = 1 if "update" in right and right["update"] != "2bw" else 4
    make = adamw if right else sgd
    one, other = (sha(train(mlps(), rows(8), m, make=make, **rest).parameters()) for rest in (right, wrong))
    assert sha(train(mlps(), rows(8), m, make=make, **right).parameters()) == one
    assert any(hvd.allgather_object(one != other))


@as_ranks(4)
def test_pipemare_converges_where_plain_asynchrony_diverges():
    """A planted linear problem: only both techniques of the paper together hold at this learning rate."""

    def after(steps, anneal, correct):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(64, 8, generator=g)
        y = x
        for t in [torch.randn(8, 8, generator=g) / 8**0.5 * 1.2 for _ in range(4)]:
            y = y @ t.T
        layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
        for layer in layers:
            layer.weight.data.copy_(torch.eye(8) + torch.randn(8, 8, generator=g) * 0.1)
        mesh = hvd.Mesh(pp=4)
        stage = parallel.split(layers, mesh, [1] * 4)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.2)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.1, 1 - n / 600))
        pipe = parallel.Pipeline(
            stage, optimizer, mesh, F.mse_loss, 1, "continuous", "pipemare", lr_scheduler=rates, anneal=anneal,
            correct=correct,
        )  # fmt: skip
        for _ in range(steps):
            pipe.step(x, y)
        pipe.drain()
        return float(pipe.evaluate(x, y, everywhere=True))

    assert not after(20, 0, False) < 1e3
    assert not after(60, 600, False) < 1e3
    assert not after(40, 0, True) < 1e3
    assert after(600, 600, True) < 2e-4


class Order(nn.Module):
    def forward(self, x):
        time.sleep(random.random() * 0.0005)
        return x * self.w

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))


@as_ranks(4, deadline=100)
@pytest.mark.parametrize(("rest", "m"), [({}, 4), ({"schedule": "continuous", "update": "stash"}, 1)])
def test_micro_batches_come_in_order_under_random_delays(rest, m):
    steps = 1000 if EVERYTHING else 100
    seen = []

    def loss(out, y):
        seen.append((out[0, 0].item(), y[0].item()))
        return out.mean()

    pipe = pipeline([Order() for _ in range(4)], m, lambda q: torch.optim.SGD(q, lr=0.0), loss, **rest)
    for n in range(steps):
        numbers = torch.arange(n * m, (n + 1) * m)
        pipe.step(numbers.float()[:, None].expand(m, 512).contiguous(), numbers)
    pipe.drain()
    assert seen == ([(float(k), k) for k in range(steps * m)] if hvd.rank() == 3 else [])


@as_ranks(4)
def test_gradients_of_replicas_travel_once_for_each_update():
    mesh = hvd.Mesh(dp=2, pp=2)
    stage = parallel.split(one_process.layers(2), mesh, [2, 2])
    pipe = parallel.Pipeline(stage, sgd(stage.parameters()), mesh, F.cross_entropy, 8, schedule="gpipe")
    pipe.step(*one_process.data(0, 0, 8))
    before = hvd.counters()["submits"]
    for n in range(4):
        pipe.step(*one_process.data(n, 0, 8))
    pipe.drain()
    # 8 outputs, 8 gradients and whether they are there, the shapes, 2 gradients as one group, which of them are used
    assert hvd.counters()["submits"] - before == 4 * (3 * 8 + 1 + 2 + 1)
