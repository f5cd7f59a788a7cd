"""Flax's MNIST example, changed by four lines so that it trains on as many ranks as you start.

    hvdlite-run -np 2 python examples/32_flax_mnist.py             # pip install "hvdlite[jax]" flax scikit-learn
    python examples/32_flax_mnist.py                               # the same program on one rank

The network, the optimizer and the functions are those of `examples/mnist` in Flax's repository: two convolutions, two
dense layers, SGD with momentum, a `TrainState`, `apply_model` and `update_model`. The data are the 1797 digits of
scikit-learn, put on 28 x 28 pixels, because nothing is downloaded. A script for one process has, in place of the lines
marked `hvdlite`: no `hvd.init()`, all rows instead of `hvd.data.shard`, the plain `optax.sgd`, and no
`hvd.broadcast_parameters`. The other marked lines only print once, and compare the ranks at the end.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import hvdlite.jax as hvd  # hvdlite


class CNN(nn.Module):
    """28 x 28 pixels to the logits of ten digits."""

    @nn.compact
    def __call__(self, x):
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, kernel_size=(3, 3))(x))
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(256)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


@jax.jit
def apply_model(state, images, labels):
    """Gradients, loss and accuracy of one batch."""

    def loss_of(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return grads, loss, jnp.mean(logits.argmax(-1) == labels)


@jax.jit
def update_model(state, grads):
    return state.apply_gradients(grads=grads)  # the transformation averages the gradients here


def create_train_state(key, args):
    model = CNN()
    params = model.init(key, jnp.ones((1, 28, 28, 1)))["params"]
    tx = optax.sgd(args.learning_rate, args.momentum)
    tx = hvd.DistributedGradientTransformation(tx)  # hvdlite
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_epoch(state, data, batch_size, random):
    """One pass over the rows, without those of the last incomplete batch; the means of loss and accuracy."""
    images, labels = data
    order = random.permutation(len(labels))[: len(labels) // batch_size * batch_size]
    metrics = []
    for rows in order.reshape(-1, batch_size):
        grads, *both = apply_model(state, images[rows], labels[rows])
        state = update_model(state, grads)
        metrics.append(both)
    return state, np.mean(metrics, axis=0)


def datasets():
    """Training and test rows: images (n, 28, 28, 1) of float32 in 0..1, and labels."""
    digits = load_digits()
    large = np.kron(digits.images / 16, np.ones((3, 3)))  # 24 x 24
    images = np.pad(large, ((0, 0), (2, 2), (2, 2)))[..., None].astype("float32")
    order = np.random.default_rng(0).permutation(len(images))  # the same on every rank
    images, labels = images[order], digits.target[order]
    return (images[:-360], labels[:-360]), (images[-360:], labels[-360:])


def train_and_evaluate(args):
    train, test = datasets()
    train = hvd.data.shard(train, uneven="drop")  # hvdlite: this rank's rows
    state = create_train_state(jax.random.key(0), args)
    state = hvd.broadcast_parameters(state)  # hvdlite: all start from the same state
    random = np.random.default_rng(0)
    for epoch in range(1, args.epochs + 1):
        state, (loss, accuracy) = train_epoch(state, train, args.batch_size // hvd.size(), random)
        _, test_loss, test_accuracy = apply_model(state, *test)
        if hvd.rank() == 0:  # hvdlite
            print(
                f"epoch {epoch:2}  loss {loss:.4f}  accuracy {accuracy:.2%}  "
                f"test loss {test_loss:.4f}  test accuracy {test_accuracy:.2%}",
                flush=True,
            )
    hvd.check_consistency(state)  # hvdlite: the same bits on all ranks


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--batch-size", type=int, default=128, help="over all ranks together")
    parser.add_argument("--epochs", type=int, default=10)
    hvd.init()  # hvdlite
    train_and_evaluate(parser.parse_args())
