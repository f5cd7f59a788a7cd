"""Calls that reduce tensors at once with `compression=hvd.Compression.int8`.

An optimizer makes its own exchanges of that value (`arguments.Quantized`). Rounding is worth its cost between hosts
only: on one host tensors travel as they are.

A graph of TensorFlow is made before there are values, so `check_call` says by itself what a call cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import _core
from .._core import ffi
from ..process_sets.levels import why_plain
from ..process_sets.process_set import on_new_incarnation
from .adapter import Adapter, T
from .arguments import Average, Quantized, Terms
from .quantized_sum import Member, QuantizedSum, meet

_NAMES = {number: name for name, number in _core.DTYPES.items()}
_kept: dict[tuple[int, str, int], tuple[list[int], Any]] = {}  # of calls with feedback: bits, name, process set
_TAKEN = tuple(_core.DTYPES[name] for name in ("float32", "float16", "bfloat16"))


def check_call(compression: Quantized, dtypes: Sequence[int], name: str | None, terms: Terms) -> None:
    """ValueError for what a single call of tensors of these dtypes cannot be."""
    compression.refuse(terms.op)
    if terms.timeout is not None:
        raise ValueError(f"compression={compression!r} takes no timeout: leave out one of them [HVD208]")
    if compression.feedback and name is None:
        raise ValueError(
            f"compression={compression!r} with feedback keeps a residual for each name: give name= [HVD208]"
        )
    for dtype in dtypes:
        if dtype not in _TAKEN:
            raise ValueError(
                f"compression={compression!r} takes float32, float16 and bfloat16, not {_NAMES[dtype]}: leave out "
                "compression for this tensor [HVD208]"
            )


def reduced(
    adapter: Adapter[T], compression: Quantized, tensors: Sequence[Any], name: str | None, terms: Terms
) -> list[T] | None:  # fmt: skip
    """The tensors reduced over the ranks, new; None: they shall travel as they are.

    ValueError for an op or a dtype that cannot be rounded, and for feedback without a name.
    """
    given = [adapter.accept(tensor) for tensor in tensors]
    views = [adapter.view(each) for each in given]
    check_call(compression, [view.dtype for view in views], name, terms)
    if why_plain(terms.process_set) is not None:
        return None
    sources = [_float32(adapter, each, view) for each, view in zip(given, views)]
    targets = [adapter.like(source, view.shape) for source, view in zip(sources, views)]
    counts = [math.prod(view.shape) for view in views]
    residual = None
    if compression.feedback:
        assert name is not None
        residual = _residual(compression, name, terms.process_set.process_set_id or 0, counts)
    members, at = [], 0
    for source, target, count in zip(sources, targets, counts):
        kept = 0 if residual is None else int(ffi.cast("uintptr_t", residual + at))
        members.append(Member(adapter.view(source).address, adapter.view(target).address, kept, count))
        at += count
    factor = terms.postscale / (terms.process_set.size() if terms.op == Average else 1)
    keep = [adapter.memory(each) for each in (*sources, *targets)], residual
    meet(compression.bits, name, terms.process_set)
    total = QuantizedSum(compression.bits, members, name, terms.process_set, keep, terms.prescale, factor)
    total.begin().wait()
    return [_as_before(adapter, target, view) for target, view in zip(targets, views)]


def _residual(compression: Quantized, name: str, number: int, counts: list[int]) -> Any:
    """Of calls under this name, in a process set: memory of as many floats, zeros at first."""
    key = compression.bits, name, number
    kept = _kept.get(key)
    if kept is None or kept[0] != counts:
        kept = _kept[key] = counts, ffi.new("float[]", max(sum(counts), 1))
    return kept[1]


def _float32(adapter: Adapter[T], tensor: T, view: Any) -> T:
    """Its values as a contiguous float32 tensor in the CPU's memory."""
    if view.device is not None:
        tensor = view.device.near(tensor)
    if _NAMES[view.dtype] != "float32":
        tensor = adapter.cast(tensor, "float32")
    return tensor if adapter.view(tensor).contiguous else adapter.contiguous(tensor)


def _as_before(adapter: Adapter[T], result: T, view: Any) -> T:
    name = _NAMES[view.dtype]
    if name != "float32":
        result = adapter.cast(result, name)
    return result if view.device is None else view.device.far(result)


on_new_incarnation(_kept.clear)

__all__ = ["Quantized", "check_call", "reduced"]
