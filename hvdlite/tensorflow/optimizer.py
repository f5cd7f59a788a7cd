"""DistributedOptimizer of hvdlite.tensorflow: Keras's optimizers go to hvdlite.keras, those of TensorFlow 1 stay here.

A distributed tf.compat.v1.train.Optimizer is of a class made of ours and the given one's and shares its state, as in
hvdlite.keras: `compute_gradients` returns averages, and what is done to them before `apply_gradients` (clipping, say)
is done to averages. With several passes per step both halves of a step belong to the last pass.

Adasum combines what steps do to the variables, not gradients: the step is taken locally, the difference that it made
is combined, and the variables become what they were plus the combination. Then momentum and learning rates of each
rank are in what is combined. With several passes the difference is that of a window's steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from .. import _core
from ..keras.optimizer import DistributedOptimizer as _of_keras
from ..ops import Adasum, Average
from ..ops.arguments import NoneCompressor
from ..process_sets.process_set import ProcessSet, global_process_set
from ..training.gradient_tracker import check_passes, windows
from .accumulation import Passes
from .functions import broadcast_global_variables
from .ops.order import branch
from .reducer import Reducer, key_of

made_in: str | None = None  # what the classes of distributed optimizers say about where they are from; None: the base's
_Pairs = Iterable[tuple[Any, Any]]


class _Distributed:
    """The methods that a distributed optimizer of TensorFlow 1 has before those of its own class."""

    _hvd: Reducer
    _hvd_passes: Any
    _agg_helper = property(lambda self: self._hvd_passes)  # Horovod's name of it; None for one pass

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of a variable local: it is not averaged."""
        self._hvd.register_local(variable)

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(self, *args: Any, **more: Any) -> list[tuple[Any, Any]]:
        """Averaged gradients and their variables; with several passes, sums so far until the last pass, and at the end
        also those of variables that only earlier passes brought."""
        pairs = super().compute_gradients(*args, **more)  # type: ignore[misc]
        owners = [variable for _, variable in pairs]
        local = [self._hvd.made_dense(gradient) for gradient, _ in pairs]
        if self._hvd_passes is None:
            return list(zip(self._hvd(local, owners), owners))
        found: list[tuple[Any, Any]] = self._hvd_passes.add(local, owners, self._hvd)
        return found

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: _Pairs, *args: Any, **more: Any) -> Any:
        """Applies the gradients; with several passes, in the last one only."""
        inherited: Any = super()
        if self._hvd_passes is None:
            return inherited.apply_gradients(grads_and_vars, *args, **more)
        pairs = list(grads_and_vars)
        return self._hvd_passes.at_end(pairs, lambda: inherited.apply_gradients(pairs, *args, **more))


class _Delta:
    """The same for Adasum."""

    _hvd: Reducer
    _hvd_passes: int
    _hvd_starts: dict[Any, Any]
    _hvd_calls: Any

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: _Pairs, *args: Any, **more: Any) -> Any:
        """Takes this rank's step, then combines what the steps of a window have done."""
        pairs = [
            (self._hvd.made_dense(gradient), variable) for gradient, variable in grads_and_vars if gradient is not None
        ]
        inherited: Any = super()
        if self._hvd.alone:
            return inherited.apply_gradients(pairs, *args, **more)
        owners = [variable for _, variable in pairs]
        if self._hvd_passes > 1:
            owners = self._hvd_known(owners)
        starts = self._hvd_begin(owners)
        with tf.control_dependencies(starts):
            done = inherited.apply_gradients(pairs, *args, **more) if pairs else None
        with tf.control_dependencies([] if tf.executing_eagerly() else starts if done is None else [done]):
            if self._hvd_passes == 1:
                return self._hvd_combine(owners, starts)
            last = tf.equal(self._hvd_calls.assign_add(1) % self._hvd_passes, 0)

            def combine() -> tf.Tensor:
                combined = self._hvd_combine(owners, starts)
                with tf.control_dependencies([] if combined is None else [combined]):
                    return tf.constant(True)

            combined = branch(last, combine, lambda: tf.constant(False))
        return None if tf.executing_eagerly() else tf.group(combined)

    def _hvd_known(self, owners: list[Any]) -> list[Any]:
        """These variables and those of earlier passes, which a step of theirs in this window has changed."""
        with tf.init_scope():
            if self._hvd_calls is None:
                self._hvd_calls = tf.Variable(0, trainable=False, name="hvd_passes", dtype=tf.int64)
            for variable in owners:
                if key_of(variable) not in self._hvd_starts:
                    zeros = tf.zeros(variable.shape, variable.dtype)
                    start = tf.Variable(zeros, trainable=False, name="hvd_start")
                    window = tf.Variable(-1, trainable=False, name="hvd_window", dtype=tf.int64)
                    self._hvd_starts[key_of(variable)] = variable, start, window
        here = {key_of(variable) for variable in owners}
        return [*owners, *(variable for key, (variable, _, _) in self._hvd_starts.items() if key not in here)]

    def _hvd_begin(self, owners: list[Any]) -> list[tf.Tensor]:
        """The variables as they were when the window began: noted by the first of its passes that knows of them."""
        if self._hvd_passes == 1:
            return [tf.identity(variable) for variable in owners]
        now = self._hvd_calls.read_value() // self._hvd_passes
        starts = []
        for variable in owners:
            _, start, window = self._hvd_starts[key_of(variable)]
            value = tf.where(tf.equal(window.read_value(), now), start.read_value(), variable.read_value())
            with tf.control_dependencies([value]):
                noted = [tf.convert_to_tensor(each) for each in (start.assign(value), window.assign(now))]
            with tf.control_dependencies(noted):
                starts.append(tf.identity(value))
        return starts

    def _hvd_combine(self, owners: list[Any], starts: list[tf.Tensor]) -> Any:
        """Every variable is its start and what Adasum makes of the ranks' differences."""
        deltas = [variable.read_value() - start for variable, start in zip(owners, starts)]
        combined = self._hvd(deltas, owners)
        assigned = [variable.assign(start + delta) for variable, start, delta in zip(owners, starts, combined)]
        return None if tf.executing_eagerly() else tf.group(*assigned)


