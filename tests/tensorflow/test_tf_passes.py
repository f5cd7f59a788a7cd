"""Several passes per step of optimizers that are not Keras 3's: a pass may lack variables that an earlier one had."""

from importlib.util import find_spec

import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine

FRESH_RANKS = True  # which Keras it is must be said before hvdlite.keras is imported

BOTH, FIRST, SECOND, NEITHER = "both", "first", "second", "neither"
WINDOWS = [(BOTH, SECOND), (SECOND, FIRST), (FIRST, NEITHER), (BOTH, BOTH)]  # the very first pass brings both


def brought(passes, variable, scale=1.5):
    """What these passes have added up, averaged over two ranks: rank r brings r + 1."""
    return scale * sum(each in (BOTH, variable) for each in passes)


def check(first, second, call):
    """`call` is one pass of variables that it is told."""
    values = {FIRST: 1.0, SECOND: 2.0}
    for passes in WINDOWS:
        for each in passes:
            call(each)
        for name, variable in ((FIRST, first), (SECOND, second)):
            values[name] -= brought(passes, name)
            np.testing.assert_allclose(variable, [values[name]] * 3, err_msg=f"{name} after {passes}")


def pairs_of(what, first, second, missing):
    """A list as `apply_gradients` takes it. What is missing is left away, or has no gradient."""
    import tensorflow as tf

    import hvdlite as hvd

    gradient = tf.ones([3]) * (hvd.rank() + 1.0)
    has = ((gradient if what in (BOTH, FIRST) else None, first), (gradient if what in (BOTH, SECOND) else None, second))
    return [pair for pair in has if missing == "none" or what == NEITHER or pair[0] is not None]


@pytest.mark.parametrize("missing", ["none", "left away"])
@as_ranks(2)
def test_keras_2_applies_what_earlier_passes_of_a_window_brought(missing):
    import os

    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    pytest.importorskip("tf_keras")
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd
    from hvdlite.tensorflow import DistributedOptimizer

    kinds = (
        (tf.keras.optimizers.SGD, hvd.DistributedOptimizer),
        (tf.keras.optimizers.legacy.SGD, DistributedOptimizer),
    )
    for kind, wrap, graph in ((*each, graph) for each in kinds for graph in (False, True)):
        first, second = tf.Variable(tf.ones(3)), tf.Variable(2 * tf.ones(3))
        optimizer = wrap(kind(1.0), backward_passes_per_step=2)
        if hasattr(optimizer, "build"):
            optimizer.build([first, second])

        def call(what, optimizer=optimizer, first=first, second=second):
            optimizer.apply_gradients(pairs_of(what, first, second, missing))

        made = {each: tf.function(lambda each=each: call(each)) for each in (BOTH, FIRST, SECOND, NEITHER)}
        check(first, second, (lambda what, made=made: made[what]()) if graph else call)
        assert int(optimizer.iterations) == 2 * len(WINDOWS)


def losses(tf, what, first, second):
    import hvdlite as hvd

    used = [each for each, name in ((first, FIRST), (second, SECOND)) if what in (BOTH, name)]
    return tf.add_n([tf.reduce_sum(each) for each in used] or [tf.constant(0.0)]) * (hvd.rank() + 1.0)


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@as_ranks(2)
def test_optimizers_of_tensorflow_1_apply_what_earlier_passes_of_a_window_brought(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    v1 = tf.compat.v1

    def wrap():
        return hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)

    if mode == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            first, second = (v1.get_variable(name, initializer=tf.ones(3) * i) for name, i in (("a", 1.0), ("b", 2.0)))
            optimizer = wrap()
            steps = {}
            for what in (BOTH, FIRST, SECOND, NEITHER):
                found = optimizer.compute_gradients(losses(tf, what, first, second), [first, second])
                steps[what] = optimizer.apply_gradients([(g if g is None else g * 1.0, v) for g, v in found])
            session.run(v1.global_variables_initializer())
            values = {FIRST: 1.0, SECOND: 2.0}
            for passes in WINDOWS:
                for each in passes:
                    session.run(steps[each])
                for name, value in zip((FIRST, SECOND), session.run([first, second])):
                    values[name] -= brought(passes, name)
                    np.testing.assert_allclose(value, [values[name]] * 3, err_msg=f"{name} after {passes}")
        return
    first, second = tf.Variable(tf.ones(3)), tf.Variable(2 * tf.ones(3))
    optimizer = wrap()

    def call(what):
        listed = [v for v, name in ((first, FIRST), (second, SECOND)) if what in (BOTH, NEITHER, name)]
        optimizer.apply_gradients(optimizer.compute_gradients(lambda: losses(tf, what, first, second), listed))

    made = {each: tf.function(lambda each=each: call(each)) for each in (BOTH, FIRST, SECOND, NEITHER)}
    check(first, second, (lambda what: made[what]()) if mode == "function" else call)


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@as_ranks(2)
def test_adasum_combines_what_earlier_passes_of_a_window_have_changed(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    v1, rank = tf.compat.v1, hvd.rank()
    windows = [(BOTH, SECOND), (FIRST, SECOND), (SECOND, BOTH)]

    def expected():  # of two ranks whose steps are at right angles: the sum of what they do
        found = {}
        for name, at in ((FIRST, 1.0), (SECOND, 2.0)):
            moved = sum(each in (BOTH, name) for passes in windows for each in passes)
            found[name] = np.full(2, at) - moved * np.array([1.0, 2.0])
        return found

    def step(what, optimizer, first, second):
        gradient = tf.constant([[1.0, 0.0], [0.0, 2.0]][rank])
        named = ((FIRST, first), (SECOND, second))
        return optimizer.apply_gradients([(gradient, each) for name, each in named if what in (BOTH, name)])

    optimizer = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum, backward_passes_per_step=2
    )
    if mode == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            first, second = (v1.get_variable(name, initializer=tf.ones(2) * i) for name, i in (("a", 1.0), ("b", 2.0)))
            steps = {what: step(what, optimizer, first, second) for what in (BOTH, FIRST, SECOND)}
            session.run(v1.global_variables_initializer())
            for what in (each for passes in windows for each in passes):
                session.run(steps[what])
            got = session.run([first, second])
    else:
        first, second = tf.Variable(tf.ones(2)), tf.Variable(2 * tf.ones(2))

        def call(what):
            step(what, optimizer, first, second)

        made = {what: tf.function(lambda what=what: call(what)) for what in (BOTH, FIRST, SECOND)}
        for what in (each for passes in windows for each in passes):
            made[what]() if mode == "function" else call(what)
        got = [first.numpy(), second.numpy()]
    np.testing.assert_allclose(got, [expected()[FIRST], expected()[SECOND]], rtol=1e-5)
