"""Gradient accumulation over several backward passes in Keras 3, on each of its backends.

Each call adds every variable's gradient to a sum of its own; every n-th call reduces the sums over the ranks, applies
the averages and makes the sums zero. A call may bring other variables than the one before, or the same in another
order. What has a sum at the end of a window is applied, brought by its last call or not, unless it was frozen since:
then its sum is forgotten. (Keras 2 and TensorFlow 1: hvdlite.tensorflow.accumulation.)

Sums are made when a variable first brings a gradient. What a window had added up in another process waits until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..training.gradient_tracker import windows
from . import backend
from .accumulation_state import agree
from .backend import keras


class Passes:
    """`count` calls make a window; with `average` the sum of a window is divided by `count`."""

    def __init__(self, count: int, average: bool) -> None:
        self.count, self.average = count, average
        self._sums: dict[Any, tuple[Any, Any]] = {}  # a variable and its sum: held, so that its key stays its own
        self._calls: Any = None
        self._start, self._agreed = 0, False
        self._waiting: dict[Any, np.ndarray] = {}  # sums of another process, by the key of their variable
        windows.add(self)

    def begun(self) -> bool:
        """Whether there has been a call."""
        return self._calls is not None

    def position(self) -> int:
        """How many calls of the window are done."""
        return int(np.asarray(keras.ops.convert_to_numpy(self._calls))) % self.count if self.begun() else self._start

    def kept(self, optimizer: Any) -> dict[str, np.ndarray]:
        """The sums, by the place of their variables in the optimizer."""
        values = dict(self._waiting)
        for key, (_, total) in self._sums.items():
            value = keras.ops.convert_to_numpy(total.value)
            values[key] = value if value.dtype.kind == "f" and value.dtype.itemsize > 1 else value.astype(np.float32)
        owners = getattr(optimizer, "_trainable_variables", [])
        indices = {backend.key_of(each): i for i, each in enumerate(owners)}
        return {f"sum_{indices[key]}": value for key, value in values.items() if key in indices}

    def take(self, optimizer: Any, position: int, sums: dict[int, np.ndarray], agreed: bool) -> None:
        """Goes on at this place. ValueError if the sums are not of this optimizer's variables."""
        owners = getattr(optimizer, "_trainable_variables", [])
        for i, value in sums.items():
            if i >= len(owners) or tuple(owners[i].shape) != value.shape:
                raise ValueError(
                    f"sum {i} of the saved window has shape {list(value.shape)}, which matches no variable of the "
                    "optimizer: build the model as it was when it was saved [HVD239]"
                )
        self._start, self._agreed = position, agreed
        self._waiting = {backend.key_of(owners[i]): value for i, value in sums.items()} if position else {}
        if self.begun():
            self._calls.assign(position)
        for key, (_, total) in self._sums.items():
            waiting = self._waiting.pop(key, None)
            zeros = np.zeros(tuple(total.shape), np.float32)
            total.assign(keras.ops.cast(zeros if waiting is None else waiting, total.dtype))

    def clear(self) -> None:
        """A window begins, on all ranks."""
        self.take(None, 0, {}, True)

    def _build(self, optimizer: Any, owners: list[Any] | None, brought: Sequence[Any]) -> None:
        if not optimizer.built and owners is not None:
            with keras.name_scope(optimizer.name):
                optimizer.build(owners)
            optimizer.built = True
        if not self._agreed:
            self._agreed = True
            if not agree(self.count, self.position(), optimizer._hvd.process_set):
                self.take(optimizer, 0, {}, True)
        waiting = [each for each in getattr(optimizer, "_trainable_variables", []) if self._waits(each)]
        zeros = keras.initializers.Zeros()
        scope = keras.backend.name_scope if hasattr(keras.backend, "name_scope") else keras.name_scope
        with backend.outside_graph(), scope("hvd"):
            if self._calls is None:
                self._calls = keras.Variable(self._start, dtype="int32", trainable=False, name="passes")
            for each in [*brought, *waiting]:
                key = backend.key_of(each)
                if key not in self._sums:
                    name = f"sum_{len(self._sums)}"
                    total = keras.Variable(zeros, shape=each.shape, dtype=each.dtype, trainable=False, name=name)
                    self._sums[key] = (each, total)
                    if key in self._waiting:
                        total.assign(keras.ops.cast(self._waiting.pop(key), total.dtype))

    def _waits(self, variable: Any) -> bool:
        return backend.key_of(variable) in self._waiting

    def apply(
        self, optimizer: Any, inherited: Any, gradients: list[Any], owners: list[Any] | None, named: Sequence[Any]
    ) -> None:
        """One call: adds, and the last of a window reduces and applies."""
        ops = keras.ops
        self._build(optimizer, owners, [owner for owner, gradient in zip(named, gradients) if gradient is not None])
        for owner, gradient in zip(named, gradients):
            if gradient is not None:
                total = self._sums[backend.key_of(owner)][1]
                total.assign_add(ops.cast(ops.convert_to_tensor(gradient), total.dtype))
        self._calls.assign_add(1)
        applied = list(named)
        if owners is not None:
            here = {backend.key_of(owner) for owner in applied}
            applied += [each for key, (each, _) in self._sums.items() if key not in here and each.trainable]

        def step() -> None:
            divisor = self.count if self.average else 1
            sums: list[Any] = []
            for owner in applied:
                total = self._sums.get(backend.key_of(owner), (None, None))[1]
                if total is not None:
                    total = total.value / divisor if divisor > 1 else ops.copy(total.value)
                sums.append(total)
            inherited.apply(optimizer._hvd(sums, applied), None if owners is None else applied)
            for _, total in self._sums.values():
                total.assign(ops.zeros_like(total.value))

        backend.branch(ops.equal(self._calls.value % self.count, 0), step, lambda: None)
