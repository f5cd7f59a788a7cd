"""check_consistency of TensorFlow's variables and of Keras's models on both backends, and the callback."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
from launching import launch
from ranks import as_ranks
from test_consistency import told

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


@as_ranks(2, deadline=300)
def test_variables_and_what_lies_beside_them():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    odd = hvd.rank() == 1

    def made(**changed):
        found = {
            "w": tf.Variable([1.0, 2.0], name=f"of_rank_{hvd.rank()}/w"),
            "none": None,
            "text": tf.constant(["a", "b"]),
            "half": tf.Variable(tf.ones(2, tf.bfloat16)),
            "seed": tf.Variable([1, 2], dtype=tf.uint64),
            "sliced": tf.IndexedSlices(tf.ones((1, 2)), tf.constant([3]), tf.constant([4, 2])),
            "sparse": tf.SparseTensor([[0, 1]], [1.0], [2, 2]),
            "zero": np.zeros(1),
            "rows": tf.zeros((0, 3)),
        }
        return {**found, **(changed if odd else {})}

    hvd.check_consistency(made())
    hvd.check_consistency(list(made().values()))
    told(lambda: hvd.check_consistency(made(w=tf.Variable([1.0, 2.0000002]))), "'w' on rank 1 is not what rank 0 has")
    told(lambda: hvd.check_consistency(list(made(w=tf.Variable([1.0, 3.0])).values())), "'of_rank_0/w' on rank 1")
    told(lambda: hvd.check_consistency(made(none=tf.ones(1))), "rank 1 has none [1] float32")
    told(lambda: hvd.check_consistency(made(text=tf.constant(["a", "c"]))), "'text' on rank 1")
    told(lambda: hvd.check_consistency(made(half=tf.Variable([1.0, -1.0], dtype=tf.bfloat16))), "'half' on rank 1")
    told(lambda: hvd.check_consistency(made(sparse=tf.SparseTensor([[1, 1]], [1.0], [2, 2]))), "'sparse' on rank 1")
    told(lambda: hvd.check_consistency(made(zero=-np.zeros(1))), "'zero' on rank 1")
    told(lambda: hvd.check_consistency(made(rows=tf.zeros((0, 4)))), "[0, 3] float32; rank 1 has rows [0, 4]")
    told(lambda: hvd.check_consistency([tf.ones(1)] * (2 + odd)), "rank 1 has variable 2 [1] float32. Build the same")
    close, some = np.array([0.1 + 1e-12 * odd]), [tf.tensor_scatter_nd_update(tf.zeros(5000), [[2500]], [float(odd)])]
    told(lambda: hvd.check_consistency({"a": close}), "'a' on rank 1")
    told(lambda: hvd.check_consistency({"a": {"b": some}}), "'a.b.0' on rank 1")
    told(lambda: hvd.check_consistency({1: close, "1": np.ones(1)}), "on rank 1 is not what rank 0 has")
    hvd.check_consistency({"tags": set("abcdefgh"), "call": lambda: None, "none": [None]})
    if find_spec("torch") is not None:
        import torch

        import hvdlite.torch as hvdt

        mine = torch.nn.Parameter(torch.from_numpy(some[0].numpy()))
        told(lambda: hvd.check_consistency({"w": mine}), "'w' on rank 1")
        for value in (some[0], tf.Variable(some[0], name=f"of_rank_{hvd.rank()}"), tf.constant([f"text {odd}"])):
            told(lambda value=value: hvdt.check_consistency({"w": value}), "'w' on rank 1")
        hvdt.check_consistency({"v": tf.Variable([1.0], name=f"of_rank_{hvd.rank()}"), "t": tf.constant(["text"])})
        with pytest.raises(ValueError, match="'w' cannot be compared: .*NumPy cannot read this Tensor"):
            hvd.check_consistency({"w": mine.to(torch.bfloat16) if odd else 1})
    with pytest.raises(RuntimeError, match="eagerly"):
        tf.function(lambda: hvd.check_consistency(made()))()
    for wrong in (3, "text", None):
        with pytest.raises(ValueError, match="expected a model or a list of variables"):
            hvd.check_consistency(wrong)
    module = tf.Module()
    module.w = tf.Variable(1.0 + odd, name="w")
    told(lambda: hvd.check_consistency(module), "'w' on rank 1")


MODELS = """
import keras, numpy, hvdlite.keras as hvd
hvd.init()
rank = hvd.rank()
if rank == 1:
    keras.layers.Dense(2)  # numbers its layers otherwise from here on

