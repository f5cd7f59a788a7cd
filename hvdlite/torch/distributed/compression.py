"""Comm hook of DistributedDataParallel that compresses gradients: a bucket is a chain of collectives.

Between hosts a bucket in int8 or int4 is a quantized sum (hvdlite/ops/quantized_sum.py), and its small gradients are
one more allreduce. What a hook starts goes on whenever a later hook runs, so chains overlap with backward; the end of
backward completes them, as it does every future that a hook has asked for (futures.py). Who waits for one chain of a
group goes on with all of them: each rank has begun them in one order, so one of those in the earliest stage ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from ...lifecycle.init import incarnations
from ...ops.arguments import Quantized
from ...ops.quantized_sum import Member, QuantizedSum
from ...process_sets.levels import why_plain
from ..compression import BF16Compressor, FP16Compressor, NoneCompressor
from .group import HvdProcessGroup
from .work import HvdWork, named

_TAKEN = (torch.float32, torch.float16, torch.bfloat16)
_NAMES = 4096  # after which the names of chains come again


def _as_it_is(group: Any, bucket: Any) -> Future[Any]:
    """As DDP has it without a hook, bit by bit: PyTorch's own hook divides, and DDP multiplies."""
    work = dist.all_reduce(bucket.buffer().mul_(1 / group.size()), group=group, async_op=True)
    return work.get_future().then(_first)  # type: ignore[union-attr]


def _first(future: Future[Any]) -> Any:
    return future.value()[0]


_OTHERS: dict[Any, Callable[..., Any]] = {
    NoneCompressor: _as_it_is,
    FP16Compressor: default_hooks.fp16_compress_hook,
    BF16Compressor: default_hooks.bf16_compress_hook,
}


class CompressionState:
    """What ``compress_hook`` keeps of one model: the compression, the group, and what rounding has lost so far.

    Residuals of int8 and int4 belong to parameters, so they survive that DistributedDataParallel builds its buckets
    anew. They are no part of a checkpoint: training goes on with zeros.

    Args:
        compression: ``hvd.Compression.int8``, ``int4``, ``fp16``, ``bf16`` or ``none``, the same on all ranks.
        process_group (ProcessGroup, optional): the group of the model. Default: the default group.
        scaler (GradScaler, optional): what multiplies the loss. Residuals follow its scale.

    Raises:
        ValueError: the compression is none of these.

    Example:
        >>> from hvdlite.torch.distributed import CompressionState, compress_hook
        >>> CompressionState(hvd.Compression.int8)
        CompressionState(Compression.int8)
    """

    def __init__(self, compression: Any, process_group: dist.ProcessGroup | None = None, scaler: Any = None) -> None:
        if not isinstance(compression, Quantized) and not any(compression is each for each in _OTHERS):
            raise ValueError(
                f"CompressionState takes hvd.Compression.int8, int4, fp16, bf16 or none, not {compression!r}: pass one "
                "of these, or use a comm hook of PyTorch [HVD208]"
            )
        self.compression, self.process_group, self.scaler = compression, process_group, scaler
        self._residuals = WeakTensorKeyDictionary()
        self._incarnation, self._unit = incarnations(), 1.0

    def __repr__(self) -> str:
        of = repr(self.compression) if isinstance(self.compression, Quantized) else self.compression.__name__
        return f"CompressionState({of})"

    def begin(self) -> None:
        """A backward pass begins: residuals are of this job, and in units of the scaled loss."""
        if self._incarnation != incarnations():
            self._incarnation = incarnations()
            self._residuals.clear()
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        if scale != self._unit and scale > 0:
            for each in self._residuals.values():
                each.mul_(scale / self._unit)
            self._unit = scale

    def residual(self, parameter: torch.Tensor) -> torch.Tensor:
        """What was lost of a parameter's gradients, in the order of its bucket's memory; zeros at first."""
        kept: torch.Tensor | None = self._residuals.get(parameter)
        if kept is None or kept.numel() != parameter.numel():
            kept = self._residuals[parameter] = torch.zeros(parameter.numel())
        return kept


def compress_hook(state: Any, bucket: Any) -> Any:
    """Average a bucket of DistributedDataParallel over the ranks in fewer bytes.

    int8 and int4 travel so between hosts only; on one host a bucket is averaged as without a hook. Gradients below the
    compression's ``least_bytes`` travel as they are, and so do dtypes other than float32, float16 and bfloat16. What
    the rounding of int8 and int4 has lost is added to the next gradient, unless ``feedback=False``. The ``timeout`` of
    the group does not limit int8 and int4; the limits of the job do.

    Args:
        state (CompressionState): the compression, and what it keeps.
        bucket (GradBucket): the gradients.

    Returns:
        Future: of the bucket's averaged gradients. At the latest the end of backward completes it.

    Raises:
        ValueError: the group is of another backend than ``hvdlite``.
        HvdMismatchError: in ``backward()``, if the ranks use different compressions.

    Example:
        >>> from hvdlite.torch.distributed import CompressionState, compress_hook
        >>> state = CompressionState(hvd.Compression.int8)
        >>> ddp.register_comm_hook(state, compress_hook)  # doctest: +SKIP
    """
    group: Any = dist.group.WORLD if state.process_group is None else state.process_group
    own = _OTHERS.get(state.compression)
    if own is not None:
        return own(group, bucket)
    if not isinstance(group, HvdProcessGroup):
        raise ValueError(
            f"compress_hook with {state.compression!r} needs a group of backend hvdlite, not {type(group).__name__}: "
            'call init_process_group("hvdlite"), and give CompressionState the group of the model [HVD208]'
        )
    if bucket.index() == 0:
        state.begin()
    buffer = bucket.buffer()
    if why_plain(group._set) is not None or buffer.dtype not in _TAKEN:
        return _as_it_is(group, bucket)
    return _reduced(state, group, bucket, buffer)


