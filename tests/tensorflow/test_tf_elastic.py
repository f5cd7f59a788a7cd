"""The names of elastic training on TensorFlow and Keras work while the ranks stay; every failure reaches somebody."""

import contextlib
import sys
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
from ranks import Job, as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


@as_ranks(2, deadline=120)
def test_a_models_state_is_synchronized_saved_and_restored():
    import keras

    import hvdlite.tensorflow as tensors
    import hvdlite.tensorflow.keras as hvd

    rank = hvd.rank()
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
    model.set_weights([np.full((2, 2), rank + 1.0), np.full(2, rank + 1.0)])
    optimizer = keras.optimizers.Adam(0.1 * (rank + 1))
    state = hvd.elastic.KerasState(model, optimizer, batch=20 + rank, epoch=5)
    state.epoch += 5 + rank
    state.sync()
    assert all((weight == 1).all() for weight in model.get_weights())
    assert (state.batch, state.epoch) == (20, 10) and abs(float(optimizer.learning_rate) - 0.1) < 1e-6

    def change():
        optimizer.apply([np.ones((2, 2), "float32"), np.ones(2, "float32")], model.trainable_variables)
        state.batch += 1

    change()
    state.restore()
    assert (model.get_weights()[0] == 1).all() and state.batch == 20 and int(optimizer.iterations) == 0
    change()
    state.commit()
    kept, moments = model.get_weights(), [np.array(each) for each in optimizer.variables]
    change()
    state.restore()
    np.testing.assert_array_equal(model.get_weights()[0], kept[0])
    for one, two in zip(optimizer.variables, moments):
        np.testing.assert_array_equal(one, two)
    assert state.batch == 21 and int(optimizer.iterations) == 1
    with pytest.raises(ValueError, match="built first"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(2)]))
    assert isinstance(tensors.elastic.TensorFlowKerasState(model, optimizer, backend=None, epoch=0), type(state))


@as_ranks(2, deadline=120)
def test_callbacks_keep_a_state_up_to_date():
    import keras

    import hvdlite.keras as hvd

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    commits, batches, commit = [], [], state.commit
    state.commit = lambda: (commits.append(state.batch), commit())

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(state.batch)

    @hvd.elastic.run
    def train(state, epochs):
        state.model.fit(
            np.ones((6, 2)), np.ones((6, 1)), batch_size=2, epochs=epochs, verbose=0,
            callbacks=[
                hvd.elastic.UpdateBatchStateCallback(state),
                Look(),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            ],
        )  # fmt: skip
        return state.epoch

    assert train(state, 2) == 2 and train(state, 1) == 3
    assert batches == [0, 1, 2] * 3 and state.batch == 0
    assert commits == [1, 0, 0, 2, 0, 1, 0]  # in the second epoch the third batch of two is the fourth


@as_ranks(2, deadline=120)
def test_variables_are_synchronized_saved_and_restored_eagerly_and_in_a_session():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()
    v = tf.Variable([float(rank), 5.0])
    state = hvd.elastic.TensorFlowState([v], step=rank)
    state.step += 4  # what is set after it was made counts, as variables do
    v.assign_add([2.0, 0.0])
    state.sync()
    assert v[0] == 2 and state.step == 4
    v.assign([7.0, 8.0])
    state.restore()
    np.testing.assert_array_equal(v, [2, 5])
    v.assign([7.0, 8.0])
    state.commit()
    v.assign([9.0, 9.0])
    state.restore()
    np.testing.assert_array_equal(v, [7, 8])
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=[float(rank)])
        with pytest.raises(ValueError, match="session"):
            hvd.elastic.TensorFlowState()
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            state = hvd.elastic.TensorFlowState(session=session, step=rank)
            state.sync()
            assert session.run(w) == [0] and state.step == 0
            w.load([4.0], session)
            state.save()
            w.load([5.0], session)
            state.restore()
            assert session.run(w) == [4]


@as_ranks(1, deadline=240)
def test_b3_an_unknown_error_that_is_no_lost_rank_is_not_swallowed():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)])

    @hvd.elastic.run
    def train(state):
        raise tf.errors.UnknownError(None, None, "a disk is full")

    with pytest.raises(tf.errors.UnknownError, match="a disk is full"):
        train(state)


@as_ranks(2, deadline=120)
def test_a_sync_that_ends_before_the_objects_leaves_one_commit():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd
    from hvdlite.tensorflow.elastic import TensorFlowState

    def fails(_):
        raise hvd.HvdPeerLostError("rank 0 is lost")

    mine = 4.0 + hvd.rank()
    model, variable = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)]), tf.Variable(mine)
    model.set_weights([np.full((1, 1), mine), np.full(1, mine)])
    of_keras, of_variables = hvd.elastic.KerasState(model, step=mine), TensorFlowState([variable], step=mine)
    for state in (of_keras, of_variables):
        told, state._bcast_object = state._bcast_object, fails
        with pytest.raises(hvd.HvdPeerLostError):
            state.sync()
        assert state is not of_variables or variable == 4.0
        state.restore()
        assert (state.step, model.get_weights()[1][0] if state is of_keras else float(variable)) == (mine, mine)
        state._bcast_object = told
        state.sync()
        state.restore()
        assert (state.step, model.get_weights()[1][0] if state is of_keras else float(variable)) == (4.0, 4.0)
    other = keras.Sequential([keras.layers.Input((1 + hvd.rank(),)), keras.layers.Dense(1)])
    with pytest.raises(hvd.HvdMismatchError) as caught:
        hvd.elastic.KerasState(other).sync()
    assert caught.value.ranks == (1,)


