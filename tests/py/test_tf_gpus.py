"""TensorFlow's eager tensors on GPUs, over a GPU that is none (gpus.py): they stay there, and results are right.

A tensor in the CPU's memory says that it lies on a GPU, and the stub's device memory is the process's own.
"""

import contextlib
import ctypes
import os
import warnings
from importlib.util import find_spec
from unittest import mock

import gpus
import numpy as np
import pytest
from ranks import as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PLACE = "/device:CPU:0"


@pytest.fixture(scope="module", autouse=True)
def stub():
    gpus.build_stub()


@contextlib.contextmanager
def on_gpus(index):
    """Eager tensors lie on device `index`; yields the addresses and kinds of what was submitted as lying there."""
    import tensorflow as tf

    from hvdlite import _core, gpu
    from hvdlite.tensorflow import device

    gpu.find()  # once in a process, and not when it finds its first tensor on a GPU
    library = ctypes.CDLL(str(gpus.STUB))
    library.stub_note.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    _core.gpu_libraries(str(gpus.STUB), str(gpus.STUB))
    submit, seen = _core.submit, []

    def noted(kind, *args, **more):
        seen.append((kind, more.get("device", 0)))
        return submit(kind, *args, **more)

    def empty_at(place, shape, dtype, made=device.empty_at):
        one = made(place, shape, dtype)
        library.stub_note(one.address, max(one.tensor.numpy().nbytes, 1), index)
        return one

    with (
        mock.patch.object(_core, "submit", noted),
        mock.patch.object(device, "empty_at", empty_at),
        mock.patch.object(device, "place_of", lambda tensor: PLACE),
        mock.patch.object(device, "on_device", lambda: True),
        mock.patch.object(tf, "test", mock.Mock(is_built_with_cuda=lambda: True)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        yield seen


def movements(rank, size):
    """What is not reduced; rows that differ, and none."""
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    rows = hvd.allgather(tf.fill([rank, 2], float(rank)))
    assert rows[:, 0].numpy().tolist() == [r for r in range(size) for _ in range(r)] and rows.shape[1] == 2
    same = hvd.broadcast(tf.fill([3], float(rank)), size - 1)
    assert same.numpy().tolist() == [size - 1.0] * 3
    splits = [(rank + to) % 3 for to in range(size)]
    got, counts = hvd.alltoall(tf.range(float(sum(splits))) + 100.0 * rank, splits)
    assert counts.numpy().tolist() == [(r + rank) % 3 for r in range(size)]
    due = [100 * r + sum((r + to) % 3 for to in range(rank)) + i for r in range(size) for i in range((r + rank) % 3)]
    assert got.numpy().tolist() == due
    if size > 1 and rank == 0:
        hvd.send(tf.constant([1.0, 2.0]), 1, name="sent")
    elif rank == 1:
        assert hvd.recv(tf.zeros([2]), 0, name="sent").numpy().tolist() == [1.0, 2.0]
    part = hvd.scatter(tf.range(2.0 * size), 0)
    assert part.numpy().tolist() == [2.0 * rank, 2.0 * rank + 1]


def reductions(rank, size):
    """Of whole numbers, so that every order of adding gives the same bits."""
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    total = size * (size - 1) // 2
    for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int64, tf.int32, tf.uint8):
        x = tf.cast(tf.fill([4, 3], rank), dtype)
        result = hvd.allreduce(x, op=hvd.Sum)
        assert result.dtype == dtype and (tf.cast(result, tf.float64).numpy() == total).all(), dtype
        assert (tf.cast(x, tf.float64).numpy() == rank).all(), "the input was written"
    flags = hvd.allreduce(tf.constant([True, False, rank == 0]), op=hvd.Sum)
    assert flags.numpy().tolist() == [True, False, True]
    assert hvd.allreduce(tf.constant(float(rank)), op=hvd.Max).numpy() == size - 1
    assert hvd.allreduce(tf.zeros([0, 3])).shape == (0, 3)
    first, second = hvd.grouped_allreduce([tf.fill([5], float(rank)), tf.ones([2, 2])], op=hvd.Sum)
    assert first.numpy().tolist() == [total] * 5 and (second.numpy() == size).all()
    part = hvd.reducescatter(tf.range(2.0 * size), op=hvd.Sum)
    assert part.numpy().tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]


@as_ranks(1, 2, 3, deadline=180)
def test_eager_tensors_on_gpus_stay_there():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd
    from hvdlite import _core

    with on_gpus(hvd.rank()) as seen:
        before = gpus.calls("ncclAllReduce")
        reductions(hvd.rank(), hvd.size())
        movements(hvd.rank(), hvd.size())
        assert gpus.calls("ncclAllReduce") > before
        kinds = {kind for kind, device in seen if device == hvd.rank() + 1}
        assert kinds >= {_core.ALLREDUCE, _core.ALLGATHER, _core.BROADCAST, _core.ALLTOALL, _core.REDUCESCATTER}
        assert any(not device for kind, device in seen if kind == _core.ALLREDUCE), "int32 goes by way of the CPU"
        waits = gpus.calls("cuStreamWaitEvent")
        hvd.allreduce(tf.ones([3]))
        assert gpus.calls("cuStreamWaitEvent") == waits + 1, "it waits for what the device was given before"
        with tf.GradientTape() as tape:
            x = tf.Variable([1.0, 2.0])
            loss = tf.reduce_sum(hvd.allreduce(x * (hvd.rank() + 1.0), op=hvd.Sum))
        np.testing.assert_array_equal(tape.gradient(loss, x), [hvd.size() * (hvd.rank() + 1.0)] * 2)


