"""Tapes, variables and batch norm on TensorFlow: what they train to is what one process trains to."""

from importlib.util import find_spec

import numpy as np
import pytest
from fitting import digits, mine, model_of, the_same_everywhere
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


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

    wanted, plain = trained(images, labels, 64, lambda tape, _: tape, True), []
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

        for graph in (False, True) if name == "plain" else (True,):
            got = trained(mine(images, rank, size), mine(labels, rank, size), 32, wrap, graph)
            the_same_everywhere(got)
            for ours, theirs in zip(got, wanted):
                np.testing.assert_allclose(ours, theirs, atol=2e-3 if name == "fp16" else 1e-5, err_msg=name)
        plain = got if name == "plain" else plain  # in a graph, too
        for ours, theirs in zip(got, plain) if "lists" in name or "groups" in name else ():
            np.testing.assert_array_equal(ours, theirs, err_msg=name)  # groups change no bit; nor do factors of two


@as_ranks(2, deadline=240)
def test_tapes_leave_alone_what_they_should_and_refuse_what_cannot_be():
    import keras
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
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
    for layer in layers:
        layer.build([1])

    @tf.function
    def in_a_graph(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layers[0](x)) + tf.reduce_sum(layers[1](x))
        partial = hvd.PartialDistributedGradientTape(tape, local_layers=layers[:1])
        return partial.gradient(loss, [layer.trainable_weights[0] for layer in layers])

    local, averaged = in_a_graph(tf.fill([1, 1], rank + 1.0))
    assert local[0, 0] == (rank + 1) / 2 and averaged[0, 0] == 1.5  # local ones are divided by the number of ranks
    with hvd.DistributedGradientTape(tf.GradientTape()) as inside:
        another = loss()
    assert inside.gradient(another, a)[0] == 1.5
    with pytest.raises(ValueError, match="groups should be"):
        hvd.DistributedGradientTape(tape, groups="all")
    with pytest.raises(TypeError, match=r"tf\.GradientTape"):
        hvd.DistributedGradientTape(a)
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(value, [table])


@as_ranks(2, deadline=240)
def test_variables_go_from_rank_to_rank():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()
    variables = [tf.Variable([float(rank)] * 3), tf.Variable(rank), tf.Variable(tf.cast([rank], tf.bfloat16))]
    variables += [tf.Variable(tf.cast([rank], tf.uint32)), keras.Variable([rank], dtype="uint32", trainable=False)]
    hvd.broadcast_variables(variables, root_rank=1)
    assert [float(np.max(np.asarray(tf.cast(tf.convert_to_tensor(v), tf.float32)))) for v in variables] == [1] * 5

    @tf.function
    def send():
        hvd.broadcast_variables(variables, root_rank=0)

    variables[1].assign(5 + rank)
    send()
    assert int(variables[1]) == 5
    assert hvd.broadcast_(variables, 0) is not None
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(0)


