"""Drivers of real engines as processes: what each of their cases says, and that nothing of them is left.

A driver (on_ray.py, on_spark.py, on_dask.py) prints a line of JSON for each case.
"""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import launching
import overlays
import warm

SECONDS = 500
RETURNED = {  # `returns` of driving.py
    "returns": r"rank 0 \(pid \d+ on \S+\) returned from its function and did not call init \[HVD401\]",
    "uneven": r"barrier on rank 0: rank 1 left the job .*\[HVD451\]",
}


def shared():
    """Names of hvdlite's in shared memory."""
    return {name for name in os.listdir("/dev/shm") if "hvd" in name}


def cases(script, *folders, **environ):
    """{case: what it says} of a driver, the rest of its output under "out". It has ended, and nothing is left of it."""
    mark, before = uuid.uuid4().hex, shared()
    environ = overlays.with_path(Path(__file__).parent, *folders, OMP_NUM_THREADS="1", **environ)
    environ = {name: value for name, value in environ.items() if not name.startswith(("HVDLITE_", "HOROVOD_"))}
    words = [sys.executable, str(Path(__file__).with_name(script))]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**environ, warm.MARK: mark}
    ) as driver:
        try:
            out, _ = driver.communicate(timeout=SECONDS)
        finally:
            driver.kill()
            until = time.monotonic() + 20
            while ((left := launching.marked(mark)) or shared() - before) and time.monotonic() < until:
                time.sleep(0.05)  # of memory, other tests have some for a moment
            for pid in left:
                os.kill(pid, 9)
    assert driver.returncode == 0, out
    assert not left and not shared() - before, (left, shared() - before, out)
    found = {"out": out}
    for line in out.splitlines():
        if line.startswith('{"case"'):
            said, _ = json.JSONDecoder().raw_decode(line)
            found[said["case"]] = said
    return found
