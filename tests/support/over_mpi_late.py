"""What a rank does that is stopped while it leaves: a part of over_mpi.py's programs."""

import os
import signal
import subprocess

import numpy as np

import hvdlite.numpy as hvd
from hvdlite import _core


def slow(seconds):
    """The last rank is stopped while it closes a process set, for longer than the others wait for it: what it sends
    later is not taken for a word of the next set. Then the same at the end of a life."""
    me, last = hvd.rank(), hvd.size() - 1
    close = _core.set_close
    for _ in range(4):
        pair = hvd.add_process_set([0, last])
        for _ in range(3):
            if pair.included():
                assert hvd.allreduce(np.full(7, me), op=hvd.Sum, name="x", process_set=pair).tolist() == [last] * 7
        if me == last:
            _core.set_close = lambda number: (stopped(seconds), close(number))[1]
        hvd.remove_process_set(pair)
        _core.set_close = close
    for incarnation in range(3):
        if me == last and incarnation == 0:
            stopped(2 * float(seconds))  # they wait for it longer here
        hvd.shutdown()
        hvd.init()
        assert (hvd.allreduce(np.ones(5), op=hvd.Sum, name="x") == last + 1).all()
    hvd.shutdown()
    os.write(1, b"fine\n")


def stopped(seconds):
    """As Ctrl-Z and fg would do."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
