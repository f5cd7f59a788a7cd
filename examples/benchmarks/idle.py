"""What a job costs that does nothing: processor time of all threads but the main one while every rank sleeps.

    hvdlite-run -np 2 python examples/benchmarks/idle.py

Read from /proc/self/task/*/schedstat in nanoseconds (or from stat, in ticks of 10 ms, where that is missing). Some work
goes before, so that the engine has been awake; the figure is the busiest rank's, as a share of one core.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd
from measure import report


def processor_seconds() -> "dict[str, float]":
    """Seconds that each thread but the main one has run."""
    seconds = {}
    for task in Path("/proc/self/task").iterdir():
        if task.name == str(os.getpid()):
            continue
        try:
            seconds[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            seconds[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Processor time of an idle job.")
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    hvd.init()
    for i in range(100):
        hvd.allreduce(np.ones(1000, np.float32), name=f"work{i % 10}")
    before = processor_seconds()
    started = time.perf_counter()
    time.sleep(args.seconds)
    elapsed = time.perf_counter() - started
    after = processor_seconds()
    share = 100 * sum(after[task] - before.get(task, 0.0) for task in after) / elapsed
    shares = hvd.allgather_object(share)
    if hvd.rank() == 0:
        report("idle job: threads of the busiest rank", "hvdlite", "% of a core", [max(shares)])
    hvd.shutdown()


if __name__ == "__main__":
    main()
