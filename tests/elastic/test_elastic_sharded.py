"""Ranks with a sharded optimizer are killed at random moments: no rank goes on with a mixture of two commits."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from elastic_jobs import AT_ONCE, ElasticJob
from ranks import everything

from hvdlite.torch.elastic import sharded_state

PROGRAM = str(Path(__file__).parents[1] / "support" / "elastic_sharded.py")


def until_all_train(job, killed_at):
    """Waits until two ranks or more have made a step together since, so each share has two holders again."""
    end = time.monotonic() + 60
    while True:
        last = [job.steps(pid)[-1] for pid in job.training()]
        if len(last) > 1 and all(at > killed_at and size == len(last) for at, _, _, size in last):
            return
        assert time.monotonic() < end and job.process.poll() is None, job.out
        time.sleep(0.01)


@pytest.mark.parametrize("name, deaths", [("adamw", 2), *everything(("adamw", 150), ("adafactor", 50))])
def test_a_rank_that_dies_leaves_no_mixture(tmp_path, name, deaths):
    drawn, killed_at = random.Random(deaths), 0.0
    with ElasticJob(tmp_path, "-np", "4", "--min-np", "1", *AT_ONCE, program=PROGRAM, OPTIMIZER=name) as job:
        for _ in range(deaths):
            until_all_train(job, killed_at)
            time.sleep(drawn.uniform(0, 0.1))
            victim = drawn.choice(sorted(job.training()))
            os.kill(victim, signal.SIGKILL)
            while job.is_alive(victim):
                time.sleep(0.001)
            killed_at = time.monotonic()
        until_all_train(job, killed_at)
        (tmp_path / "last").touch()
        assert job.wait(60) == 0, job.out
        assert job.out.count("ended well") > 1


def test_each_share_has_a_copy_on_another_host_if_there_is_one():
    assert sharded_state.keepers_of([0, 0, 0]) == [1, 2, 0]
    assert sharded_state.keepers_of([0, 0, 1, 1]) == [2, 2, 0, 0]
    assert sharded_state.keepers_of([0, 0, 1]) == [2, 2, 0]


def test_a_share_that_both_ranks_have_lost_is_an_error():
    held = sharded_state._Held
    newest, older = held(b"b", b"a", [0], [1, 2, 0]), held(b"a", b"a", [0, 3], [1, 2, 3, 0])
    both = [[older, newest], [held(b"a", b"a", [1, 0], [1, 2, 3, 0])], [], [held(b"a", b"a", [2, 1], [1, 2, 3, 0])]]
    assert sharded_state._senders(both) == (older, [0, 1, 3, 0])
    with pytest.raises(sharded_state.HvdStateError, match="former rank 1, whose copy was on former rank 2.*HVD425"):
        sharded_state._senders([[older], [], []])
