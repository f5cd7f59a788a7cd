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

SEEDS = (13, 18, 19, 37, 50, 74, 83, 94, 98, 156)
LATE = (90083, 90197, 633)
JOBS = 2


def test_the_same_seed_is_the_same_trial():
    assert [plan.planned(seed) for seed in range(50)] == [plan.planned(seed) for seed in range(50)]
    met = [plan.planned(seed) for seed in range(2000)]
    assert {trial.plane for trial in met} == set(plan.PLANES) and {trial.way for trial in met} == set(plan.WAYS)
    assert {trial.moment for trial in met} == set(plan.MOMENTS) and {trial.size for trial in met} == set(range(2, 9))
    assert all(0 <= trial.victim < trial.size == sum(trial.hosts) for trial in met)


def test_whatever_befalls_a_rank_the_job_ends_and_says_so():
    lines = []
    found = chaos.conduct(SEEDS, JOBS, lines.append)
    print("\n".join(lines))
    wrong = [line for seen, line in zip(found, lines) if seen["wrong"]]
    assert not wrong, "\n".join(wrong)
    if all("skipped" in seen for seen in found):
        pytest.skip("no trial could be had here")


def test_a_strike_that_comes_when_all_is_done_is_one_at_the_end():
    """As on a crowded machine: a moment that has passed is no fault of the job, and the table counts it."""
    found = chaos.conduct(LATE, JOBS, print, late=math.inf)
    assert all(chaos.verdict(seen) == "ok (moment passed)" for seen in found), found
    head, every, *rows = (line.split() for line in chaos.table(found))
    assert head[0] == "trials" and every == ["all", "3", "0", "3", "0", "0", "0"], (head, every)
    assert sorted(row[:2] for row in rows) == [
        ["SIGTERM", "1"],
        ["hier", "1"],
        ["raise", "1"],
        ["shm", "2"],
        ["wake", "1"],
    ]


def test_what_a_trial_looks_for_is_found(tmp_path):
    """A process, a file, a socket: else nothing being left would mean nothing."""
    words = [sys.executable, str(Path(left.__file__).with_name("leaving.py")), str(tmp_path)]
    done = subprocess.run(left.alone(words), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "found\n", done.stdout + done.stderr
