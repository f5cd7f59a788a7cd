"""A test file as users of Horovod would have it: Keras 3, or 2 (TF_USE_LEGACY_KERAS=1); nothing here knows of hvdlite.

Run by test_tf_as_horovod.py under `hvdlite-run --as-horovod` on any number of ranks.
"""

import os
import tempfile

import horovod.keras
import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.process_sets import global_process_set

hvd.init(process_sets="dynamic")
RANK, SIZE = hvd.rank(), hvd.size()
keras = tf.keras
LEGACY = "tf_keras" in keras.Model.__module__
KINDS = [keras.optimizers, *([keras.optimizers.legacy] if LEGACY else [])]
X, Y = np.random.RandomState(0).random((4, 3)), np.random.RandomState(1).random((4, 3, 3))


def compiled(optimizer, **more):
    layers = [keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.RepeatVector(3)]
    model = keras.Sequential([*layers, keras.layers.TimeDistributed(keras.layers.Dense(3))])
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer=optimizer, metrics=["accuracy"], **more)
    return model


def variables_of(optimizer):
    found = optimizer.variables
    return [np.asarray(each) for each in (found() if callable(found) else found)]


def variable(value):
    return tf.Variable(value) if LEGACY else keras.Variable(value)


class Own(keras.optimizers.RMSprop):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


@pytest.mark.parametrize("ending", [".h5", ".keras"])
def test_load_model(ending):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.RMSprop(learning_rate=1e-4))
    model = compiled(optimizer)
    model.train_on_batch(X, Y)
    path = os.path.join(tempfile.mkdtemp(), "model" + ending)
    model.save(path)
    again = hvd.load_model(path)
    assert type(again.optimizer).__module__ == "horovod._keras" and type(again.optimizer).__name__ == "RMSprop"
    for one, two in zip(variables_of(optimizer), variables_of(again.optimizer)):
        np.testing.assert_allclose(one, two)
    assert len(variables_of(optimizer)) == len(variables_of(again.optimizer))
    assert again.optimizer.get_config()["learning_rate"] == optimizer.get_config()["learning_rate"]
    for each in (model, again):  # and goes on as if never interrupted
        each.train_on_batch(X, Y)
    for one, two in zip(model.get_weights(), again.get_weights()):
        np.testing.assert_array_equal(one, two)
    assert type(keras.models.load_model(path).optimizer) is keras.optimizers.RMSprop


@pytest.mark.parametrize("ending", [".h5", ".keras"])
def test_load_model_with_an_optimizer_of_ones_own(ending):
    model = compiled(hvd.DistributedOptimizer(Own(learning_rate=1e-4)))
    model.train_on_batch(X, Y)
    path = os.path.join(tempfile.mkdtemp(), "model" + ending)
    model.save(path)
    makes = {"Own": lambda **kwargs: hvd.DistributedOptimizer(Own(**kwargs))}
    for terms in ({"custom_optimizers": [Own]}, {"custom_objects": makes}, {"custom_objects": {"Own": Own}}):
        again = hvd.load_model(path, **terms)
        assert type(again.optimizer).__module__ == "horovod._keras" and type(again.optimizer).__name__ == "Own"
        again.train_on_batch(X, Y)


def test_a_model_that_one_rank_has_loaded_goes_to_all():
    path = os.path.join(tempfile.mkdtemp(), "model.h5")
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)))
    if RANK == 0:
        other = compiled(keras.optimizers.Adam(1e-3))  # has other names than the one of the others
        other.train_on_batch(X, Y)
        other.save(path)
        model = hvd.load_model(path)
        expected = other.get_weights()

    def batches():
        while True:
            yield X, Y

    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(self.model.get_weights())

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Look()]
    model.fit(batches(), steps_per_epoch=3, callbacks=callbacks, epochs=1, verbose=0)
    assert len({str(weights) for weights in hvd.allgather_object([w.tobytes() for w in model.get_weights()])}) == 1
    if RANK == 0:
        assert np.abs(seen[0][0] - expected[0]).max() < 0.01


def test_sparse_as_dense():
    for passes in (1, 2):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.RMSprop(1e-4), sparse_as_dense=True, backward_passes_per_step=passes
        )
        model = keras.Sequential([keras.layers.Embedding(100, 8)])
        model.compile(loss="mse", optimizer=optimizer)
        model.fit(np.random.randint(100, size=(8, 10)), np.random.random((8, 10, 8)), batch_size=2, verbose=0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_of_several_passes(kind):
    optimizer = hvd.DistributedOptimizer(
        kind.SGD(1.0), backward_passes_per_step=4, average_aggregated_gradients=True, op=hvd.Average
    )
    v = variable([0.0])
    _ = optimizer.iterations
    if hasattr(optimizer, "build"):
        optimizer.build([v])

    @tf.function
    def step(gradient):
        optimizer.apply_gradients([(gradient, v)])  # what an optimizer of Keras 2 returns, no function may

    for number in range(10):
        step(tf.constant([float(RANK)]))
        assert float(np.asarray(v)[0]) == -(SIZE - 1) / 2 * ((number + 1) // 4)
        assert not LEGACY or int(optimizer.iterations) == number + 1


def test_a_config_makes_the_optimizer_again():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5))
    for kind in (optimizer.__class__, type(optimizer)):
        assert float(np.asarray(kind.from_config(optimizer.get_config()).learning_rate)) == 0.5
    hvd.DistributedOptimizer(optimizer.__class__.from_config(optimizer.get_config()))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1 * SIZE, decay_steps=10, decay_rate=0.9)
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(schedule)))
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])


