"""Tensors of TensorFlow that lie on a GPU: where our kernels for it want what they touch. As much of
that as a machine without a GPU can show."""

from importlib.util import find_spec

import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

FRESH_RANKS = True  # what a process has found of GPUs stays there, and others pretend to have some

ARGUMENTS = {
    "HvdStart": {"x", "splits", "handle", "memory"},
    "HvdFinish": {"handle", "y", "rows"},
    "HvdGate": {"handle", "y", "rows"},
    "HvdAsk": {"answer"},
}


@as_ranks(1, deadline=120)
def test_kernels_for_gpus_take_and_give_everything_in_host_memory():
    from tensorflow.python.framework import kernels

    from hvdlite.tensorflow.ops.kernels import library

    library()  # it is loaded with the first collective
    for op, arguments in ARGUMENTS.items():
        for device in ("CPU", "GPU"):
            found = [one for one in kernels.get_registered_kernels_for_op(op).kernel if one.device_type == device]
            assert len(found) == 1, (op, device)
            assert set(found[0].host_memory_arg) == (arguments if device == "GPU" else set()), (op, device)


@as_ranks(2, deadline=120)
def test_a_graph_that_asks_for_a_gpu_runs_where_there_is_none():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    @tf.function
    def both(x):
        with tf.device("/GPU:0"):
            rows = hvd.allgather(x[: hvd.rank() + 1] * 2.0)
            return hvd.allreduce(x + 1.0, op=hvd.Sum), rows

    tf.config.set_soft_device_placement(True)
    total, rows = both(tf.constant([1.0, 2.0, 3.0]) + float(hvd.rank()))
    np.testing.assert_array_equal(total, [5.0, 7.0, 9.0])
    np.testing.assert_array_equal(rows, [2.0, 4.0, 6.0])
    with tf.device("/GPU:0"):
        eager = hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Sum)
    np.testing.assert_array_equal(eager, [2.0, 4.0])
