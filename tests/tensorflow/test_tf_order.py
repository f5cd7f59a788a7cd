"""What runs in no order, or not at all: loops of sessions, datasets in parallel, threads, XLA. And what errors say."""

import threading
import time
from importlib.util import find_spec

import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine


def until(reached, seconds=40):
    """Waits for what no event tells."""
    end = time.monotonic() + seconds
    while not reached() and time.monotonic() < end:
        time.sleep(0.002)
    assert reached()


def flights(which):
    from hvdlite.tensorflow.ops.kernels import library

    return library().flights(which)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("old", [False, True], ids=["while_v2", "while_v1"])
@as_ranks(2, deadline=120)
def test_iterations_in_a_session_meet_their_like_though_they_overtake_each_other(old, grouped):
    """Of two iterations rank 0 starts the second first, and rank 1 the first."""
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    late = hvd.rank()  # the iteration that waits here until the other has started its collectives
    before = 0

    def slow(i):
        if i == late:
            until(lambda: flights(1) > before)
        return np.float32(10 * i + 1)

    def body(i, found):
        x = tf.ensure_shape(tf.compat.v1.py_func(slow, [i], tf.float32, stateful=False), []) * tf.ones(3)
        here = hvd.grouped_allreduce([x, x], op=hvd.Sum)[1] if grouped else hvd.allreduce(x, op=hvd.Sum)
        return i + 1, found.write(i, here)

    was = tf.compat.v1.control_flow_v2_enabled()
    (tf.compat.v1.disable_control_flow_v2 if old else tf.compat.v1.enable_control_flow_v2)()
    try:
        with tf.Graph().as_default():
            start = (tf.constant(0), tf.TensorArray(tf.float32, 2))
            looped = tf.while_loop(lambda i, _: i < 2, body, start, parallel_iterations=10)[1].stack()
            with tf.compat.v1.Session() as session:
                for _ in range(2):
                    before = flights(1)
                    np.testing.assert_array_equal(session.run(looped)[:, 0], [2, 22])
    finally:
        (tf.compat.v1.enable_control_flow_v2 if was else tf.compat.v1.disable_control_flow_v2)()


@as_ranks(2, deadline=120)
def test_a_dataset_calls_collectives_one_by_one_or_not_at_all():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    def summed(i):
        return hvd.allreduce(tf.cast(i, tf.float32), op=hvd.Sum, name="element")

    numbers = tf.data.Dataset.range(4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)element.*num_parallel_calls"):
        numbers.map(summed, num_parallel_calls=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="num_parallel_calls"):
        numbers.map(tf.function(summed), num_parallel_calls=tf.data.AUTOTUNE)
    assert [float(x) for x in numbers.map(summed)] == [0, 2, 4, 6]

    @tf.function
    def over(dataset):
        total = 0.0
        for i in dataset:
            total += summed(i)
        return total

    assert over(numbers) == 12


@as_ranks(2, deadline=120)
def test_two_threads_that_call_one_function_are_told():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    @tf.function
    def step(x):
        return hvd.allreduce(x, op=hvd.Sum, name="twice")

    assert step(tf.constant(1.0)) == 2
    found = []
    if hvd.rank() == 0:
        before = flights(0)
        first = threading.Thread(target=lambda: found.append(float(step(tf.constant(3.0)))))
        first.start()
        until(lambda: flights(0) == before + 1)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"rank 0: tensor 'allreduce.twice' .* its own name"):
            step(tf.constant(100.0))
        hvd.allreduce(1.0, name="told")
        first.join(60)
    else:
        hvd.allreduce(1.0, name="told")
        found.append(float(step(tf.constant(4.0))))
    assert found == [7.0]


@as_ranks(1, deadline=120)
def test_a_function_traced_before_says_what_to_set_when_another_is_compiled():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    inner = tf.function(lambda x: hvd.allreduce(x, name="inner"))
    assert inner(tf.ones(3))[0] == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="pass jit_compile=False"):
        tf.function(lambda x: inner(x) * 2, jit_compile=True)(tf.ones(3))