@pytest.mark.parametrize("kind", ["keras", "v1", "adasum", "session"])
@as_ranks(2, deadline=120)
def test_windows_of_passes_return_to_the_commit_with_the_variables(kind):
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    v1 = tf.compat.v1

    def weights(passes):
        """After passes with these slopes; with None the state goes back to its last commit."""
        variable = v1.get_variable("w", initializer=tf.ones(2)) if kind == "session" else tf.Variable(tf.ones(2))
        plain = keras.optimizers.SGD(0.1) if kind == "keras" else v1.train.GradientDescentOptimizer(0.1)
        op = hvd.Adasum if kind == "adasum" else hvd.Average
        optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2, op=op)
        slope = v1.placeholder(tf.float32, []) if kind == "session" else tf.Variable(0.0)

        def step():
            if kind == "keras":
                return optimizer.apply_gradients([(tf.fill([2], slope), variable)])
            pairs = optimizer.compute_gradients(lambda: tf.reduce_sum(slope * variable), [variable])
            return optimizer.apply_gradients(pairs)

        if kind == "session":
            made, session = step(), v1.Session()
            session.run(v1.global_variables_initializer())
            state = hvd.elastic.TensorFlowState([variable], session=session)
        else:
            optimizer.build([variable]) if kind == "keras" else None
            made, state, session = step, hvd.elastic.TensorFlowState([variable]), None
        for each in passes:
            if each is None:
                state.restore()
            elif session is None:
                slope.assign(each)
                made()
            else:
                session.run(made, {slope: each})
            if each is not None and each < 4:
                state.commit()
        return list(variable.numpy() if session is None else session.run(variable))

    def graph():
        return tf.Graph().as_default() if kind == "session" else contextlib.nullcontext()

    def after(*passes):
        with graph(), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            return weights(passes), sum("HVD243" in str(each.message) for each in found)

    assert after(4.0, 1.0, 4.0, 2.0) == after(4.0, None, 4.0, 1.0, 4.0, None, 4.0, 2.0)
    restarts = kind in ("keras", "v1")  # a session's variables have the sums; Adasum's passes change the weights
    wanted, _ = after(4.0, 5.0) if restarts else after(1.0, 4.0, 5.0)
    assert after(1.0, 4.0, None, 4.0, 5.0) == (pytest.approx(wanted), kind != "session")


@as_ranks(2, deadline=120)
def test_states_go_on_from_a_file(tmp_path):
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd
    from hvdlite import elastic
    from hvdlite.errors import HvdStateError
    from hvdlite.tensorflow.elastic import TensorFlowState

    path = hvd.broadcast_object(str(tmp_path / "state"))

    def trained(kind, seed, steps, width=2):
        """The values of a state of that seed, after so many steps; they are in the file then."""
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.layers.Input((width,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
        variables = [tf.Variable(tf.random.normal((width,)), dtype=tf.float32)]
        of_keras = kind == "keras"
        state = hvd.elastic.KerasState(model, step=seed) if of_keras else TensorFlowState(variables, step=seed)
        state.save_to(path + kind)

        def train(state):
            for _ in range(steps):
                if of_keras:
                    model.train_on_batch(np.ones((2, width)), np.ones((2, 1)))
                variables[0].assign_add(tf.ones(width))
                state.commit()
            return [state.step, *(value for _, value in state._copies()[0])] if of_keras else [state.step, *variables]

        return elastic.run(train)(state)

    for kind in ("keras", "variables"):
        once = trained(kind, 1, 4)
        (tmp_path / f"state{kind}").unlink(missing_ok=True)
        hvd.allreduce(0.0)
        trained(kind, 1, 2)
        again = trained(kind, 2 + hvd.rank(), 2)
        assert len(once) == len(again)
        for one, other in zip(once, again):
            np.testing.assert_array_equal(one, other)
        if hvd.rank() == 0:
            with pytest.raises(HvdStateError, match=rf"{path}{kind} is the state of another .*shapes of.*HVD425"):
                trained(kind, 1, 0, width=3)


DEATH = """
import os, signal, sys
import tensorflow as tf, hvdlite.tensorflow as hvd
hvd.init()

@tf.function
def step(x):
    return hvd.alltoall(x), hvd.grouped_reducescatter([x, x])

@hvd.elastic.run
def train(state):
    while True:
        step(tf.ones(4))
        if hvd.rank() == 1 and state.steps == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        state.steps += 1

try:
    train(hvd.elastic.TensorFlowState([tf.Variable(1.0)], steps=0))
    print("swallowed", flush=True)
except hvd.HvdNotYetError as error:
    print("told of:", type(error.__cause__).__mro__, error.__cause__, flush=True)
    sys.exit(7)
"""


def test_b3_a_rank_lost_in_any_collective_reaches_the_loop():
    with Job(2, [sys.executable, "-c", DEATH]) as job:
        assert job.wait(180) != 0
        assert "swallowed" not in job.text() and "told of:" in job.text(), job.text()
        told = job.text().split("told of:")[1]
        assert "HorovodInternalError" in told and "rank 1" in told


@as_ranks(1)
def test_graphs_of_a_process_that_joins_later_communicate_with_it_alone():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd
    from hvdlite import _core

    @tf.function
    def step():
        return hvd.rank_op(), hvd.size_op(), hvd.allreduce(tf.ones(2)), hvd.broadcast(tf.ones(2), 1)

    _core.prepare((2, 3, 0, 1, 0, 1))
    assert [each.numpy().tolist() for each in step()] == [2, 3, [1, 1], [1, 1]]
    for call in (lambda: hvd.alltoall(tf.ones(3)), tf.function(lambda: hvd.reducescatter(tf.ones(2)))):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"cannot communicate before .*\[HVD426\]"):
            call()
    _core.prepare(None)
    assert int(step()[1]) == 1
    assert int(hvd.size_op()) == 1
