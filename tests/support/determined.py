"""A program for each rank: the same work in two lives of hvdlite, with other timing and other buckets; its bits.

    hvdlite-run -np 3 python tests/support/determined.py HOSTS [train]

Prints a digest for each life, of many tensors that several threads submit in a random order after random pauses, and
of a model that was trained on real digits while its hooks paused at random. HOSTS: as if the ranks lay on so many.
"""

import ctypes
import hashlib
import os
import random
import sys
import threading
import time

import numpy as np

import hvdlite as hvd
from hvdlite._core import lib, text_of

LIVES = ((1, 1 << 20), (2, 3000))  # the seed of what shall make no difference, and the fusion threshold
SIZES = (1, 3, 17, 1000, 4099, 70001)
DTYPES = (np.float32, np.float64, np.float16)
STEPS, THREADS = 3, 3


def collectives(chance):
    """A digest of the results, by name."""
    values = np.random.RandomState(hvd.rank())
    inputs = {}
    for dtype in DTYPES:
        for size in SIZES:
            scale = np.float64(10.0) ** values.uniform(-3, 3, size)  # so that the order of additions shows
            inputs[f"{np.dtype(dtype).name}.{size}"] = (values.randn(size) * scale).clip(-3e4, 3e4).astype(dtype)
    digest = hashlib.sha256()
    for step in range(STEPS):
        results = {}
        names = sorted(inputs)
        chance.shuffle(names)

        def submit(mine, seed, step=step, results=results):
            own, pending = random.Random(seed), []
            for name in mine:
                if own.random() < 0.5:
                    time.sleep(own.random() * 0.003)
                op = (hvd.Sum, hvd.Average)[step % 2]
                pending.append((name, hvd.allreduce_async(inputs[name], name=name, op=op, prescale_factor=1.7)))
            for name, handle in pending:
                results[name] = handle.wait()

        threads = [threading.Thread(target=submit, args=(names[i::THREADS], chance.random())) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == len(inputs), "a thread has failed"
        group = hvd.grouped_allreduce([inputs[name] for name in sorted(inputs)[:4]], name="group", op=hvd.Sum)
        parts = [
            hvd.reducescatter(inputs["float32.4099"], name="parts"),
            hvd.reduce(inputs["float64.17"], 0, name="one"),
        ]
        joined = hvd.allgather(np.concatenate([np.asarray(part).ravel() for part in parts if part is not None]))
        for array in [*(results[name] for name in sorted(results)), *group, joined]:
            digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()[:16]


def training(chance):
    """A digest of the weights after an epoch of digits."""
    import torch
    from sklearn.datasets import load_digits

    import hvdlite.torch as hvdt

    torch.set_num_threads(1)
    torch.manual_seed(7)
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = images.float()[hvdt.rank() :: hvdt.size()][:384] / 16
    labels = labels[hvdt.rank() :: hvdt.size()][:384]
    widths = (64, 96, 64, 10)
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers[:-1])
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvdt.DistributedOptimizer(plain, model.named_parameters())
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: time.sleep(chance.random() * 0.002) if chance.random() < 0.4 else None)
    for start in range(0, 384, 32):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[start : start + 32]), labels[start : start + 32]).backward()
        optimizer.step()
    hvdt.check_consistency(model, plain)
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def main():
    rank = int(os.environ.get("HVDLITE_RANK", 0))
    hosts = int(sys.argv[1])
    if hosts > 1:
        here = int(os.environ["HVDLITE_SIZE"]) // hosts
        seat = {"LOCAL_RANK": rank % here, "LOCAL_SIZE": here, "CROSS_RANK": rank // here, "CROSS_SIZE": hosts}
        for alias in ("HVDLITE", "HOROVOD"):
            os.environ.update({f"{alias}_{name}": str(value) for name, value in seat.items()})
        os.environ["HVDLITE_HOST_ID"] = f"host {rank // here}"
    for seed, threshold in LIVES:
        os.environ["HVDLITE_FUSION_THRESHOLD"] = str(threshold)
        hvd.init()
        chance = random.Random(1000 * seed + hvd.rank())
        said = [collectives(chance)]
        if "train" in sys.argv:
            said.append(training(chance))
        slept = ctypes.c_long.in_dll(ctypes.CDLL(None), "jitters").value
        assert slept > 20, f"only {slept} calls of the core came late"
        print(f"plane {text_of(lib.hvd_plane_used())} bits {' '.join(said)}.", flush=True)
        hvd.shutdown()


main()
