"""A language model on hosts with a slow network: what does it learn in the same time when gradients take fewer bytes?

    hvdlite-run -H host1:1,host2:1 python examples/26_compressed_gradients.py --compression none
    hvdlite-run -H host1:1,host2:1 python examples/26_compressed_gradients.py --compression int8
    sudo python examples/benchmarks/compression_training.py     # all, on two namespaces joined at 100 Mbit/s

The model has 2 million parameters. It reads 16 characters of the source of Python's standard library, and predicts the
next one. The clock stands still while the held-out loss is computed. On one host, gradients travel as they are with
int8, int4, power and accordion.
"""

import argparse
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hvdlite.torch as hvd  # hvdlite

LENGTH, BATCH, HELD_OUT = 16, 64, 100_000  # characters, samples of a rank, characters
FORMS = "none", "fp16", "int8", "int4", "power", "accordion"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a language model with compressed gradients.")
    parser.add_argument("--compression", choices=FORMS, default="int8")
    parser.add_argument("--start-after", type=int, default=20, help="power, accordion: steps that are not compressed")
    parser.add_argument("--window", type=int, default=20, help="accordion: steps between two decisions")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training")
    parser.add_argument("--every", type=int, default=5, help="steps between two lines at first; later a tenth more")
    return parser


def compression(args: argparse.Namespace):
    """What --compression names."""
    power = hvd.PowerSGD(rank=4, start_after=args.start_after)  # hvdlite
    if args.compression == "power":
        return power
    if args.compression == "accordion":
        return hvd.Accordion(low=power, high=hvd.PowerSGD(rank=1), every=args.window)  # hvdlite
    return getattr(hvd.Compression, args.compression)  # hvdlite


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    front = nn.Embedding(256, 48), nn.Flatten(), nn.Linear(LENGTH * 48, width), nn.GELU()
    return nn.Sequential(*front, nn.Linear(width, width), nn.GELU(), nn.Linear(width, 256))


def make_text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def loss_at(model: nn.Module, text: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Of the characters behind the samples that begin at these places."""
    return F.cross_entropy(model(text[at[:, None] + torch.arange(LENGTH)].long()), text[at + LENGTH].long())


def bytes_sent() -> int:
    """By this rank to ranks on other hosts, so far."""
    return sum(link["bytes_out"] for link in hvd.link_stats().values())  # hvdlite


def train(model: nn.Module, optimizer, args: argparse.Namespace, sent: Callable[[], int]) -> "list[tuple]":
    """(seconds, step, held-out loss, bytes sent) from the beginning on; rank 0 prints them. `sent` counts bytes."""
    text = make_text()
    chance = torch.Generator().manual_seed(1 + hvd.rank())  # hvdlite
    held_out = torch.arange(len(text) - HELD_OUT, len(text) - LENGTH, 50)
    rows, step, seconds, count = [], 0, 0.0, 0
    while True:
        with torch.no_grad():
            rows.append((seconds, step, float(loss_at(model, text, held_out)), count))
        if hvd.rank() == 0:  # hvdlite
            rate = f", {step / seconds:.1f} steps/s, {count / step / 1e6:.3f} MB sent per step" if step else ""
            print(f"{seconds:6.1f} s, step {step:4}: held-out loss {rows[-1][2]:.3f}{rate}", flush=True)
        if seconds >= args.seconds:
            return rows
        hvd.barrier()  # hvdlite
        began, before = time.perf_counter(), sent()
        more = max(args.every, step // 10)
        for _ in range(more):
            at = torch.randint(len(text) - HELD_OUT - LENGTH, (BATCH,), generator=chance)
            optimizer.zero_grad()
            loss_at(model, text, at).backward()
            optimizer.step()
        now = torch.tensor([seconds + time.perf_counter() - began])
        step, count = step + more, count + sent() - before
        seconds = float(hvd.allreduce(now, op=hvd.Max, name="seconds"))  # hvdlite: all ranks end after the same step


def main() -> None:
    args = options().parse_args()
    hvd.init()  # hvdlite
    torch.set_num_threads(1)
    model = make_model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression(args))  # hvdlite
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # hvdlite
    train(model, optimizer, args, bytes_sent)


if __name__ == "__main__":
    main()
