"""Compression of gradients as in hvdlite.torch: 16 bits instead of 32, fp16 or bf16.

A user's own compression is a subclass of `Compressor` with two static functions. They are called eagerly and while a
function is traced, so they are made of TensorFlow's operations.

The core sums 16-bit floats in float32 and rounds once, so what is lost is lost in the cast, once on each rank, and
not in the sum.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..ops.arguments import Compressor, NoneCompressor, Quantized


class _Narrow(Compressor):
    """Floating-point tensors travel in 16 bits, others as they are."""

    dtype: tf.DType = tf.float16

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor that travels, and its own dtype."""
        tensor = tf.convert_to_tensor(tensor)
        return (tf.cast(tensor, cls.dtype) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in its own dtype again."""
        return tf.cast(tensor, ctx)


class FP16Compressor(_Narrow):
    """Send floating-point tensors as float16: 11 bits of precision, values up to 65504.

    The core adds in float32 and rounds once, so the loss is that of one cast on each rank and one of the result. Other
    dtypes travel as they are.

    Example:
        >>> hvd.allreduce(np.float32([1, 2]), compression=hvd.Compression.fp16).numpy().tolist()
        [1.0, 2.0]
    """


class BF16Compressor(_Narrow):
    """Send floating-point tensors as bfloat16: 8 bits of precision, the range of float32. Otherwise as ``fp16``.

    Example:
        >>> hvd.allreduce(np.float32([1.001]), compression=hvd.Compression.bf16).numpy().tolist()
        [1.0]
    """

    dtype = tf.bfloat16


class Compression:
    """The compressors for ``compression=``: ``none``, ``fp16`` and ``bf16``, and ``int8`` and ``int4``.

    ``int8`` and ``int4`` round float tensors between hosts only, to integers with a scale for each 256 elements. For
    one of your own, write a subclass of ``hvd.Compressor``. Its functions run eagerly and in graphs, so they use
    TensorFlow operations.

    Example:
        >>> hvd.allreduce(np.float32([1, 2]), compression=hvd.Compression.bf16).numpy().tolist()
        [1.0, 2.0]
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Quantized(8)
    int4 = Quantized(4)


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
