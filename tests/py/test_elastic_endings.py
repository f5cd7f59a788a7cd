"""How does an elastic job end or go on when something is wrong, and what does a user read then? Texts and exit codes.

That the work is right after losses is the question of test_elastic_kills.py.
"""

import re
import signal

import pytest
from elastic_jobs import AT_ONCE, PROGRAM, ElasticJob
from ranks import everything

from hvdlite.launcher.elastic.ends import End, judged

LONG = {"epochs": 1000}
NEVER = ("--blacklist-cooldown-range", "1000", "1000")
KILLED = "rank 1 (pid P on localhost) killed by SIGKILL; the others go on"
COOLS = "; host localhost gets no new rank for 1000 s [HVD402]"
OUT = "; host localhost is left out for 600 s: 5 processes in a row ended there before they were ranks [HVD401]"


def said(job):
    """The launcher's own lines, and the last ones of tracebacks."""
    shown = re.findall(r"^hvdlite-run: (.*)|^\[\d\]<stderr>:(\w[\w.]*Error: .*)", job.out, re.MULTILINE)
    return [re.sub(r"\.py:\d+", ".py:N", re.sub(r"pid \d+", "pid P", "".join(each))) for each in shown]


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


IN, OVER = {"training": True, "others": 2}, {"over": True}
MEANT = [
    ("REMOVED", End(0, removed=True, **IN)),
    ("UNUSED", End(1, new=True)),
    ("WELL", End(0)),  # no training function, or it has returned
    ("LOSS", End(0, **IN)),
    ("LOSS", End(-9, **IN)),
    ("LOSS", End(255, gone=True, **IN)),
    ("LOSS", End(137, **IN)),
    ("LOSS", End(143, said="rank 1 called sys.exit(143)", **IN)),
    ("LOSS", End(0, said="rank 1 called sys.exit(143)", **IN)),  # behind a pipe
    ("LOSS", End(1, vanished=True, **IN)),  # behind a wrapper that has a code of its own
    ("FAILURE", End(1, said="rank 1 raised ValueError", **IN)),
    ("FAILURE", End(3, **IN)),
    ("FAILURE", End(0, said="rank 1 raised ValueError", others=2)),  # behind a pipe
    ("FAILURE", End(7, said="rank 1 called sys.exit(3)", vanished=True, **IN)),
    ("FAILURE", End(255, **IN)),
    ("LOSS", End(-9, others=2, **OVER)),
    ("LOSS", End(-9, training=True)),  # the last one: the job ends, as nobody has the state
    ("LATE", End(-9, **OVER)),
    ("LATE", End(-9, returned=True, others=2)),
    ("LATE", End(0, training=True, **OVER)),
    ("LATE", End(0, gone=True, **OVER)),
    ("FAILURE", End(3, **OVER)),
]
TOLERATED = [
    ("LOSS", End(1, said="rank 1 raised ValueError", **IN)),
    ("LOSS", End(1, **IN)),  # raised when the job had failed already
    ("FAILURE", End(1, said="rank 1 called sys.exit(1)", **IN)),
    ("LOSS", End(3, said="rank 1 called sys.exit(3)", **IN)),
    ("LOSS", End(7, said="rank 1 called sys.exit(3) (train.py:7)", **IN)),  # behind a wrapper
    ("FAILURE", End(4, **IN)),
    ("LATE", End(1, said="rank 1 raised ValueError", **OVER)),
    ("WELL", End(0, **OVER)),
]


def test_what_an_end_means():
    assert [judged(end).name for _, end in MEANT] == [name for name, _ in MEANT]
    assert [judged(end, {"exception", "3"}).name for _, end in TOLERATED] == [name for name, _ in TOLERATED]
    assert [judged(End(code, **IN), preempted=True).name for code in (0, 74, 75, 76)] == 3 * ["WELL"] + ["FAILURE"]


WRAPPER = """
case $HVDLITE_MEMBER in
1) "$@" | cat ;;
2) "$@" || exit 7 ;;
*) "$@"; exit $? ;;
esac
"""