@as_ranks(1, deadline=120)
def test_every_node_of_ours_says_what_to_set_under_xla():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    x = tf.ones([2, 2])
    calls = {
        "allreduce": lambda: hvd.allreduce(x),
        "grouped_allreduce": lambda: hvd.grouped_allreduce([x, x]),
        "alltoall": lambda: hvd.alltoall(x, [2]),
        "join": hvd.join,
        "rank_op": hvd.rank_op,
        "size_op": hvd.size_op,
        "local_rank_op": hvd.local_rank_op,
        "local_size_op": hvd.local_size_op,
        "process_set_included_op": hvd.process_set_included_op,
    }
    for name, call in calls.items():
        with pytest.raises(tf.errors.UnimplementedError, match=r"rank 0: .*pass jit_compile=False"):
            tf.function(call, jit_compile=True)()
        inner = tf.function(call)
        inner()
        if name != "process_set_included_op":  # which TensorFlow's py_function speaks for
            with pytest.raises(tf.errors.InvalidArgumentError, match="pass jit_compile=False"):
                tf.function(lambda inner=inner: inner(), jit_compile=True)()


@as_ranks(2, deadline=120)
def test_a_function_that_is_called_twice_in_a_graph_of_a_session_is_refused():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    def summed(x):
        return hvd.allreduce(x, op=hvd.Sum)

    twice = tf.function(summed)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        one, two = tf.constant([1.0]), tf.constant([10.0])
        alone, after = twice(one), twice(tf.identity(two))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"tensor 'allreduce.summed.0' .* its own name"):
            session.run([alone, after] if hvd.rank() == 0 else [after, alone])


@pytest.mark.parametrize("mode", ["eager", "graph"])
@as_ranks(2, deadline=120)
def test_mistakes_are_tensorflows_errors_and_name_rank_and_tensor(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    x, sliced = tf.ones(2), tf.IndexedSlices(tf.ones([1, 2]), [0])
    for says, wrong in (
        ("there is no rank 5", lambda: hvd.broadcast(x, 5, name="mine")),
        ("there is no rank 5", lambda: hvd.reduce(x, 5, name="mine")),
        ("op=99 is not supported", lambda: hvd.allreduce(x, op=99, name="mine")),
        ("op=99 is not supported", lambda: hvd.grouped_allreduce([x, x], op=99, name="mine")),
        ("op=99 is not supported", lambda: hvd.reducescatter(x, op=99, name="mine")),
        ("complex64 is not supported; .*bfloat16", lambda: hvd.allreduce(tf.ones(2, tf.complex64), name="mine")),
        ("op=max is not supported .*HVD207", lambda: hvd.grouped_allreduce([sliced], op=hvd.Max, name="mine")),
        (r"entries in splits \(3\) .*HVD209", lambda: hvd.alltoall(tf.ones(4), splits=[1, 2, 1], name="mine")),
        ("needs a tensor of at least one dim.*HVD210", lambda: hvd.allgather(tf.constant(1.0), name="mine")),
        ("string is not|object is not", lambda: hvd.allgather(tf.constant(["a"]), name="mine")),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=says) as caught:
            (tf.function(wrong) if mode == "graph" else wrong)()
        assert isinstance(caught.value, ValueError), says
        assert f"rank {hvd.rank()}, tensor" in str(caught.value) and ".mine" in str(caught.value)
    assert hvd.allreduce(x, op=hvd.Sum)[0] == 2


@pytest.mark.parametrize("mode", ["eager", "graph"])
@as_ranks(2, deadline=120)
def test_tensors_of_more_dimensions_than_the_core_keeps(mode):
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    for dims in (8, 9, 10):
        x = tf.reshape(tf.range(2**dims, dtype=tf.float32), [2] * dims) + hvd.rank()
        base = np.arange(2**dims, dtype=np.float32).reshape([2] * dims)

        def both(x):
            gathered, exchanged, none = hvd.allgather(x), hvd.alltoall(x), hvd.allgather(x[:0, ..., :1])
            return gathered, exchanged, none, tf.shape(gathered), tf.shape(exchanged)

        gathered, exchanged, none, *shapes = (tf.function(both) if mode == "graph" else both)(x)
        np.testing.assert_array_equal(gathered, np.concatenate([base, base + 1]))
        mine = base[hvd.rank() : hvd.rank() + 1]
        np.testing.assert_array_equal(exchanged, np.concatenate([mine, mine + 1]))
        assert none.shape == (0, *[2] * (dims - 2), 1)
        assert [list(shape) for shape in shapes] == [[4] + [2] * (dims - 1), [2] * dims]


@as_ranks(2, deadline=120)
def test_the_gradient_of_a_broadcast_is_zero_on_others_also_where_it_is_infinite():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    x = tf.ones(2)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hvd.broadcast(x, 0) * tf.constant([np.inf, 2.0])
    np.testing.assert_array_equal(tape.gradient(y, x), [np.inf, 2] if hvd.rank() == 0 else [0, 0])
