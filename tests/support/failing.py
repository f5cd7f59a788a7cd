"""A rank fails while all train, the others say what they hear of it: `failing.py WAY`, under any launcher.

Lines are written in one piece, since lines of ranks must not mix. "fails at T": the clock, just before it does.
"""

import os
import resource
import signal
import sys
import time

import numpy as np

import hvdlite.numpy as hvd

VICTIM = {"raise": 1, "exit": 2, "_exit": 1, "kill": 1, "segv": 1}
WAY = sys.argv[1]


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def fail():
    say("fails at", time.monotonic())
    if WAY == "raise":
        raise ValueError("out of cheese")
    if WAY == "exit":
        sys.exit(3)
    if WAY == "_exit":
        os._exit(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV}[WAY])


hvd.init()
try:
    for step in range(10**6):
        hvd.allreduce(np.ones(3), name="t")
        if step == 5 and hvd.rank() == VICTIM[WAY]:
            fail()
except hvd.HvdError as error:
    say(f"saw {error.rank} {type(error).__name__} {error}")
    raise
