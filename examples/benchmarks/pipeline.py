"""A step of a pipeline beside what its list of actions says, and beside torch.distributed.pipelining over Gloo.

    hvdlite-run -np 2 python examples/benchmarks/pipeline.py     # one minute
    hvdlite-run -np 4 python examples/benchmarks/pipeline.py --only sleep

Each rank is a stage. First the stages sleep, 10 ms in a forward and 20 in a backward, so that the processors do not
limit them: `list` is the makespan that `schedule.check` computes for these times, in which a message takes none, and
`slept` the same for the sleeps as long as they were (median), since a busy machine wakes late. Then they compute, each
two layers of a perceptron, and `alone` is one process that does the work of all stages.

hvdlite and torch train the same stages in the same processes by turns, after a barrier of all ranks. A step takes as
long as on its slowest rank; reported is the median of all turns, in milliseconds. torch has no schedule that goes on
over updates, as "continuous" does; there a turn is six steps and the drain, and `list` says the same.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import hvdlite.torch as hvd
from hvdlite import parallel
from hvdlite.parallel import schedule as schedules

FORWARD_S, NUMBERS, IN_A_TURN = 0.010, 4096, 6
TURNS = {"full": 21, "quick": 7, "tiny": 1}
# (width, rows of a micro-batch): what travels is 16, 128 and 256 KB
SHAPES = {"full": ((256, 16), (512, 64), (1024, 64)), "quick": ((256, 16), (512, 64)), "tiny": ((32, 2),)}
TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
Turn = Callable[[], object]


class Nap(torch.autograd.Function):
    """Sleeps in forward, and twice as long in backward; keeps how long it was. Each of several chunks of a stage sleeps
    for its share."""

    slept: "dict[str, list[float]]" = {"F": [], "B": []}
    chunks = 1

    @staticmethod
    def sleep(what, seconds):
        began = time.perf_counter()
        time.sleep(seconds / Nap.chunks)
        Nap.slept[what].append((time.perf_counter() - began) * 1e3 * Nap.chunks)

    @staticmethod
    def forward(ctx, x, weight):
        Nap.sleep("F", FORWARD_S)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        Nap.sleep("B", 2 * FORWARD_S)
        return gradient, gradient.sum().view(1)


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Nap.apply(x, self.weight)


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


def sgd(stage: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(stage.parameters(), lr=0.01)


def ours(stage: nn.Module, data: "tuple[torch.Tensor, torch.Tensor]", m: int, **rest: str) -> Turn:
    """A turn of hvdlite's pipeline: one step, or several if the schedule goes on over updates."""
    pipe = parallel.Pipeline(stage, sgd(stage), hvd.Mesh(pp=hvd.size()), F.mse_loss, m, **rest)

    def turn() -> None:
        for _ in range(1 if rest.get("update", "flush") == "flush" else IN_A_TURN):
            pipe.step(*data)
        pipe.drain()

    return turn


