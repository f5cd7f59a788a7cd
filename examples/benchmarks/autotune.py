"""Is what autotune chooses better than the default, and never worse? Both in one run, step by step in turns.

    hvdlite-run -np 2 python examples/benchmarks/autotune.py

A step averages the gradients of a ResNet-50 (see gradients.py), all submitted at once, and nothing else, so that the
setting matters as much as it ever can. hvd.autotune searches; then come steps with the default, with what was chosen
and with every other setting by turns. The last lines say how the chosen setting compares with the default; a search
that kept the default compares it with itself, which shows the noise.
"""

import argparse
import math
import time

import torch
from gradients import resnet50_shapes

import hvdlite.torch as hvd
from hvdlite import _core
from hvdlite.autotune.search import STEPS_MAX
from hvdlite.autotune.tuner import OTHERS
from measure import report, spread


def main() -> None:
    parser = argparse.ArgumentParser(description="The default against what autotune chooses.")
    parser.add_argument("--rounds", type=int, default=25, help="steps with each setting")
    parser.add_argument("--largest-kb", type=int, default=1 << 30, help="leave out gradients above this size")
    args = parser.parse_args()
    hvd.init()
    shapes = [shape for shape in resnet50_shapes() if math.prod(shape) * 4 <= args.largest_kb << 10]
    gradients = [torch.zeros(shape) for shape in shapes]

    def step() -> float:
        """Milliseconds of a step."""
        started = time.perf_counter()
        handles = [hvd.allreduce_async_(g, name=f"g{i}") for i, g in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)
        taken = 1000 * (time.perf_counter() - started)
        hvd.autotune.step()
        return taken

    default = _core.fusion_bytes()
    hvd.autotune.reopen()
    searched = [step() for _ in range(STEPS_MAX)]
    hvd.barrier()  # the round that decides what the verdict proposes
    chosen = hvd.broadcast_object(_core.fusion_bytes())
    settings = {"default": default, "chosen": chosen, **{f"{size / 2**20:g} MB": size for size in OTHERS}}
    times: dict[str, list[float]] = {name: [] for name in settings}
    for number in range(args.rounds):
        names = list(settings)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if hvd.rank() == 0:
                _core.tune(settings[name])
            hvd.barrier()
            times[name].append(max(hvd.allgather_object(step())))
    if hvd.rank() == 0:
        print(f"autotune chose {chosen / 2**20:g} MB; the default is {default / 2**20:g} MB")
        low, middle, high = spread(searched)
        print(f"while it searched a step took {middle:.2f} ms (10 % below {low:.2f}, 10 % above {high:.2f})")
        for name, taken in times.items():
            report(f"{len(shapes)} gradients at once", name, "ms", taken)
        low, middle, high = spread([a / b for a, b in zip(times["chosen"], times["default"])])
        print(f"chosen / default, round by round: median {middle:.3f} (10 % below {low:.3f}, 10 % above {high:.3f}),")
        print(f"of medians {spread(times['chosen'])[1] / spread(times['default'])[1]:.3f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
