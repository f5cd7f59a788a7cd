"""Sums and gathers of a tf.distribute.Strategy, by hvdlite's collectives.

What does a Strategy do with values of several replicas? It asks an object of TensorFlow's class CrossDeviceOps to
reduce or to gather them. Here a rank has one replica, so a value is one tensor, and the other replicas are the other
ranks.

The values of a call are sent from the last to the first, as backward makes gradients. The small ones of a call travel
as one group: a group is negotiated once, and the large ones still overlap with backward. A mean is the sum divided by
the number of ranks, as in TensorFlow, so that results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .. import _core
from ..errors import HvdArgumentError, HvdStateError
from ..keras.list_check import Listed
from ..lifecycle.init import incarnations
from ..ops import Sum, Terms
from ..process_sets.process_set import global_process_set
from . import ops
from .ops.gradients import differentiable
from .ops.order import once_more
from .ops.run import agree

SMALL = 1 << 16  # bytes; up to this size, negotiation takes longer than the data
_SAME_CALLS = (
    "Make the same calls on all ranks: under a Strategy each rank runs the same program, and no rank alone may skip a "
    "gradient, a metric or a batch."
)

_NOT_SAVED = (
    "All ranks of an hvd.Strategy meet in this function (a sum, a gather, or a variable that is summed when it is "
    "read), so no process can serve it. Save one that TensorFlow traces when it saves, and that sums nothing itself: "
    "@tf.function(input_signature=...) def f_with_input_signature(...)."
)


def only(value: Any) -> Any:
    """The tensor of this rank's replica."""
    values = value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)
    return values[0]


class HvdCrossDeviceOps(tf.distribute.CrossDeviceOps):  # type: ignore[misc]
    """All of it is called by TensorFlow. `reduce_op` is SUM or MEAN."""

    def __init__(self) -> None:
        super().__init__()
        self._job = incarnations()

    @property
    def _num_between_graph_workers(self) -> int:
        return _core.size()  # with 1, TensorFlow takes one value for the result

    def reduce(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any = None) -> Any:
        """As TensorFlow's, which in a graph refuses values without a device: those made outside of a replica, and for
        XLA all, before it is seen that XLA knows no collective of hvdlite.
        """
        if _core.size() == 1:
            return super().reduce(reduce_op, per_replica_value, destinations, options)
        return self.reduce_implementation(reduce_op, per_replica_value, destinations, options)

    def batch_reduce(self, reduce_op: Any, value_destination_pairs: Any, options: Any = None) -> Any:
        """Likewise, of several values."""
        if _core.size() == 1:
            return super().batch_reduce(reduce_op, value_destination_pairs, options)
        return self.batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    def batch_reduce_implementation(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """The reduced values, in the order of the pairs."""
        return self._reduced(reduce_op, [only(value) for value, _ in value_destination_pairs])

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        """The reduced value."""
        return self._reduced(reduce_op, [only(per_replica_value)])[0]

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        return tf.nest.pack_sequence_as(value, self._reduced(reduce_op, tf.nest.flatten(value)))

    def _gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: Any) -> Any:
        self.check()
        _mark_unsaveable()
        value = tf.convert_to_tensor(only(per_replica_value))
        rank = value.shape.rank
        if rank == 0:
            raise HvdArgumentError("Strategy.gather needs a tensor of at least one dimension [HVD210]")
        if rank is None or not -rank <= axis < rank:
            raise HvdArgumentError(f"Strategy.gather of a tensor of shape {value.shape} has no axis {axis} [HVD210]")
        order = list(range(rank))
        order[0], order[axis] = order[axis], 0  # its own inverse
        gathered = ops.allgather(tf.transpose(value, order) if order[0] else value)
        return tf.transpose(gathered, order) if order[0] else gathered

    def check(self) -> None:
        """HvdStateError for a Strategy of a job that is over."""
        if self._job != incarnations():
            raise HvdStateError("this Strategy belongs to a job that is over: make a new one after hvd.init() [HVD429]")

    def _reduced(self, reduce_op: Any, values: Sequence[Any]) -> list[Any]:
        self.check()
        _mark_unsaveable()
        found = [each if isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in values]
        with tf.control_dependencies(self._agreed(found)):
            dense = [i for i, each in enumerate(found) if not isinstance(each, tf.IndexedSlices)][::-1]
            sent = {i: tf.cast(found[i], tf.int32) if found[i].dtype == tf.bool else found[i] for i in dense}
            small = [i for i in dense if _bytes(sent[i]) <= SMALL]
            group = small if len(small) > 1 else []
            alone = [i for i in dense if i not in set(group)]
            terms = Terms(global_process_set, op=Sum)
            sums = dict(zip(group, _sums([sent[i] for i in group], terms, grouped=True)))
            sums.update(zip(alone, _sums([sent[i] for i in alone], terms)))
            for i, each in enumerate(found):
                if i in sums:
                    found[i] = tf.cast(sums[i], tf.bool) if each.dtype == tf.bool else sums[i]
                else:
                    found[i] = ops.allreduce(each, op=Sum)
        return [_mean(each) for each in found] if reduce_op == tf.distribute.ReduceOp.MEAN else found

    def _agreed(self, values: Sequence[Any]) -> list[Any]:
        """Nothing travels before all ranks are seen to have as many values, of the same types.

        A single value in a graph is sent without this check: TensorFlow sends one in a branch, which has no order
        among other lists. An eager one is checked, although that takes another round. If one rank skips a step, the
        others wait for its gradients, and it waits for the number that says whether there is another batch.
        """
        if not values or len(values) == 1 and not tf.executing_eagerly():
            return []
        entries = [f"{each.dtype.name}{' sparse' * isinstance(each, tf.IndexedSlices)}" for each in values]
        shown = [f"{entry} {each.shape}" for entry, each in zip(entries, values)]
        noun = f"value{'s' * (len(values) != 1)}"
        listed = Listed(once_more("Strategy"), len(values), noun, entries, shown, _SAME_CALLS)
        return agree(listed, global_process_set)


def _mark_unsaveable() -> None:
    """Let tf.saved_model.save refuse the function that is traced now. It could be loaded, but served by no process."""
    mark = getattr(tf.compat.v1.get_default_graph(), "mark_as_unsaveable", None)  # a function's graph has it
    if mark is not None:
        mark(_NOT_SAVED)


def _sums(tensors: list[Any], terms: Terms, grouped: bool = False) -> list[Any]:
    return differentiable("allreduce", tensors, [None] * len(tensors), terms, grouped).results if tensors else []


def _bytes(tensor: tf.Tensor) -> int:
    """Of a tensor whose shape is known; else more than a small one has."""
    count = tensor.shape.num_elements()
    return SMALL + 1 if count is None else int(count * tensor.dtype.size)


def _mean(total: Any) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total.values / _core.size(), total.indices, total.dense_shape)
    return total / _core.size()
