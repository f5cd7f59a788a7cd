"""HVDLITE_NAN_GUARD: which tensor, on which rank, had NaN or infinities first, told to all before a sum spreads it.

Where it is off nothing is looked at (tests/c/test_nan_guard.c, make counts). What is found, and by whom, is the core's;
here it is asked of every adapter, and what a user sees of it.
"""

import contextlib
import os
import sys
import time
import warnings
from importlib.util import find_spec

import numpy as np
import pytest
from launching import Launch, launch
from ranks import as_ranks

import hvdlite as hvd
from hvdlite._core import nan_guard


@contextlib.contextmanager
def mode(name):
    """A life of hvdlite of its own with this guard."""
    hvd.shutdown()
    os.environ["HVDLITE_NAN_GUARD"] = name
    try:
        hvd.init()
        yield
    finally:
        del os.environ["HVDLITE_NAN_GUARD"]
        hvd.shutdown()


def told(call, *says):
    """The error of all ranks, which must be one."""
    with pytest.raises(hvd.HvdNotFiniteError) as caught:
        call()
    for each in says:
        assert each in str(caught.value), str(caught.value)
    return str(caught.value)


def sick(size, at, value, dtype=np.float32, rank=1):
    """Ones; on one rank something else at some places."""
    array = np.ones(size, dtype)
    if hvd.rank() == rank:
        array[at] = value
    return array


@as_ranks(1, 3)
def test_every_reduction_of_every_dtype_is_an_error_on_all_ranks():
    culprit = hvd.size() - 1
    with mode("1"):
        rows = {"rank": culprit}
        text = told(
            lambda: hvd.allreduce(sick(100, [3, 50, 99], np.nan, **rows), name="loss"),
            f"tensor 'allreduce.loss', before its allreduce: rank {culprit} had 3 NaN in 100 elements",
            "look: at the loss", "GradScaler",
        )  # fmt: skip
        assert ("the other ranks had none" in text) == (hvd.size() > 1)
        assert len(set(hvd.allgather_object(text))) == 1
        for dtype in (np.float16, np.float32, np.float64):
            told(lambda dtype=dtype: hvd.allreduce_(sick(5, 4, -np.inf, dtype, **rows)), "1 infinity in 5 elements")
        told(
            lambda: hvd.reducescatter(sick(7, 0, np.nan, **rows), name="rs"), "'reducescatter.rs', before its reducesc"
        )
        told(lambda: hvd.reduce(sick(7, 0, np.nan, **rows), 0, name="r"), "'reduce.r', before its reduce: rank")
        told(lambda: hvd.allreduce(sick(7, 0, np.nan, **rows), op=hvd.Adasum), f"rank {culprit} had 1 NaN")
        told(lambda: hvd.allreduce(sick(7, 0, np.nan, **rows), op=hvd.Max), f"rank {culprit} had 1 NaN")
        big = np.float32(3e38) * np.ones(4, np.float32)
        told(lambda: hvd.allreduce(big, compression=hvd.numpy.Compression.fp16), "4 infinities in 4 elements")
        assert not np.isfinite(hvd.allreduce(big, op=hvd.Sum, name="big")).all() or hvd.size() == 1  # the sum's own
        group = [np.ones(3, np.float32), sick(4, 1, np.nan, **rows), np.ones(5, np.float32)]
        told(lambda: hvd.grouped_allreduce(group, name="g"), "'grouped_allreduce.g", f"rank {culprit} had 1 NaN in 4")
        assert np.isnan(hvd.broadcast(np.full(2, np.nan), 0)).all()  # what is not combined is nobody's business
        assert np.isnan(hvd.allgather(np.full((1, 2), np.nan))).all()
        assert hvd.allreduce(np.array([2**31 - 1], np.int32), op=hvd.Max)[0] == 2**31 - 1
        np.testing.assert_array_equal(hvd.allreduce(np.ones(3), name="loss"), np.ones(3))  # and the job goes on


