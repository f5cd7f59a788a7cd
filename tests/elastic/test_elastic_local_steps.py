"""Ranks with local steps are killed at random moments: the others keep theirs, newcomers begin with global weights."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from elastic_jobs import AT_ONCE, ElasticJob
from ranks import everything

PROGRAM = str(Path(__file__).parents[1] / "support" / "elastic_local_steps.py")


@pytest.mark.parametrize("ranks, delay, deaths", [(2, 2, 1), *everything((3, 0, 60), (3, 2, 60))])
def test_the_others_lose_no_step(tmp_path, ranks, delay, deaths):
    drawn = random.Random(deaths)
    with ElasticJob(tmp_path, "-np", str(ranks), "--min-np", "1", *AT_ONCE, program=PROGRAM, DELAY=str(delay)) as job:
        for _ in range(deaths):
            job.until_training(ranks, job.newest() + 10)
            time.sleep(drawn.uniform(0, 0.2))
            victim = drawn.choice(sorted(job.training()))
            os.kill(victim, signal.SIGKILL)
            while job.is_alive(victim):
                time.sleep(0.001)
        job.until_training(ranks, job.newest() + 10)
        (tmp_path / "last").touch()
        assert job.wait(60) == 0, job.out
        assert job.out.count("ended well") == ranks, job.out
        for pid in job.pids():
            numbers = [step for _, step, _, _ in job.steps(pid)]
            assert all(later > step - 3 - delay for step, later in zip(numbers, numbers[1:])), numbers
