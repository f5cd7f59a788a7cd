"""Sharded optimizers of Keras 3: the bits of the replicated form, a share of the state, files, and what is refused."""

import os

import numpy as np
import pytest
from ranks import as_ranks, everything, needs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
needs("keras", "tensorflow")

PATIENCE_S = 240.0
TESTS_EAGERLY = not everything(1)  # to trace a graph takes seconds


def small(**layer):
    import keras

    keras.utils.set_random_seed(1)
    last = keras.layers.Dense(3, **layer)
    first = [keras.layers.Dense(33, "relu"), keras.layers.LayerNormalization()]
    return keras.Sequential([keras.Input((20,)), *first, last])


def fitted(optimizer, batches=6, model=None, callbacks=(), seed=0, eager=True):
    import keras

    import hvdlite.keras as hvd

    model = model or small()
    model.compile(optimizer, keras.losses.MeanSquaredError(), jit_compile=False, run_eagerly=eager)
    random = np.random.RandomState(hvd.rank() + seed)
    x, y = random.randn(8 * batches, 20).astype("float32"), random.randn(8 * batches, 3).astype("float32")
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


def same(one, two):
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def shared(optimizer):
    return sum(int(np.prod(each.shape)) for state in optimizer._hvd_shards.states.values() for each in state)


def the_state_is_whole(optimizer, plain):
    """What rank 0 gathers is the replicated optimizer's state, and each rank has its share of it."""
    import hvdlite.keras as hvd

    optimizer.gather_state()
    whole = sum(int(np.prod(each.shape)) for each in plain.variables if len(each.shape))
    assert sum(hvd.allgather_object(shared(optimizer))) == whole
    assert shared(optimizer) <= whole / hvd.size() * 1.2
    if hvd.rank() == 0:
        for a, b in zip(optimizer._hvd_shards.saved().variables, plain.variables, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


@as_ranks(2)
def test_weights_and_state_have_the_bits_of_the_replicated_optimizer():
    import keras

    import hvdlite.keras as hvd

    of = keras.optimizers

    def excluding():
        made = of.AdamW(0.01, weight_decay=0.1)
        made.exclude_from_weight_decay(var_names=["bias"])
        return made

    passes = {"backward_passes_per_step": 2, "gradient_predivide_factor": 2.0}
    cases = [
        *everything((lambda: of.SGD(0.1, momentum=0.9, nesterov=True), {}, {})),
        *everything((lambda: of.RMSprop(0.01), {"op": hvd.Sum}, {"eager": False}), (lambda: of.Lion(0.01), {}, {})),
        (excluding, {}, {"eager": False}),
        (lambda: of.Adagrad(0.1), {"compression": hvd.Compression.fp16}, {}),
        (lambda: of.Adam(of.schedules.ExponentialDecay(0.01, 2, 0.5)), passes, {"eager": TESTS_EAGERLY}),
    ]
    for make, terms, how in cases:
        one, two = (fitted(hvd.DistributedOptimizer(make(), shard=on, **terms), **how) for on in (False, True))
        same(one, two)
        the_state_is_whole(two.optimizer, one.optimizer)


@as_ranks(2)
def test_loops_rates_constraints_frozen_layers_and_loss_scales_are_as_without_shards():
    import keras
    import tensorflow as tf

    import hvdlite.keras as hvd

    class Slower(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (batch + 1)

    def of(on):
        return hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), shard=on)

    def constrained(on):
        model = fitted(of(on), model=small(kernel_constraint=keras.constraints.NonNeg()), callbacks=[Slower()])
        model.layers[0].trainable = False
        return fitted(model.optimizer, 2, model)

    def scaled(on):
        optimizer = keras.optimizers.LossScaleOptimizer(of(on), initial_scale=16.0, dynamic_growth_steps=2)
        return fitted(optimizer, eager=False)

    def own_loop(on):
        model, optimizer, x = small(), of(on), tf.random.stateless_normal((8, 20), (1, hvd.rank()))

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x)[:, :2] ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients[2] = None  # of a scale: Keras warns, and leaves it as it is
            optimizer.apply(gradients, model.trainable_variables)

        for _ in range(6):
            step()
        return model

    for how in (constrained, *everything(scaled), own_loop):
        same(how(False), how(True))

    def differently(on):
        model = small()
        model.set_weights([each + hvd.rank() for each in model.get_weights()])
        return fitted(of(on), 3, model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    weights = [differently(on).get_weights() for on in (False, True)]
    assert len(set(hvd.allgather_object(b"".join(each.tobytes() for each in weights[1])))) == 1
    assert all(np.allclose(a, b, atol=0.7) for a, b in zip(*weights))  # the root's, not a mixture


@as_ranks(2)
def test_files_have_the_whole_state_or_none_is_written():
    import copy
    import tempfile

    import keras
    import tensorflow as tf

    import hvdlite.keras as hvd

    model = fitted(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard=True), 3)
    folder = hvd.broadcast_object(tempfile.mkdtemp())
    path, own = os.path.join(folder, "model.keras"), os.path.join(folder, f"{hvd.rank()}.weights.h5")
    for write in (
        lambda: model.save(own.replace("weights.h5", "keras")), lambda: model.save_weights(own),
        lambda: copy.deepcopy(model),
        lambda: tf.train.Checkpoint(optimizer=model.optimizer).save(os.path.join(folder, "ckpt")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"gather_state\(\) on all ranks.*HVD200"):
            write()
    model.optimizer.gather_state()
    if hvd.rank() == 0:
        model.save(path)
        model.save(path.replace("keras", "h5"))
        names = [each.path for each in keras.models.load_model(path).optimizer.variables]
        assert len(names) == 2 + 2 * len(model.trainable_variables), names
    else:
        with pytest.raises(ValueError, match="only rank 0 has the whole state"):
            model.save_weights(own)
    hvd.barrier()
    before = model.get_weights()
    after = fitted(model.optimizer, 3, model, seed=5)
    with pytest.raises(ValueError, match="gathered after step 3, and this is step 6" if hvd.rank() == 0 else "only"):
        model.save(own.replace("weights.", ""))
    for file, on in (*everything((path, False)), (path, True), (path.replace("keras", "h5"), True)):
        again = hvd.load_model(file, shard=on, backward_passes_per_step=1)
        for a, b in zip(before, again.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        same(after, fitted(again.optimizer, 3, again, seed=5))


@as_ranks(*everything(3))
def test_three_ranks_and_small_sets():
    import keras

    import hvdlite.keras as hvd

    one, two = (
        fitted(hvd.DistributedOptimizer(keras.optimizers.AdamW(0.01), shard=on), 6) for on in (False, True)
    )  # fmt: skip
    same(one, two)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), shard=True)
    tiny = keras.Variable([1.0, 2.0])  # two ranks own nothing
    for _ in range(3):
        optimizer.apply([keras.ops.ones(2)], [tiny])
    assert int(optimizer.iterations) == 3 and len(set(hvd.allgather_object(tiny.numpy().tobytes()))) == 1
    pair = hvd.add_process_set([0, 2])
    one, two = (
        fitted(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), shard=on, process_set=pair), 6)
        for on in (False, True)
    )
    same(one, two)
    two.optimizer.gather_state()  # rank 1 is alone, and its optimizer has all
    assert hvd.rank() != 1 or two.optimizer._hvd_shards is None


