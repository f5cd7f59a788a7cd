"""Gradient accumulation where TensorFlow's own variables hold the sums.

For optimizers that are not Keras 3's: Keras 2's and those of tf.compat.v1. Each call is one pass and adds its gradients
to variables; every n-th call closes a window. What happens then is the caller's, in two steps that an optimizer takes
apart: the sums are averaged over the ranks (`add`), and applied (`at_end`). The others change nothing.

A pass may bring other variables than the one before, or none. What has a sum at the end of a window is averaged and
applied, brought by its last pass or not. That a layer was frozen since cannot be seen: variables of TensorFlow do not
show it, so what was added up for it before is applied. A graph knows of the sums that there were when it was made: what
an old one does not know of stays for the next window.

It works eagerly, in tf.function, and in a graph of TensorFlow 1, where nothing runs but what a fetch depends on: so
every step says what it comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ..training.gradient_tracker import windows
from .ops.order import branch
from .reducer import key_of


class Passes:
    """`count` passes make a window; with `average` the sum of a window is divided by `count`.

    Every variable has a sum of its own: passes may bring them in another order, and without some.
    """

    def __init__(self, count: int, average: bool) -> None:
        self.count, self.average = count, average
        self._sums: dict[Any, tuple[Any, Any]] = {}  # a variable and its sum: held, so that its key stays its own
        self._known: list[set[Any]] = []  # the keys of the sums that passes of this graph knew of
        self._calls: Any = None
        if tf.compat.v1.executing_eagerly_outside_functions():
            windows.add(self)

    def __getattr__(self, name: str) -> Any:
        """AttributeError. A distributed optimizer shows its passes as `_agg_helper`, as Horovod does."""
        raise AttributeError(
            f"backward_passes_per_step has no {name!r}: call the optimizer's _compute_gradients and apply_gradients "
            "instead of methods of its _agg_helper [HVD224]"
        )

    @property
    def counter(self) -> tf.Tensor:
        """Horovod's name of how many passes of the window are done."""
        return (self._calls.read_value() if self.begun() else tf.constant(0, tf.int64)) % self.count

    def begun(self) -> bool:
        """Whether there has been a pass."""
        return self._calls is not None

    def position(self) -> int:
        """How many passes of the window are done. Not in a graph of TensorFlow 1."""
        return int(self._calls) % self.count if self.begun() else 0

    def clear(self) -> None:
        """A window begins. Not in a graph of TensorFlow 1."""
        for each in [self._calls, *(total for _, total in self._sums.values())] if self.begun() else ():
            each.assign(tf.zeros(each.shape, each.dtype))

    def _build(self, owners: Sequence[Any]) -> None:
        with tf.init_scope():
            if self._calls is None:
                self._calls = tf.Variable(0, trainable=False, name="hvd_passes", dtype=tf.int64)
            for owner in owners:
                if key_of(owner) not in self._sums:
                    zeros = tf.zeros(owner.shape, owner.dtype)
                    total = tf.Variable(zeros, trainable=False, name=f"hvd_sum_{len(self._sums)}")
                    self._sums[key_of(owner)] = owner, total
        if tf.executing_eagerly():
            self._known.clear()
        self._known.append(set(self._sums))

    def add(
        self, gradients: Sequence[Any], owners: Sequence[Any], reduce: Callable[[list[Any], list[Any]], list[Any]]
    ) -> list[tuple[Any, Any]]:
        """Adds a pass. Pairs of a sum so far and its variable, or at the end of a window what `reduce` makes of them.

        First the variables of this pass, then those that earlier ones had gradients of. None stays None where no pass
        had one. Raises ValueError for tf.IndexedSlices.
        """
        brought = [(owner, gradient) for owner, gradient in zip(owners, gradients) if gradient is not None]
        if any(isinstance(gradient, tf.IndexedSlices) for _, gradient in brought):
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
                " [HVD231]"
            )
        self._build([owner for owner, _ in brought])
        here = {key_of(owner) for owner in owners}
        whole = [*owners, *(owner for key, (owner, _) in self._sums.items() if key not in here)]
        totals = [self._sums.get(key_of(owner), (None, None))[1] for owner in whole]
        added = [self._calls.assign_add(1)]
        for owner, gradient in brought:
            total = self._sums[key_of(owner)][1]
            added.append(total.assign_add(tf.cast(gradient, total.dtype)))
        divisor = self.count if self.average else 1

        def so_far() -> list[Any]:
            return [tf.constant(False), *(total.read_value() for total in totals if total is not None)]

        def averaged() -> list[Any]:
            sums: list[Any] = []
            for total in totals:
                value = None if total is None else total.read_value()
                sums.append(value if value is None or divisor == 1 else value / tf.cast(divisor, value.dtype))
            return [
                tf.constant(True),
                *(tf.convert_to_tensor(each) for each in reduce(sums, whole) if each is not None),
            ]

        with tf.control_dependencies([tf.convert_to_tensor(each) for each in added]):
            found = iter(branch(self._is_last(), averaged, so_far)[1:])
        return [(None if total is None else next(found), owner) for total, owner in zip(totals, whole)]

    def at_end(self, pairs: Sequence[tuple[Any, Any]], apply: Callable[[], Any], otherwise: Any = None) -> Any:
        """At the end of a window: `apply`, and the sums are zero again; else `otherwise`, which returns what it has
        assigned. In a graph the operation that does. `pairs`: of `add`, whatever was done to the gradients since."""
        here = {key_of(owner) for _, owner in pairs}
        known = min((keys for keys in self._known if here <= keys | self._unknown(here)), key=len, default=self._sums)
        sums = [self._sums[key][1] for key in known]

        def step() -> tf.Tensor:
            done = apply()
            with tf.control_dependencies([] if done is None or tf.executing_eagerly() else [done]):
                zeroed = [each.assign(tf.zeros(each.shape, each.dtype)) for each in sums]
            with tf.control_dependencies([tf.convert_to_tensor(each) for each in zeroed]):
                return tf.constant(True)

        def pause() -> tf.Tensor:
            with tf.control_dependencies([] if otherwise is None else [tf.convert_to_tensor(otherwise())]):
                return tf.constant(False)

        with tf.control_dependencies([gradient for gradient, _ in pairs if gradient is not None]):
            done = tf.cond(self._is_last(), step, pause)
        return None if tf.executing_eagerly() else tf.group(done)

    def _unknown(self, keys: set[Any]) -> set[Any]:
        """Those that never had a gradient."""
        return {key for key in keys if key not in self._sums}

    def _is_last(self) -> tf.Tensor:
        return tf.equal(self._calls.read_value() % self.count, 0)
