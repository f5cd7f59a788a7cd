"""The loop that people write, whose zero_grad() sets gradients to None: what does data parallelism add to a step?

    hvdlite-run -np 2 python examples/benchmarks/default_loop.py --library hvdlite --model mlp
    torchrun --nproc-per-node 2 examples/benchmarks/default_loop.py --library ddp --model gpt

mlp: 60 layers of 640, 24.6 million parameters. gpt: a transformer of 7 layers of 512 on 64 tokens, 30 million. Two
models train by turns in the same processes: one alone on each rank, one distributed (DistributedOptimizer, or
DistributedDataParallel over Gloo with gradient_as_bucket_view). A step takes as long as on its slowest rank. Printed
are the medians of both in milliseconds, and *exposed communication*: the median of their differences.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import hvdlite.torch as hvd

WARM = 4


def model_and_input(name: str) -> "tuple[nn.Module, torch.Tensor]":
    """The same weights on all ranks."""
    torch.manual_seed(1)
    if name == "mlp":
        layers = [each for _ in range(60) for each in (nn.Linear(640, 640), nn.ReLU())]
        return nn.Sequential(*layers), torch.randn(32, 640)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 7, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(8000, 512), body, nn.Linear(512, 8000)), torch.randint(8000, (1, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step whose gradients are made anew.")
    parser.add_argument("--library", choices=("hvdlite", "ddp"), default="hvdlite")
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    alone, inputs = model_and_input(args.model)
    shared, _ = model_and_input(args.model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3, momentum=0.9) for each in (alone, shared)]
    if args.library == "ddp":
        dist.init_process_group("gloo")
        shared = nn.parallel.DistributedDataParallel(shared, gradient_as_bucket_view=True)
        rank, barrier = dist.get_rank(), dist.barrier
    else:
        hvd.init()
        optimizers[1] = hvd.DistributedOptimizer(optimizers[1], named_parameters=shared.named_parameters())
        rank, barrier = hvd.rank(), hvd.barrier

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        barrier()
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        return (time.perf_counter() - begun) * 1e3

    models = list(zip((alone, shared), optimizers))
    times = torch.tensor([[step(*each) for each in models] for _ in range(WARM + args.steps)][WARM:])
    if args.library == "ddp":
        dist.all_reduce(times, dist.ReduceOp.MAX)
    else:
        hvd.allreduce_(times, op=hvd.Max)
    if rank == 0:
        plain, both = (statistics.median(column) for column in times.T.tolist())
        exposed = statistics.median((times[:, 1] - times[:, 0]).tolist())
        print(
            f"{args.library} {args.model}: alone {plain:.1f} ms, step {both:.1f} ms, exposed {exposed:.1f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
