"""Keras 2, where TF_USE_LEGACY_KERAS=1 asks for it, trains on several ranks as Keras 3 does."""

from importlib.util import find_spec

import numpy as np
import pytest
from fitting import FIT, digits, mine, the_same_everywhere
from ranks import as_ranks, everything

if find_spec("tensorflow") is None or find_spec("tf_keras") is None:
    pytest.skip("TensorFlow or tf_keras is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine

FRESH_RANKS = True  # which Keras it is must be said before hvdlite.keras is imported


def legacy():
    """Keras 2, and hvdlite for it."""
    import os

    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd

    assert tf.keras.__name__.startswith("tf_keras") or "tf_keras" in tf.keras.Model.__module__
    return tf.keras, hvd


def model_of(keras, seed=1):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(32, "relu", input_shape=(64,)), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def compiled(keras, model, optimizer, **more):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"], **more)
    return model


@as_ranks(2, deadline=120)
def test_fit_trains_to_what_one_process_trains_to_on_the_global_batch():
    keras, hvd = legacy()
    images, labels = digits(64 * 3)
    rank, size = hvd.rank(), hvd.size()
    x, y = mine(images, rank, size), mine(labels, rank, size)
    alone = compiled(keras, model_of(keras), keras.optimizers.SGD(0.1))
    alone.fit(images, labels, **{**FIT, "batch_size": 64})
    forms = [
        (keras.optimizers.SGD(0.1), {}, {}),
        (keras.optimizers.legacy.SGD(0.1), {}, {"run_eagerly": True}),
        (keras.optimizers.SGD(0.1), {"backward_passes_per_step": 2, "average_aggregated_gradients": True}, {}),
        (keras.optimizers.legacy.SGD(0.05), {"backward_passes_per_step": 2}, {}),
    ]
    for plain, terms, how in forms:
        optimizer = hvd.DistributedOptimizer(plain, **terms)
        assert isinstance(optimizer, type(plain)) and type(optimizer).__name__ == "SGD"
        model = compiled(keras, model_of(keras), optimizer, **how)
        passes = terms.get("backward_passes_per_step", 1)
        model.fit(x, y, **{**FIT, "batch_size": 32 // passes})
        the_same_everywhere(model.get_weights())
        for ours, theirs in zip(model.get_weights(), alone.get_weights()):
            np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=str((type(plain), terms, how)))
        assert int(model.optimizer.iterations) == 3 * passes  # batches, as in Horovod


@as_ranks(2, deadline=120)
def test_a_loss_scale_skips_a_step_on_all_ranks_when_one_overflows():
    keras, hvd = legacy()
    images, labels = digits(64)
    x, y = mine(images, hvd.rank(), 2), mine(labels, hvd.rank(), 2)
    for around, legacy_one in ((True, False), (False, True)):
        kind = keras.optimizers.legacy.SGD if legacy_one else keras.optimizers.SGD
        scaled = keras.mixed_precision.LossScaleOptimizer
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            optimizer = (
                scaled(hvd.DistributedOptimizer(kind(0.1))) if around else hvd.DistributedOptimizer(scaled(kind(0.1)))
            )
            model = compiled(keras, model_of(keras), optimizer)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        model.fit(x, y, **FIT)
        before, scale = model.get_weights(), float(optimizer.loss_scale)
        model.fit(x * (np.float32(6e4) if hvd.rank() == 0 else np.float32(1)), y, **FIT)
        assert float(optimizer.loss_scale) == scale / 2
        for old, new in zip(before, model.get_weights()):
            np.testing.assert_array_equal(old, new)
        model.fit(x, y, **FIT)
        the_same_everywhere(model.get_weights())
        assert not np.array_equal(before[0], model.get_weights()[0])


@as_ranks(2, deadline=60)
def test_sync_batch_norm_and_what_is_refused():
    keras, hvd = legacy()
    import keras as keras3
    import tensorflow as tf

    from hvdlite.tensorflow import SyncBatchNormalization

    rank = hvd.rank()
    rows = np.random.RandomState(0).standard_normal((9, 4)).astype("float32") * 3 + 5
    synced, whole = SyncBatchNormalization(momentum=0.5), keras.layers.BatchNormalization(momentum=0.5, fused=False)
    y = tf.function(lambda x: synced(x, training=True))(tf.constant(rows[:4] if rank == 0 else rows[4:]))
    expected = whole(rows, training=True)
    np.testing.assert_allclose(y, expected[:4] if rank == 0 else expected[4:], atol=1e-4)
    np.testing.assert_allclose(synced.moving_variance, whole.moving_variance, rtol=1e-4)
    with pytest.raises(TypeError, match="tf_keras"):
        hvd.DistributedOptimizer(keras3.optimizers.SGD())
    table = tf.Variable(tf.zeros([3, 1]))
    sparse = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    sparse.apply_gradients([(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([rank]), tf.constant([3, 1])), table)])
    np.testing.assert_array_equal(table, [[-1], [-1], [0]])


@as_ranks(2, deadline=60)
def test_what_horovods_private_names_give_is_reduced_once():
    keras, hvd = legacy()
    import tensorflow as tf

    rank = hvd.rank()
    for kind in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        variable, summing = tf.Variable([1.0, 2.0]), hvd.DistributedOptimizer(kind(1.0), op=hvd.Sum)
        assert summing._agg_helper is None
        averaging = hvd.DistributedOptimizer(kind(1.0))

        def computed(optimizer, variable=variable):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable) * (rank + 1.0)
            return optimizer._compute_gradients(loss, [variable], tape=tape)

        for _ in range(2):  # the first is not applied
            pairs = computed(summing)
            np.testing.assert_array_equal(pairs[0][0], [3, 3])
        summing.apply_gradients(pairs)
        clipped = [(computed(summing)[0][0] * 2, variable)]
        with pytest.raises(ValueError, match="experimental_aggregate_gradients=False"):
            summing.apply_gradients(clipped)
        summing.apply_gradients(clipped, experimental_aggregate_gradients=False)
        summing.apply_gradients([(tf.ones(2), variable)])  # not computed there: summed
        np.testing.assert_array_equal(variable, [1 - 11, 2 - 11])
        averaging.apply_gradients([(computed(averaging)[0][0] * 2, variable)])
        computed(averaging)
        averaging.apply_gradients([(tf.ones(2) * rank, variable)])
        np.testing.assert_array_equal(variable, [1 - 14.5, 2 - 14.5])
        for optimizer in (summing, keras.mixed_precision.LossScaleOptimizer(summing, dynamic=False, initial_scale=2)):
            optimizer.minimize(lambda: tf.reduce_sum(variable) * (rank + 1.0), [variable])  # noqa: B023
        np.testing.assert_array_equal(variable, [1 - 20.5, 2 - 20.5])
    assert hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)._agg_helper is not None


