"""`KerasEstimator(model=..., optimizer=..., loss=..., ...).fit(df)`: how does a model of Keras 3 train on a DataFrame?

The arguments are those of the estimator for PyTorch (torch.py), where `optimizer`, `loss`, `loss_weights` and `metrics`
are what model.compile takes. `callbacks` are called on all ranks, after ours: rank 0's weights go to all at the start,
and metrics are averaged over ranks. The backend is Keras's, TensorFlow or PyTorch (KERAS_BACKEND; `env` gives it to the
ranks). A model with several features or labels takes and gives them in the order of the columns.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from . import estimator
from .rows import Rows

_SUFFIX = ".keras"


class KerasModel(estimator.Model):
    """What KerasEstimator's `fit` gives."""

    @staticmethod
    def opened(given: Mapping[str, Any], checkpoint: bytes) -> Any:
        """The model of rank 0."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model" + _SUFFIX)
            with open(path, "wb") as file:
                file.write(checkpoint)
            return keras.saving.load_model(path, custom_objects=given["custom_objects"], compile=False)

    @staticmethod
    def predicted(model: Any, inputs: Sequence[np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        """Its outputs."""
        return [np.asarray(each) for each in estimator.listed(model.predict_on_batch(_one_or_all(inputs)))]


class KerasEstimator(estimator.Estimator):
    """Trains on all ranks, and gives a KerasModel. Arguments: estimator.Estimator."""

    model_class = KerasModel

    @staticmethod
    def train(given: dict[str, Any], rows: Rows, validation: Rows | None, save: Callable[..., None]) -> Any:
        """On a rank."""
        import hvdlite.keras as hvd

        keras.utils.set_random_seed(given["random_seed"] + hvd.rank())
        model, size = given["model"], given["batch_size"]
        compression = given["gradient_compression"] or hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(keras.optimizers.get(given["optimizer"]), compression=compression)
        metrics = list(given["metrics"]) or None
        model.compile(optimizer=optimizer, loss=given["loss"], loss_weights=given["loss_weights"], metrics=metrics)
        kept = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: save(lambda: _saved(model)))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        judged: dict[str, Any] = {}
        if validation is not None:
            each = given["val_batch_size"] or size
            judged = {"validation_data": _batches(given, validation, each, None)}
            judged["validation_steps"] = -(-validation.count // each)
        history = model.fit(
            _batches(given, rows, size, given["random_seed"] if given["shuffle"] else None),
            steps_per_epoch=-(-rows.count // size),
            epochs=given["epochs"],
            callbacks=[*callbacks, *given["callbacks"], kept],
            verbose=given["verbose"] if hvd.rank() == 0 else 0,
            **judged,
        )
        return history.history, estimator.row_shapes(estimator.listed(model.outputs))


def _batches(given: Mapping[str, Any], rows: Rows, size: int, seed: int | None) -> Iterator[tuple[Any, Any]]:
    """Of one epoch after the other, without end: inputs and labels."""
    features = len(given["feature_cols"])
    while True:
        for batch in rows.batches(size, seed):
            inputs = estimator.shaped(batch[:features], given["input_shapes"])
            yield _one_or_all(inputs), _one_or_all(batch[features:])
        seed = None if seed is None else seed + 1


def _one_or_all(arrays: Sequence[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _saved(model: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model" + _SUFFIX)
        model.save(path)
        with open(path, "rb") as file:
            return file.read()
