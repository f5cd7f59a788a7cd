"""Predicts clicks: embeddings with their rows on servers and dense layers with allreduce, in one step.

    hvdlite-run -np 2 --servers 2 python examples/18_click_through.py
    hvdlite-run -np 2 --servers 2 python examples/18_click_through.py --staleness none --replicas 2 --save /data/clicks
    hvdlite-run -np 2 --servers 2 python examples/18_click_through.py --rows 2000000 --dim 64 --limit-mb 300

The logs are synthetic. A line has one id in each of six fields. Few ids are frequent and most are rare (Zipf's law).
Each id has a hidden weight. The logit of a click is the sum of the line's weights, plus a product of two of them. A
model that predicts the same value for every line has an AUC of 0.5.

A rank pulls the rows of its batch and pushes their gradients. It receives nothing else of the table. --limit-mb shows
this: it limits the memory of each rank, also to less than the table needs. Only the servers hold the table.
"""

import argparse
import resource
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import hvdlite.torch as hvd

FIELDS, HELD_OUT, TOLD = 6, 20_000, 50


def hidden(rows: np.ndarray) -> np.ndarray:
    """The weight of each row: a function of its number, so nobody has to keep a table of them."""
    return 2.0 * np.sin(12.9898 * (rows + 1))


def lines(count: int, rows: int, *seed: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """(rows of the table [count, FIELDS], clicks [count])."""
    random, each = np.random.default_rng(seed), rows // FIELDS
    ids = (each ** random.random((count, FIELDS))).astype(np.int64) - 1  # P(id) falls as 1 / (id + 1)
    ids += np.arange(FIELDS) * each
    weights = hidden(ids)
    logits = weights.sum(axis=1) + weights[:, 0] * weights[:, 1]
    clicks = random.random(count) < 1 / (1 + np.exp(-logits))
    return torch.from_numpy(ids), torch.from_numpy(clicks.astype(np.float32))


def auc(scores: np.ndarray, clicks: np.ndarray) -> float:
    """How often a line with a click has a higher score than one without; equal scores count half."""
    without = np.sort(scores[clicks == 0])
    below = [np.searchsorted(without, scores[clicks == 1], side) for side in ("left", "right")]
    return float((below[0] + below[1]).mean() / 2 / len(without))


def limit(megabytes: int, table: hvd.ps.Table) -> None:
    """From now on this process can take so much more address space."""
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    size = 2 * 4 * table.rows * table.dim  # Adagrad keeps a number beside each number
    try:
        np.empty(size, np.uint8)
    except MemoryError:
        print(f"rank {hvd.rank()} cannot hold the table: {size / 1e6:,.0f} MB do not fit in {megabytes} MB", flush=True)


class ClickThrough(nn.Module):
    """The embedding has no parameters: its rows are the table's."""

    def __init__(self, table: hvd.ps.Table) -> None:
        super().__init__()
        self.embedding = hvd.ps.Embedding(table)
        self.tower = nn.Sequential(nn.Linear(FIELDS * table.dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tower(self.embedding(ids).flatten(1)).squeeze(1)


def train(model: ClickThrough, table: hvd.ps.Table, steps: int, batch: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    before, began, losses = hvd.ps.stats()["rank"], time.monotonic(), []
    for step in range(1, steps + 1):
        ids, clicks = lines(batch, table.rows, 1, hvd.rank(), step)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(ids), clicks)
        loss.backward()  # pushes rows while allreduce averages the tower's gradients
        optimizer.step()
        table.step()  # ends this rank's step
        losses.append(loss.item())
        if step % TOLD == 0 or step == steps:
            mean = hvd.allreduce(torch.tensor(losses).mean())
            if hvd.rank() == 0:
                print(f"step {step} loss {mean:.4f}", flush=True)
            losses.clear()
    table.flush()  # servers have all that this rank has pushed
    hvd.barrier()
    seconds, after, dense = time.monotonic() - began, hvd.ps.stats()["rank"], 4 * table.rows * table.dim
    moved = sum(after[way] - before[way] for way in ("bytes_in", "bytes_out")) / steps
    if hvd.rank() == 0:
        print(f"a step moves {moved:,.0f} bytes; the gradient of a dense table has {dense:,} ({moved / dense:.1%})")
        print(f"{steps * batch * FIELDS * hvd.size() / seconds:,.0f} rows a second are looked up", flush=True)


def evaluate(model: ClickThrough, table: hvd.ps.Table) -> None:
    ids, clicks = lines(HELD_OUT, table.rows, 2)
    with table.frozen(), torch.no_grad():
        logits = torch.cat([model(part) for part in ids.split(1000)])
    loss = F.binary_cross_entropy_with_logits(logits, clicks)
    print(f"held out: loss {loss:.4f} AUC {auc(logits.numpy(), clicks.numpy()):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Click-through prediction with a table on servers.")
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=512, help="lines of each rank")
    steps_or_none = {"type": lambda text: None if text == "none" else int(text), "metavar": "STEPS"}
    parser.add_argument("--staleness", default=0, help="0, a number of steps, or none", **steps_or_none)
    parser.add_argument("--replicas", type=int, default=1, help="copies of each row, on different servers")
    parser.add_argument("--load", help="folder of a save; it may be of another number of servers")
    parser.add_argument("--save", help="folder that all servers reach")
    parser.add_argument("--limit-mb", type=int, help="address space that a rank may take once the table exists")
    args = parser.parse_args()
    hvd.init()
    table = hvd.ps.Table(
        "clicks", args.rows, args.dim, hvd.ps.Adagrad(lr=0.1), args.staleness, args.replicas,
        init=hvd.ps.uniform(0.05, seed=1),
    )  # fmt: skip
    if args.limit_mb:
        limit(args.limit_mb, table)
    torch.manual_seed(hvd.rank())
    model = ClickThrough(table)
    if args.load:
        table.load(args.load)
        model.load_state_dict(torch.load(f"{args.load}/tower.pt"))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if args.steps:
        train(model, table, args.steps, args.batch)
    if hvd.rank() == 0:
        evaluate(model, table)
    hvd.check_consistency(model)
    if hvd.rank() == 0:
        print("dense layers equal on all ranks", flush=True)
    if args.save:
        table.save(args.save)  # rows with Adagrad's state; creates the folder
        if hvd.rank() == 0:
            torch.save(model.state_dict(), f"{args.save}/tower.pt")


if __name__ == "__main__":
    main()
