"""A rank's part of low_communication.py: trains a character model in one of its modes, and reports what it has seen.

The model is a transformer of 240,000 parameters that reads 64 characters of the source of Python's standard library;
the last tenth of the text is held out. Every mode has the same inner optimizer (AdamW), batches and number of steps:

    sync        hvd.DistributedOptimizer: gradients are averaged in every step
    local       hvd.LocalSGD: weights are averaged every so many steps
    diloco      hvd.DiLoCo: differences of weights are averaged, and an outer optimizer takes a step with them
    streaming   the same in fragments, whose averages arrive some steps later
    int4        diloco, whose differences travel between hosts as integers of 4 bits; streaming-int4 likewise
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hvdlite.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measure import MARK

MODES = ("sync", "local", "diloco", "streaming", "int4")
LENGTH, BATCH, CHARACTERS = 64, 16, 128
WARM_UP = 5  # steps of `islands` before the clock starts
SOURCES = "argparse ast collections inspect logging os pathlib random subprocess tarfile threading typing unittest.mock"


class Characters(nn.Module):
    """Predicts each next character of a row."""

    def __init__(self, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        shape = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        each = (nn.TransformerEncoderLayer(width, 4, 4 * width, **shape) for _ in range(layers))
        self.layers, self.last = nn.ModuleList(each), nn.Linear(width, CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.characters(rows) + self.places
        for layer in self.layers:
            hidden = layer(hidden, self.mask)
        return self.last(hidden)

    def loss(self, rows: Tensor) -> Tensor:
        """rows: one character more than the model reads."""
        return F.cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def make_texts() -> tuple[Tensor, Tensor]:
    """To train with, and held out."""
    text = "".join(inspect.getsource(importlib.import_module(name)) for name in SOURCES.split())
    numbers = torch.tensor(list(text.encode("ascii", "ignore")))
    return numbers[: len(numbers) * 9 // 10], numbers[len(numbers) * 9 // 10 :]


def batches(text: Tensor, seed: int, rows: int = BATCH) -> Iterator[Tensor]:
    """Rows from random places, without end."""
    chance = torch.Generator().manual_seed(seed)
    while True:
        at = torch.randint(len(text) - LENGTH, (rows,), generator=chance)
        yield text[at[:, None] + torch.arange(LENGTH + 1)]


def held_out_loss(model: Characters, text: Tensor) -> float:
    """Mean over rows that are always the same."""
    rows = batches(text, 5, 32)
    with torch.no_grad():
        return sum(float(model.loss(next(rows))) for _ in range(10)) / 10


def make_inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))


def prepare(model: Characters, asked: argparse.Namespace) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer of a mode, and its trainer or None."""
    inner = make_inner(model)
    if asked.mode == "sync":
        return hvd.DistributedOptimizer(inner, model.named_parameters()), None
    if asked.mode == "torchft":
        from torchft_diloco import TorchftTrainer

        return inner, TorchftTrainer(model, inner, asked.sync_every, hvd.rank())
    if asked.mode == "local":
        return inner, hvd.LocalSGD(model, inner, sync_every=asked.sync_every)
    how = {"fragments": 4, "delay": asked.delay, "alpha": 0.5} if asked.mode.startswith("streaming") else {}
    if asked.mode.endswith("int4"):
        how["compression"] = hvd.Compression.int4
    return inner, hvd.DiLoCo(model, inner, sync_every=asked.sync_every, **how)


def bytes_sent() -> int:
    """By this rank to ranks on other hosts so far, votes included."""
    return hvd.stats()["totals"]["links"]["bytes_out"]


def exposed_seconds() -> float:
    """In which this rank has waited for collectives so far."""
    return hvd.stats()["totals"]["exposed_ms"] / 1e3


def card_bytes() -> int:
    """Sent by this host so far, headers included."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def one_step(model: Characters, optimizer: torch.optim.Optimizer, rows: Tensor) -> float:
    """Seconds in the optimizer's step."""
    optimizer.zero_grad()
    model.loss(rows).backward()
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began


def loss_over_bytes(asked: argparse.Namespace) -> dict:
    """Trains, and looks at the held-out loss (of rank 0's weights) every so many steps."""
    model, (text, held_out) = Characters(), make_texts()
    optimizer, trainer = prepare(model, asked)
    rows, curve = batches(text, 1000 * asked.seed + 100 + hvd.rank()), []
    hvd.barrier()
    before, began = bytes_sent(), time.perf_counter()
    for step in range(1, asked.steps + 1):
        one_step(model, optimizer, next(rows))
        if hvd.rank() == 0 and step % asked.every == 0:
            curve.append((step, bytes_sent() - before, held_out_loss(model, held_out)))
    if trainer is not None:
        trainer.finish()
    taken = time.perf_counter() - began
    sent = [bytes_sent() - before, math.fsum(float(p.double().sum()) for p in model.parameters())]
    everyone = hvd.allgather_object(sent, name="sent")
    if asked.mode == "torchft":
        trainer.close()
    return {
        "loss": held_out_loss(model, held_out), "bytes": sum(each[0] for each in everyone) / hvd.size(),
        "equal": all(each[1] == sent[1] for each in everyone), "seconds": taken, "curve": curve,
    }  # fmt: skip


def speed(asked: argparse.Namespace) -> dict:
    """Trains on two hosts against the clock: steps a second, waiting, and bytes of the first host's card."""
    model, (text, _) = Characters(), make_texts()
    optimizer, trainer = prepare(model, asked)
    rows = batches(text, 100 + hvd.rank(), asked.batch)
    for _ in range(WARM_UP):
        one_step(model, optimizer, next(rows))
    hvd.barrier()
    before, exposed, began, times = card_bytes(), exposed_seconds(), time.perf_counter(), []
    for _ in range(asked.steps):
        times.append(one_step(model, optimizer, next(rows)))
    taken, sent, exposed = time.perf_counter() - began, card_bytes() - before, exposed_seconds() - exposed
    if trainer is not None:
        trainer.finish()
    return {"seconds": taken, "bytes": sent, "times": times, "first": WARM_UP + 1, "exposed": exposed}


WORK: dict[str, Callable[[argparse.Namespace], dict]] = {"loss": loss_over_bytes, "islands": speed}


def options() -> argparse.ArgumentParser:
    """What low_communication.py says to a rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", choices=WORK)
    parser.add_argument("--mode", choices=(*MODES, "streaming-int4", "torchft"), required=True)
    for name, default in (
        ("sync-every", 20),
        ("delay", 3),
        ("seed", 0),
        ("steps", 300),
        ("every", 100),
        ("batch", BATCH),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def main() -> None:
    asked = options().parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(asked.seed)
    found = WORK[asked.work](asked)
    if hvd.rank() == 0:
        print(MARK + json.dumps(found), flush=True)
    hvd.shutdown()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