@as_ranks(2)
def test_what_cannot_be_sharded_is_refused_by_name():
    import keras

    import hvdlite.keras as hvd

    of = keras.optimizers
    for optimizer, terms, says in (
        (of.Adafactor(), {}, "Adafactor cannot be sharded: its s"), (of.Lamb(), {}, "Lamb cannot be sharded"),
        (of.Muon(), {}, "Muon cannot be sharded"), (of.SGD(clipnorm=1.0), {}, "clipnorm of SGD"),
        (of.SGD(global_clipnorm=1.0), {}, "global_clipnorm of SGD"), (of.SGD(use_ema=True), {}, "use_ema"),
        (of.SGD(gradient_accumulation_steps=2), {}, "gradient_accumulation_steps"),
        (of.ScheduleFreeAdamW(), {}, "begins with the weights"), (of.SGD(), {"op": hvd.Adasum}, "op must be"),
        (of.SGD(), {"groups": 2}, "groups"), (of.LossScaleOptimizer(of.SGD()), {}, "put the sharded optimizer inside"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"shard=True: .*{says}.*\[HVD200\]"):
            hvd.DistributedOptimizer(optimizer, shard=True, **terms)
    with pytest.raises(TypeError, match="must be True or False"):
        hvd.DistributedOptimizer(of.SGD(), shard="yes")
    model = small()
    optimizer = hvd.DistributedOptimizer(of.Adam(), shard=True)
    with pytest.raises(ValueError, match="no variable can stay local"):
        optimizer.register_local_var(model.trainable_variables[0])
    with pytest.raises(ValueError, match="KerasState cannot hold a sharded optimizer"):
        hvd.elastic.KerasState(model, optimizer)
    optimizer.build(model.trainable_variables[:2])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([each * 0.0 for each in model.trainable_variables], model.trainable_variables)
