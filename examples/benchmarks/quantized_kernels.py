"""How fast are the kernels of quantized sums, beside memcpy of the same memory? One process, no ranks.

    python examples/benchmarks/quantized_kernels.py [--mib 16] [--variant avx2]

Each round runs memcpy and every kernel once, by turns, so that all of them see the same state of the machine. A rate
counts the float32 bytes that a call reads or makes; the ratio is that rate beside memcpy's rate in the same round. There
are two ranks, and this one owns half the blocks: encode and settle go over the other half, sum over its own, decode over
all. settle is what `sum` takes longer with a residual, for both halves.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from hvdlite._core import ffi, lib

HEAD = 4  # bytes of a block's scale


def timed(call: "Callable[[], object]") -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    elements = options.mib << 18
