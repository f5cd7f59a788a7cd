"""What is left of TensorFlow 1: graphs in sessions, its optimizers and its hook."""

from importlib.util import find_spec

import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def gradient_of(rank, step):
    return np.array([1.0 + rank, 2.0 - rank, float(step)], np.float32)


def run_steps(tf, wrap, steps, graph, pairs_of=None):
    """The variable after some steps, each with a gradient of its own."""
    import hvdlite.tensorflow as hvd

    def build(step):
        rank = tf.cast(hvd.rank_op(), tf.float32)
        factor = tf.stack([1.0 + rank, 2.0 - rank, tf.cast(step, tf.float32)])
        return lambda: tf.reduce_sum(v * factor)

    if graph:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            v = tf.compat.v1.get_variable("v", initializer=[10.0, 20.0, 30.0])
            step = tf.compat.v1.placeholder(tf.float32, [])
            train = wrap().minimize(build(step)())
            session.run(tf.compat.v1.global_variables_initializer())
            for number in range(steps):
                session.run(train, {step: number})
            return session.run(v)
    v = tf.Variable([10.0, 20.0, 30.0], name="v")
    optimizer = wrap()
    for number in range(steps):
        optimizer.minimize(build(number), var_list=[v])
    return v.numpy()


@pytest.mark.parametrize("graph", [True, False], ids=["session", "eager"])
@as_ranks(2, deadline=120)
def test_optimizers_of_tensorflow_1_average(graph):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    def plain():
        return tf.compat.v1.train.MomentumOptimizer(0.5, 0.9)

    def expected(passes, average, size=2, steps=4):
        v, m, total = np.array([10.0, 20.0, 30.0]), np.zeros(3), np.zeros(3)
        for step in range(steps):
            total += np.mean([gradient_of(rank, step) for rank in range(size)], 0)
            if (step + 1) % passes == 0:
                m = 0.9 * m + total / (passes if average else 1)
                v, total = v - 0.5 * m, total * 0
        return v

    for passes, average in ((1, False), (2, False), (3, True)):
        terms = {"backward_passes_per_step": passes, "average_aggregated_gradients": average, "use_locking": True}
        wrapped = hvd.DistributedOptimizer(plain(), **terms)
        assert isinstance(wrapped, tf.compat.v1.train.MomentumOptimizer)
        got = run_steps(tf, lambda terms=terms: hvd.DistributedOptimizer(plain(), **terms), 4, graph)
        np.testing.assert_allclose(got, expected(passes, average), rtol=1e-6, err_msg=str(terms))
    for wrong, says in (
        (lambda: hvd.DistributedOptimizer(wrapped), "already"),
        (lambda: hvd.DistributedOptimizer(plain(), backward_passes_per_step=0), "at least 1"),
        (lambda: hvd.DistributedOptimizer(plain(), op=hvd.Adasum, average_aggregated_gradients=True), "Adasum"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()


@pytest.mark.parametrize("graph", [True, False], ids=["session", "eager"])
@as_ranks(2, deadline=120)
def test_adasum_combines_what_steps_do_to_variables(graph):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    def plain():
        return tf.compat.v1.train.MomentumOptimizer(0.5, 0.9)

    def expected(passes, steps=4):
        v, momenta = np.array([10.0, 20.0, 30.0]), [np.zeros(3), np.zeros(3)]
        for start in range(0, steps, passes):
            deltas = []
            for rank in range(2):
                moved = np.zeros(3)
                for step in range(start, start + passes):
                    momenta[rank] = 0.9 * momenta[rank] + gradient_of(rank, step)
                    moved -= 0.5 * momenta[rank]
                deltas.append(moved)
            a, b = deltas
            v = v + (1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b
        return v

    for passes in (1, 2):
        got = run_steps(
            tf, lambda p=passes: hvd.DistributedOptimizer(plain(), op=hvd.Adasum, backward_passes_per_step=p), 4, graph
        )
        np.testing.assert_allclose(got, expected(passes), rtol=1e-5)


@as_ranks(2, deadline=120)
def test_collectives_and_the_hook_in_a_session():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank = hvd.rank()
    with tf.Graph().as_default():
        v = tf.compat.v1.get_variable("v", initializer=float(rank + 5))
        x = tf.compat.v1.placeholder(tf.float32, [None, 2])
        total, rows = hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x)
        (slope,) = tf.compat.v1.gradients(hvd.allreduce(x * x, op=hvd.Sum), x)
        second = hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)[1]  # the first is asked for by nobody
        hook = hvd.BroadcastGlobalVariablesHook(1)
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            for _ in range(2):
                got = session.run([v, total, rows, slope, second], {x: np.full([2, 2], rank + 1.0)})
                assert (got[4] == 6).all()
                assert got[0] == 6 and got[2].shape == (4, 2) and (got[1] == 3).all()
                np.testing.assert_array_equal(got[3], np.full([2, 2], 2 * 2.0 * (rank + 1)))


@as_ranks(2, deadline=300)
def test_layers_of_one_name_in_a_session():
    """They have no order there: each needs a name of its own."""
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.constant([[1.0], [3.0]]) + 4.0 * hvd.rank()
        layers = [hvd.SyncBatchNormalization(name=f"sync_{i}") for i in range(2)]
        both = [layers[0](x, training=True), layers[1](2.0 * x, training=True)]
        session.run(tf.compat.v1.global_variables_initializer())
        for out in session.run(both):
            alone = (np.array([[1.0], [3.0]]) + 4.0 * hvd.rank() - 4.0) / np.sqrt(5.0)
            np.testing.assert_allclose(out, alone, atol=1e-3)
