"""Tensors of TensorFlow that lie on a GPU: where our kernels for it want what they touch, and who decides. As much of
that as a machine without a GPU can show; tests/c/test_tensorflow_gpu.c has the rest over one that is none."""

import os
import subprocess
import sys
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

FRESH_RANKS = True  # what a process has found of GPUs stays there, and others pretend to have some

ARGUMENTS = {
    "HvdStart": {"x", "splits", "handle"},
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


ON_DEVICE = {"HvdStart": {"x"}, "HvdFinish": {"y"}, "HvdGate": {"y"}, "HvdAsk": set()}


KERNELS_ON_DEVICE = """
import numpy as np, tensorflow as tf
from tensorflow.python.framework import kernels
import hvdlite.tensorflow as hvd
from hvdlite.tensorflow.ops import kernels as ours
hvd.init()
ours.on_device = lambda: True  # as with a TensorFlow for GPUs and a driver that is new enough
assert ours.library().on_device
for op, arguments in ARGUMENTS.items():
    found = [one for one in kernels.get_registered_kernels_for_op(op).kernel if one.device_type == "GPU"]
    anything = [one for one in found if not one.constraint]
    assert len(anything) == 1 and set(anything[0].host_memory_arg) == arguments - ON_DEVICE[op], op
    ints = [one for one in found if one.constraint]
    assert len(ints) == bool(ON_DEVICE[op]), op
    for one in ints:
        assert list(one.constraint[0].allowed_values.list.type) == [tf.int32.as_datatype_enum], op
        assert one.priority > anything[0].priority and set(one.host_memory_arg) == arguments, op
summed = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
np.testing.assert_array_equal(summed(tf.constant([3.0])), [3.0])  # of the CPU's memory, as ever
hvd.shutdown()
"""


def test_kernels_that_reduce_on_the_gpu_take_and_give_tensors_there_but_for_int32():
    code = f"ARGUMENTS = {ARGUMENTS}\nON_DEVICE = {ON_DEVICE}\n{KERNELS_ON_DEVICE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@as_ranks(1, deadline=120)
def test_the_gpu_is_chosen_where_it_can_be_and_asking_for_it_elsewhere_is_an_error():
    import tensorflow as tf

    from hvdlite import _core
    from hvdlite.errors import HvdOptionError
    from hvdlite.tensorflow import device

    def chosen(built, records, guard="off", **variables):
        variables = {f"HVDLITE_{name}": value for name, value in variables.items()}
        with (
            mock.patch.dict(os.environ, variables, HVDLITE_NAN_GUARD=guard),
            mock.patch.object(tf.test, "is_built_with_cuda", lambda: built),
            mock.patch.object(device, "records", lambda: records),
        ):
            return device.reduces_on_device()

    assert not _core.lib.hvd_gpu_version(2) or _core.lib.hvd_gpu_version(0) >= 12050
    assert chosen(True, True) and chosen(True, True, TENSORFLOW_GPU="device")
    assert not chosen(True, True, TENSORFLOW_GPU="host") and not chosen(True, True, "warn")
    assert not chosen(True, False) and not chosen(False, True)
    with mock.patch.object(tf.config.optimizer, "get_jit", lambda: "autoclustering"):
        assert not chosen(True, True)
    for built, records, guard, why in (
        (False, True, "off", "without CUDA"),
        (True, False, "off", "cuCtxRecordEvent"),
        (True, True, "raise", "HVDLITE_NAN_GUARD"),
    ):
        with pytest.raises(HvdOptionError, match=rf"rank 0: .*{why}.*HVD674"):
            chosen(built, records, guard, TENSORFLOW_GPU="device")


ASKED_WHILE_TRACED = """
import tensorflow as tf
import hvdlite.tensorflow as hvd
from hvdlite.errors import HvdOptionError
tf.test.is_built_with_cuda = lambda: False
hvd.init()
try:
    tf.function(hvd.allreduce)(tf.constant([3.0]))
except HvdOptionError as error:
    assert isinstance(error, tf.errors.InvalidArgumentError) and "[HVD674]" in str(error), error
    print("told")
hvd.shutdown()
"""


def test_a_function_that_cannot_have_the_gpu_it_asks_for_raises_our_error_from_its_trace():
    done = subprocess.run(
        [sys.executable, "-c", ASKED_WHILE_TRACED], env={**os.environ, "HVDLITE_TENSORFLOW_GPU": "device"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "told"), done.stderr


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
