"""Keras's optimizers whose gradients travel in 8 and 4 bits, between pretended hosts: test_keras_quantized.py runs it
on each backend of Keras.

    hvdlite-run -np 2 python keras_quantized.py RANKS_OF_A_HOST
"""

import copy
import os
import pickle
import sys
import tempfile

import keras
import numpy as np
from pretended import hosts_of

import hvdlite.keras as hvd

TORCH = os.environ.get("KERAS_BACKEND") == "torch"
hvd.init()
RANK, SHAPE = hvd.rank(), (100, 64)
LARGE = np.random.default_rng(RANK).standard_normal(SHAPE).astype("float32")
INT8, INT4 = hvd.Compression.int8, hvd.Compression.int4


def alike(array):
    return len(set(hvd.allgather_object(np.asarray(array).tobytes()))) == 1


def fresh(*shapes):
    return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]


def value(variable):
    return np.array(keras.ops.convert_to_numpy(variable))


def modes():
    if TORCH:
        return [lambda function: function]
    return [lambda function: function, __import__("tensorflow").function]


def stepping(mode, variables, gradients, **terms):
    """The optimizer, and a step whose result is in the variables."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **terms)
    optimizer.build(variables)
    given = [None if each is None else keras.ops.convert_to_tensor(each) for each in gradients]
    some = [(gradient, variable) for gradient, variable in zip(given, variables) if gradient is not None]
    return optimizer, mode(lambda: optimizer.apply(*zip(*some)))


def far(sums, exact, steps):
    return np.linalg.norm(value(sums) / -steps - exact) / np.linalg.norm(exact)


def steps(exact, modes):
    for mode in modes:
        for terms, passes, least, most in (
            ({"compression": INT8}, 1, 0, 1e-3),
            ({"compression": INT4}, 1, 0, 1e-2),
            ({"compression": INT4(feedback=False)}, 1, 5e-2, 1),
            ({"compression": INT4, "backward_passes_per_step": 2}, 2, 0, 1e-2),
        ):
            first, large, unused = fresh(3, SHAPE, 5)
            _, step = stepping(mode, [first, large, unused], [np.full(3, RANK + 1.0), LARGE, None], **terms)
            for _ in range(50 * passes):
                step()
            assert least <= far(large, exact, 50 * passes) < most, (terms, far(large, exact, 50 * passes))
            assert alike(value(large)) and np.allclose(value(first), -50 * passes * (hvd.size() + 1) / 2)
            assert not value(unused).any()


def refusals():
    sgd = keras.optimizers.SGD
    for terms, says in (
        ({"op": hvd.Adasum}, "needs op=hvd.Average or hvd.Sum: the adasum"),
        ({"shard": True}, "shard=True: compression=Compression.int8 is not supported"),
    ):
        try:
            hvd.DistributedOptimizer(sgd(1.0), compression=INT8, **terms)
        except ValueError as error:
            assert says in str(error), error
        else:
            raise AssertionError(f"accepted {terms}")
    variables = fresh(SHAPE)
    _, step = stepping(modes()[0], variables, [LARGE], compression=INT8 if RANK else INT4)
    try:
        step()
    except hvd.HvdMismatchError as error:
        assert "int4 (25 MiB)" in str(error) and "int8 (25 MiB)" in str(error), error
    else:
        raise AssertionError("accepted different compressions")


def lives():
    """What is left over is of one optimizer and one life, and in no copy or file."""
    variables = fresh(SHAPE)
    optimizer, step = stepping(modes()[0], variables, [LARGE], compression=INT4)

    def left(of=optimizer):
        return sum(float(np.abs(kept).sum()) for _, kept in of._hvd.lists.residuals._kept.values())

    step()
    after = left()
    assert after > 0
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert left(made) == 0 and repr(made._hvd.lists.compression) == "Compression.int4"
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(64)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=INT8), "mse", jit_compile=False)
    model.fit(LARGE.T, LARGE.T[:, :64], batch_size=32, verbose=0)
    assert alike(value(model.layers[0].kernel)) and left(model.optimizer) > 0
    with tempfile.TemporaryDirectory() as folder:
        model.save(os.path.join(folder, "model.keras"))
        assert left(hvd.load_model(os.path.join(folder, "model.keras"), compression=INT8).optimizer) == 0
    if not TORCH:
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=INT8), "mse", jit_compile=True)
        try:
            model.fit(LARGE.T, LARGE.T[:, :64], verbose=0)
        except hvd.HvdNotYetError as error:
            assert "cannot be compiled by XLA yet" in str(error) and "jit_compile=False" in str(error)
    before = value(variables[0])
    hvd.shutdown()
    hvd.init()
    step()
    assert np.array_equal(value(variables[0]), 2 * before) and left() == after


def program(each):
    with hosts_of(each):
        steps(np.asarray(hvd.allgather_object(LARGE)).mean(0), modes() if each == 1 else modes()[-1:])
        refusals()
        if each > 1:
            return
        lives()
    for mode in modes():  # on one host nothing is rounded
        plain, same = fresh(SHAPE, SHAPE)
        for variable, terms in ((plain, {}), (same, {"compression": INT4})):
            stepping(mode, [variable], [LARGE], **terms)[1]()
        assert np.array_equal(value(plain), value(same))


if __name__ == "__main__":
    program(int(sys.argv[1]))
    print("all rounded", flush=True)
    hvd.shutdown()
