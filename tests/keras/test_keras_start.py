"""A broadcast that was forgotten: ranks of a Keras optimizer that differ before the second step are told, or fail."""

import os
import warnings
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
from ranks import as_ranks, everything

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def fitted(*callbacks, same=False, local=False, eager=False, rows=8, **terms):
    """The warnings of HVD302 while a model is fitted that begins elsewhere on each rank, or a local variable of it."""
    import keras

    import hvdlite.tensorflow.keras as hvd

    keras.utils.set_random_seed(1 if same else hvd.rank())
    layers = [keras.layers.Dense(2, name="own"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **terms)
    if local:
        layers[0].kernel.assign(np.full((4, 2), hvd.rank()))
        optimizer.register_local_var(layers[0].kernel)
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=eager)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(np.ones((rows, 4)), np.ones((rows, 2)), batch_size=2, verbose=0, callbacks=list(callbacks))
    return [str(each.message) for each in said if "HVD302" in str(each.message)]


@pytest.mark.parametrize("eager", [False, *everything(True)])
@as_ranks(2, deadline=300)
def test_who_forgets_the_broadcast_is_told_once_or_fails(eager):
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd

    said = fitted(eager=eager)
    assert len(said) == (hvd.rank() == 0), said
    assert all("own/kernel' on rank 1 is not what rank 0 has" in each for each in said), said
    assert not fitted(hvd.callbacks.BroadcastGlobalVariablesCallback(0), eager=eager)
    with mock.patch.dict(os.environ, HVDLITE_CHECK_START="off"):
        assert not fitted(eager=eager)
    error = pytest.raises(tf.errors.OpError, match="own/kernel' on rank 1 is not .*HVD302")
    with mock.patch.dict(os.environ, HVDLITE_CHECK_START="raise"), error:
        fitted(eager=eager)


@as_ranks(3, deadline=300)
def test_sets_passes_and_local_variables():
    import hvdlite.tensorflow.keras as hvd

    assert not fitted(same=True, local=True)
    pair = hvd.add_process_set([0, 2])
    said = fitted(process_set=pair, backward_passes_per_step=2)
    assert len(said) == (hvd.rank() == 0) and all("on rank 2 is not" in each for each in said), said
    hvd.remove_process_set(pair)


@as_ranks(2, deadline=300)
def test_a_rank_that_has_joined_waits_for_no_comparison_of_later_steps():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd

    variable, optimizer = tf.Variable([1.0]), hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    step = tf.function(lambda: optimizer.apply_gradients([(tf.ones(1), variable)]))
    for _ in range(2):
        if hvd.rank() == 0:
            step()
        hvd.join()
    step()
    np.testing.assert_array_equal(variable, [-1 if hvd.rank() == 0 else 0])


def trained_alone(how, batches=4):
    """The warnings of HVD302 of a model that is broadcast, and whose optimizer is Keras's."""
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd

    class Averaging(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            own = tape.gradient(loss, self.trainable_variables)
            averages = [hvd.allreduce(each, name=f"own.{i}") for i, each in enumerate(own)]
            self.optimizer.apply(averages, self.trainable_variables)
            return {"loss": loss}

    class Seldom(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if how == "seldom" and batch % 7 == 6:
                self.model.set_weights([hvd.allreduce(each, name="w") for each in self.model.get_weights()])

    model = (Averaging if how == "averaging" else keras.Sequential)([keras.layers.Input((4,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(hvd.DistributedOptimizer(optimizer) if how == "ours" else optimizer, "mse", jit_compile=False)
    data = np.ones((2 * batches, 4), "float32"), np.full((2 * batches, 2), float(hvd.rank()), "float32")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        callbacks = [Seldom(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    return [str(each.message) for each in said if "HVD302" in str(each.message)]


@as_ranks(2, deadline=300)
def test_who_forgets_the_optimizer_is_told_once():
    import hvdlite.tensorflow.keras as hvd

    assert not trained_alone("seldom", 12)
    for batches in (4, 12, 1 + hvd.rank()):
        said = trained_alone("forgotten", batches)
        assert len(said) == (hvd.rank() == 0) and all("hvd.DistributedOptimizer" in each for each in said), said
    assert not trained_alone("averaging") and not trained_alone("ours")
    with mock.patch.dict(os.environ, HVDLITE_CHECK_START="off"):
        assert not trained_alone("forgotten")
    with mock.patch.dict(os.environ, HVDLITE_CHECK_START="raise"), pytest.raises(hvd.HvdMismatchError, match="alone"):
        trained_alone("forgotten")


@as_ranks(2, deadline=300)
def test_weights_that_one_rank_loads_in_the_middle_are_found_and_rounding_is_not():
    import keras

    import hvdlite.tensorflow.keras as hvd

    class Loads(keras.callbacks.Callback):
        factor = 1.0

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and hvd.rank() == 1:
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel.value * self.factor)

    for factor, told in ((2.0, True), (1 + 1e-6, False)):
        loads = Loads()
        loads.factor = factor
        said = fitted(loads, same=True, rows=20)
        assert len(said) == (told and hvd.rank() == 0), said
        assert all("own/kernel' on rank 1 is not what rank 0 has" in each for each in said), said


@as_ranks(2, deadline=300)
def test_a_rank_without_a_batch_says_so():
    import keras

    import hvdlite.tensorflow.keras as hvd

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    rows = 2 * hvd.rank()
    for callback in (hvd.callbacks.MetricAverageCallback(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)):
        callback.broadcast_done = True
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.fit(np.ones((rows, 4)), np.ones((rows, 2)), verbose=0, callbacks=[callback])
        assert any("rank 0: fit had no batch" in str(each.message) for each in said) == (rows == 0), said


@as_ranks(2, deadline=300)
def test_a_graph_changes_weights_and_counts_after_they_were_compared():
    """Weight decay and the count of steps wait for no average."""
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd

    weight = keras.Variable(np.ones(3, "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    optimizer.build([weight])
    step = tf.function(lambda gradient: optimizer.apply_gradients([(gradient, weight)]))
    graph = step.get_concrete_function(tf.TensorSpec([3])).graph
    nodes = graph.get_operations()
    compared = next(node for node in nodes if node.type == "If")
    changes = {}  # the first of each variable
    for node in nodes[nodes.index(compared) :]:
        if node.type.startswith("Assign"):
            changes.setdefault(node.inputs[0].name, node)
    for variable in (weight, optimizer.iterations):
        (name,) = [inner.name for outer, inner in graph.captures if outer is variable.value.handle]
        assert compared in changes[name].control_inputs, changes
