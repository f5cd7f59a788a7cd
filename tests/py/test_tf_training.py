"""Tapes, variables and Keras's optimizers on TensorFlow: what they train to is what one process trains to."""

from importlib.util import find_spec

import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)


def digits(count=64 * 20):
    """Real digits: (images, labels) of the whole job; a rank takes its half of every 64."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images[:count] / 16).astype("float32"), labels[:count]


def mine(array, rank, size, batch=64):
    """The rows of every global batch that are this rank's."""
    rows = array.reshape(-1, size, batch // size, *array.shape[1:])
    return rows[:, rank].reshape(-1, *array.shape[1:])


def model_of(seed=1, **more):
    """A small model, the same on every rank."""
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(32, "relu", **more), keras.layers.Dense(10, **more)]
    )


def compiled(model, optimizer, **more):
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"], **more)
    return model


def the_same_everywhere(weights):
    """Bit by bit on all ranks."""
    import hvdlite.tensorflow as hvd

    block = b"".join(np.asarray(each).tobytes() for each in weights)
    assert len(set(hvd.allgather_object(block))) == 1


FIT = {"batch_size": 32, "shuffle": False, "verbose": 0}


@pytest.mark.parametrize("how", ["graph", "auto", "eager"])
@as_ranks(2, deadline=120)
def test_fit_trains_to_what_one_process_trains_to_on_the_global_batch(how):
    import keras

    import hvdlite.tensorflow.keras as hvd

    more = {"graph": {"jit_compile": False}, "auto": {"jit_compile": "auto"}, "eager": {"run_eagerly": True}}[how]
    images, labels = digits()
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
    assert int(model.optimizer.iterations) == 20


@as_ranks(2, deadline=120)
def test_a_tape_trains_likewise_in_every_form():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    images, labels = digits(64 * 4)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rank, size = hvd.rank(), hvd.size()

    def trained(rows, targets, batch, wrap, graph):
        model, optimizer = model_of(), keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            gradients = wrap(tape, model).gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        step = tf.function(step) if graph else step
        for start in range(0, len(rows), batch):
            step(tf.constant(rows[start : start + batch]), tf.constant(targets[start : start + batch]))
        return model.get_weights()

    wanted = trained(images, labels, 64, lambda tape, _: tape, True)
    forms = {
        "plain": {},
        "predivide": {"gradient_predivide_factor": 2.0},
        "groups": {"groups": 2},
        "lists": {"groups": "lists"},
        "num_groups": {"num_groups": 1, "gradient_predivide_factor": 0.5},
        "fp16": {"compression": hvd.Compression.fp16},
    }
    for name, terms in forms.items():

        def wrap(tape, model, terms=terms):
            if terms.get("groups") == "lists":
                terms = {"groups": [model.trainable_variables[:3]]}
            return hvd.DistributedGradientTape(tape, **terms)

        for graph in (True, False) if name == "plain" else (True,):
            got = trained(mine(images, rank, size), mine(labels, rank, size), 32, wrap, graph)
            the_same_everywhere(got)
            for ours, theirs in zip(got, wanted):
                np.testing.assert_allclose(ours, theirs, atol=2e-3 if name == "fp16" else 1e-5, err_msg=name)


