"""`KerasEstimator(model=..., optimizer=..., loss=..., ...).fit(df)`: train a model of Keras 3 on a DataFrame.

The arguments are those of the estimator for PyTorch (torch.py), where `optimizer`, `loss`, `loss_weights` and `metrics`
are what model.compile takes. `callbacks` are called on all ranks, after ours: rank 0's weights go to all at the start,
and metrics are averaged over ranks. The backend is Keras's, TensorFlow or PyTorch (KERAS_BACKEND; `env` gives it to the
ranks). A model with several features or labels takes and gives them in the order of the columns. What is in
`custom_objects` is known wherever the model is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import keras
import numpy as np

from . import estimator
from .rows import Rows

_SUFFIX = ".keras"


class KerasModel(estimator.Model):
    """The model that ``KerasEstimator.fit`` returns. ``getModel()`` is the Keras model."""

    @staticmethod
    def sent(value: Any, custom_objects: Mapping[str, Any] | None) -> Any:
        """Models in it are unpickled where their classes are known."""
        return _Sent(value, dict(custom_objects or {}))

    @staticmethod
    def opened(args: Mapping[str, Any], checkpoint: bytes) -> Any:
        """The model of rank 0."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model" + _SUFFIX)
            with open(path, "wb") as file:
                file.write(checkpoint)
            return keras.saving.load_model(path, custom_objects=args["custom_objects"], compile=False)

    @staticmethod
    def predicted(model: Any, inputs: Sequence[np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        """Its outputs."""
        return [np.asarray(each) for each in estimator.listed(model.predict_on_batch(_one_or_all(inputs)))]


class KerasEstimator(estimator.Estimator):
    """Train a Keras 3 model on a DataFrame. The arguments are those of ``Estimator``.

    ``optimizer``, ``loss``, ``loss_weights`` and ``metrics`` are those of ``model.compile``.
    """

    model_class = KerasModel

    @staticmethod
    def train(args: dict[str, Any], rows: Rows, validation: Rows | None, save: Callable[..., None]) -> Any:
        """On a rank."""
        with keras.saving.custom_object_scope(args["custom_objects"] or {}):
            history = _fitted(args, rows, validation, save)
        outputs = KerasModel.predicted(args["model"], _inputs(args, next(rows.batches(1))))
        return history, estimator.row_shapes(estimator.outputs_of(outputs, args["label_cols"]))


class _Sent:
    """A value, with what Keras must know where it is unpickled."""

    def __init__(self, value: Any, custom_objects: dict[str, Any]) -> None:
        self._value, self._custom_objects = value, custom_objects

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._custom_objects, cloudpickle.dumps(self._value))


def _received(custom_objects: dict[str, Any], data: bytes) -> Any:
    with keras.saving.custom_object_scope(custom_objects):
        return cloudpickle.loads(data)


def _fitted(args: dict[str, Any], rows: Rows, validation: Rows | None, save: Callable[..., None]) -> Any:
    import hvdlite.keras as hvd

    keras.utils.set_random_seed(args["random_seed"] + hvd.rank())
    model, size = args["model"], args["batch_size"]
    compression = args["gradient_compression"] or hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(keras.optimizers.get(args["optimizer"]), compression=compression)
    if hasattr(model, "outputs"):  # else it is known once it was called
        estimator.outputs_of(model.outputs, args["label_cols"])
    metrics = args["metrics"] or None
    model.compile(optimizer=optimizer, loss=args["loss"], loss_weights=args["loss_weights"], metrics=metrics)
    kept = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: save(lambda: _saved(model)))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    judged: dict[str, Any] = {}
    if validation is not None:
        each = args["val_batch_size"] or size
        judged = {"validation_data": _batches(args, validation, each, None)}
        judged["validation_steps"] = -(-validation.count // each)
    history = model.fit(
        _batches(args, rows, size, args["random_seed"] if args["shuffle"] else None),
        steps_per_epoch=-(-rows.count // size),
        epochs=args["epochs"],
        callbacks=[*callbacks, *args["callbacks"], kept],
        verbose=args["verbose"] if hvd.rank() == 0 else 0,
        **judged,
    )
    return history.history


def _batches(args: Mapping[str, Any], rows: Rows, size: int, seed: int | None) -> Iterator[tuple[Any, Any]]:
    """Of one epoch after the other, without end: inputs and labels."""
    while True:
        for batch in rows.batches(size, seed):
            yield _one_or_all(_inputs(args, batch)), _one_or_all(batch[len(args["feature_cols"]) :])
        seed = None if seed is None else seed + 1


def _inputs(args: Mapping[str, Any], batch: Sequence[Any]) -> list[Any]:
    return estimator.shaped(batch[: len(args["feature_cols"])], args["input_shapes"])


def _one_or_all(arrays: Sequence[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _saved(model: Any) -> bytes:
    """Without what it was compiled with: a loss may be any function, which Keras cannot save."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model" + _SUFFIX)
        model.compiled = False
        try:
            model.save(path)
        finally:
            model.compiled = True
        with open(path, "rb") as file:
            return file.read()
