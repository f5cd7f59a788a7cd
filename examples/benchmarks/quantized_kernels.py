"""How fast are the kernels of quantized sums, beside memcpy of as many bytes? One process, no ranks.

    python examples/benchmarks/quantized_kernels.py [--mib 16] [--rounds 41]

Each round runs memcpy (np.copyto) and every kernel once, by turns, so that all of them see the same machine. A ratio is
memcpy's time by the kernel's, for as many bytes of float32: 0.5 means half of memcpy's rate. This rank is one of two,
and half the blocks are its own: encode reads the others', sum its own, decode writes all. With residuals, sum also goes
over what it has sent, which is called settle here.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from hvdlite._core import ffi, lib


def seconds(call: "Callable[..., object]", *words: object) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call(*words)
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print a line for each width and kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    half = options.mib << 18
    given = np.random.default_rng(1).standard_normal(2 * half, np.float32)
    result, residual, copied = np.zeros_like(given), np.zeros_like(given), np.zeros(half, np.float32)
    wires = [np.zeros(5 * half, np.uint8) for _ in range(2)]
    out, sums = (ffi.cast("unsigned char *", wire.ctypes.data) for wire in wires)
    for bits in (8, 4):
        rounds = []
        for _ in range(options.rounds):
            took = {"memcpy": seconds(np.copyto, copied, given[:half])}
            for kept in (0, residual.ctypes.data):
                tensor = ffi.new("struct hvd_quantized_tensor *")
                tensor.to, tensor.count = ffi.cast("float *", result.ctypes.data), 2 * half
                setattr(tensor, "from", ffi.cast("float *", given.ctypes.data))
                tensor.residual = ffi.cast("float *", kept)
                job = ffi.new("struct hvd_quantized *", [tensor, 1, bits, 2, 0, 0, 1.0, 1.0, 0])
                lib.hvd_quantized_first(job, 0)
                took["encode with residual" if kept else "encode"] = seconds(lib.hvd_quantized_encode, job, out)
                took["sum and settle" if kept else "sum"] = seconds(lib.hvd_quantized_sum, job, out, out, sums)
                took["decode"] = seconds(lib.hvd_quantized_decode, job, sums, 0) / 2
            rounds.append(took)
        memcpy = statistics.median(each["memcpy"] for each in rounds)
        ratios = {name: memcpy / statistics.median(each[name] for each in rounds) for name in rounds[0]}
        print(f"int{bits}: memcpy {memcpy * 1e3:.2f} ms; " + ", ".join(f"{n} {v:.2f}" for n, v in ratios.items()))


if __name__ == "__main__":
    main()
