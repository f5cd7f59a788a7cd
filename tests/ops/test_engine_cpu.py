"""Which CPU does the engine thread work on, where a host has as many ranks as CPUs? That of its own rank.

Both ranks are placed, rank 0's engine thread is placed on rank 1's CPU, and after some collectives it has left it.
"""

import contextlib
import os
import time

import numpy as np
import pytest
from ranks import as_ranks

ALL = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="needs two CPUs")


def threads():
    return set(map(int, os.listdir("/proc/self/task")))


@as_ranks(2)
def test_it_leaves_the_cpu_of_another_rank():
    import hvdlite.numpy as hvd

    hvd.shutdown()
    cpus, rank = ALL[:2], int(os.environ["HVDLITE_RANK"])
    for thread in threads():
        os.sched_setaffinity(thread, cpus)
    before = threads()
    hvd.init()
    try:
        os.sched_setaffinity(0, {cpus[rank]})  # as a rank that computes there
        data, mine = np.ones(1 << 18, np.float32), threads() - before
        until = time.monotonic() + 60
        for engine in mine if rank == 0 else ():
            os.sched_setaffinity(engine, {cpus[1]})
        while True:
            hvd.synchronize(hvd.allreduce_async(data, name="data"))
            on = [os.sched_getaffinity(engine) for engine in mine]
            # Both ranks have to leave the loop at the same time.
            if hvd.allreduce(float({cpus[rank]} in on or (rank == 1 and {cpus[0]} not in on)), op=hvd.Min):
                break
            assert time.monotonic() < until, on
    finally:
        hvd.shutdown()
        for thread in threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, ALL)
        hvd.init()
