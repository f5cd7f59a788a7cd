"""A GradientTape whose gradients are averaged over all ranks: the way of custom training loops.

    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)

The new tape is of a class made of ours and the given one's, and records what that one records; the given tape still has
this rank's own gradients. Each call of `gradient` is a round that every rank of the process set takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..keras.quantized_lists import Residuals
from ..ops import Average
from ..ops.arguments import NoneCompressor
from ..process_sets.process_set import ProcessSet, global_process_set
from .initial_check import data_of_tapes
from .reducer import Reducer

_residuals: dict[ProcessSet, Residuals] = {}


class _Distributed:
    """The methods that a distributed tape has before those of its own class."""

    _hvd: Reducer
    _hvd_local = False  # while a Jacobian is computed, whose rows are gradients
    _hvd_inner: tf.GradientTape

    @property
    def _recording(self) -> bool:
        """Of both: a tape that is given while it records is popped once, by one of them."""
        return self._hvd_inner._recording

    @_recording.setter
    def _recording(self, value: bool) -> None:
        self._hvd_inner._recording = value

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of a variable local: it is not averaged.

        Args:
            source (tf.Variable): the variable.
        """
        self._hvd.register_local(source)

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **more: Any
    ) -> Any:
        """Return the gradients of ``target`` with respect to ``sources``, averaged over all ranks.

        The arguments are those of ``tf.GradientTape.gradient``. All ranks must call it with the same sources.
        """
        if isinstance(use_generic_names, tf.UnconnectedGradients):  # it has this place in TensorFlow's tape
            more["unconnected_gradients"] = use_generic_names
        local = super().gradient(target, sources, output_gradients, **more)  # type: ignore[misc]
        return local if self._hvd_local else self._averaged(local, sources)

    def _averaged(self, local: Any, sources: Any) -> Any:
        return tf.nest.pack_sequence_as(sources, self._hvd(tf.nest.flatten(local), tf.nest.flatten(sources)))

    def _locally(self, compute: Any, *args: Any, **more: Any) -> Any:
        self._hvd_local = True
        try:
            return compute(*args, **more)
        finally:
            self._hvd_local = False

    @tf.autograph.experimental.do_not_convert
    def jacobian(self, target: Any, sources: Any, *args: Any, **more: Any) -> Any:
        """tf.GradientTape.jacobian, averaged as gradients are."""
        return self._averaged(self._locally(super().jacobian, target, sources, *args, **more), sources)  # type: ignore

    @tf.autograph.experimental.do_not_convert
    def batch_jacobian(self, target: Any, source: Any, *args: Any, **more: Any) -> Any:
        """tf.GradientTape.batch_jacobian, averaged as gradients are."""
        return self._averaged(self._locally(super().batch_jacobian, target, source, *args, **more), source)  # type: ignore

    @tf.autograph.experimental.do_not_convert
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Return this rank's gradients, and their averages over all ranks, as two lists."""
        local = tf.nest.flatten(super().gradient(target, sources, output_gradients))  # type: ignore[misc]
        return local, self._hvd(local, tf.nest.flatten(sources))


