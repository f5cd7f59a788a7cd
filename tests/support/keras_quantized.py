"""Keras's optimizers whose gradients travel in 8 and 4 bits, between pretended hosts: test_keras_quantized.py runs it
on each backend of Keras.

    hvdlite-run -np 2 python keras_quantized.py
"""

import os
import pickle
import tempfile

import keras
import numpy as np
import pytest
from pretended_hosts import pretend

import hvdlite.keras as hvd

TORCH = os.environ.get("KERAS_BACKEND") == "torch"
MODES = [lambda function: function] + ([] if TORCH else [__import__("tensorflow").function])
INT8, INT4, SHAPE = hvd.Compression.int8, hvd.Compression.int4, (100, 64)


def given():
    return np.random.default_rng(hvd.rank()).standard_normal(SHAPE).astype("float32")


def alike(array):
    return len(set(hvd.allgather_object(np.asarray(array).tobytes()))) == 1


def value(variable):
    return np.array(keras.ops.convert_to_numpy(variable))


def stepping(mode, *variables, **terms):
    """The optimizer, and a step with gradients for all but the last variable."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **terms)
    optimizer.build(variables)
    gradients = [keras.ops.convert_to_tensor(each) for each in (given(), np.full(3, hvd.rank() + 1.0, "float32"))]
    return optimizer, mode(lambda: optimizer.apply(gradients[: len(variables)], variables[:2]))


def fresh(*shapes):
    return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]


def steps(modes):
    exact = np.asarray(hvd.allgather_object(given())).mean(0)
    for mode in modes:
        for compression, passes, least, most in (
            (INT8, 1, 0, 1e-3), (INT4, 1, 0, 1e-2), (INT4(feedback=False), 1, 5e-2, 1), (INT4, 2, 0, 1e-2),
        ):  # fmt: skip
            large, small, unused = fresh(SHAPE, 3, 5)
            _, step = stepping(mode, large, small, unused, compression=compression, backward_passes_per_step=passes)
            for _ in range(50 * passes):
                step()
            far = np.linalg.norm(value(large) / -50 / passes - exact) / np.linalg.norm(exact)
            assert least <= far < most and alike(value(large)), (compression, passes, far)
            assert np.allclose(value(small), -25 * passes * (hvd.size() + 1)) and not value(unused).any()


def the_rest():
    """Refusals; what is left over is of one optimizer and one life, and in no copy or file."""
    for terms, says in (({"op": hvd.Adasum}, "the adasum of rounded"), ({"shard": True}, "=Compression.int8 is not")):
        with pytest.raises(ValueError, match=says):
            hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=INT8, **terms)
    (variable,) = fresh(SHAPE)
    with pytest.raises(hvd.HvdMismatchError, match=r"(?s)int4 \(25 MiB\).*int8 \(25 MiB\)"):
        stepping(MODES[0], variable, compression=INT8 if hvd.rank() else INT4)[1]()
    optimizer, step = stepping(MODES[0], variable, compression=INT4)

    def left(of):
        return sum(float(np.abs(kept).sum()) for _, kept in of._hvd.lists.residuals._kept.values())

    step()
    first, after = value(variable), left(optimizer)
    assert after > 0 and left(pickle.loads(pickle.dumps(optimizer))) == 0
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(64)])
    for jit in (False,) if TORCH else (False, True):
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=INT8), "mse", jit_compile=jit)
        with pytest.raises(hvd.HvdNotYetError, match="by XLA yet") if jit else tempfile.TemporaryDirectory() as folder:
            model.fit(given().T, given().T[:, :64], verbose=0)
            assert alike(value(model.layers[0].kernel)) and left(model.optimizer) > 0
            model.save(f"{folder}/model.keras")
            assert left(hvd.load_model(f"{folder}/model.keras", compression=INT8).optimizer) == 0
    hvd.shutdown()
    hvd.init()
    step()
    assert np.array_equal(value(variable), 2 * first) and left(optimizer) == after


def program(each):
    pretend(each)
    steps(MODES if each == 1 else MODES[-1:])
    if each == 1:
        the_rest()
    pretend(hvd.size())
    for mode in MODES:  # on one host nothing is rounded
        plain, same = fresh(SHAPE, SHAPE)
        stepping(mode, plain)[1]()
        stepping(mode, same, compression=INT4)[1]()
        assert np.array_equal(value(plain), value(same))


if __name__ == "__main__":
    hvd.init()
    program(1)
    print("all rounded", flush=True)
