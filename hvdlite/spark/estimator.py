"""Base of the estimators: write a DataFrame to Parquet, train on it on ranks, return a model.

An estimator of a framework says how a rank trains (`train`), how its checkpoint is read (`opened`), and how it predicts
(`predicted`). It is one of pyspark.ml's, as its model is, so both may be stages of a Pipeline. Columns of pyspark.ml's
vectors become arrays. The model's outputs become columns named `<label>__output`, as in Horovod: numbers, or arrays.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from ..executors import driver
from . import placed, run
from .rows import Rows, array_of, column_of
from .store import Store

for _name in ("pyspark", "pyarrow", "pandas"):  # pandas: Spark's mapInArrow asks for it
    driver.library(_name, "spark")
_ml = import_module("pyspark.ml")
TRAIN, VALIDATION, CHECKPOINT = "train", "validation", "checkpoint"
_INPUT = "hvdlite_input_{}"  # columns that the model reads, beside those of the DataFrame


class Estimator(_ml.Estimator):  # type: ignore[name-defined, misc]
    """Base class of ``TorchEstimator`` and ``KerasEstimator``: trains a model on a DataFrame, with one rank per task.

    It writes the DataFrame to Parquet in the store. ``fit(df)`` returns a model with ``transform(df)``, which adds
    columns named ``<label>__output``. Both are stages of a ``pyspark.ml`` Pipeline.

    Args:
        model: the model of the framework. Model, optimizer, loss and metrics are the framework's.
        feature_cols (list of str): the columns that the model reads.
        label_cols (list of str): the columns that it predicts.
        store (Store): the folder for data and checkpoints.
        num_proc (int, optional): the number of ranks. None: as many tasks as the cluster runs at once.
        optimizer: the optimizer.
        loss: the loss, or one for each label.
        loss_weights (list of float, optional): the weight of each label's loss.
        metrics (list): metrics.
        gradient_compression (Compressor, optional): the form in which gradients travel.
        input_shapes (list, optional): the shape of a batch of each feature, such as ``[-1, 1, 28, 28]``.
        custom_objects (dict, optional): classes and functions that Keras must know.
        callbacks (list): callbacks of Keras.
        validation (float or str, optional): a share of the rows, or the name of a column that marks them.
        batch_size (int): rows per batch on each rank. Default: 32.
        val_batch_size (int, optional): rows per validation batch. None: ``batch_size``.
        epochs (int): the number of epochs. Default: 1.
        shuffle (bool): shuffle the rows of each rank. Default: True.
        random_seed (int): the seed. Default: 0.
        verbose (int): how much is printed. Default: 1.
        run_id (str, optional): the name of the run's folder in the store. None: a new one.
        env (dict, optional): environment variables of the ranks.

    Raises:
        ModuleNotFoundError: pyspark, pyarrow or pandas is not installed.
        ValueError: the arguments do not go together.
    """

    def __init__(
        self,
        *,
        model: Any,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        store: Store,
        num_proc: int | None = None,
        optimizer: Any,
        loss: Any,
        loss_weights: Sequence[float] | None = None,
        metrics: Any = (),
        gradient_compression: Any = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] = (),
        validation: float | str | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        random_seed: int = 0,
        verbose: int = 1,
        run_id: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        args = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        _check(args)
        self.args = args

    model_class: type[Model]

    # On a rank: of what users gave, Rows to train on, Rows to validate on or None, and `save`, to be called after each
    # epoch with what makes a checkpoint. The history, and `row_shapes`.
    train: Callable[..., Any]

    def _fit(self, dataset: Any) -> Model:
        args = self.args
        _, size = placed(args["num_proc"])
        run_id = args["run_id"] or f"run_{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(3)}"
        names = [*args["feature_cols"], *args["label_cols"]]  # a column may be both
        chosen = [_plain(dataset, name).alias(name) for name in dict.fromkeys(names)]
        parts = _parted(dataset, args["validation"], args["random_seed"])
        try:
            for name, part in parts.items():
                flat = part.select(*chosen).repartition(size)
                flat.write.mode("overwrite").parquet(args["store"].url_of(run_id, name))
            sent = self.model_class.sent(args, args["custom_objects"])
            task = partial(_train, type(self).train, sent, run_id, list(parts), names)
            history, shapes = run(task, num_proc=size, env=args["env"])[0]
        finally:
            for name in parts:
                args["store"].delete(run_id, name)
        model = self.model_class.opened(args, args["store"].read(run_id, CHECKPOINT))
        return self.model_class(model, args, history, shapes, run_id)


class Model(_ml.Model):  # type: ignore[name-defined, misc]
    """A trained model. outputs: the shape of each output's row."""

    def __init__(self, model: Any, args: Mapping[str, Any], history: Any, outputs: Any, run_id: str) -> None:
        super().__init__()
        self._model, self._history, self.run_id, self._shapes = model, history, run_id, args["input_shapes"]
        self._features, self._custom = list(args["feature_cols"]), args["custom_objects"]
        self._outputs = dict(zip([f"{label}__output" for label in args["label_cols"]], outputs))

    opened: Callable[..., Any]  # the framework's model: of what users gave, and a checkpoint
    predicted: Callable[..., Any]  # a list of outputs, of arrays: of the model, and a list of inputs

    @staticmethod
    def sent(value: Any, custom_objects: Mapping[str, Any] | None) -> Any:
        """What becomes this value where it is unpickled."""
        return value

    def getModel(self) -> Any:
        """The framework's model."""
        return self._model

    def getHistory(self) -> Any:
        """What was measured in each epoch."""
        return self._history

    def _transform(self, dataset: Any) -> Any:
        from pyspark.sql import types

        inputs = [_plain(dataset, name).alias(_INPUT.format(index)) for index, name in enumerate(self._features)]
        dataset = dataset.select("*", *inputs).drop(*self._outputs)  # of an earlier transform
        fields = dataset.schema.fields[: -len(inputs)]
        names = [field.name for field in fields]
        for name, shape in self._outputs.items():
            kind: Any = types.FloatType()
            for _ in shape:
                kind = types.ArrayType(kind)
            fields.append(types.StructField(name, kind))
        model = self.sent(self._model, self._custom)
        task = partial(_predict, type(self).predicted, model, self._shapes, self._features, self._outputs, names)
        numbered = dataset.toDF(*map(str, range(len(dataset.columns))))  # Spark's mapInArrow takes no names with dots
        return numbered.mapInArrow(task, types.StructType(fields))


