"""How does an elastic job end or go on when something is wrong, and what does a user read then? Texts and exit codes.

That the work is right after losses is the question of test_elastic_kills.py.
"""

import signal

import pytest
from elastic_jobs import AT_ONCE, PROGRAM, ElasticJob, said
from ranks import everything

LONG = {"epochs": 1000}
NEVER = ("--blacklist-cooldown-range", "1000", "1000")
KILLED = "rank 1 (pid P on localhost) killed by SIGKILL; the others go on"
COOLS = "; host localhost gets no new rank for 1000 s [HVD402]"
OUT = "; host localhost is left out for 600 s: 5 processes in a row ended there before they were ranks [HVD401]"


MISTAKE = "ValueError: a mistake of the script"
RAISED = "rank 1 (pid P on localhost) exited with code 1: rank 1 raised"
OFTEN = "the ranks have changed more often than --reset-limit 0 allows [HVD422]"
SHORT = "2 ranks wait for 1 more (--min-np 3), at most 8 s (--elastic-timeout)"
TOO_SHORT = "2 ranks have waited for 1 more (--min-np 3), for 8 s (--elastic-timeout) [HVD421]"
ALL = [KILLED.replace("rank 1", f"rank {rank}") + COOLS for rank in range(3)]
LOST = "all ranks that had the training state are gone, and the state is lost with them"
ENDS = [
    ("--min-np 1", (), [MISTAKE, f"{RAISED} {MISTAKE} (elastic_training.py:N) [HVD401]"]),
    ("--min-np 1 --reset-limit 0", (1,), [KILLED + COOLS, OFTEN]),
    *everything(("--min-np 3 --elastic-timeout 8", (1,), [KILLED + COOLS, SHORT, TOO_SHORT])),
    (
        "--min-np 1",
        (0, 1, 2),
        [
            *ALL,
            f"{LOST}: start the job again. If the script uses State.save_to, the job goes on from that file [HVD420]",
        ],
    ),
]


FAILS = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname({0!r}))
runpy.run_path({0!r}, run_name="__main__")
if os.environ["HVDLITE_MEMBER"] == "1":
    {1}
"""


@pytest.mark.parametrize("words, kills, says", ENDS)
def test_what_ends_a_job_is_told_once_by_its_launcher(tmp_path, words, kills, says):
    plan = LONG if kills else {**LONG, "fail_at": 5}
    with ElasticJob(tmp_path, "-np", "3", *words.split(), *NEVER, plan=plan) as job:
        if kills:
            job.until_training(3, 4)
            job.kill(*kills)
        assert job.wait(60) == 1
        job.until_gone()
        assert sorted(set(said(job))) == sorted(says), job.out


LEAVES = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname({0!r}))
try:
    runpy.run_path({0!r}, run_name="__main__")
except ValueError:
    os._exit(0)
"""


@pytest.mark.parametrize("does, code", [("raise ValueError", 1), *everything(("sys.exit(3)", 3))])
def test_a_newcomer_that_fails_by_itself_ends_the_job(tmp_path, does, code):
    (tmp_path / "program.py").write_text(FAILS.format(PROGRAM, does))
    (tmp_path / "offered").write_text("localhost:1\n")
    script = ("--host-discovery-script", f"cat {tmp_path}/offered", "-np", "1")
    with ElasticJob(tmp_path, *script, plan=LONG, program=str(tmp_path / "program.py")) as job:
        job.until_training(1)
        (tmp_path / "offered").write_text("localhost:2\n")
        job.until_training(2, 4)
        (tmp_path / "last").touch()
        assert job.wait(60) == code and said(job)[-1].startswith(f"rank 1 (pid P on localhost) exited with code {code}")


@pytest.mark.parametrize("member, code, says", [("1", 1, " and did not call init"), ("2", 0, "; the others go on")])
def test_who_ends_well_before_it_is_a_rank_has_not_ended_training(tmp_path, member, code, says):
    """At first the others need it; a newcomer has ended early."""
    text = FAILS.format(PROGRAM, "").splitlines()
    text[1:1] = ["import os, sys", f"if os.environ['HVDLITE_MEMBER'] == '{member}': sys.exit(0)"]
    (tmp_path / "program.py").write_text("\n".join(text[:-2]))
    words = ("-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1")
    with ElasticJob(tmp_path, *words, plan=LONG, program=str(tmp_path / "program.py")) as job:
        if not code:
            job.until_training(2, 4)
            job.kill(1)
            job.until(says + "; host localhost gets no new rank for 1 s [HVD401]")
            job.until_training(2, 4)
            (tmp_path / "last").touch()
        assert job.wait(60) == code and f"a new rank (pid P on localhost) exited with code 0{says}" in "".join(
            said(job)
        )


