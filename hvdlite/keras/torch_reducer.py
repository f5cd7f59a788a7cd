"""Averages lists of gradients where Keras runs on PyTorch: the counterpart of hvdlite.tensorflow.reducer.

Keras hands gradients over when backward is done, so there is no overlap with it; all are on their way before the first
is waited for. Sparse gradients are made dense.

A gradient is named by its variable's path and place, as on TensorFlow. Groups are accepted and make no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import metrics
from ..ops import Average, Sum, op_of
from ..ops.arguments import NoneCompressor, Quantized, compress
from ..ops.wire import wire_compression
from ..process_sets.process_set import ProcessSet, global_process_set
from ..torch.compression import Compression
from ..torch.ops import plain
from ..torch.optimizer.gradient_memory import sum_of_bits
from .arguments import check_terms
from .initial_check import DataCheck, StartCheck
from .list_check import SAME_GRADIENTS, Listed, compare
from .naming import everywhere
from .quantized_lists import Entry, QuantizedLists


class Reducer:
    """Averages gradients by arguments that are given once. ValueError or TypeError for what cannot be or does not go
    together."""

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
        if self.op in (Average, Sum):
            compression = wire_compression(compression, Compression)
        rounds = isinstance(compression, Quantized)
        self.lists = QuantizedLists(compression, self.op, self.predivide, process_set) if rounds else None
        self.compression = NoneCompressor if rounds else compression  # of what is not rounded
        self.exchange: Any = None  # what reduces in the place of `_averages`: shares of a sharded optimizer
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
        """Nothing: PyTorch has no tape that gives sums."""

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to average with."""
        return not self.process_set.included() or self.process_set.size() == 1

    def _compare(self, found: list[Any], owners: list[Any]) -> None:
        """Nothing of a list travels before all ranks are seen to have the same."""
        entries, count = [], 0
        for gradient, owner in zip(found, owners):
            local = id(owner) in self._local
            count += gradient is not None and not local
            how = " local" if local else " without gradient" if gradient is None else self._rounded(gradient)
            entries.append(everywhere(owner) + how)
        compare(Listed(self.prefix, count, "gradients", entries, entries, SAME_GRADIENTS), self.process_set)

    def _rounded(self, gradient: Any) -> str:
        """Whether this gradient travels in 8 or 4 bits, and how; empty: as it is."""
        if self.lists is None or not self.lists.matters():
            return ""
        return self.lists.mark(str(gradient.dtype).removeprefix("torch."), gradient.numel())

    def __call__(self, gradients: Iterable[Any], variables: Iterable[Any]) -> list[Any]:
        """The averages, None where a gradient is None."""
        found, owners = list(gradients), list(variables)
        if self.alone:
            metrics.step(self)
            return found
        self._compare(found, owners)
        travel = [
            index for index, each in enumerate(found) if each is not None and id(owners[index]) not in self._local
        ]
        if travel:
            of_travel = [owners[index] for index in travel]
            self._start.round(self.prefix, of_travel)
            self._data.round(self.prefix, of_travel, [found[index] for index in travel])
        found, _ = (self.exchange or self._averages)(self.prefix, found, owners)
        metrics.step(self)
        return found

    def made_dense(self, gradient: Any) -> Any:
        """The gradient, dense."""
        return gradient.to_dense() if gradient.is_sparse else gradient

    def _averages(self, prefix: str, found: list[Any], owners: list[Any]) -> tuple[list[Any], list[Any]]:
        in_flight, rounded = [], []
        for index in reversed(range(len(found))):
            gradient, owner = found[index], owners[index]
            if gradient is None:
                continue
            if id(owner) in self._local:
                found[index] = gradient / self.process_set.size() if self.scale_local else gradient
                continue
            if self._rounded(gradient):
                rounded.append(index)
                continue
            small, ctx = compress(self.compression, self.made_dense(gradient))
            name = f"{prefix}.{index}of{len(found)}.{everywhere(owner)}"
            handle = plain.allreduce_async(
                small.detach(), name=name, op=self.op, prescale_factor=1.0 / self.predivide,
                postscale_factor=self.predivide, process_set=self.process_set,
            )  # fmt: skip
            in_flight.append((index, handle, ctx))
        for index, handle, ctx in in_flight:
            found[index] = self.compression.decompress(handle.wait(), ctx)
        if rounded:
            self._round(prefix, found, owners, sorted(rounded))
        return found, []

    def _round(self, prefix: str, found: list[Any], owners: list[Any], rounded: list[int]) -> None:
        """Replaces those at the places by what they are after rounding."""
        assert self.lists is not None
        entries, keep = [], []
        for index in rounded:
            source = self.made_dense(found[index]).detach().to("cpu", torch.float32).contiguous()
            target = torch.empty(source.shape, dtype=torch.float32, device="cpu")
            entries.append(Entry(owners[index], tuple(source.shape), source.data_ptr(), target.data_ptr()))
            keep.append((source, target))
        self.lists.total(prefix, entries, keep)
        for index, (_, target) in zip(rounded, keep):
            found[index] = target.to(found[index].device, found[index].dtype)


def _sum_of_bits(variable: Any) -> int:
    with torch.no_grad():
        value = getattr(variable, "value", variable)
        parts = [value.coalesce().indices(), value.coalesce().values()] if value.is_sparse else [value]
        return sum(int(sum_of_bits(each) or 0) for each in parts)


def _sums_of(variable: Any) -> tuple[float, float] | None:
    with torch.no_grad():
        value = getattr(variable, "value", variable)
        return (float(value.double().sum()), float(value.double().abs().sum())) if value.is_floating_point() else None
