"""How is the end of a process judged in an elastic job, and who is waited for? The table, and jobs whose ranks end
behind wrappers, by themselves within training, after it, or in init.
"""

import re
import signal

from elastic_jobs import AT_ONCE, PROGRAM, ElasticJob, said

from hvdlite.launcher.store.elastic_process_end import End, judged

LONG = {"epochs": 1000}
NEVER = ("--blacklist-cooldown-range", "1000", "1000")
KILLED = (
    "rank 1 (pid P on localhost) killed by SIGKILL; the others go on; host localhost gets no new rank for 1000 s "
    "[HVD402]"
)
IN, OVER = {"training": True, "others": 2}, {"over": True}
MEANT = [
    ("REMOVED", End(0, removed=True, **IN)),
    ("UNUSED", End(1, new=True)),
    ("WELL", End(0)),  # no training function, or it has returned
    ("LOSS", End(0, **IN)),
    ("LOSS", End(-9, **IN)),
    ("LOSS", End(255, with_host=True, **IN)),
    ("LOSS", End(137, **IN)),
    ("LOSS", End(143, reason="rank 1 called sys.exit(143)", **IN)),
    ("LOSS", End(0, reason="rank 1 called sys.exit(143)", **IN)),  # behind a pipe
    ("LOSS", End(1, vanished=True, **IN)),  # behind a wrapper that has a code of its own
    ("FAILURE", End(1, reason="rank 1 raised ValueError", **IN)),
    ("FAILURE", End(3, **IN)),
    ("FAILURE", End(1, reason="rank 1 raised ValueError: it called sys.exit(137)", **IN)),
    ("FAILURE", End(0, reason="rank 1 raised ValueError", others=2)),  # behind a pipe
    ("FAILURE", End(7, reason="rank 1 called sys.exit(3)", vanished=True, **IN)),
    ("FAILURE", End(255, **IN)),
    ("LOSS", End(-9, others=2, **OVER)),
    ("LOSS", End(-9, training=True)),  # the last one: the job ends, as nobody has the state
    ("LATE", End(-9, **OVER)),
    ("LATE", End(-9, returned=True, others=2)),
    ("LATE", End(0, training=True, **OVER)),
    ("LATE", End(0, with_host=True, **OVER)),
    ("FAILURE", End(3, **OVER)),
]
TOLERATED = [
    ("LOSS", End(1, reason="rank 1 raised ValueError", **IN)),
    ("LOSS", End(1, **IN)),  # raised when the job had failed already
    ("FAILURE", End(1, reason="rank 1 called sys.exit(1)", **IN)),
    ("LOSS", End(3, reason="rank 1 called sys.exit(3)", **IN)),
    ("LOSS", End(7, reason="rank 1 called sys.exit(3) (train.py:7)", **IN)),  # behind a wrapper
    ("LOSS", End(3, reason="rank 1 called sys.exit(4)", **IN)),
    ("FAILURE", End(4, **IN)),
    ("LATE", End(1, reason="rank 1 raised ValueError", **OVER)),
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


def test_the_last_rank_that_is_killed_behind_a_pipe_has_not_ended_well(tmp_path):
    (tmp_path / "wrap.sh").write_text('"$@" | cat')
    with ElasticJob(tmp_path, "-np", "1", "--min-np", "1", *AT_ONCE, "sh", f"{tmp_path}/wrap.sh", plan=LONG) as job:
        job.until_training(1, 4)
        job.kill(0)
        assert job.wait(60) == 1 and said(job)[-1].endswith("[HVD420]"), job.out


ENDS_ITSELF = """
import os, runpy, signal, sys
sys.path.insert(0, os.path.dirname({0!r}))
def broken(*_):
    raise RuntimeError("an ECC error")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR2, broken)
signal.signal(signal.SIGHUP, lambda *_: sys.exit(3))
runpy.run_path({0!r}, run_name="__main__")
import hvdlite as hvd
hvd.shutdown()
hvd.init()  # training has returned all the same
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
    asks = f"test -e {tmp_path}/asked && cat {tmp_path}/offered; touch {tmp_path}/asked"  # at first it says nothing
    script = ("--host-discovery-script", asks, "-np", "1", "--max-np", "2")
    with ElasticJob(tmp_path, *script, plan=LONG, program=str(tmp_path / "program.py")) as job:
        job.until_training(1, 4)
        assert "prints no host that has a slot [HVD708]" in said(job)[0]
        (tmp_path / "go").touch()
        job.until_training(2, 6)
        (tmp_path / "last").touch()
        assert job.finish() == [1, 2]


DIES_IN_INIT = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname({0!r}))
from hvdlite.rendezvous import bootstrap as _meeting
if os.environ["HVDLITE_MEMBER"] == "1":
    _meeting.meet = lambda *_: os.kill(os.getpid(), 9)  # the store has told all of it that they are there
runpy.run_path({0!r}, run_name="__main__")
"""


def test_the_others_meet_without_a_rank_that_is_lost_in_init(tmp_path):
    (tmp_path / "program.py").write_text(DIES_IN_INIT.format(PROGRAM))
    words = ("-np", "3", "--min-np", "2", *NEVER)
    with ElasticJob(tmp_path, *words, plan={"epochs": 1}, program=str(tmp_path / "program.py")) as job:
        assert job.finish() == [2]
        assert said(job)[0] == KILLED
