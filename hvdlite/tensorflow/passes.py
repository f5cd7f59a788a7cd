"""How are gradients of several backward passes added up where TensorFlow's own variables hold the sums?

For optimizers that are not Keras 3's: Keras 2's and those of tf.compat.v1. Each call is one pass and adds its gradients
to variables; every n-th call closes a window. What happens then is the caller's, in two steps that an optimizer takes
apart: the sums are averaged over the ranks (`add`), and applied (`at_end`). The others change nothing.

It works eagerly, in tf.function, and in a graph of TensorFlow 1, where nothing runs but what a fetch depends on: so
every step says what it comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .reducer import key_of


class Passes:
    """`count` passes make a window; with `average` the sum of a window is divided by `count`.

    Every variable has a sum of its own: passes may bring them in another order, and without some.
    """

    def __init__(self, count: int, average: bool) -> None:
        self.count, self.average = count, average
        self._sums: dict[Any, Any] = {}
        self._owners: list[Any] = []  # held, so that keys stay theirs
        self._calls: Any = None

    def begun(self) -> bool:
        """Whether there has been a pass."""
        return self._calls is not None

    def place(self) -> int:
        """How many passes of the window are done. Not in a graph of TensorFlow 1."""
        return int(self._calls) % self.count if self.begun() else 0

    def _build(self, places: Sequence[int], owners: Sequence[Any]) -> None:
        with tf.init_scope():
            if self._calls is None:
                self._calls = tf.Variable(0, trainable=False, name="hvd_passes", dtype=tf.int64)
            for place in places:
                owner = owners[place]
                if key_of(owner) not in self._sums:
                    zeros = tf.zeros(owner.shape, owner.dtype)
                    self._sums[key_of(owner)] = tf.Variable(zeros, trainable=False, name=f"hvd_sum_{len(self._owners)}")
                    self._owners.append(owner)

    def add(
        self, gradients: Sequence[Any], owners: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:  # fmt: skip
        """Adds a pass; the sums so far, or at the end of a window what `reduce` makes of them. None stays None.

        Raises ValueError for tf.IndexedSlices.
        """
        kept = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if any(isinstance(gradients[i], tf.IndexedSlices) for i in kept):
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
            )
        if not kept:
            return list(gradients)
        self._build(kept, owners)
        totals = {i: self._sums[key_of(owner)] for i, owner in enumerate(owners) if key_of(owner) in self._sums}
        added = [totals[i].assign_add(tf.cast(gradients[i], totals[i].dtype)) for i in kept]
        added.append(self._calls.assign_add(1))
        kept = list(totals)  # with those that only earlier passes had gradients of
        divisor = self.count if self.average else 1

        def so_far() -> list[Any]:
            return [totals[i].read_value() for i in kept]

        def averaged() -> list[Any]:
            sums: list[Any] = [None] * len(gradients)
            for i, total in zip(kept, so_far()):
                sums[i] = total / tf.cast(divisor, total.dtype) if divisor > 1 else tf.identity(total)
            return [tf.convert_to_tensor(each) for each in reduce(sums) if each is not None]

        with tf.control_dependencies([tf.convert_to_tensor(each) for each in added]):
            found = tf.cond(self._is_last(), averaged, so_far)
        results: list[Any] = [None] * len(gradients)
        for i, result in zip(kept, found if isinstance(found, (list, tuple)) else [found]):
            results[i] = result
        return results

    def at_end(self, gradients: Sequence[Any], apply: Callable[[], Any], otherwise: Any = None) -> Any:
        """At the end of a window: `apply`, and the sums are zero again; else `otherwise`, which returns what it has
        assigned. In a graph the operation that does."""

        def step() -> tf.Tensor:
            done = apply()
            with tf.control_dependencies([] if done is None or tf.executing_eagerly() else [done]):
                zeroed = [each.assign(tf.zeros(each.shape, each.dtype)) for each in self._sums.values()]
            with tf.control_dependencies([tf.convert_to_tensor(each) for each in zeroed]):
                return tf.constant(True)

        def pause() -> tf.Tensor:
            with tf.control_dependencies([] if otherwise is None else [tf.convert_to_tensor(otherwise())]):
                return tf.constant(False)

        with tf.control_dependencies([each for each in gradients if each is not None]):
            done = tf.cond(self._is_last(), step, pause)
        return None if tf.executing_eagerly() else tf.group(done)

    def _is_last(self) -> tf.Tensor:
        return tf.equal(self._calls.read_value() % self.count, 0)
