"""Small pipelines for tests: layers of 12 numbers, one or more for each rank, and the same training in one process."""

import torch
import torch.nn.functional as F
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def pipeline(layers, m=4, make=adamw, loss=F.cross_entropy, **rest):
    mesh = hvd.Mesh(pp=hvd.size())
    stage = parallel.split(layers, mesh, parallel.partition([1] * len(layers), hvd.size()))
    return parallel.Pipeline(stage, make(stage.parameters()), mesh, loss, m, timeout=20, **rest)


def train(layers, batches, m=4, **rest):
    pipe = pipeline(layers, m, **rest)
    for x, y in batches:
        pipe.step(x, y)
    pipe.drain()
    return pipe.module


def alone(layers, batches, m=4, make=adamw, loss=F.cross_entropy):
    """This rank's layer after the same training in one process."""
    optimizers = [make(layer.parameters()) for layer in layers]
    for x, y in batches:
        for k in range(m):
            out = x.chunk(m)[k]
            for layer in layers:
                out = layer(*out) if isinstance(out, tuple) else layer(out)
            (loss(out, y.chunk(m)[k]) / m).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return layers[hvd.rank()]


class Mlp(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.line, self.drop = nn.Linear(12, 12), drop

    def forward(self, x):
        return F.dropout(torch.tanh(self.line(x)), self.drop, self.training)


def made(make):
    torch.manual_seed(2)
    return [make(place) for place in range(4)]


def mlps():
    return made(lambda _: Mlp())


def rows(count=3, n=8):
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(n, 12, generator=g), torch.randint(0, 12, (n,), generator=g)) for _ in range(count)]
