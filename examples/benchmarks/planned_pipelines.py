"""How far off is `hvdlite-plan auto`? Plans layers for 4 ranks, then trains them by hvdlite.parallel, and measures.

    python examples/benchmarks/planned_pipelines.py          1 minute

Layers sleep instead of computing, so that four ranks need not four processors: forward for a time that each layer says,
for the rows that it is given, backward twice as long. They are profiled (plan.profile), what a message takes is
measured between two ranks, and every mesh of 4 ranks (dp x pp) is planned, played and trained. The table has both times
of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

FORWARD_MS = (4.0, 8.0, 4.0, 4.0, 12.0, 4.0, 4.0, 8.0)  # of ROWS rows
ROWS, WIDTH, MICRO = 16, 4096, 8
STEPS, WARM = 8, 3


def layers():
    """Functions that make a layer each: a scale that is learned, and sleep."""
    import torch

    class Sleeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ms):
            ctx.ms = ms * len(x) / ROWS
            time.sleep(ctx.ms / 1e3)
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(2 * ctx.ms / 1e3)
            return gradient, None

    class Nap(torch.nn.Module):
        def __init__(self, ms):
            super().__init__()
            self.ms, self.scale = ms, torch.nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return Sleeps.apply(x * self.scale, self.ms)

    return [lambda ms=ms: Nap(ms) for ms in FORWARD_MS]


def train(path, out):
    """A rank: trains by the plan, rank 0 writes the median step."""
    import torch

    import hvdlite.torch as hvd
    from hvdlite import parallel

    torch.set_num_threads(1)
    hvd.init()
    planned = parallel.planned(path)
    mesh = hvd.Mesh(**planned.shape)
    stage = parallel.split(layers(), mesh, planned.balance)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-6)
    pipe = parallel.Pipeline(
        stage, optimizer, mesh, lambda output, y: output.mean(), planned.micro_batches, planned.schedule
    )
    x = torch.ones(ROWS * MICRO // mesh.shape["dp"], WIDTH)
    taken = []
    for _ in range(STEPS + WARM):
        hvd.barrier()
        begin = time.perf_counter()
        pipe.step(x, x)
        hvd.barrier()
        taken.append(1e3 * (time.perf_counter() - begin))
    if hvd.rank() == 0:
        write(out, statistics.median(taken[WARM:]))


def probe(out):
    """Two ranks: what a message of a micro-batch takes, in ms."""
    import numpy as np

    import hvdlite as hvd

    hvd.init()
    x, taken = np.ones((ROWS, WIDTH), np.float32), []
    for _ in range(30):
        hvd.barrier()
        begin = time.perf_counter()
        hvd.send(x, 1) if hvd.rank() == 0 else hvd.recv(x, 0)
        taken.append(1e3 * (time.perf_counter() - begin))
    if hvd.rank() == 1:
        write(out, statistics.median(taken))


def write(path, number):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(number, file)


def run(ranks, *words):
    command = [sys.executable, "-m", "hvdlite.launcher", "-np", str(ranks), sys.executable, os.path.abspath(__file__)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{' '.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    with open(words[-1], encoding="utf-8") as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    asked = parser.parse_args()
    import torch

    from hvdlite.plan.auto import Grid, Plan, choose, meshes
    from hvdlite.plan.profile import profile
    from hvdlite.plan.search import Chain, best, played

    torch.set_num_threads(1)  # as a rank has
    rows = profile(layers(), torch.ones(ROWS, WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.json")
        message = run(2, "probe", out)
        chain = Chain(rows, message / rows[0].activation, MICRO)
        chosen = choose(chain, asked.ranks).shape
        print(f"a message of {rows[0].activation / 1e3:.0f} KB takes {message:.2f} ms; chosen: {chosen}")
        for dp, pp, tp in meshes(chain, asked.ranks):
            grid = Grid(chain, dp, tp)
            found = best(grid, asked.ranks, each=dp * tp)
            shape = {"dp": dp, "pp": pp, "tp": tp}
            said, path = played(grid, found).end, os.path.join(folder, f"{dp}.json")
            Plan(shape, found, MICRO, said, []).write(path)
            took = run(asked.ranks, "train", path, out)
            cuts = [cut.end - cut.first for cut in found.stages]
            error = 100 * (said / took - 1)
            print(f"dp={dp} pp={pp} {cuts}: planned {said:.1f} ms, measured {took:.1f} ms, {error:+.1f} %")


if __name__ == "__main__":
    {"train": train, "probe": probe}.get(sys.argv[1] if len(sys.argv) > 1 else "", lambda *_: main())(*sys.argv[2:])