@as_ranks(2)
def test_nan_alone_and_warnings():
    with mode("nan"):
        assert np.isinf(hvd.allreduce(sick(3, 0, np.inf), name="scaled"))[0]
        told(lambda: hvd.allreduce(np.array([np.inf, np.nan]), name="both"), "ranks 0, 1 had 1 NaN in 2 elements. That")
    with mode("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            result = hvd.allreduce(sick(3, 0, np.nan), name="w")
            assert np.isnan(result[0]) and result[1] == 1, step
        until = time.monotonic() + 30
        while not caught and time.monotonic() < until:
            time.sleep(0.02)
        hvd.allreduce(sick(3, 0, np.inf), name="late")
        hvd.shutdown()  # nothing is lost
        said = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
        assert said[0].startswith("hvdlite: tensor 'allreduce.w', before its allreduce: rank 1 had 1 NaN in 3"), said
        assert any("more" in each or "'allreduce.late'" in each for each in said), said
    assert not nan_guard.looks() and hvd.is_initialized() is False
    hvd.init()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(hvd.allreduce(np.array([np.nan])))[0]


@as_ranks(2)
def test_tensors_of_torch_and_on_devices():
    torch = pytest.importorskip("torch")
    import hvdlite.torch as hvdt
    from hvdlite.torch.device import GuardedDevice

    with mode("raise"):
        half = torch.full((3,), float("inf") if hvdt.rank() == 0 else 1.0, dtype=torch.bfloat16)
        told(lambda: hvdt.allreduce(half, name="half"), "'allreduce.half'", "rank 0 had 3 infinities in 3 elements")
    spoiled = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert GuardedDevice(0, spoiled).found() == 1 << 32 | 2  # as of a GPU's
    assert GuardedDevice(0, torch.ones(3)).found() == 0 == GuardedDevice(0, torch.ones(3, dtype=torch.int32)).found()


@pytest.mark.parametrize("name", ["warn", "raise"])
@as_ranks(2, deadline=200)  # torch imports half of itself for a first optimizer
def test_with_a_gradient_scaler_warnings_let_it_skip_and_errors_say_so(name):
    """Overflow in one gradient of one rank: all skip that step, with the guard as without it."""
    torch = pytest.importorskip("torch")
    import hvdlite.torch as hvdt

    with mode(name), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        optimizer = hvdt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

        def step(factor):
            optimizer.zero_grad()
            more = model[1].bias * (factor if hvdt.rank() == 1 else 1.0)
            scaler.scale(model(torch.ones(3, 4)).sum() + more.sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        step(1.0)
        before = model[0].weight.detach().clone()
        if name == "warn":
            step(float("inf"))
        else:
            says = "1.bias", "rank 1 had 2 infinities in 2 elements; the other ranks had none"
            says += "GradScaler or LossScale", "HVDLITE_NAN_GUARD=warn tells"
            text = told(lambda: step(float("inf")), *says)
            assert len(set(hvdt.allgather_object(text))) == 1
            scaler.update(512.0)  # as it would have been
        assert torch.equal(model[0].weight, before) and scaler.get_scale() == 512.0
        step(1.0)
        assert not torch.equal(model[0].weight, before) and scaler.get_scale() == 512.0
        hvdt.check_consistency(model)
        hvdt.shutdown()
        said = [str(each.message) for each in caught if "rank 1 had" in str(each.message)]
        assert bool(said) == (name == "warn") and all("goes on" in each for each in said)


ON_TENSORFLOW = """
import sys, numpy, tensorflow as tf, keras, hvdlite.keras, hvdlite.tensorflow as hvd
hvd.init()
rank = hvd.rank()
value = tf.constant([1.0, float("nan") if rank else 1.0])
for call in (lambda: hvd.allreduce(value, name="e"), tf.function(lambda: hvd.allreduce(value, name="g", op=hvd.Sum))):
    try:
        call()
    except tf.errors.InvalidArgumentError as error:
        assert "rank 1 had 1 NaN in 2 elements; the other ranks had none" in str(error), error
        print("told", isinstance(error, hvd.HvdNotFiniteError), flush=True)
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="only")])
model.compile(hvdlite.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
x = numpy.ones((8, 4), "float32")
if rank:
    x[3] = numpy.inf
try:
    model.fit(x, numpy.ones((8, 2), "float32"), verbose=0)
except tf.errors.InvalidArgumentError as error:
    assert "rank 1 had " in str(error) and " NaN" in str(error) and "DistributedOptimizer." in str(error), error
    print("fit", flush=True)

import os
hvd.shutdown()
os.environ["HVDLITE_NAN_GUARD"] = "warn"
hvd.init()
scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
model.compile(hvdlite.keras.DistributedOptimizer(scaled), "mse", jit_compile=False)
before = model.get_weights()[0]
for poison, scale in ((1e38, 512.0), (1.0, 512.0)):
    x = numpy.full((8, 4), poison if rank else 1.0, "float32")
    model.fit(x, numpy.ones((8, 2), "float32"), verbose=0)
    assert float(model.optimizer.dynamic_scale.numpy()) == scale
    assert numpy.array_equal(before, model.get_weights()[0]) == (poison > 1)
hvdlite.keras.check_consistency(model)
print("scaled", flush=True)
"""


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_eagerly_in_graphs_and_in_fit():
    with Launch("-np", 2, "--nan-guard", "raise", sys.executable, "-u", "-c", ON_TENSORFLOW) as job:
        code = job.wait(200)  # on a crowded machine TensorFlow is a minute old before it begins
        assert not job.left()
    out, err = job.out, job.err
    assert code == 0 and (out.count("told True"), out.count("told False"), out.count("fit")) == (2, 2, 2), out + err
    assert out.count("scaled") == 2, out + err


def test_a_mode_that_is_none_is_refused_and_warnings_reach_the_console():
    code, out, err = launch("-np", 1, "--nan-guard", "loud", sys.executable, "-c", "pass")
    assert code != 0 and "--nan-guard='loud'" in err and "off, warn, raise (or 1), or nan" in err, err
    program = "import numpy, hvdlite as hvd; hvd.init(); hvd.allreduce(numpy.array([numpy.nan]), name='x')"
    code, out, err = launch("-np", 2, "--nan-guard", "warn", sys.executable, "-W", "error", "-c", program)
    assert code == 0 and (out + err).count("'allreduce.x', before its allreduce: ranks 0, 1 had 1 NaN") == 2, out + err
