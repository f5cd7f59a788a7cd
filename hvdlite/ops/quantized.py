"""What `compression=hvd.Compression.int8` means, and calls that reduce tensors with it.

`Quantized` is the value of the argument. An optimizer makes its own exchanges of it; here are the calls that return
tensors at once. Rounding is worth its cost between hosts only: on one host tensors travel as they are.

A graph of TensorFlow is made before there are values, so `check_call` says by itself what a call cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import _core
from .._core import ffi
from ..process_sets.levels import why_plain
from .adapter import Adapter, T
from .arguments import Average, Sum, Terms
from .quantized_sum import Member, QuantizedSum

_NAMES = {number: name for name, number in _core.DTYPES.items()}
_TAKEN = tuple(_core.DTYPES[name] for name in ("float32", "float16", "bfloat16"))


class Quantized:
    """Compression of float tensors to 8 or 4 bits between hosts: ``hvd.Compression.int8`` and ``hvd.Compression.int4``.

    Blocks of 256 elements share a float32 scale, which makes 3.94 or 7.76 times fewer bytes than float32. The sum is
    made of the rounded values of each rank and rounded once more. All ranks get the same bits. A block with NaN or an
    infinity becomes NaN on all ranks. Inside a host, tensors travel as they are. Call it to change an option.

    Args:
        feedback (bool, optional): keep what rounding has lost on this rank, and add it to what is sent the next time.
            Default: True for optimizers, False for single calls, where it needs a ``name``.
        least_bytes (int): gradients of fewer bytes travel as they are. Single calls always compress. Default: 16384.
        bucket_mb (float): most MiB of gradients that travel together. Default: 25.

    Returns:
        Quantized: the same compression with other options.

    Raises:
        ValueError: for an invalid value.

    Example:
        >>> hvd.Compression.int8, hvd.Compression.int4(feedback=False).feedback
        (Compression.int8, False)
    """

    def __init__(
        self, bits: int, feedback: bool | None = None, least_bytes: int = 16384, bucket_mb: float = 25.0
    ) -> None:  # fmt: skip
        if bits not in (4, 8):
            raise ValueError(f"compression in {bits!r} bits is not supported: use 8 or 4 [HVD208]")
        if isinstance(least_bytes, bool) or not isinstance(least_bytes, int) or least_bytes < 0:
            raise ValueError(f"compression: least_bytes={least_bytes!r} must be a whole number of at least 0 [HVD208]")
        if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not 0 < bucket_mb < math.inf:
            raise ValueError(f"compression: bucket_mb={bucket_mb!r} must be a number above 0 [HVD208]")
        self.bits, self.feedback, self.least_bytes, self.bucket_mb = bits, feedback, least_bytes, float(bucket_mb)
        self._kept: dict[tuple[str, int], tuple[list[int], Any]] = {}  # residuals of single calls

    def __call__(
        self, feedback: bool | None = None, least_bytes: int | None = None, bucket_mb: float | None = None
    ) -> Quantized:
        """Return a copy with other options."""
        return Quantized(
            self.bits,
            self.feedback if feedback is None else bool(feedback),
            self.least_bytes if least_bytes is None else least_bytes,
            self.bucket_mb if bucket_mb is None else bucket_mb,
        )

    def __repr__(self) -> str:
        return f"Compression.int{self.bits}"

    def __reduce__(self) -> Any:
        """Copies have the options, and begin with nothing kept."""
        return Quantized, (self.bits, self.feedback, self.least_bytes, self.bucket_mb)

    def refuse(self, op: int) -> None:
        """ValueError for an op whose result rounded values would not be."""
        if op not in (Average, Sum):
            raise ValueError(
                f"compression={self!r} needs op=hvd.Average or hvd.Sum: the {_core.op_name(op)} of rounded values is "
                "not the rounded result [HVD208]"
            )

    def residuals(self, name: str, number: int, counts: list[int]) -> Any:
        """Of single calls under this name, in a process set: memory of as many floats."""
        kept = self._kept.get((name, number))
        if kept is None or kept[0] != counts:
            kept = self._kept[name, number] = counts, ffi.new("float[]", max(sum(counts), 1))
        return kept[1]


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
        residual = compression.residuals(name, terms.process_set.process_set_id or 0, counts)
    members, at = [], 0
    for source, target, count in zip(sources, targets, counts):
        kept = 0 if residual is None else int(ffi.cast("uintptr_t", residual + at))
        members.append(Member(adapter.view(source).address, adapter.view(target).address, kept, count))
        at += count
    factor = terms.postscale / (terms.process_set.size() if terms.op == Average else 1)
    keep = [adapter.memory(each) for each in (*sources, *targets)], residual
    total = QuantizedSum(compression.bits, members, name, terms.process_set, keep, terms.prescale, factor)
    total.begin().wait()
    return [_as_before(adapter, target, view) for target, view in zip(targets, views)]


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


__all__ = ["Quantized", "check_call", "reduced"]