def test_it_is_told_once_that_ranks_have_ended_well_while_the_others_go_on(tmp_path):
    (tmp_path / "program.py").write_text(LEAVES.format(PROGRAM))
    words = ("-np", "3", "--min-np", "3")
    with ElasticJob(tmp_path, *words, plan={"fail_at": 9}, program=str(tmp_path / "program.py")) as job:
        assert job.finish() == [3, 1]  # the next rank 1 does the same
        over = "has ended with code 0: training counts as over, and lost ranks are not replaced"
        assert [line for line in said(job) if over in line] == [f"rank 1 (pid P on localhost) {over}"], job.out


def test_a_stopped_rank_is_killed_and_the_others_go_on(tmp_path):
    with ElasticJob(tmp_path, "-np", "3", "--min-np", "2", "--collective-timeout", "1", *NEVER, plan=LONG) as job:
        job.until_training(3, 4)
        job.kill(1, number=signal.SIGSTOP)
        job.until_training(2)
        (tmp_path / "last").touch()
        assert job.finish() == [3, 2]
        waited = said(job)[0]
        assert waited.startswith("rank 1 (pid P on localhost) kept the others waiting: nothing has moved for 1 s (")
        assert waited.endswith("rank 1 (pid P) is stopped (by a signal or a debugger) [HVD550]; hvdlite-run kills it")
        assert said(job)[1] == KILLED + COOLS


def test_nobody_is_left_when_the_launcher_is_killed(tmp_path):
    with ElasticJob(tmp_path, "-np", "2", "--min-np", "1", plan=LONG) as job:
        job.until_training(2)
        job.send(signal.SIGKILL)
        job.until_gone()


LACKS = """
import os, runpy, sys
if int(os.environ["HVDLITE_MEMBER"]) > 1:
    import no_such_module
sys.path.insert(0, os.path.dirname(PROGRAM))
runpy.run_path(PROGRAM, run_name="__main__")
"""


@pytest.mark.parametrize("lacks", everything("ModuleNotFoundError: No module named 'no_such_module'"))
def test_a_host_on_which_no_process_becomes_a_rank_is_left_out(tmp_path, lacks):
    program = tmp_path / "lacks.py"
    program.write_text(f"PROGRAM = {PROGRAM!r}\n{LACKS}")
    with ElasticJob(tmp_path, "-np", "2", "--min-np", "1", *AT_ONCE, plan=LONG, program=str(program)) as job:
        job.until_training(2, 4)
        job.kill(1)
        job.until("left out")
        (tmp_path / "last").touch()
        assert job.finish() == [2, 1]
        new = f"a new rank (pid P on localhost) exited with code 1 (last words: {lacks}); the others go on"
        assert said(job).count(f"{new} [HVD401]") == 4 and said(job)[-1] == new + OUT, job.out


MISFIT = """
import os, sys, time
import torch
import hvdlite.torch as hvd
hvd.init()
model = torch.nn.Linear(4 if os.environ["HVDLITE_MEMBER"] == "0" else 5, 1)
state = hvd.elastic.TorchState(model=model, step=0)
@hvd.elastic.run
def train(state):
    print("trains", flush=True)
    while not os.path.exists(os.path.join(sys.argv[1], "last")):
        state.step += hvd.allreduce(torch.ones(1), op=hvd.Max).item()
        time.sleep(0.02)
        state.commit()
train(state)
"""


DIFFERS = "rank 0 has weight [1, 4] float32; rank 1 has weight [1, 5] float32"


@pytest.mark.parametrize("cooldown, then", everything((NEVER, COOLS.replace("402", "401")), (AT_ONCE, OUT)))
def test_newcomers_with_another_model_leave_and_the_others_go_on(tmp_path, cooldown, then):
    (tmp_path / "program.py").write_text(MISFIT)
    (tmp_path / "offered").write_text("localhost:1\n")
    script = ("--host-discovery-script", f"cat {tmp_path}/offered", "-np", "1", *cooldown)
    with ElasticJob(tmp_path, *script, program=str(tmp_path / "program.py")) as job:
        job.until("trains")
        (tmp_path / "offered").write_text("localhost:1\n127.0.0.1:1\n")
        job.until("; host localhost")
        (tmp_path / "offered").write_text("localhost:2\n")  # the same
        job.until(then)
        (tmp_path / "last").touch()
        assert job.wait(60) == 0, job.out
        assert any(DIFFERS in line and line.endswith("; the others go on" + then) for line in said(job)), job.out
        assert said(job).count("the discovery script offers localhost:2") == 1


@pytest.mark.parametrize("restarts", everything("1"))
def test_a_job_that_starts_again_goes_on_from_its_file(tmp_path, restarts):
    words = ("-np", "2", "--elastic-timeout", "1", "--max-restarts", restarts, *NEVER)
    with ElasticJob(tmp_path, "--min-np", "2", *words, plan={**LONG, "saved": f"{tmp_path}/state"}) as job:
        job.until_training(2, 6)
        job.kill(1)
        job.until(f"training goes on from {tmp_path}/state")
        job.until_training(2, 6)
        (tmp_path / "last").touch()
        job.finish()
        assert "restart 1 of 1" in said(job)
