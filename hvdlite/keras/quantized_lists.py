"""Lists of gradients in 8 or 4 bits: which gradients are rounded, in which buckets, and what rounding leaves behind.

`QuantizedLists` serves the reducers of TensorFlow and PyTorch: they bring addresses of float32 values. A bucket is one
sum (../ops/quantized_sum.py). All are under way at once, and each is driven a step in turn, so that one is added up
while the next one travels.

What a sum lacks of this rank's values, the residual, is added when the variable's next gradient is sent. It is of this
rank and job: a variable of another shape, or a job of other ranks, begins at zero, and so does a model from a file.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..lifecycle.init import incarnations
from ..ops.arguments import Average, Quantized
from ..ops.quantized_sum import Member, QuantizedSum
from ..process_sets.levels import why_plain
from ..process_sets.process_set import ProcessSet
from ..rendezvous import elastic_member

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_announced: list[None] = []  # whether this process has said so


class Entry(NamedTuple):
    """A gradient as contiguous float32 in the CPU's memory. owner: whose residual it has, None: nobody's; addresses of
    the values and of the result."""

    owner: Any
    shape: tuple[int, ...]
    source: int
    target: int

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


class Residuals:
    """What rounding has lost, of each variable. Variables are known by identity, and forgotten with them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, np.ndarray]] = {}
        self._job = 0

    def of(self, owner: Any, shape: tuple[int, ...]) -> np.ndarray:
        """The residual of this variable's gradients, zeros at first."""
        if self._job != incarnations():
            self._job = incarnations()
            self._kept.clear()
        known = self._kept.get(id(owner))
        if known is None or known[0]() is not owner or known[1].shape != shape:
            me, key = weakref.ref(self), id(owner)
            known = weakref.ref(owner, lambda gone: _forget(me, key, gone)), np.zeros(shape, np.float32)
            self._kept[key] = known
        return known[1]


def _forget(residuals: Callable[[], Residuals | None], key: int, gone: Any) -> None:
    """A variable is gone. Its number may be another one's already."""
    found = residuals()
    if found is not None and key in found._kept and found._kept[key][0] is gone:
        del found._kept[key]


class QuantizedLists:
    """Sums lists of gradients by the options of a compression. ValueError for an op that does not go with it."""

    def __init__(self, compression: Quantized, op: int, predivide: float, process_set: ProcessSet) -> None:
        compression.refuse(op)
        self.compression, self.process_set = compression, process_set
        self._average, self._predivide = op == Average, predivide
        self.residuals = Residuals()

    def matters(self) -> bool:
        """Whether ranks are on several hosts, or may be while a graph that is made now lives. Rank 0 says so if not."""
        why = why_plain(self.process_set)
        if why is None or elastic_member.is_elastic():
            return True
        if not _announced:
            _announced.append(None)
            if _core.rank() == self.process_set.ranks[0]:
                line = f"compression={self.compression!r}: {why}, so gradients travel as they are"
                print(f"hvdlite: {line}", file=sys.stderr, flush=True)
        return False

    def mark(self, dtype: str, elements: int | None) -> str:
        """What lists of gradients, which ranks compare, say of one that is rounded; empty: it travels as it is."""
        if not elements or dtype not in _BYTES or elements * _BYTES[dtype] < self.compression.least_bytes:
            return ""
        return f" int{self.compression.bits} ({self.compression.bucket_mb:g} MiB)"

    def total(self, prefix: str, entries: Sequence[Entry], keep: Any) -> None:
        """Writes the sums or averages. Blocks. Raises what a sum raises, once none of them is under way."""
        size = self.process_set.size()
        factor = self._predivide / (size if self._average else 1)
        seen: set[int] = set()
        buckets = self._buckets([entry.elements for entry in entries])
        sums = []
        for index, bucket in enumerate(buckets):
            members, kept = [], []
            for entry in (entries[i] for i in bucket):
                residual = 0
                if self.compression.feedback is not False and entry.owner is not None and id(entry.owner) not in seen:
                    seen.add(id(entry.owner))  # a variable that is there twice has one
                    kept.append(self.residuals.of(entry.owner, entry.shape))
                    residual = kept[-1].ctypes.data
                members.append(Member(entry.source, entry.target, residual, entry.elements))
            name = f"{prefix}.quantized.{index}of{len(buckets)}"
            made = QuantizedSum(
                self.compression.bits, members, name, self.process_set, (keep, kept), 1.0 / self._predivide, factor
            )
            sums.append(made.begin())
        while any([each.step() for each in sums]):  # noqa: C419  (all of them make a step)
            pass
        for each in sums:
            each.wait()

    def _buckets(self, counts: Sequence[int]) -> list[list[int]]:
        """Which gradients travel together: from the last one to the first, as backward makes them."""
        buckets: list[list[int]] = []
        most, room = self.compression.bucket_mb * (1 << 20), -1.0
        for index in reversed(range(len(counts))):
            if not buckets or 4 * counts[index] > room:
                buckets.append([])
                room = most
            buckets[-1].append(index)
            room -= 4 * counts[index]
        return buckets


__all__ = ["Entry", "QuantizedLists", "Residuals"]