def test_callbacks():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * SIZE, momentum=0.9))
    rates = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(np.asarray(optimizer.learning_rate)))

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        Look(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2, verbose=1, steps_per_epoch=2),
        hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1, start_epoch=2, end_epoch=4, multiplier=0.1),
        hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=lambda epoch: 0.1 ** (epoch - 2), start_epoch=4),
    ]
    more = {"validation_data": (X, Y * (RANK + 1)), "batch_size": 2, "epochs": 5, "verbose": 0}
    model = compiled(optimizer)
    history = model.fit(X, Y * (RANK + 1), callbacks=callbacks, **more).history
    warm = [0.1 / SIZE * (1 + (SIZE - 1) * batch / 4) for batch in range(1, 5)]
    np.testing.assert_allclose(rates, [*warm, *[0.01] * 4, *[0.001] * 2], rtol=1e-5)
    assert len(set(hvd.allgather_object(model.get_weights()[0].tobytes()))) == 1
    np.testing.assert_allclose(history["lr"], [0.1 / SIZE * (1 + (SIZE - 1) / 2), 0.1, 0.01, 0.01, 0.001], rtol=1e-5)
    assert len({str((found["loss"], found["val_loss"])) for found in hvd.allgather_object(history)}) == 1


def test_collectives_of_values():
    for module in (hvd, horovod.keras):
        assert float(np.asarray(module.allreduce(RANK * 2.0, name="a", average=True))) == SIZE - 1
        assert np.asarray(module.allreduce(np.ones(3), op=hvd.Sum, prescale_factor=0.5)).sum() == 1.5 * SIZE
        assert np.asarray(module.allgather(np.ones((1, 2)), name="b")).shape == (SIZE, 2)
        assert float(np.asarray(module.broadcast(float(RANK), SIZE - 1, name="c"))) == SIZE - 1
        assert np.asarray(module.reducescatter(np.ones(2 * SIZE), op=hvd.Sum)).tolist() == [SIZE] * 2
        with pytest.raises(RuntimeError):
            module.broadcast_global_variables(0)


def test_optimizers_of_a_process_set_and_with_local_layers():
    sets = [hvd.add_process_set([rank]) for rank in range(SIZE)] if SIZE > 1 else [global_process_set]
    optimizer, v = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=sets[RANK]), variable([0.0])
    optimizer.apply_gradients([(tf.constant([float(RANK)]), v)])
    assert float(np.asarray(v)[0]) == -RANK
    assert SIZE == 1 or all(hvd.remove_process_set(each) for each in sets)
    last = keras.layers.Dense(2)
    model = keras.Sequential([keras.layers.Dense(3), last])
    model.build((None, 4))
    terms = {"local_layers": [last], "scale_local_gradients": False}
    optimizer = horovod.keras.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), **terms)
    before = model.get_weights()
    optimizer.apply_gradients([(tf.fill(v.shape, float(RANK)), v) for v in model.trainable_variables])
    moved = [(old - new).mean() for old, new in zip(before, model.get_weights())]
    np.testing.assert_allclose(moved, [(SIZE - 1) / 2] * 2 + [RANK] * 2, atol=1e-6)


def test_loss_scaling_with_several_passes():
    for kind in KINDS:
        optimizer = kind.SGD(0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, average_aggregated_gradients=True)
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        before = model.get_weights()
        model.fit(np.full((4, 2), 1e30), np.ones((4, 1)), batch_size=1, verbose=0)
        for old, new in zip(before, model.get_weights()):
            np.testing.assert_array_equal(old, new)


def test_elastic_state():
    model = keras.Sequential([keras.layers.Dense(2, activation="softmax")])
    model.build((2, 2))
    model.set_weights([np.full((2, 2), RANK + 1.0), np.full(2, RANK + 1.0)])
    optimizer = keras.optimizers.Adam(0.001 * (RANK + 1))
    state = hvd.elastic.KerasState(model, optimizer, batch=20 + RANK, epoch=10 + RANK)
    state.sync()
    assert (model.get_weights()[0] == 1).all() and (state.batch, state.epoch) == (20, 10)
    model.set_weights([np.zeros((2, 2)), np.zeros(2)])
    state.batch = 21
    state.restore()
    assert (model.get_weights()[0] == 1).all() and state.batch == 20
    model.set_weights([np.full((2, 2), 3.0), np.zeros(2)])
    state.commit()
    model.set_weights([np.zeros((2, 2)), np.zeros(2)])
    state.restore()
    assert (model.get_weights()[0] == 3).all()
    callbacks = [hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state, 2)]
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 2)), batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    assert state.epoch == 12
