"""Batch normalization over the batches of all ranks, as a layer of Keras on TensorFlow.

In training the layer needs mean and variance of all ranks' rows. Each rank sends, per channel, the sum and the sum of
squares about its own mean put together as n*mean and n*(variance + mean^2), and n, in float64 and one allreduce, so
ranks may have different numbers of rows, or none. The allreduce has a gradient, hence so has the layer: the exact one
of one process that sees all rows. Everything else is Keras's own. Where no rank has a row the moving statistics stay.

Saved models with this layer open where this module is imported; hvd.load_model imports it. A process set is saved as
its ranks, and must be registered again by then.

The allreduce bears the layer's name without numbers: a rank may have made more layers before.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .. import _core
from ..keras.arguments import check_process_set
from ..keras.backend import keras, legacy
from ..keras.naming import everywhere
from ..ops import Sum
from ..process_sets.process_set import ProcessSet, global_process_set, process_sets
from .ops import allreduce
from .ops.order import once_more


@keras.utils.register_keras_serializable(package="hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization whose statistics in training are those of the batches of all ranks.

    It is ``keras.layers.BatchNormalization`` with one allreduce of float64 sums in the forward pass, and one in the
    backward pass. Ranks may have different numbers of rows. Output and gradient are those of one process with all rows,
    up to rounding. A saved model opens where hvdlite.tensorflow is imported.

    Args:
        fused (bool): Horovod's. It must be False.
        process_set (ProcessSet, optional): the ranks that share their statistics. Default: all.
        more: the arguments of ``keras.layers.BatchNormalization``.

    Raises:
        TypeError: ``process_set`` is not a process set.
        ValueError: ``fused`` is True.

    Example:
        >>> layer = hvd.SyncBatchNormalization()
        >>> layer(tf.constant([[2.0 * hvd.rank()]]), training=True).numpy().round(2).tolist()
        [[-1.0]]  # rank 0
        [[1.0]]  # rank 1
    """

    def __init__(self, fused: bool = False, process_set: ProcessSet = global_process_set, **more: Any) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True. [HVD236]")
        check_process_set(process_set)
        super().__init__(**({"fused": False, **more} if legacy() else more))
        self._hvd_process_set = process_set

    def get_config(self) -> dict[str, Any]:
        """Return Keras's config of the layer, with the ranks of its process set if it is not that of all ranks."""
        members = self._hvd_process_set
        ranks = {} if members is global_process_set else {"process_set": list(members.ranks)}
        return {**super().get_config(), **ranks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Make a layer from a config.

        Raises:
            ValueError: the process set in the config is not registered.
        """
        arguments = dict(config)
        ranks = arguments.pop("process_set", None)
        if ranks is None:
            return cls(**arguments)
        members = next((known for known in process_sets() if list(known.ranks) == list(ranks)), None)
        if members is None:
            raise ValueError(
                f"rank {_core.rank()}: layer {arguments.get('name')!r} was saved with a process set of ranks {ranks}, "
                "which this job does not have: call hvd.add_process_set on all ranks before you open the model "
                "[HVD213]"
            )
        return cls(process_set=members, **arguments)

    def _moments(self, inputs: Any, *how: Any, **more: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, *how, **more)  # Keras 3: a mask; Keras 2: axes, keep_dims, mask
        mask = more.get("mask", how[0] if how and not legacy() else None)
        members = self._hvd_process_set
        if members.size() == 1:
            return mean, variance
        rows = tf.size(inputs) // tf.size(mean)
        if mask is not None and not legacy():  # one value of the mask for all channels of a row
            rows = tf.math.count_nonzero(mask, dtype=tf.int32)
        count = tf.cast(rows, tf.float64)
        wide, deviation = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
        shape = tf.shape(mean)
        parts = tf.concat([tf.reshape(wide, [-1]), tf.reshape(deviation + wide * wide, [-1]), [1.0]], 0)
        parts = tf.math.multiply_no_nan(parts, count)  # the mean of no rows is NaN, and adds nothing
        name = once_more(f"sync_batch_norm.{everywhere(self)}")
        total = allreduce(parts, op=Sum, name=name, process_set=members)
        first, second = tf.split(tf.math.divide_no_nan(total[:-1], total[-1]), 2)
        spread = tf.maximum(second - first * first, 0.0)
        some = total[-1] > 0.0  # else the moving statistics move towards themselves
        first = tf.where(some, first, tf.cast(tf.convert_to_tensor(self.moving_mean), tf.float64))
        spread = tf.where(some, spread, tf.cast(tf.convert_to_tensor(self.moving_variance), tf.float64))
        return (
            tf.cast(tf.reshape(first, shape), mean.dtype),
            tf.cast(tf.reshape(spread, shape), variance.dtype),
        )
