"""Random models in a pipeline end with the bits of one process, also when they are saved and loaded on the way.

Layers are frozen, tied over stages, left out in some micro-batches, or used in some only; they give several outputs,
numbers without dimensions, and buffers that they change in place. "No gradient" must stay what it is: the optimizers
have momentum and weight decay.
"""

import copy
import random

import torch
import torch.nn.functional as F
from ranks import EVERYTHING, as_ranks
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel
from hvdlite.parallel.stage import as_arguments

WIDTH = 6


class Piece(nn.Module):
    """A layer: (h, side) -> (h, side), where side is what an earlier one has put there, or h itself."""

    def __init__(self, kind, frozen):
        super().__init__()
        self.kind, self.line = kind, nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "norm" else nn.Identity()
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.requires_grad_(not frozen)

    def forward(self, h, *side):
        self.count += 1
        now = int(self.count)
        if self.kind == "absent" and now // 2 % 2:  # stochastic depth
            return h, *side
        new = torch.tanh(self.norm(self.line(h)))
        if self.kind == "drops":  # by numbers that do not depend on where the layer lies
            new = new * (torch.rand(new.shape, generator=torch.Generator().manual_seed(now)) > 0.5)
        if self.kind == "gives":
            return h + new, new
        if self.kind == "takes" and side and now // 2 % 2:
            return h + new * side[0].float().mean(), *side
        if self.kind == "scalar":
            return h + new, new.mean()
        if self.kind == "counts":
            return h + new, self.count  # which it changes in its next forward
        return h + new, *side


class Last(Piece):
    def forward(self, h, *side):
        return super().forward(h)[0]


KINDS = ("plain", "norm", "absent", "gives", "takes", "scalar", "counts", "drops")


def model(seed, stages):
    """Layers, micro-batches, ties by layer. Those that are tied have one micro-batch: with more, sums are in another
    order than in one process."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kinds = [rng.choice(KINDS) for _ in range(rng.randint(stages, stages + 3) - 1)]
    layers = [Piece(kind, rng.random() < 0.25) for kind in kinds] + [Last("plain", False)]
    tied = (0, len(layers) - 1) if rng.random() < 0.3 else None
    if tied:
        layers[tied[1]].line.weight = layers[tied[0]].line.weight
    return layers, 1 if tied else rng.choice((1, 2, 4)), tied, rng


def optimizer_of(parameters, seed):
    if seed % 2:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def batches(seed, count=6):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, WIDTH, generator=g), torch.randint(WIDTH, (8,), generator=g)) for _ in range(count)]


def alone(layers, m, seed):
    whole = nn.ModuleList(layers)
    optimizer, scheduler = optimizer_of(whole.parameters(), seed)
    for x, y in batches(seed):
        for part, target in zip(x.chunk(m), y.chunk(m)):
            values = (part,)
            for layer in layers:
                values = as_arguments(layer(*values))
            (F.cross_entropy(values[0], target) / m).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return whole.state_dict()


def piped(seed, mesh, schedule, saved):
    """This stage after the same steps; `saved` of them before it is saved, as a whole or in parts, and loaded into
    another."""
    kept = {}
    for first, last in ((0, saved), (saved, 6)):
        layers, m, tied, rng = model(seed, hvd.size())
        balance = parallel.partition([1] * len(layers), hvd.size() * (1 + (schedule == "interleaved")))
        if tied:  # each has a copy
            layers[tied[1]].line.weight = nn.Parameter(
                layers[tied[0]].line.weight.detach().clone(), layers[tied[0]].line.weight.requires_grad
            )
        stage = parallel.split(layers, mesh, balance)
        optimizer, scheduler = optimizer_of(stage.parameters(), seed)
        places = {0: "0.line.weight", hvd.size() - 1: f"{len(layers) - 1}.line.weight"}
        pipe = parallel.Pipeline(
            stage, optimizer, mesh, F.cross_entropy, m, schedule, shapes="each",
            tied=[("line", places)] if tied else (), timeout=20, lr_scheduler=scheduler,
        )  # fmt: skip
        if first:
            (pipe.load_whole if seed % 3 else pipe.load_state_dict)(kept)
        for x, y in batches(seed)[first:last]:
            pipe.step(x, y)
        kept = hvd.broadcast_object(pipe.whole_state(), 0) if seed % 3 else copy.deepcopy(pipe.state_dict())
    return stage.state_dict()


@as_ranks(2, 3)
def test_the_bits_of_one_process():
    mesh = hvd.Mesh(pp=hvd.size())
    for seed in range(100 if EVERYTHING else 16):
        layers, m, tied, _ = model(seed, hvd.size())
        schedule = ("gpipe", "1f1b")[seed // 2 % 2]
        if len(layers) >= 2 * hvd.size() and m % hvd.size() == 0 and not tied:
            schedule = "interleaved"
        wanted = alone(copy.deepcopy(layers), m, seed)
        for name, value in piped(seed, mesh, schedule, 1 + seed % 5).items():
            assert torch.equal(value, wanted[name]), (seed, schedule, [layer.kind for layer in layers], name)
