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
