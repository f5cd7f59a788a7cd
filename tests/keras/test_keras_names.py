"""Keras 3: names of Keras 2 and Horovod that its optimizers do not have are refused, and what it has averages once."""

import functools
from importlib.util import find_spec

import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def _one_pass(optimizer, w, distributed):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    with tf.GradientTape() as tape:
        loss = w.value * (hvd.rank() + 1.0)
    tape = hvd.DistributedGradientTape(tape) if distributed else tape
    optimizer.apply_gradients([(tape.gradient(loss, w.value), w)])


@as_ranks(2, deadline=120)
def test_names_of_keras_2_and_horovod_are_refused_and_the_others_average():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd
    from hvdlite.tensorflow import DistributedGradientTape

    for passes in (1, 2):
        w = keras.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=passes)
        for name in ("_compute_gradients", "_aggregate_gradients", "_allreduce", "_agg_helper", "minimize"):
            assert not hasattr(optimizer, name)
            with pytest.raises(AttributeError, match=f"{name}.*apply_gradients.*HVD224"):
                getattr(optimizer, name)
        for flag in ("experimental_aggregate_gradients", "skip_gradients_aggregation"):
            with pytest.raises(TypeError, match=f"{flag}.*HVD224"):
                optimizer.apply_gradients([(tf.ones([]), w)], **{flag: False})

        optimizer.build([w])
        for distributed in (False, True):  # both average: an average of averages is the same
            one_pass = functools.partial(_one_pass, optimizer, w, distributed)
            for each in (one_pass, tf.function(one_pass)):
                before = float(w)
                for _ in range(passes):
                    each()
                assert float(w) == before - 1.5 * passes
        summing = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=passes)
        with tf.GradientTape() as tape:
            loss = w.value * 1.0
        gradient = DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, w.value)
        with pytest.raises(ValueError, match="sums over the ranks already.*HVD224"):
            summing.apply_gradients([(gradient, w)])
