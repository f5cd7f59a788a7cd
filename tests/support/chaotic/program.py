"""The ranks of a trial: a small training job whose ranks say where they are, and one of which meets its end there.

    python program.py SOCKET SEED     (what a launcher starts)

Each rank is connected to the parent by SOCKET. It says hello, waits for the word to begin (so that all come to init
together, however long imports take), and at last tells how it ended: well, or by which error. The victim says when its
moment has come. Errors go on to be raised: a rank ends here as a user's script does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import socket
import sys
import time

from chaotic import plan

TRIAL = plan.planned(int(sys.argv[2]))
RANK = next(
    int(os.environ[name]) for name in ("HVDLITE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ
)
AM_VICTIM = TRIAL.victim == RANK
struck = [False]
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def say(**what):
    link.send(json.dumps({"rank": RANK, "pid": os.getpid(), "at": time.monotonic(), **what}).encode())


class Boom(Exception):
    """What the victim raises."""


def boom():
    struck[0] = True
    raise Boom(f"boom {TRIAL.seed}")


def reach(moment, number=0, hook=0):
    """The program has come to this place: is it the one?"""
    if struck[0]:  # what the parent's signal raised was swallowed
        boom()
    if AM_VICTIM and TRIAL.by == "parent" and (moment, number) == plan.LAST:
        say(what="last")
    if not AM_VICTIM or moment != TRIAL.moment or moment in plan.COUNTED and number != TRIAL.number:
        return
    if moment == "backward" and hook != TRIAL.hook:
        return
    say(what="here")
    if moment == "import":
        link.recv(100)  # until the others are about to call init
    if TRIAL.by == "parent":
        return
    if TRIAL.way == "raise":
        boom()
    if TRIAL.way == "exit":
        sys.exit(plan.WAYS["exit"])
    if TRIAL.way == "_exit":
        os._exit(plan.WAYS["_exit"])
    os.kill(os.getpid(), getattr(signal, TRIAL.way))


def begin():
    """Until all ranks are here, or one that never will be is lost."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGUSR2, lambda *_: boom())
    link.connect(sys.argv[1])
    say(what="hello")
    reach("import")


def at_meetings():
    """Exchanges in init are moments, too."""
    from hvdlite.lifecycle import init

    inner, count = init._Boot.allgather, [0]

    def allgather(self, mine):
        reach("meeting", count[0])
        count[0] += 1
        return inner(self, mine)

    init._Boot.allgather = allgather


def pretend_hosts():
    """Ranks of this machine count as on several hosts."""
    if len(TRIAL.hosts) == 1:
        return
    for name in [each for each in os.environ if each.startswith(("HVDLITE_", "HOROVOD_"))]:
        if name.endswith(("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")):
            del os.environ[name]
    os.environ["HVDLITE_HOST_ID"] = f"pretended host {sum(sum(TRIAL.hosts[: n + 1]) <= RANK for n in range(2))}"


def train_numpy(hvd):
    import numpy as np

    for step in range(plan.STEPS):
        reach("forward", step)
        handles = []
        for layer, count in enumerate(TRIAL.layers):
            gradient = np.full(count, RANK + step, "float32")
            handles.append(hvd.allreduce_async(gradient, op=hvd.Sum, name=f"layer.{layer}"))
            reach("backward", step, layer)
        reach("flight", step)
        total = hvd.size() * (hvd.size() - 1) / 2 + step * hvd.size()
        assert all((hvd.synchronize(handle) == total).all() for handle in handles)
        reach("call", step)
        seen = hvd.allgather(np.array([RANK]), name="all") if step % 2 else hvd.broadcast(np.ones(3), 0, name="root")
        assert len(seen) in (hvd.size(), 3)
        reach("step", step)


def train_torch(hvd):
    import torch

    torch.manual_seed(0)
    # A layer is w * x with one number x: its gradient is x times what comes from above.
    layers = [torch.nn.Parameter(torch.zeros(count)) for count in TRIAL.layers]
    names = [(f"layer.{number}", layer) for number, layer in enumerate(layers)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers, 1.0), names, op=hvd.Sum)
    number = {"step": 0}
    for place, layer in enumerate(reversed(layers)):
        layer.register_post_accumulate_grad_hook(lambda _, place=place: reach("backward", number["step"], place))
    for step in range(plan.STEPS):
        number["step"] = step
        optimizer.zero_grad()
        reach("forward", step)
        sum((layer * (RANK + step)).sum() for layer in layers).backward()
        reach("flight", step)
        optimizer.step()
        reach("call", step)
        hvd.allreduce(torch.tensor(1.0), name="loss")
        reach("step", step)
    total = -sum(hvd.size() * (hvd.size() - 1) / 2 + step * hvd.size() for step in range(plan.STEPS))
    assert all((layer == total).all() for layer in layers)


def work():
    begin()
    if TRIAL.torch:
        import hvdlite.torch as hvd
    else:
        import hvdlite.numpy as hvd
    at_meetings()
    pretend_hosts()
    say(what="ready")
    link.recv(100)
    reach("init")
    hvd.init()
    with contextlib.ExitStack() as during:
        if TRIAL.plane == "gpu":
            import gpus

            during.enter_context(gpus.on_gpus(hvd.local_rank()))
        (train_torch if TRIAL.torch else train_numpy)(hvd)
    reach("shutdown")
    hvd.shutdown()
    reach("after")


def main():
    try:
        work()
        if AM_VICTIM and TRIAL.by == "parent":
            say(what="done")
            link.recv(100)  # the end may be on its way still; after a stop, and if there is none, the parent lets it go
        if struck[0]:
            boom()
    except BaseException as error:
        say(what="error", kind=type(error).__name__, named=getattr(error, "rank", None), text=str(error)[:1500])
        raise
    say(what="well")


if __name__ == "__main__":
    main()
