"""A rank that keeps the others waiting: the program of test_stall.py and test_hosts_stall.py.

    python stalling.py WAY [FILE]

Rank 1 does what WAY says instead of what the others wait for, until FILE is there; of "hosts" ranks 2 and 3 do not
come, of "first" rank 0, and of "left" rank 0 leaves, and rank 2 does not come.
"""

import ctypes
import os
import signal
import sys
import time

import numpy

import hvdlite as hvd

way, done = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "/nowhere"
hvd.init()
rank, ones = hvd.rank(), numpy.ones(10)


def sleeps_here():
    while not os.path.exists(done):
        time.sleep(0.05)


def holds_the_lock():
    clock, until = ctypes.PyDLL(None).usleep, time.monotonic() + 120
    while not os.path.exists(done) and time.monotonic() < until:
        clock(900_000)  # without giving the GIL up


def train(names):
    for handle in [hvd.allreduce_async(ones, name=name) for name in names]:
        hvd.synchronize(handle)


others = hvd.add_process_set([0, 1] if way == "set" else [1, 2]) if way in ("set", "left") else None
for _ in range(3):
    hvd.allreduce(ones, name="first")
if way == "order":
    for _ in range(30):
        train(f"layer.{i}" for i in range(5))
try:
    if way in ("joined", "join") and rank == 2:
        hvd.join()
    elif rank == 1 and way in ("sleep", "joined", "join", "set"):
        sleeps_here()
    elif rank == 1 and way == "gil":
        holds_the_lock()
    elif rank == 0 and way == "left":
        sys.exit()
    elif rank == 2 and way in ("hosts", "left"):
        sleeps_here()
    elif (rank, way) in ((1, "stop"), (3, "hosts"), (0, "first")):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 1 and way == "other":
        hvd.allreduce(ones, name="another")
    elif rank == 1 and way == "order":  # all but one of what was learned, and the last one first
        handles = [hvd.allreduce_async(ones, name=f"layer.{i}") for i in (4, 3, 1, 0)]
        sleeps_here()
        handles.append(hvd.allreduce_async(ones, name="layer.2"))
        train([])
        for handle in handles:
            hvd.synchronize(handle)
    if way == "left":
        try:
            hvd.allreduce(ones, name="asked", process_set=others, timeout=0.5)
        except hvd.HvdTimeoutError as error:
            print(f"heard {error}", flush=True)
        hvd.allreduce(ones, name="wanted", process_set=others)
    elif way == "set":
        if rank < 2:
            hvd.allreduce(ones, name="wanted", process_set=others)
    elif way == "order":
        if rank != 1:
            train(f"layer.{i}" for i in range(5))
    elif way != "join" and (way != "joined" or rank != 2):
        train(["wanted", *(f"more.{i}" for i in range(9))])
    if way in ("joined", "join") and rank != 2:
        hvd.join()
    print("done", flush=True)
except hvd.HvdError as error:
    print(f"saw {type(error).__name__} {error.rank} {error}", flush=True)
    raise
