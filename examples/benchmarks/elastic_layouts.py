"""Is the layout that `plan.layout_for` chooses for a number of ranks the fastest one, as measured?

    python examples/benchmarks/elastic_layouts.py         20 cases, 5 to 10 minutes; --only 3: case 3, all layouts

A case is drawn from its number: layers, 2 to 4 ranks, a batch, and in half of the cases too little memory for all
layers on one rank. Layers sleep, so that ranks need no processor each: a fixed time and a time for each row, twice as
long in backward. They are profiled at several numbers of rows, a message is timed between two ranks, and layout_for
chooses. Then each number of stages and copies is trained with the rows and the cut that layout_for has for it, and the
chosen one with all other rows too. Layouts take turns, step by step, so that other load meets all alike; medians count.

The choice is good if its step is at most 5 % longer than the shortest. Else it and those that were shorter by more are
measured a second time, by turns, to rule out a disturbance. That second measurement counts (`again` in the table).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

import torch

import hvdlite.torch as hvd
from hvdlite import parallel, plan
from measure import MARK

ROWS, WIDTH, STATE = (2, 3, 4, 6, 8), 256, 100.0  # STATE: what a rank keeps is mostly weights, as in large models
WARM, STEPS, AGAIN, NEAR = 2, 7, 15, 1.05


def drawn(number):
    """ranks, batch, which part of the layers a rank has memory for, and of each layer the ms of a call and of a row."""
    draw = random.Random(number)
    fixed, count = draw.choice([1, 4]), draw.randint(3, 6)
    costs = [(fixed * draw.uniform(0.3, 1.0), draw.uniform(0.5, 1.2)) for _ in range(count)]
    return draw.randint(2, 4), draw.choice([8, 10, 12, 14, 16, 20, 24]), (10, 0.8)[number % 2], costs


class Nap(torch.nn.Module):
    def __init__(self, fixed, of_row):
        super().__init__()
        self.fixed, self.of_row, self.scale = fixed, of_row, torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        seconds, y = (self.fixed + self.of_row * len(x)) / 1e3, x * self.scale
        time.sleep(seconds)
        y.register_hook(lambda gradient: time.sleep(2 * seconds))
        return y


def medians(steps, count):
    """ms of each step by rank 0's clock; they take turns."""
    taken = [[] for _ in steps]
    for _ in range(WARM + count):
        for step, own in zip(steps, taken):
            hvd.barrier()
            begin = time.perf_counter()
            step()
            own.append(1e3 * (time.perf_counter() - begin))
    return hvd.broadcast_object([statistics.median(own[WARM:]) for own in taken])


def candidates(ranks, batch, part, costs, message):
    """Layouts to measure, the chosen one first. message: ms of a micro-batch of the most rows."""
    rows = [each for each in ROWS if batch % each == 0]
    known = plan.profiles([Nap(*cost) for cost in costs], torch.ones(max(rows), WIDTH), rows)
    rest = {"beta": message / (4 * max(ROWS) * WIDTH), "memory": part * STATE * 4 * WIDTH * len(costs), "state": STATE}
    found = [plan.layout_for(known, ranks, batch, **rest)]
    tried = [(known, (pp, dp)) for pp in range(1, ranks + 1) for dp in range(1, ranks // pp + 1)]
    for profiles, shape in [*tried, *(({each: known[each]}, (found[0].pp, found[0].dp)) for each in rows)]:
        try:
            found.append(plan.layout_for(profiles, ranks, batch, shape=shape, **rest))
        except plan.PlanError:
            pass  # it does not keep the batch, or not fit
    return list({layout[:-1]: layout for layout in found}.values())


def stepping(layout, costs, batch):
    """A function that does a step on the ranks of the layout. All ranks call this."""
    mesh = hvd.Mesh(range(layout.ranks), dp=layout.dp, pp=layout.pp)
    if not mesh.included():
        return lambda: None
    x, stage = torch.ones(batch // layout.dp, WIDTH), parallel.split([Nap(*of) for of in costs], mesh, layout.balance)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-6)
    pipe = parallel.Pipeline(stage, optimizer, mesh, lambda output, y: output.mean(), layout.micro_batches)
    return lambda: (pipe.step(x, x), hvd.barrier(mesh.process_set))


def train(number):
    """A rank. Rank 0 prints the ratio, then lines: the row of the table, and each layout."""
    torch.set_num_threads(1)
    hvd.init()
    ranks, batch, part, costs = drawn(int(number))
    x, sides = torch.ones(max(ROWS), WIDTH), {0: lambda: hvd.send(x, 1), 1: lambda: hvd.recv(x, 0)}
    message = medians([sides.get(hvd.rank(), lambda: None)], 30)[0]
    found = hvd.broadcast_object(candidates(ranks, batch, part, costs, message) if hvd.rank() == 0 else None)
    steps = [stepping(layout, costs, batch) for layout in found]
    first = dict(enumerate(medians(steps, STEPS)))
    shorter = [at for at in first if at == 0 or first[0] > NEAR * first[at]]
    counted = dict(zip(shorter, medians([steps[at] for at in shorter], AGAIN))) if len(shorter) > 1 else first
    ratio, row = counted[0] / min(counted.values()), f"{number:>4} {ranks:5} {batch:5}"
    for at in (0, min(counted, key=counted.get)):
        layers = "+".join(map(str, found[at].balance))
        row += f"  {f'{found[at].pp} x {found[at].dp}, {found[at].rows} rows, {layers}':<28}{counted[at]:7.1f}"
    every = [f"  {of.describe()}: planned {of.ms:.1f}, measured {ms:.1f} ms" for of, ms in zip(found, first.values())]
    if hvd.rank() == 0:
        print(MARK + json.dumps([ratio, f"{row}  {ratio:.3f}{' again' * (counted is not first)}", *every]), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--only", type=int, help="the number of a case")
    asked, ratios = parser.parse_args(), []
    print(f"case ranks batch  {'chosen: stages x copies':<28}{'ms':>7}  {'shortest':<28}{'ms':>7}  ratio")
    for number in range(asked.cases) if asked.only is None else [asked.only]:
        words = [sys.executable, "-m", "hvdlite.launcher", "-np", str(drawn(number)[0]), sys.executable, __file__]
        done = subprocess.run([*words, "train", str(number)], capture_output=True, text=True, timeout=300)
        if done.returncode:
            sys.exit(f"case {number}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        ratio, row, *every = json.loads(done.stdout.partition(MARK)[2].partition("\n")[0])
        ratios.append(ratio)
        print("\n".join([row, *every] if asked.only is not None else [row]), flush=True)
    print(f"{sum(each <= NEAR for each in ratios)} of {len(ratios)} within 5 %, largest ratio {max(ratios):.3f}")


if __name__ == "__main__":
    train(*sys.argv[2:]) if sys.argv[1:2] == ["train"] else main()
