"""Members of elastic jobs end in all ways, at random places: whatever is left goes on, and the job's end is the right
one. Signals, exceptions, sys.exit and os._exit, behind wrappers or not, and stops; within a step, a commit, a save, a
restore, a sync, a join, and after training.
"""

import json
import random
import signal
import time

import pytest
from elastic_jobs import AT_ONCE, HERE, ElasticJob
from ranks import everything

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
WAYS = (*SIGNALS, *SIGNALS, "raise", "exit", "exit 143", "_exit", "stop")
PLACES = ("step", "step", "commit", "commit", "save", "restore", "sync", "join")
WRAP = """case $(( HVDLITE_MEMBER % 4 )) in
0) exec "$@" ;;
1) "$@"; exit $? ;;
2) "$@" | cat ;;
*) "$@" || exit 7 ;;
esac
"""


def drawn(seed):
    """({member: its end}, the exit code of the job): of four members but one, and of some that come later."""
    r = random.Random(seed)
    spared, deaths = r.randrange(4), {}
    for member in [each for each in range(4) if each != spared] + [4 + r.randrange(3), 7 + r.randrange(3)]:
        place = r.choice(PLACES)
        if place == "join" and member in (2, 3):
            place = "step"  # before there is a rank, the code of a wrapper is all that is known
        way = r.choice(WAYS if place != "join" or member >= 4 else (*SIGNALS, "stop"))
        seconds = r.randint(1, 20 if r.random() < 0.1 else 3) if way == "stop" else r.uniform(0, 0.02)
        deaths[member] = [place, 1 if place in ("restore", "join") else r.randint(1, 8), way, seconds]
    code = 0
    if r.random() < 0.3:
        way = r.choice((*SIGNALS, "raise"))
        deaths[spared] = ["after", 1, way, 0]
        code = 1 if way == "raise" else 128 + way
        code = code if spared < 2 else {2: 0, 3: 7}[spared]  # the wrapper's
    return deaths, code


@pytest.mark.parametrize("seed", everything(*range(60)))
def test_a_job_ends_as_if_nothing_had_happened(tmp_path, seed):
    deaths, code = drawn(seed)
    (tmp_path / "deaths.json").write_text(json.dumps(deaths))
    (tmp_path / "wrap.sh").write_text(WRAP)
    words = ("-np", "4", "--min-np", "1", *AT_ONCE, "--tolerate", "exception", "sh", str(tmp_path / "wrap.sh"))
    program, plan = str(HERE / "elastic_deaths.py"), {"epochs": 1000, "pause": 0.01}
    plane = random.Random(seed).choice(("shm", "p2p"))
    with ElasticJob(
        tmp_path, *words, plan=plan, program=program, PYTHONPATH=str(HERE), HVDLITE_PLANE=plane, PYTHONFAULTHANDLER="1"
    ) as job:
        due = {f"{member}.met" for member, (place, *_) in deaths.items() if place != "after"}
        end = time.monotonic() + 6 + max(seconds for *_, seconds in deaths.values())
        while time.monotonic() < end and not all((tmp_path / each).exists() for each in due):
            assert job.process.poll() is None, job.out
            time.sleep(0.05)
        job.until_training(len(job.training()) or 1, job.newest())
        (tmp_path / "last").touch()
        print(seed, code, len(list(tmp_path.glob("*.met"))), "ends:", deaths, job.finish(code))
