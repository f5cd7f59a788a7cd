"""timeout= of TensorFlow's collectives: an eager call ends with an error, its collective goes on; graphs take none."""

import gc
import os

import numpy as np
import pytest
from ranks import as_ranks, needs

import hvdlite as messages

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
needs("tensorflow")

PATIENCE_S = 240.0  # a crowded machine imports TensorFlow for a minute
LONG = 120.0  # never waited for


def rank_0_waits(call):
    """What `call` raises on rank 0; rank 1 goes on when that has raised it (a message tells it), and gets None."""
    import hvdlite.tensorflow as hvd

    if messages.rank() == 1:
        messages.recv(np.zeros(1), 0, name="raised")
        return None
    with pytest.raises(hvd.HvdTimeoutError) as caught:
        call()
    messages.send(np.zeros(1), 1, name="raised")
    return caught.value


@as_ranks(2)
def test_every_eager_call_has_a_time_limit_and_its_collective_goes_on():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    two, six, rank = tf.ones(2), tf.range(6.0), hvd.rank()
    half = {"compression": hvd.Compression.fp16}
    calls = {
        "allreduce.x": lambda **k: hvd.allreduce(two, op=hvd.Sum, name="x", **half, **k),
        "grouped_allreduce.x_1of2": lambda **k: hvd.grouped_allreduce([two, six], name="x", **half, **k),
        "allgather.x": lambda **k: hvd.allgather(six[: 2 + rank], name="x", **k),
        "grouped_allgather.x_1of2": lambda **k: hvd.grouped_allgather([two, tf.constant([1])], name="x", **k),
        "broadcast.x": lambda **k: hvd.broadcast(two, 0, name="x", **k),
        "alltoall.x": lambda **k: hvd.alltoall(six, name="x", **k),
        "alltoall.y": lambda **k: hvd.alltoall(six, [2, 4], name="y", **k),
        "reducescatter.x": lambda **k: hvd.reducescatter(six, name="x", **k),
        "grouped_reducescatter.x_1of1": lambda **k: hvd.grouped_reducescatter([six], name="x", **k),
        "allreduce.reduce.x": lambda **k: hvd.reduce(two, 0, name="x", **k),
        "alltoall.gather.x": lambda **k: hvd.gather(two, 0, name="x", **k),
        "alltoall.scatter.x": lambda **k: hvd.scatter(six, 0, name="x", **k),
        "send.x": lambda **k: hvd.send(two, 0, "x", **k) if rank else hvd.recv(two, 1, "x", **k),
        "send.y": lambda **k: hvd.recv(two, 0, "y", **k) if rank else hvd.send(two, 1, "y", **k),
    }
    for name, call in calls.items():
        expected = call(timeout=LONG)
        error = rank_0_waits(lambda: call(timeout=0.05))  # noqa: B023
        if error is None:
            result = call()
        else:
            text = str(error)
            assert isinstance(error, tf.errors.DeadlineExceededError)
            assert f"rank 0 has waited its whole timeout of 0.05 s for tensor '{name}': " in text, text
            assert "missing on rank 1; rank 1 (" in text and text.endswith(" [HVD502]"), text
            result = hvd.synchronize(error.handle, timeout=LONG)
            assert hvd.poll(error.handle) and hvd.synchronize(error.handle) is result  # as of any handle
        tf.nest.assert_same_structure(result, expected)
        for mine, told in zip(tf.nest.flatten(result), tf.nest.flatten(expected)):
            assert told is None or (isinstance(mine, tf.Tensor) and mine.dtype == told.dtype), (name, result)
            assert told is None or np.array_equal(mine, told), (name, result)

    error = rank_0_waits(lambda: hvd.allreduce(two, name="dropped", timeout=0.05))
    if error is None:
        hvd.allreduce(two, name="dropped")
    del error
    gc.collect()
    messages.barrier()  # it has ended: its name is free
    assert np.array_equal(hvd.allreduce(two * 3, name="dropped", op=hvd.Sum), [6, 6])


@as_ranks(2)
def test_gradients_bad_times_and_graphs():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        error = rank_0_waits(lambda: hvd.allreduce(x, op=hvd.Sum, name="x", timeout=0.05))
        y = hvd.allreduce(x, op=hvd.Sum, name="x") if error is None else hvd.synchronize(error.handle, LONG)
    assert np.array_equal(y, [2, 4])
    assert np.array_equal(tape.gradient(y, x), [2, 2])

    for wrong, ours, theirs in (
        (0, ValueError, tf.errors.InvalidArgumentError),
        (-1, hvd.HvdArgumentError, tf.errors.InvalidArgumentError),
        (float("nan"), ValueError, tf.errors.InvalidArgumentError),
        (True, TypeError, TypeError),
        ("1", TypeError, TypeError),
    ):
        for call in (lambda **k: hvd.allreduce(x, name="z", **k), lambda **k: hvd.recv(x, 1 - hvd.rank(), "z", **k)):
            with pytest.raises(ours, match=r"timeout must be .*HVD503") as caught:
                call(timeout=wrong)
            assert isinstance(caught.value, theirs)
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([2, 2]))
    with pytest.raises(ValueError, match=r"timeout is not supported for tf.IndexedSlices.*HVD207"):
        hvd.allreduce(slices, timeout=LONG)
    for call in (hvd.allreduce, lambda x, **k: hvd.grouped_allgather([x], **k), lambda x, **k: hvd.send(x, 0, **k)):
        with pytest.raises(tf.errors.UnimplementedError, match=r"eager calls.*HVDLITE_COLLECTIVE_TIMEOUT.*HVD504"):
            tf.function(lambda x: call(x, timeout=LONG))(tf.ones(2))  # noqa: B023
    with pytest.raises(TypeError, match="HVD503"):
        tf.function(lambda x: hvd.allreduce(x, timeout="1"))(tf.ones(2))
    assert np.array_equal(tf.function(lambda x: hvd.allreduce(x, timeout=None))(tf.ones(2)), [1, 1])
