"""What tests of training with TensorFlow and Keras share: real digits, a model, a look at all ranks' weights."""

import numpy as np


def digits(count=64 * 20):
    """Real digits: (images, labels) of the whole job; a rank takes its half of every 64."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images[:count] / 16).astype("float32"), labels[:count]


def mine(array, rank, size, batch=64):
    """The rows of every global batch that are this rank's."""
    rows = array.reshape(-1, size, batch // size, *array.shape[1:])
    return rows[:, rank].reshape(-1, *array.shape[1:])


def model_of(seed=1):
    """A small model, the same on every rank."""
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])


def compiled(model, optimizer, **more):
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"], **more)
    return model


def the_same_everywhere(weights):
    """Bit by bit on all ranks."""
    import hvdlite.tensorflow as hvd

    block = b"".join(np.asarray(each).tobytes() for each in weights)
    assert len(set(hvd.allgather_object(block))) == 1


FIT = {"batch_size": 32, "shuffle": False, "verbose": 0}
