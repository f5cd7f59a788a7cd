"""Keras 3 on TensorFlow: what ranks train to is what one process trains to, and what they save goes on."""

from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
from fitting import FIT, compiled, digits, mine, model_of, the_same_everywhere
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


@pytest.mark.parametrize("how", ["auto", "eager"])
@as_ranks(2, deadline=120)
def test_fit_trains_to_what_one_process_trains_to_on_the_global_batch(how):
    import keras

    import hvdlite.tensorflow.keras as hvd

    more = {"auto": {"jit_compile": "auto"}, "eager": {"run_eagerly": True}}[how]
    images, labels = digits(64 * 8)
    rank, size = hvd.rank(), hvd.size()
    sgd = keras.optimizers.SGD(0.1)
    optimizer = hvd.DistributedOptimizer(sgd)
    assert isinstance(optimizer, keras.optimizers.SGD) and type(optimizer).__name__ == "SGD"
    model = compiled(model_of(seed=1 + rank), optimizer, **more)  # each rank begins elsewhere
    hvd.allreduce(1.0)
    import hvdlite.tensorflow as tensors

    tensors.broadcast_variables(model.variables, root_rank=0)
    model.fit(mine(images, rank, size), mine(labels, rank, size), **FIT)
    the_same_everywhere(model.get_weights())

    alone = compiled(model_of(), keras.optimizers.SGD(0.1), jit_compile=False)
    alone.fit(images, labels, **{**FIT, "batch_size": 64})
    for ours, theirs in zip(model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert int(model.optimizer.iterations) == 8


@as_ranks(2, deadline=120)
def test_mixed_precision_skips_a_step_on_all_ranks_when_one_overflows():
    import keras
    import tensorflow as tf

    import hvdlite.keras as hvd

    policy = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        model = compiled(model_of(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=False)
    finally:
        keras.mixed_precision.set_dtype_policy(policy)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    images, labels = digits(64)
    x, y = mine(images, hvd.rank(), 2), mine(labels, hvd.rank(), 2)
    model.fit(x, y, **FIT)
    model.optimizer.dynamic_scale.assign(1024.0)
    before = model.get_weights()
    bad = x * (np.float32(6e4) if hvd.rank() == 0 else np.float32(1))
    model.fit(bad, y, **FIT)
    assert float(model.optimizer.dynamic_scale) == 512
    for old, new in zip(before, model.get_weights()):
        np.testing.assert_array_equal(old, new)
    model.fit(x, y, **FIT)
    the_same_everywhere(model.get_weights())
    assert not np.array_equal(before[0], model.get_weights()[0]) and tf.executing_eagerly()


@as_ranks(2, deadline=300)
def test_a_loss_scale_inside_asks_all_ranks_about_local_gradients():
    import keras
    import tensorflow as tf

    import hvdlite.keras as hvd

    shared, own = keras.Variable(tf.zeros([2])), keras.Variable(tf.zeros([2]))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(scaled)
    optimizer.register_local_var(own)
    optimizer.build([shared, own])
    bad = tf.constant([np.inf if hvd.rank() == 0 else 4.0, 4.0])
    optimizer.apply([tf.fill([2], 4.0), bad], [shared, own])
    assert float(optimizer.dynamic_scale) == 2.0
    np.testing.assert_array_equal(shared, [0.0, 0.0])
    optimizer.apply([tf.fill([2], 4.0), tf.fill([2], 4.0)], [shared, own])
    np.testing.assert_array_equal(shared, [-2.0, -2.0])
    np.testing.assert_array_equal(own, [-1.0, -1.0])


@pytest.mark.parametrize("average", [False, True])
@as_ranks(2, deadline=120)
def test_several_passes_per_step_and_keras_own_accumulation(average):
    import keras

    import hvdlite.keras as hvd

    images, labels = digits(64 * 8)
    rank, size = hvd.rank(), hvd.size()
    if average:
        ours = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
        theirs = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
        )
    else:
        ours = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        theirs = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)
    fits = []
    for optimizer, batch in ((ours, 32 if average else 64), (theirs, 32)):
        model = compiled(model_of(), optimizer, jit_compile=False)
        model.fit(mine(images, rank, size, 128), mine(labels, rank, size, 128), **{**FIT, "batch_size": batch})
        the_same_everywhere(model.get_weights())
        fits.append(model.get_weights())
    for one, two in zip(*fits):
        np.testing.assert_allclose(one, two, atol=1e-5)


