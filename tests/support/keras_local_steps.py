"""DiLoCoCallback and LocalSGDCallback against NumPy and against synchronous training: test_keras_local_steps.py
runs it on each backend of Keras.

    hvdlite-run -np 2 python keras_local_steps.py
"""

import warnings

import keras
import numpy as np
import pytest

import hvdlite.keras as hvd


class Watch(keras.callbacks.Callback):
    """The weights before the first exchange of each window, as steps have left them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([each.numpy() for each in self.model.weights])


def model_of(*layers, optimizer=None, seed=1, **more):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(2)])
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", jit_compile=False, **more)
    return model


def fit(model, *callbacks, batches=6, **more):
    noise = np.random.RandomState(hvd.rank()).randn(4 * batches, 6).astype("float32")
    model.fit(noise[:, :4], noise[:, 4:], batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks), **more)
    return [each.numpy() for each in model.weights]


def close(some, others):
    for one, other in zip(some, others):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def alike(weights):
    assert len(set(hvd.allgather_object(b"".join(each.tobytes() for each in weights)))) == 1


def outer_steps(begin, locals_of_ranks, rate=0.7, momentum=0.9):
    """The global weights after each window, of the local weights of all ranks at its end; Nesterov as in PyTorch."""
    weights, buffers = [np.array(each) for each in begin], [0] * len(begin)
    for window in locals_of_ranks:
        for i, each in enumerate(zip(*window)):
            gradient = weights[i] - np.mean(each, axis=0)
            buffers[i] = momentum * buffers[i] + gradient
            weights[i] = weights[i] - rate * (gradient + momentum * buffers[i])
    return weights


def equals_synchronous_training():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*HVD302")  # nothing averages gradients
        mine = fit(model_of(), hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.LocalSGDCallback(1))
    close(mine, fit(model_of(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))))


def equals_numpy():
    """Two calls of fit, and a rank that begins elsewhere."""
    model, watch, callback = model_of(seed=hvd.rank()), Watch(), hvd.callbacks.DiLoCoCallback(3)
    begin = hvd.broadcast_object([each.numpy() for each in model.weights], 0)
    for _ in range(2):
        fit(model, watch, callback, epochs=2)
    ends = hvd.allgather_object(watch.seen[2::3])
    close([each.numpy() for each in model.weights], outer_steps(begin, zip(*ends)))
    alike([each.numpy() for each in model.weights])


def uneven_batches_end():
    """Of 1 and 7 batches; statistics of BatchNorm are averaged without the outer optimizer."""
    at_once = 1 if keras.backend.backend() == "torch" else 2  # batches of an execution
    model, watch = model_of(keras.layers.BatchNormalization(), steps_per_execution=at_once), Watch()
    begin = [each.numpy() for each in model.weights]
    found = fit(model, watch, hvd.callbacks.DiLoCoCallback(3), batches=7 if hvd.rank() else 1)
    alike(found)
    short, long = hvd.allgather_object(watch.seen)
    assert len(short) == 1 and len(long) == (7 if at_once == 1 else 4)
    first, *others = (2, 5, 6) if at_once == 1 else (1, 3)  # where the long rank exchanges; the last at its end
    steps = [[short[0], long[first]], *([long[i]] for i in others)]
    trained = {id(each) for each in model.trainable_weights}
    for i, variable in enumerate(model.weights):
        only = [[[each[i]] for each in window] for window in steps]
        terms = () if id(variable) in trained else (1.0, 0.0)
        close([found[i]], outer_steps([begin[i]], only, *terms))


def goes_on_with_the_same_bits():
    """A layer is frozen in the second fit: the outer optimizer's momentum leaves it alone."""
    first, callback = model_of(), hvd.callbacks.DiLoCoCallback(2)
    fit(first, callback, batches=3)
    resumed, again = model_of(seed=2), hvd.callbacks.DiLoCoCallback(2)
    again.load_state_dict(callback.state_dict())
    resumed.set_weights(first.get_weights())
    assert all(np.array_equal(*each) for each in zip(fit(first, callback), fit(resumed, again)))
    first.layers[-1].trainable = False
    first.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    before = first.get_weights()
    assert all(np.array_equal(*each) for each in zip(before, fit(first, callback)))


def refuses():
    rank, make = hvd.rank(), hvd.callbacks.DiLoCoCallback
    for arguments in ((0,), (1, -0.5), (1, 0.7, -1)):
        with pytest.raises(ValueError, match="HVD238"):
            make(*arguments)
    with pytest.raises(hvd.HvdMismatchError, match="rank 1 has sync_every=3.*same settings.*HVD301"):
        fit(model_of(), make(2 + rank))
    with pytest.raises(hvd.HvdMismatchError, match=r"rank 1 has kernel float32\[4, 3\]"):
        fit(model_of(*[keras.layers.Dense(3)] * rank), make(2))
    with pytest.raises(ValueError, match="averages the gradients of all its ranks already.*HVD224"):
        fit(model_of(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), make(2))
    model, callback = model_of(), make(2, compression=hvd.Compression.bf16)
    fit(model, callback)
    with pytest.raises(ValueError, match=r"the model has kernel float32\[4, 5\], the state has .*new callback.*HVD239"):
        fit(model_of(keras.layers.Dense(5)), callback)
    model.set_weights([each + 1 for each in model.get_weights()])
    with pytest.raises(ValueError, match=f"on rank {rank}: kernel .*not what the last exchange has left.*HVD239"):
        fit(model, callback)


def program():
    for check in (equals_synchronous_training, equals_numpy, uneven_batches_end, goes_on_with_the_same_bits, refuses):
        check()


if __name__ == "__main__":
    hvd.init()
    program()
    print("all local")
