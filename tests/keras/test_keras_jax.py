"""Keras on JAX: gradients that a compiled step averages, callbacks within an epoch, and what is refused by name.

The ranks run this file's program once, in an elastic job: at its end rank 1 is lost in the middle of an epoch.
"""

import functools
import os
import signal
import sys

import as_program
import numpy as np
from launching import launch
from ranks import needs

needs("jax", "keras")
ROWS, BATCH = 512, 4


def test_ranks_train_alike_and_survive_a_lost_one(tmp_path):
    words = ["--min-np", 1, sys.executable, as_program.__file__, __file__, tmp_path / "model.keras"]
    code, out, err = launch("-np", 2, *words, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
    assert code == 0 and out.count("all alike") == 2 and "finished with 1 of 2" in out, out + err


def model_of(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


def fitted(model, optimizer, *callbacks, x=None, batch=BATCH):
    x = MINE if x is None else x
    model.compile(optimizer, "mse")
    model.fit(x, x.sum(1), batch_size=batch, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def told(function, kind, words):
    try:
        function()
    except kind as error:
        assert words in str(error), error
        return str(error)
    raise AssertionError(f"no {kind.__name__}: {words}")


def a_step_is_one_exchange_and_equals_training_on_all_rows():
    before = native.library().hvd_jax_calls()
    model = fitted(model_of(), hvd.DistributedOptimizer(sgd(0.05, momentum=0.9)))
    assert native.library().hvd_jax_calls() - before == int(model.optimizer.iterations) == ROWS // BATCH // 2 == 64
    hvd.check_consistency(model)
    plain = fitted(model_of(), sgd(0.05, momentum=0.9), x=ALL, batch=2 * BATCH)
    for mine, whole in zip(model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(mine, whole, atol=1e-5)


def callbacks_see_and_set_what_a_step_has_made():
    class Moves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 40 and hvd.rank():
                self.model.layers[0].kernel.assign_add(np.ones((4, 8)))

    check = hvd.callbacks.CheckConsistencyCallback(every=3)
    calls = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), check, hvd.callbacks.MetricAverageCallback()]
    calls.append(hvd.callbacks.LearningRateWarmupCallback(0.02, warmup_epochs=1))
    model = fitted(model_of(hvd.rank()), hvd.DistributedOptimizer(keras.optimizers.Adam()), *calls)
    hvd.check_consistency(model)
    assert abs(float(model.optimizer.learning_rate) - 0.02) < 1e-8
    assert len({*hvd.allgather_object(model.history.history["loss"][0])}) == 1
    moved = functools.partial(fitted, model_of(), hvd.DistributedOptimizer(sgd()), Moves(), check)
    told(moved, hvd.HvdMismatchError, "kernel' on rank 1 is not what rank 0 has")


def applied(compiled, local=(), **terms):
    variables = [keras.Variable(np.zeros(2, np.float32), name=name) for name in "abc"]
    optimizer = hvd.DistributedOptimizer(sgd(1.0), **terms)
    optimizer.build(variables)
    for index in local:
        optimizer.register_local_var(variables[index])
    grads = [jnp.full(2, hvd.rank() + 1.0), None, jnp.full(2, 3.0 * (hvd.rank() + 1))]
    if not compiled:
        optimizer.apply(grads, variables)
        return [float(each.value[0]) for each in variables]
    apply = jax.jit(lambda state, values: optimizer.stateless_apply(state, grads, values))
    values, _ = apply([each.value for each in optimizer.variables], [each.value for each in variables])
    return [float(each[0]) for each in values]


def terms_mean_what_they_mean_elsewhere():
    rank, alone = hvd.rank() + 1, hvd.add_process_set([1])
    for compiled in (False, True):
        assert applied(compiled) == applied(compiled, gradient_predivide_factor=2.0) == [-1.5, 0, -4.5]
        assert applied(compiled, op=hvd.Sum, compression=hvd.Compression.bf16) == [-3, 0, -9]
        assert applied(compiled, [2]) == [-1.5, 0, -1.5 * rank]
        assert applied(compiled, [0, 2], scale_local_gradients=False) == [-rank, 0, -3 * rank]
        assert applied(compiled, process_set=alone) == [-rank, 0, -3 * rank]
    model = model_of()
    hvd.check_consistency(fitted(model, hvd.PartialDistributedOptimizer(sgd(), local_layers=model.layers[:1])))
    told(lambda: hvd.check_consistency(model.weights), hvd.HvdMismatchError, "kernel' on rank 1")
    rows = MINE.copy()
    rows[BATCH * (5 + rank)] = np.inf  # an overflow of one rank in steps 6 and 7
    scale = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd()), initial_scale=8.0)
    hvd.check_consistency(fitted(model_of(), scale, x=rows))
    assert float(scale.dynamic_scale) == 2 and int(scale.step_counter) == 64 - 8