@as_ranks(2)
def test_tapes_leave_alone_what_they_should_and_refuse_what_cannot_be():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()
    a, b, table, idle = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(tf.ones([4, 2])), tf.Variable(0.0)

    def loss():
        return tf.reduce_sum(a * (rank + 1.0)) + b * (rank + 1.0) + tf.reduce_sum(tf.gather(table, [rank, rank]))

    with tf.GradientTape(persistent=True) as tape:
        value = loss()
    wrapped = hvd.DistributedGradientTape(tape)
    wrapped.register_local_source(b)
    got = wrapped.gradient(value, {"a": a, "b": b, "table": table, "idle": idle})
    np.testing.assert_array_equal(got["a"], [1.5, 1.5])
    assert got["b"] == (rank + 1.0) / 2 and got["idle"] is None
    assert isinstance(got["table"], tf.IndexedSlices)
    np.testing.assert_array_equal(tf.convert_to_tensor(got["table"]), [[1, 1], [1, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(tape.gradient(value, a), [rank + 1.0] * 2)  # the given tape's are this rank's own
    dense = hvd.DistributedGradientTape(tape, sparse_as_dense=True, op=hvd.Sum).gradient(value, [table])[0]
    np.testing.assert_array_equal(dense, [[2, 2], [2, 2], [0, 0], [0, 0]])
    local, summed = hvd.DistributedGradientTape(tape, op=hvd.Sum).get_local_and_global_gradients(value, [a])
    assert local[0][0] == rank + 1 and summed[0][0] == 3

    class Layer:
        trainable_weights = [a]

    partial = hvd.PartialDistributedGradientTape(tape, local_layers=Layer(), scale_local_gradients=False)
    assert partial.gradient(value, a)[0] == rank + 1
    with hvd.DistributedGradientTape(tf.GradientTape()) as inside:
        another = loss()
    assert inside.gradient(another, a)[0] == 1.5
    with pytest.raises(ValueError, match="not supported with op != Average"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="groups should be"):
        hvd.DistributedGradientTape(tape, groups="all")
    with pytest.raises(TypeError, match=r"tf\.GradientTape"):
        hvd.DistributedGradientTape(a)
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(value, [table])


@as_ranks(2)
def test_variables_and_objects_go_from_rank_to_rank():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()
    variables = [tf.Variable([float(rank)] * 3), tf.Variable(rank), tf.Variable(tf.cast([rank], tf.bfloat16))]
    hvd.broadcast_variables(variables, root_rank=1)
    assert [float(tf.reduce_max(tf.cast(v, tf.float32))) for v in variables] == [1, 1, 1]

    @tf.function
    def send():
        hvd.broadcast_variables(variables, root_rank=0)

    variables[1].assign(5 + rank)
    send()
    assert int(variables[1]) == 5
    assert hvd.broadcast_(variables, 0) is not None
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.broadcast_object_fn(0)([rank]) == [0] and hvd.allgather_object(rank) == [0, 1]
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(0)


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


@as_ranks(2, deadline=120)
def test_saving_loading_and_going_on_is_as_if_never_interrupted():
    import os
    import tempfile

    import keras

    import hvdlite.keras as hvd

    images, labels = digits(64 * 8)
    x, y = mine(images, hvd.rank(), 2), mine(labels, hvd.rank(), 2)
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    path = os.path.join(folder, "model.keras")
    model = compiled(model_of(), hvd.DistributedOptimizer(keras.optimizers.Adam(1e-2)), jit_compile=False)
    model.fit(x[:128], y[:128], **FIT)
    if hvd.rank() == 0:
        model.save(path)
    hvd.barrier()
    model.fit(x[128:], y[128:], **FIT)
    again = hvd.load_model(path)
    assert hasattr(again.optimizer, "register_local_var") and type(again.optimizer).__name__ == "Adam"
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam
    again.fit(x[128:], y[128:], **FIT)
    for one, two in zip(model.get_weights(), again.get_weights()):
        np.testing.assert_array_equal(one, two)
    hvd.barrier()
    if hvd.rank() == 0:
        os.remove(path)
        os.rmdir(folder)


@as_ranks(2, deadline=120)
def test_callbacks_begin_alike_average_what_is_logged_and_warm_up():
    import keras

    import hvdlite.keras as hvd

    images, labels = digits(64 * 4)
    rank, size = hvd.rank(), hvd.size()
    model = compiled(model_of(seed=rank), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    rates = []
    history = model.fit(
        mine(images, rank, size), mine(labels, rank, size), epochs=4, **FIT,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=2, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(0.2, multiplier=lambda epoch: 0.1, start_epoch=3),
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: rates.append(float(np.asarray(model.optimizer.learning_rate)))
            ),
        ],
    )  # fmt: skip
    the_same_everywhere(model.get_weights())
    assert len(set(map(str, hvd.allgather_object(history.history["loss"])))) == 1
    np.testing.assert_allclose(rates[:8], [0.1 + 0.1 * (i + 1) / 8 for i in range(8)], rtol=1e-5)
    np.testing.assert_allclose(rates[8:], [0.2] * 4 + [0.02] * 4, rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"], [0.15, 0.2, 0.2, 0.02], rtol=1e-5)


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
        (lambda: hvd.DistributedOptimizer(optimizer), "already"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0), "at least 1"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Sum, gradient_predivide_factor=2.0), "op"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), groups="x"), "groups should be"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()
    with pytest.raises(TypeError, match="optimizer of keras"):
        hvd.DistributedOptimizer("sgd")
    total = hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum, compression=hvd.Compression.fp16)
    np.testing.assert_array_equal(total, [2, 2, 2])


@as_ranks(2)
def test_xla_is_refused_with_words_that_say_what_to_set():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    with pytest.raises(NotImplementedError, match="jit_compile=False"):
        tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(tf.ones(2))


@as_ranks(2)
def test_sync_batch_norm_is_that_of_one_process_with_all_rows():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()
    rows = np.random.RandomState(0).standard_normal((9, 4)).astype("float32") * 3 + 5
    mine = rows[:4] if rank == 0 else rows[4:]
    weight = np.random.RandomState(1).standard_normal((9, 4)).astype("float32")
    own = weight[:4] if rank == 0 else weight[4:]

    def passed(layer, x, w):
        x = tf.constant(x)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * w)
            return y, *tape.gradient(loss, [x, layer.gamma])

        layer.build((None, 4))
        return step(x)

    synced = hvd.SyncBatchNormalization(momentum=0.5)
    y, of_input, of_gamma = passed(synced, mine, own)
    whole = keras.layers.BatchNormalization(momentum=0.5)
    expected, of_inputs, of_gammas = passed(whole, rows, weight)
    part = slice(0, 4) if rank == 0 else slice(4, 9)
    np.testing.assert_allclose(y, expected[part], atol=1e-4)
    np.testing.assert_allclose(of_input, of_inputs[part], atol=1e-4)
    np.testing.assert_allclose(hvd.allreduce(of_gamma, op=hvd.Sum), of_gammas, atol=1e-4)
    np.testing.assert_allclose(synced.moving_variance, whole.moving_variance, rtol=1e-4)
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
