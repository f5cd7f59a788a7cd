"""Performs the step of torch.nn.DataParallel over ranks, and compares its cost with DistributedOptimizer.

    hvdlite-run -np 4 python examples/16_data_parallel.py
    hvdlite-run -np 4 --plane p2p python examples/16_data_parallel.py     # also prints the bytes on streams

Its six steps, with rank 0 in the middle:

    1 scatter the inputs        4 gather the outputs; rank 0 computes the loss
    2 broadcast the parameters  5 scatter the gradients of the outputs
    3 forward on all ranks      6 backward on all ranks; gradients are summed on rank 0, whose optimizer alone steps

The weights are the same, bit by bit. But if rank 0 serves each rank itself, it sends and receives everything n - 1
times, and the others wait. In an allreduce every rank sends and receives 2 (n - 1) / n of the gradients. The core does
this with large tensors (try --hidden 4000), and forwards the data of rank 0 from rank to rank. Small tensors go to all
others at once: more bytes in fewer messages.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import hvdlite.torch as hvd

STEPS, ROWS = 5, 8  # rows of each rank


def network(hidden: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, hidden), nn.Tanh(), nn.Linear(hidden, 10))


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def crossed() -> "tuple[int, int]":
    """Bytes that have left this rank over streams, and that have come; 0 where shared memory carries all."""
    links = hvd.link_stats().values()
    return sum(link["bytes_out"] for link in links), sum(link["bytes_in"] for link in links)


def data_parallel(model: nn.Module, batches: list) -> "tuple[int, int]":
    """Trains it; only rank 0 has the weights then. Returns the bytes that rank 0 sends and receives in a step."""
    here = hvd.rank() == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        mine = hvd.scatter(x if here else None, 0, name="x")
        for name, p in model.named_parameters():
            hvd.broadcast_(p.data, 0, name=name)
        out = model(mine)
        outputs = hvd.gather(out.detach(), 0, name="out")
        if here:
            outputs.requires_grad_()
            F.cross_entropy(outputs, y).backward()
        gradient = hvd.scatter(outputs.grad if here else None, 0, name="gradient")
        model.zero_grad()
        out.backward(gradient)
        for name, p in model.named_parameters():
            total = hvd.reduce(p.grad, 0, op=hvd.Sum, name=f"{name}.gradient")
            if here:
                p.grad = total
        if here:
            optimizer.step()
    parameters, others = bytes_of(*model.parameters()), hvd.size() - 1
    return others * (bytes_of(mine, out) + parameters), others * (bytes_of(out) + parameters)


def distributed(model: nn.Module, batches: list) -> "tuple[int, int]":
    """Trains it. Returns the bytes that each rank sends and receives in a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.chunk(hvd.size())[hvd.rank()]), y.chunk(hvd.size())[hvd.rank()]).backward()
        optimizer.step()
    each_way = 2 * (hvd.size() - 1) * bytes_of(*model.parameters()) // hvd.size()
    return each_way, each_way


def main() -> None:
    parser = argparse.ArgumentParser(description="torch.nn.DataParallel's six steps over ranks.")
    parser.add_argument("--hidden", type=int, default=40, help="hidden units of the network")
    args = parser.parse_args()
    hvd.init()
    g = torch.Generator().manual_seed(3)
    rows = ROWS * hvd.size()
    batches = [(torch.randn(rows, 20, generator=g), torch.randint(10, (rows,), generator=g)) for _ in range(STEPS)]
    models = [network(args.hidden), network(args.hidden)]
    for model, train, name in zip(models, (data_parallel, distributed), ("DataParallel", "DistributedOptimizer")):
        before = crossed()
        sent, received = train(model, batches)
        through = [(b - a) // STEPS for a, b in zip(before, crossed())]
        if hvd.rank() == 0:
            print(f"{name}: rank 0 sends {sent:,} bytes a step and receives {received:,}: {sent + received:,}")
            if any(through):  # includes headers and votes
                print(f"{name}: through the streams of rank 0 went {through[0]:,} and {through[1]:,}")
    if hvd.rank() == 0:
        apart = max((a - b).abs().max().item() for a, b in zip(models[0].parameters(), models[1].parameters()))
        print(f"weights differ by {apart:.1e} after {STEPS} steps")


if __name__ == "__main__":
    main()