def collectives_and_files():
    rank = hvd.rank()
    assert hvd.allreduce(np.array([1.0, 2.0]) * (rank + 1), name="x").tolist() == [1.5, 3]
    assert hvd.allreduce(1.0 + rank, average=False, compression=hvd.Compression.fp16) == 3
    assert hvd.allgather(np.array([rank, 7])).tolist() == [0, 7, 1, 7]
    assert hvd.broadcast(rank, 1) == 1 and hvd.reducescatter(np.array([1.0, 2.0])).tolist() == [rank + 1]
    path = f"{sys.argv[1]}.{rank}.keras"
    fitted(model_of(), hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2))).save(path)
    loaded, before = hvd.load_model(path), native.library().hvd_jax_calls()
    loaded.fit(MINE, MINE.sum(1), batch_size=BATCH, verbose=0)
    assert native.library().hvd_jax_calls() - before == 64 == int(loaded.optimizer.iterations)
    hvd.check_consistency(loaded)


def what_cannot_work_is_refused():
    def made(optimizer=None, **terms):
        make = functools.partial(hvd.DistributedOptimizer, optimizer or sgd(), **terms)
        return told(make, hvd.HvdNotYetError, "KERAS_BACKEND=tensorflow")

    assert "shard=True is not supported" in made(shard=True)
    assert "gradient_accumulation_steps=2" in made(backward_passes_per_step=2)
    assert "Compression.int8" in made(compression=hvd.Compression.int8)
    assert "put it inside" in made(keras.optimizers.LossScaleOptimizer(sgd()))
    told(lambda: hvd.ps, hvd.HvdNotYetError, "parameter servers")


def a_lost_rank_costs_the_steps_since_the_last_commit():
    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 37 and state.epoch == 1 and hvd.size() == 2 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def train(state):
        begun.append((hvd.size(), state.epoch, int(state.model.optimizer.iterations)))
        calls = [Dies(), hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state, 8)]
        state.model.fit(MINE, MINE.sum(1), batch_size=BATCH, epochs=2 - state.epoch, verbose=0, callbacks=calls)

    begun, model = [], model_of(hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    state = hvd.elastic.KerasState(model, epoch=0)
    train(state)
    assert begun == [(2, 0, 0), (1, 1, 64 + 32)] and int(model.optimizer.iterations) == 64 + 32 + 64, begun


if __name__ == "__main__":
    sys.modules["tensorflow"] = None  # Keras would import it in fit, for seconds
    import jax
    import jax.numpy as jnp
    import keras

    import hvdlite.keras as hvd
    from hvdlite.jax import native

    hvd.init()
    sgd = keras.optimizers.SGD
    ALL = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    MINE = ALL.reshape(-1, 2, BATCH, 4)[:, hvd.rank()].reshape(-1, 4)
    a_step_is_one_exchange_and_equals_training_on_all_rows()
    callbacks_see_and_set_what_a_step_has_made()
    terms_mean_what_they_mean_elsewhere()
    collectives_and_files()
    what_cannot_work_is_refused()
    print("all alike", flush=True)
    a_lost_rank_costs_the_steps_since_the_last_commit()
    print(f"finished with {hvd.size()} of 2", flush=True)
