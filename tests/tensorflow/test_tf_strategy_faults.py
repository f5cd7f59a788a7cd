"""hvd.Strategy where ranks are unlike: gradients, first batches; and where Keras sums gradients in a branch."""

import re
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from fitting import compiled, digits, model_of, the_same_everywhere
from ranks import Job, as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def made(optimizer):
    """A compiled model in the scope of a strategy; each rank begins elsewhere."""
    import hvdlite.tensorflow as hvd

    strategy = hvd.Strategy()
    with strategy.scope():
        return strategy, compiled(model_of(seed=1 + hvd.rank()), optimizer())


def batches(rows, batch):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(digits(rows)).batch(batch)


@as_ranks(2, deadline=240)
def test_one_rank_with_infinite_gradients_lets_all_skip_the_step_of_mixed_precision():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        strategy, model = made(lambda: keras.optimizers.SGD(0.1))
        model.fit(batches(64, 64), verbose=0)
        before, scale = model.get_weights(), float(model.optimizer.dynamic_scale.numpy())
        images, labels = digits(16)
        images[0, 0] = np.inf if hvd.rank() == 1 else 0

        def mine(context):
            return tf.data.Dataset.from_tensor_slices((images, labels)).batch(16)

        model.fit(strategy.distribute_datasets_from_function(mine), steps_per_epoch=1, verbose=0)
        assert all(map(np.array_equal, model.get_weights(), before))
        assert model.optimizer.dynamic_scale.numpy() == scale / 2
        model.fit(batches(64, 64), verbose=0)
        assert not all(map(np.array_equal, model.get_weights(), before))
        the_same_everywhere([each.numpy() for each in model.weights + model.optimizer.variables])
    finally:
        keras.mixed_precision.set_global_policy("float32")


@as_ranks(2, deadline=240)
def test_gradients_that_keras_3_accumulates_are_summed():
    import keras

    def optimizer():
        return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)

    one = compiled(model_of(seed=1), optimizer())
    one.fit(batches(256, 64), verbose=0)
    _, model = made(optimizer)
    model.fit(batches(256, 64), verbose=0)
    the_same_everywhere(model.get_weights())
    for mine_, theirs in zip(model.get_weights(), one.get_weights()):
        np.testing.assert_allclose(mine_, theirs, rtol=1e-4, atol=1e-5)


@as_ranks(2, deadline=240)
@pytest.mark.parametrize("rows, batch", [(126, 63), (1, 64)])
def test_the_first_batch_may_have_another_number_of_rows_on_each_rank(rows, batch):
    import keras

    _, model = made(lambda: keras.optimizers.SGD(0.1))
    model.fit(batches(rows, batch), verbose=0)
    the_same_everywhere(model.get_weights())
    assert all(np.isfinite(each).all() for each in model.get_weights())
    assert model.predict(batches(rows, batch), verbose=0).shape == (rows, 10)


@as_ranks(2)
def test_xla_is_refused_by_its_name():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    strategy = hvd.Strategy()

    def summed(value):
        return tf.distribute.get_replica_context().all_reduce("SUM", value)

    @tf.function(jit_compile=True)
    def compiled_by_xla(value):
        return strategy.run(summed, args=(value,))

    with pytest.raises(Exception, match="HVD248"):
        compiled_by_xla(tf.constant(1.0))


ENDLESS = """
import os, sys
import hvdlite.tensorflow as hvd
import tensorflow as tf

strategy = hvd.Strategy()
step = tf.function(lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", [1.0, 2.0])))
for number in range(1 << 20):
    if number == 100 and hvd.rank() == 1:
        os.kill(os.getpid(), 9)
    step()
"""


def test_a_rank_that_is_killed_ends_the_others_by_its_name(tmp_path):
    (tmp_path / "train.py").write_text(ENDLESS)
    with Job(2, [sys.executable, str(tmp_path / "train.py")], framework="tensorflow") as job:
        assert job.wait(120) != 0
        assert re.search(r"Strategy.list' on rank 0: rank 1 \(pid \d+\) is lost", job.text()), job.text()


@as_ranks(2)
def test_other_variables_on_a_rank_raise_on_all():
    import keras

    import hvdlite.tensorflow as hvd

    strategy = hvd.Strategy()
    layers = [keras.layers.Dense(8), keras.layers.LayerNormalization()]
    with strategy.scope(), pytest.raises(hvd.HvdMismatchError, match=r"kernel float32 \(8, 8\)"):
        keras.Sequential([keras.layers.Input((8,)), *layers[:: 1 if hvd.rank() else -1]])


@as_ranks(2)
def test_a_rank_that_skips_a_step_raises_on_all():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    strategy = hvd.Strategy()

    def summed(value):
        return tf.distribute.get_replica_context().all_reduce("SUM", [value, value])

    step = tf.function(lambda: strategy.run(summed, args=(tf.constant(1.0),)))
    with pytest.raises(Exception, match=r"2 values \(float32 \(\), float32 \(\)\)"):
        if hvd.rank() == 0:
            step()
        strategy.reduce("SUM", tf.constant(1), axis=None)