def told(what, *says, alike=True):
    try:
        what()
    except hvd.HvdMismatchError as error:
        assert not alike or len(set(hvd.allgather_object(str(error)))) == 1
        assert all(each in str(error) for each in says), str(error)
        return
    raise AssertionError(f"nobody was told of {says}")

keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(3), keras.layers.Dropout(0.5), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
model = keras.Sequential([keras.layers.Input((4,)), *layers])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", jit_compile=False)
x, y = numpy.random.RandomState(rank).randn(2, 64, 4).astype("float32")
fit = {"batch_size": 16, "shuffle": False, "verbose": 0}
first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
layers[2].trainable = False
class Frozen(keras.callbacks.Callback):  # moving averages are each rank's own, unless they are made the same
    def on_train_batch_end(self, batch, logs=None):
        layers[2].moving_mean.assign([0.0] * 3)
        layers[2].moving_variance.assign([1.0] * 3)
check = hvd.callbacks.CheckConsistencyCallback
model.fit(x, y[:, :2], epochs=2, callbacks=[first, Frozen(), check(every=2), check()], **fit)
hvd.check_consistency(model)
hvd.check_consistency(model.weights, model.optimizer)
hvd.check_consistency(layers[0])

class Drift(keras.callbacks.Callback):
    batches = 0
    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if rank == 1 and self.batches == 3:
            value = keras.ops.convert_to_numpy(layers[3].kernel).copy()
            value[0, 0] += 1e-3
            layers[3].kernel.assign(value)
drift = Drift()
drifts = {"callbacks": [drift, Frozen(), check(every=2)], **fit}
told(lambda: model.fit(x, y[:, :2], **drifts), "kernel' on rank 1 is not what rank 0 has")
assert drift.batches == 4, drift.batches
first.broadcast_done = False
model.fit(x, y[:, :2], callbacks=[first, Frozen(), check(every=4)], **fit)
model.optimizer.learning_rate = 0.01 * (1 + rank)
told(lambda: hvd.check_consistency(model), "learning_rate' on rank 1", "learning rates")
model.optimizer.learning_rate = 0.01
told(lambda: hvd.check_consistency(model.weights[: 3 + rank]), "Build the same model")

from hvdlite.keras.backend import broadcast
count = len(model.variables)
told(lambda: broadcast(model.variables[rank:], 0), f"{count} variables", f"{count - 1} variables", alike=False)
layers[0].trainable = rank == 0
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
told(lambda: model.fit(x, y[:, :2], **fit), "4 gradients", "2 gradients", alike=False)
broadcast(model.variables, 0)

layers = [keras.layers.Dense(2, name="all"), keras.layers.Dense(2, name="mine")]
own = keras.Sequential([keras.layers.Input((4,)), *layers])
mine = own.layers[1].kernel
biases = [layer.bias for layer in own.layers][:: 1 - 2 * rank]
told(lambda: broadcast(biases, 0), "(sequential/all/bias", "(sequential/mine/bias", "sorted(names)", alike=False)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
optimizer.register_local_var(mine)
own.compile(optimizer, "mse", jit_compile=False)
sent = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[mine])
own.fit(x[:16], y[:16, :2], callbacks=[sent], **fit)
hvd.check_consistency(own)
mine.assign(numpy.full((2, 2), float(rank), "float32"))
hvd.check_consistency(own)
told(lambda: hvd.check_consistency(own.weights), "mine/kernel' on rank 1")
hvd.check_consistency(own.weights, local_variables=[mine])
for wrong in (lambda: hvd.check_consistency(3), lambda: check(every=0), lambda: check(every=1.5)):
    try:
        wrong()
    except ValueError:
        continue
    raise AssertionError("accepted")

import warnings
keras.utils.set_random_seed(rank)
forgot = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
forgot.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    forgot.fit(x, y[:, :2], **fit)
said = [str(each.message) for each in said if "kernel' on rank 1 is not what rank 0 has" in str(each.message)]
assert len(said) == (rank == 0), said
print("went on", flush=True)
"""


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_models_on_both_backends(backend):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    code, out, err = launch("-np", 2, sys.executable, "-u", "-c", MODELS, KERAS_BACKEND=backend)
    assert code == 0 and out.count("went on") == 2, out + err
