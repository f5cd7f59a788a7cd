"""A custom training loop in TensorFlow, with a distributed tape inside tf.function.

    hvdlite-run -np 2 python examples/09_tensorflow_tape.py

The start of a gradient's allreduce and the wait for it are two nodes of the graph, so gradients travel during
backward.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdlite.tensorflow as hvd


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    args = parser.parse_args()
    hvd.init()

    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))  # the same on every rank
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    train = tf.data.Dataset.from_tensor_slices((images[:-360], labels[:-360]))
    train = train.shard(hvd.size(), hvd.rank()).shuffle(1000, seed=hvd.rank())
    train = train.batch(args.batch_size, drop_remainder=True).take((len(images) - 360) // args.batch_size // hvd.size())

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(1e-3 * hvd.size())
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    for epoch in range(args.epochs):
        losses = [step(x, y) for x, y in train]
        loss = hvd.allreduce(tf.add_n(losses) / len(losses), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1} loss {float(loss):.4f}", flush=True)
    if hvd.rank() == 0:
        right = tf.argmax(model(images[-360:]), axis=1).numpy() == labels[-360:]
        print(f"test accuracy {100 * right.mean():.2f}% on {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
