"""Trains a small transformer in mixed precision on the text of Python's standard library, character by character.

    hvdlite-run -np 2 python examples/05_language_model.py                        # a minute or two
    hvdlite-run -np 2 python examples/05_language_model.py --amp float16          # with a GradScaler
    hvdlite-run -np 8 python examples/05_language_model.py --text novel.txt --width 512 --layers 8 --heads 8 \\
        --length 512 --batch-size 16 --accumulate 4 --steps 20000                 # real sizes

The training loop is the one for a single process. Autocast, gradient accumulation, unscaling, clipping and stepping
need no extra calls. Gradients are averaged when the last backward pass of a step ends. Clipping and GradScaler see the
average, so all ranks clip by the same factor and skip the same steps. A step uses ranks * accumulate batches: one rank
with --accumulate 4 learns the same as two ranks with --accumulate 2.
"""

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hvdlite.torch as hvd

SYMBOLS = 256  # a character is a byte


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character language model.")
    parser.add_argument("--text", type=Path, default=Path(os.__file__).parent, help="a file, or a folder of .py files")
    parser.add_argument("--characters", type=int, default=500_000, help="read at most so many")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="characters in a sequence")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per backward pass and rank")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of a gradient")
    parser.add_argument("--amp", choices=("none", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--every", type=int, default=50, help="steps between reports")
    parser.add_argument("--write", type=int, default=200, help="characters to write in the end")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def read(path: Path, characters: int) -> torch.Tensor:
    """The text as bytes, (n,) of uint8; the same on all ranks, for rank 0 reads it."""
    text = None
    if hvd.rank() == 0:
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        text = b"".join(file.read_bytes() for file in files)[:characters]
    text = hvd.broadcast_object(text, root_rank=0)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def divide(text: torch.Tensor, piece: int = 2000) -> "tuple[torch.Tensor, torch.Tensor]":
    """Every tenth piece of the text is held out, the others are learnt."""
    pieces = text.split(piece)
    rest = [part for i, part in enumerate(pieces) if i % 10 != 9]
    return torch.cat(rest), torch.cat(pieces[9::10] or rest)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        shape = (n, length, self.heads, width // self.heads)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.look(self.norm1(x)).chunk(3, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.think(self.norm2(x))


class Writer(nn.Module):
    """Characters (n, length) of int64 to scores of the next one (n, length, SYMBOLS), float32."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.length = args.length
        self.symbol, self.place = nn.Embedding(SYMBOLS, args.width), nn.Embedding(args.length, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, SYMBOLS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.symbol(text) + self.place.weight[: text.shape[1]]))).float()


def batch(text: torch.Tensor, args: argparse.Namespace, number: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """The batch of this number: characters and the ones that follow them, (batch_size, length) of int64 each."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
    starts = torch.randint(len(text) - args.length, (args.batch_size, 1), generator=generator)
    rows = text[starts + torch.arange(args.length + 1)].long()
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def test(model: Writer, text: torch.Tensor, args: argparse.Namespace) -> float:
    """Loss on this rank's batch of a text."""
    inputs, following = batch(text, args, hvd.rank())
    return F.cross_entropy(model(inputs).flatten(0, 1), following.flatten()).item()


@torch.no_grad()
def write(model: Writer, start: bytes, count: int) -> str:
    """Continue `start` by `count` characters."""
    text = torch.tensor([list(start)])
    for _ in range(count):
        scores = model(text[:, -model.length :])[:, -1]
        text = torch.cat([text, torch.multinomial((scores / 0.7).softmax(1), 1)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    learnt, held_out = divide(read(args.text, args.characters))
    if min(len(learnt), len(held_out)) <= args.length:
        raise SystemExit(f"05_language_model: {args.text} is too short a text for --length {args.length}")
    model = Writer(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    hvd.broadcast_state(model, optimizer)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=args.accumulate
    )

    scaler = torch.amp.GradScaler("cpu", enabled=args.amp == "float16")
    half = contextlib.nullcontext() if args.amp == "none" else torch.autocast("cpu", dtype=getattr(torch, args.amp))
    started = time.perf_counter()
    for step in range(args.steps):
        optimizer.zero_grad()
        total = 0.0
        for i in range(args.accumulate):
            inputs, following = batch(learnt, args, (step * hvd.size() + hvd.rank()) * args.accumulate + i)
            with half:
                loss = F.cross_entropy(model(inputs).flatten(0, 1), following.flatten()) / args.accumulate
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            losses = hvd.allreduce(torch.tensor([total, test(model, held_out, args)]), name="losses")
            rate = (step + 1) * hvd.size() * args.accumulate * args.batch_size * args.length
            if hvd.rank() == 0:
                print(
                    f"step {step + 1:5}  loss {losses[0]:.4f}  held out {losses[1]:.4f}  gradient {norm:.3f}  "
                    f"{rate / (time.perf_counter() - started):,.0f} characters/s"
                )
    if hvd.rank() == 0 and args.write:
        print(write(model, b"def ", args.write))


if __name__ == "__main__":
    hvd.init()
    train(arguments())
