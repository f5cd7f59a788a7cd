"""Averages lists of gradients where Keras runs on JAX: the counterpart of hvdlite.keras.torch_reducer.

Keras traces a step once, with the optimizer in it: what is called here becomes one exchange of the compiled step. No
value can be read inside jit. So the handler compares names and shapes in each step, and comparisons of values take
place outside of jit only.

A gradient is named by its variable's path and place, as on TensorFlow. Groups are accepted and make no difference. What
cannot work is refused when an optimizer is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .. import metrics
from ..errors import HvdNotYetError
from ..keras.arguments import check_terms
from ..keras.initial_check import DataCheck, StartCheck
from ..keras.list_check import SAME_GRADIENTS, Listed, compare
from ..keras.naming import everywhere
from ..ops import Average, op_of
from ..ops.arguments import NoneCompressor, Quantized, compress
from ..ops.wire import wire_compression
from ..process_sets.process_set import ProcessSet, global_process_set
from ..training.digest import Bits
from . import compression as _casts
from .ops import reduced
from .tree import Named, in_graph


class Compression(_casts.Compression):
    """Those of JAX, and those that other backends of Keras have, to be refused by name."""

    int8, int4 = Quantized(8), Quantized(4)


def refuse(optimizer: Any, passes: int, shard: bool) -> None:
    """HvdNotYetError for a distributed optimizer that could not work inside jit."""
    if shard:
        raise _not_yet("shard=True", "leave it out")
    if passes > 1:  # sums would be variables that Keras does not hand to a compiled step
        raise _not_yet(f"backward_passes_per_step={passes}", f"give the optimizer gradient_accumulation_steps={passes}")
    if hasattr(optimizer, "inner_optimizer"):  # its step calls the optimizer inside, not the one around it
        inside = f"put it inside, {type(optimizer).__name__}(hvd.DistributedOptimizer(optimizer))"
        raise _not_yet("a loss scale inside a DistributedOptimizer", inside)


def _not_yet(what: str, remedy: str) -> HvdNotYetError:
    return HvdNotYetError(
        f"{what} is not supported where Keras runs on JAX: {remedy}, or set KERAS_BACKEND=tensorflow or "
        "KERAS_BACKEND=torch before you import keras [HVD246]"
    )


class Reducer:
    """Averages gradients by arguments that are given once. ValueError or TypeError for what cannot be or does not go
    together, HvdNotYetError for what JAX lacks."""

    def __init__(
        self, prefix: str, compression: Any = NoneCompressor, sparse_as_dense: bool = False, op: int = Average,
        gradient_predivide_factor: float = 1.0, num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None, process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True
    ) -> None:  # fmt: skip
        check_terms(compression, gradient_predivide_factor, process_set)
        self.prefix, self.op, self.process_set = prefix, op_of(None, op), process_set
        if gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average [HVD224]")
        self.predivide, self.scale_local = float(gradient_predivide_factor), bool(scale_local_gradients)
        self.compression = wire_compression(compression, Compression)
        if isinstance(self.compression, Quantized):
            raise _not_yet(f"compression={self.compression!r}", "use hvd.Compression.bf16")
        self._local: dict[int, Any] = {}
        self._start = StartCheck(process_set, _sum_of_bits, _sums_of)
        self._data = DataCheck(process_set, _sum_of_bits, _sums_of)

    def register_local(self, variable: Any) -> None:
        """Gradients of this variable stay this rank's."""
        self._local[id(variable)] = variable

    def watch(self, state: Callable[[], list[Any]]) -> None:
        """These variables are compared, too, as soon as a rank has them."""
        self._start.state = state

    def refuse_sums(self, gradients: Sequence[Any]) -> None:
        """Nothing: JAX has no tape that gives sums."""

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to average with."""
        return not self.process_set.included() or self.process_set.size() == 1

    def __call__(self, gradients: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
        """The averages, None where a gradient is None."""
        found, owners = list(gradients), list(variables)
        local = [id(owner) in self._local for owner in owners]
        travel = [index for index, each in enumerate(found) if each is not None and not local[index]]
        if not in_graph(found):
            metrics.step(self)
            if not self.alone:
                self._compare(found, owners, travel)
        if self.alone:
            return found
        for index, each in enumerate(found):
            if local[index] and self.scale_local and each is not None:
                found[index] = each / self.process_set.size()
        pairs = [compress(self.compression, found[index]) for index in travel]
        names = [f"{self.prefix}.{index}of{len(found)}.{everywhere(owners[index])}" for index in travel]
        tree = Named([small for small, _ in pairs], names, None, False, self.prefix)
        if travel:
            done = reduced(
                tree, self.prefix, self.op, self.process_set, 1.0 / self.predivide, self.predivide, step=True
            )
            for index, each, (_, ctx) in zip(travel, done, pairs):
                found[index] = self.compression.decompress(each, ctx)
        return found

    def _compare(self, found: list[Any], owners: list[Any], travel: list[int]) -> None:
        """Outside of jit: the lists of all ranks, and in some steps their variables and gradients."""
        entries = []
        for gradient, owner in zip(found, owners):
            how = " local" if id(owner) in self._local else " without gradient" if gradient is None else ""
            entries.append(everywhere(owner) + how)
        compare(Listed(self.prefix, len(travel), "gradients", entries, entries, SAME_GRADIENTS), self.process_set)
        of_travel = [owners[index] for index in travel]
        if travel and not in_graph([getattr(each, "value", each) for each in of_travel]):
            self._start.round(self.prefix, of_travel)
            self._data.round(self.prefix, of_travel, [found[index] for index in travel])


def _array(variable: Any) -> np.ndarray:
    return np.asarray(getattr(variable, "value", variable))


def bits(variable: Any) -> Bits | None:
    """The bits of a variable of Keras or an array of JAX; None of what is neither."""
    if not isinstance(getattr(variable, "value", variable), jax.Array):
        return None
    array = _array(variable)
    return Bits(array.shape, str(array.dtype), [array.tobytes()])


def _sum_of_bits(variable: Any) -> int:
    octets = np.frombuffer(_array(variable).tobytes(), np.uint8)
    return int(np.pad(octets, (0, -octets.size % 8)).view(np.int64).sum())


def _sums_of(variable: Any) -> tuple[float, float] | None:
    array = _array(variable)
    if "float" not in array.dtype.name:
        return None
    exact = array.astype(np.float64)
    return float(exact.sum()), float(np.abs(exact).sum())
