"""Three time-outs: that all come (start), that all take part (collective), that all let go (shutdown)."""

import sys

import pytest
from launching import launch
from ranks import everything

PYTHON = (sys.executable, "-u", "-c")
LATE = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(600)
import hvdlite as hvd
hvd.init()
"""
ABSENT = """
import pathlib, time, numpy, hvdlite as hvd
hvd.init()
hvd.allreduce(numpy.ones(3), name="first")
caught = pathlib.Path({caught!r})
while hvd.rank() == 1 and not caught.exists():  # rank 0 is to say what it caught before anybody stops it
    time.sleep(0.05)
try:
    {call}
except hvd.HvdTimeoutError as error:
    print("said", type(error).__name__, error, flush=True)
    caught.touch()
    raise
"""


def test_who_does_not_come_in_time_is_named():
    code, _, err = launch("-np", 2, "--start-timeout", 1, "--failure-grace", 0, *PYTHON, LATE)
    assert code != 0 and "rank 1 did not call init within 1 s" in err, err


@pytest.mark.parametrize(
    "call, what",
    [
        ("hvd.allreduce(numpy.ones(3), name='gradient')", "'allreduce.gradient'"),
        ("hvd.join()", "join"),
        *everything(
            ("hvd.synchronize(hvd.allreduce_async(numpy.ones(3), name='gradient'))", "'allreduce.gradient'"),
            ("hvd.allgather(numpy.ones(3))", "allgather"),
            ("hvd.barrier()", "barrier"),
        ),
    ],
)
def test_a_collective_that_takes_too_long_fails_the_job(call, what, tmp_path):
    words = ("-np", 2, "--collective-timeout", 0.5, "--failure-grace", 60)
    code, out, err = launch(*words, *PYTHON, ABSENT.format(call=call, caught=str(tmp_path / "caught")))
    assert code == 1 and "nothing has moved for 0.5 s" in out and "said HvdTimeoutError" in out, out + err
    assert what in out and "was submitted by rank 0, missing on rank 1" in out, out
    assert "HVDLITE_COLLECTIVE_TIMEOUT" in out and err.count("rank 0 says: nothing has moved") == 1, err


AGAIN = """
import pathlib, sys, time, numpy, hvdlite as hvd
hvd.init()
told = pathlib.Path(sys.argv[1])
if hvd.rank() == 0:
    try:
        hvd.allreduce(numpy.ones(3), name='gradient', timeout=0.1)
    except hvd.HvdTimeoutError as error:
        try:
            hvd.synchronize(error.handle)
        except hvd.HvdTimeoutError as last:
            print("said", last.code, last, flush=True)
            told.touch()
            raise
while not told.exists():
    time.sleep(0.05)
"""


def test_who_waits_again_after_a_limit_of_his_own_has_that_of_the_job(tmp_path):
    words = ("-np", 2, "--stall-check-time", 1, "--collective-timeout", 3, "--failure-grace", 60)
    code, out, err = launch(*words, *PYTHON, AGAIN, tmp_path / "told")
    assert code == 1 and "said HVD550 " in out and "was submitted by rank 0, missing on rank 1" in out, out + err
    assert "hvdlite: stall: collectives wait" in err, err


def test_the_others_hear_of_it_too():
    call = "hvd.allreduce(numpy.ones(3), name='gradient' if hvd.rank() else 'other')"
    body = ABSENT.format(call=call, caught="/")
    code, out, err = launch("-np", 2, "--failure-grace", 20, *PYTHON, body, HVDLITE_COLLECTIVE_TIMEOUT="0.5")
    assert code == 1 and out.count("said HvdTimeoutError") == 2 and "nothing has moved for 0.5 s" in out, err


def test_join_may_wait_for_longer_than_the_limit_while_the_others_train():
    body = """
import time, numpy, hvdlite as hvd
hvd.init()
for step in range(6 if hvd.rank() else 1):
    time.sleep(0.5 * (step > 0))
    hvd.allreduce(numpy.ones(3))
hvd.join()
"""
    code, _, err = launch("-np", 2, "--collective-timeout", 1.5, *PYTHON, body)
    assert code == 0, err


def test_all_three_in_a_file(tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "some.yaml").write_text("timeouts:\n  start: 50\n  collective: 0.5\n  shutdown: 3\n")
    words = ("-np", 1, "--config-file", tmp_path / "some.yaml", "env")
    code, out, err = launch(*words)
    assert code == 0, err
    for line in ("START_TIMEOUT=50", "COLLECTIVE_TIMEOUT=0.5", "LEAVE_TIMEOUT=3"):
        assert f"HVDLITE_{line}\n" in out
