"""An elastic job without a framework: logistic regression in float32, whose state keeps a log of what was committed.

    hvdlite-run -np 4 --min-np 2 python elastic_training.py FOLDER PLAN

PLAN is JSON with the fields of Plan that differ. A file FOLDER/last makes the epoch that is under way the last. Each
process appends a line to FOLDER/<pid>.steps for each step (time, step, rank, size) and writes FOLDER/<pid>.end when it
is through. `replayed` does the same in one process from the log: equal bits mean that nothing was lost, done twice or
mixed up.
"""

import hashlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass

import numpy as np


@dataclass
class Plan:
    """What a job does."""

    epochs: int = 2
    samples: int = 240
    batch: int = 4  # samples of a rank in a step
    commit: int = 2  # steps from one commit to the next
    pause: float = 0.02  # seconds, after each step
    ballast: int = 0  # bytes of state beside, so that sync takes its time
    slow: float = 0.0  # seconds that a process takes to get ready
    fail_at: int = -1  # rank 1 raises at this step
    freeze_at: int = -1  # rank 1 sleeps for ever at this step
    late: float = 0.0  # seconds more that a newcomer takes
    saved: str = ""  # path of State.save_to
    seconds: float = 0.0  # from one write of it to the next
    between: bool = False  # check_host_updates after each step


WIDTH, RATE = 32, np.float32(0.1)


def data(count):
    """(inputs, labels), the same in every process."""
    drawn = np.random.default_rng(5)
    inputs = drawn.standard_normal((count, WIDTH)).astype(np.float32)
    return inputs, (inputs[:, :4].sum(1) > 0).astype(np.float32)


def dealt(plan, epoch, done, rank, size):
    """A rank's samples of the next step; at the end of an epoch they may be few or none."""
    order = list(range(plan.samples))
    random.Random(7 + epoch).shuffle(order)
    return order[done:][rank::size][: plan.batch]


def gradient(weights, inputs, labels):
    """Summed over samples, and their number behind it."""
    summed = inputs.T @ (1 / (1 + np.exp(-(inputs @ weights))) - labels)
    return np.concatenate([summed, np.array([len(labels)], np.float32)]).astype(np.float32)


def stepped(weights, total):
    return weights - RATE * total[:-1] / total[-1]


def hash_of(weights):
    return hashlib.sha256(weights.tobytes()).hexdigest()


def replayed(plan, log):
    """(hash of the weights, whether each sample was taken once in each epoch) of a log, in one process."""
    inputs, labels = data(plan.samples)
    weights, taken = np.zeros(WIDTH, np.float32), {epoch: [] for epoch in range(plan.epochs)}
    for epoch, done, size in log:
        total = None
        for rank in range(size):
            mine = dealt(plan, epoch, done, rank, size)
            taken[epoch] += mine
            part = gradient(weights, inputs[mine], labels[mine])
            total = part if total is None else total + part
        weights = stepped(weights, total)
    return hash_of(weights), all(sorted(each) == list(range(plan.samples)) for each in taken.values())


def main(folder, plan):
    import hvdlite as hvd
    from hvdlite.elastic import ObjectState, run

    hvd.init()
    time.sleep(plan.slow + plan.late * ("HVDLITE_EXPECTED_PLACE" in os.environ))
    inputs, labels = data(plan.samples)
    steps = open(os.path.join(folder, f"{os.getpid()}.steps"), "a", buffering=1)
    more = {"ballast": np.zeros(plan.ballast // 8)} if plan.ballast else {}
    start = {"weights": np.zeros(WIDTH, np.float32), "epoch": 0, "done": 0, "log": []}
    state = ObjectState(hvd.broadcast_object, hvd.rank, **start, **more)
    if plan.saved:
        state.save_to(plan.saved, plan.seconds)

    def misbehave():
        if hvd.rank() == 1 and len(state.log) == plan.fail_at:
            raise ValueError("a mistake of the script")
        if hvd.rank() == 1 and len(state.log) == plan.freeze_at:
            plan.freeze_at = -1
            time.sleep(3600)

    @run
    def train(state):
        while state.epoch < plan.epochs:
            while state.done < plan.samples:
                misbehave()
                mine = dealt(plan, state.epoch, state.done, hvd.rank(), hvd.size())
                part = gradient(state.weights, inputs[mine], labels[mine])
                state.weights = stepped(state.weights, hvd.allreduce(part, op=hvd.Sum, name="gradient"))
                state.log.append((state.epoch, state.done, hvd.size()))
                state.done += plan.batch * hvd.size()
                print(f"{time.time():.4f} {len(state.log)} {hvd.rank()} {hvd.size()}", file=steps)
                time.sleep(plan.pause)
                if len(state.log) % plan.commit == 0:
                    state.commit()
                elif plan.between:
                    state.check_host_updates()
            state.epoch, state.done = state.epoch + 1, 0
            if hvd.broadcast_object(os.path.exists(os.path.join(folder, "last"))):
                break
        state.epochs = state.epoch

    train(state)
    with open(os.path.join(folder, f"{os.getpid()}.end"), "w") as file:
        json.dump(
            {"weights": hash_of(state.weights), "log": state.log, "epochs": state.epochs, "rank": hvd.rank()}, file
        )


if __name__ == "__main__":
    main(sys.argv[1], Plan(**json.loads(sys.argv[2])))
