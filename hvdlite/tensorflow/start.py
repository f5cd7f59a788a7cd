"""How does a step of a graph come to compare what ranks start from (../keras/start.py)?

By a call of Python in a branch, which later steps pass by: they read one variable, and no weights. The call is eager,
so ranks with a graph meet ranks without one. It reads the weights before they change: averages come after it, and
changes after averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..keras.start import VALUES, StartCheck
from ..process_set import ProcessSet
from .errors import translated

_PIECE = 1 << 20  # elements whose sum needs memory of its own
_SAME_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


class Start:
    """The comparison of one optimizer, eagerly or in a graph; not in one of TensorFlow 1's sessions."""

    def __init__(self, process_set: ProcessSet, text: str = VALUES) -> None:
        self._check = StartCheck(process_set, _sum_of_bits, text)
        self._goes_on: Any = None

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self, prefix: str, variables: Sequence[Any], gradients: Sequence[Any] | None = None
    ) -> list[tf.Tensor]:
        """Before averages of the variables' gradients, which come after what this returns. HvdMismatchError on all
        ranks; from a graph, when it runs, an UnknownError of TensorFlow that says so.

        gradients: what is compared instead of the variables.
        """
        given = [getattr(each, "values", each) for each in gradients or ()]  # of tf.IndexedSlices
        if self._check.over or not tf.compat.v1.executing_eagerly_outside_functions():
            return []

        def look(*given: Any) -> bool:
            with translated():
                self._check.look(prefix, variables, None if gradients is None else given)
            return not self._check.over

        if tf.executing_eagerly():
            look(*given)
            return []
        with tf.init_scope():
            if self._goes_on is None:
                self._goes_on = tf.Variable(True, trainable=False, name="hvd_start")

        def once() -> tf.Tensor:
            found = tf.ensure_shape(tf.py_function(look, given, tf.bool), [])
            return tf.identity(self._goes_on.assign(found))

        return [tf.cond(self._goes_on, once, lambda: tf.constant(False))]


def _sum_of_bits(variable: Any) -> int:
    value = tf.reshape(tf.convert_to_tensor(variable), [-1])
    bits = tf.bitcast(value, _SAME_BITS[value.dtype.size]) if value.dtype.is_floating else value
    total = 0
    for begin in range(0, int(tf.size(bits)), _PIECE):
        total += int(tf.reduce_sum(tf.cast(bits[begin : begin + _PIECE], tf.int64)))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
