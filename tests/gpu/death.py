"""A rank of two dies while tensors on GPUs are summed: is the other one told within a second, and is its device free?

The dead one leaves the time of its death in a file (the clock is the machine's). The other one may be inside of NCCL's
kernel on the device, which ends by the abort of the communicator only: so it also waits for its device. Ranks that
share a GPU have no communicator, unless NCCL lets them. Where there is one, a second claim is told: that of its abort.
"""

import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from machine import tell_most

import hvdlite.torch as hvd

MOST_S = 1.0


def dies(when):
    """In the midst of things, not between them."""
    when.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def main(when):
    """Sums 16 MB until somebody is gone."""
    hvd.init()
    device = f"cuda:{hvd.local_rank() % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    value = torch.ones(4_000_000, device=device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            hvd.allreduce_(value)
    by_nccl = value.is_cuda and not any("hvdlite" in str(one.message) for one in said)  # rank 0 hears of another way
    hvd.barrier()
    if hvd.rank() == 1:
        threading.Timer(0.5, dies, (when,)).start()
    try:
        while True:
            hvd.allreduce_(value)
            if value.is_cuda:
                torch.cuda.synchronize()
    except hvd.HvdPeerLostError as error:
        assert "rank 1 " in str(error), error
        if value.is_cuda:
            torch.cuda.synchronize()
        took = time.monotonic() - float(when.read_text())
        for claim in ("death", "abort") if by_nccl else ("death",):
            tell_most(claim, f"on {device}, from the death of rank 1 to rank 0's error", took, MOST_S, "s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
