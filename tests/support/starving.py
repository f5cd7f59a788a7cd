"""A program for each rank: a function of 100 collectives, in another order on each rank, with few threads for nodes.

    hvdlite-run -np 2 python tests/support/starving.py THREADS STEPS

Prints how many collectives there were at most at the same time, and that none is left.
"""

import random
import sys
import time

import numpy as np
import tensorflow as tf

threads, steps = int(sys.argv[1]), int(sys.argv[2])
tf.config.threading.set_inter_op_parallelism_threads(threads)  # before anything else in this process

import hvdlite.tensorflow as hvd  # noqa: E402
from hvdlite.tensorflow.ops.kernels import library  # noqa: E402

hvd.init()
order = list(range(100))
random.Random(hvd.rank()).shuffle(order)


@tf.function(autograph=False)
def step(x):
    summed = {i: hvd.allreduce(x + i, op=hvd.Sum, name=f"order.{i}") for i in order}
    return tf.stack([summed[i] for i in range(100)])


for number in range(steps):
    found = step(tf.fill([3], float(number)))
    np.testing.assert_array_equal(found[:, 0], [hvd.size() * (number + i) for i in range(100)])
until = time.monotonic() + 20
while library().flights() and time.monotonic() < until:
    time.sleep(0.005)
assert library().flights() == 0
print(f"{threads} threads, {steps} steps: at most {library().flights(2)} at once, none left", flush=True)
