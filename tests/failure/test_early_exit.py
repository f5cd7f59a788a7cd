"""A rank that is done before the others: what those say who still need it, and what the launcher says last."""

from __future__ import annotations

import subprocess
import sys

STEPS = """
import numpy, hvdlite as hvd
hvd.init()
for step in range(5 if hvd.rank() == 1 else 8):
    hvd.allreduce(numpy.ones(3), name="gradient")
"""


def test_who_still_needs_a_rank_that_left_names_it_and_nobody_else_is_blamed() -> None:
    launch = [sys.executable, "-m", "hvdlite.launcher", "-np", "3", sys.executable, "-c", STEPS]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    raised = [line for line in done.stderr.splitlines() if "HvdPeerLostError" in line]
    assert {line[:3] for line in raised} == {"[0]", "[2]"}
    assert all("'allreduce.gradient'" in line and "rank 1 left the job" in line for line in raised)
    assert not any("raised HvdPeerLostError" in line for line in raised), "a victim was reported as the cause"


def test_a_rank_that_is_done_first_is_no_failure() -> None:
    code = "import time, hvdlite as hvd; hvd.init(); hvd.barrier(); time.sleep(0.5 * hvd.rank()); hvd.shutdown()"
    launch = [sys.executable, "-m", "hvdlite.launcher", "-np", "3", sys.executable, "-c", code]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


UNFINISHED = """
import os, signal, time, numpy, hvdlite as hvd
from hvdlite._core import ffi, lib

def buckets():
    names = [ffi.string(lib.hvd_counter_name(i)).decode() for i in range(3)]
    return lib.hvd_counter(names.index("buckets"))

hvd.init()
other = hvd.allgather_object(os.getpid())[1]
before = buckets()
big = numpy.ones(200_000_000, dtype=numpy.uint8)
handle = hvd.allreduce_async(big, op=hvd.Sum, name="big")
if hvd.rank() == 0:
    while buckets() == before:
        pass
    os.kill(other, signal.SIGSTOP)  # in the middle of the sum, and for longer than rank 0 waits at its end
    if os.fork() == 0:
        time.sleep(3)
        os.kill(other, signal.SIGCONT)
        os._exit(0)
else:
    hvd.synchronize(handle)
"""


def test_a_rank_that_ends_before_its_agreed_work_is_done_leaves_nobody_waiting() -> None:
    words = ["-np", "2", "--failure-grace", "20"]  # rank 1 has time to say what it raises
    launch = [sys.executable, "-m", "hvdlite.launcher", *words, sys.executable, "-c", UNFINISHED]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "HvdPeerLostError" in done.stderr and "rank 0 ends before collectives" in done.stderr