# DDP compares these with classes, not with their names.
compress_hook.__annotations__ = {"state": Any, "bucket": dist.GradBucket, "return": Future[torch.Tensor]}


class _Span(NamedTuple):
    """A gradient in the memory of its bucket. begin: in elements."""

    begin: int
    elements: int
    parameter: torch.Tensor


def _reduced(state: CompressionState, group: Any, bucket: Any, buffer: torch.Tensor) -> Future[Any]:
    least, width = state.compression.least_bytes, buffer.element_size()
    spans = [
        _Span((gradient.data_ptr() - buffer.data_ptr()) // width, gradient.numel(), parameter)
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters())
    ]
    large = [span for span in spans if span.elements and 4 * span.elements >= least]
    if not large:
        return _as_it_is(group, bucket)
    here = buffer.is_cpu and buffer.dtype == torch.float32 and buffer.is_contiguous()
    values = buffer if here else torch.empty(buffer.shape).copy_(buffer)
    work = _CompressedWork(state, group, values, buffer, large, [span for span in spans if span not in large])
    return work.get_future().then(_first)


class _Chains:
    """Quantized sums of one group under way. Threads of futures complete them, too: `turn` is for who steps one."""

    def __init__(self) -> None:
        self.turn, self.count = threading.RLock(), 0
        self.in_flight: list[QuantizedSum] = []

    def add(self, chain: QuantizedSum) -> None:
        """Its first request is sent, and that of each other one which needs no waiting."""
        chain.begin()
        self.in_flight.append(chain)
        self.go_on()

    def go_on(self) -> bool:
        """Without waiting; False: another thread is at it."""
        if not self.turn.acquire(blocking=False):
            return False
        try:
            self.in_flight[:] = [chain for chain in self.in_flight if not chain.done()]
        finally:
            self.turn.release()
        return True

    def complete(self, chain: QuantizedSum) -> None:
        """Wait until it is over."""
        with self.turn:
            while not chain.over():
                in_flight = [each for each in list(self.in_flight) if not each.done()]
                if in_flight:  # else it has ended just now
                    min(in_flight, key=lambda each: each.stage).step()
            self.go_on()


_chains_of: WeakKeyDictionary[Any, _Chains] = WeakKeyDictionary()


class _CompressedWork(HvdWork):
    """A bucket under way: its large gradients as a quantized sum, the small ones as one allreduce."""

    def __init__(
        self, state: CompressionState, group: Any, values: torch.Tensor, buffer: torch.Tensor, large: Sequence[_Span],
        small: Sequence[_Span]
    ) -> None:  # fmt: skip
        self._values, self._buffer, self._small = values, buffer, small
        self._rest: Any = None
        if small:
            self._packed = torch.cat([self._part(span) for span in small])
            self._rest = group.allreduce([self._packed], dist.ReduceOp.AVG)
        chains = self._chains = _chains_of.setdefault(group, _Chains())
        chains.count += 1
        name = f"compress_hook.{group.group_name}.{chains.count % _NAMES}"
        kept = [] if state.compression.feedback is False else [state.residual(span.parameter) for span in large]
        address = values.data_ptr()
        members = [
            Member(
                address + 4 * span.begin, address + 4 * span.begin, kept[at].data_ptr() if kept else 0, span.elements
            )
            for at, span in enumerate(large)
        ]
        self._chain = QuantizedSum(
            state.compression.bits, members, name, group._set, (values, kept), factor=1 / group.size()
        )
        super().__init__([], [buffer], None, group._text("compress_hook"), line=group._line)
        chains.add(self._chain)

    def _part(self, span: _Span) -> torch.Tensor:
        return self._values[span.begin : span.begin + span.elements]

    def _poll(self) -> bool:
        return self._chains.go_on() and self._chain.over() and (self._rest is None or self._rest.is_completed())

    def _complete(self, until: float | None, seconds: float | None) -> None:
        if self._ended:
            return
        self._chains.complete(self._chain)
        self._error = None if self._rest is None else self._rest.settle()
        try:
            self._chain.wait()
            if self._error is None:
                self._take()
        except Exception as error:
            self._error = named(error, self._text)
        self._ended = True

    def _take(self) -> None:
        at = 0
        for span in self._small:
            self._part(span).copy_(self._packed[at : at + span.elements])
            at += span.elements
        if self._values is not self._buffer:
            self._buffer.copy_(self._values)  # to a GPU: over when this returns, so on every stream
