"""Embedding layer on a parameter-server table for Keras, and the callback that ends its steps.

    table = hvd.ps.Table("users", rows=50_000_000, dim=64, optimizer=hvd.ps.Adagrad(lr=0.05))
    model = keras.Sequential([keras.Input((4,), dtype="int64"), hvd.ps.Embedding(table), ...])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), ...)
    model.fit(..., callbacks=[hvd.ps.Step([table])])

On TensorFlow rows are pulled and pushed by numpy functions, in graphs too. XLA has none: Keras sees that and compiles
without, your own tf.function must say jit_compile=False. The layer has one weight there, a scalar that stays 0: without
a weight that is trained TensorFlow would ask for no gradient. On PyTorch it is the layer of hvdlite.torch.ps.

A saved model holds the table's name; rows are saved by table.save. Make the table before the model is loaded. All names
of hvdlite.ps are here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np

from .. import ps as _tables
from ..errors import HvdNotYetError
from ..ps import *  # noqa: F403
from ..ps import cluster as _serving
from .backend import backend, keras

if backend() == "jax":
    raise HvdNotYetError(
        "tables of parameter servers are not supported where Keras runs on JAX: set KERAS_BACKEND=tensorflow or "
        "KERAS_BACKEND=torch before you import keras [HVD246]"
    )
_on_tensorflow = backend() == "tensorflow"
_framework: Any = import_module(backend())
_Layer: Any = keras.layers.Layer
_Callback: Any = keras.callbacks.Callback


@keras.saving.register_keras_serializable(package="hvdlite")  # type: ignore[untyped-decorator]
class Embedding(_Layer):
    """Keras layer that looks up rows of a table on servers, as ``keras.layers.Embedding(rows, dim)`` does.

    It pulls the rows of a batch and pushes their gradients. On TensorFlow it cannot be compiled by XLA. A saved model
    has only the table's name, so make the table before the model is loaded::

        table = hvd.ps.Table("users", rows=50_000_000, dim=64, optimizer=hvd.ps.Adagrad(lr=0.05))
        model = keras.Sequential([keras.Input((4,), dtype="int64"), hvd.ps.Embedding(table), ...])

    Args:
        table (hvdlite.ps.Table): the table.
        mask_zero (bool): the layers that follow leave out places with id 0, as with ``keras.layers.Embedding``.
        more: arguments of ``keras.layers.Layer``.

    Raises:
        ValueError: the layer computes in float16, whose loss scale would be pushed with the gradients.
    """

    def __init__(self, table: Any, mask_zero: bool = False, **more: Any) -> None:
        super().__init__(**more)
        if self.compute_dtype == "float16":
            raise ValueError(
                f"Embedding on table {table.name!r}: float16 needs loss scaling, which parameter servers do not "
                "support: train in mixed_bfloat16, or pass dtype='float32' to the layer and compile with "
                "auto_scale_loss=False [HVD025]"
            )
        self.table, self.supports_jit = table, False
        self.mask_zero = self.supports_masking = mask_zero

    def build(self, shape: Any) -> None:
        """Makes the weight that asks for gradients."""
        if _on_tensorflow:
            self.anchor = self.add_weight(shape=(), initializer="zeros", name="anchor")
        self.built = True

    def compute_output_shape(self, shape: Any) -> tuple[Any, ...]:
        """That of ids, and dim."""
        return (*shape, self.table.dim)

    def compute_mask(self, ids: Any, mask: Any = None) -> Any:
        """Where ids are not 0. None: everywhere."""
        return keras.ops.not_equal(ids, 0) if self.mask_zero else None

    def call(self, ids: Any) -> Any:
        """The rows of these ids."""
        if _on_tensorflow:
            return _rows(self.table, ids, self.anchor, self.trainable, self.compute_dtype)
        dtype = getattr(_framework, self.compute_dtype)
        if ids.is_meta:  # Keras asks for the shape
            return _framework.empty((*ids.shape, self.table.dim), dtype=dtype, device="meta")
        rows = import_module("hvdlite.torch.ps").Embedding(self.table)(ids).to(dtype)
        return rows if self.trainable else rows.detach()

    def get_config(self) -> dict[str, Any]:
        """Of the table its name."""
        return {**super().get_config(), "table": self.table.name, "mask_zero": self.mask_zero}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Make a layer from a config, on the table of this job with the name in it.

        Raises:
            ValueError: the job has no table of this name.
        """
        made = _serving.current()
        for table in made.tables if made is not None else ():
            if table.name == config["table"]:
                return cls(**{**config, "table": table})
        raise ValueError(
            f"layer {config.get('name')!r} looks up rows of table {config['table']!r}, which this job does not have: "
            "create the table before you load the model [HVD034]"
        )


def _rows(table: Any, ids: Any, anchor: Any, trainable: bool, dtype: str) -> Any:
    """The lookup in TensorFlow's terms."""
    tf = _framework

    def pull(numbers: Any) -> Any:
        some, back = np.unique(table.checked_ids(numbers), return_inverse=True)
        return table.pull_unique(some)[back.reshape(numbers.shape)]

    def push(numbers: Any, grads: Any) -> Any:
        if not table.is_frozen:
            table.push_async(numbers, grads)
        return np.float32(0)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def lookup(anchor: Any) -> Any:
        rows = tf.ensure_shape(tf.numpy_function(pull, [ids], tf.float32), [*ids.shape, table.dim])
        return rows, lambda grads: tf.ensure_shape(tf.numpy_function(push, [ids, grads], tf.float32), [])

    anchor = tf.cast(anchor, tf.float32)
    return tf.cast(lookup(anchor if trainable else tf.stop_gradient(anchor)), dtype)


class Step(_Callback):
    """Callback that ends this rank's step of some tables after each batch.

    While a model is tested or predicts, the tables are frozen. A table's learning rate follows that of the model by a
    callback of Keras::

        def follow(batch, logs):
            table.lr = float(model.optimizer.learning_rate)

        calls = [hvd.ps.Step([table]), keras.callbacks.LambdaCallback(on_train_batch_end=follow)]
        model.fit(x, y, callbacks=calls)

    Args:
        tables (list of hvdlite.ps.Table): the tables.

    Raises:
        ValueError: when training starts, ``steps_per_execution`` is above 1.
    """

    def __init__(self, tables: Iterable[Any]) -> None:
        super().__init__()
        self.tables, self._frozen = list(tables), contextlib.ExitStack()

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks whether each batch has an end of its own."""
        self._frozen.close()
        at_once = int(getattr(self.model, "steps_per_execution", None) or self.model._steps_per_execution)
        if at_once > 1:
            raise ValueError(
                f"hvd.ps.Step: steps_per_execution={at_once} ends {at_once} batches at once, but each batch is a "
                "step of the tables: compile with steps_per_execution=1 [HVD036]"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The step is over."""
        _tables.step(*self.tables)

    def on_test_begin(self, logs: Any = None) -> None:
        """Rows are read only."""
        for table in self.tables:
            self._frozen.enter_context(table.frozen())

    def on_test_end(self, logs: Any = None) -> None:
        """They are pushed again."""
        self._frozen.close()

    on_predict_begin, on_predict_end = on_test_begin, on_test_end


__all__ = [*_tables.__all__, "Embedding", "Step"]
