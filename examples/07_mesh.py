"""Splits a network over a mesh of ranks: the data along one axis, the layers along the other.

    hvdlite-run -np 4 python examples/07_mesh.py                      # 2 x 2 ranks
    hvdlite-run -np 4 python examples/07_mesh.py --check              # compare with the same training in one process
    hvdlite-run -np 8 python examples/07_mesh.py --dp 2 --tp 4 --hidden 8192

Mesh(dp=2, tp=2) puts 4 ranks on a grid:     tp 0      tp 1
                                      dp 0   rank 0    rank 1     one half of the batch
                                      dp 1   rank 2    rank 3     the other half

The hidden units are divided along tp. Each rank computes its share of them and a part of the scores. An allreduce along
tp adds the parts, and gradients flow back through it. A DistributedOptimizer on the process set of dp averages
gradients between the ranks that hold the same share.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hvdlite.torch as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Data and tensor parallelism on a mesh of ranks.")
    parser.add_argument("--dp", type=int, default=2, help="ranks along the axis of data parallelism")
    parser.add_argument("--tp", type=int, default=2, help="ranks along the axis of tensor parallelism")
    parser.add_argument("--hidden", type=int, default=128, help="hidden units, divided over --tp ranks")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="over all ranks together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="train in one process as well, and compare the weights")
    args = parser.parse_args()
    needed = args.dp * args.tp
    if hvd.size() != needed:
        raise SystemExit(
            f"07_mesh: a mesh of {args.dp} x {args.tp} needs {needed} ranks, and this job has {hvd.size()}: start it "
            f"with hvdlite-run -np {needed}, or change --dp and --tp"
        )
    if args.hidden % args.tp or args.batch_size % args.dp:
        raise SystemExit("07_mesh: --hidden must be a multiple of --tp, and --batch-size one of --dp")
    return args


class Whole(nn.Module):
    """The network in one process: images (n, inside) to scores (n, outside)."""

    def __init__(self, inside: int, hidden: int, outside: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inside, hidden), nn.Linear(hidden, outside, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(images)))


class Divided(nn.Module):
    """This rank's share of the hidden units of a whole network. Same results, on all ranks of the set."""

    def __init__(self, whole: Whole, tp: hvd.ProcessSet) -> None:
        super().__init__()
        self.tp = tp
        first, second = whole.first, whole.second
        share = first.out_features // tp.size()
        mine = slice(tp.rank() * share, (tp.rank() + 1) * share)
        self.first = nn.Linear(first.in_features, share)
        self.second = nn.Linear(share, second.out_features, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(first.weight[mine])
            self.first.bias.copy_(first.bias[mine])
            self.second.weight.copy_(second.weight[:, mine])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        part = self.second(F.relu(self.first(images)))
        return hvd.allreduce(part, op=hvd.Sum, name="scores", process_set=self.tp)

    def gathered(self) -> "dict[str, torch.Tensor]":
        """The weights of the whole network, for a checkpoint. A call of all ranks of the set."""
        bias = hvd.allgather(self.first.bias.detach(), name="bias", process_set=self.tp)
        first = hvd.allgather(self.first.weight.detach(), name="first", process_set=self.tp)
        second = hvd.allgather(self.second.weight.detach().T, name="second", process_set=self.tp)
        return {"first.weight": first, "first.bias": bias, "second.weight": second.T}


def train_whole(whole: Whole, batches: "list[torch.Tensor]", x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
    """What the mesh does, in one process."""
    optimizer = torch.optim.SGD(whole.parameters(), lr=lr, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(whole(x[batch]), y[batch]).backward()
        optimizer.step()


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    learnt = len(x) * 8 // 10
    shuffled = torch.randperm(len(x))
    batches = [
        batch
        for _ in range(args.epochs)
        for batch in shuffled[:learnt][torch.randperm(learnt)].split(args.batch_size)
        if len(batch) == args.batch_size
    ]

    mesh = hvd.Mesh(dp=args.dp, tp=args.tp)
    dp, tp = mesh.group("dp"), mesh.group("tp")
    whole = Whole(x.shape[1], args.hidden, 10)
    model = Divided(whole, tp)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=dp)
    share = f"share {tp.rank()} of {tp.size()} of {args.hidden} hidden units"
    print(f"rank {hvd.rank()}: dp {dp.rank()}, tp {tp.rank()}, {share}")

    for step, batch in enumerate(batches):
        mine = batch.chunk(args.dp)[dp.rank()]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[mine]), y[mine])
        # All ranks of tp have this loss. Gradients are those of the sum over ranks, so the loss counts once.
        (loss / args.tp).backward()
        optimizer.step()
        if step % (len(batches) // 4) == 0:
            loss = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step:4}  loss {loss:.4f}")

    test = shuffled[learnt:].tensor_split(args.dp)[dp.rank()]
    with torch.no_grad():
        right = (model(x[test]).argmax(1) == y[test]).sum()
    right = hvd.allreduce(right, op=hvd.Sum, name="right", process_set=dp).item()
    gathered = model.gathered()
    if hvd.rank() == 0:
        print(f"test accuracy {right / (len(x) - learnt):.2%}")
        if args.check:
            train_whole(whole, batches, x, y, args.lr)
            apart = max((gathered[name] - weight).abs().max().item() for name, weight in whole.named_parameters())
            print(f"weights differ from those of one process by {apart:.1e} at most")


if __name__ == "__main__":
    hvd.init()
    train(arguments())