@as_ranks(2, deadline=300)
def test_where_keras_would_choose_xla_it_does_not_nor_where_the_optimizer_comes_after_the_choice():
    import os
    import tempfile
    import types

    import keras
    import tensorflow as tf

    import hvdlite.keras as hvd

    class Several(keras.Model):
        def __init__(self, form):
            super().__init__()
            self.form, self.inner = form, model_of()

        def call(self, x):
            return self.inner(x)

        def compile(self, optimizer, **more):
            super().compile(**more)
            setattr(self, *{"one": ("mine", optimizer), "list": ("mine", [optimizer])}[self.form])

        def train_step(self, rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(rows[0]) ** 2)
            optimizer = self.mine if self.form == "one" else self.mine[0]
            weights = self.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"loss": loss}

    images, labels = digits(64)
    devices = [types.SimpleNamespace(device_type="CPU"), types.SimpleNamespace(device_type="GPU")]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(tf.config, "list_physical_devices", lambda *_: devices),
    ):
        path = os.path.join(folder, "plain.keras")
        plain = compiled(model_of(), keras.optimizers.SGD(), jit_compile="auto")
        plain.save(path)
        models = [hvd.load_model(path)]
        for form in ("one", "list"):
            models.append(Several(form))
            models[-1].compile(hvd.DistributedOptimizer(keras.optimizers.SGD()))
        assert plain.jit_compile and models[1].jit_compile  # or the test shows nothing
        for around in (lambda each: each, keras.optimizers.LossScaleOptimizer):
            optimizer = around(hvd.DistributedOptimizer(keras.optimizers.SGD()))
            assert not compiled(model_of(), optimizer, jit_compile="auto").jit_compile
        for model in models:
            model.fit(mine(images, hvd.rank(), 2), mine(labels, hvd.rank(), 2), **FIT)
            assert not model.jit_compile
            the_same_everywhere(model.get_weights())
        plain.make_train_function()
        assert plain.jit_compile


@as_ranks(2)
def test_optimizers_leave_alone_what_they_should_and_refuse_what_cannot_be():
    import keras
    import tensorflow as tf

    import hvdlite.keras as hvd

    rank = hvd.rank()
    a, b = tf.Variable([0.0, 0.0]), tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(b)
    optimizer.apply_gradients([(tf.constant([1.0, 2.0]) * (rank + 1), a), (tf.constant(rank + 1.0), b)])
    np.testing.assert_array_equal(a, [-1.5, -3.0])
    assert float(b) == -(rank + 1) / 2
    table = tf.Variable(tf.zeros([3, 1]))
    sparse = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    sparse.apply([tf.IndexedSlices(tf.ones([1, 1]), tf.constant([rank]), tf.constant([3, 1]))], [table])
    np.testing.assert_array_equal(table, [[-1], [-1], [0]])
    model = model_of()
    partial = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=model.layers[:1])
    first, last = model.layers[0].kernel, model.layers[-1].kernel
    before = [np.array(first), np.array(last)]
    partial.apply([tf.fill(v.shape, rank + 1.0) for v in model.trainable_variables], model.trainable_variables)
    np.testing.assert_allclose(before[0] - np.array(first), (rank + 1) / 2, rtol=1e-5)
    np.testing.assert_allclose(before[1] - np.array(last), 1.5, rtol=1e-5)
    for wrong, says in (
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0), "at least 1"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), groups="x"), "groups should be"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()
    with pytest.raises(TypeError, match=r"optimizer of keras .*the string 'sgd': pass keras.optimizers.get\('sgd'\)"):
        hvd.DistributedOptimizer("sgd")
    lacks = pytest.raises(hvd.HvdNotYetError, match=r"Keras runs on numpy, .*cannot reduce.*KERAS_BACKEND=tensorflow")
    with mock.patch.object(keras.backend, "backend", lambda: "numpy"), lacks:
        hvd.DistributedOptimizer(keras.optimizers.SGD())
    total = hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum, compression=hvd.Compression.fp16)
    np.testing.assert_array_equal(total, [2, 2, 2])
