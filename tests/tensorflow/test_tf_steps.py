"""Steps of TensorFlow's functions and of Keras's fit are found without a word of the script, also on Keras 2.

On several ranks: alone nothing is exchanged, and nobody tells where a graph has a step.
"""

import os
import sys
from importlib.util import find_spec

import pytest
from launching import Launch
from ranks import needs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
needs("tensorflow")

SECONDS = 240.0  # a crowded machine imports TensorFlow for a minute

STEPS = """
import time, keras, numpy, tensorflow as tf, hvdlite.keras as hvdk, hvdlite.tensorflow as hvd

def found(what, wanted, train):
    hvd.shutdown()
    hvd.init()
    train()
    stats = hvd.stats()
    assert stats["steps"] == wanted, (what, stats["steps"])
    assert stats["step_ms"]["mean"] > 0
    print("found", what, flush=True)

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
model.compile(hvdk.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
x, y = numpy.ones((24, 4), "float32"), numpy.ones((24, 2), "float32")
found("fit", 6, lambda: model.fit(x, y, batch_size=4, verbose=0))
again = dict(batch_size=4, verbose=0, callbacks=[hvdk.callbacks.StatsCallback()])
found("fit and callback", 6, lambda: model.fit(x, y, **again))
w = tf.Variable(tf.ones((4, 2)))

def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.matmul(x, w))
    (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [w])
    w.assign_sub(0.1 * gradient)

graph = tf.function(step)
found("function", 5, lambda: [graph() for _ in range(5)])
found("eager", 5, lambda: [step() for _ in range(5)])

@tf.function
def two():  # as a GAN: two tapes of one name, the second for another variable
    step()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v)
    hvd.DistributedGradientTape(tape).gradient(loss, [v])

v = tf.Variable(tf.ones(3), name="another")
found("two tapes", 5, lambda: [two() for _ in range(5)])

@tf.function
def late():  # its list goes before what takes its time
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.matmul(x, w)) * tf.numpy_function(work, [w], tf.float32, stateful=False)
    return hvd.DistributedGradientTape(tape).gradient(loss, [w])

def work(_):
    time.sleep(0.15 * hvd.rank())
    return numpy.float32(1)

def who():
    for _ in range(8):
        late()
    lateness = hvd.stats(everyone=True)["lateness"]
    assert lateness[1]["p50_ms"] > lateness[0]["p50_ms"] and lateness[1]["last_share"] > 0.5, lateness

found("late", 8, who)
found("told", 2, lambda: (hvd.stats_step(), [graph() for _ in range(5)], hvd.stats_step()))
"""


def test_steps_of_graphs_are_found():
    with Launch("-np", 2, sys.executable, "-c", STEPS) as job:
        assert job.wait(SECONDS) == 0, job.err[-4000:]
        assert not job.left()
    for what in ("fit", "fit and callback", "function", "eager", "two tapes", "late", "told"):
        assert job.out.count(f"found {what}\n") == 2, job.out


LEGACY = """
import tensorflow as tf, hvdlite.tensorflow.keras as hvd
import tf_keras
hvd.init()
tf_keras.utils.set_random_seed(1)
model = tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(4,))])
model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.Adam(0.1)), "mse")
model.fit(tf.ones((8, 4)), tf.ones((8, 2)), batch_size=4, verbose=0)
assert hvd.stats()["steps"] == 2, hvd.stats()["steps"]
hvd.check_consistency(model)
if hvd.rank() == 1:
    model.layers[0].kernel.assign_add(tf.ones((4, 2)))
try:
    hvd.check_consistency(model)
except hvd.HvdMismatchError as error:
    assert "kernel" in str(error) and "on rank 1 is not what rank 0 has" in str(error), error
    print("told", flush=True)
try:
    hvd.check_consistency("text" if hvd.rank() else model)
except ValueError as error:
    assert "expected a model or a list of variables, not str" in str(error), error
    print("refused", flush=True)
"""


@pytest.mark.skipif(find_spec("tf_keras") is None, reason="tf_keras is not installed")
def test_models_of_keras_2_have_steps_and_are_compared():
    with Launch("-np", 2, sys.executable, "-c", LEGACY, TF_USE_LEGACY_KERAS="1") as job:
        assert job.wait(SECONDS) == 0, job.err[-4000:]
        assert not job.left()
    assert job.out.count("told") == job.out.count("refused") == 2, job.out
