"""What comes out of a graph of TensorFlow is a long text around one of ours: the job is told ours.

test_first_error.py has the same of plain Python.
"""

import sys
from importlib.util import find_spec

import pytest
from launching import Launch

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine

DIFFER = """
import keras, numpy, hvdlite.tensorflow.keras as hvd
hvd.init()
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.layers[0].trainable = hvd.rank() != 0
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
model.fit(numpy.ones((8, 4), "float32"), numpy.ones((8, 1), "float32"), verbose=0)
"""
LEAVES = """
import sys, tensorflow as tf, hvdlite.tensorflow as hvd
hvd.init()
@tf.function
def step(x):
    return hvd.allreduce(x, name="x")
step(tf.ones([3]))
if hvd.rank() == 1:
    sys.exit(0)
step(tf.ones([3]))
"""


def headline(program):
    """What the launcher says of the job's end."""
    words = ("-np", 2, "--failure-grace", 30, "--term-grace", 5, sys.executable, "-c", program)
    with Launch(*words, KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3") as job:
        code = job.wait(PATIENCE_S)
        assert code == 1, job.out + job.err
        (said,) = [line for line in job.err.splitlines() if line.startswith("hvdlite-run: rank ")]
        return said


def test_ranks_that_differ_in_fit_are_told_with_what_differs():
    said = headline(DIFFER)
    assert "FailedPreconditionError: rank " in said and "ranks have different lists: rank 0: 2 gradients" in said
    assert said.endswith(" [HVD305]") and "Detected at node" not in said


def test_what_fails_in_a_graph_because_a_rank_has_left_names_that_rank():
    said = headline(LEAVES)
    assert said.startswith("hvdlite-run: rank 0 (pid ") and "exited with code 1: rank 1 left the job" in said
    assert said.endswith(" [HVD451]")
