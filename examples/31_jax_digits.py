"""Trains a dense network with JAX and optax. The exchange of gradients is a part of the compiled step.

    hvdlite-run -np 2 python examples/31_jax_digits.py             # pip install "hvdlite[jax]" scikit-learn
    python examples/31_jax_digits.py                               # the same program on one rank

Each rank begins with other weights and reads other rows. `broadcast_parameters` gives all ranks those of rank 0. The
data are the 1797 digits of scikit-learn. A program for one process lacks only the lines marked `hvdlite`.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

import hvdlite.jax as hvd  # hvdlite


def network(params, images):
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs
    hvd.init()  # hvdlite
    images, labels = shuffle(*load_digits(return_X_y=True), random_state=0)  # the same on every rank
    images = (images / 16).astype("float32")
    x, y = hvd.data.shard((images[:-360], labels[:-360]), uneven="drop")  # hvdlite: this rank's rows
    keys = jax.random.split(jax.random.key(hvd.rank()), 3)
    sizes, he = (64, 128, 64, 10), jax.nn.initializers.he_normal()
    params = [{"w": he(key, (n, m)), "b": jnp.zeros(m)} for key, n, m in zip(keys, sizes, sizes[1:])]
    params = hvd.broadcast_parameters(params)  # hvdlite: all start from the same weights
    optimizer = hvd.DistributedGradientTransformation(optax.adam(2e-3))  # hvdlite
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y):
        cost = lambda p: optax.softmax_cross_entropy_with_integer_labels(network(p, x), y).mean()  # noqa: E731
        loss, grads = jax.value_and_grad(cost)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, hvd.allreduce(loss, name="loss")  # hvdlite

    random, batches = np.random.default_rng(hvd.rank()), len(x) // 32
    for epoch in range(epochs):
        for rows in random.permutation(len(x))[: batches * 32].reshape(batches, -1):
            params, state, loss = step(params, state, x[rows], y[rows])
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}  loss {float(loss):.4f}", flush=True)
    hvd.check_consistency((params, state))  # hvdlite: the same bits on all ranks
    right = (network(params, images[-360:]).argmax(1) == labels[-360:]).mean()
    if hvd.rank() == 0:
        print(f"test accuracy {float(right):.2%} on {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
