"""Compressors for arrays of JAX, inside jit and outside: 16-bit floats.

Inside jit the casts are a part of the compiled program, and XLA fuses them with what is around. Compression to 8 or 4
bits, which rounds between hosts, is not offered here: it needs a residual that outlives the program.

A compressor is a class with `compress` and `decompress`, as for the other frameworks.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..ops.arguments import Compressor, NoneCompressor


class _Cast(Compressor):
    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The array that travels, and its own dtype."""
        wide = jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype.itemsize > 2
        return (tensor.astype(cls.dtype) if wide else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """The array in its own dtype again."""
        return tensor.astype(ctx)


class FP16Compressor(_Cast):
    """Sends float32 and float64 arrays as float16, and others as they are.

    Example:
        >>> hvd.allreduce(jnp.float32(0.1), compression=hvd.Compression.fp16).dtype
        dtype('float32')
    """

    dtype = jnp.float16


class BF16Compressor(_Cast):
    """Sends float32 and float64 arrays as bfloat16, and others as they are.

    Example:
        >>> hvd.allreduce(jnp.float32(1e38), compression=hvd.Compression.bf16).dtype
        dtype('float32')
    """

    dtype = jnp.bfloat16


class Compression:
    """The compressors that ``compression=`` takes, beside a ``Compressor`` of your own.

    * ``none``: arrays travel as they are.
    * ``fp16``: float32 and float64 arrays travel as float16, which has 11 bits of precision and values up to 65504.
    * ``bf16``: they travel as bfloat16, which has 8 bits of precision and the range of float32.

    Example:
        >>> hvd.allreduce(jnp.array([1.0, 2.0]), compression=hvd.Compression.fp16).tolist()
        [1.0, 2.0]
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
