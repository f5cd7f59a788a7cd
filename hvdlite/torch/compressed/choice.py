"""What may `compression=` be beside a class of `compress` and `decompress`, and which carrier is it?

A carrier knows the optimizer, which chooses it. So carriers are imported when one is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ops.quantized import Quantized

if TYPE_CHECKING:
    from ..optimizer.reducer import Exchange
    from .carrier import CompressedCarrier

OF_BUCKETS = (Quantized,)


def refuse(compression: Any, op: int) -> None:
    """ValueError for an op that it cannot compress."""
    if isinstance(compression, OF_BUCKETS):
        compression.refuse(op)


def carrier_of(compression: Any, exchange: Exchange) -> CompressedCarrier:
    """The carrier of an optimizer with one of OF_BUCKETS."""
    from .carrier import CompressedCarrier
    from .quantized import QuantizedCompressor

    return CompressedCarrier(exchange, QuantizedCompressor(compression))