@as_ranks(2)
def test_copies_of_an_optimizer_are_distributed():
    import copy

    import tensorflow as tf

    keras, hvd = legacy()
    scaled = keras.mixed_precision.LossScaleOptimizer
    for kind in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        optimizer = hvd.DistributedOptimizer(kind(1.0), backward_passes_per_step=2)
        around = scaled(hvd.DistributedOptimizer(kind(1.0), backward_passes_per_step=2), dynamic=False, initial_scale=1)
        copies = [
            copy.copy(optimizer),
            optimizer.from_config(optimizer.get_config()),
            optimizer.__class__.from_config(optimizer.get_config()),
            type(around).from_config(around.get_config()),
            hvd.DistributedOptimizer(
                optimizer.__class__.from_config(optimizer.get_config()), backward_passes_per_step=2
            ),
        ]
        if kind is keras.optimizers.legacy.SGD:  # Keras itself cannot with the others
            copies.append(copy.deepcopy(optimizer))
        for i, each in enumerate(copies):
            variable = tf.Variable([0.0])
            for _ in range(2):
                each.apply_gradients([(tf.constant([hvd.rank() + 1.0]), variable)])
            np.testing.assert_array_equal(variable, [-3.0], err_msg=str((kind, i)))
        assert type(kind.from_config(dict(optimizer.get_config()))) is kind  # what files have


