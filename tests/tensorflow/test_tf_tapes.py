"""The distributed tape wherever it is made and whoever differentiates through it; and what only some ranks call."""

from importlib.util import find_spec

import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def ways(function):
    """As it is, and in a graph."""
    import tensorflow as tf

    return function, tf.function(function)


@as_ranks(2, deadline=240)
def test_a_tape_may_be_wrapped_while_it_records():
    """Both would end the recording, and TensorFlow's end of one that has ended ends the process."""
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    v = tf.Variable([1.0, 2.0])

    def kept():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v) * (hvd.rank() + 1)
            tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, v)

    def used():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v) * (hvd.rank() + 1)
            return hvd.DistributedGradientTape(tape).gradient(loss, v)

    def stopped():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v) * (hvd.rank() + 1)
            wrapped = hvd.DistributedGradientTape(tape)
            with wrapped.stop_recording():
                v.assign(v)
            loss += 0 * tf.reduce_sum(v)
        return wrapped.gradient(loss, v)

    for function in (*ways(kept), *ways(used), *ways(stopped)):
        np.testing.assert_array_equal(function(), [3, 6])
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(v * v)
    np.testing.assert_array_equal(tape.gradient(loss, v), [2, 4])


@pytest.mark.parametrize("groups", [None, 1])
@as_ranks(2, deadline=240)
def test_gradients_of_averaged_gradients_are_those_of_one_process(groups):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    v, w = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
    weight = hvd.rank() + 1.0  # 1.5 on average

    def penalty():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = weight * tf.reduce_sum(v**3) * w
            found = hvd.DistributedGradientTape(inner, groups=groups).gradient(y, [v, w])
            loss = sum(tf.reduce_sum(each * each) for each in found)
        return outer.gradient(loss, v)

    # The loss is |1.5 * 3 v^2 w|^2 + (1.5 sum v^3)^2; a rank's part of its gradient has the rank's own weight.
    first = 2 * 4.5 * np.array([1.0, 4.0]) * 3 * weight * 6 * np.array([1.0, 2.0]) * 3
    wanted = first + 2 * 1.5 * 9 * weight * 3 * np.array([1.0, 4.0])
    for function in ways(penalty):
        np.testing.assert_allclose(function(), wanted, rtol=1e-6)


@as_ranks(2, deadline=240)
def test_what_to_do_without_a_connection_may_have_its_place_of_tensorflows_tape():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    v, apart = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(v)
    tape = hvd.DistributedGradientTape(tape)
    found = tape.gradient(loss, [v, apart], None, tf.UnconnectedGradients.ZERO)
    np.testing.assert_array_equal(found[0], [1, 1])
    assert found[1].numpy() == 0 and tape.gradient(loss, [v, apart])[1] is None


@as_ranks(3, deadline=240)
def test_what_only_members_call_does_not_move_the_names_of_the_others():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rank, pair = hvd.rank(), hvd.add_process_set([0, 1])

    def among():
        x = tf.ones([2])
        if pair.included():
            x = x + hvd.allreduce(x, process_set=pair, op=hvd.Sum)
        if rank == 0:
            hvd.send(x, 2)
        if rank == 2:
            x = x + hvd.recv(x, 0)
        return hvd.allreduce(x, op=hvd.Sum)

    for function in ways(among):
        np.testing.assert_array_equal(function(), [3 + 3 + 4] * 2)


@as_ranks(2, deadline=240)
def test_numbers_of_small_types_are_reduced_and_sent():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    for dtype in (tf.bfloat16, tf.float16, tf.float32):
        one, mine = tf.constant(1.0, dtype), tf.constant(hvd.rank() + 1.0, dtype)
        for call in (
            lambda one=one: hvd.allreduce(one, op=hvd.Sum),
            lambda one=one: hvd.grouped_allreduce([one, one], op=hvd.Sum)[1],
            lambda mine=mine: hvd.broadcast(mine, 1),
        ):
            for function in ways(call):
                found = function()
                assert found.dtype == dtype and found.shape == () and float(found) == 2
        variable = tf.Variable(mine)
        hvd.broadcast_variables([variable], 1)
        assert float(variable) == 2
        hvd.check_consistency([variable])
