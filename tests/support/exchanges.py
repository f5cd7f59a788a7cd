"""How does a test run sums in 8 and 4 bits on ranks that pretend to be on several hosts?"""

import os

import numpy as np

import hvdlite as hvd
from hvdlite.ops.quantized_sum import Member, QuantizedSum

SIZES = (0, 1, 255, 256, 257, 300, 40_000, 65_536, 1_000_003)


def lay_on(*hosts, plane=""):
    """Begin a new life, as if so many ranks were on each host."""
    hvd.shutdown()
    rank = int(os.environ["HVDLITE_RANK"])
    host = next(h for h in range(len(hosts)) if rank < sum(hosts[: h + 1]))
    local = rank - sum(hosts[:host])
    across = [h for h, size in enumerate(hosts) if size > local]
    seat = {"LOCAL_RANK": local, "LOCAL_SIZE": hosts[host], "CROSS_RANK": across.index(host), "CROSS_SIZE": len(across)}
    for alias in ("HVDLITE", "HOROVOD"):
        os.environ.update({f"{alias}_{name}": str(value) for name, value in seat.items()})
    os.environ.update(HVDLITE_HOST_ID=f"host {host}", HVDLITE_PLANE=plane)
    if not plane:
        del os.environ["HVDLITE_PLANE"]
    hvd.init()


def exchange(bits, arrays, name, residuals=None, **more):
    """In place, under way."""
    kept = residuals or [None] * len(arrays)
    members = [
        Member(each.ctypes.data, each.ctypes.data, 0 if rest is None else rest.ctypes.data, each.size)
        for each, rest in zip(arrays, kept)
    ]
    return QuantizedSum(bits, members, name, hvd.global_process_set, (arrays, residuals), **more)


def summed(bits, arrays, name, residuals=None):
    exchange(bits, arrays, name, residuals).begin().wait()
    return arrays


def given(seed, sizes=SIZES):
    values = np.random.default_rng(100 * seed + hvd.rank())
    return [(values.standard_normal(size) * 10.0 ** values.integers(-3, 3)).astype(np.float32) for size in sizes]
