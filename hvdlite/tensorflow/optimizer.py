"""DistributedOptimizer of hvdlite.tensorflow: Keras's optimizers go to hvdlite.keras, those of TensorFlow 1 stay here.

A distributed tf.compat.v1.train.Optimizer is of a class made of ours and the given one's and shares its state, as in
hvdlite.keras: `compute_gradients` returns averages, and what is done to them before `apply_gradients` (clipping, say)
is done to averages. With several passes per step both halves of a step belong to the last pass.

Adasum combines what steps do to the variables, not gradients: the step is taken locally, the difference that it made
is combined, and the variables become what they were plus the combination. Then momentum and learning rates of each
rank are in what is combined. With several passes the difference is that of a window's steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from .. import _core
from ..keras.optimizer import DistributedOptimizer as _of_keras
from ..ops import Adasum, Average
from ..ops.terms import NoneCompressor
from ..optimizer import check_passes
from ..process_set import ProcessSet, global_process_set
from .functions import broadcast_global_variables
from .passes import Passes
from .reducer import Reducer, key_of

made_in: str | None = None  # what the classes of distributed optimizers say about where they are from; None: the base's
_Pairs = Iterable[tuple[Any, Any]]


class _Distributed:
    """The methods that a distributed optimizer of TensorFlow 1 has before those of its own class."""

    _hvd: Reducer
    _hvd_passes: Any

    def register_local_var(self, variable: Any) -> None:
        """The gradient of this variable is not averaged."""
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

            combined = tf.cond(last, combine, lambda: tf.constant(False))
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


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, use_locking: bool = False, device_dense: str = "",
    device_sparse: str = "", compression: Any = NoneCompressor, sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1, op: int = Average, gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False, num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True
) -> Any:  # fmt: skip
    """An optimizer like the given one whose gradients are averaged over all ranks (or combined as `op` says).

    Of Keras, or a tf.compat.v1.train.Optimizer. Arguments as of hvdlite.keras.DistributedOptimizer; `use_locking` is
    Horovod's and means nothing. op=Adasum with an optimizer of TensorFlow 1 combines the changes of variables.
    Raises TypeError for what is neither, ValueError for arguments that do not go together.
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
    else:
        made._hvd_passes = Passes(passes, bool(average_aggregated_gradients)) if passes > 1 else None
    return made


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """For sessions of TensorFlow 1: gives all ranks the root's values of all variables once a session is made."""

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
