"""Compression of gradients: classes that make one smaller before it is sent, and whole again after.

A user's own compression is a subclass of `Compressor` (or anything with the same two functions), given to
`DistributedOptimizer(compression=...)` or `allreduce(compression=...)`. The ranks' compressed tensors are added up by
the core, so a form that cannot be added (top-k, say) does not fit here. `fp16` and `bf16` halve the bytes; the core
sums them in float32 and rounds once.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops.arguments import Compressor, NoneCompressor, Quantized
from .adapter import TorchAdapter

_ADAPTER = TorchAdapter()


class _Narrow(Compressor):
    """Floating-point tensors travel in 16 bits, others as they are.

    A cast reads its tensor. So a tensor that a collective would refuse is refused before the cast, with the same error:
    one without memory of its own, or one whose storage was resized.
    """

    @staticmethod
    def _as(dtype: torch.dtype, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        _ADAPTER.view(_ADAPTER.accept(tensor))
        return (tensor.to(dtype), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, tensor.dtype)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_Narrow):
    """Sends floating-point tensors as float16, and others as they are.

    float16 has 11 bits of precision and values up to 65504. The core sums in float32 and rounds once.

    Example:
        >>> hvd.allreduce(torch.tensor([0.1]), compression=hvd.Compression.fp16).dtype
        torch.float32
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _Narrow._as(torch.float16, tensor)


class BF16Compressor(_Narrow):
    """Sends floating-point tensors as bfloat16, and others as they are.

    bfloat16 has 8 bits of precision and the range of float32. The core sums in float32 and rounds once.

    Example:
        >>> hvd.allreduce(torch.tensor([1e38]), compression=hvd.Compression.bf16).isfinite().tolist()
        [True]
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _Narrow._as(torch.bfloat16, tensor)


class Compression:
    """The compressors that ``compression=`` takes, beside a ``Compressor`` of your own.

    * ``none``: tensors travel as they are.
    * ``fp16``: floating-point tensors travel as float16, which has 11 bits of precision and values up to 65504.
    * ``bf16``: floating-point tensors travel as bfloat16, which has 8 bits of precision and the range of float32.
    * ``int8``, ``int4``: between hosts float tensors travel as integers with a scale for each 256 elements.

    Example:
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]), compression=hvd.Compression.bf16).tolist()
        [1.0, 2.0]
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Quantized(8)
    int4 = Quantized(4)


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
