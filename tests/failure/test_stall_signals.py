"""A script does with signals what it likes: a stall report then lacks a stack, and harms nobody."""

import sys

import pytest
from launching import Launch

PROGRAM = """
import os, signal, sys, time
import numpy as np
import hvdlite as hvd

hvd.init()
hvd.allreduce(np.ones(4), name="first")
heard = []
way = {"default": signal.SIG_DFL, "own": lambda *_: heard.append(1)}[sys.argv[1]]
for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
    signal.signal(number, way)
while hvd.rank() == 1 and not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
print("sum", hvd.allreduce(np.ones(4), op=hvd.Sum, name="wanted")[0], "heard", heard)
"""


@pytest.mark.parametrize("way", ["default", "own"])
def test_a_rank_whose_script_has_taken_all_signals_is_told_of_and_lives(way, tmp_path):
    told = tmp_path / "told"
    with Launch("-np", 2, "--stall-check-time", 1, sys.executable, "-c", PROGRAM, way, told) as job:
        job.until("rank 1 (pid")
        told.touch()
        assert job.wait() == 0 and job.out.count("sum 2.0 heard []") == 2, job.out + job.err
        assert "missing on rank 1" in job.err and "Python stack" not in job.err, job.err


FAULTHANDLER = """
import faulthandler, os, signal, sys, time
own = open(sys.argv[1] + os.environ["HVDLITE_RANK"], "w+")
for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
    if number % 2 == signal.SIGRTMAX % 2:
        faulthandler.register(number, file=own)
import numpy as np
import hvdlite as hvd

hvd.init()
hvd.allreduce(np.ones(4), name="first")
os.kill(os.getpid(), signal.SIGRTMAX - 4)
own.seek(0)
print("stack", "File" in own.read())
"""


def test_a_signal_that_c_handles_for_the_user_stays_the_users(tmp_path):
    with Launch("-np", 2, sys.executable, "-c", FAULTHANDLER, tmp_path / "own") as job:
        assert job.wait() == 0 and job.out.count("stack True") == 2, job.out + job.err
