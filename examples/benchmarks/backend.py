"""torch.distributed over hvdlite and over Gloo, by turns in one job: calls, a DDP step of ResNet-50, an FSDP2 step.

    hvdlite-run -np 2 python examples/benchmarks/backend.py
    hvdlite-run -np 2 python examples/benchmarks/backend.py --only step --patience quick

The default group is hvdlite's, a second one of the same ranks is Gloo's; each round does some calls over the one, then
over the other, and for all_reduce by hvd.allreduce_ as well. A call takes as long as on its slower rank. Of a training
step *exposed communication* is reported: the step's median less the median of the same step without any group. What of
it is DDP's own work (its copies and hooks) shows the column "own": DDP whose hook exchanges nothing. The last column is
Gloo's median over hvdlite's.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd

ROUNDS = {"full": 5, "quick": 3, "tiny": 1}
MODELS = {"full": (50, 64, 1000, 64), "quick": (50, 64, 1000, 64), "tiny": (10, 8, 10, 32)}
Calls = dict[str, Callable[[], object]]


def median_of(calls: Calls, repeat: int, rounds: int, warm: int = 3) -> "dict[str, float]":
    """Microseconds of each, by turns: the median of the rounds' medians, on the slower rank."""
    found: dict = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            times = []
            for _ in range(repeat if turn else warm):
                began = time.perf_counter_ns()
                call()
                times.append((time.perf_counter_ns() - began) / 1000)
            found[name] += [statistics.median(times)] if turn else []
    everyone = hvd.allgather_object({name: statistics.median(each) for name, each in found.items()})
    return {name: max(rank[name] for rank in everyone) for name in calls}


def row(work: str, us: "dict[str, float]") -> None:
    """One line of the table."""
    if dist.get_rank() == 0:
        numbers = "  ".join(f"{name} {value:9.1f}" for name, value in us.items())
        print(f"{work:34} {numbers}  Gloo / hvdlite {us['gloo'] / max(us['hvdlite'], 0.1):5.1f}", flush=True)


def calls(groups: dict, rounds: int, tiny: bool) -> None:
    """Collectives of several sizes."""
    size = dist.get_world_size()
    for count, repeat in ((4, 300), (4096, 300), (65536, 150), (1 << 20, 40), (16 << 20, 6)):
        if tiny and count > 65536:
            break
        whole, part = torch.ones(max(count // 4, size)), torch.ones(max(count // 4 // size, 1))
        whole = whole[: part.numel() * size]
        other = whole.clone()
        works = {
            "all_reduce": lambda group, t=whole: dist.all_reduce(t, group=group),
            "all_gather_single": lambda group, t=whole, p=part: dist.all_gather_into_tensor(t, p, group=group),
            "reduce_scatter_single": lambda group, t=whole, p=part: dist.reduce_scatter_tensor(p, t, group=group),
            "all_to_all_single": lambda group, t=whole, o=other: dist.all_to_all_single(o, t, group=group),
            "broadcast": lambda group, t=whole: dist.broadcast(t, 0, group=group),
        }
        for work, call in works.items():
            turns: Calls = {name: lambda g=group, c=call: c(g) for name, group in groups.items()}
            if work == "all_reduce":
                turns["hvd.allreduce_"] = lambda t=whole: hvd.allreduce_(t, op=hvd.Sum)
            row(f"{work} {count} B", median_of(turns, 3 if tiny else repeat, rounds))


def resnet(patience: str) -> "tuple[torch.nn.Module, torch.Tensor, torch.Tensor]":
    """The model of examples/04, and made-up images."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    depth, width, classes, pixels = MODELS[patience]
    torch.manual_seed(1)
    model = importlib.import_module("04_train_resnet").resnet(depth, width, classes)
    return model, torch.randn(2, 3, pixels, pixels), torch.randint(classes, (2,))


def transformer(patience: str) -> "tuple[torch.nn.Module, torch.Tensor, torch.Tensor]":
    """Six layers of 384 with an embedding and a head of 4096: 14 million parameters."""
    torch.manual_seed(1)
    wide, vocabulary = (384, 4096) if patience != "tiny" else (48, 64)
    layers = [
        torch.nn.TransformerEncoderLayer(wide, 6, 4 * wide, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(6)
    ]
    model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, wide), *layers, torch.nn.Linear(wide, vocabulary))
    tokens = torch.randint(vocabulary, (2, 64))
    return model, tokens, tokens.flatten()


def step(model: torch.nn.Module, rows: torch.Tensor, wanted: torch.Tensor) -> "Callable[[], None]":
    """A training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def work() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(rows).flatten(0, -2), wanted).backward()
        optimizer.step()

    return work


def exchanges_nothing(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP's."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def steps(groups: dict, rounds: int, patience: str) -> None:
    """DDP and FSDP2 over each group, and the same model alone."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    for name, make, more in (("DDP", resnet, {}), ("DDP, views", resnet, {"gradient_as_bucket_view": True})):
        model, *data = make(patience)
        idle = DistributedDataParallel(model, process_group=groups["hvdlite"], **more)
        idle.register_comm_hook(None, exchanges_nothing)
        turns = {"alone": step(*make(patience)), "own": step(idle, *data)}
        for each, group in groups.items():
            model, *data = make(patience)
            turns[each] = step(DistributedDataParallel(model, process_group=group, **more), *data)
        us = median_of(turns, 1 if patience == "tiny" else 4, rounds)
        row(f"{name}: step", us)
        row(f"{name}: exposed", {each: us[each] - us["alone"] for each in ("own", *groups)})
    turns = {}
    for each, group in groups.items():
        model, *data = transformer(patience)
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model[1:-1]:
            fully_shard(layer, mesh=mesh)
        turns[each] = step(fully_shard(model, mesh=mesh), *data)
    row("FSDP2: step", median_of(turns, 1 if patience == "tiny" else 3, rounds))


def main() -> None:
    words = argparse.ArgumentParser(description="torch.distributed over hvdlite beside Gloo.")
    words.add_argument("--only", choices=("calls", "step"))
    words.add_argument("--patience", choices=tuple(ROUNDS), default="full")
    args = words.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("hvdlite")
    groups = {"hvdlite": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rounds, tiny = ROUNDS[args.patience], args.patience == "tiny"
    if args.only != "step":
        calls(groups, rounds, tiny)
    if args.only != "calls":
        steps(groups, rounds, args.patience)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
