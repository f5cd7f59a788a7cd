"""What calls from Python cost: allreduce_ of small and large torch tensors, and a hundred asynchronous ones.

    hvdlite-run -np 2 python examples/benchmarks/calls.py --library hvdlite     # or gloo, horovod
    mpiexec -n 2 python examples/benchmarks/calls.py --library mpi4py/mpich         # or mpi4py/openmpi
    python examples/benchmarks/run_all.py --only calls                          # beside each other

4 B and 4 KB: calls follow each other without pause and each is timed alone. From 64 KB on each rank writes its tensor
anew before each call, as training does, and the time of writing alone is taken off, as in harness.h. `100 x 64 KB`,
`161 x 64 B`: submitted without waiting, then all are waited for. What counts is the slower rank's median.
"""

import torch

from libraries import MPI4PY, NAMES, asked, library
from measure import repetitions, report, size_text, slower_rank, spread, timed_us

SMALL = (4, 4 << 10)
LARGE = (64 << 10, 1 << 20, 16 << 20, 128 << 20)
MANY = ((100, 64 << 10), (161, 64))
SECONDS = {"full": 0.6, "quick": 0.25, "tiny": 0.01}


def small_calls(lib, size: int, seconds: float) -> "list[float]":
    """Microseconds of each call."""
    tensor = torch.zeros(size // 4)

    def call() -> None:
        lib.reduce(tensor, f"small.{size}")

    for _ in range(10):
        call()
    calls = repetitions(lib, call, seconds, 3000)
    lib.barrier()
    return [timed_us(call) for _ in range(calls)]


def large_calls(lib, size: int, seconds: float) -> "list[float]":
    """Microseconds of each call beyond writing the tensor."""
    tensor = torch.zeros(size // 4)

    def write() -> None:
        tensor.fill_(1.0)

    def both() -> None:
        write()
        lib.reduce(tensor, f"large.{size}")

    both()
    assert tensor[0] == tensor[-1] == lib.size, "a wrong sum"
    calls = repetitions(lib, both, seconds, 300)
    lib.barrier()
    written = spread([timed_us(write) for _ in range(calls)])[1]
    lib.barrier()
    return [timed_us(both) - written for _ in range(calls)]


def many_calls(lib, count: int, size: int, seconds: float) -> "list[float]":
    """Microseconds of so many tensors of so many bytes, from the first submission to the last result."""
    tensors = [torch.zeros(size // 4) for _ in range(count)]

    def all_of_them() -> None:
        handles = [lib.start(tensor, f"many.{count}.{i}") for i, tensor in enumerate(tensors)]
        for handle in handles:
            lib.finish(handle)

    for _ in range(5):
        all_of_them()
    calls = repetitions(lib, all_of_them, seconds, 200)
    taken = []
    for _ in range(calls):
        lib.barrier()
        taken.append(timed_us(all_of_them))
    return taken


def main() -> None:
    args = asked("Allreduces from Python.", [*NAMES, *MPI4PY])
    lib, seconds = library(args.library), SECONDS[args.patience]
    works = [(f"allreduce_ of {size_text(size)}", small_calls, (size,)) for size in SMALL]
    largest = LARGE[0] if args.patience == "tiny" else LARGE[-1]
    works += [(f"allreduce_ of {size_text(size)}", large_calls, (size,)) for size in LARGE if size <= largest]
    works += [(f"{count} x {size_text(size)} async", many_calls, (count, size)) for count, size in MANY]
    for work, measured, size in works:
        slower = slower_rank(lib, measured(lib, *size, seconds))
        if lib.rank == 0:
            report(work, args.library, "us", slower)
    lib.close()


if __name__ == "__main__":
    main()