class _Window:
    """The window of a _Delta, as an elastic state needs it. Not in a graph of TensorFlow 1."""

    def __init__(self, of: _Delta) -> None:
        self._of = weakref.ref(of)

    def position(self) -> int:
        """How many passes of it are done."""
        of: Any = self._of()
        return 0 if of is None or of._hvd_calls is None else int(of._hvd_calls) % of._hvd_passes

    def clear(self) -> None:
        """A window begins, on all ranks."""
        of: Any = self._of()
        if of is not None and of._hvd_calls is not None:
            of._hvd_calls.assign(0)
            for _, _, window in of._hvd_starts.values():
                window.assign(-1)


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
    device_sparse: str = "", compression: Any = NoneCompressor, sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1, op: int = Average, gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False, num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True
) -> Any:  # fmt: skip
    """Return an optimizer like ``optimizer`` whose gradients are averaged over all ranks before they are applied.

    It takes an optimizer of Keras (see ``hvdlite.keras.DistributedOptimizer``) or a ``tf.compat.v1.train.Optimizer``.
    Of the latter, ``compute_gradients`` returns averages. With ``op=hvd.Adasum`` it takes its step locally, and Adasum
    combines the changes of the variables (Maleki et al., 2021, "Scaling Distributed Training with Adaptive Summation").

    Args:
        optimizer: the optimizer. Its state is shared with the new one.
        compression (Compressor): the form in which gradients travel, such as ``hvd.Compression.fp16``. With ``int8`` or
            ``int4`` large ones are rounded between hosts. Default: none.
        op (int): ``hvd.Average`` (default), ``Sum`` or ``Adasum``.
        backward_passes_per_step (int): add up the gradients of this many calls, then reduce and apply. Default: 1.
        average_aggregated_gradients (bool): divide the added gradients by that number. Default: False.
        process_set (ProcessSet, optional): average over these ranks. On other ranks gradients stay local. Default: all.
        name (str, optional): prefix of the names of the collectives. The same on all ranks.
        sparse_as_dense (bool): convert ``tf.IndexedSlices`` to dense tensors before they travel. Default: False.
        gradient_predivide_factor (float): f divides gradients by f before the sum, and by size / f after it. Only with
            Average. Default: 1.0.
        groups (int or list of lists of tf.Variable, optional): gradients that travel as one group, as the number of
            groups or as lists. Default: none.
        scale_local_gradients (bool): divide local gradients by the number of ranks. Default: True.
        num_groups (int): Horovod's old form of ``groups``.
        use_locking (bool): accepted for Horovod, without effect.
        device_dense, device_sparse (str): accepted for Horovod, without effect.

    Returns:
        An optimizer whose class has the methods of the class of ``optimizer``, and ``register_local_var``.

    Raises:
        HvdNotInitializedError: ``hvd.init()`` has not been called.
        TypeError: ``optimizer`` is neither kind of optimizer, or ``compression`` is not a compressor.
        ValueError: the arguments do not go together, or the optimizer is distributed already.

    Example:
        >>> weight = tf.keras.Variable(1.0)
        >>> optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(learning_rate=1.0))
        >>> optimizer.apply([tf.constant(hvd.rank() + 1.0)], [weight])
        >>> float(weight)
        -0.5
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _of_keras(
            optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            backward_passes_per_step, average_aggregated_gradients, num_groups, groups, process_set,
            scale_local_gradients,
        )  # fmt: skip
    if isinstance(optimizer, (_Distributed, _Delta)):
        raise ValueError("this optimizer is a DistributedOptimizer already [HVD223]")
    passes = backward_passes_per_step
    check_passes(passes)
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True [HVD224]")
    _core.size()
    methods: Any = _Delta if op == Adasum else _Distributed
    base = type(optimizer)
    made: Any = object.__new__(type(base.__name__, (methods, base), {"__module__": made_in or base.__module__}))
    made.__dict__.update({"_optimizer": optimizer, **optimizer.__dict__})  # Horovod's name, or the base's
    made._hvd = Reducer(
        name or f"Distributed{base.__name__}", compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
        groups, process_set, scale_local_gradients,
    )  # fmt: skip
    if op == Adasum:
        made._hvd_passes, made._hvd_starts, made._hvd_calls = passes, {}, None
        if tf.compat.v1.executing_eagerly_outside_functions():
            made._hvd_window = _Window(made)
            windows.add(made._hvd_window)
    else:
        made._hvd_passes = Passes(passes, bool(average_aggregated_gradients)) if passes > 1 else None
    return made


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Hook of a TensorFlow 1 session that assigns the root's values to all variables once the session is made.

    Args:
        root_rank (int): the global rank of the root.
        device (str): the device of the operation. Default: TensorFlow's choice.

    Example:
        >>> with tf.Graph().as_default():
        ...     weight = tf.compat.v1.get_variable("weight", initializer=float(hvd.rank()))
        ...     hook = hvd.BroadcastGlobalVariablesHook(root_rank=1)
        ...     with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
        ...         print(float(session.run(weight)))
        1.0
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the broadcast to the graph."""
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcasts."""
        session.run(self.bcast_op)
