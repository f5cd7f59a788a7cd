"""Divides axial attention over ranks: the cut moves from one axis to the other during other computation.

    hvdlite-run -np 4 python examples/15_axial_attention.py             # cut over 4 ranks, with the time
    hvdlite-run -np 4 python examples/15_axial_attention.py --check     # compare with one process, and count bytes
    hvdlite-run -np 4 python examples/15_axial_attention.py --check --wrong

This is the dynamic axial parallelism of FastFold, a model of protein folding. There are two representations: m
(sequences, residues, c) and z (residues, residues, c). Each rank has a part of their rows. Attention along a row needs
no other rank. Then the cut moves to the other axis, and attention along a column needs no other rank either. Parameters
are on all ranks, and their gradients are summed.

A gathered tensor meets a tensor that is cut, so each rank's gradient for it is a part of a sum. from_sequence adds the
parts. With --wrong the program uses gather_from, which keeps the rank's own part only, and the gradients are wrong.
"""

import argparse
import time

import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite import parallel


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Axial attention over ranks.")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--residues", type=int, default=12)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--check", action="store_true", help="compare with one process, and count bytes")
    parser.add_argument("--wrong", action="store_true", help="gather with the wrong gradient")
    args = parser.parse_args()
    if args.sequences % hvd.size() or args.residues % hvd.size() or args.width % Attention.HEADS:
        raise SystemExit(
            f"15_axial_attention: --sequences and --residues must be multiples of the {hvd.size()} ranks, and --width "
            f"one of {Attention.HEADS} heads"
        )
    return args


class Alone:
    """A group of one, in which nothing is cut."""

    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


class Attention(nn.Module):
    """Along dimension 1 of (batch, length, c)."""

    HEADS = 4

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(c), nn.Linear(c, 3 * c), nn.Linear(c, c)

    def forward(self, x: torch.Tensor, bias: "torch.Tensor | float" = 0.0) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


def change(c: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.ReLU(), nn.Linear(4 * c, c))


class Axial(nn.Module):
    """m and z both ways: this rank's rows of them."""

    def __init__(self, c: int, group: "hvd.ProcessSet | Alone", wrong: bool = False) -> None:
        super().__init__()
        self.group, self.gather = group, parallel.gather_from if wrong else parallel.from_sequence
        self.rows, self.columns, self.change = Attention(c), Attention(c), change(c)
        self.zrows, self.zcolumns, self.zchange = Attention(c), Attention(c), change(c)
        self.bias = nn.Linear(c, Attention.HEADS, bias=False)
        self.a, self.b, self.outer = nn.Linear(c, 4), nn.Linear(c, 4), nn.Linear(16, c)

    def forward(self, m: torch.Tensor, z: torch.Tensor) -> "tuple[torch.Tensor, torch.Tensor]":
        bias = self.gather(self.bias(z), 0, self.group, "bias")
        m = self.rows(m, bias.permute(2, 0, 1))
        begun = parallel.start_switch(m, 1, 0, self.group, "m")  # m travels to be cut by residues
        z = z + self.zchange(z)  # meanwhile
        m = parallel.finish_switch(begun)
        m = self.columns(m.transpose(0, 1)).transpose(0, 1)
        m = m + self.change(m)
        b = self.gather(self.b(m), 1, self.group, "outer")
        z = z + self.outer(torch.einsum("sie,sjf->ijef", self.a(m), b).flatten(2) / m.shape[0])
        begun = parallel.start_switch(m, 0, 1, self.group, "back")  # m travels back
        z = self.zrows(z)  # meanwhile
        z = parallel.switch_axis(z, 1, 0, self.group, "z")
        z = self.zcolumns(z.transpose(0, 1)).transpose(0, 1)
        z = parallel.switch_axis(z, 0, 1, self.group, "zback")
        return parallel.finish_switch(begun), z


def step(model: Axial, given: "list[torch.Tensor]", weights: "list[torch.Tensor]") -> "tuple[torch.Tensor, ...]":
    """The results, and in the parameters the gradients of their weighted sum."""
    model.zero_grad()
    results = model(*given)
    sum((result * weight).sum() for result, weight in zip(results, weights)).backward()
    return results


def check(args: argparse.Namespace, model: Axial, whole: Axial, results: tuple, expected: tuple, given: list) -> None:
    """Results, gradients and bytes against one process and the formula. A call of all ranks."""
    n, me = hvd.size(), hvd.rank()
    off = max((part - t.chunk(n)[me]).abs().max().item() for part, t in zip(results, expected))
    pairs = zip(model.parameters(), whole.parameters())
    wrong = max(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)
    off, wrong = hvd.allreduce(torch.tensor([off, wrong]), op=hvd.Max, name="off").tolist()
    before = hvd.counters()["elements"]
    with torch.no_grad():
        model(*given)
    counted = hvd.counters()["elements"] - before
    s, r, c = args.sequences, args.residues, args.width
    switched = 2 * (s * r * c + r * r * c) // n  # m and z, each there and back
    gathered = (Attention.HEADS * r * r + 4 * s * r) // n
    counts = 4 * n + 2  # numbers of rows that arrive: from each rank of a switch, and in a gather
    if me == 0:
        print(f"results differ from those of one process by {off:.1e}, gradients by {wrong:.1e} of the largest")
    if me == 0 and n > 1:
        print(f"elements of a forward: counted {counted}, expected {switched + gathered + counts}")
        print(f"4 switches move {switched * 4 * (n - 1) // n} bytes off each rank: (n - 1) / n of its parts")


def main() -> None:
    args = arguments()
    n, me = hvd.size(), hvd.rank()
    torch.manual_seed(1)
    whole = Axial(args.width, Alone)
    torch.manual_seed(1)  # the same weights
    model = Axial(args.width, hvd.global_process_set, args.wrong)
    shapes = [(first, args.residues, args.width) for first in (args.sequences, args.residues)]
    given, weights = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    mine, my_weights = ([t.chunk(n)[me] for t in pair] for pair in (given, weights))

    start = time.perf_counter()
    for _ in range(args.steps):
        results = step(model, mine, my_weights)
        hvd.grouped_allreduce_([p.grad for p in model.parameters()], op=hvd.Sum, name="gradients")
    if me == 0:
        print(f"{n} ranks: {(time.perf_counter() - start) / args.steps * 1e3:.1f} ms a step")
    if args.check:
        check(args, model, whole, results, step(whole, given, weights), mine)


if __name__ == "__main__":
    hvd.init()
    main()
