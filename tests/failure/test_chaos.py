"""A rank meets its end in some way at some moment: some trials of tests/tools/chaos.py, which runs more of them.

The seeds stay the same from run to run, for every plane and every way to end is among them; what happens within the
microseconds of a trial does not. `python tests/tools/chaos.py --only SEED` does one again.
"""

import math
import subprocess
import sys
from pathlib import Path

import chaos
import pytest
from chaotic import left, plan
from ranks import everything

SEEDS = (13, 19, 50, 83, *everything(98, 18, 37, 74, 94, 156))
LATE = (90083, 90197, 633)
JOBS = 2
LEAVES = """
import os, pathlib, socket, subprocess, sys
folder, support = sys.argv[1:]
sys.path.insert(0, support)
from chaotic import left
watch = left.Watch("a mark", folder)
assert watch.left(0) == []
files = pathlib.Path(folder, "temporary"), pathlib.Path("/dev/shm/hvd-of-test-chaos")
with socket.socket(socket.AF_UNIX) as one, socket.create_server(("127.0.0.1", 0)):
    one.bind("\\0hvd-of-test-chaos")
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, "ANY": "a mark"})
    try:
        for file in files:
            file.touch()
        found = "\\n".join(watch.left(0))
    finally:
        sleeper.kill()
        sleeper.wait()
        for file in files:
            file.unlink()
for each in [f"process {sleeper.pid}", "/dev/shm/hvd", "file temporary", *["@hvd-of", "socket tcp"] * watch.alone]:
    assert each in found, found
assert watch.left(5) == []
"""


def test_the_same_seed_is_the_same_trial():
    assert [plan.planned(seed) for seed in range(50)] == [plan.planned(seed) for seed in range(50)]
    met = [plan.planned(seed) for seed in range(2000)]
    assert {trial.plane for trial in met} == set(plan.PLANES) and {trial.way for trial in met} == set(plan.WAYS)
    assert {trial.moment for trial in met} == set(plan.MOMENTS) and {trial.size for trial in met} == set(range(2, 9))
    assert all(0 <= trial.victim < trial.size == sum(trial.hosts) for trial in met)


def test_whatever_befalls_a_rank_the_job_ends_and_says_so():
    found = chaos.conduct(SEEDS, JOBS)
    wrong = [chaos.told(seen) for seen in found if seen["wrong"]]
    assert not wrong, "\n".join(wrong)
    if all("skipped" in seen["verdict"] for seen in found):
        pytest.skip("no trial could be had here")


def test_a_strike_that_comes_when_all_is_done_is_one_at_the_end():
    """As on a crowded machine: a moment that has passed is no fault of the job."""
    found = chaos.conduct(LATE, JOBS, late=math.inf)
    assert [seen["verdict"] for seen in found] == ["ok (moment passed)"] * 3, found


def test_what_a_trial_looks_for_is_found(tmp_path):
    """A process, a file, a socket: else nothing being left would mean nothing."""
    words = left.alone([sys.executable, "-c", LEAVES, str(tmp_path), str(Path(left.__file__).parents[1])])
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
