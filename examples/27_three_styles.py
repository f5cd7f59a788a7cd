"""One model in three styles of data-parallel training: by hand, with a wrapped optimizer, and inside a scope.

    hvdlite-run -np 2 python examples/27_three_styles.py --framework torch
    hvdlite-run -np 2 python examples/27_three_styles.py --framework keras

Each style trains the same small model on scikit-learn's digits and prints a digest of its weights. With two ranks all
digests of a framework are equal. With more ranks, sums are rounded in another order from style to style, and the scope
of Keras divides the loss and not the sum: digests may differ, but are the same on all ranks.
"""

import argparse
import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
BATCH, STEPS = 48, 20  # rows of all ranks together


def data() -> "tuple[np.ndarray, np.ndarray]":
    images, labels = load_digits(return_X_y=True)
    rows = BATCH * STEPS
    return (images[:rows] / 16).astype("float32"), labels[:rows].astype("int64")


def digest(weights: Iterable[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in weights)).hexdigest()[:12]


def train_torch() -> dict[str, str]:
    """The digest of each style in PyTorch."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import hvdlite.torch as hvd  # hvdlite

    hvd.init()  # hvdlite
    dataset = TensorDataset(*map(torch.from_numpy, data()))

    def made() -> "tuple[nn.Module, torch.optim.Optimizer]":
        torch.manual_seed(hvd.rank())  # the ranks begin with different weights, as scripts without a seed do
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def share() -> Any:
        for images, labels in DataLoader(dataset, batch_size=BATCH):
            yield images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]  # hvdlite

    def loop(model: nn.Module, optimizer: Any, batches: Any, average: Callable[[], object] = lambda: None) -> str:
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            average()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return digest(each.detach().numpy() for each in model.parameters())

    def manual() -> str:
        model, optimizer = made()
        hvd.broadcast_state(model, optimizer)  # hvdlite

        def average() -> None:
            for name, parameter in model.named_parameters():
                parameter.grad = hvd.allreduce(parameter.grad, name=name)  # hvdlite

        return loop(model, optimizer, share(), average)

    def wrapped() -> str:
        model, optimizer = made()
        hvd.broadcast_state(model, optimizer)  # hvdlite
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # hvdlite
        return loop(model, optimizer, share())

    def scoped() -> str:
        model, optimizer = made()
        loader = DataLoader(dataset, batch_size=BATCH)
        with hvd.scope(model, optimizer, loader) as (model, optimizer, loader):  # hvdlite
            return loop(model, optimizer, loader)

    return {style.__name__: style() for style in (manual, wrapped, scoped)}


def train_keras() -> dict[str, str]:
    """The digest of each style in Keras 3 on TensorFlow."""
    import keras
    import tensorflow as tf

    import hvdlite.keras
    import hvdlite.tensorflow as hvd  # hvdlite

    hvd.init()  # hvdlite
    images, labels = data()
    rows = np.arange(BATCH * STEPS).reshape(STEPS, hvd.size(), -1)[:, hvd.rank()].ravel()  # of each batch a run
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def made() -> "tuple[keras.Model, keras.optimizers.Optimizer]":
        keras.utils.set_random_seed(hvd.rank())
        layers = keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(10)
        model, optimizer = keras.Sequential([keras.layers.Input((64,)), *layers]), keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def stepper(model: Any, optimizer: Any, divisor: int, change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(y, model(x))) / divisor
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(change(tape).gradient(loss, variables), variables))

        return step

    def loop(model: Any, optimizer: Any, change: Callable[[Any], Any] = lambda tape: tape) -> str:
        hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)  # hvdlite
        step = tf.function(stepper(model, optimizer, BATCH // hvd.size(), change))
        for x, y in tf.data.Dataset.from_tensor_slices((images[rows], labels[rows])).batch(BATCH // hvd.size()):
            step(x, y)
        return digest(model.get_weights())

    class Averages:
        """The tape's gradients, averaged by hand."""

        def __init__(self, tape: Any) -> None:
            self.tape = tape

        def gradient(self, loss: Any, variables: Any) -> Any:
            return [hvd.allreduce(each) for each in self.tape.gradient(loss, variables)]  # hvdlite

    def manual() -> str:
        return loop(*made(), Averages)

    def tape() -> str:
        return loop(*made(), hvd.DistributedGradientTape)  # hvdlite

    def wrapped() -> str:
        model, optimizer = made()
        return loop(model, hvdlite.keras.DistributedOptimizer(optimizer))  # hvdlite

    def scoped() -> str:
        strategy = hvd.Strategy()  # hvdlite
        with strategy.scope():
            model, optimizer = made()
        step = stepper(model, optimizer, BATCH, lambda tape: tape)  # the strategy sums: the loss is of the global batch
        whole = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
        batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH)
        for x, y in strategy.experimental_distribute_dataset(batches):
            whole(x, y)
        return digest(model.get_weights())

    return {style.__name__: style() for style in (manual, tape, wrapped, scoped)}


def main() -> None:
    """Train in each style, and print on rank 0 what came out."""
    parser = argparse.ArgumentParser(description="Train one model in each style.")
    parser.add_argument("--framework", choices=("torch", "keras"), default="torch")
    framework = parser.parse_args().framework
    digests = train_torch() if framework == "torch" else train_keras()
    import hvdlite

    everyone = hvdlite.allgather_object(digests)
    if hvdlite.rank() == 0:
        for style, found in digests.items():
            print(f"{style}: {found}, on all ranks: {all(each[style] == found for each in everyone)}", flush=True)


if __name__ == "__main__":
    main()