@pytest.mark.parametrize("mixed", everything(True, False))
@as_ranks(2)
def test_copied_models_go_on_distributed(mixed):
    import copy
    import os
    import pickle
    import tempfile
    import warnings

    keras, hvd = legacy()
    images, labels = digits(64 * 3)
    x, y = mine(images, hvd.rank(), 2), mine(labels, hvd.rank(), 2)
    keras.mixed_precision.set_global_policy("mixed_float16" if mixed else "float32")
    try:
        model = compiled(keras, model_of(keras), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
        model.fit(x, y, **FIT)
        copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
        model.fit(x, y, **FIT)
        for each in copies:
            each.fit(x, y, **FIT)
            the_same_everywhere(each.get_weights())
            for one, two in zip(model.get_weights(), each.get_weights()):
                np.testing.assert_array_equal(one, two)
        several = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), backward_passes_per_step=2)
        if mixed:
            several = keras.mixed_precision.LossScaleOptimizer(several, initial_scale=16.0)
        model = compiled(keras, model_of(keras), several)
        model.fit(x, y, **FIT)  # a window and a half
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            path = os.path.join(folder, "model.keras")
            model.save(path)
            again = hvd.load_model(path)
        passes = getattr(again.optimizer, "inner_optimizer", again.optimizer)._hvd_passes
        assert passes.count == 2 and any("restarts" in str(each.message) for each in said)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@as_ranks(2)
def test_a_file_with_an_older_optimizer_says_that_it_knows_no_passes():
    import os
    import tempfile
    import warnings

    keras, hvd = legacy()
    images, labels = digits(64)
    x, y = mine(images, hvd.rank(), 2), mine(labels, hvd.rank(), 2)
    older = keras.optimizers.legacy.Adam(0.01)
    model = compiled(keras, model_of(keras), hvd.DistributedOptimizer(older, backward_passes_per_step=2))
    model.fit(x, y, **{**FIT, "batch_size": 8})
    said = "no file says how many passes per step"
    with tempfile.TemporaryDirectory() as folder:
        for ending, iterations in ((".keras", 0), (".h5", 4)):
            path = os.path.join(folder, "model" + ending)
            model.save(path)
            with pytest.warns(UserWarning, match=f"rank {hvd.rank()}: load_model: {said}"):
                again = hvd.load_model(path)
            assert again.optimizer._hvd_passes is None and int(again.optimizer.iterations) == iterations
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                again = hvd.load_model(path, backward_passes_per_step=2)
            assert again.optimizer._hvd_passes.count == 2 and not any(said in str(each.message) for each in found)


@as_ranks(2, deadline=120)
def test_momentum_goes_to_no_other_layer():
    keras, hvd = legacy()
    import tensorflow as tf

    from hvdlite.tensorflow import broadcast_variables

    given = keras.layers.Input((4,))
    branches = [keras.layers.Dense(2, name=name)(given) for name in ("user", "item")[:: 1 - 2 * hvd.rank()]]
    model = keras.Model(given, keras.layers.concatenate(branches))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build(model.trainable_variables)
    for variables, prefix in ((model.weights, ""), (optimizer.variables, "m/")):
        text = rf"(?s)\(.*{prefix}user/kernel.*rank 1: \d variables \([., ]*{prefix}item/kernel.*sorted"
        with pytest.raises(tf.errors.FailedPreconditionError, match=text):
            broadcast_variables(variables, 0)
