"""The 161 gradients of a ResNet-50 (102 MB of float32): how long until all are averaged?

    hvdlite-run -np 2 python examples/benchmarks/gradients.py

A fake backward hands out ready-made gradients one after the other, last layer first, as autograd does, and computes
nothing. Three times are taken, by turns, with hvdlite and with its peers over Gloo in the same processes:

* hooks: from the last gradient's hook to the end of optimizer.synchronize(); for DistributedDataParallel to the end of
  backward, which waits for its reductions. What is reduced while earlier hooks fire is not counted in either.
* at once: all 161 gradients are submitted together and waited for; beside it, one Gloo allreduce of the same 102 MB.

What counts is the slower rank of each iteration. Sums are checked in every iteration of hvdlite.
"""

import argparse
import math
import time

import torch
import torch.distributed as dist
from torch import nn

import hvdlite.torch as hvd
from measure import report


def resnet50_shapes() -> "list[tuple[int, ...]]":
    """Shapes of the parameters of a ResNet-50, first layer first: convolutions, then batch norms' weight and bias."""

    def convolution(out: int, into: int, size: int) -> "list[tuple[int, ...]]":
        return [(out, into, size, size), (out,), (out,)]

    shapes = convolution(64, 3, 7)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(width, into, 1) + convolution(width, width, 3) + convolution(4 * width, width, 1)
            if block == 0:  # the shortcut changes the number of channels
                shapes += convolution(4 * width, into, 1)
            into = 4 * width
    shapes += [(1000, 2048), (1000,)]
    assert len(shapes) == 161 and sum(map(math.prod, shapes)) == 25_557_032
    return shapes


class HandOut(torch.autograd.Function):
    """Passes a token on; backward gives its parameter a gradient that was ready before."""

    @staticmethod
    def forward(ctx, token, parameter, ready):
        ctx.ready = ready
        return token.clone()

    @staticmethod
    def backward(ctx, token):
        return token, ctx.ready, None


class Model(nn.Module):
    """Parameters without a computation; `loss.backward()` hands each its gradient, last layer first."""

    def __init__(self, shapes) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self.ready = [torch.full(shape, hvd.rank() + 1.0) for shape in shapes]
        self.token = torch.zeros((), requires_grad=True)

    def forward(self) -> torch.Tensor:
        token = self.token
        for parameter, ready in zip(self.layers, self.ready):
            token = HandOut.apply(token, parameter, ready)
        return token


class Clock:
    """The time of the last hook of a backward pass."""

    def __init__(self, model: Model) -> None:
        self.last = 0.0
        for parameter in model.layers:
            parameter.register_post_accumulate_grad_hook(self.tick)

    def tick(self, _) -> None:
        self.last = time.perf_counter()


def by_hooks(shapes):
    """Milliseconds from the last hook to the end of synchronize()."""
    model = Model(shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    clock = Clock(model)  # after the optimizer, so that its hook has run when the clock ticks

    def iterate() -> float:
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        optimizer.synchronize()
        taken = 1000 * (time.perf_counter() - clock.last)
        expected = (hvd.size() + 1) / 2
        assert all(p.grad.view(-1)[[0, -1]].eq(expected).all() for p in model.layers), "a wrong average"
        return taken

    return iterate


def by_ddp(shapes):
    """The same with DistributedDataParallel over Gloo, which waits at the end of backward."""
    model = Model(shapes)
    wrapped = nn.parallel.DistributedDataParallel(model)
    clock = Clock(model)

    def iterate() -> float:
        model.zero_grad()
        wrapped().backward()
        return 1000 * (time.perf_counter() - clock.last)

    return iterate


def at_once(shapes):
    """Milliseconds to reduce 161 ready gradients that are submitted together."""
    gradients = [torch.zeros(shape) for shape in shapes]

    def iterate() -> float:
        started = time.perf_counter()
        handles = [hvd.allreduce_async_(g, name=f"g{i}", op=hvd.Average) for i, g in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)
        return 1000 * (time.perf_counter() - started)

    return iterate


def flat_gloo(shapes):
    """Milliseconds of one Gloo allreduce of as many bytes."""
    tensor = torch.zeros(sum(map(math.prod, shapes)))

    def iterate() -> float:
        started = time.perf_counter()
        dist.all_reduce(tensor)
        return 1000 * (time.perf_counter() - started)

    return iterate


def main() -> None:
    parser = argparse.ArgumentParser(description="Averaging the gradients of a ResNet-50.")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    args = parser.parse_args()
    hvd.init()
    dist.init_process_group("gloo", init_method="env://", rank=hvd.rank(), world_size=hvd.size())
    shapes = resnet50_shapes()
    rivals = {
        "161 gradients of ResNet-50, last hook to all averaged": (by_hooks(shapes), 20),
        "  the same by DistributedDataParallel over Gloo": (by_ddp(shapes), None),
        "161 gradients of ResNet-50, submitted at once": (at_once(shapes), None),
        "  one Gloo allreduce of the same 102 MB": (flat_gloo(shapes), None),
    }
    times: dict = {name: [] for name in rivals}
    for number in range(args.warm_up + args.iterations):
        for name, (iterate, _) in rivals.items():
            hvd.barrier()
            taken = max(hvd.allgather_object(iterate()))
            if number >= args.warm_up:
                times[name].append(taken)
    if hvd.rank() == 0:
        medians = [report(name, "ms", times[name], target) for name, (_, target) in rivals.items()]
        print(f"DDP over Gloo takes {medians[1] / medians[0]:.1f} times as long as hvdlite after the last hook")
        print(f"One flat Gloo allreduce takes {medians[3] / medians[2]:.1f} times as long as 161 of hvdlite at once")
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
