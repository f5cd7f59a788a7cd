"""What ranks do that Slurm or a scheduler's launcher has started: `on_slurm.py NAME` runs the function of this name.

Output is written in one piece, as lines of ranks must not mix. "fine" in a line of its own: all was as it should be.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np

import hvdlite.numpy as hvd


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def meet(slots):
    """Two lives; ranks are where the scheduler has put them, by Horovod's count."""
    counts = [int(count) for count in slots.split(",")]
    for _ in range(2):
        hvd.init()
        host, local = [(host, local) for host, count in enumerate(counts) for local in range(count)][hvd.rank()]
        assert (hvd.size(), hvd.local_rank(), hvd.local_size()) == (sum(counts), local, counts[host])
        assert hvd.cross_rank() == sum(count > local for count in counts[:host])
        assert os.uname().nodename == f"node{'ABCDEFGH'[host]}" or len(counts) == 1
        assert (hvd.allreduce(np.full(1000, hvd.rank() + 1.0), op=hvd.Sum) == hvd.size() * (hvd.size() + 1) / 2).all()
        assert hvd.allgather(np.array([hvd.rank()])).tolist() == list(range(hvd.size()))
        hvd.shutdown()
    say("fine")


def die(rank):
    """One rank is killed, the others say who: in the second barrier, or already as they leave the first one."""
    hvd.init()
    try:
        hvd.barrier()
        if hvd.rank() == int(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
    except hvd.HvdPeerLostError as error:
        say("lost:", error)
        sys.exit(3)


def wait(to):
    """Trains until Slurm's signal to the ranks or the job's script; all ranks stop at the same step, as they should."""
    told = []
    signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
    hvd.init()
    until = time.monotonic() + 120
    if hvd.rank() == 0:
        batch = ["--batch"] if to == "script" else []
        # scancel is a process of this step, so that the signal comes to it, too
        scancel = ["env", "--ignore-signal=USR1", "scancel"]
        subprocess.run([*scancel, "--signal=USR1", *batch, os.environ["SLURM_JOB_ID"]], check=True)
    while time.monotonic() < until:
        if hvd.allreduce(np.array([len(told)]), op=hvd.Max)[0]:
            say("committed")
            return
        time.sleep(0.01)
    sys.exit("no signal came")


def place():
    """Where the launcher says that this rank is; no job."""
    say("rank", os.environ["HVDLITE_RANK"], "of", os.environ["HVDLITE_SIZE"], "on", os.uname().nodename)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
