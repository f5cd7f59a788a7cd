"""SIGTERM and SIGUSR1 to hvdlite-run: the ranks of an elastic job commit and end with code 75, and the job goes on from
there when it is started again; where no file has the commit the code is the signal's; who does not commit is ended
after half of the signal grace.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
from elastic_jobs import AT_ONCE, PROGRAM, ElasticJob
from launching import Launch

from hvdlite.elastic import checkpoint

PLAN = {"samples": 480, "epochs": 1000, "pause": 0.01}
SAVED = (
    "the ranks have committed and ended: start the job again, and it goes on from the file of State.save_to [HVD424]"
)


def committed(job, path):
    """The last commit is in the file, and all ranks ended just after it."""
    step = len(checkpoint.read(path)["objects"]["log"])
    assert step == max(job.steps(pid)[-1][1] for pid in job.pids()), job.out
    return step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_ranks_commit_end_and_go_on(tmp_path, number):
    plan = {**PLAN, "saved": str(tmp_path / "state"), "seconds": 3600}
    with ElasticJob(tmp_path, "-np", "3", "--min-np", "1", "--max-restarts", "1", plan=plan) as job:
        job.until_training(3, 5)
        job.send(number)
        assert job.wait() == 75 and job.out.count(SAVED) == 1 and "restart" not in job.out, job.out
        assert f"{number.name}: the ranks save at their next commit and end" in job.out
        step = committed(job, plan["saved"])
        job.until_gone()
    with ElasticJob(tmp_path, "-np", "2", "--min-np", "2", plan=plan) as job:
        job.until_training(2, step)
        (tmp_path / "last").touch()
        assert job.finish() == [3, 2]


@pytest.mark.parametrize("saved", ["", "/dev/null.none/state"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_commit_that_no_file_has_is_not_promised(tmp_path, number, saved):
    with ElasticJob(tmp_path, "-np", "2", "--min-np", "1", plan={**PLAN, "saved": saved}) as job:
        job.until_training(2, 5)
        job.send(number)
        assert job.wait() == 128 + number and SAVED not in job.out, job.out
        assert (
            job.out.count(
                "at a commit, but no file contains it: call State.save_to with a path that rank 0 can write [HVD424]"
            )
            == 1
        ), job.out
        assert job.out.count("cannot be written (") == bool(saved), job.out


def test_newcomers_are_ended_and_the_loss_of_a_rank_changes_nothing(tmp_path):
    """The signal comes while the two that are left wait for a third, which takes for ever to get ready."""
    plan = {**PLAN, "saved": str(tmp_path / "state"), "late": 3600}
    with ElasticJob(tmp_path, "-np", "3", "--min-np", "3", *AT_ONCE, plan=plan) as job:
        job.until_training(3, 5)
        job.kill(0)
        job.until("the others go on")
        job.send(signal.SIGUSR1)
        assert job.wait() == 75 and job.out.count(SAVED) == 1, job.out
        assert "epoch 1: 2 ranks" in job.out
        committed(job, plan["saved"])
        job.until_gone()


def test_a_rank_killed_meanwhile_is_no_failure(tmp_path):
    plan = {**PLAN, "saved": str(tmp_path / "state")}
    with ElasticJob(tmp_path, "-np", "3", "--min-np", "1", plan=plan) as job:
        job.until_training(3, 5)
        (pid,) = job.kill(1, number=signal.SIGSTOP)
        job.send(signal.SIGUSR1)
        job.until("save at their next commit")
        os.kill(pid, signal.SIGKILL)
        assert job.wait() == 75 and job.out.count(SAVED) == 1, job.out
        committed(job, plan["saved"])


LATE = """import os, sys, time
print("here", flush=True)
while not os.path.exists(os.path.join(sys.argv[1], "go")):
    time.sleep(0.01)
"""


def test_a_signal_before_the_first_epoch_is_remembered(tmp_path):
    late = tmp_path / "late.py"
    late.write_text(LATE + Path(PROGRAM).read_text())
    plan = {**PLAN, "saved": str(tmp_path / "state")}
    with ElasticJob(tmp_path, "-np", "2", "--min-np", "1", plan=plan, program=str(late)) as job:
        job.until("here", 2)
        job.send(signal.SIGUSR1)
        job.until("save at their first commit")
        (tmp_path / "go").touch()
        assert job.wait() == 75 and committed(job, plan["saved"]) < 100, job.out


NEVER = """
import os, signal, sys, time
import hvdlite as hvd
from hvdlite.elastic import ObjectState, run

hvd.init()
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"got SIGTERM\\n"), sys.exit(9)))
print("here", flush=True)

@run
def train(state):
    while True:
        time.sleep(0.02)

train(ObjectState(hvd.broadcast_object, hvd.rank))
"""


@pytest.mark.parametrize("grace, numbers, code", [("2", [15], 143), ("600", [15, 15], 143), ("600", [2], 130)])
def test_ranks_that_do_not_commit_are_ended(grace, numbers, code):
    words = ["-np", "2", "--min-np", "1", "--signal-grace", grace, sys.executable, "-c", NEVER]
    with Launch(*words, merged=True) as job:
        job.until("here", 2)
        for number in numbers:
            job.send(number)
            if number == signal.SIGTERM:
                job.until("save at their next commit")
        assert job.wait() == code and job.out.count("got SIGTERM") == (0 if numbers == [2] else 2), job.out
