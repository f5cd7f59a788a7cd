"""Trains digits with Keras: `model.fit` on each rank's part of the data, with averaged gradients and metrics.

    hvdlite-run -np 2 python examples/08_keras_digits.py
    hvdlite-run -np 2 python examples/08_keras_digits.py --precision mixed_float16
    KERAS_BACKEND=torch hvdlite-run -np 2 python examples/08_keras_digits.py

The learning rate is that of one rank times the number of ranks, and is reached in the first epoch. Rank 0 saves the
best model.
"""

import argparse
import os
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvdlite.keras as hvd


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--precision", choices=["float32", "mixed_bfloat16", "mixed_float16"], default="float32")
    args = parser.parse_args()
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    keras.mixed_precision.set_dtype_policy(args.precision)

    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))  # the same on every rank
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    held_out = 360
    mine = slice(hvd.rank(), len(images) - held_out, hvd.size())  # every size-th row; the same number on all ranks
    count = (len(images) - held_out) // hvd.size()

    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    rate = 1e-3 * hvd.size()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "best.keras")
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=1),
            hvd.callbacks.BestModelCheckpoint(monitor="val_accuracy", mode="max", filepath=path),
        ]
        model.fit(
            images[mine][:count],
            labels[mine][:count],
            validation_data=(images[-held_out:], labels[-held_out:]),
            batch_size=args.batch_size,
            epochs=args.epochs,
            callbacks=callbacks,
            verbose=2 if hvd.rank() == 0 else 0,
        )
        if hvd.rank() == 0:
            best = keras.models.load_model(path)
            _, accuracy = best.evaluate(images[-held_out:], labels[-held_out:], verbose=0)
            print(f"test accuracy {100 * accuracy:.2f}% of the best epoch, on {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