def test_a_rank_that_is_killed_behind_a_wrapper_is_lost_whatever_code_that_has(tmp_path):
    (tmp_path / "wrap.sh").write_text(WRAPPER)
    words = ("-np", "4", "--min-np", "1", *NEVER, "sh", str(tmp_path / "wrap.sh"))
    with ElasticJob(tmp_path, *words, plan=LONG, HVDLITE_PLANE="shm") as job:
        for left in (4, 3, 2):
            job.until_training(left, job.newest() + 2)
            job.kill(left - 1)
        job.until_training(1, job.newest() + 2)
        (tmp_path / "last").touch()
        assert job.finish() == [4, 3, 2, 1]
        ends = re.findall(
            r"exited with code (\d+)( \(128 \+ 9, SIGKILL\)| within its training f.*?)?; the others", job.out
        )
        assert ends == [("137", " (128 + 9, SIGKILL)"), ("7", ""), ("0", " within its training function")], job.out


ENDS_ITSELF = """
import os, runpy, signal, sys
sys.path.insert(0, os.path.dirname({0!r}))
def broken(*_):
    raise RuntimeError("an ECC error")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR2, broken)
signal.signal(signal.SIGHUP, lambda *_: sys.exit(3))
runpy.run_path({0!r}, run_name="__main__")
if os.environ["HVDLITE_RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)  # while it saves, say
"""


def test_ends_that_are_tolerated_are_losses_in_training_and_the_last_rank_that_is_killed_fails_the_job(tmp_path):
    (tmp_path / "program.py").write_text(ENDS_ITSELF.format(PROGRAM))
    words = ("-np", "3", "--min-np", "3", *AT_ONCE, "--tolerate", "exception,3")
    with ElasticJob(tmp_path, *words, plan=LONG, program=str(tmp_path / "program.py")) as job:
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
            job.until_training(3, job.newest() + 2)
            job.kill(1, number=number)
            job.until_training(3, job.newest() + 2)
        (tmp_path / "last").touch()
        assert job.wait(60) == 128 + signal.SIGKILL, job.out
        job.until_gone()
        lost = [line for line in said(job) if line.startswith("rank 1 (pid P on localhost) exited with code ")]
        assert [line.partition("code ")[2][0] for line in lost if "; the others go on" in line] == ["0", "1", "3"], (
            job.out
        )
        late = "rank 0 (pid P on localhost) killed by SIGKILL after training: what it had left to do is missing"
        assert said(job)[-1].startswith(late) and len({*job.pids()}) == 6


LATER = """
import os, runpy, sys, time
sys.path.insert(0, os.path.dirname({0!r}))
def until(name):
    while not os.path.exists(os.path.join(sys.argv[1], name)):
        time.sleep(0.01)
if os.environ["HVDLITE_MEMBER"] == "0":
    open(os.path.join(sys.argv[1], "offered"), "w").write("localhost:2")
    until("second")
else:
    open(os.path.join(sys.argv[1], "second"), "w").close()
    until("go")
runpy.run_path({0!r}, run_name="__main__")
"""


def test_nobody_waits_for_a_process_that_was_started_after_the_first_ones(tmp_path):
    (tmp_path / "program.py").write_text(LATER.format(PROGRAM))
    (tmp_path / "offered").write_text("localhost:1")
    script = ("--host-discovery-script", f"cat {tmp_path}/offered", "-np", "1", "--max-np", "2")
    with ElasticJob(tmp_path, *script, plan=LONG, program=str(tmp_path / "program.py")) as job:
        job.until_training(1, 4)
        (tmp_path / "go").touch()
        job.until_training(2, 6)
        (tmp_path / "last").touch()
        assert job.finish() == [1, 2]


DIES_IN_INIT = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname({0!r}))
from hvdlite import _meeting
if os.environ["HVDLITE_MEMBER"] == "1":
    _meeting.meet = lambda *_: os.kill(os.getpid(), 9)  # the store has told all of it that they are there
runpy.run_path({0!r}, run_name="__main__")
"""


def test_the_others_meet_without_a_rank_that_is_lost_in_init(tmp_path):
    (tmp_path / "program.py").write_text(DIES_IN_INIT.format(PROGRAM))
    words = ("-np", "3", "--min-np", "2", *NEVER)
    with ElasticJob(tmp_path, *words, plan={"epochs": 1}, program=str(tmp_path / "program.py")) as job:
        assert job.finish() == [2]
        assert said(job)[0] == KILLED + COOLS
