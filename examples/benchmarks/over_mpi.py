"""Plane mpi beside the same MPI called directly through mpi4py, by turns in one run; rank 0 prints a table.

    HVDLITE_PLANE=mpi mpirun -np 2 python examples/benchmarks/over_mpi.py [--rounds 30]

`direct` is MPI's blocking Allreduce, `non-blocking` Iallreduce and Wait, on the same arrays. Each figure is the median
over rounds of the slowest rank, in microseconds.
"""

import argparse
import statistics
import time

import numpy as np
from mpi4py import MPI

import hvdlite.numpy as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--most", type=int, default=64 << 20, help="bytes of the largest array")
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    hvd.init(comm=world)
    size = 4 << 10
    while size <= arguments.most:
        array = np.ones(size // 4, np.float32)
        out = np.empty_like(array)
        ways = {
            "hvdlite": lambda array=array: hvd.allreduce_(array, op=hvd.Sum, name="x"),
            "direct": lambda array=array, out=out: world.Allreduce(array, out),
            "non-blocking": lambda array=array, out=out: world.Iallreduce(array, out).Wait(),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(arguments.rounds + 3):
            for name, way in ways.items():
                array.fill(1)
                world.Barrier()
                begin = time.perf_counter()
                way()
                spent = world.allreduce(time.perf_counter() - begin, op=MPI.MAX)
                if turn >= 3:
                    times[name].append(spent)
        if world.rank == 0:
            print(f"{size:>10} bytes", *(f"{name} {statistics.median(t) * 1e6:10.1f} us" for name, t in times.items()))
        size *= 4
    hvd.shutdown()


if __name__ == "__main__":
    main()