def torchs(stage: nn.Module, data: "tuple[torch.Tensor, torch.Tensor]", m: int, schedule: str) -> Turn:
    """A step of torch's pipeline."""
    rank, size, optimizer = hvd.rank(), hvd.size(), sgd(stage)
    chunks = list(stage) if schedule == "interleaved" else [stage]
    places = [
        PipelineStage(chunk, rank + at * size, size * len(chunks), torch.device("cpu"))
        for at, chunk in enumerate(chunks)
    ]
    plan = TORCH[schedule](places if len(places) > 1 else places[0], m, loss_fn=F.mse_loss)

    def turn() -> None:
        plan.step(*([] if rank else data[:1]), **({"target": data[1], "losses": []} if rank == size - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()

    return turn


def alone(stages: "Iterable[nn.Module]", data: "tuple[torch.Tensor, torch.Tensor]", m: int) -> Turn:
    """The same work in rank 0, which accumulates gradients; the others wait."""
    model = nn.Sequential(*stages)
    optimizer = sgd(model)

    def turn() -> None:
        for x, y in zip(*(rows.chunk(m) for rows in data)):
            (F.mse_loss(model(x), y) / m).backward()
        optimizer.step()
        optimizer.zero_grad()

    return turn if hvd.rank() == 0 else lambda: None


def medians(turns: "dict[str, Turn]", count: int) -> "dict[str, float]":
    """Milliseconds of each, by turns, on the slowest rank."""
    took: dict = {name: [] for name in turns}
    for at in range(count + 1):
        for name, turn in turns.items():
            hvd.barrier()
            began = time.perf_counter()
            turn()
            took[name] += [(time.perf_counter() - began) * 1e3] if at else []  # the first one warms up
    everyone = hvd.allgather_object(took)
    return {name: statistics.median(map(max, zip(*(rank[name] for rank in everyone)))) for name in turns}


def row(work: str, ms: "dict[str, float]") -> None:
    if hvd.rank() == 0:
        numbers = "".join(f"  {name} {value:8.2f}" for name, value in ms.items())
        ratios = "".join(f"  hvdlite / {name} {ms['hvdlite'] / ms[name]:5.3f}" for name in ms if name != "hvdlite")
        print(f"{work:48}{numbers} {ratios}", flush=True)


def sleep(patience: str) -> None:
    size = hvd.size()
    for schedule, update, m in (
        ("1f1b", "flush", 8), ("interleaved", "flush", 8), ("gpipe", "flush", 8), ("gpipe", "flush", 1),
        ("continuous", "stash", 8),
    ):  # fmt: skip
        batches = 1 if update == "flush" else IN_A_TURN
        lists = [schedules.PLANS[schedule](stage, size, m, batches) for stage in range(size)]
        data = torch.ones(m, NUMBERS), torch.zeros(m, NUMBERS)
        Nap.chunks = 2 if schedule == "interleaved" else 1
        places = size * Nap.chunks
        stages = [parallel.split([Sleeper() for _ in range(places)], hvd.Mesh(pp=size), [1] * places) for _ in "ab"]
        turns = {"hvdlite": ours(stages[0], data, m, schedule=schedule, update=update)}
        if schedule in TORCH:
            turns["torch"] = torchs(stages[1], data, m, schedule)
        Nap.slept = {"F": [], "B": []}
        ms = medians(turns, -(-TURNS[patience] // batches))
        ms["list"] = schedules.check(lists, FORWARD_S * 1e3, 2 * FORWARD_S * 1e3, chunks=Nap.chunks).makespan
        slept = hvd.allgather_object({what: statistics.median(times) for what, times in Nap.slept.items()})
        ms["slept"] = schedules.check(
            lists, *([stage[what] for stage in slept] for what in "FB"), chunks=Nap.chunks
        ).makespan
        row(f"sleeping, {schedule}{' (naive)' * (m == 1)}, {m} micro-batches", ms)


def compute(patience: str) -> None:
    size, m = hvd.size(), 8
    for width, rows in SHAPES[patience]:
        torch.manual_seed(1)
        stages = [perceptron(width) for _ in range(size)]
        data = torch.randn(m * rows, width), torch.randn(m * rows, width)
        mine, other = stages[hvd.rank()], copy.deepcopy(stages[hvd.rank()])
        turns = {"hvdlite": ours(mine, data, m), "torch": torchs(other, data, m, "1f1b")}
        turns["alone"] = alone(copy.deepcopy(stages), data, m)
        row(f"computing, 1f1b, {m} x {rows} rows of {width}", medians(turns, TURNS[patience]))
        for a, b in zip(mine.parameters(), other.parameters()):
            torch.testing.assert_close(a, b)  # else they were not the same training


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of pipelines, beside their lists and torch's.")
    parser.add_argument("--only", choices=("sleep", "compute"))
    parser.add_argument("--patience", choices=tuple(TURNS), default="full")
    args = parser.parse_args()
    hvd.init()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if hvd.rank() == 0:
        print(f"torch {torch.__version__}, {hvd.size()} stages, milliseconds", flush=True)
    for part in (sleep, compute):
        if args.only in (None, part.__name__):
            part(args.patience)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