def _check(args: Mapping[str, Any]) -> None:
    """Raises ValueError. Lists that go together must be alike long: a zip would leave out what is more."""
    for name in ("feature_cols", "label_cols"):
        if not args[name] or isinstance(args[name], str):
            raise ValueError(f"{name}={args[name]!r}: must be a list of names of columns [HVD240]")
    for name in ("epochs", "batch_size"):
        if args[name] < 1:
            raise ValueError(f"{name}={args[name]!r}: must be at least 1 [HVD240]")
    for name, of in (("loss", "label_cols"), ("loss_weights", "label_cols"), ("input_shapes", "feature_cols")):
        counts = {len(args[of])} | ({1} if name == "loss" else set())
        if isinstance(args[name], (list, tuple)) and len(args[name]) not in counts:
            raise ValueError(f"{name} has {len(args[name])} entries, for {len(args[of])} {of} [HVD240]")
    validation = args["validation"]
    if not (validation is None or isinstance(validation, str) or 0 < validation < 1):
        text = "must be a share of the rows, between 0 and 1, or the name of a column"
        raise ValueError(f"validation={validation!r}: {text} [HVD240]")


def _parted(dataset: Any, validation: float | str | None, seed: int) -> dict[str, Any]:
    if validation is None:
        return {TRAIN: dataset}
    if isinstance(validation, str):
        chosen = _column(dataset, validation).cast("boolean")
        if not dataset.filter(chosen.isNull()).isEmpty():
            raise ValueError(f"column {validation} has nulls: mark each row as training or validation [HVD240]")
        return {TRAIN: dataset.filter(~chosen), VALIDATION: dataset.filter(chosen)}
    return dict(zip((TRAIN, VALIDATION), dataset.randomSplit([1 - validation, validation], seed)))


def _plain(dataset: Any, name: str) -> Any:
    """The column, with vectors as arrays."""
    from pyspark.ml.functions import vector_to_array

    column = _column(dataset, name)
    return vector_to_array(column) if dataset.schema[name].dataType.typeName() == "vectorudt" else column


def _column(dataset: Any, name: str) -> Any:
    """Its name may have dots in it."""
    if name not in dataset.columns:
        raise ValueError(f"no column {name} is among {', '.join(dataset.columns)} [HVD240]")
    return dataset["`" + name.replace("`", "``") + "`"]


def _train(train: Any, args: dict[str, Any], run_id: str, parts: list[str], names: list[str]) -> Any:
    """On a rank."""
    import hvdlite as hvd

    hvd.init()
    store: Store = args["store"]
    rows = [Rows(store, (run_id, part), names, hvd.rank(), hvd.size()) for part in parts]

    def save(checkpoint: Callable[[], bytes]) -> None:
        if hvd.rank() == 0:
            store.write(checkpoint(), run_id, CHECKPOINT)

    return train(args, rows[0], rows[1] if len(rows) > 1 else None, save)


def _predict(
    predicted: Any,
    model: Any,
    shapes: Any,
    features: list[str],
    outputs: dict[str, Any],
    names: list[str],
    batches: Iterator[Any],
) -> Iterator[Any]:
    """In a worker of Spark's: record batches with the outputs in the place of the inputs. names: of what stays."""
    import pyarrow

    inputs = len(features)
    for batch in batches:
        if not len(batch):
            continue
        arrays = [array_of(column, name) for column, name in zip(batch.columns[-inputs:], features)]
        found = outputs_of(predicted(model, shaped(arrays, shapes)), list(outputs))
        columns = [column_of(each.reshape(len(batch), *shape)) for each, shape in zip(found, outputs.values())]
        yield pyarrow.RecordBatch.from_arrays([*batch.columns[:-inputs], *columns], names=[*names, *outputs])


def shaped(arrays: Sequence[np.ndarray[Any, Any]], shapes: Sequence[Sequence[int]] | None) -> list[Any]:
    """The features as the model takes them."""
    return list(arrays) if shapes is None else [array.reshape(tuple(each)) for array, each in zip(arrays, shapes)]


def row_shapes(outputs: Sequence[Any]) -> list[tuple[int, ...]]:
    """Of each output: the shape of one row; a row of one number is a number."""
    return [() if tuple(output.shape[1:]) == (1,) else tuple(output.shape[1:]) for output in outputs]


def outputs_of(value: Any, labels: Sequence[str]) -> list[Any]:
    """The model's outputs. Raises ValueError where they are not one for each label."""
    found = listed(value)
    if len(found) != len(labels):
        raise ValueError(f"the model has {len(found)} outputs, for the labels {', '.join(labels)} [HVD240]")
    return found


def listed(value: Any) -> list[Any]:
    """One thing or a list of them."""
    return list(value) if isinstance(value, (list, tuple)) else [value]
