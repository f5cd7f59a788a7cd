"""hvd.Strategy trains what TensorFlow's own strategy and one process train, with Keras 3 and with a loop."""

import logging
from importlib.util import find_spec

import numpy as np
import pytest
from fitting import compiled, digits, mine, model_of, the_same_everywhere
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def made(optimizer=None):
    """The model and its optimizer in the scope of a strategy; each rank begins elsewhere."""
    import keras

    import hvdlite.tensorflow as hvd

    strategy = hvd.Strategy()
    with strategy.scope():
        model = model_of(seed=1 + hvd.rank())
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer()
    return strategy, model, optimizer


def loop_over(strategy, model, optimizer, batches, batch=64):
    """A step of a custom loop for each batch of the strategy; the losses."""
    import keras
    import tensorflow as tf

    def step(images, labels):
        with tf.GradientTape() as tape:
            each = keras.losses.sparse_categorical_crossentropy(labels, model(images), from_logits=True)
            loss = tf.reduce_sum(each) / batch
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    @tf.function
    def whole(each):
        return strategy.reduce("SUM", strategy.run(step, args=each), axis=None)

    return [float(whole(each)) for each in batches]


def alone(rows):
    """The weights and the history of one process that trains on the whole batches."""
    import keras

    images, labels = digits(rows)
    model = compiled(model_of(seed=1), keras.optimizers.Adam(1e-2))
    history = model.fit(images, labels, batch_size=64, epochs=2, shuffle=False, verbose=0).history
    return model, history


@as_ranks(2, deadline=240)
@pytest.mark.parametrize("rows, close", [(256, 1e-4), (249, 1e-2)])
def test_fit_of_keras_3_trains_what_one_process_trains(rows, close):
    """249: the ranks have 29 and 28 rows of the last batch, and Keras takes the mean of their means."""
    import keras
    import tensorflow as tf

    images, labels = digits(rows)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(64)
    one, expected = alone(rows)
    strategy, model, optimizer = made(lambda: keras.optimizers.Adam(1e-2))
    with strategy.scope():
        compiled(model, optimizer)
    history = model.fit(data, epochs=2, verbose=0).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=close, err_msg=name)
    for mine_, theirs in zip(model.get_weights(), one.get_weights()):
        np.testing.assert_allclose(mine_, theirs, rtol=close, atol=close / 5)
    the_same_everywhere(model.get_weights())
    np.testing.assert_allclose(model.evaluate(data, verbose=0), one.evaluate(images, labels, verbose=0), rtol=close)
    rows_of_all = model.predict(data, verbose=0)
    assert sorted(rows_of_all.sum(1).round(3)) == sorted(model(images).numpy().sum(1).round(3))


@as_ranks(2, deadline=240)
def test_a_loop_has_the_bits_of_the_distributed_tape():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    images, labels = digits(64 * 6)
    strategy, model, optimizer = made()
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(64)
    loop_over(strategy, model, optimizer, strategy.experimental_distribute_dataset(data))
    plain, sgd = model_of(seed=1), keras.optimizers.SGD(0.1, momentum=0.9)
    own = mine(images, hvd.rank(), 2), mine(labels, hvd.rank(), 2)
    for begin in range(0, len(own[0]), 32):
        x, y = (each[begin : begin + 32] for each in own)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, plain(x), from_logits=True))
        tape = hvd.DistributedGradientTape(tape)
        sgd.apply_gradients(zip(tape.gradient(loss, plain.trainable_variables), plain.trainable_variables))
    the_same_everywhere(model.get_weights())
    assert all(map(np.array_equal, model.get_weights(), plain.get_weights()))


@as_ranks(3, deadline=240)
def test_values_of_every_kind_are_reduced_and_gathered():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    strategy, rank = hvd.Strategy(), hvd.rank()
    with strategy.scope():
        table = tf.Variable(tf.zeros([4, 2]))
        seen = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
        seed = tf.Variable(tf.constant([rank + 2**63], tf.uint64))
    assert seed.numpy() == 2**63, "the first rank's, and all of its bits"

    def parts():
        context = tf.distribute.get_replica_context()
        number = context.replica_id_in_sync_group
        seen.assign_add(tf.cast(number, tf.float32))
        sparse = tf.IndexedSlices(tf.ones([2, 2]), tf.stack([number, 3]), tf.constant([4, 2]))
        large = tf.ones([1 << 15]) * tf.cast(number, tf.float32)
        small = [tf.constant([1, 2]), tf.constant(True), tf.cast(number, tf.float16), tf.constant([2.0], tf.float64)]
        ints, flag, half, double, big, rows = context.all_reduce("SUM", [*small, large, sparse])
        return ints, flag, half, double, big[-1], tf.convert_to_tensor(rows), context.all_reduce("MEAN", number)

    for call in (lambda: strategy.run(parts), tf.function(lambda: strategy.run(parts))):
        ints, flag, half, double, big, rows, mean = strategy.experimental_local_results(call())[0]
        assert ints.numpy().tolist() == [3, 6] and bool(flag) and half == 3 and double == 6 and big == 3
        assert rows.numpy().tolist() == [[1, 1], [1, 1], [1, 1], [3, 3]] and mean == 1.0
    assert float(seen.numpy()) == 6 and table.shape == (4, 2)
    ragged = tf.fill([2, rank + 1], rank)
    assert strategy.gather(ragged, axis=1).numpy().tolist() == [[0, 1, 1, 2, 2, 2]] * 2
    assert strategy.gather(ragged[:1, :1], axis=0).numpy().tolist() == [[0], [1], [2]]
    each = strategy.experimental_distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group + 1.0)
    assert strategy.reduce("MEAN", each, axis=None) == 2 and strategy.num_replicas_in_sync == 3
    assert strategy.cluster_resolver.task_id == rank and strategy.extended.should_checkpoint == (rank == 0)


@as_ranks(2)
def test_a_function_in_which_ranks_meet_is_not_saved(tmp_path):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    strategy, module = hvd.Strategy(), tf.Module()
    with strategy.scope():
        module.weights = tf.Variable([1.0, 2.0])
        module.seen = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.MEAN
        )
    meeting = [
        module.seen.read_value,
        lambda: strategy.reduce("SUM", module.weights + 1.0, axis=None),
        lambda: strategy.gather(module.weights + 1.0, axis=0),
        lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", module.weights + 1.0)),
    ]
    for each in meeting:
        with pytest.raises(ValueError, match="All ranks of an hvd.Strategy meet in this function"):
            tf.saved_model.save(module, str(tmp_path / "no"), signatures=tf.function(each).get_concrete_function())
    served = tf.function(lambda x: module.weights * x + module.seen, input_signature=[tf.TensorSpec([2])])
    folder = str(tmp_path / f"rank{hvd.rank()}")
    tf.saved_model.save(module, folder, signatures=served)
    loaded = tf.saved_model.load(folder)
    (result,) = loaded.signatures["serving_default"](tf.constant([2.0, 3.0])).values()
    assert result.numpy().tolist() == [2, 6]
    module.step = tf.function(meeting[1])
    with pytest.raises(ValueError, match="All ranks of an hvd.Strategy meet in this function"):
        tf.saved_model.save(module, str(tmp_path / "no"), signatures=served)


@as_ranks(2)
def test_it_is_made_without_a_line_of_tensorflow():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    tf.get_logger().addHandler(handler)
    try:
        assert isinstance(hvd.Strategy(), tf.distribute.MultiWorkerMirroredStrategy)
        assert not records
        tf.get_logger().warning("a line")
        assert len(records) == 1
    finally:
        tf.get_logger().removeHandler(handler)