@as_ranks(2, deadline=120)
@pytest.mark.parametrize(("first", "graph"), [(0, False), (0, True), (4, True)])
def test_sync_batch_norm_is_that_of_one_process_with_all_rows(first, graph):
    """Also where rank 0 has none."""
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rows = np.random.RandomState(0).standard_normal((first + 5, 4)).astype("float32") * 3 + 5
    weight = np.random.RandomState(1).standard_normal((first + 5, 4)).astype("float32")
    part = slice(0, first) if hvd.rank() == 0 else slice(first, first + 5)
    synced, whole = hvd.SyncBatchNormalization(momentum=0.5), keras.layers.BatchNormalization(momentum=0.5)

    def passed(layer, x, w):
        def step(x, w):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * w)
            return y, *tape.gradient(loss, [x, layer.gamma, layer.beta])

        step = tf.function(step, input_signature=[tf.TensorSpec([None, 4])] * 2) if graph else step
        return [np.asarray(found) for found in step(tf.constant(x), tf.constant(w))]

    for layer in (synced, whole):
        layer.build((None, 4))
    found, expected = passed(synced, rows[part], weight[part]), passed(whole, rows, weight)
    for own, of_all in zip(found[:2], expected[:2]):
        np.testing.assert_allclose(own, of_all[part], atol=1e-4)
    for own, of_all in zip(found[2:], expected[2:]):
        assert np.isfinite(own).all()
        np.testing.assert_allclose(hvd.allreduce(own, op=hvd.Sum), of_all, atol=1e-4)
    kept = [np.asarray(each) for each in (synced.moving_mean, synced.moving_variance)]
    np.testing.assert_allclose(kept, [whole.moving_mean, whole.moving_variance], rtol=1e-4)
    if hvd.rank() == 0:  # inference needs nobody else
        np.testing.assert_allclose(synced(rows, training=False), whole(rows, training=False), rtol=1e-3, atol=1e-3)
    assert all(np.isfinite(each).all() for each in passed(synced, rows[:0], weight[:0]))  # on no rank
    np.testing.assert_allclose([synced.moving_mean, synced.moving_variance], kept, rtol=1e-6)
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)


@as_ranks(2, deadline=240)
def test_two_optimizers_without_names_are_told_apart_by_the_order_of_the_program():
    """A GAN's two, with variables that look alike, in one step: eagerly, in one tf.function, and a tape in between."""
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank, size, steps = hvd.rank(), hvd.size(), 10

    def trained(wrap, tape_of, shares, graph):
        keras.utils.set_random_seed(1)
        maker, critic = (keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)]) for _ in range(2))
        optimizers = [wrap(keras.optimizers.SGD(0.1, momentum=0.5)) for _ in range(2)]
        for model, optimizer in zip((maker, critic), optimizers):
            optimizer.build(model.trainable_variables)

        def step(x):
            with tf.GradientTape() as first, tf.GradientTape() as second, tf.GradientTape() as third:
                false, true = critic(maker(x)), critic(x)
                of_maker, of_critic = tf.reduce_mean(false), tf.reduce_mean((true - 1) ** 2) + tf.reduce_mean(false**2)
            one = first.gradient(of_maker, maker.trainable_variables)
            two = second.gradient(of_critic, critic.trainable_variables)
            kernel = tape_of(third).gradient(of_critic, maker.trainable_variables)[0]
            optimizers[0].apply_gradients(zip(one, maker.trainable_variables))
            optimizers[1].apply_gradients(zip(two, critic.trainable_variables))
            return tf.reduce_sum(kernel)

        call = tf.function(step) if graph else step
        found = []
        for number in range(steps):
            x = np.random.RandomState(number).randn(4 * size, 4).astype("float32")
            found.append(float(call(x.reshape(size, 4, 4)[rank] if shares else x)))
        return [*maker.get_weights(), *critic.get_weights(), np.array(found)]

    def in_passes(_):
        return keras.optimizers.SGD(0.1, momentum=0.5, gradient_accumulation_steps=2)

    def ours_in_passes(each):
        return hvd.DistributedOptimizer(each, backward_passes_per_step=2, average_aggregated_gradients=True)

    expected = trained(lambda each: each, lambda each: each, False, True)
    in_two = trained(in_passes, lambda each: each, False, True)
    for graph, wrap, wanted in (
        (False, hvd.DistributedOptimizer, expected),
        (True, hvd.DistributedOptimizer, expected),
        (True, ours_in_passes, in_two),
    ):
        got = trained(wrap, hvd.DistributedGradientTape, True, graph)
        for one, two in zip(got, wanted):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5, err_msg=str(graph))


@as_ranks(2)
@pytest.mark.parametrize("how", [{"shuffle": True}, {}])
def test_rows_of_a_tensor_are_sharded_as_those_of_an_array(how):
    import tensorflow as tf

    from hvdlite.data import shard

    whole = np.arange(27).reshape(3, 3, 3)
    np.testing.assert_array_equal(shard(tf.constant(whole), **how), shard(whole, **how))
