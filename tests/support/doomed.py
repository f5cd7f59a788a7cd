"""A rank that works until one of them ends: the program of the tests in which ranks die.

    python doomed.py FOLDER PLAN

PLAN is JSON: {"victim": rank, "how": "SIGKILL" | "SIGSEGV" | "_exit" | "raise", "after": seconds, "torch": bool}. The
victim's clock starts before init, so it may die in it. Every other rank writes FOLDER/RANK.json when it has seen an
error: when, of what class, who was named, what was said, what the next call said, and for how many seconds the machine
has let the job wait for a CPU since this rank last worked: no rank can tell of a death while others have the CPUs.
"""

import glob
import json
import os
import resource
import signal
import sys
import threading
import time

LOOK_S = 0.05
folder, plan = sys.argv[1], json.loads(sys.argv[2])
rank = int(os.environ["HVDLITE_RANK"])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
due = threading.Event()


def write(name, **what):
    path = os.path.join(folder, name)
    with open(path + ".part", "w") as file:
        json.dump({"pid": os.getpid(), "time": time.monotonic(), **what}, file)
    os.rename(path + ".part", path)


def withheld():
    """{thread: nanoseconds} for which threads of the launcher and of the ranks were ready, and others ran."""
    found = {}
    pids = [os.getppid()]
    for name in os.listdir(folder):
        if name.endswith(".started"):
            with open(os.path.join(folder, name)) as file:
                pids.append(json.load(file)["pid"])
    for pid in pids:
        for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):
            try:
                with open(path) as file:
                    found[path] = int(file.read().split()[1])
            except OSError:  # it has ended; or this system does not count
                continue
    return found


def die():
    due.set()
    if plan["how"] == "raise":
        return  # the main thread does
    write("victim.json")
    if plan["how"] == "_exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, plan["how"]))


write(f"{rank}.started")
if plan["torch"]:
    import torch

    import hvdlite.torch as hvd

    tensor, step = torch.ones(1000), lambda: hvd.allreduce_(tensor, name="t", op=hvd.Max)
else:
    import numpy

    import hvdlite as hvd

    tensor, step = numpy.ones(1000), lambda: hvd.allreduce_(tensor, name="t", op=hvd.Max)

if rank == plan["victim"]:
    timer = threading.Timer(plan["after"], die)
    timer.daemon = True
    timer.start()
looked, before_it = time.monotonic(), withheld()
try:
    hvd.init()
    while True:
        if time.monotonic() - looked > LOOK_S:
            looked, before_it = time.monotonic(), withheld()
        if due.is_set() and plan["how"] == "raise":
            write("victim.json")
            raise ValueError("boom")
        step()
        if not os.path.exists(os.path.join(folder, f"{rank}.works")):
            write(f"{rank}.works")
except (hvd.HvdError, RuntimeError) as error:
    seen = {"error": type(error).__name__, "rank": getattr(error, "rank", None), "text": str(error)}
    seen["lost"] = isinstance(error, hvd.HvdPeerLostError)
    seen["seen"] = time.monotonic()
    seen["withheld"] = sum(max(0, ns - before_it.get(path, 0)) for path, ns in withheld().items()) / 1e9
    before = time.monotonic()
    try:
        step()
        again = "nothing"
    except Exception as other:
        again = f"{type(other).__name__}: {other}"
    write(f"{rank}.json", **seen, again=again, again_s=time.monotonic() - before)
    sys.exit(0)
