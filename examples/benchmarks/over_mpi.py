"""Plane mpi beside the same MPI called directly from C, by turns in one run; rank 0 prints a table.

    HVDLITE_PLANE=mpi mpirun -np 2 python examples/benchmarks/over_mpi.py [--rounds 30] [--mpicc /opt/mpi/bin/mpicc]

over_mpi.c is compiled with the MPI's own mpicc, which must be that of the mpirun, and called in the ranks' processes:
`C` is MPI_Allreduce into another array, `C, in place` the same with MPI_IN_PLACE, which is what hvdlite is asked for;
`C, non-blocking` is MPI_Iallreduce with MPI_Test until it is done. Each figure is the median over rounds of the slowest
rank. The ratio is to the quicker of the first two; the bar is 10 % over it for 1 MB and more.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

import numpy as np

import hvdlite.numpy as hvd

SOURCE = Path(__file__).with_suffix(".c")
WARM = 3
BAR_FROM = 1 << 20  # bytes


def compiled(mpicc: str) -> ctypes.CDLL:
    """over_mpi.c, by the compiler of this MPI."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "over_mpi.so"
        subprocess.run([mpicc, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
        direct = ctypes.CDLL(str(library))
    direct.together.restype = None
    direct.worst.argtypes, direct.worst.restype = [ctypes.c_double], ctypes.c_double
    for way in (direct.blocking, direct.non_blocking):
        way.argtypes, way.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int], ctypes.c_double
    return direct


def of_hvdlite(array: np.ndarray) -> float:
    """Seconds of one allreduce in place, float32, on this rank."""
    began = time.perf_counter()
    hvd.allreduce_(array, op=hvd.Sum, name="x")
    return time.perf_counter() - began


def measured(direct: ctypes.CDLL, bytes_each: int, rounds: int) -> dict[str, float]:
    """Median microseconds of each way at one size; the ways take turns."""
    count = bytes_each // 4
    array, out = np.ones(count, np.float32), np.empty(count, np.float32)
    ways: dict[str, Callable[[], float]] = {
        "hvdlite": lambda: of_hvdlite(array),
        "C": lambda: direct.blocking(array.ctypes.data, out.ctypes.data, count),
        "C, in place": lambda: direct.blocking(array.ctypes.data, array.ctypes.data, count),
        "C, non-blocking": lambda: direct.non_blocking(array.ctypes.data, out.ctypes.data, count),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + WARM):
        for name, way in ways.items():
            array.fill(1)
            direct.together()
            spent = direct.worst(way())
            result = array if name in ("hvdlite", "C, in place") else out
            assert result[0] == result[-1] == hvd.size(), f"{name} gave {result[0]}"
            if turn >= WARM:
                times[name].append(spent * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """All sizes; exit code 1 with --bar if a size misses it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--least", type=int, default=4 << 10, help="bytes of the smallest array")
    parser.add_argument("--most", type=int, default=64 << 20, help="bytes of the largest array")
    parser.add_argument("--mpicc", default="mpicc", help="compiler of the MPI that has started this")
    parser.add_argument("--bar", type=float, help="fail if hvdlite takes more than so many times as long as C")
    arguments = parser.parse_args()
    hvd.init()
    direct, missed = compiled(arguments.mpicc), False
    size = arguments.least
    while size <= arguments.most:
        micros = measured(direct, size, arguments.rounds)
        ratio = micros["hvdlite"] / min(micros["C"], micros["C, in place"])
        missed |= arguments.bar is not None and size >= BAR_FROM and ratio > arguments.bar
        if hvd.rank() == 0:
            columns = "".join(f"  {name} {each:10.1f} us" for name, each in micros.items())
            print(f"{size:>10} bytes{columns}  hvdlite/C {ratio:.2f}", flush=True)
        size *= 4
    hvd.shutdown()
    sys.exit(missed)


if __name__ == "__main__":
    main()
