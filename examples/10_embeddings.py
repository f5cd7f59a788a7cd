"""Trains embeddings in TensorFlow with sparse gradients: only the rows that a batch touches travel.

    hvdlite-run -np 2 python examples/10_embeddings.py
    hvdlite-run -np 2 python examples/10_embeddings.py --sparse-as-dense

The text is synthetic: word 2k is followed by word 2k + 1. A table of embeddings and a linear layer learn to predict the
next word. With tf.IndexedSlices each rank sends the rows of its words. With dense gradients it sends the whole table.
"""

import argparse

import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sparse-as-dense", action="store_true")
    args = parser.parse_args()
    hvd.init()
    tf.random.set_seed(hvd.rank())
    random = np.random.RandomState(hvd.rank())  # each rank reads its own text

    table = tf.Variable(tf.random.normal([args.words, 16]), name="table")
    linear = tf.Variable(tf.random.normal([16, args.words]) * 0.1, name="linear")
    hvd.broadcast_variables([table, linear], root_rank=0)

    @tf.function
    def step(words, following):
        with tf.GradientTape() as tape:
            logits = tf.gather(table, words) @ linear
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=following, logits=logits)
            loss = tf.reduce_mean(losses)
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=args.sparse_as_dense)
        of_table, of_linear = tape.gradient(loss, [table, linear])
        if isinstance(of_table, tf.IndexedSlices):  # the rows of every rank; rows of the same word are added
            table.scatter_sub(tf.IndexedSlices(20.0 * of_table.values, of_table.indices))
        else:
            table.assign_sub(20.0 * of_table)
        linear.assign_sub(20.0 * of_linear)
        return loss

    for number in range(args.steps):
        words = random.randint(0, args.words // 2, 64) * 2
        loss = step(tf.constant(words), tf.constant(words + 1))
        if hvd.rank() == 0 and number % 100 == 0:
            print(f"step {number} loss {float(loss):.4f}", flush=True)
    everything = hvd.allgather_object((table.numpy().tobytes(), linear.numpy().tobytes()))
    if hvd.rank() == 0:
        words = np.arange(0, args.words, 2)
        right = tf.argmax(tf.gather(table, words) @ linear, axis=1).numpy() == words + 1
        print(
            f"test accuracy {100 * right.mean():.2f}%; ranks have the same bits: {len(set(everything)) == 1}",
            flush=True,
        )


if __name__ == "__main__":
    main()
