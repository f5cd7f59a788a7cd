"""Several passes per step: every variable's gradients are added to its own sum, however a pass brings them."""

import functools
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
from ranks import as_ranks, everything

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def pair(values=(1.0, 2.0)):
    import tensorflow as tf

    return [tf.Variable(tf.fill([3], value)) for value in values]


@pytest.mark.parametrize("kind, graph", [("keras", 1), *everything(("v1", 0), ("keras", 0), ("v1", 1))])
@as_ranks(2, deadline=300)
def test_passes_may_bring_the_same_variables_in_another_order(kind, graph):
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    first, second = pair()
    plain = keras.optimizers.SGD(1.0) if kind == "keras" else tf.compat.v1.train.GradientDescentOptimizer(1.0)
    optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
    if kind == "keras":
        optimizer.build([first, second])
    scale = tf.constant(hvd.rank() + 1.0)
    factors = {id(first): 1.0, id(second): 10.0}

    def call(order):
        if kind == "v1":  # what computes the gradients adds them up

            def loss():
                return tf.add_n([tf.reduce_sum(each * factors[id(each)] * scale) for each in order])

            optimizer.apply_gradients(optimizer.compute_gradients(loss, order))
        else:
            optimizer.apply_gradients([(tf.ones([3]) * factors[id(each)] * scale, each) for each in order])

    both = [functools.partial(call, [first, second]), functools.partial(call, [second, first])]
    if graph:
        both = [tf.function(each) for each in both]
    for _ in range(2):
        for each in both:
            each()
    np.testing.assert_array_equal(first, [1 - 2 * 3.0] * 3)  # two windows of two passes, 1.5 times as much each
    np.testing.assert_array_equal(second, [2 - 2 * 30.0] * 3)


@as_ranks(2, deadline=300)
def test_a_pass_may_lack_variables_and_freezing_forgets_what_was_added():
    import keras
    import tensorflow as tf

    import hvdlite.keras as hvd

    first, second = (keras.Variable(tf.ones([size]) * size) for size in (2, 3))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build([first, second])
    scale = hvd.rank() + 1.0
    optimizer.apply([tf.ones([2]) * scale, tf.ones([3]) * scale], [first, second])
    optimizer.apply([tf.ones([3]) * scale], [second])
    np.testing.assert_array_equal(first, [2 - 1.5] * 2)
    np.testing.assert_array_equal(second, [3 - 3.0] * 3)
    optimizer.apply([tf.ones([2]) * scale, tf.ones([3]) * scale], [first, second])
    first.trainable = False
    optimizer.apply([tf.ones([3]) * scale], [second])
    first.trainable = True
    np.testing.assert_array_equal(first, [0.5] * 2)
    np.testing.assert_array_equal(second, [-3.0] * 3)
    optimizer.apply([None, tf.ones([3]) * scale], [first, second])
    optimizer.apply([tf.ones([2]) * scale, None], [first, second])
    np.testing.assert_array_equal(first, [0.5 - 1.5] * 2)
    np.testing.assert_array_equal(second, [-4.5] * 3)


@as_ranks(2, deadline=300)
def test_a_layer_can_be_frozen_in_the_middle_of_a_window():
    import keras
    from fitting import FIT, the_same_everywhere

    import hvdlite.keras as hvd

    keras.utils.set_random_seed(1)
    x, y = np.random.RandomState(hvd.rank()).randn(2, 24, 4).astype("float32")
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(4)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model.compile(optimizer, "mse")
    model.fit(x, y, **{**FIT, "batch_size": 8})  # three batches: a window and a half
    model.layers[0].trainable = False
    model.compile(optimizer, "mse")
    frozen, free = model.layers[0].get_weights(), model.layers[1].get_weights()
    model.fit(x, y, **{**FIT, "batch_size": 8})
    the_same_everywhere(model.get_weights())
    np.testing.assert_array_equal(frozen[0], model.layers[0].get_weights()[0])
    assert not np.array_equal(free[0], model.layers[1].get_weights()[0])


