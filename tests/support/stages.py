"""A stage of a pipeline that goes wrong, or sees another one go wrong: the program of test_parallel_faults.py.

    python stages.py FOLDER FAULT

Four layers on as many ranks, eight micro-batches a step. Rank 1 has the fault, in its sixth forward: "raise", "kill",
"late" (it waits for the others to give up), "grown" (its output has another shape) or "word" (it is no tensor). Each
rank writes FOLDER/RANK.json with the error it gets, when, and what its next step says.
"""

import json
import os
import signal
import sys
import time

import torch
import torch.nn.functional as F
from small_pipelines import mlps, rows, sgd

import hvdlite.torch as hvd
from hvdlite import parallel

folder, fault = sys.argv[1:]
hvd.init()
forwards = 0


def wrong(module, given, out):
    global forwards
    forwards += 1
    if forwards != 6:
        return None
    if fault == "raise":
        raise ArithmeticError("no such number")
    if fault == "kill":
        with open(os.path.join(folder, "killed"), "w") as file:
            file.write(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "late":
        while not all(os.path.exists(os.path.join(folder, f"{rank}.json")) for rank in (0, 2, 3)):
            time.sleep(0.01)
    return {"grown": torch.cat([out, out]), "word": {"a", "word"}}.get(fault)


layers = mlps()
layers[1].register_forward_hook(wrong)
mesh = hvd.Mesh(pp=4)
stage = parallel.split(layers, mesh, [1, 1, 1, 1])
timeout = 2.0 if fault == "late" else 30.0
pipe = parallel.Pipeline(stage, sgd(stage.parameters()), mesh, F.cross_entropy, 8, timeout=timeout)
try:
    pipe.step(*rows(1)[0])
    pipe.drain()
except Exception as error:
    seen = {"error": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}
    seen["time"] = time.monotonic()
    try:
        pipe.step(*rows(1)[0])
    except ValueError as again:
        seen["again"] = str(again)
    path = os.path.join(folder, f"{hvd.rank()}.json")
    with open(path + ".part", "w") as file:
        json.dump(seen, file)
    os.rename(path + ".part", path)
    raise