def DistributedGradientTape(
    gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "", compression: Any = NoneCompressor,
    sparse_as_dense: bool = False, op: int = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True
) -> Any:  # fmt: skip
    """Return a tape like ``gradtape`` whose ``gradient`` averages the gradients over all ranks.

    Each call of ``gradient``, ``jacobian`` or ``batch_jacobian`` is a round of collectives, so all ranks must make it,
    with the same sources. The ranks compare the list first. The given tape still returns this rank's own gradients. The
    new tape has one method more: ``register_local_source(variable)`` keeps the gradient of a variable local.

    Args:
        gradtape (tf.GradientTape): the tape. It may still record.
        compression (Compressor): the form in which gradients travel, such as ``hvd.Compression.fp16``. With ``int8`` or
            ``int4`` large ones are rounded between hosts. Default: none.
        op (int): ``hvd.Average`` (default), ``Sum`` or ``Adasum``, as in ``allreduce``.
        process_set (ProcessSet, optional): average over these ranks. On other ranks gradients stay local. Default: all.
        sparse_as_dense (bool): convert ``tf.IndexedSlices`` to dense tensors before they travel. Default: False, which
            gathers their rows.
        gradient_predivide_factor (float): f divides gradients by f before the sum, and by size / f after it. Only with
            Average. Default: 1.0.
        groups (int or list of lists of tf.Variable, optional): gradients that travel as one group, as the number of
            groups or as lists. Default: none.
        scale_local_gradients (bool): divide local gradients by the number of ranks, so that they have the same scale as
            averages. Default: True.
        num_groups (int): Horovod's old form of ``groups``.
        device_dense, device_sparse (str): accepted for Horovod, without effect.

    Returns:
        A tape of a subclass of the class of ``gradtape``.

    Raises:
        HvdMismatchError: from ``gradient``, the ranks have different gradients.
        TypeError: ``gradtape`` is not a ``tf.GradientTape``, or ``compression`` is not a compressor.
        ValueError: the arguments do not go together.

    Example:
        >>> weight = tf.Variable(1.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = weight * (hvd.rank() + 1.0)
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> float(tape.gradient(loss, weight))
        1.5
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"expected a tf.GradientTape, not {type(gradtape).__name__} [HVD223]")
    base = type(gradtape)
    tape: Any = object.__new__(type(base.__name__, (_Distributed, base), {"__module__": base.__module__}))
    tape.__dict__.update(gradtape.__dict__)
    tape.__dict__.pop("_recording", None)
    tape._hvd_inner = gradtape
    tape._hvd = Reducer(
        "DistributedGradientTape", compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
        process_set, scale_local_gradients,
    )  # fmt: skip
    tape._hvd.data = data_of_tapes(process_set)
    if tape._hvd.lists is not None:  # each step makes a new tape
        tape._hvd.lists.residuals = _residuals.setdefault(process_set, tape._hvd.lists.residuals)
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "", compression: Any = NoneCompressor,
    sparse_as_dense: bool = False, op: int = Average, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None, process_set: ProcessSet = global_process_set,
    local_layers: Any = None, scale_local_gradients: bool = True
) -> Any:  # fmt: skip
    """Return a ``DistributedGradientTape`` that keeps the gradients of some layers local.

    Args:
        gradtape (tf.GradientTape): the tape.
        local_layers (layer or list of layers, optional): Keras layers, whose trainable variables stay local. They must
            be built.
        compression (Compressor): as in ``DistributedGradientTape``, like all that follows.
        op (int): the reduction.
        process_set (ProcessSet, optional): the ranks that take part.
        sparse_as_dense (bool): convert sparse gradients.
        gradient_predivide_factor (float): the divisor before the sum.
        groups (int or list of lists of tf.Variable, optional): gradients that travel as one group.
        scale_local_gradients (bool): divide local gradients by the number of ranks.
        num_groups (int): Horovod's old form of ``groups``.
        device_dense, device_sparse (str): accepted for Horovod, without effect.

    Returns:
        A tape of a subclass of the class of ``gradtape``.

    Raises:
        TypeError: as ``DistributedGradientTape``.
        ValueError: an entry of ``local_layers`` is not a layer, or the arguments do not go together.

    Example:
        >>> layer = tf.keras.layers.Dense(1, use_bias=False)
        >>> layer.build((None, 1))
        >>> with tf.GradientTape() as tape:
        ...     loss = layer(tf.constant([[hvd.rank() + 1.0]]))
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
        >>> tape.gradient(loss, layer.trainable_variables)[0].numpy().tolist()
        [[1.0]]  # rank 0
        [[2.0]]  # rank 1
    """
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
        groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for layer in layers_of(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def layers_of(local_layers: Any) -> list[Any]:
    """One layer, several or none, as a list. ValueError for what is no layer."""
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(
                f"All local layers must be of tf.keras.layers.Layer type, not {type(layer).__name__} [HVD224]"
            )
    return layers
