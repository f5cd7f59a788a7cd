"""Computes gradients through remote calls, with parameters on several ranks: torch and hvd.rpc alone.

    hvdlite-run -np 3 python examples/17_distributed_autograd.py             # rank 0 trains the layers of ranks 1 and 2
    hvdlite-run -np 3 python examples/17_distributed_autograd.py --check     # and compares it with one process

A call through a part of the model is one node of the caller's graph. Its forward runs on the owner of the part, which
keeps its own graph. Its backward asks the owner to run backward through that graph. So `loss.backward()` crosses ranks
as often as the loss did, also where paths divide and join:

    chain    x -> [1] -> [2] -> loss          diamond    x -> [1] -> [2] --+-> loss
                                                              \\-> x2 -> [2] -/

Two threads compute two losses at once. They share parameters, so each Pass keeps its own gradients. A step goes to all
owners at the same time, and each owner steps its own parameters. Parameters never travel.
"""

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import hvdlite.torch as hvd

WIDTH, ROWS = 8, 4


class Part:
    """A layer and its optimizer, on the rank that owns them. A pass is (caller, number)."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.03, momentum=0.9)
        self.graphs, self.gradients = {}, {}  # by pass; graphs by number in it

    def forward(self, of, number, x):
        y = torch.tanh(self.layer(x.requires_grad_()))
        self.graphs.setdefault(of, {})[number] = x, y
        return y.detach()

    def backward(self, of, number, gradient):
        x, y = self.graphs[of].pop(number)
        first, *new = torch.autograd.grad(y, [x, *self.layer.parameters()], gradient)
        old = self.gradients.get(of)
        self.gradients[of] = new if old is None else [a + b for a, b in zip(old, new)]
        return first

    def step(self, of):
        """Takes the gradients of this pass, and forgets it."""
        self.graphs.pop(of, None)
        for p, gradient in zip(self.layer.parameters(), self.gradients.pop(of)):
            p.grad = gradient
        self.optimizer.step()
        return [p.detach() for p in self.layer.parameters()]

    def gradients_of(self, of):
        return self.gradients[of]

    def left(self):
        return len(self.graphs) + len(self.gradients)


def step_here(part, of):
    """On the owner, where a reference gives the part itself."""
    return part.get().step(of)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _, part, key, x):
        ctx.part, ctx.key = part, key
        return part.call("forward", *key, x.detach())

    @staticmethod
    def backward(ctx, gradient):
        return None, None, None, ctx.part.call("backward", *ctx.key, gradient)


class Pass:
    """Of one loss, forward and backward."""

    _numbers = itertools.count()

    def __init__(self):
        self.key, self._calls = (hvd.rank(), next(self._numbers)), itertools.count()
        self._root = torch.zeros((), requires_grad=True)  # what a part returns has a gradient, even if x needs none

    def through(self, part):
        return lambda x: _Through.apply(self._root, part, (self.key, next(self._calls)), x)

    def step(self, parts):
        """All owners step at once; returns their parameters."""
        return [f.result() for f in [hvd.rpc.call_async(part.rank, step_here, part, self.key) for part in parts]]


def chain(one, two, x):
    return two(one(x)).square().mean()


def diamond(one, two, x):
    a = one(x)
    return (two(a) + two(2 * a)).square().mean()


def remote_step(parts, x, threads):
    """The losses, and for each of them gradients and parameters of each part."""
    passes = [Pass() for _ in (chain, diamond)]

    def loss_of(form, of):
        loss = form(*map(of.through, parts), x)
        loss.backward()
        return loss.detach()

    losses = list(threads.map(loss_of, (chain, diamond), passes))
    gradients = [[part.call("gradients_of", of.key) for part in parts] for of in passes]
    return losses, gradients, [of.step(parts) for of in passes]


def local_step(parts, x):
    """The same in one process, without calls."""
    parameters = [list(part.layer.parameters()) for part in parts]
    one, two = (lambda x, part=part: torch.tanh(part.layer(x)) for part in parts)
    losses = [form(one, two, x) for form in (chain, diamond)]
    gradients = [[torch.autograd.grad(loss, each, retain_graph=True) for each in parameters] for loss in losses]
    after = []
    for of_loss in gradients:
        for part, each in zip(parts, of_loss):
            part.gradients["here"] = each
        after.append([[p.clone() for p in part.step("here")] for part in parts])
    return losses, gradients, after


def flat(tree):
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for each in tree for leaf in flat(each)]


def train(args):
    owners = [1 % hvd.size(), 2 % hvd.size()]
    parts = [hvd.rpc.remote(rank, Part, seed) for seed, rank in enumerate(owners)]
    twins, equal = [Part(seed) for seed in range(2)], True
    with ThreadPoolExecutor(2) as threads:
        for step in range(args.steps):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
            found = remote_step(parts, x, threads)
            if step % 5 == 0:
                print(f"step {step}: losses {found[0][0]:.3f} and {found[0][1]:.3f}")
            if args.check:
                equal = equal and all(map(torch.equal, flat(found), flat(local_step(twins, x))))
    if args.check:
        print(f"losses, gradients and parameters of {args.steps} steps equal one process bit for bit: {equal}")
    print(f"graphs and gradients that owners still keep: {sum(part.call('left') for part in parts)}")


def main():
    parser = argparse.ArgumentParser(description="Distributed autograd and a distributed optimizer over hvd.rpc.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="train in one process as well, and compare")
    args = parser.parse_args()
    hvd.init()
    hvd.rpc.start()
    if hvd.rank() == 0:
        train(args)
    hvd.rpc.serve()  # until all ranks are here


if __name__ == "__main__":
    main()