@pytest.mark.parametrize("mixed", [True, *everything(False)])
@as_ranks(2)
def test_a_model_saved_in_the_middle_of_a_window_goes_on_as_if_never_interrupted(mixed):
    import copy
    import os
    import tempfile

    import keras
    from fitting import FIT, the_same_everywhere
    from test_keras_differ import rows, small

    import hvdlite.keras as hvd

    how = {**FIT, "batch_size": 8}
    x, y = rows(hvd.rank(), 64)
    policy = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16" if mixed else "float32")
    try:
        model = small()
        terms = {"backward_passes_per_step": 3, "average_aggregated_gradients": True}

        def optimizer():
            made = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), **terms)
            return keras.optimizers.LossScaleOptimizer(made, initial_scale=16.0) if mixed else made

        model.compile(optimizer(), "mse", jit_compile=False)
        model.fit(x[:32], y[:32], **how)  # a window and a third
        with tempfile.TemporaryDirectory() as folder:
            path, weights = os.path.join(folder, "model.keras"), os.path.join(folder, "model.weights.h5")
            model.save(path)
            model.save_weights(weights)
            plain = keras.models.load_model(path)
            again = [hvd.load_model(path), hvd.load_model(path, **terms), copy.deepcopy(model)]
            fresh = small()
            fresh.compile(optimizer(), "mse", jit_compile=False)
            fresh.optimizer.build(fresh.trainable_variables)
            fresh.load_weights(weights)
            again.append(fresh)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                anew = hvd.load_model(path, backward_passes_per_step=2)
        assert f"rank {hvd.rank()}: a window of backward_passes_per_step restarts" in str(said[-1].message)
        assert getattr(anew.optimizer, "inner_optimizer", anew.optimizer)._hvd_passes.count == 2
        bare = getattr(plain.optimizer, "inner_optimizer", plain.optimizer)
        assert not hasattr(bare, "_hvd_passes") and int(bare.iterations) > 0
        model.fit(x[32:], y[32:], **how)
        the_same_everywhere(model.get_weights())
        for i, each in enumerate(again):
            each.fit(x[32:], y[32:], **how)
            for one, two in zip(model.get_weights(), each.get_weights()):
                np.testing.assert_array_equal(one, two, err_msg=str(i))
        with tempfile.TemporaryDirectory() as folder:  # a third of a window is left: rank 0 alone opens it
            path = os.path.join(folder, "model.keras")
            model.save(path)
            if hvd.rank() == 0:
                model = hvd.load_model(path)
            else:
                model.compile(optimizer(), "mse", jit_compile=False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.fit(x, y, **how, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        the_same_everywhere(model.get_weights())
        assert any("not all ranks have opened" in str(each.message) for each in said) == (hvd.rank() == 0)
    finally:
        keras.mixed_precision.set_dtype_policy(policy)


@as_ranks(2)
def test_elastic_states_have_the_window_and_counts_that_differ_are_an_error():
    import keras
    from test_keras_differ import rows, small

    import hvdlite.keras as hvd

    x, y = (each[:8] for each in rows(hvd.rank()))
    model = small()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2), "mse", jit_compile=False
    )
    state = hvd.elastic.KerasState(model)
    model.train_on_batch(x, y)
    state.save()
    model.train_on_batch(-x, y)
    after = model.get_weights()
    model.train_on_batch(x, y)
    for put_back in (state.restore, lambda: (state.restore(), state.sync())):
        put_back()
        model.train_on_batch(-x, y)
        same = [np.array_equal(one, two) for one, two in zip(after, model.get_weights())]
        assert all(same) or put_back is not state.restore  # after a sync the root's sums are those of all
        assert len(set(hvd.allgather_object(model.get_weights()[0].tobytes()))) == 1
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2 + hvd.rank()), "mse",
        jit_compile=False,
    )  # fmt: skip
    with pytest.raises(hvd.HvdMismatchError, match=r"backward_passes_per_step differs: 2 on rank 0, 3 on rank 1"):
        model.fit(x, y, verbose=0)


@as_ranks(2)
def test_weights_that_are_loaded_into_a_window_leave_it_and_say_so():
    import os
    import tempfile

    from fitting import FIT
    from test_keras_differ import rows, small

    import hvdlite.keras as hvd

    def made():
        import keras

        model = small()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=3)
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    x, y = rows(hvd.rank(), 8)
    how = {**FIT, "batch_size": 8}
    model, other = made(), made()
    with tempfile.TemporaryDirectory() as folder:
        begun, whole, bare = (os.path.join(folder, f"{name}.weights.h5") for name in ("begun", "whole", "bare"))
        small().save_weights(bare)
        model.fit(x, y, **how)
        model.save_weights(begun)
        for _ in range(2):
            model.fit(x, y, **how)
        model.save_weights(whole)
        other.fit(x, y, **how)
        for file, here, there in ((begun, 1, 1), (whole, 1, 0), (bare, 1, 0)):
            says = f"rank {hvd.rank()}: weights were loaded after {here} of 3 passes .* saved after {there} passes"
            with pytest.warns(UserWarning, match=says):
                other.load_weights(file)
            assert other.optimizer._hvd_passes.position() == 1
        with pytest.warns(UserWarning, match="weights were loaded after 0 of 3 passes .* after 1 passes"):
            model.load_weights(begun)  # between two windows
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.load_weights(whole)
            fresh = made()
            fresh.optimizer.build(fresh.trainable_variables)
            fresh.load_weights(begun)
        assert not any("weights were loaded" in str(each.message) for each in said)
        assert fresh.optimizer._hvd_passes.position() == 1


@as_ranks(2)
def test_a_rank_that_has_joined_before_the_first_pass_is_an_error_that_says_what_to_do():
    import keras
    from test_keras_differ import rows, small

    import hvdlite.keras as hvd
    import hvdlite.tensorflow as hvd_tf

    for how in ({"run_eagerly": True}, {"jit_compile": False}):
        model = small()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2), "mse", **how)
        if hvd.rank() == 0:
            says = r"rank 0: backward_passes_per_step=2, after 0 passes.*joined.*Call hvd\.join\(\) after a first step"
            with pytest.raises(hvd.HvdMismatchError, match=says):
                model.fit(*rows(0, 8), batch_size=4, verbose=0)
        hvd_tf.join()
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


@as_ranks(2)
def test_only_a_keras_file_knows_how_many_passes_there_were():
    import os
    import tempfile
    import zipfile

    import keras
    from test_keras_differ import rows, small

    import hvdlite.keras as hvd

    model, said = small(), "only a .keras file records the passes per step"
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2),
        keras.losses.MeanSquaredError(),
        jit_compile=False,
    )
    model.fit(*rows(hvd.rank(), 8), batch_size=4, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        whole, older, opened = (os.path.join(folder, name) for name in ("model.keras", "model.h5", "opened"))
        model.save(whole)
        model.save(older)
        with zipfile.ZipFile(whole) as archive:
            archive.extractall(opened)
        with pytest.warns(
            UserWarning, match=f"rank {hvd.rank()}: load_model: {said}.*model.h5 is not one; hvdlite uses"
        ):
            assert hvd.load_model(older).optimizer._hvd_passes is None
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert hvd.load_model(older, backward_passes_per_step=2).optimizer._hvd_passes.count == 2
            for path in (whole, opened):
                assert hvd.load_model(path).optimizer._hvd_passes.count == 2
        assert not any(said in str(each.message) for each in found)
