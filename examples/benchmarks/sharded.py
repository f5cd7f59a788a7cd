"""A sharded optimizer beside a replicated one, and beside DistributedDataParallel with ZeroRedundancyOptimizer (Gloo).

    hvdlite-run -np 2 python examples/benchmarks/sharded.py             # a step of ResNet-50, by turns
    hvdlite-run -np 2 python examples/benchmarks/sharded.py --mlp       # 16 layers of 512, little compute
    MALLOC_MMAP_THRESHOLD_=65536 hvdlite-run -np 4 python examples/benchmarks/sharded.py --memory sharded

Time: models of all kinds train by turns in the same processes, one thread each. All ranks begin a step together, and it
takes as long as on its slowest rank. The ratio is that of medians, to the replicated step.

Memory: the greatest sum of private memory of a rank (RssAnon), less that before the model is made, in sizes of the
parameters. Take one kind for each launch. With the small threshold glibc gives back what is freed.
"""

import argparse
import importlib
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd

KINDS = ("replicated", "sharded", "zero")
WARM_UP = 3


def made(kind: str, model: nn.Module, optimizer: str) -> "tuple[nn.Module, torch.optim.Optimizer]":
    """The model and its optimizer of this kind."""
    words = {"lr": 1e-3, "momentum": 0.9} if optimizer == "SGD" else {"lr": 1e-3, "foreach": False}
    base = getattr(torch.optim, optimizer)
    if kind == "zero":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), base, **words)
    plain = base(model.parameters(), **words)
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), shard=kind == "sharded")


def perceptron(layers: int, width: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    outputs = model(inputs)
    F.cross_entropy(outputs, torch.arange(len(outputs)) % outputs.shape[1]).backward()
    optimizer.step()


def compare(args: argparse.Namespace) -> None:
    """Step time of each kind."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    resnet = importlib.import_module("04_train_resnet").resnet
    inputs = torch.randn(16, 512) if args.mlp else torch.randn(args.batch, 3, args.pixels, args.pixels)
    trainers = {}
    for kind in KINDS:
        torch.manual_seed(0)
        model = perceptron(16, 512) if args.mlp else resnet(50, 64, 1000)
        trainers[kind] = made(kind, model, args.optimizer)
    times: dict = {kind: [] for kind in KINDS}
    for number in range(WARM_UP + args.steps):
        for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
            hvd.barrier()
            begin = time.perf_counter()
            step(*trainers[kind], inputs)
            slowest = max(hvd.allgather_object(time.perf_counter() - begin))
            times[kind] += [slowest] if number >= WARM_UP else []
    base = statistics.median(times["replicated"])
    for kind in KINDS if hvd.rank() == 0 else ():
        middle = statistics.median(times[kind])
        print(f"np {hvd.size()} {args.optimizer} {kind:10} {middle * 1e3:8.1f} ms  {middle / base:.3f} of replicated")


def private() -> int:
    """Bytes of memory that this process shares with no other."""
    status = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(status.split()[0]) << 10


def memory(args: argparse.Namespace) -> None:
    """Peak of one kind, with Adam on 16 layers of 768."""
    warm = nn.Linear(8, 8)
    warm(torch.ones(2, 8)).sum().backward()
    torch.optim.AdamW(warm.parameters(), foreach=False).step()
    before, peak, over = private(), [0], threading.Event()
    model = perceptron(16, 768)
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    trainer = made(args.memory, model, "AdamW")

    def watch() -> None:
        while not over.wait(0.002):
            peak[0] = max(peak[0], private())

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(5):
        step(*trainer, torch.ones(4, 768))
    over.set()
    thread.join()
    found = hvd.allgather_object((peak[0] - before) / size)
    if hvd.rank() == 0:
        print(f"np {hvd.size()} AdamW {args.memory}: peak of {max(found):.2f} sizes of the parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description="Sharded and replicated optimizers, time and memory.")
    parser.add_argument("--mlp", action="store_true", help="a multi-layer perceptron in the place of ResNet-50")
    parser.add_argument("--memory", choices=KINDS, help="measure the memory of this kind")
    parser.add_argument("--optimizer", default="AdamW", choices=("AdamW", "SGD"))
    parser.add_argument("--steps", type=int, default=14, help="steps counted, of each kind")
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="images of a rank")
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=hvd.rank(), world_size=hvd.size())
    if args.memory:
        memory(args)
    else:
        compare(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
