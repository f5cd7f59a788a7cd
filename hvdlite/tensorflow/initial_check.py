"""Comparison of what ranks have (../keras/initial_check.py) within a step of a graph.

By a call of Python in a branch, which other rounds pass by: they count one variable down. The call is eager, so ranks
with a graph are matched with ranks without one. Weights are read before they change. Gradients are compared when their
averages are there, so that the comparison keeps none waiting; where nothing is compared the branch drops them as they
come. A graph that XLA compiles has neither averages nor comparisons.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from ..keras.initial_check import VALUES, Check, DataCheck, StartCheck
from ..process_sets.process_set import ProcessSet, on_new_incarnation
from .errors import translated
from .ops.order import branch

_PIECE = 1 << 20  # elements whose sum needs memory of its own
_SAME_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
_of_graphs: weakref.WeakSet[Rounds] = weakref.WeakSet()
_of_tapes: dict[ProcessSet, Rounds] = {}


class Rounds:
    """The rounds of one check, eagerly or in a graph; not in one of TensorFlow 1's sessions."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.left: Any = None  # the check's, once there is a graph

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self, prefix: str, variables: Sequence[Any], gradients: Sequence[Any] | None = None,
        after: Sequence[Any] = (),
    ) -> list[tf.Tensor]:  # fmt: skip
        """One round, when `after` are there. HvdMismatchError on all ranks; from a graph, when it runs, an UnknownError
        of TensorFlow that says so. What is returned is there when the round is over.

        gradients: what is compared instead of the variables.
        """
        if not variables or not tf.compat.v1.executing_eagerly_outside_functions() or self.check.off():
            return []
        flat = None if gradients is None else _flat(gradients)
        if tf.executing_eagerly():
            with translated():
                if self.left is None:
                    self.check.round(prefix, variables, flat)
                elif int(self.left.assign_sub(1)) <= 0:
                    self.left.assign(self.check.look(prefix, variables, flat))
            return []
        if self.left is None:
            with ThreadPoolExecutor(1) as beside:  # where no function is traced: one takes new variables only once
                made = beside.submit(tf.Variable, self.check.left, trainable=False, name="hvd_start", dtype=tf.int64)
            self.left = made.result()
            _of_graphs.add(self)
        with tf.control_dependencies(after):
            there = tf.constant(0)

        def look(_: Any, *values: Any) -> int:
            with translated():
                return self.check.look(prefix, variables, None if flat is None else values)

        def once() -> tf.Tensor:
            # Weight decay and the count of steps wait for no average. What they change is read here, too: so automatic
            # control dependencies let them change it after this branch.
            counts = [each for each in self.check.state() if tf.TensorShape(each.shape).rank == 0]
            read = flat or [tf.convert_to_tensor(each) for each in (*variables, *counts)]
            later = tf.ensure_shape(tf.py_function(look, [there, *read], tf.int64), [])
            return tf.identity(self.left.assign(later))

        now = tf.convert_to_tensor(self.left.assign_sub(1))
        return [branch(now <= 0, once, lambda: tf.constant(0, tf.int64), look=True)]


def _renew() -> None:
    """Ranks of the next job begin together."""
    with tf.init_scope():
        for each in list(_of_graphs):
            each.left.assign(1)


on_new_incarnation(_renew)


def start(process_set: ProcessSet, text: str = VALUES, state: Callable[[], list[Any]] = list) -> Rounds:
    """Compares the variables of one optimizer and its state."""
    return Rounds(StartCheck(process_set, _sum_of_bits, _sums_of, text, state))


def data(process_set: ProcessSet) -> Rounds:
    """Compares the gradients of one optimizer."""
    return Rounds(DataCheck(process_set, _sum_of_bits, _sums_of))


def data_of_tapes(process_set: ProcessSet) -> Rounds:
    """Compares those of tapes, of which each step makes a new one."""
    if process_set not in _of_tapes:
        _of_tapes[process_set] = data(process_set)
    return _of_tapes[process_set]


def _flat(gradients: Sequence[Any]) -> list[Any]:
    """Of tf.IndexedSlices both parts."""
    pairs = ([each.values, each.indices] if isinstance(each, tf.IndexedSlices) else [each] for each in gradients)
    return [part for pair in pairs for part in pair]


def _sums_of(variable: Any) -> tuple[float, float] | None:
    value = tf.convert_to_tensor(variable)
    if not value.dtype.is_floating:
        return None
    value = tf.cast(value, tf.float64)
    return float(tf.reduce_sum(value)), float(tf.reduce_sum(tf.abs(value)))


def _sum_of_bits(variable: Any) -> int:
    value = tf.reshape(tf.convert_to_tensor(variable), [-1])
    bits = tf.bitcast(value, _SAME_BITS[value.dtype.size]) if value.dtype.is_floating else value
    total = 0
    for begin in range(0, int(tf.size(bits)), _PIECE):
        total += int(tf.reduce_sum(tf.cast(bits[begin : begin + _PIECE], tf.int64)))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
