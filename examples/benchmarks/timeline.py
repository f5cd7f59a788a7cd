"""Does a timeline change timing? A training step without one, with one, and without again, by turns.

    hvdlite-run -np 2 python examples/benchmarks/timeline.py
    hvdlite-run -np 4 python examples/benchmarks/timeline.py --tensors 161 --kilobytes 600 --steps 30 --turns 9

A step submits so many gradients one by one, as backward does, with some work of the CPU between, and waits for all.
Each turn measures steps with and without a timeline, in an order that changes; printed are the medians over turns and
the ratio. The ring of events is on in both: what it costs is counted in instructions (`make -C tests counts`).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd


def step(gradients: list[np.ndarray], work: np.ndarray) -> None:
    """One step."""
    handles = []
    for number, gradient in enumerate(gradients):
        work @ work
        handles.append(hvd.allreduce_async_(gradient, name=f"gradient.{number}"))
    for handle in handles:
        hvd.synchronize(handle)


def seconds_of(steps: int, gradients: list[np.ndarray], work: np.ndarray) -> float:
    """The median step, on this rank."""
    taken = []
    for _ in range(steps):
        hvd.barrier()
        began = time.perf_counter()
        step(gradients, work)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    """Prints the medians on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=60)
    parser.add_argument("--kilobytes", type=int, default=64, help="of each")
    parser.add_argument("--steps", type=int, default=20, help="of each measurement")
    parser.add_argument("--turns", type=int, default=7)
    asked = parser.parse_args()
    hvd.init()
    gradients = [np.ones(asked.kilobytes * 256, np.float32) for _ in range(asked.tensors)]
    work = np.ones((96, 96), np.float32)
    seconds_of(5, gradients, work)
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(asked.turns):
            for with_one in (False, True) if turn % 2 else (True, False):
                if with_one:
                    hvd.start_timeline(Path(folder) / f"{turn}.json")
                found[with_one].append(seconds_of(asked.steps, gradients, work))
                if with_one:
                    hvd.stop_timeline()
    if hvd.rank() == 0:
        without, with_one = (statistics.median(found[kind]) * 1e3 for kind in (False, True))
        spread = max(found[False]) / min(found[False])
        print(f"{hvd.size()} ranks, {asked.tensors} tensors of {asked.kilobytes} KB, medians of {asked.turns} turns:")
        print(f"without {without:.3f} ms, with a timeline {with_one:.3f} ms, ratio {with_one / without:.3f}")
        print(f"(turns without one differ by a factor of up to {spread:.2f})")


if __name__ == "__main__":
    main()
