"""What every engine is asked to do: a small network on the digits of scikit-learn, on all ranks.

Ranks import this by name, so that engines need not send it. Each rank returns its accuracy and the bits of its weights.
"""

import hashlib
import os
import signal
import time

import numpy as np
from sklearn.datasets import load_digits

import hvdlite as hvd


def train(fails=None, dies=None, at=20, epochs=15):
    """Softmax over one hidden layer, in NumPy. fails, dies: ranks that raise, or are killed, in step `at`."""
    began = time.time()
    hvd.init()
    ready = time.time()
    data, random = load_digits(), np.random.default_rng(1)
    x, y = data.data / 16, np.eye(10)[data.target]
    order = random.permutation(len(x))
    test, learn = order[:360], order[360:]
    weights = [random.normal(0, 0.1, (64, 128)), np.zeros(128), random.normal(0, 0.1, (128, 10)), np.zeros(10)]
    weights = [hvd.broadcast(each, 0, name=f"w{n}") for n, each in enumerate(weights)]
    step, speed = 0, [np.zeros_like(each) for each in weights]
    for epoch in range(epochs):
        mine = np.random.default_rng(epoch).permutation(learn)[hvd.rank() :: hvd.size()]
        for batch in np.array_split(mine[: len(learn) // hvd.size()], 32):
            step += 1
            if step == at and dies == hvd.rank():
                print(f"killed at {time.time():.3f}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == at and fails == hvd.rank():
                raise ValueError(f"boom at {time.time():.3f}")
            gradients = _gradients(weights, x[batch], y[batch])
            gradients = [hvd.allreduce(each, name=f"g{n}") for n, each in enumerate(gradients)]
            for each, moving, gradient in zip(weights, speed, gradients):
                moving *= 0.9
                moving += gradient
                each -= 0.1 * moving
    hidden = np.maximum(x[test] @ weights[0] + weights[1], 0)
    right = float(np.mean((hidden @ weights[2] + weights[3]).argmax(1) == data.target[test]))
    bits = hashlib.sha256(b"".join(each.tobytes() for each in weights)).hexdigest()
    return {
        "accuracy": right,
        "bits": bits,
        "began": began,
        "init_s": ready - began,
        "ready": ready,
        "pid": os.getpid(),
    }


def _gradients(weights, x, y):
    hidden = np.maximum(x @ weights[0] + weights[1], 0)
    out = hidden @ weights[2] + weights[3]
    out = np.exp(out - out.max(1, keepdims=True))
    error = (out / out.sum(1, keepdims=True) - y) / len(x)
    back = (error @ weights[2].T) * (hidden > 0)
    return [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
