"""Trains a GPT that is divided three ways: layers into stages, each layer over ranks, the batch over copies.

    hvdlite-run -np 8 python examples/14_pipeline.py                  # 2 copies x 2 stages x 2 parts of each layer
    hvdlite-run -np 4 python examples/14_pipeline.py                  # 1 x 2 x 2
    hvdlite-run -np 2 python examples/14_pipeline.py --tp 1           # two stages of whole layers
    hvdlite-run -np 8 python examples/14_pipeline.py --check          # compare with the same training in one process
    hvdlite-run -np 4 python examples/14_pipeline.py --schedule continuous --update 2bw

Mesh(dp=2, pp=2, tp=2) puts 8 ranks on a grid:         stage 0          stage 1
                                              copy 0   ranks 0 and 1    ranks 2 and 3
                                              copy 1   ranks 4 and 5    ranks 6 and 7

A copy learns from its own batch, in micro-batches that pass through the stages one after the other. Each of the two
ranks of a stage has half of each layer. The text is source code of Python's own library, and the model learns its next
character.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel

WORDS, LENGTH, WIDTH, HEADS, DEPTH = 128, 32, 32, 4, 4  # characters are the words
ROWS, MICRO_BATCHES = 8, 4  # of each copy


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A GPT on copies x stages x parts of layers.")
    parser.add_argument("--dp", type=int, default=-1, help="copies of the model; -1: as many as there are ranks for")
    parser.add_argument("--pp", type=int, default=2, help="stages")
    parser.add_argument("--tp", type=int, default=2, help="ranks that a layer is cut over")
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "continuous"])
    parser.add_argument("--update", default="flush", choices=["flush", "stash", "vertical", "2bw", "pipemare"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again, and do not keep them")
    parser.add_argument("--clip", type=float, help="the largest norm of the gradient of the whole model")
    parser.add_argument("--sgd", action="store_true", help="SGD, and not AdamW")
    parser.add_argument("--save", help="a file for the weights, with the names and shapes of one process")
    parser.add_argument("--check", action="store_true", help="train in one process as well, and compare")
    args = parser.parse_args()
    needed = args.pp * args.tp * max(args.dp, 1)
    if min(args.pp, args.tp) < 1 or (hvd.size() % needed if args.dp == -1 else hvd.size() != needed):
        raise SystemExit(
            f"14_pipeline: a mesh of {args.dp} x {args.pp} x {args.tp} does not fit the {hvd.size()} ranks of this "
            f"job: start it with hvdlite-run -np {needed}, or change --dp, --pp and --tp"
        )
    if HEADS % args.tp or args.pp > DEPTH + 2:
        raise SystemExit(f"14_pipeline: --tp must divide {HEADS} heads, and --pp be {DEPTH + 2} layers at most")
    if args.check and args.update != "flush":
        raise SystemExit(f"14_pipeline: --update {args.update} trains otherwise than one process: leave --check out")
    return args


class Embed(nn.Module):
    """Characters (rows, length) become (rows, length, width)."""

    def __init__(self, tp: "hvd.ProcessSet | Alone") -> None:
        super().__init__()
        self.words, self.places = parallel.VocabEmbedding(WORDS, WIDTH, tp), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.places.weight[: ids.shape[1]]


class Block(nn.Module):
    """Attention and a perceptron, (rows, length, width) both ways. Each rank of tp has its share of heads."""

    def __init__(self, tp: "hvd.ProcessSet | Alone") -> None:
        super().__init__()
        self.one, self.two, head = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), WIDTH // HEADS
        self.qkv = parallel.ColumnLinear(WIDTH, 3 * WIDTH, tp, unit=3 * head)
        self.out = parallel.RowLinear(WIDTH, WIDTH, tp, unit=head)
        self.up, self.down = parallel.ColumnLinear(WIDTH, 4 * WIDTH, tp), parallel.RowLinear(4 * WIDTH, WIDTH, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.one(x)).unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.two(x))))


class Head(nn.Module):
    """(rows, length, width) becomes (rows, length, this rank's part of the words)."""

    def __init__(self, tp: "hvd.ProcessSet | Alone") -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(WIDTH), parallel.ColumnLinear(WIDTH, WORDS, tp, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(x))


class Alone:
    """A group of one, in which layers are whole."""

    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


def gpt(tp: "hvd.ProcessSet | Alone") -> "list[nn.Module]":
    """The layers. Their weights come from the seed and are the same on any mesh."""
    torch.manual_seed(1)
    return [Embed(tp), *(Block(tp) for _ in range(DEPTH)), Head(tp)]


def optimizer_of(model: nn.Module, sgd: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1) if sgd else torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(text: torch.Tensor, step: int, copy: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """What a copy reads in a step, and the characters that follow: (rows, length) each."""
    g = torch.Generator().manual_seed(1000 * step + copy)
    at = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=g) + torch.arange(LENGTH)
    return text[at], text[at + 1]


def train(args: argparse.Namespace) -> None:
    mesh = hvd.Mesh(dp=args.dp, pp=args.pp, tp=args.tp)
    copy, tp = mesh.coordinate("dp"), mesh.group("tp")
    files = sorted(Path(os.__file__).parent.glob("a*.py"))
    text = torch.tensor([min(c, WORDS - 1) for c in b"".join(f.read_bytes() for f in files)[:200_000]])

    stage = parallel.split(gpt(tp), mesh, parallel.partition([1, *[4] * DEPTH, 2], args.pp))
    optimizer = optimizer_of(stage, args.sgd)
    pipe = parallel.Pipeline(
        stage, optimizer, mesh, lambda scores, y: parallel.vocab_cross_entropy(scores, y, WORDS, tp), MICRO_BATCHES,
        args.schedule, args.update, checkpoint=args.checkpoint, clip=args.clip,
    )  # fmt: skip
    mine = sum(p.numel() for p in stage.parameters())
    place = f"copy {copy}, stage {mesh.coordinate('pp')}, part {tp.rank()}"
    print(f"rank {hvd.rank()}: {place}: layers {', '.join(dict(stage.named_children()))}, {mine:,} parameters")
    if hvd.rank() == 0:
        print(pipe.explain())

    losses, norms, copies = [], [], mesh.group("dp") if mesh.shape["dp"] > 1 else None
    for step in range(args.steps):
        loss = pipe.step(*batch(text, step, copy))  # of this copy, on the last stage; None on the others
        norms.append(pipe.finish.norm)
        if loss is not None:
            losses.append((hvd.allreduce(loss, name="loss", process_set=copies) if copies else loss).item())
            if tp.rank() == copy == 0 and step % 20 == 0:
                print(f"step {step:4}  loss {losses[-1]:.4f}", flush=True)
    pipe.drain()
    losses = hvd.broadcast_object(losses, hvd.size() - 1)  # a rank of the last stage
    loss = pipe.evaluate(*batch(text, args.steps, copy), everywhere=True)
    loss = hvd.allreduce(loss, name="loss").item()
    weights = parallel.whole_state(stage, mesh)  # rank 0 gets them
    if weights is not None:
        print(f"evaluated on other text: loss {loss:.6f}")
        if args.save:
            torch.save(weights, args.save)
        if args.check:
            compare(args, text, mesh.shape["dp"], losses, norms, weights)


def compare(
    args: argparse.Namespace, text: torch.Tensor, copies: int, losses: list, norms: list, weights: dict
) -> None:
    """With what one process does that has the whole model, and the batches of all copies as one."""
    whole = nn.Sequential(*gpt(Alone))
    optimizer = optimizer_of(whole, args.sgd)

    def loss_of(step: int) -> torch.Tensor:
        x, y = (torch.cat(parts) for parts in zip(*(batch(text, step, copy) for copy in range(copies))))
        return F.cross_entropy(whole(x).flatten(0, 1), y.flatten())

    apart = [0.0]
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        apart.append(abs(loss.item() - losses[step]))
        if args.clip is not None:
            apart.append(abs(nn.utils.clip_grad_norm_(whole.parameters(), args.clip).item() - norms[step]))
        optimizer.step()
    what = "losses" if args.clip is None else "losses and norms"
    print(f"{what} differ from those of one process by {max(apart):.1e} at most")
    apart = [(weights[name] - weight).abs().max().item() for name, weight in whole.named_parameters()]
    print(f"weights differ from those of one process by {max(apart):.1e} at most")
    parallel.load_whole(whole, weights)
    print(f"evaluated in one process, with the weights of all ranks: loss {loss_of(args.steps).item():.6f}")


if __name__ == "__main__":
    hvd.init()
    train(arguments())
