"""A real training step of a ResNet-50 (64 x 64 pixels, batch 2 per rank): what does data parallelism add to it?

    hvdlite-run -np 2 python examples/benchmarks/step.py --library hvdlite     # or gloo, horovod
    python examples/benchmarks/run_all.py --only step                          # beside each other

Two models train by turns in the same processes: one alone on each rank, one distributed (DistributedOptimizer, or
DistributedDataParallel over Gloo). A step is zero_grad, forward, backward and the optimizer's; all ranks begin it
together, one thread each, and it takes as long as on its slowest rank. *Exposed communication* is the median of a
distributed step less the median of a step alone: what is not hidden behind backward.

With hvdlite its trace divides the time from the last gradient's submission to the last one's finish: *moving*, while
a bucket is under way, and *negotiation*, the rest, of the rank with the least of it: the others wait for that one to
compute.
"""

import importlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from libraries import asked, library
from measure import report, spread, timed_us

STEPS = {"full": (6, 12), "quick": (5, 5), "tiny": (1, 2)}  # to warm up, counted
REAL = (50, 64, 1000, 64)  # depth, width, classes, pixels
SIZES = {"full": REAL, "quick": REAL, "tiny": (10, 8, 10, 32)}
BATCH = 2


class Trainer:
    """A model on fixed made-up images."""

    def __init__(self, depth: int, width: int, classes: int, pixels: int) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        torch.manual_seed(1)
        self.model = importlib.import_module("04_train_resnet").resnet(depth, width, classes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        self.images = torch.randn(BATCH, 3, pixels, pixels)
        self.labels = torch.randint(classes, (BATCH,))

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()


class Trace:
    """What hvdlite's engine did in a step, from its ring of events and its counters."""

    EVENTS = 4096

    def __init__(self) -> None:
        core = importlib.import_module("hvdlite._core")
        self.lib, self.ffi = core.lib, core.ffi
        self.events = self.ffi.new("struct hvd_event[]", self.EVENTS)
        self.counted = self._counters()

    def _counters(self) -> "dict[str, int]":
        found: dict = {}
        while (name := self.lib.hvd_counter_name(len(found))) != self.ffi.NULL:
            found[self.ffi.string(name).decode()] = self.lib.hvd_counter(len(found))
        return found

    def of_step(self) -> "dict[str, float]":
        """Milliseconds of negotiation and moving since the last call, and how much counters have grown."""
        before, self.counted = self.counted, self._counters()
        grown = {name: float(count - before[name]) for name, count in self.counted.items()}
        happened = []
        for i in range(self.lib.hvd_trace(self.events, self.EVENTS)):
            event = self.events[i]
            happened.append((self.ffi.string(self.lib.hvd_trace_name(event.what)).decode(), event.time_ns))
        grown["negotiation"], grown["moving"] = divided(happened)
        return grown


def divided(happened: "list[tuple[str, int]]") -> "tuple[float, float]":
    """Milliseconds of negotiation and of moving after the last submission; events are (name, nanoseconds)."""
    submitted = max((ns for name, ns in happened if name == "submit"), default=0)
    moving, started, finished = 0, None, submitted
    for name, ns in [*happened, ("start", 0)]:
        if name == "finish":
            finished = max(finished, ns)
        elif name == "start":
            if started is not None:
                moving += max(0, finished - max(started, submitted))
            started = ns
    return (finished - submitted - moving) / 1e6, moving / 1e6


def measured(lib, alone: Trainer, distributed: Trainer, trace: "Trace | None", steps: int) -> "dict[str, list[float]]":
    """Milliseconds of each step on this rank, alone and distributed, and what the trace says of the latter."""
    found: dict = {"alone": [], "distributed": []}
    for _ in range(steps):
        for name, trainer in (("alone", alone), ("distributed", distributed)):
            lib.barrier()
            if trace and name == "distributed":
                trace.of_step()
            found[name].append(timed_us(trainer.step) / 1000)
        for key, value in (trace.of_step() if trace else {}).items():
            found.setdefault(key, []).append(value)
    return found


def main() -> None:
    args = asked("A training step of a ResNet-50.")
    torch.set_num_threads(1)
    lib = library(args.library)
    alone, distributed = Trainer(*SIZES[args.patience]), Trainer(*SIZES[args.patience])
    distributed.model, distributed.optimizer = lib.distribute(distributed.model, distributed.optimizer)
    trace = Trace() if args.library == "hvdlite" else None
    warm_up, counted = STEPS[args.patience]
    measured(lib, alone, distributed, None, warm_up)
    ranks = lib.gather(measured(lib, alone, distributed, trace, counted))
    if lib.rank == 0:
        slower = {key: [max(of_ranks) for of_ranks in zip(*(rank[key] for rank in ranks))] for key in ranks[0]}
        if trace:  # the rank that comes last waits for nobody
            slower["negotiation"] = [min(of_ranks) for of_ranks in zip(*(rank["negotiation"] for rank in ranks))]
        single = spread(slower["alone"])[1]
        report("step alone", args.library, "ms", slower["alone"])
        report("step", args.library, "ms", slower["distributed"])
        report("exposed communication", args.library, "ms", [step - single for step in slower["distributed"]])
        for key in ("negotiation", "moving"):
            if trace:
                report(f"  of it {key}", args.library, "ms", slower[key])
        for key in ("rounds", "buckets", "sleeps"):
            if trace:
                report(f"  {key} in a step", args.library, "", slower[key])
    lib.close()


if __name__ == "__main__":
    main()