@as_ranks(2, deadline=120)
def test_a_tape_and_its_optimizer_train_on_the_gpu_without_a_graph():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    with on_gpus(hvd.rank()) as seen:
        w = tf.Variable([[1.0], [2.0]])
        hvd.broadcast_variables([w], 0)
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tf.matmul(tf.fill([1, 2], hvd.rank() + 1.0), w))
        (gradient,) = tape.gradient(loss, [w])
        assert gradient.numpy().ravel().tolist() == [1.5, 1.5]
        assert all(device for _, device in seen[-1:])


@as_ranks(2, deadline=120)
def test_the_guard_of_a_later_life_looks_at_tensors_there():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    hvd.shutdown()
    with mock.patch.dict(os.environ, HVDLITE_NAN_GUARD="raise"):
        hvd.init()
    with on_gpus(hvd.rank()):
        mine = tf.constant([1.0, np.nan if hvd.rank() == 1 else 2.0, np.inf])
        with pytest.raises(tf.errors.OpError, match="sick"):
            hvd.allreduce(mine, name="sick")


@as_ranks(2, deadline=120)
def test_who_waits_for_a_gpu_hears_that_the_job_has_failed():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd
    from hvdlite import _core

    with on_gpus(hvd.rank()):
        with pytest.raises(RuntimeError, match="had enough"):
            hvd.allreduce(tf.ones([3]), name="once")
            if hvd.rank() == 1:
                _core.lib.hvd_abort(1, _core.lib.HVD_EINTERNAL, b"rank 1 has had enough")
            hvd.allreduce(tf.ones([3]), name="twice")
        with pytest.raises(RuntimeError, match="had enough"):
            _core.arrived(1 << 40)
        hvd.shutdown()


@as_ranks(2, deadline=120)
def test_a_limit_of_a_call_holds_for_the_device_too():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    with on_gpus(hvd.rank()):
        hvd.allreduce(tf.ones([3]), name="first")
        if hvd.rank() == 0:
            assert hvd.allreduce(tf.ones([3]), name="held", op=hvd.Sum).numpy().tolist() == [2.0] * 3
            return
        with gpus.busy(1), pytest.raises(hvd.HvdTimeoutError, match="'allreduce.held'") as caught:
            hvd.allreduce(tf.ones([3]), name="held", op=hvd.Sum, timeout=0.2)
        assert hvd.synchronize(caught.value.handle).numpy().tolist() == [2.0] * 3


@as_ranks(2, deadline=120)
def test_what_a_device_may_still_write_is_held_when_the_job_has_failed():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd
    from hvdlite import _core
    from hvdlite._core.device import _held

    with on_gpus(hvd.rank()):
        hvd.allreduce(tf.ones([3]), name="first")
        _held.clear()
        if hvd.rank() == 0:
            with pytest.raises(RuntimeError, match="had enough"):
                hvd.allreduce(tf.ones([3]), name="held")
            ((_, point),) = _held
            assert point is not None and _core.device._until(point.reached, 60)
            point.hold(None)
            assert [kept for kept, _ in _held] == [None], "the device is done with it"
        else:
            with gpus.busy(1):
                with pytest.raises(hvd.HvdTimeoutError):
                    hvd.allreduce(tf.ones([3]), name="held", timeout=0.2)
                _core.lib.hvd_abort(1, _core.lib.HVD_EINTERNAL, b"rank 1 has had enough")
        hvd.shutdown()


@as_ranks(1, deadline=120)
def test_addresses_that_are_on_no_gpu_and_dtypes_without_an_address():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd
    from hvdlite import _core
    from hvdlite.errors import HvdError
    from hvdlite.tensorflow import device

    with on_gpus(0) as seen:
        with pytest.raises((HvdError, ValueError), match="no GPU.*HVD675"):
            _core.Point(1)
        with mock.patch.object(device.Placed, "__init__", side_effect=tf.errors.InvalidArgumentError(None, None, "no")):
            assert hvd.allreduce(tf.ones([3])).numpy().tolist() == [1.0] * 3
        assert [device for _, device in seen] == [0]
        for none in (
            tf.constant(["text"]),
            tf.raw_ops.EmptyTensorList(element_shape=tf.constant([1]), max_num_elements=1, element_dtype=tf.float32),
        ):
            with pytest.raises((HvdError, tf.errors.InvalidArgumentError)):
                hvd.allreduce(none)
        assert device.empty_at(PLACE, (2, 3), tf.float32).shape == (2, 3)
        there = device.Placed(tf.constant([1.0, 2.0]), PLACE)
        assert device.GpuDevice(there).near(there).tolist() == [1.0, 2.0]
